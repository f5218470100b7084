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
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

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
    stages,
    takes_pairs,
    token_ratio,
)
from jaxrl_llm.transforms.begin import begin, clean
from jaxrl_llm.transforms.dataflow import ON_DEMAND, PRODUCED, Need, require
from jaxrl_llm.transforms.evaluate import start_loss
from jaxrl_llm.types import LossOutput, LossState, Mean, PolicyOutput, TokenBatch

__all__ = [
    "assert_gradient",
    "assert_mesh_invariant",
    "assert_on_policy_identity",
    "assert_order_invariant",
    "assert_packing_invariant",
    "assert_padding_inert",
    "assert_split_invariant",
    "assert_weight_detached",
    "check_transform",
    "complete",
    "float64",
    "laws",
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


def pack(batch: TokenBatch, width: int | None = None, *, trees: bool = False) -> TokenBatch:
    """The same sequences, several to a row: first fit, in order, into rows of `width` tokens (default 2 T).

    Args:
      batch: one sequence a row, right-padded, not prepared.
      trees: the untrained tokens that begin all sequences of a group are laid out once, before them, as a shared
        prefix (see `TokenBatch.segments`). The tokens are those of its first sequence.
    """
    lengths = np.asarray(jnp.sum(batch.segments > 0, axis=1))
    families = _families(batch, lengths) if trees else [(0, [row]) for row in range(len(lengths))]
    sizes = [shared + sum(int(lengths[row]) - shared for row in members) for shared, members in families]
    width = max([2 * batch.shape[1], *sizes]) if width is None else width
    bins: list[list[int]] = []
    free: list[int] = []
    for family, size in enumerate(sizes):
        home = next((i for i, space in enumerate(free) if space >= size), None)
        if home is None:
            bins.append([])
            free.append(width)
            home = len(bins) - 1
        bins[home].append(family)
        free[home] -= size
    source_row = np.zeros((len(bins), width), np.int32)
    source_column = np.zeros((len(bins), width), np.int32)
    segment = np.zeros((len(bins), width), np.int32)

    def lay_out(i: int, at: int, row: int, columns: np.ndarray, number: int) -> int:
        cells = slice(at, at + len(columns))
        source_row[i, cells], source_column[i, cells], segment[i, cells] = row, columns, number
        return at + len(columns)

    for i, chosen in enumerate(bins):
        at = number = 0
        # A sequence with a prompt of its own comes before the families: it must not see their prefix.
        for f in sorted(chosen, key=lambda f: families[f][0] > 0):
            shared, members = families[f]
            at = lay_out(i, at, members[0], np.arange(shared), -1 - f)
            for row in members:
                number += 1
                at = lay_out(i, at, row, np.arange(shared, int(lengths[row])), number)
    padding, own = jnp.asarray(segment == 0), jnp.asarray(segment > 0)

    def gather(x: Array, there: Array = own) -> Array:
        x = x[source_row, source_column]
        return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    packed = _fields(batch, gather)
    return packed.replace(
        tokens=gather(batch.tokens, ~padding),
        positions=gather(batch.positions, ~padding),
        segments=jnp.asarray(segment),
        sequence=jnp.where(own, packed.sequence, -1),
    )


def _families(batch: TokenBatch, lengths: np.ndarray) -> list[tuple[int, list[int]]]:
    """(shared tokens, rows) of each group: what none of them trains, but for the token that predicts the first."""
    group, mask = np.asarray(batch.group)[:, 0], np.asarray(batch.mask)
    first = np.where(mask.any(axis=1), mask.argmax(axis=1), lengths)
    families = []
    for one in dict.fromkeys(group.tolist()):
        members = np.flatnonzero(group == one).tolist()
        families.append((max(0, int(first[members].min()) - 1) if len(members) > 1 else 0, members))
    return families


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


# ------------------------------------------------------------------------------- stages that name themselves

PER_TOKEN = {
    "prepare": ("reward", "advantage", "returns", "weight", "norm", "count"),
    "apply": ("log_ratio", "policy", "weight"),
}
NOT_TRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError)


