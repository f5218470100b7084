"""Checks of the laws that every objective obeys, for the package's stages and for yours.

    @jrl.stage(reads=("loss.log_ratio",), writes=("loss.weight",))
    def temper(tau=1.5): ...

    jrl.testing.check_transform(temper())        # every law that holds for this kind of stage

Each `assert_...` takes a complete objective, or a single stage that `complete` makes one of, and an optional
batch with one sequence a row. They run in float64, on a bigram policy small enough for a laptop, and raise
AssertionError with both numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    check_complete,
    clip_surrogate,
    evaluate,
    group_advantage,
    normalize_by_sequence,
    token_ratio,
)
from jaxrl_llm.transforms.evaluate import start_loss
from jaxrl_llm.types import LossOutput, PolicyOutput, TokenBatch

__all__ = [
    "assert_mesh_invariant",
    "assert_on_policy_identity",
    "assert_packing_invariant",
    "assert_padding_inert",
    "assert_split_invariant",
    "assert_weight_detached",
    "check_transform",
    "complete",
    "float64",
    "pack",
    "rows",
    "sample_batch",
    "tiny_policy",
    "tiny_policy_params",
]

Array = jax.Array

VOCABULARY = 11


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Within it, JAX computes in float64."""
    enable = getattr(jax, "enable_x64", None)
    if enable is None:  # before jax 0.8
        from jax.experimental import enable_x64 as enable
    with enable(True):
        yield


# ----------------------------------------------------------------------------------- tiny policy


def tiny_policy_params(seed: int = 0) -> Array:
    """f[11, 11]: logits of the next token given the last one."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)))


def tiny_policy(params: Array, batch: TokenBatch) -> PolicyOutput:
    """A bigram policy: log-probs and entropies of the batch's tokens. Differentiable in `params`.

    Depends on the token before only, hence right for padded and packed rows alike.
    """
    before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
    logprobs = jax.nn.log_softmax(params, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return PolicyOutput(logprob=logprobs[before, batch.tokens], entropy=entropy[before])


def sample_batch(seed: int = 0, width: int = 12) -> TokenBatch:
    """A batch of 8 rows with everything that goes wrong in practice.

    Groups of different sizes with arbitrary ids; one of equal rewards and one of a single trajectory; a
    trajectory of two sequences in two rows; a row that trains nothing; a gap in a mask; rewards of None; truncated
    answers; tokens of different versions; every on-demand field that the stages of the package read.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (8, width))
    lengths = np.array([width, width - 2, 7, 9, width - 1, width, 6, 8])
    columns = np.arange(width)
    mask = (columns >= 3) & (columns < lengths[:, None])
    mask[0, 6:8] = False  # tool output
    mask[3] = False
    reward = np.array([1.0, 0.0, 0.25, 1.0, 0.3, 0.3, np.nan, 0.75])
    batch = TokenBatch.from_rows(
        tokens,
        mask,
        lengths=lengths,
        group=np.array([70, 70, 70, 70, -5, -5, 12, 12]),
        reward=reward,
        truncated=np.array([True, False, False, False, False, True, False, False]),
        version=rng.integers(1, 5, (8, width)),
        learner_version=4,
        logprob_behavior=np.zeros((8, width)),
    )
    # Rows 1 and 2 are the two sequences of one trajectory, whose reward sits at its end.
    trajectory = np.asarray(batch.trajectory).copy() * 13 + 5
    trajectory[2] = trajectory[1]
    batch = batch.replace(trajectory=jnp.asarray(trajectory, jnp.int32))
    current = tiny_policy(tiny_policy_params(), batch).logprob

    def near(scale: float) -> Array:
        return current + scale * rng.normal(size=current.shape)

    return batch.replace(
        logprob_behavior=near(0.3),
        logprob_proximal=near(0.2),
        logprob_reference=near(0.5),
        logprob_teacher=near(0.5),
        advantage=jnp.asarray(rng.normal(size=current.shape)),
        value=jnp.asarray(rng.normal(size=current.shape)),
    )


