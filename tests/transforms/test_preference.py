"""Preference stages: values of a batch by hand, what counts as a pair, metrics, edge cases and error texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import testing
from jaxrl_llm.transforms import evaluate, takes_pairs
from jaxrl_llm.transforms.preference import takes_labels

# Two pairs; the sums of log-probs are -3, -1 | -2, -6, lengths 2, 1 | 1, 3.
MASK = np.array([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 0]], bool)
LOGPROB = np.array([[9, -1, -2, 9, 9], [9, -1, 9, 9, 9], [9, 9, -2, 9, 9], [9, -1, -2, -3, 9]], np.float32)
SUM = np.array([-3.0, -1.0, -2.0, -6.0])
LENGTH = np.array([2.0, 1.0, 1.0, 3.0])
REFERENCE = np.array([-1.0, -1.0, -2.0, -1.0])  # per token
RATIO = SUM - REFERENCE * LENGTH  # -1, 0, 0, -3


def batch_of(mask=MASK, **fields):
    reference = np.where(mask, REFERENCE[: len(mask), None], np.nan)
    fields = {"logprob_reference": reference, **fields}
    return jrl.TokenBatch.from_rows(np.zeros(mask.shape, int), mask, **fields)


def loss_of(objective, batch=None, logprob=LOGPROB, value=None):
    batch = batch_of() if batch is None else batch

    def total(logprob, value):
        output = jrl.PolicyOutput(logprob=logprob, value=value)
        return jrl.transforms.loss(objective, output, batch)

    value = jnp.zeros(logprob.shape) if value is None else jnp.asarray(value)
    (result, metrics), gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        jnp.asarray(logprob), value
    )
    return float(result), gradient, {k: float(m.value) for k, m in metrics.items()}


def softplus(x):
    return np.log1p(np.exp(x))


H = RATIO[0::2] - RATIO[1::2]  # -1, 3
MEAN_H = (RATIO / LENGTH)[0::2] - (RATIO / LENGTH)[1::2]  # -0.5, 1
A = SUM / LENGTH  # -1.5, -1, -2, -2


def odds(a):
    return a - np.log1p(-np.exp(a))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (jrl.dpo(beta=0.5), softplus(-0.5 * H)),
        (jrl.dpo(beta=0.5, average=True), softplus(-0.5 * MEAN_H)),
        (jrl.dpo(beta=0.5, nll_coef=0.2), softplus(-0.5 * H) - 0.2 * A[0::2]),
        (jrl.cdpo(beta=0.5, smoothing=0.2), 0.8 * softplus(-0.5 * H) + 0.2 * softplus(0.5 * H)),
        (jrl.robust_dpo(beta=0.5, smoothing=0.2), (0.8 * softplus(-0.5 * H) - 0.2 * softplus(0.5 * H)) / 0.6),
        (jrl.ipo(beta=0.25), (MEAN_H - 2.0) ** 2),
        (jrl.ipo(beta=0.25, average=False), (H - 2.0) ** 2),
        (jrl.hinge(beta=0.5), np.maximum(0.0, 1.0 - 0.5 * H)),
        (jrl.orpo(beta=0.5), -A[0::2] + 0.5 * softplus(odds(A[1::2]) - odds(A[0::2]))),
        (jrl.simpo(beta=2.0, gamma=0.5), softplus(0.5 - 2.0 * (A[0::2] - A[1::2]))),
    ],
    ids=lambda x: str(x) if isinstance(x, jrl.transforms.LossTransform) else "",
)
def test_losses_by_hand(objective, expected):
    value, _, _ = loss_of(objective)
    assert value == pytest.approx(np.mean(expected), rel=1e-5)
    assert takes_pairs(objective)


def test_gradient_of_dpo_by_hand():
    _, (gradient, _), _ = loss_of(jrl.dpo(beta=0.5))
    weight = 0.5 * jax.nn.sigmoid(-0.5 * H) / 2  # β σ(-β h) / pairs
    sign = np.array([-1.0, 1.0, -1.0, 1.0])
    np.testing.assert_allclose(
        gradient, np.where(MASK, (sign * np.repeat(weight, 2))[:, None], 0.0), rtol=1e-5
    )


def test_kto_by_hand():
    for points, z in ((np.array([1.0, 2.0, 3.0, 4.0]), 2.5), (np.array([-1.0, -2.0, 1.0, 0.0]), 0.0)):
        batch = batch_of(reference_point=jnp.asarray(np.where(MASK, points[:, None], np.nan)))
        value, _, metrics = loss_of(jrl.kto(beta=0.5, desirable=1.5, undesirable=0.5), batch)
        sign = np.array([1.0, -1.0, 1.0, -1.0])
        each = np.array([1.5, 0.5, 1.5, 0.5]) / (1.0 + np.exp(sign * 0.5 * (RATIO - z)))
        assert value == pytest.approx(np.mean(each), rel=1e-5)
        assert metrics["kto_point"] == pytest.approx(z)


def test_kto_counts_answers_without_a_partner():
    mask = MASK.copy()
    mask[1] = False
    batch = batch_of(mask, reference_point=jnp.zeros(mask.shape))
    value, _, metrics = loss_of(jrl.kto(beta=0.5), batch)
    each = 1.0 / (1.0 + np.exp(0.5 * np.array([1.0, 1.0, -1.0]) * RATIO[[0, 2, 3]]))
    assert value == pytest.approx(np.mean(each), rel=1e-5)
    assert metrics["pair_margin"] == pytest.approx(0.5 * 3.0)  # of the whole pair alone


GOOD = np.array([True, True, False])  # of the first three rows: no pairs


def labelled(**fields):
    point = jnp.asarray(np.where(MASK[:3], np.array([1.0, 0.5, 3.0])[:, None], np.nan))
    good = jnp.broadcast_to(GOOD[:, None], MASK[:3].shape)
    return batch_of(MASK[:3], reference_point=point, desirable=good, **fields)


def test_kto_of_labelled_answers_by_hand():
    objective = jrl.kto(beta=0.5, desirable=1.5, undesirable=0.5)
    value, _, metrics = loss_of(objective, labelled(), LOGPROB[:3])
    ratio, z = RATIO[:3], 1.5
    each = np.where(GOOD, 1.5, 0.5) / (1.0 + np.exp(np.where(GOOD, 1.0, -1.0) * 0.5 * (ratio - z)))
    assert value == pytest.approx(np.mean(each), rel=1e-5)
    assert metrics["kto_point"] == pytest.approx(z)
    assert metrics["reward_chosen"] == pytest.approx(0.5 * np.mean(ratio[:2]))
    assert metrics["reward_rejected"] == pytest.approx(0.5 * ratio[2])
    assert "pair_accuracy" not in metrics


def test_labels_on_pairs_are_the_pairs():
    point = jnp.full(MASK.shape, 0.7)
    pairs = batch_of(reference_point=point)
    good = jnp.broadcast_to(jnp.array([[True], [False], [True], [False]]), MASK.shape)
    ours, theirs = (loss_of(jrl.kto(), b) for b in (pairs, pairs.replace(desirable=good)))
    assert ours[0] == theirs[0]
    np.testing.assert_array_equal(ours[1][0], theirs[1][0])


@pytest.mark.slow
def test_labelled_answers_may_be_split_and_packed_anywhere():
    """Pairs are never split; answers with a label each have no such law."""
    with testing.float64():
        batch = testing.sample_batch()
    batch = batch.replace(desirable=jnp.broadcast_to(jnp.arange(8)[:, None] % 3 == 0, batch.shape))
    objective = jrl.kto(beta=0.5, undesirable=1.3)
    testing.assert_split_invariant(objective, batch, splits=((3, 1, 4),))
    testing.assert_packing_invariant(objective, batch)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("scale", [1.0, 800.0, -800.0])
def test_labelled_answers_at_the_edges(kept, scale):
    mask = np.where(np.isin(np.arange(3), kept)[:, None], MASK[:3], False)
    batch = labelled().replace(mask=jnp.asarray(mask))
    logprob = np.where(mask, LOGPROB[:3] * scale, np.nan).astype(np.float32)
    value, gradients, metrics = loss_of(jrl.kto(), batch, logprob)
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradients)
    assert all(np.isfinite(m) for m in metrics.values())


def test_reward_model_by_hand():
    scores = np.zeros(MASK.shape, np.float32)
    scores[[0, 1, 2, 3], [2, 1, 2, 3]] = [1.0, 0.5, -1.0, 1.0]  # at the last trained token
    scores[3, 2] = 77.0
    value, (_, gradient), metrics = loss_of(jrl.reward_model(), value=scores)
    assert value == pytest.approx(np.mean(softplus(np.array([-0.5, 2.0]))), rel=1e-5)
    assert gradient[3, 2] == 0.0 and gradient[3, 3] > 0.0 > gradient[2, 2]
    assert metrics["pair_accuracy"] == 0.5
    assert metrics["reward_chosen"] == pytest.approx(0.0) and metrics["reward_rejected"] == pytest.approx(
        0.75
    )
    rewarded = batch_of(reward=[3.0, 1.0, np.nan, 0.0])  # the second pair has no margin
    value, _, _ = loss_of(jrl.reward_model(margin=0.5, center=0.1), rewarded, value=scores)
    expected = softplus(np.array([0.5, 2.0])) - np.array([0.0, 0.0])
    expected[0] = softplus(0.5 + 1.0 - 1.0)
    assert value == pytest.approx(np.mean(expected + 0.1 * np.array([1.5, 0.0]) ** 2), rel=1e-5)


def test_metrics_by_hand():
    _, _, metrics = loss_of(jrl.dpo(beta=0.5))
    assert metrics["pair_accuracy"] == 0.5
    assert metrics["pair_margin"] == pytest.approx(0.5 * np.mean(H))
    assert metrics["reward_chosen"] == pytest.approx(0.5 * np.mean(RATIO[0::2]))
    assert metrics["reward_rejected"] == pytest.approx(0.5 * np.mean(RATIO[1::2]))
    assert metrics["pair_missing"] == 0.0


ALL = [
    jrl.dpo(),
    jrl.cdpo(),
    jrl.robust_dpo(),
    jrl.ipo(),
    jrl.hinge(),
    jrl.orpo(),
    jrl.simpo(),
    jrl.kto(),
    jrl.reward_model(),
]


@pytest.mark.parametrize("objective", ALL, ids=str)
@pytest.mark.parametrize("kept", [(), (0,), (0, 1), (1, 2)])
def test_pairs_with_an_empty_side_and_empty_batches(objective, kept):
    mask = np.where(np.isin(np.arange(4), kept)[:, None], MASK, False)
    batch = batch_of(mask, reference_point=jnp.zeros(mask.shape))
    logprob = np.where(mask, LOGPROB, np.nan).astype(np.float32)
    value, gradients, metrics = loss_of(objective, batch, logprob, value=np.where(mask, 0.3, np.nan))
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradients)
    assert all(np.isfinite(m) for m in metrics.values())
    if kept == (0, 1):
        assert value != 0.0 and metrics.get("pair_missing", 0.0) == 0.0
    elif objective.info.stages[0].info.stage == "normalize_by_pair":
        assert value == 0.0 and all(np.all(g == 0) for g in gradients)
        assert metrics["pair_missing"] == (1.0 if kept else 0.0)


@pytest.mark.parametrize("objective", ALL, ids=str)
@pytest.mark.parametrize("scale", [800.0, -800.0])
def test_far_log_ratios_are_finite(objective, scale):
    logprob = np.where(np.arange(4)[:, None] % 2 == 0, scale, -scale) * np.ones(MASK.shape)
    batch = batch_of(reference_point=jnp.full(MASK.shape, abs(scale)))
    value, gradients, _ = loss_of(objective, batch, np.float32(logprob), value=np.float32(logprob))
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradients)


def test_micro_batches_of_whole_pairs_add_up():
    objective = jrl.dpo(beta=0.5, nll_coef=0.1)
    batch, state = objective.prepare(batch_of())
    output = jrl.PolicyOutput(logprob=jnp.asarray(LOGPROB))

    def part(rows):
        some = jax.tree.map(lambda x: x[rows] if jnp.ndim(x) >= 2 else x, batch)
        return evaluate(objective, jrl.PolicyOutput(logprob=output.logprob[rows]), some, state)

    whole = evaluate(objective, output, batch, state)
    first, second = part(slice(0, 2)), part(slice(2, 4))
    assert float(first.loss_sum + second.loss_sum) == pytest.approx(float(whole.loss_sum), rel=1e-6)
    assert float(first.denominator) == float(second.denominator) == 1.0
    with pytest.raises(ValueError, match="3 rows.*even micro_batch_rows"):
        part(slice(0, 3))


def test_error_texts():
    with pytest.raises(ValueError, match="3 rows"):
        jrl.dpo().prepare(batch_of(MASK[:3]))
    packed = batch_of()
    packed = packed.replace(sequence=jnp.where(jnp.arange(5) > 1, 100, packed.sequence))
    with pytest.raises(ValueError, match="2 rows hold several sequences.*row_tokens"):
        jrl.dpo().prepare(packed)
    with pytest.raises(ValueError, match="logprob_reference.*reference policy"):
        loss_of(jrl.dpo(), batch_of(logprob_reference=None))
    with pytest.raises(ValueError, match="reference_point.*jaxrl sft"):
        jrl.kto().prepare(batch_of())
    for call, text in (
        (lambda: jrl.dpo(beta=0.0), "beta must be a number > 0"),
        (lambda: jrl.cdpo(smoothing=0.6), "smoothing must be a number"),
        (lambda: jrl.robust_dpo(smoothing=0.5), "smoothing must be a number"),
        (lambda: jrl.kto(desirable=-1.0), "desirable must be a number"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_needs():
    assert jrl.transforms.needed_fields(jrl.orpo()) == frozenset()
    assert jrl.transforms.needed_fields(jrl.dpo()) == {"logprob_reference"}
    assert not takes_pairs(jrl.grpo())
    assert takes_labels(jrl.kto()) and not takes_labels(jrl.dpo()) and not takes_labels(jrl.grpo())
    both = jrl.chain(*jrl.transforms.stages(jrl.kto()), jrl.imitate_chosen(1.0))
    assert takes_pairs(both) and not takes_labels(both)