def _watched(member: LossTransform) -> LossTransform:
    """The same stage; what goes wrong in it is said with its name, the part, and what to return."""

    def guarded(part: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except NOT_TRACEABLE as error:
            raise AssertionError(
                f"jit: {part} of {member!r} needs the value of an array, which is not there while a program is "
                f"traced ({type(error).__name__}). Replace float(x), `if x`, NumPy and boolean indexing by jnp "
                f"functions and jnp.where."
            ) from error
        except Exception as error:
            raise AssertionError(f"{part} of {member!r} raised {type(error).__name__}: {error}") from error

    def prepare(batch: TokenBatch, state: Any) -> Any:
        result, state = guarded("prepare", lambda: member.prepare(batch, state))
        _check_returned("prepare", member, result, batch)
        return result, state

    def apply(loss: LossState, batch: TokenBatch, state: Any) -> Any:
        result = guarded("apply", lambda: member.apply(loss, batch, state))
        _check_returned("apply", member, result, batch)
        return result

    return member._replace(prepare=prepare, apply=apply)


def _check_returned(part: str, member: LossTransform, result: Any, batch: TokenBatch) -> None:
    where, kind = ("batch", TokenBatch) if part == "prepare" else ("loss", LossState)
    if not isinstance(result, kind):
        raise AssertionError(
            f"{part} of {member!r} returned {type(result).__name__}. Return a {kind.__name__}: "
            f"`return {where}.replace(...)`."
        )
    arrays = {name: getattr(result, name) for name in PER_TOKEN[part] if getattr(result, name) is not None}
    if isinstance(result, LossState):
        for name, entry in result.penalties.items():
            if not (isinstance(entry, tuple) and len(entry) == 2):
                raise AssertionError(
                    f"{part} of {member!r} left {type(entry).__name__} in loss.penalties[{name!r}]. Use "
                    f"`return loss.penalize({name!r}, value)`."
                )
            arrays[f"penalties[{name!r}]"] = entry[0]
    for name, x in arrays.items():
        found = (
            f"{jnp.result_type(x)}{list(jnp.shape(x))}"
            if hasattr(x, "dtype")
            else f"{type(x).__name__} {x!r}"
        )
        if jnp.shape(x) != batch.shape or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise AssertionError(
                f"{part} of {member!r} left {found} in {where}.{name}. Return a floating-point array of one value a "
                f"token, {list(batch.shape)}: `jnp.full({where}.mask.shape, x, float)` for one of equal values."
            )
    logged = "logged" if part == "prepare" else "metrics"
    for name, x in getattr(result, logged).items():
        if not isinstance(x, Mean):
            raise AssertionError(
                f"{part} of {member!r} left {type(x).__name__} in {where}.{logged}[{name!r}]. Use "
                f"`return {where}.log({name!r}, value)` with one value a token: a mean that merges over any split."
            )


# ------------------------------------------------------------------------------------- measuring

Measured = tuple[Array, Array, dict[str, Array]]  # loss, gradient in the parameters, metric values


def _measure(objective: LossTransform, params: Array, batch: TokenBatch) -> Measured:
    """Loss, gradient and metrics of a *prepared* batch."""
    return _merge([_measure_part(objective, params, batch, jnp.sum(require("_measure", batch, "count")))])


def _measure_part(
    objective: LossTransform, params: Array, part: TokenBatch, denominator: Array
) -> tuple[Array, Array, dict[str, Mean]]:
    """The part's share of the loss and of the gradient, and its metrics."""

    def scaled(p: Array) -> tuple[Array, LossOutput]:
        result = evaluate(objective, tiny_policy(p, part), part, objective.init())
        return quotient(result.loss_sum, denominator), result

    (value, result), gradient = jax.value_and_grad(scaled, has_aux=True)(params)
    return value, gradient, result.metrics


def _merge(parts: Sequence[tuple[Array, Array, dict[str, Mean]]]) -> Measured:
    metrics = {
        name: sum((metrics[name] for _, _, metrics in parts[1:]), mean) for name, mean in parts[0][2].items()
    }
    loss = jnp.sum(jnp.stack([loss for loss, _, _ in parts]))
    gradient = jnp.sum(jnp.stack([gradient for _, gradient, _ in parts]), axis=0)
    return loss, gradient, {name: mean.value for name, mean in metrics.items()}


class _Setting:
    """A complete objective, a batch in float64, and what they give on one device, in one piece."""

    def __init__(self, transform: LossTransform, batch: TokenBatch | None, *, compiled: bool = False):
        self.checked = frozenset(info.name for info in transform.info)
        self.objective = chain(*map(_watched, stages(_usable(transform))))
        self.compiled = compiled
        self.batch = jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x,
            sample_batch() if batch is None else batch,
        )
        self.params = tiny_policy_params(1)
        self.prepared, self.state = self.objective.prepare(self.batch, self.objective.init())

    @functools.cached_property
    def measured(self) -> Measured:
        return _measure(self.objective, self.params, self.prepared)

    @functools.cached_property
    def steps(self) -> list[_Step]:
        """Every part of the checked stages, with what it is given where it stands in the chain."""
        members, state = stages(self.objective), self.objective.init()
        batch = begin(self.batch, [field for info in self.objective.info for field in info.writes])
        steps = []

        def step(part: str, member: LossTransform, loss: LossState | None, batch: TokenBatch) -> Any:
            own = state.get(member.info.name)  # type: ignore[union-attr]  # of a stage

            def run(loss: LossState | None, batch: TokenBatch) -> Any:
                return member.prepare(batch, own)[0] if loss is None else member.apply(loss, batch, own)

            after = run(loss, batch)
            if member.info.name in self.checked:  # type: ignore[union-attr]  # of a stage
                steps.append(_Step(member, part, run, loss, batch, after))
            return after

        for member in members:
            batch = step("prepare", member, None, batch)
        state, batch = self.state, clean(batch)
        loss = start_loss(tiny_policy(self.params, batch), batch)
        for member in members:
            loss = step("apply", member, loss, batch)
        return steps

    def measure(self, batch: TokenBatch, *, prepare: bool = False) -> Measured:
        """Of another layout of the batch. Compiled, it is faster where an operation meets a shape for the first time."""

        def run(params: Array, batch: TokenBatch) -> Measured:
            if prepare:
                batch, _ = self.objective.prepare(batch, self.objective.init())
            return _measure(self.objective, params, batch)

        return (jax.jit(run, compiler_options=FAST_COMPILE) if self.compiled else run)(self.params, batch)


