"""Real bugs of other systems as small inputs with right answers, at the level of the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import testing
from jaxrl_llm.runtime import collectives_need_compiling
from jaxrl_llm.testing import rows

REINFORCE = (jrl.given_advantage(), jrl.reinforce_surrogate())
SINGLE = ("test_n02_equal_rewards_give_no_signal", "test_d01_one_denominator_over_all_shards")  # in float32
FAST = {"xla_backend_optimization_level": 0}  # to compile: these programs run once


@pytest.fixture(autouse=True)
def double(request):
    """float64 and 8 x 12, as in the law tests, so that their compiled operations are used again."""
    if request.node.originalname in SINGLE:
        yield
    else:
        with testing.float64():
            yield


def wide(x, width=12, rows=8):
    """Fills up with rows and columns that train nothing; [B] and [B, T]."""
    x = np.asarray(x)
    if x.ndim == 0:
        return x
    return np.pad(x, [(0, rows - len(x)), (0, width - x.shape[-1])][: x.ndim])


def batch_of(lengths, width=12, rows=8, **fields):
    """Rows of `lengths` trained tokens after one that is not."""
    columns = np.arange(width)
    mask = (columns >= 1) & (columns <= wide(lengths, rows=rows)[:, None])
    fields = {name: wide(value, width, rows) for name, value in fields.items()}
    return jrl.TokenBatch.from_rows(np.zeros(mask.shape, np.int32), mask, **fields)


def loss(objective, logprob, batch, entropy=None):
    """(loss, gradient [8, 12], {metric: value})."""
    entropy = None if entropy is None else jnp.asarray(wide(entropy, batch.shape[1], batch.shape[0]), float)

    def value(logprob):
        output = jrl.PolicyOutput(logprob=logprob, entropy=entropy)
        return jrl.transforms.loss(objective, output, batch)

    logprob = jnp.asarray(wide(logprob, batch.shape[1], batch.shape[0]), float)
    (value, metrics), gradient = jax.value_and_grad(value, has_aux=True)(logprob)
    return float(value), np.asarray(gradient), {k: float(m.value) for k, m in metrics.items()}


def summed(objective, logprob, batch, edges):
    """Loss from micro-batches of rows: Σ loss_sum / Σ denominator."""
    prepared, state = objective.prepare(batch)
    logprob = jnp.asarray(wide(logprob), float)
    parts = [
        jrl.evaluate(objective, jrl.PolicyOutput(logprob=logprob[a:b]), rows(prepared, a, b), state)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return float(sum(p.loss_sum for p in parts) / sum(p.denominator for p in parts))


def tokens(*lists):
    """[B, T] from per-token values of rows of different lengths, after one untrained column."""
    out = np.zeros((len(lists), 12))
    for row, values in zip(out, lists, strict=True):
        row[1 : 1 + len(values)] = values
    return out


def test_n01_micro_batches_are_not_averaged_again():
    """Per-token losses A = [2], B = [1, 1, 1, 0.5]: 5.5 / 5, however they are split."""
    batch = batch_of([1, 0, 0, 0, 4], advantage=-np.ones(8))
    logprob = tokens([2.0], [], [], [], [1.0, 1.0, 1.0, 0.5])
    objective = jrl.chain(*REINFORCE, jrl.normalize_by_token())
    value, gradient, _ = loss(objective, logprob, batch)
    np.testing.assert_allclose(value, 1.1, rtol=1e-6)
    np.testing.assert_allclose(summed(objective, logprob, batch, [0, 4, 8]), 1.1, rtol=1e-6)
    np.testing.assert_allclose(gradient[batch.mask], 0.2, rtol=1e-6)  # SGD with lr 1 moves each by 1 / 5


NO_SIGNAL = [
    jrl.group_advantage(),
    jrl.group_advantage(ddof=0, eps=1e-8),
    jrl.group_advantage(eps=0.0),
    jrl.group_advantage(scale="none"),
    jrl.group_advantage(scale="mean", eps=0.0),
    jrl.leave_one_out_advantage(),
]


@functools.partial(jax.jit, compiler_options=FAST)
def all_no_signal(logprob, batch):
    results = []
    for stage in NO_SIGNAL:
        objective = jrl.chain(stage, jrl.normalize_by_token(), jrl.reinforce_surrogate())
        value = jax.value_and_grad(lambda lp, o=objective: jrl.transforms.loss(o, lp, batch), has_aux=True)
        (value, metrics), gradient = value(logprob)
        results.append(
            (value, gradient, metrics["group_no_signal"].value, objective.prepare(batch)[0].advantage)
        )
    return results


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("value, size", [(0.3, 8), (0.1, 7), (0.7, 16), (1.0, 4), (0.0, 4)])
def test_n02_equal_rewards_give_no_signal(value, size, dtype):
    """In float32, for every estimator, ddof and eps; the rewards beside the group's are None."""
    reward = np.full(16, np.nan, np.float32)
    reward[:size] = np.asarray(value, dtype).astype(np.float32)
    batch = batch_of([2] * 16, 3, 16, group=np.zeros(16, int), reward=reward)
    assert batch.reward.dtype == jnp.float32
    for value, gradient, no_signal, advantage in all_no_signal(jnp.full(batch.shape, -1.0), batch):
        assert value == 0 and no_signal == 1
        np.testing.assert_array_equal(gradient, 0.0)
        np.testing.assert_array_equal(advantage, 0.0)


