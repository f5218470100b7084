"""The surrogates beyond PPO's clip as stages: values by hand, edge cases, arguments, recipes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes, testing

MASK = np.array([[0, 1, 1, 1], [0, 1, 1, 0]], bool)
ADVANTAGE = np.array([[0, 1.0, 1.0, 1.0], [0, -1.0, -1.0, 0]])


def batch(mask=MASK, **fields):
    fields = {
        "advantage": ADVANTAGE,
        "logprob_behavior": np.full(mask.shape, -1.0),
        "logprob_proximal": np.full(mask.shape, -1.0),
        "version": 3,
        "learner_version": 3,
        **fields,
    }
    return jrl.TokenBatch.from_rows(np.zeros(mask.shape, np.int32), mask, **fields)


def chain(surrogate, ratio=None):
    ratio = jrl.token_ratio() if ratio is None else ratio
    return jrl.chain(jrl.given_advantage(), jrl.normalize_by_constant(1.0), ratio, surrogate)


def value_and_slope(objective, logprob, rows, **outputs):
    def total(logprob):
        output = jrl.PolicyOutput(logprob=logprob, **outputs)
        return jrl.loss(objective, output, rows)

    (value, metrics), slope = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logprob))
    return float(value), np.asarray(slope), {k: float(m.value) for k, m in metrics.items()}


# Each surrogate that reads nothing but ratios, advantages and what `batch` holds.
PLAIN = [
    jrl.cispo_surrogate(high=2.0, low=0.5),
    jrl.soft_surrogate(),
    jrl.geometric_surrogate(),
    jrl.lag_clip_surrogate(),
    jrl.quadratic_surrogate(beta=0.1),
    jrl.vespo_surrogate(),
    jrl.divergence_surrogate("tv"),
    jrl.divergence_surrogate("kl"),
    jrl.covariance_surrogate("kl", fraction=0.5),
    jrl.covariance_surrogate("clip", fraction=0.5, cov_low=0.0),
]
EACH = pytest.mark.parametrize("surrogate", PLAIN, ids=lambda s: str(s.info).partition(",")[0])


@EACH
def test_extreme_log_ratios_are_finite(surrogate):
    far = np.array([[0, 800.0, -800.0, 0], [0, 800.0, -800.0, 0]])
    value, slope, metrics = value_and_slope(chain(surrogate), -1.0 + far, batch())
    assert np.isfinite(value) and np.all(np.isfinite(slope)) and np.all(np.isfinite(list(metrics.values())))
    assert np.all(slope[~MASK] == 0)


@EACH
def test_a_batch_that_trains_nothing_gives_zero(surrogate):
    value, slope, metrics = value_and_slope(
        chain(surrogate), np.full(MASK.shape, np.nan), batch(np.zeros_like(MASK))
    )
    assert value == 0 and np.all(slope == 0) and np.all(np.isfinite(list(metrics.values())))


@EACH
def test_without_a_reward_there_is_no_policy_gradient(surrogate):
    """Groups of one, of equal rewards and of no reward at all have advantage 0."""
    objective = jrl.chain(jrl.group_advantage(), jrl.normalize_by_token(), jrl.token_ratio(), surrogate)
    rows = jrl.TokenBatch.from_rows(
        np.zeros((4, 4), np.int32),
        np.ones((4, 4)),
        group=[0, 0, 1, 2],
        reward=[0.5, 0.5, 1.0, np.nan],
        logprob_behavior=np.full((4, 4), -1.0),
        logprob_proximal=np.full((4, 4), -1.0),
        version=0,
    )
    value, slope, _ = value_and_slope(objective, np.full((4, 4), -1.0), rows)
    assert value == 0 and np.all(slope == 0)


def test_cispo_by_hand():
    logprob = np.log([[1, 0.9, 0.2, 0.1], [1, 0.9, 0.1, 1]])
    behavior = np.log([[1, 0.3, 0.2, 0.4], [1, 0.3, 0.4, 1]])
    objective = chain(jrl.cispo_surrogate(high=2.0, low=0.5))
    value, slope, metrics = value_and_slope(objective, logprob, batch(logprob_behavior=behavior))
    weights = np.array([[0, 2.0, 1.0, 0.5], [0, 2.0, 0.5, 0]])
    np.testing.assert_allclose(slope, -weights * ADVANTAGE, rtol=1e-6)
    np.testing.assert_allclose(value, -np.sum(weights * ADVANTAGE * logprob), rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction_high"], 2 / 5)
    np.testing.assert_allclose(metrics["clip_fraction_low"], 2 / 5)


def test_bounds_tighten_with_age():
    """Ratio 1.15: free at age 0 with 0.2, cut at age 1 with 0.1."""
    version = np.array([[0, 3, 2, 1], [0, 3, 3, 0]])
    rows = batch(version=version)
    logprob = np.full(MASK.shape, -1.0 + np.log(1.15))
    stage = jrl.lag_clip_surrogate(low=0.2, high=0.2, decay=0.5, floor=0.01)
    _, slope, metrics = value_and_slope(chain(stage), logprob, rows)
    np.testing.assert_allclose(slope, [[0, -1.15, 0, 0], [0, 1.15, 1.15, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_bound"], (0.2 + 0.1 + 0.05 + 0.2 + 0.2) / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["age"], 3 / 5, rtol=1e-6)
    plain = value_and_slope(chain(jrl.clip_surrogate()), logprob, rows)
    same = value_and_slope(chain(jrl.lag_clip_surrogate(decay=1.0)), logprob, rows)
    assert plain[0] == same[0] and np.array_equal(plain[1], same[1])


def test_tokens_of_unknown_age():
    stage = jrl.lag_clip_surrogate(low=0.2, high=0.2, floor=0.05)
    with pytest.raises(ValueError, match="lag_clip_surrogate reads batch.version.* on 5 trained tokens"):
        chain(stage).prepare(batch(version=-1))
    prepared, _ = jax.jit(chain(stage).prepare)(batch(version=-1))  # cannot be told while tracing
    output = jrl.PolicyOutput(logprob=jnp.full(MASK.shape, -0.9))
    result = jrl.transforms.evaluate(chain(stage), output, prepared)
    np.testing.assert_allclose(result.metrics["clip_bound"].value, 0.05, rtol=1e-6)


def test_divergence_masks_moves_of_probability_not_of_ratio():
    """0.001 -> 0.004 is a ratio of 4 and moves next to nothing; 0.5 -> 0.8 is a ratio of 1.6 and moves 0.3."""
    logprob = np.log([[1, 0.004, 0.8, 0.5], [1, 0.2, 0.8, 1]])
    behavior = np.log([[1, 0.001, 0.5, 0.8], [1, 0.5, 0.5, 1]])
    objective = chain(jrl.divergence_surrogate("tv", low=0.2, high=0.2, cap=3.0))
    _, slope, metrics = value_and_slope(objective, logprob, batch(logprob_behavior=behavior))
    # Kept: the rare token (weight capped at 3), a fall of a good one, a rise of a bad one.
    np.testing.assert_allclose(slope, [[0, -3.0, 0, -0.5 / 0.8], [0, 0, 1.6, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], 2 / 5)


def test_divergence_thresholds_default_by_kind():
    def limits(kind):
        slopes = []
        for p in (0.6, 0.69, 0.75):  # from 0.5: TV 0.1, 0.19, 0.25; KL 0.020, 0.078, 0.144
            logprob = np.log(np.full(MASK.shape, p))
            rows = batch(logprob_behavior=np.log(np.full(MASK.shape, 0.5)))
            slopes.append(
                bool(value_and_slope(chain(jrl.divergence_surrogate(kind)), logprob, rows)[1][0, 1])
            )
        return slopes

    assert limits("tv") == [True, True, False]
    assert limits("kl") == [True, False, False]


def test_lists_see_what_the_sampled_token_does_not():
    """The sampled token stays near its probability; the rest of the distribution has moved."""
    lists = {
        "topk_ids": jnp.zeros((*MASK.shape, 2), jnp.int32),
        "topk_logprob_behavior": jnp.log(jnp.full((*MASK.shape, 2), 0.4)),
    }
    rows = batch(logprob_behavior=np.log(np.full(MASK.shape, 0.1)), **lists)
    logprob = np.log(np.full(MASK.shape, 0.11))
    current = jnp.log(jnp.broadcast_to(jnp.array([0.8, 0.09]), (*MASK.shape, 2)))
    binary = value_and_slope(chain(jrl.divergence_surrogate("tv")), logprob, rows, topk_logprob=current)
    listed = value_and_slope(chain(jrl.divergence_surrogate("topk_tv")), logprob, rows, topk_logprob=current)
    assert binary[2]["clip_fraction"] == 0 and listed[2]["clip_fraction"] == pytest.approx(3 / 5)
    np.testing.assert_allclose(listed[2]["divergence"], 0.4, rtol=1e-5)


def test_lists_of_another_length_are_told():
    lists = {
        "topk_ids": jnp.zeros((*MASK.shape, 2), jnp.int32),
        "topk_logprob_behavior": jnp.zeros((*MASK.shape, 2)),
    }
    objective = chain(jrl.divergence_surrogate("topk_kl"))
    with pytest.raises(ValueError, match="topk_logprob has the shape"):
        value_and_slope(
            objective,
            np.full(MASK.shape, -1.0),
            batch(**lists),
            topk_logprob=jnp.zeros((*MASK.shape, 3)),
        )
    with pytest.raises(ValueError, match="loss.topk_logprob, which is None"):
        value_and_slope(objective, np.full(MASK.shape, -1.0), batch(**lists))


def test_needs_name_the_length_of_the_list():
    found = jrl.transforms.needs(jrl.dppo(kind="topk_kl", anchor="proximal", k=7))
    assert {"batch.topk_ids(k=7)", "batch.topk_logprob_proximal", "loss.topk_logprob"} <= found
    assert not any("topk" in need for need in jrl.transforms.needs(jrl.dppo()))


def test_kl_cov_pulls_the_tokens_of_largest_covariance():
    proximal = np.array([[0, -1.0, -2.0, -3.0], [0, -1.0, -6.0, 0]])
    rows = batch(logprob_behavior=proximal, logprob_proximal=proximal)
    # A - mean A = ±0.8, ∓1.2; log π - mean = 1.6, 0.6, -0.4 | 1.6, -3.4: covariances 1.28 0.48 -0.32 | -1.92 4.08
    moved = proximal + 0.5
    objective = chain(jrl.covariance_surrogate("kl", fraction=0.4, coef=10.0))
    _, slope, metrics = value_and_slope(objective, moved, rows)
    plain = -ADVANTAGE * np.exp(0.5)
    pull = np.array([[0, 10.0, 0, 0], [0, 0, 10.0, 0]])  # 2 of 5
    np.testing.assert_allclose(slope, plain + pull, rtol=1e-5)
    np.testing.assert_allclose(metrics["covariance_picked"], 2 / 5)
    # On the first update |log ratio| has no slope.
    np.testing.assert_allclose(value_and_slope(objective, proximal, rows)[1], -ADVANTAGE)


def test_clip_cov_drops_tokens_inside_the_band():
    proximal = np.array([[0, -1.0, -2.0, -3.0], [0, -1.0, -6.0, 0]])
    rows = batch(logprob_behavior=proximal, logprob_proximal=proximal)
    objective = chain(jrl.covariance_surrogate("clip", fraction=1.0, cov_low=0.4, cov_high=2.0))
    _, slope, _ = value_and_slope(objective, proximal, rows)
    np.testing.assert_allclose(slope, [[0, 0, 0, -1.0], [0, 1.0, 1.0, 0]])
    one = chain(jrl.covariance_surrogate("clip", fraction=0.0, cov_low=0.4, cov_high=2.0))
    assert np.sum(value_and_slope(one, proximal, rows)[1][0, 1:3] == 0) == 1  # at least one is drawn


def test_simko_by_hand():
    entropy = jnp.asarray([[0, 1.0, 2.0, 3.0], [0, 1.0, 3.0, 0]])
    ids = np.zeros((2, 4, 2), np.int32)
    ids[1, 2, 0] = 5  # the forking token of the bad answer is not the likeliest
    rows = batch(topk_ids=jnp.asarray(ids), topk_logprob_proximal=jnp.full((2, 4, 2), -1.0))
    objective = chain(jrl.simko_surrogate(share=0.4, k=2, quantile=0.6, boost=1.5))
    logprob = jnp.full(MASK.shape, -1.0)

    def total(logprob, lists):
        output = jrl.PolicyOutput(logprob=logprob, entropy=entropy, topk_logprob=lists)
        return jrl.loss(objective, output, rows)[0]

    own, lists = jax.grad(total, argnums=(0, 1))(logprob, jnp.full((2, 4, 2), -1.0))
    np.testing.assert_allclose(own, [[0, -1.0, -1.0, -0.6], [0, 1.0, 1.0, 0]], rtol=1e-6)
    np.testing.assert_allclose(lists[0, 3], [-0.2, -0.2], rtol=1e-5)
    assert np.sum(np.asarray(lists) != 0) == 2
    rows = rows.replace(topk_ids=jnp.zeros((2, 4, 2), jnp.int32))  # now it is
    own = jax.grad(total)(logprob, jnp.full((2, 4, 2), -1.0))
    np.testing.assert_allclose(own[1], [0, 1.0, 1.5, 0], rtol=1e-6)


def test_two_sided_clipping_is_the_dual_bound():
    """TRL's delta: max(-A min(r, c), -A clip(r)) for any sign of A, c ≥ 1 + high."""
    ratio = np.exp(np.linspace(-3, 3, 4 * 8).reshape(4, 8))
    advantage = np.where(np.arange(4)[:, None] % 2, 1.0, -1.0) * np.ones((4, 8))
    rows = batch(np.ones((4, 8), bool), advantage=advantage, logprob_behavior=np.zeros((4, 8)))
    value, _, _ = value_and_slope(chain(jrl.clip_surrogate(0.2, 0.3, dual=2.0)), np.log(ratio), rows)
    capped, cut = -advantage * np.minimum(ratio, 2.0), -advantage * np.clip(ratio, 0.8, 1.3)
    np.testing.assert_allclose(value, np.maximum(capped, cut)[:, 1:].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: jrl.cispo_surrogate(high=0.0), "high must be a number > 0"),
        (lambda: jrl.cispo_surrogate(high=1.0, low=2.0), "low must be at most high"),
        (lambda: jrl.soft_surrogate(tau_positive=-1.0), "tau_positive must be a number > 0"),
        (lambda: jrl.geometric_surrogate(low=-0.1), "low must be a number ≥ 0"),
        (lambda: jrl.quadratic_surrogate(beta=0.0), "beta must be a number > 0"),
        (lambda: jrl.lag_clip_surrogate(decay=0.0), "decay must be a number > 0"),
        (lambda: jrl.divergence_surrogate("js"), "kind must be one of 'tv', 'kl'"),
        (lambda: jrl.divergence_surrogate(anchor="reference"), "anchor must be one of"),
        (lambda: jrl.covariance_surrogate("both"), "kind must be one of 'kl', 'clip'"),
        (lambda: jrl.simko_surrogate(quantile=2.0), "quantile must be a number ≥ 0 and ≤ 1"),
    ],
)
def test_bad_arguments_are_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "objective",
    [
        recipes.cispo(),
        recipes.sapo(),
        recipes.dppo(),
        recipes.dppo(kind="topk_kl", anchor="proximal", k=3),
        recipes.simko(),
        recipes.gmpo(kl_coef=0.01),
    ],
    ids=lambda o: str(o.info)[-60:],
)
def test_recipes_evaluate(objective):
    rows = testing.sample_batch()
    params = testing.tiny_policy_params(1)

    def total(params):
        return jrl.loss(objective, testing.tiny_policy(params, rows), rows)[0]

    value, slope = jax.value_and_grad(total)(params)
    assert np.isfinite(value) and np.all(np.isfinite(slope)) and np.any(np.asarray(slope) != 0)
