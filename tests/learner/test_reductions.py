"""The self-check of reductions: silent on a right update, and each fault that is put into one is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxrl_llm as jrl
from jaxrl_llm.learner.reductions import ReductionError, check_sums, make_reduction_check
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.types import PolicyOutput, TokenBatch

ROWS = ("data", "fsdp")


@functools.cache
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def batch(rows=16, tokens=24):
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, tokens + 1, rows)
    raw = TokenBatch.from_rows(
        rng.integers(3, 60, (rows, tokens)),
        np.arange(tokens) < lengths[:, None],
        group=np.repeat(np.arange(rows // 4), 4),
        reward=rng.normal(size=rows),
        logprob_behavior=np.full((rows, tokens), -1.0),
    )
    objective = jrl.recipes.grpo()
    return make_prepare(objective, mesh())(raw, objective.init())[0]


def check(build=make_update_step, micro_batch_rows=4):
    make_reduction_check(mesh(), micro_batch_rows=micro_batch_rows, build=build)(batch())


@pytest.mark.parametrize("micro_batch_rows", [4, 16])
def test_a_right_update_passes(micro_batch_rows):
    check(micro_batch_rows=micro_batch_rows)


def test_an_update_without_a_mesh_passes_and_a_batch_with_nothing_to_train_is_not_probed():
    on_one = make_reduction_check(None, micro_batch_rows=8)
    data = jax.device_put(batch(), jax.devices()[0])
    on_one(data)
    on_one(data.replace(mask=jnp.zeros_like(data.mask), norm=data.norm * 0, count=data.count * 0))


def with_gradient(reduce):
    """A step whose gradient with respect to the parameters goes through `reduce` once more."""

    def build(objective, config, optimizer, on, *, policy, **options):
        @jax.custom_vjp
        def same(params):
            return params

        same.defvjp(lambda params: (params, None), lambda _, grads: (jax.tree.map(reduce, grads),))
        return make_update_step(
            objective, config, optimizer, on, policy=lambda p, b: policy(same(p), b), **options
        )

    return build


def test_a_psum_that_is_taken_twice_is_found():
    def again(grad):
        return jax.shard_map(
            lambda g: jax.lax.psum(g, ROWS), mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False
        )(grad)

    with pytest.raises(
        ReductionError, match=r"norm of a probe gradient is 16 .* 4 times as much.*taken twice"
    ):
        check(with_gradient(again))


def test_a_psum_that_is_missing_is_found():
    """Every device adds up the rows that it has, and calls that the gradient."""

    def local_policy(params, micro):
        @jax.custom_vjp
        def look_up(table, tokens):
            return jnp.sum(table[tokens % table.shape[0]], axis=-1)

        def backward(kept, cotangent):
            tokens, shape = kept

            def own(tokens, cotangent):
                return jnp.zeros(shape).at[tokens % shape[0]].add(cotangent[..., None])

            part = jax.shard_map(
                own, mesh=mesh(), in_specs=(P(ROWS), P(ROWS)), out_specs=P(), check_vma=False
            )
            return part(tokens, cotangent), None

        look_up.defvjp(lambda table, tokens: (look_up(table, tokens), (tokens, table.shape)), backward)
        return PolicyOutput(logprob=look_up(params["embed"], micro.tokens))

    def build(*given, policy, **options):
        return make_update_step(*given, policy=local_policy, **options)

    with pytest.raises(ReductionError, match="norm of a probe gradient .*missing"):
        check(build)


def test_a_denominator_of_one_shard_is_found():
    def build(*given, **options):
        step = make_update_step(*given, **options)
        return lambda state, batch: step(state, batch.replace(count=batch.count / 4))

    # The step is told another count than the host has.
    with pytest.raises(ReductionError, match=r"count \(the denominator of the loss\).*0.25 times.*1 / 4"):
        check(build)


def test_a_gradient_that_each_shard_clips_by_itself_is_found():
    def clip_locally(on):
        def local(grad):
            norm = jnp.sqrt(jnp.sum(grad**2))
            return grad / jnp.maximum(norm, 1.0)

        def update(grads, state, params=None):
            spec = P("tensor", "fsdp")
            clipped = jax.shard_map(local, mesh=on, in_specs=spec, out_specs=spec)(grads["embed"])
            return {**grads, "embed": clipped}, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    def build(objective, config, optimizer, on, **options):
        faulty = optax.chain(clip_locally(on), optax.sgd(1.0))
        return make_update_step(objective, config, faulty, on, **options)

    with pytest.raises(ReductionError, match="length of a clipped step.*clipped by something else"):
        check(build)


@pytest.mark.parametrize(
    ("name", "part", "told"),
    [
        ("trained_tokens", "total", "tokens"),
        ("loss", "count", "denominator"),
        ("reward", "total", "reward"),
        ("reward", "count", "reward"),
        ("length", "total", "length"),
    ],
)
def test_every_reported_sum_is_compared(name, part, told):
    data = batch()
    sums = {key: jax.tree.map(jnp.sum, mean) for key, mean in data.logged.items()}
    one = jnp.ones(())
    sums |= {
        "trained_tokens": jrl.types.Mean(jnp.sum(data.mask), one),
        "loss": jrl.types.Mean(one, jnp.sum(data.count)),
    }
    check_sums(sums, data, 4)
    wrong = getattr(sums[name], part) * 4
    sums[name] = sums[name]._replace(**{part: wrong})
    with pytest.raises(ReductionError, match=f"{told}.*4 times as much.*taken twice"):
        check_sums(sums, data, 4)