# -------------------------------------------------------------------------------- other layouts


def _fields(batch: TokenBatch, change: Callable[[Array], Array]) -> TokenBatch:
    """The batch with every [B, T, …] leaf changed."""
    shape = batch.shape
    return jax.tree.map(lambda x: change(x) if jnp.shape(x)[:2] == shape else x, batch)


def rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    """Rows start..stop of a batch."""
    return _fields(batch, lambda x: x[start:stop])


def pack(batch: TokenBatch, width: int | None = None) -> TokenBatch:
    """The same sequences, several to a row: first fit, in order, into rows of `width` tokens (default 2 T).

    Args:
      batch: one sequence a row, right-padded, not prepared.
    """
    width = 2 * batch.shape[1] if width is None else width
    lengths = np.asarray(jnp.sum(batch.segments > 0, axis=1))
    bins: list[list[tuple[int, int]]] = []
    free: list[int] = []
    for row, length in enumerate(lengths):
        home = next((i for i, space in enumerate(free) if space >= length), None)
        if home is None:
            bins.append([])
            free.append(width)
            home = len(bins) - 1
        bins[home].append((row, int(length)))
        free[home] -= int(length)
    source_row = np.zeros((len(bins), width), np.int32)
    source_column = np.zeros((len(bins), width), np.int32)
    segment = np.zeros((len(bins), width), np.int32)
    for i, members in enumerate(bins):
        at = 0
        for number, (row, length) in enumerate(members, start=1):
            source_row[i, at : at + length] = row
            source_column[i, at : at + length] = np.arange(length)
            segment[i, at : at + length] = number
            at += length
    padding = jnp.asarray(segment == 0)

    def gather(x: Array) -> Array:
        x = x[source_row, source_column]
        return jnp.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), jnp.zeros((), x.dtype), x)

    packed = _fields(batch, gather)
    return packed.replace(
        segments=jnp.asarray(segment), sequence=jnp.where(padding, -1, packed.sequence)
    )


def complete(transform: LossTransform) -> LossTransform:
    """A chain that can be evaluated, with `transform` in it and ordinary stages around it."""
    infos = tuple(transform.info)
    reads = {read.partition("(")[0] for info in infos for read in info.reads}
    writes = {write for info in infos for write in info.writes}
    inside = [w for info in infos for w in info.writes if w not in info.reads]  # created by it
    before: list[LossTransform] = []
    after: list[LossTransform] = []
    if "batch.advantage" not in inside:
        (after if "batch.reward" in writes else before).append(group_advantage(name="_advantage"))
    if "batch.norm" not in writes:
        (before if reads & {"batch.norm", "batch.count"} else after).append(normalize_by_sequence(name="_norm"))
    if "loss.log_ratio" not in writes and ("loss.log_ratio" in reads or "loss.policy" not in writes):
        (before if "loss.log_ratio" in reads else after).append(token_ratio(name="_ratio"))
    if "loss.policy" not in writes:
        (before if "loss.policy" in reads else after).append(clip_surrogate(name="_surrogate"))
    return chain(*before, transform, *after)


def _usable(objective: LossTransform) -> LossTransform:
    try:
        check_complete(objective)
        return chain(objective)
    except ValueError:
        return complete(objective)


# ------------------------------------------------------------------------------------- measuring

Measured = tuple[Array, Array, dict[str, Array]]  # loss, gradient in the parameters, metric values