def test_n04_std_convention_is_the_documented_one():
    batch = batch_of([2] * 8, group=[0, 0, 0, 0, 1, 1, 2, 3], reward=[1, 0, 0, 0, 1, 0, 5, 0])
    for ddof, four, two in ((1, [1.5, -0.5, -0.5, -0.5], 0.7071), (0, [1.7321] + [-0.5774] * 3, 1.0)):
        advantage = np.asarray(jrl.group_advantage(ddof=ddof).prepare(batch, None)[0].advantage)[:, 1]
        np.testing.assert_allclose(advantage, [*four, two, -two, 0, 0], atol=2e-4)
        assert np.all(advantage[6:] == 0)  # groups of one, whatever their reward


def test_rewards_of_none_are_outside_mean_and_std():
    reward = [1.0, np.nan, 0.0, np.nan, 0, 0, 0, 0]
    batch = batch_of([2] * 4, group=[0] * 8, reward=reward)
    stages = jrl.chain(jrl.group_advantage(eps=0.0), jrl.whiten_advantage(), jrl.normalize_by_token())
    prepared, _ = stages.prepare(batch)
    # ±0.7071 from the group; whitened over their four tokens (Bessel), the others stay 0 and do not enter
    np.testing.assert_allclose(np.asarray(prepared.advantage)[:4, 1], [0.866, 0, -0.866, 0], atol=1e-3)


@pytest.mark.parametrize("rows, width", [(8, 12), (4, 24)])
def test_n07_reductions(rows, width):
    """Length 2 with A = 1 and length 8 with A = -1, on-policy; whatever the padding and the split."""
    fields = dict(advantage=[1.0, -1.0], logprob_behavior=np.zeros((2, 12)))
    batch = batch_of([2, 8], width, rows, **fields)
    logprob = np.zeros((2, 12))
    expected = {
        jrl.normalize_by_sequence(): 0.0,
        jrl.normalize_by_token(): 0.6,
        jrl.normalize_by_length_limit(10): 0.3,
        jrl.normalize_by_sequence_sum(): 3.0,
        jrl.normalize_by_constant(4.0): 1.5,
    }
    apart = batch_of([2, 0, 0, 0, 8], advantage=[1.0, 0, 0, 0, -1.0], logprob_behavior=np.zeros((5, 12)))
    for normalizer, value in expected.items():
        objective = jrl.chain(jrl.given_advantage(), normalizer, jrl.token_ratio(), jrl.clip_surrogate())
        np.testing.assert_allclose(loss(objective, logprob, batch)[0], value, atol=1e-6)
        if rows == 8:
            np.testing.assert_allclose(
                summed(objective, np.zeros((5, 12)), apart, [0, 4, 8]), value, atol=1e-6
            )


def test_n08_truncated_answers_leave_the_denominator():
    objective = jrl.chain(
        jrl.given_advantage(), jrl.drop_truncated(), jrl.normalize_by_token(), jrl.reinforce_surrogate()
    )
    logprob = np.ones((2, 12))
    value, gradient, metrics = loss(
        objective, logprob, batch_of([4, 6], advantage=-np.ones(2), truncated=[False, True])
    )
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_allclose(gradient[0, 1:5], 0.25, rtol=1e-6)
    assert np.all(gradient[1] == 0)
    assert metrics["length"] == 5.0 and metrics["truncated"] == 0.5  # lengths 4 and 6 are still reported

    both = batch_of([4, 6], advantage=-np.ones(2), truncated=[True, True])
    value, gradient, metrics = loss(objective, logprob, both)
    assert value == 0 and np.all(gradient == 0) and all(np.isfinite(list(metrics.values())))
    assert metrics["length"] == 5.0


