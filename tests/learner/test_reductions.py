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
from jaxrl_llm.types import Mean, PolicyOutput, TokenBatch

ROWS = ("data", "fsdp")


@functools.cache
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


@functools.cache
def batch():
    rows, tokens = 16, 24
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


def test_a_right_update_passes_and_a_denominator_of_one_shard_is_found():
    kept = []

    def keep(*given, **options):
        kept.append(make_update_step(*given, **options))
        return kept[0]

    check(keep)

    def build(*given, **options):
        return lambda state, batch: kept[0](state, batch.replace(count=batch.count / 4))

    # The step is told another count than the host has.
    with pytest.raises(ReductionError, match=r"count \(the denominator of the loss\).*0.25 times.*1 / 4"):
        check(build)


@pytest.mark.slow
def test_updates_without_micro_batches_or_a_mesh_pass_and_what_trains_nothing_is_not_probed():
    check(micro_batch_rows=16)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_every_reported_sum_is_compared():
    data, one = batch(), np.ones(())
    right = {name: Mean(np.sum(mean.total), np.sum(mean.count)) for name, mean in data.logged.items()}
    right |= {"trained_tokens": Mean(np.sum(data.mask), one), "loss": Mean(one, np.sum(data.count))}
    check_sums(right, data, 4)
    cases = [
        ("trained_tokens", "total", "tokens"),
        ("loss", "count", "denominator"),
        ("reward", "total", "reward"),
        ("reward", "count", "reward"),
        ("length", "total", "length"),
    ]
    for name, part, told in cases:
        wrong = right[name]._replace(**{part: getattr(right[name], part) * 4})
        with pytest.raises(ReductionError, match=f"{told}.*4 times as much.*taken twice"):
            check_sums({**right, name: wrong}, data, 4)
