"""The support that the sampler records: it is what was drawn from, and the limit on it limits the draw itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.sampler.sampling import RowSampling, draw, kept_tokens, row_key

kept_jit = jax.jit(kept_tokens)
draw_jit = jax.jit(draw, static_argnames=("truncate", "raw", "top", "support"))


def rows(n, **columns):
    base = RowSampling.uniform(n)
    return base.replace(**{k: np.asarray(v, getattr(base, k).dtype) for k, v in columns.items()})


def keys(n):
    return np.stack([row_key(0, f"prompt {i}", 0) for i in range(n)])


MIXED = dict(
    temperature=[1.0, 0.7, 1.3, 1.0, 0.0, 1.0, 1.0],
    top_p=[0.9, 0.5, 1.0, 1.0, 0.5, 1.0, 0.999],
    top_k=[0, 8, 5, 0, 3, 0, 0],
    min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0],
)


@pytest.mark.parametrize(("V", "limit"), [(300, 40), (700, 400), (20, 20)])
def test_the_recorded_tokens_are_the_distribution_that_was_drawn_from(V, limit):
    p = rows(7, **MIXED)
    q = p.replace(limit=np.full(7, limit, np.int32))
    logits = jax.random.normal(jax.random.key(2), (7, V)) * jnp.array([3, 3, 3, 3, 3, 3, 0.05])[:, None]
    forbidden = jnp.zeros((7, V), bool).at[:, 5].set(True)
    position = np.arange(7, dtype=np.int32)
    out = draw_jit(logits, keys(7), position, q, forbidden=forbidden, support=limit)
    kept = np.asarray(kept_jit(logits, p, forbidden))
    limited = np.asarray(kept_jit(logits, q, forbidden))
    ids = np.asarray(out.support_ids)
    assert ids.shape == (7, limit) and ids.dtype == np.int32
    for i, truncated in enumerate(p.truncated):
        listed = ids[i][ids[i] >= 0]
        if not truncated:  # greedy rows and rows without truncation: the vocabulary
            assert not listed.size and not out.support_cut[i]
            continue
        size = len(listed)
        assert np.all(ids[i, size:] == -1) and len(set(listed)) == size == min(kept[i].sum(), limit)
        assert set(listed) == set(np.flatnonzero(limited[i])) and 5 not in listed
        assert bool(out.support_cut[i]) == (kept[i].sum() > limit)
        assert np.all(np.diff(np.asarray(logits)[i, listed]) <= 0)  # best first
        assert int(out.token[i]) in listed
        logp = np.asarray(logits, np.float64)[i, listed] / p.temperature[i]
        logp -= np.log(np.exp(logp).sum())
        np.testing.assert_allclose(out.logprob[i], logp[list(listed).index(int(out.token[i]))], atol=5e-6)
    # Recording changes no draw where the limit does not act.
    free = draw_jit(logits, keys(7), position, p, forbidden=forbidden)
    same = ~np.asarray(out.support_cut)
    assert free.support_ids is free.support_cut is None
    assert np.array_equal(np.asarray(free.token)[same], np.asarray(out.token)[same])
    assert np.array_equal(np.asarray(free.logprob)[same], np.asarray(out.logprob)[same])
    assert bool(out.support_cut[6]) == (V > limit)  # nearly flat: most of the vocabulary is kept


def test_draws_follow_the_limited_distribution():
    n, V, limit = 20_000, 50, 3
    logits = jnp.broadcast_to(jnp.log(jnp.arange(1.0, V + 1)), (n, V))
    out = draw_jit(
        logits,
        np.broadcast_to(row_key(1, "p", 0), (n, 2)),
        np.arange(n, dtype=np.int32),
        RowSampling.uniform(n, top_p=0.9, limit=limit),
        support=limit,
    )
    assert bool(jnp.all(out.support_cut)) and np.all(np.asarray(out.support_ids) == [49, 48, 47])
    counts = np.bincount(np.asarray(out.token), minlength=V)
    assert counts[:47].sum() == 0
    share = np.array([48, 49, 50]) / 147
    assert stats.chisquare(counts[47:], share * n).pvalue > 1e-4
    np.testing.assert_allclose(out.logprob, np.log(share)[np.asarray(out.token) - 47], atol=5e-6)


def test_a_share_of_a_long_top_k_is_of_all_of_it():
    """top_k longer than the short sorted list: its mass is not that of the list."""
    logits = jax.random.normal(jax.random.key(0), (1, 1000)) * 0.1
    p = RowSampling.uniform(1, top_k=300, top_p=0.7)
    n = 400
    wide = jax.tree.map(lambda x: np.broadcast_to(x, (n,)), p)
    position = np.arange(n, dtype=np.int32)
    out = draw_jit(jnp.broadcast_to(logits, (n, 1000)), np.broadcast_to(keys(1), (n, 2)), position, wide)
    kept = np.asarray(kept_jit(logits, p))[0]
    mass = np.log(np.exp(np.asarray(logits, np.float64)[0, kept]).sum())
    assert 190 < kept.sum() < 220
    np.testing.assert_allclose(out.logprob, np.asarray(logits)[0, np.asarray(out.token)] - mass, atol=2e-5)


def test_each_row_has_its_own_limit():
    """What a neighbour asks for changes neither what a row draws nor what it lists."""
    logits = jax.random.normal(jax.random.key(3), (4, 300))
    position = np.arange(4, dtype=np.int32)
    limits = [3, 0, 40, 300]
    mixed = rows(4, top_p=[0.9] * 4, limit=limits)
    out = draw_jit(logits, keys(4), position, mixed, support=300)
    for i, limit in enumerate(limits):
        alone = rows(4, top_p=[0.9] * 4, limit=[limit] * 4)
        own = draw_jit(logits, keys(4), position, alone, support=limit)
        assert int(out.token[i]) == int(own.token[i]) and float(out.logprob[i]) == float(own.logprob[i])
        if limit:
            assert np.array_equal(out.support_ids[i, :limit], own.support_ids[i])
        assert np.all(np.asarray(out.support_ids)[i, limit:] == -1)


# ------------------------------------------------------------------------------------------- the sampler


@pytest.fixture(scope="module")
def model():
    params = init_params(TINY, jax.random.key(0))
    return {**params, "embed": params["embed"] * 6}


def prompts(lengths=(1, 5, 9, 17), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 128, n).astype(np.int32) for n in lengths]


SAMPLING = SamplingParams(
    max_tokens=30, n=3, temperature=0.9, top_p=0.8, record_support=8, seed=2, stop_ids=()
)


@pytest.mark.slow
def test_completions_bring_their_supports_through_preemption(model):
    sampler = Sampler(TINY, slots=4, page_size=8)
    outs = sampler.generate(model, prompts(), dataclasses.replace(SAMPLING, greedy_too=True))
    cut = 0
    for c in outs:
        N = len(c.tokens)
        assert c.support_ids.shape == (N, 8) and c.support_ids.dtype == np.int32
        assert c.support_cut.shape == (N,) and c.support_cut.dtype == bool
        if c.index == 3:
            assert (c.support_ids == -1).all() and not c.support_cut.any()  # greedy: nothing is drawn
            continue
        assert (c.support_ids == c.tokens[:, None]).sum(axis=1).tolist() == [1] * N
        assert ((c.support_ids >= 0).all(axis=1) | ~c.support_cut).all()
        cut += c.support_cut.sum()
    assert cut  # the limit has acted somewhere
    squeezed = Sampler(TINY, slots=4, page_size=8, pages=11, steps_per_dispatch=5)
    again = squeezed.generate(model, prompts(), dataclasses.replace(SAMPLING, greedy_too=True))
    assert squeezed.stats.preemptions > 0
    for a, b in zip(again, outs, strict=True):
        assert np.array_equal(a.support_ids, b.support_ids) and np.array_equal(a.support_cut, b.support_cut)
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)


def test_nothing_is_recorded_where_nothing_is_truncated_or_asked_for(model):
    sampler = Sampler(TINY, slots=4, page_size=8)
    for changes in ({"record_support": 0}, {"top_p": 1.0}, {"temperature": 0.0, "n": 1}):
        (c, *_) = sampler.generate(model, prompts((4,)), dataclasses.replace(SAMPLING, **changes))
        assert c.support_ids is None and c.support_cut is None


def test_the_list_is_no_longer_than_it_can_be():
    width = lambda **changes: dataclasses.replace(SAMPLING, **changes).support_width(100)  # noqa: E731
    assert width() == 8 and width(top_k=5) == 5 and width(record_support=500) == 100
    assert width(temperature=0.0) == width(top_p=1.0) == width(record_support=0) == 0
    for wrong in (-1, 1.5, True, 2**31):
        with pytest.raises(InputError, match="record_support must be 0 .off. or a positive count"):
            dataclasses.replace(SAMPLING, record_support=wrong)


def test_what_could_not_be_drawn_is_recorded(model):
    """Stop ids before min_tokens and suppressed ids, also of a row that was preempted; nothing for a greedy answer."""
    changes = {"top_p": 1.0, "min_tokens": 3, "stop_ids": (4, 6), "suppress_ids": (9,), "greedy_too": True}
    sampling = dataclasses.replace(SAMPLING, **changes)
    sampler = Sampler(TINY, slots=4, page_size=8)
    outs = sampler.generate(model, prompts((4, 7)), sampling)
    for c in outs:
        assert c.support_cut is None
        if c.index == 3:
            assert c.support_ids is None
            continue
        assert c.support_ids.shape == (len(c.tokens), 3) and len(c.tokens) >= 3
        assert (c.support_ids[:3] == [-6, -8, -11]).all() and (c.support_ids[3:] == [-11, -1, -1]).all()
    squeezed = Sampler(TINY, slots=4, page_size=8, pages=8, steps_per_dispatch=5)
    for a, b in zip(squeezed.generate(model, prompts((4, 7)), sampling), outs, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.support_ids, b.support_ids)
    (c, *_) = sampler.generate(model, prompts((4,)), dataclasses.replace(sampling, record_support=0))
    assert c.support_ids is None