@pytest.mark.parametrize("name", sorted(jrl.recipes.RECIPES))
def test_n08_nothing_to_train_is_a_loss_of_zero(name):
    recipe = jrl.recipes.RECIPES[name]
    objective = recipe(limit=8) if name == "dr_grpo" else recipe()
    nan, listed = jnp.full((8, 12), jnp.nan), jnp.full((8, 12, 16), jnp.nan)
    batch = batch_of([0], reward=np.ones(8), group=[0] * 8, logprob_behavior=np.asarray(nan)).replace(
        logprob_proximal=nan,
        logprob_reference=nan,
        logprob_teacher=nan,
        value=nan,
        baseline_reward=nan,
        rewards={"exact": nan, "form": nan},
        reference_point=nan,
        topk_ids=jnp.zeros(listed.shape, jnp.int32),
        topk_logprob_proximal=listed,
        topk_logprob_behavior=listed,
    )

    def value_of(logprob):
        output = jrl.PolicyOutput(
            logprob=logprob, entropy=nan, value=nan, topk_logprob=listed, divergence=nan
        )
        return jrl.transforms.loss(objective, output, batch)

    (value, metrics), gradient = jax.value_and_grad(value_of, has_aux=True)(nan)
    assert value == 0 and np.all(gradient == 0)
    assert all(np.isfinite(mean.value) for mean in metrics.values())


def test_n10_penalty_has_the_right_sign_of_the_ratio():
    """log p = -1, log ref = -2: 0.36788, not 0.71828."""
    batch = batch_of([1], logprob_reference=np.full((8, 12), -2.0))
    objective = jrl.chain(jrl.normalize_by_token(), jrl.penalize_kl(1.0))
    value, gradient, metrics = loss(objective, np.full((8, 12), -1.0), batch)
    np.testing.assert_allclose(value, 0.36788, atol=1e-5)
    np.testing.assert_allclose(metrics["kl_reference"], 0.36788, atol=1e-5)
    np.testing.assert_allclose(gradient[batch.mask], 1 - np.exp(-1), rtol=1e-5)


@pytest.mark.parametrize("ratio", [jrl.sequence_ratio, jrl.sequence_ratio_per_token])
def test_n13_gspo_does_not_see_padding(ratio):
    batch = batch_of([2], advantage=np.ones(8), logprob_behavior=np.zeros((8, 12)))
    objective = jrl.chain(
        jrl.given_advantage(), jrl.normalize_by_sequence(), ratio(), jrl.clip_surrogate(1.0, 1.0)
    )
    for junk in (-2.0, -6.0):
        value, gradient, metrics = loss(objective, [[0, 0.2, 0.4, junk, junk]], batch)
        np.testing.assert_allclose(value, -1.34986, rtol=1e-5)
        np.testing.assert_allclose(metrics["ratio"], 1.34986, rtol=1e-5)
        np.testing.assert_allclose(gradient[0, :5], [0, -0.67493, -0.67493, 0, 0], rtol=1e-5)


def test_n15_entropy_is_that_of_the_trained_tokens():
    """Entropies of logits 0..4 are [0.9, 1.1, 0.4, 0.6, 0.2]; logits t - 1 make token t; tokens 3 and 4 train."""
    mask = wide([[0, 0, 0, 1, 1]])
    batch = jrl.TokenBatch.from_rows(np.zeros((8, 12), int), mask, advantage=np.ones(8))
    objective = jrl.chain(*REINFORCE, jrl.normalize_by_token(), jrl.reward_entropy(0.1))
    value, _, metrics = loss(objective, np.zeros((8, 12)), batch, [[0.0, 0.9, 1.1, 0.4, 0.6]])
    np.testing.assert_allclose(metrics["entropy"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(value, -0.05, rtol=1e-6)


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "dr_grpo", "gspo", "gspo_token"])
def test_n31_a_kl_coefficient_changes_the_loss(name):
    recipe = jrl.recipes.RECIPES[name]
    fixed = {"limit": 8} if name == "dr_grpo" else {}
    reference, behavior = np.full((8, 12), -2.0), np.full((8, 12), -1.0)
    fields = dict(reward=[1.0, 0.0], group=[0] * 8, logprob_behavior=behavior, logprob_reference=reference)
    batch = batch_of([2, 3], **fields)
    without, with_kl = (loss(recipe(kl_coef=c, **fixed), behavior, batch)[0] for c in (0.0, 0.1))
    assert abs(with_kl - without) > 1e-3
    assert not jrl.needed_fields(recipe(kl_coef=None, **fixed))
    assert jrl.needed_fields(recipe(kl_coef=0.1, **fixed)) == {"logprob_reference"}


def test_n31_a_recipe_without_kl_refuses_a_coefficient():
    with pytest.raises(TypeError, match="kl_coef"):
        jrl.dapo(kl_coef=0.1)