def _measure(
    objective: LossTransform, params: Array, batch: TokenBatch, parts: Sequence[TokenBatch] | None = None
) -> Measured:
    """Loss, gradient and metrics of a *prepared* batch, summed over `parts` of it (default: in one)."""
    state = objective.init()
    denominator = jnp.sum(batch.count)

    def one(part: TokenBatch) -> tuple[Array, Array, LossOutput]:
        def scaled(p: Array) -> tuple[Array, LossOutput]:
            result = evaluate(objective, tiny_policy(p, part), part, state)
            return quotient(result.loss_sum, denominator), result

        (value, result), gradient = jax.value_and_grad(scaled, has_aux=True)(params)
        return value, gradient, result

    results = [one(part) for part in parts or [batch]]
    metrics = {
        name: sum((r.metrics[name] for _, _, r in results[1:]), results[0][2].metrics[name])
        for name in results[0][2].metrics
    }
    return (
        sum(r[0] for r in results),
        sum(r[1] for r in results),
        {name: mean.value for name, mean in metrics.items()},
    )


def _same(law: str, objective: LossTransform, left: Any, right: Any, tolerance: float = 1e-9) -> None:
    for what, a, b in zip(("loss", "gradient", "metrics"), left, right, strict=True):
        jax.tree.map(
            lambda x, y, what=what: np.testing.assert_allclose(
                np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance, err_msg=f"{law}: {what} of {objective!r}"
            ),
            a,
            b,
        )


def _start(objective: LossTransform, batch: TokenBatch | None) -> tuple[LossTransform, TokenBatch, Array]:
    batch = sample_batch() if batch is None else batch
    batch = jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, batch
    )
    return _usable(objective), batch, tiny_policy_params(1)


# ------------------------------------------------------------------------------------------- laws