class _Step(NamedTuple):
    """A part of a stage: what it is given and what it makes of it."""

    member: LossTransform
    part: str
    run: Callable[[LossState | None, TokenBatch], Any]
    loss: LossState | None  # None in prepare
    batch: TokenBatch
    after: Any

    def given(self, **changes: Any) -> Any:
        """What the part makes of the same with other fields, named "batch.NAME" or "loss.NAME"."""
        records = {"loss": self.loss, "batch": self.batch}
        for name, value in changes.items():
            record, _, field = name.partition(".")
            records[record] = records[record].replace(**{field: value})  # type: ignore[union-attr]
        return self.run(records["loss"], records["batch"])  # type: ignore[arg-type]

    def value(self, field: str) -> Any:
        """The field "batch.NAME" or "loss.NAME" that the part is given; None where it has none."""
        record, _, name = field.partition(".")
        return getattr(self.loss if record == "loss" else self.batch, name, None)


FAST_COMPILE = {"xla_backend_optimization_level": 0}  # small programs, run once


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
    objective: LossTransform, batch: TokenBatch | None = None, splits: Sequence[Sequence[int]] | None = None
) -> None:
    """Any split of the rows into micro-batches gives the same loss, gradient and metrics.

    Args:
      splits: rows of each part; they must add up to the rows B of the batch. Default: (1, B - 1) and parts of two;
        pairs stay together.
    """
    with float64():
        setting = _Setting(objective, batch)
        _split(setting, splits)