def test_n31_kl_in_the_reward():
    """Reward 1, per-token KL [0.5, 0.2], coefficient 0.1: the stream is [-0.05, 0.98]."""
    fields = dict(logprob_behavior=tokens([-1.0, -1.0]), logprob_reference=tokens([-1.5, -1.2]))
    batch = batch_of([2], reward=[1.0], **fields)
    chain = jrl.chain(jrl.penalize_kl_in_reward(0.1), jrl.returns_to_go(), jrl.normalize_by_token())
    prepared, _ = chain.prepare(batch)
    np.testing.assert_allclose(np.asarray(prepared.reward)[0, 1:3], [-0.05, 0.98], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(prepared.advantage)[0, 1:3], [0.93, 0.98], rtol=1e-5)


def on_a_mesh(objective, logprob, batch, axis):
    """Loss and gradient with rows sharded over 8 devices."""
    collectives_need_compiling(jax.devices())
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]).reshape(axis), ("data", "fsdp"))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batch = jax.tree.map(lambda x: jax.device_put(x, by_rows if jnp.ndim(x) >= 2 else whole), batch)
    function = jax.value_and_grad(lambda lp, batch: jrl.transforms.loss(objective, lp, batch)[0])
    value, gradient = jax.jit(function, compiler_options=FAST)(jax.device_put(logprob, by_rows), batch)
    return float(value), np.asarray(gradient)


@pytest.mark.parametrize("axis", [(1, 8), (2, 4), (8, 1)])
def test_d01_one_denominator_over_all_shards(axis):
    """2 tokens with loss sum 6 on one device, 8 with 8 on another, none elsewhere: 14 / 10."""
    batch = batch_of([2, 8], advantage=-np.ones(8))
    logprob = wide(tokens([3.0, 3.0], [1.0] * 8)).astype(np.float32)
    objective = jrl.chain(*REINFORCE, jrl.normalize_by_token())
    value, gradient = on_a_mesh(objective, logprob, batch, axis)
    np.testing.assert_allclose(value, 1.4, rtol=1e-6)
    np.testing.assert_allclose(gradient[batch.mask], 0.1, rtol=1e-6)


def test_d04_each_sample_keeps_its_own_advantage():
    """A = 1..8 with one token each: the gradient is [1, …, 8], however rows are split or sharded."""
    batch = batch_of([1] * 8, advantage=np.arange(1.0, 9.0))
    objective = jrl.chain(*REINFORCE, jrl.normalize_by_constant(1.0))
    logprob = np.arange(96.0).reshape(8, 12)
    expected, gradient, _ = loss(objective, logprob, batch)
    np.testing.assert_allclose(-gradient[:, 1], np.arange(1, 9))
    np.testing.assert_allclose(summed(objective, logprob, batch, [0, 4, 8]), expected, rtol=1e-6)
    value, gradient = on_a_mesh(objective, logprob, batch, (2, 4))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(-gradient[:, 1], np.arange(1, 9))


def test_t01_a_terminal_eos_that_is_also_padding_trains_once():
    """pad = eos = 2: masks come from lengths, and tokens after the answer change nothing."""
    ids = np.full((8, 12), 2)
    ids[:, :6] = [[5, 2, 6, 7, 8, 2], [5, 2, 6, 7, 2, 2]] * 4
    mask = (np.arange(12) >= 3) & (np.arange(12) < np.array([6, 5] * 4)[:, None])
    batch = jrl.TokenBatch.from_rows(ids, mask, advantage=np.ones(8))
    np.testing.assert_array_equal(batch.mask[:2, 3:8], [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segments[:, :3], 1)
    objective = jrl.chain(*REINFORCE, jrl.normalize_by_constant(1.0))
    _, gradient, _ = loss(objective, np.zeros((8, 12)), batch)
    np.testing.assert_allclose(-gradient[:2, 3:8], [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize("recipe", [jrl.grpo, jrl.gspo, jrl.reinforce])
def test_t06_tool_tokens_get_neither_gradient_nor_kl(recipe):
    """prompt 3, assistant 2, tool 4, assistant 2."""
    mask = wide([[0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]] * 2)
    rng = np.random.default_rng(0)
    fields = {k: rng.normal(size=mask.shape) for k in ("logprob_behavior", "logprob_reference")}
    fields |= dict(reward=wide([1.0, 0.0]), group=np.zeros(8, int))
    batch = jrl.TokenBatch.from_rows(np.zeros(mask.shape, int), mask, **fields)
    objective = recipe(kl_coef=0.1, entropy_coef=0.1)
    logprob, entropy = rng.normal(size=mask.shape), rng.random(mask.shape)
    results = []
    for tool in (0.0, 100.0):
        changed = np.where(mask, logprob, logprob + tool)
        results.append(loss(objective, changed, batch, np.where(mask, entropy, tool)))
    assert np.all(results[0][1][mask == 0] == 0)
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