def assert_split_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, splits: Sequence[Sequence[int]] = ((3, 1, 4),)
) -> None:
    """Any split of the rows into micro-batches gives the same loss, gradient and metrics.

    Args:
      splits: rows of each part; they must add up to the rows of the batch.
    """
    with float64():
        objective, batch, params = _start(objective, batch)
        prepared, _ = objective.prepare(batch, objective.init())
        whole = _measure(objective, params, prepared)
        for split in splits:
            edges = np.cumsum([0, *split])
            if edges[-1] != batch.shape[0]:
                raise ValueError(f"split {tuple(split)} does not add up to the {batch.shape[0]} rows of the batch.")
            parts = [rows(prepared, int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]
            _same(f"split {tuple(split)}", objective, whole, _measure(objective, params, prepared, parts))


def assert_padding_inert(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """NaN outside the mask, in the batch and in the forward pass, changes nothing; gradients there are 0."""
    with float64():
        objective, batch, params = _start(objective, batch)
        prepared, _ = objective.prepare(batch, objective.init())
        clean = _measure(objective, params, prepared)

        def spoil(x: Array) -> Array:
            where = batch.mask.reshape(batch.shape + (1,) * (x.ndim - 2))
            return jnp.where(where, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

        # The temperature of a token is positive by contract, masked or not.
        dirty = _fields(batch, spoil).replace(temperature=batch.temperature)
        dirty, _ = objective.prepare(dirty, objective.init())

        def value(output: PolicyOutput) -> Array:
            result = evaluate(objective, output, dirty, objective.init())
            return quotient(result.loss_sum, result.denominator)

        output = jax.tree.map(spoil, tiny_policy(params, batch))
        result, gradient = jax.value_and_grad(value)(output)
        outside = jnp.where(batch.mask, 0.0, gradient.logprob)
        if not np.all(np.asarray(outside) == 0):
            raise AssertionError(f"padding: a masked log-prob of {objective!r} has a gradient: {outside}")
        _, pull = jax.vjp(lambda p: tiny_policy(p, batch), params)
        metrics = evaluate(objective, output, dirty, objective.init()).metrics
        _same(
            "padding",
            objective,
            clean,
            (result, pull(gradient)[0], {name: mean.value for name, mean in metrics.items()}),
        )


def assert_packing_invariant(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """Padded rows and packed rows of the same sequences give the same loss, gradient and metrics."""
    with float64():
        objective, batch, params = _start(objective, batch)
        results = []
        for layout in (batch, pack(batch)):
            prepared, _ = objective.prepare(layout, objective.init())
            results.append(_measure(objective, params, prepared))
        _same("packing", objective, *results)


def assert_mesh_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, meshes: Sequence[tuple[int, int]] | None = None
) -> None:
    """One device and any mesh give the same loss, gradient and metrics; rows are sharded over both axes.

    Args:
      meshes: shapes (data, fsdp); default: (devices / 2, 2). Their sizes must divide the rows of the batch.

    Raises:
      ValueError: there is only one device (set jax_num_cpu_devices before JAX starts).
    """
    devices = len(jax.devices())
    if devices < 2:
        raise ValueError("assert_mesh_invariant needs several devices: set jax_num_cpu_devices=8 before JAX starts.")
    with float64():
        objective, batch, params = _start(objective, batch)

        def run(params: Array, batch: TokenBatch) -> Measured:
            prepared, _ = objective.prepare(batch, objective.init())
            return _measure(objective, params, prepared)

        single = run(params, batch)
        for shape in meshes or ((devices // 2, 2),):
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "fsdp"))
            by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            sharded = jax.tree.map(
                lambda x, s=(by_rows, whole): jax.device_put(x, s[0] if jnp.ndim(x) >= 2 else s[1]), batch
            )
            _same(f"mesh {shape}", objective, single, jax.jit(run)(jax.device_put(params, whole), sharded))


def assert_weight_detached(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """No gradient reaches the parameters through the weight of the policy term."""
    with float64():
        objective, batch, params = _start(objective, batch)
        prepared, state = objective.prepare(batch, objective.init())

        def weight(p: Array) -> Array:
            start = start_loss(tiny_policy(p, prepared), prepared)
            return jnp.sum(objective.apply(start, prepared, state).weight)

        gradient = np.asarray(jax.grad(weight)(params))
        if np.any(gradient != 0):
            raise AssertionError(f"weight: the gradient of Σ weight of {objective!r} is {gradient}, not 0.")


def assert_on_policy_identity(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """With behavior = proximal = current the gradient is REINFORCE's, clip fractions and KL are 0.

    A law of ratios and surrogates, for a batch whose advantage is constant over each sequence.
    """
    with float64():
        objective, batch, params = _start(objective, batch)
        current = tiny_policy(params, batch).logprob
        batch = batch.replace(logprob_behavior=current, logprob_proximal=current)
        prepared, _ = objective.prepare(batch, objective.init())
        _, gradient, metrics = _measure(objective, params, prepared)

        def reinforce(p: Array) -> Array:
            logprob = jnp.where(prepared.mask, tiny_policy(p, prepared).logprob, 0.0)
            return quotient(-jnp.sum(prepared.norm * prepared.advantage * logprob), jnp.sum(prepared.count))

        np.testing.assert_allclose(
            np.asarray(gradient), np.asarray(jax.grad(reinforce)(params)), atol=1e-12, err_msg=f"{objective!r}"
        )
        for name, value in metrics.items():
            if name.startswith(("clip_fraction", "kl_behavior", "kl_proximal")) and abs(float(value)) > 1e-12:
                raise AssertionError(f"on-policy: {name} of {objective!r} is {float(value)}, not 0.")


def check_transform(transform: LossTransform, batch: TokenBatch | None = None) -> None:
    """Runs every law that holds for this kind of transform: a stage, or a whole objective.

    Split, padding and packing invariance and the detached weight hold for all; mesh invariance is checked
    where there are several devices; the on-policy identity is one of ratios and surrogates.
    """
    assert_split_invariant(transform, batch)
    assert_padding_inert(transform, batch)
    assert_packing_invariant(transform, batch)
    assert_weight_detached(transform, batch)
    if len(jax.devices()) > 1:
        assert_mesh_invariant(transform, batch)
    writes = {write for info in transform.info for write in info.writes}
    if writes <= {"loss.log_ratio", "loss.policy"}:
        assert_on_policy_identity(transform, batch)