def _split(at: _Setting, splits: Sequence[Sequence[int]] | None = None) -> None:
    size = at.batch.shape[0]
    if splits is None:
        first = 2 if takes_pairs(at.objective) else 1
        splits = (
            ((first, size - first), (2,) * (size // 2) + (1,) * (size % 2)) if size > first else ((size,),)
        )

    def one(params: Array, part: TokenBatch, count: Array) -> tuple[Array, Array, dict[str, Mean]]:
        return _measure_part(at.objective, params, part, count)

    run = jax.jit(one, compiler_options=FAST_COMPILE) if at.compiled else one
    for split in splits:
        edges = np.cumsum([0, *split])
        if edges[-1] != at.batch.shape[0]:
            raise ValueError(
                f"split {tuple(split)} does not add up to the {at.batch.shape[0]} rows of the batch."
            )
        parts = [rows(at.prepared, int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]
        count = jnp.sum(require("split", at.prepared, "count"))
        _same(f"split {tuple(split)}", at, _merge([run(at.params, part, count) for part in parts]))


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
    """Padded rows, packed rows, and rows that share the prompt of a group, give the same loss, gradient and metrics."""
    with float64():
        setting = _Setting(objective, batch)
        _packing(setting)
        _trees(setting)


def _packing(at: _Setting) -> None:
    _same("packing", at, at.measure(pack(at.batch), prepare=True))


def _trees(at: _Setting) -> None:
    _same("packing with shared prompts", at, at.measure(pack(at.batch, trees=True), prepare=True))


def assert_order_invariant(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """The trajectories, or pairs, in reverse give the same loss, gradient and metrics."""
    with float64():
        _order(_Setting(objective, batch))


def _order(at: _Setting) -> None:
    if takes_pairs(at.objective):
        order = np.arange(at.batch.shape[0]).reshape(-1, 2)[::-1].reshape(-1)
    else:
        of = np.asarray(at.batch.trajectory)[:, 0]
        seen = list(dict.fromkeys(of.tolist()))
        order = np.argsort([-seen.index(one) for one in of.tolist()], kind="stable")
    prepared, _ = at.objective.prepare(_fields(at.batch, lambda x: x[order]), at.objective.init())
    _same("order of the rows", at, _measure(at.objective, at.params, prepared))


def assert_mesh_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, meshes: Sequence[tuple[int, int]] | None = None
) -> None:
    """One device and any mesh give the same loss, gradient and metrics; rows are sharded over both axes.

    Args:
      meshes: shapes (data, fsdp); default: (devices, 1) and (2, devices / 2). Their sizes must divide the rows of
        the batch.

    Raises:
      ValueError: there is only one device (set jax_num_cpu_devices before JAX starts).
    """
    with float64():
        _mesh(_Setting(objective, batch), meshes)


def _mesh(at: _Setting, meshes: Sequence[tuple[int, int]] | None = None) -> None:
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(
            "assert_mesh_invariant needs several devices: set jax_num_cpu_devices=8 before JAX starts."
        )

    def run(params: Array, batch: TokenBatch) -> Measured:
        prepared, _ = at.objective.prepare(batch, at.objective.init())
        return _measure(at.objective, params, prepared)

    compiled = jax.jit(run, compiler_options=FAST_COMPILE)
    for shape in meshes or ((len(devices), 1), (2, len(devices) // 2)):
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


def assert_gradient(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """The gradient is that of central differences, what the objective detaches (`stop_gradient`) held.

    Finds a derivative that is written by hand and wrong, and values that change without one: a rounded log-prob, a
    comparison in the place of a gate, a log-prob that went through NumPy.
    """
    with float64():
        _gradient(_Setting(objective, batch))


def _gradient(at: _Setting, step: float = 1e-6, tolerance: float = 1e-6) -> None:
    def loss(params: Array) -> Array:
        result = evaluate(at.objective, tiny_policy(params, at.prepared), at.prepared, at.objective.init())
        return quotient(result.loss_sum, result.denominator)

    held: list[Array] = []
    with _holding(held, None):
        loss(at.params)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=at.params.shape))
    moved = []
    for sign in (1, -1):
        with _holding([], iter(held)):
            moved.append(float(loss(at.params + sign * step * direction)))
    expected = (moved[0] - moved[1]) / (2 * step)
    found = float(jnp.sum(at.measured[1] * direction))
    if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):  # NaN is a violation, too
        raise AssertionError(
            f"gradient: along a random direction {at.objective!r} has the derivative {found}, its loss changes by "
            f"{expected}. Detach what is meant to be held with jax.lax.stop_gradient."
        )


@contextlib.contextmanager
def _holding(record: list[Array], replay: Iterator[Array] | None) -> Iterator[None]:
    """Within it, `jax.lax.stop_gradient` records what it is given, or gives what was recorded instead."""

    def one(x: Array) -> Array:
        if isinstance(x, jax.core.Tracer):  # inside jit or vmap there is no value to hold
            return x
        record.append(x)
        return x if replay is None else next(replay)

    with mock.patch.object(jax.lax, "stop_gradient", lambda tree: jax.tree.map(one, tree)):
        yield


# ----------------------------------------------------------------------------------- declarations

BOOKKEEPING = {
    "batch.logged",
    "batch.norms",
    "batch.picked",
    "loss.metrics",
}  # dicts by name: nobody's fields
DIFFERENTIABLE = (
    "logprob",
    "entropy",
    "value",
    "topk_logprob",
    "divergence",
    "log_ratio",
    "policy",
    "weight",
)


def _structure(x: Any) -> Any:
    return jax.tree.structure(x)


def _equal(x: Any, y: Any) -> bool:
    """Two trees of arrays have the same structure and values."""
    if x is y:
        return True
    left, right = jax.tree.leaves(x), jax.tree.leaves(y)
    return _structure(x) == _structure(y) and all(
        a is b
        or np.array_equal(
            np.asarray(a), np.asarray(b), equal_nan=jnp.issubdtype(jnp.result_type(a), jnp.floating)
        )
        for a, b in zip(left, right, strict=True)
    )


def _same_objects(x: Any, y: Any) -> bool:
    left, right = jax.tree.leaves(x), jax.tree.leaves(y)
    return _structure(x) == _structure(y) and all(a is b for a, b in zip(left, right, strict=True))


def _fields_of(record: Any) -> dict[str, Any]:
    where = "batch" if isinstance(record, TokenBatch) else "loss"
    return {f"{where}.{f.name}": getattr(record, f.name) for f in dataclasses.fields(record)}


def _declarations(at: _Setting) -> None:
    """Each stage reads the on-demand fields that it declares, and writes the fields that it declares, no others."""
    for member in dict.fromkeys(step.member.info.name for step in at.steps):  # type: ignore[union-attr]
        steps = [step for step in at.steps if step.member.info.name == member]  # type: ignore[union-attr]
        _check_writes(steps)
        _check_reads(steps)


def _check_writes(steps: Sequence[_Step]) -> None:
    (info,) = steps[0].member.info
    written = set()
    for step in steps:
        before = _fields_of(step.batch if step.loss is None else step.loss)
        for field, new in _fields_of(step.after).items():
            if _same_objects(new, before[field]):
                # Outside of a trace stop_gradient returns what it is given: the tape tells.
                if field != "loss.logprob" or step.after is step.loss:
                    continue
            else:
                written.add(field)
            if field in BOOKKEEPING or (field in info.writes and field != "loss.logprob"):
                continue
            if field == "batch.signal" and "batch.advantage" in info.writes:  # where the advantage is defined
                continue
            if _untouched(step, field, before[field], new):
                continue
            if field == "loss.logprob":
                raise AssertionError(
                    f"declarations: {step.part} of {info} changes loss.logprob, its value or its gradient, and every "
                    f"later stage would see another policy. Leave it as it is; compute from it and write "
                    f"loss.log_ratio, loss.policy or a penalty."
                )
            raise AssertionError(
                f"declarations: {step.part} of {info} changes {field}, which it does not declare. Add "
                f'"{field}" to writes, or leave the field as it is.'
            )
    missing = [field for field in info.writes if field not in written]
    if missing:
        raise AssertionError(
            f"declarations: {info} declares that it writes {missing[0]} and leaves it as it is. Take "
            f'"{missing[0]}" out of writes, or return it: `replace({missing[0].partition(".")[2]}=...)`. Where an '
            f"argument decides, writes can be a function of the arguments: `writes=lambda a: ...`."
        )


def _untouched(step: _Step, field: str, old: Any, new: Any) -> bool:
    """The field, computed anew, is what it was: the same values and, on the tape, the same gradient."""
    if old is None and field in ("batch.signal", "batch.counted"):
        old = step.batch.mask
    if old is None and field == "batch.weight":
        old = jnp.ones_like(new)
    if not _equal(old, new):
        return False
    name = field.partition(".")[2]
    if step.loss is None or name not in DIFFERENTIABLE:
        return True
    loss = step.loss
    values = {n: getattr(loss, n) for n in DIFFERENTIABLE if getattr(loss, n) is not None}
    _, pull = jax.vjp(lambda v: getattr(step.run(loss.replace(**v), step.batch), name), values)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=new.shape))
    expected = {n: weights if n == name else jnp.zeros_like(x) for n, x in values.items()}
    where = loss.mask.reshape(loss.mask.shape + (1,) * (new.ndim - 2))
    return all(
        np.allclose(np.where(where, got, 0), np.where(where, expected[n], 0))
        for n, got in pull(weights)[0].items()
        if np.shape(got)[2:] == np.shape(new)[2:] or np.any(np.asarray(got))
    )


def _check_reads(steps: Sequence[_Step]) -> None:
    (info,) = steps[0].member.info
    declared = {Need(read).key for read in info.reads}
    hidden = sorted((ON_DEMAND | set(PRODUCED)) - declared - set(info.writes))
    for step in steps:
        here = [field for field in hidden if step.value(field) is not None]
        if _depends(step, here):
            culprit = next((field for field in here if _depends(step, [field])), " or ".join(here))
            raise AssertionError(
                f"declarations: {step.part} of {info} reads {culprit}, which it does not declare: where nothing else "
                f'needs the field it is None. Add "{culprit}" to reads.'
            )
    for field in sorted(declared & ON_DEMAND):
        given = [step for step in steps if step.value(field) is not None]
        leaves = [x for step in given for x in jax.tree.leaves(step.value(field))]
        # Integers (token ids, roles) say what other fields are about.
        if leaves and all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
            if not any(_uses(step, field) for step in given):
                raise AssertionError(
                    f"declarations: {info} declares that it reads {field}, and other values of it change nothing. The "
                    f'learner would compute it for nothing: take "{field}" out of reads, or use it.'
                )


def _results(step: _Step, after: Any, without: Sequence[str]) -> dict[str, Any]:
    """What a part gives, but for the fields that it was given and passes on."""
    return {field: value for field, value in _fields_of(after).items() if field not in without}


def _depends(step: _Step, fields: Sequence[str]) -> bool:
    """Without these fields the part fails or gives something else."""
    try:
        after = step.given(**dict.fromkeys(fields))
    except AssertionError:
        return True
    return not _equal(_results(step, step.after, fields), _results(step, after, fields))


def _uses(step: _Step, field: str) -> bool:
    """Other values of the field change what the part gives, or its gradient."""
    value = step.value(field)
    before = _results(step, step.after, [field])
    numbers = np.random.default_rng(0)
    for shift in (0.0, 0.5, -0.5, 5.0, -5.0, 50.0, -50.0):  # a threshold may be far
        other = jax.tree.map(lambda x, s=shift: x + s + 0.3 * numbers.normal(size=x.shape), value)
        after = step.given(**{field: other})
        if not _equal(before, _results(step, after, [field])):
            return True
        if step.loss is not None and not _equal(_pulled(step, field, value), _pulled(step, field, other)):
            return True
    return False


def _pulled(step: _Step, field: str, value: Any) -> Array:
    """Gradient of a sum of what an apply gives in the log-probs."""
    loss = require("loss", step, "loss")

    def total(logprob: Array) -> Array:
        after = step.given(**{"loss.logprob": logprob, field: value})
        kept = [after.policy, after.log_ratio, *(v for v, _ in after.penalties.values())]
        return sum((jnp.sum(x) for x in kept if x is not None), jnp.zeros(()))

    return jax.grad(total)(loss.logprob)


STANDARD: dict[str, Callable[..., LossTransform]] = {
    "batch.advantage": group_advantage,
    "batch.norm": normalize_by_sequence,
    "loss.log_ratio": token_ratio,
    "loss.policy": clip_surrogate,
}


def _signal(at: _Setting) -> None:
    """No stage takes the whole gradient away from a loss that has a value (a mask may take the value, too)."""
    if np.any(np.asarray(at.measured[1]) != 0):
        return
    members, batch = stages(at.objective), clean(at.prepared)
    loss = at.objective.apply(start_loss(tiny_policy(at.params, batch), batch), batch, at.state)
    terms = [value for value, _ in loss.penalties.values()]
    terms += [] if loss.policy is None else [loss.weight * loss.policy]
    norm = require("signal", batch, "norm")
    if not any(np.any(np.where(batch.mask, norm * term, 0.0) != 0) for term in terms):
        return
    for member in members:
        name = member.info.name  # type: ignore[union-attr]  # of a stage
        if name not in at.checked:
            continue
        writes = member.info.writes  # type: ignore[union-attr]  # of a stage
        instead = [make(name="_instead") for field, make in STANDARD.items() if field in writes][:1]
        rest = [new for other in members for new in (instead if other is member else [other])]
        try:
            without = _usable(chain(*rest))
        except ValueError:  # it writes what others read, and no standard stage does
            continue
        prepared, _ = without.prepare(at.batch, without.init())
        if np.any(np.asarray(_measure(without, at.params, prepared)[1]) != 0):
            raise AssertionError(
                f"signal: with {member!r} the loss has a value and its gradient is 0 for every parameter; without the stage it is not. Look for "
                f"stop_gradient and for a log-prob that is rounded or compared."
            )


def _jit(at: _Setting) -> None:
    """`prepare` and `apply` can be traced: no value of an array decides what Python does."""
    objective = at.objective
    jax.eval_shape(lambda b: objective.prepare(b, objective.init())[0], at.batch)

    def apply(params: Array, batch: TokenBatch) -> LossState:
        return objective.apply(start_loss(tiny_policy(params, batch), batch), batch, objective.init())

    jax.eval_shape(apply, at.params, clean(at.prepared))


LAWS = {
    "declarations": _declarations,
    "signal": _signal,
    "jit": _jit,
    "order": _order,
    "padding": _padding,
    "packing": _packing,
    "trees": _trees,
    "detached": _detached,
    "gradient": _gradient,
    "on_policy": _on_policy,
}
"""The laws besides those of splits and meshes, which take arguments: what `check_transform` runs, in this order."""


def laws(transform: LossTransform) -> tuple[str, ...]:
    """The laws that hold for this kind of transform.

    Declarations, signal, jit, splits, order, padding and meshes, the detached weight and the gradient hold for all; packing for all but stages
    over pairs, which have their answers on rows 2i and 2i + 1; the on-policy identity for ratios and surrogates:
    where nothing but the ratio or the policy term is written.
    """
    writes = {write for info in transform.info for write in info.writes}
    pairs = takes_pairs(transform)
    ratio = writes <= {"loss.log_ratio", "loss.policy"} and not pairs
    left_out = ({"packing", "trees"} if pairs else set()) | (set() if ratio else {"on_policy"})
    return ("split", "mesh", *(law for law in LAWS if law not in left_out))


def check_transform(
    transform: LossTransform,
    batch: TokenBatch | None = None,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    mesh: bool | None = None,
    on_policy: bool | None = None,
    only: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Runs every law that holds for this kind of transform (`laws`): a stage, or a whole objective.

    The mesh law needs several devices. On a machine with one, ask for eight of its CPU before JAX is used:

        jax.config.update("jax_num_cpu_devices", 8)
        jaxrl_llm.runtime.virtual_devices_need_threads()

    Args:
      splits: rows of the micro-batches, see `assert_split_invariant`.
      mesh: whether to check mesh invariance, which compiles a program; default: where there are several devices.
      on_policy: whether to check the on-policy identity; default: what `laws` says. A surrogate that is no policy
        gradient on-policy, by design, says False.
      only: the laws to run, of `laws`; default: all of them.

    Returns:
      The names of the laws that were checked, in order: "mesh" is not among them where there is one device.
        finite        loss, gradient and metrics are
        declarations  each stage reads the on-demand fields that it declares, and writes what it declares
        signal        no stage takes the whole gradient away         jit        prepare and apply can be traced
        split         any micro-batches                              order      any order of trajectories, or pairs
        padding       NaN under the mask                             packing    several sequences a row
        trees         rows with shared prompts                       mesh       one device, or many
        detached      no gradient through the weight                 gradient   that of central differences
        on_policy     REINFORCE's gradient where behavior = proximal = current

    Raises:
      AssertionError: a law does not hold, or a stage fails; the text names the law, or the part, the stage or the
        objective, and both numbers or what to do.
    """
    with float64():
        # A whole check meets six shapes. To compile a program for each takes a third of the time of its operations
        # one by one, but for few laws, on many stages, these are there already.
        at = _Setting(transform, batch, compiled=only is None)
        holding = set(laws(transform if takes_pairs(transform) else at.objective)) - {"on_policy"}
        holding |= {"on_policy"} & set(laws(transform)) if on_policy is None else set()
        if only is not None:
            holding &= set(only)
        if on_policy:
            holding.add("on_policy")
        if len(jax.devices()) < 2 if mesh is None else not mesh:
            holding.discard("mesh")
        at.steps  # noqa: B018  # a part that fails is named before anything is compiled
        if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(at.measured)):
            raise AssertionError(
                f"finite: {at.objective!r} gives the loss, gradient and metrics {at.measured}."
            )
        checks: dict[str, Callable[[_Setting], None]] = {
            **LAWS,
            "split": functools.partial(_split, splits=splits),
            "mesh": _mesh,
        }
        checked = [law for law in checks if law in holding]
        for law in checked:
            checks[law](at)
        return ("finite", *checked)
