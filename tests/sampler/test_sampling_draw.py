"""The draw: exact supports, the right distribution, the log-prob of what was drawn, no influence of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.sampler.sampling import RowSampling, _sorted_draw, draw, kept_tokens, row_key


def rows(**columns):
    """RowSampling from lists."""
    columns = columns or {"temperature": 1.0}
    n = max(len(np.atleast_1d(c)) for c in columns.values())
    base = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, limit=0)
    dtypes = dict(temperature=np.float32, top_k=np.int32, top_p=np.float32, min_p=np.float32, limit=np.int32)
    return RowSampling(
        **{k: np.broadcast_to(np.asarray(columns.get(k, v), dtypes[k]), (n,)) for k, v in base.items()}
    )


def keys(n, seed=0):
    return np.stack([row_key(seed, f"prompt {i}", 0) for i in range(n)])


draw_jit = jax.jit(draw, static_argnames=("truncate", "raw"))


def test_s01_logprobs_are_of_the_tempered_distribution():
    logits = jnp.tile(jnp.array([[2.0, 1.0, 0.0]]), (64, 1))
    out = draw_jit(
        logits, keys(64), np.arange(64, dtype=np.int32), RowSampling.uniform(64, temperature=0.5), raw=True
    )
    processed = np.array([-0.14293, -2.14293, -4.14293])
    raw = np.array([-0.40761, -1.40761, -2.40761])
    assert len(set(np.asarray(out.token))) >= 2
    np.testing.assert_allclose(out.logprob, processed[out.token], atol=2e-5)
    np.testing.assert_allclose(out.raw_logprob, raw[out.token], atol=2e-5)


def test_s01_greedy_returns_finite_raw_logprobs():
    out = draw_jit(
        jnp.array([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]]),
        keys(2),
        np.zeros(2, np.int32),
        rows(temperature=[0, 0]),
    )
    assert out.token.tolist() == [0, 2]
    np.testing.assert_allclose(out.logprob, [-0.40761, -np.log1p(2 * np.exp(-3.0))], atol=2e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_s03_nucleus_keeps_the_token_that_crosses_the_threshold(order):
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    expected = {0.6: {0, 1}, 0.75: {0, 1}, 0.5: {0}, 1.0: {0, 1, 2, 3}, 1e-9: {0}}
    logits = jnp.tile(jnp.log(jnp.array(probs[order], jnp.float32)), (5, 1))
    kept = kept_tokens(logits, rows(top_p=list(expected)))
    for row, want in zip(np.asarray(kept), expected.values(), strict=True):
        assert {order[i] for i in np.flatnonzero(row)} == want


@pytest.mark.parametrize(
    "parameters, want",
    [
        (dict(top_k=1), [0]),
        (dict(top_k=3), [0, 1, 2]),
        (dict(top_k=99), [0, 1, 2, 3]),
        (dict(top_k=2, top_p=0.7), [0, 1]),  # top-p of what top-k left: 0.5 / 0.75 < 0.7
        (dict(top_k=2, top_p=0.6), [0]),
        (dict(min_p=0.5), [0, 1]),
        (dict(min_p=0.51), [0]),
        (dict(min_p=1.0), [0]),
        (dict(temperature=0.5, top_p=0.7), [0]),
        (dict(top_p=0.8), [0, 1, 2]),  # a tie at the threshold goes to the lower id
        (dict(temperature=0.0, top_k=1), [0, 1, 2, 3]),  # greedy rows are not truncated
    ],
)
def test_supports(parameters, want):
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    assert np.flatnonzero(kept_tokens(logits, rows(**parameters))[0]).tolist() == want


def test_kept_tokens_of_equal_logits_count_like_a_stable_sort():
    assert np.flatnonzero(kept_tokens(jnp.zeros((1, 8)), rows(top_p=0.5))[0]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(kept_tokens(jnp.zeros((1, 8)), rows(top_k=3))[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "parameters",
    [
        dict(),
        dict(temperature=0.6),
        dict(temperature=1.5, top_p=0.8),
        dict(top_k=7),
        dict(min_p=0.05, temperature=1.3),
        dict(temperature=30.0, top_p=0.95),  # nearly flat: the support is longer than the short list
    ],
)
def test_draws_follow_the_distribution_and_report_its_logprobs(parameters):
    V, n = 300, 20_000
    logits = jax.random.normal(jax.random.key(3), (1, V)) * 2.5
    forbidden = np.zeros((1, V), bool)
    forbidden[0, [int(jnp.argmax(logits)), 17]] = True
    p = rows(**parameters)
    z = jnp.where(forbidden, -jnp.inf, logits / p.temperature)
    z = jnp.where(kept_tokens(logits, p, forbidden), z, -jnp.inf)
    expected = np.asarray(jax.nn.softmax(z[0].astype(jnp.float32)), np.float64)

    everyone = jax.tree.map(lambda x: np.broadcast_to(x, (n,)), p)
    out = draw_jit(
        jnp.broadcast_to(logits, (n, V)),
        np.broadcast_to(row_key(1, "p", 0), (n, 2)),
        np.arange(n, dtype=np.int32),
        everyone,
        forbidden=forbidden,
    )
    np.testing.assert_allclose(out.logprob, np.log(expected[out.token]), atol=2e-5)
    counts = np.bincount(np.asarray(out.token), minlength=V)
    assert counts[expected == 0].sum() == 0
    expected /= expected.sum()
    common = expected * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    theory = np.append(expected[common], expected[~common].sum()) * n
    observed, theory = observed[theory > 0], theory[theory > 0]
    # Over many seeds the p-values are uniform; this seed and threshold leave a wrong draw no chance.
    assert stats.chisquare(observed, theory).pvalue > 1e-4


def test_a_row_is_drawn_the_same_whatever_its_neighbours_ask_for():
    V = 1000
    logits = (
        jax.random.normal(jax.random.key(0), (6, V)) * jnp.array([3.0, 3.0, 3.0, 3.0, 0.01, 0.01])[:, None]
    )
    # Rows 4 and 5 are nearly flat: with top-p they need the whole vocabulary sorted.
    wild = rows(temperature=[1, 0, 0.7, 1, 1, 1], top_k=[0, 0, 0, 5, 0, 0], top_p=[1, 1, 0.9, 1, 0.99, 0.5])
    together = draw_jit(logits, keys(6), np.arange(6, dtype=np.int32), wild)
    for calm in ([4, 5], [2, 3, 4, 5]):
        tame = RowSampling(
            temperature=np.where(np.isin(np.arange(6), calm), 1, wild.temperature).astype(np.float32),
            top_k=np.where(np.isin(np.arange(6), calm), 0, wild.top_k).astype(np.int32),
            top_p=np.where(np.isin(np.arange(6), calm), 1, wild.top_p).astype(np.float32),
            min_p=wild.min_p,
            limit=wild.limit,
        )
        alone = draw_jit(logits, keys(6), np.arange(6, dtype=np.int32), tame)
        others = [i for i in range(6) if i not in calm]
        assert np.array_equal(together.token[np.array(others)], alone.token[np.array(others)])
        assert np.array_equal(together.logprob[np.array(others)], alone.logprob[np.array(others)])


@pytest.mark.slow
def test_a_row_is_drawn_the_same_by_the_program_that_its_neighbours_need():
    """Limits, biases, raw or listed log-probs of one row are other programs for all of them."""
    n, V = 64, 1000
    logits = jax.random.normal(jax.random.key(0), (n, V)) * 3
    calm = rows(temperature=[[0.0, 0.7][i % 2] for i in range(n)])
    nobody = np.zeros((n, V), bool)
    nobody[0, :3] = True  # row 0 is the neighbour
    bias = nobody * np.float32(5)
    program = jax.jit(draw, static_argnames=("truncate", "raw", "top"))
    args = (logits, keys(n), np.arange(n, dtype=np.int32), calm)
    alone = program(*args, truncate=False)
    for wish in (
        {"truncate": True},
        {"raw": True},
        {"top": 3},
        {"forbidden": nobody},
        {"bias": bias},
        {"forbidden": nobody, "bias": bias, "top": 5, "truncate": True},
    ):
        out = program(*args, **{"truncate": False, **wish})
        assert np.array_equal(out.token[1:], alone.token[1:]), wish
        assert np.array_equal(out.logprob[1:], alone.logprob[1:]), wish


def test_short_and_long_candidate_lists_agree_bit_for_bit():
    z = jax.random.normal(jax.random.key(5), (8, 700)) * 4
    p = rows(
        top_p=[0.5, 0.9, 0.99, 1, 1, 1, 0.9, 1], top_k=[0, 0, 0, 1, 200, 256, 50, 0], min_p=[0] * 7 + [0.01]
    )
    total = jnp.sum(jnp.exp(z - z.max(1, keepdims=True)), axis=1)
    u = jnp.linspace(0.0, 0.999999, 8)
    short, long = (jax.jit(_sorted_draw, static_argnums=4)(z, total, u, p, n) for n in (256, 700))
    assert bool(jnp.all(short[2])) and bool(jnp.all(long[2]))
    assert np.array_equal(short[0], long[0]) and np.array_equal(short[1], long[1])


def test_a_forbidden_or_impossible_token_is_never_drawn():
    V, n = 257, 4096
    logits = np.full((1, V), -200.0, np.float32)
    logits[0, [5, 256]] = [0.0, 1.0]
    forbidden = np.zeros((1, V), bool)
    forbidden[0, 256] = True
    out = draw_jit(
        jnp.broadcast_to(jnp.array(logits), (n, V)),
        keys(n),
        np.zeros(n, np.int32),
        RowSampling.uniform(n),
        forbidden=forbidden,
    )
    assert set(np.asarray(out.token)) == {5}
    np.testing.assert_allclose(out.logprob, 0.0, atol=1e-6)


def test_row_key_is_stable_and_separates_seed_uid_and_index():
    assert row_key(0, "a", 0).tolist() == row_key(0, "a", 0).tolist()
    different = {tuple(row_key(s, u, i)) for s in (0, 1) for u in ("a", "b", "0") for i in range(8)}
    assert len(different) == 48
    assert row_key(7, "visit-3", 2).tolist() == [1710761482, 3752724492]
