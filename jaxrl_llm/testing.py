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
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.losses.divergences import forward_kl
from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    check_complete,
    clip_surrogate,
    evaluate,
    group_advantage,
    normalize_by_sequence,
    returns_to_go,
    takes_pairs,
    token_ratio,
)
from jaxrl_llm.transforms.dataflow import require
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
    with jax.enable_x64(True):
        yield


# ----------------------------------------------------------------------------------- tiny policy


def tiny_policy_params(seed: int = 0) -> Array:
    """f[11, 11]: logits of the next token given the last one."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)))


def tiny_policy(params: Array, batch: TokenBatch) -> PolicyOutput:
    """A bigram policy: log-probs, entropies, values and KL to a teacher at the batch's tokens. Differentiable in `params`.

    Depends on the token before only, hence right for padded and packed rows alike.
    """
    before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
    logprobs = jax.nn.log_softmax(params, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    teacher = jax.nn.log_softmax(tiny_policy_params(7), axis=-1)
    output = PolicyOutput(
        logprob=logprobs[before, batch.tokens],
        entropy=entropy[before],
        value=params[before, 0],
        divergence=forward_kl(logprobs, teacher)[before],
    )
    if batch.topk_ids is None:
        return output
    return output.replace(topk_logprob=logprobs[before[..., None], batch.topk_ids])


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
    lists = np.random.default_rng([seed, 1])  # of its own, so that the numbers of the other fields stay
    ids = lists.permuted(np.tile(np.arange(VOCABULARY), (8, width, 1)), axis=-1)[..., :3]
    batch = batch.replace(topk_ids=jnp.asarray(ids, jnp.int32))
    output = tiny_policy(tiny_policy_params(), batch)
    current = output.logprob
    listed = require("sample_batch", output, "topk_logprob")

    def near(scale: float) -> Array:
        return current + scale * rng.normal(size=current.shape)

    def near_topk(scale: float) -> Array:
        return listed + scale * lists.normal(size=(*current.shape, 3))

    return batch.replace(
        topk_logprob_behavior=near_topk(0.2),
        topk_logprob_proximal=near_topk(0.1),
        logprob_behavior=near(0.3),
        logprob_proximal=near(0.2),
        logprob_reference=near(0.5),
        logprob_teacher=near(0.5),
        topk_logprob_teacher=tiny_policy(tiny_policy_params(7), batch).topk_logprob,
        advantage=jnp.asarray(rng.normal(size=current.shape)),
        value=jnp.asarray(rng.normal(size=current.shape)),
        reference_point=jnp.broadcast_to(jnp.asarray(rng.normal(size=(8, 1))) + 0.5, current.shape),
        bootstrap_value=jnp.asarray(rng.normal(size=current.shape)),
        # Rows 1 and 2 are one trajectory. A part of the reward of row 5 could not be computed.
        baseline_reward=jnp.broadcast_to(
            jnp.asarray(rng.normal(size=(8, 1))[[0, 1, 1, 3, 4, 5, 6, 7]]), current.shape
        ),
        rewards={
            "right": jnp.asarray(rng.integers(0, 3, current.shape) / 2),
            "format": jnp.asarray(rng.integers(0, 2, current.shape) / 4).at[5, 5].set(jnp.nan),
        },
        agent=jnp.broadcast_to(jnp.array([0, 1, 1, 0, 1, 0, 1, 0], jnp.int32)[:, None], current.shape),
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
    return packed.replace(segments=jnp.asarray(segment), sequence=jnp.where(padding, -1, packed.sequence))


def complete(transform: LossTransform) -> LossTransform:
    """A chain that can be evaluated, with `transform` in it and ordinary stages around it."""
    infos = tuple(transform.info)
    reads = {read.partition("(")[0] for info in infos for read in info.reads}
    writes = {write for info in infos for write in info.writes}
    inside = [w for info in infos for w in info.writes if w not in info.reads]  # created by it
    before: list[LossTransform] = []
    after: list[LossTransform] = []
    if "batch.advantage" not in inside:
        advantage = returns_to_go if "batch.returns" in reads - writes else group_advantage
        (after if "batch.reward" in writes else before).append(advantage(name="_advantage"))
    if "batch.norm" not in writes:
        (before if reads & {"batch.norm", "batch.count"} else after).append(
            normalize_by_sequence(name="_norm")
        )
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
    denominator = jnp.sum(require("_measure", batch, "count"))

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
    loss = jnp.sum(jnp.stack([r[0] for r in results]))
    gradient = jnp.sum(jnp.stack([r[1] for r in results]), axis=0)
    return loss, gradient, {name: mean.value for name, mean in metrics.items()}


class _Setting:
    """A complete objective, a batch in float64, and what they give on one device, in one piece."""

    def __init__(self, transform: LossTransform, batch: TokenBatch | None):
        self.objective = _usable(transform)
        self.batch = jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x,
            sample_batch() if batch is None else batch,
        )
        self.params = tiny_policy_params(1)
        self.prepared, self.state = self.objective.prepare(self.batch, self.objective.init())

    @functools.cached_property
    def measured(self) -> Measured:
        return _measure(self.objective, self.params, self.prepared)


def _same(law: str, at: _Setting, found: Measured, tolerance: float = 1e-9) -> None:
    for what, expected, value in zip(("loss", "gradient", "metrics"), at.measured, found, strict=True):
        message = f"{law}: {what} of {at.objective!r}"
        jax.tree.map(
            lambda x, y, message=message: np.testing.assert_allclose(
                np.asarray(y), np.asarray(x), rtol=tolerance, atol=tolerance, err_msg=message
            ),
            expected,
            value,
        )


# ------------------------------------------------------------------------------------------- laws


def assert_split_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, splits: Sequence[Sequence[int]] = ((3, 1, 4),)
) -> None:
    """Any split of the rows into micro-batches gives the same loss, gradient and metrics.

    Args:
      splits: rows of each part; they must add up to the rows of the batch.
    """
    with float64():
        setting = _Setting(objective, batch)
        _split(setting, splits)


def _split(at: _Setting, splits: Sequence[Sequence[int]]) -> None:
    for split in splits:
        edges = np.cumsum([0, *split])
        if edges[-1] != at.batch.shape[0]:
            raise ValueError(
                f"split {tuple(split)} does not add up to the {at.batch.shape[0]} rows of the batch."
            )
        parts = [rows(at.prepared, int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]
        _same(f"split {tuple(split)}", at, _measure(at.objective, at.params, at.prepared, parts))


def assert_padding_inert(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """NaN outside the mask, in the batch and in the forward pass, changes nothing; gradients there are 0."""
    with float64():
        _padding(_Setting(objective, batch))


def _padding(at: _Setting) -> None:
    batch, objective = at.batch, at.objective

    def spoil(x: Array) -> Array:
        where = batch.mask.reshape(batch.shape + (1,) * (x.ndim - 2))
        return jnp.where(where, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    # The temperature of a token is positive by contract, masked or not.
    dirty = _fields(batch, spoil).replace(temperature=batch.temperature)
    dirty, state = objective.prepare(dirty, objective.init())

    def value(output: PolicyOutput) -> tuple[Array, dict[str, Any]]:
        result = evaluate(objective, output, dirty, state)
        return quotient(result.loss_sum, result.denominator), result.metrics

    output, pull = jax.vjp(lambda p: tiny_policy(p, batch), at.params)
    (loss, metrics), gradient = jax.value_and_grad(value, has_aux=True)(jax.tree.map(spoil, output))
    outside = np.asarray(jnp.where(batch.mask, 0.0, gradient.logprob))
    if not np.all(outside == 0):
        raise AssertionError(f"padding: masked log-probs of {objective!r} have the gradient {outside}.")
    _same("padding", at, (loss, pull(gradient)[0], {name: mean.value for name, mean in metrics.items()}))


def assert_packing_invariant(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """Padded rows and packed rows of the same sequences give the same loss, gradient and metrics."""
    with float64():
        _packing(_Setting(objective, batch))


def _packing(at: _Setting) -> None:
    prepared, _ = at.objective.prepare(pack(at.batch), at.objective.init())
    _same("packing", at, _measure(at.objective, at.params, prepared))


def assert_mesh_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, meshes: Sequence[tuple[int, int]] | None = None
) -> None:
    """One device and any mesh give the same loss, gradient and metrics; rows are sharded over both axes.

    Args:
      meshes: shapes (data, fsdp); default: (devices / 2, 2). Their sizes must divide the rows of the batch.

    Raises:
      ValueError: there is only one device (set jax_num_cpu_devices before JAX starts).
    """
    with float64():
        _mesh(_Setting(objective, batch), meshes)


def _mesh(at: _Setting, meshes: Sequence[tuple[int, int]] | None) -> None:
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(
            "assert_mesh_invariant needs several devices: set jax_num_cpu_devices=8 before JAX starts."
        )

    def run(params: Array, batch: TokenBatch) -> Measured:
        prepared, _ = at.objective.prepare(batch, at.objective.init())
        return _measure(at.objective, params, prepared)

    # Small programs, run once: compiling them fast matters more than running them fast.
    compiled = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    for shape in meshes or ((len(devices) // 2, 2),):
        mesh = jax.sharding.Mesh(np.asarray(devices[: shape[0] * shape[1]]).reshape(shape), ("data", "fsdp"))
        by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sharded = jax.tree.map(
            lambda x, s=(by_rows, whole): jax.device_put(x, s[0] if jnp.ndim(x) >= 2 else s[1]), at.batch
        )
        _same(f"mesh {shape}", at, compiled(jax.device_put(at.params, whole), sharded))


def assert_weight_detached(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """No gradient reaches the parameters through the weight of the policy term."""
    with float64():
        _detached(_Setting(objective, batch))


def _detached(at: _Setting) -> None:
    def weight(p: Array) -> Array:
        start = start_loss(tiny_policy(p, at.prepared), at.prepared)
        return jnp.sum(at.objective.apply(start, at.prepared, at.state).weight)

    gradient = np.asarray(jax.grad(weight)(at.params))
    if np.any(gradient != 0):
        raise AssertionError(f"weight: the gradient of Σ weight of {at.objective!r} is {gradient}, not 0.")


def assert_on_policy_identity(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """With behavior = proximal = current the gradient is REINFORCE's, clip fractions and KL are 0.

    A law of ratios and surrogates, for a batch whose advantage is constant over each sequence.
    """
    with float64():
        _on_policy(_Setting(objective, batch))


def _on_policy(at: _Setting) -> None:
    output = tiny_policy(at.params, at.batch)
    current, lists = output.logprob, output.topk_logprob
    batch = at.batch.replace(
        logprob_behavior=current,
        logprob_proximal=current,
        topk_logprob_behavior=lists,
        topk_logprob_proximal=lists,
    )
    prepared, _ = at.objective.prepare(batch, at.objective.init())
    _, gradient, metrics = _measure(at.objective, at.params, prepared)

    def reinforce(p: Array) -> Array:
        logprob = jnp.where(prepared.mask, tiny_policy(p, prepared).logprob, 0.0)
        return quotient(-jnp.sum(prepared.norm * prepared.advantage * logprob), jnp.sum(prepared.count))

    np.testing.assert_allclose(
        np.asarray(gradient),
        np.asarray(jax.grad(reinforce)(at.params)),
        atol=1e-12,
        err_msg=f"on-policy: gradient of {at.objective!r}",
    )
    for name, value in metrics.items():
        if name.startswith(("clip_fraction", "kl_behavior", "kl_proximal")) and abs(float(value)) > 1e-12:
            raise AssertionError(f"on-policy: {name} of {at.objective!r} is {float(value)}, not 0.")


def check_transform(
    transform: LossTransform,
    batch: TokenBatch | None = None,
    *,
    splits: Sequence[Sequence[int]] = ((3, 1, 4),),
    mesh: bool | None = None,
    on_policy: bool | None = None,
) -> None:
    """Runs every law that holds for this kind of transform: a stage, or a whole objective.

    Split, padding and packing invariance and the detached weight hold for all; the on-policy identity is one
    of ratios and surrogates. Stages over pairs have their answers on rows 2i and 2i + 1: no packing, even splits.

    Args:
      mesh: whether to check mesh invariance, which compiles a program; default: where there are several devices.
      on_policy: whether to check the on-policy identity; default: where nothing but the ratio or the policy term is
        written. A surrogate that is no policy gradient on-policy, by design, says False.

    Raises:
      AssertionError: a law does not hold; the text names the law, the objective and both numbers.
    """
    with float64():
        at = _Setting(transform, batch)
        _split(at, splits)
        _padding(at)
        pairs = takes_pairs(at.objective)
        if not pairs:
            _packing(at)
        _detached(at)
        if len(jax.devices()) > 1 if mesh is None else mesh:
            _mesh(at, None)
        writes = {write for info in transform.info for write in info.writes}
        usual = writes <= {"loss.log_ratio", "loss.policy"} and not pairs
        if usual if on_policy is None else on_policy:
            _on_policy(at)
