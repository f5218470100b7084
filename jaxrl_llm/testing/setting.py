"""What a law is checked on: a complete objective, a batch, and what they give, measured once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.testing.tiny import sample_batch, tiny_policy, tiny_policy_params
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
    token_ratio,
)
from jaxrl_llm.transforms.begin import begin, clean
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.evaluate import start_loss
from jaxrl_llm.types import LossOutput, LossState, Mean, TokenBatch

__all__ = [
    "FAST_COMPILE",
    "Measured",
    "Setting",
    "Step",
    "assert_same",
    "complete",
    "measure_part",
    "measure_prepared",
    "merge_parts",
    "usable",
]

Array = jax.Array


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


def usable(objective: LossTransform) -> LossTransform:
    try:
        check_complete(objective)
        return chain(objective)
    except ValueError:
        return complete(objective)


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


Measured = tuple[Array, Array, dict[str, Array]]  # loss, gradient in the parameters, metric values


def measure_prepared(objective: LossTransform, params: Array, batch: TokenBatch) -> Measured:
    """Loss, gradient and metrics of a *prepared* batch."""
    return merge_parts([measure_part(objective, params, batch, jnp.sum(require("_measure", batch, "count")))])


def measure_part(
    objective: LossTransform, params: Array, part: TokenBatch, denominator: Array
) -> tuple[Array, Array, dict[str, Mean]]:
    """The part's share of the loss and of the gradient, and its metrics."""

    def scaled(p: Array) -> tuple[Array, LossOutput]:
        result = evaluate(objective, tiny_policy(p, part), part, objective.init())
        return quotient(result.loss_sum, denominator), result

    (value, result), gradient = jax.value_and_grad(scaled, has_aux=True)(params)
    return value, gradient, result.metrics


def merge_parts(parts: Sequence[tuple[Array, Array, dict[str, Mean]]]) -> Measured:
    metrics = {
        name: sum((metrics[name] for _, _, metrics in parts[1:]), mean) for name, mean in parts[0][2].items()
    }
    loss = jnp.sum(jnp.stack([loss for loss, _, _ in parts]))
    gradient = jnp.sum(jnp.stack([gradient for _, gradient, _ in parts]), axis=0)
    return loss, gradient, {name: mean.value for name, mean in metrics.items()}


class Setting:
    """A complete objective, a batch in float64, and what they give on one device, in one piece."""

    def __init__(self, transform: LossTransform, batch: TokenBatch | None, *, compiled: bool = False):
        self.checked = frozenset(info.name for info in transform.info)
        self.objective = chain(*map(_watched, stages(usable(transform))))
        self.compiled = compiled
        self.batch = jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x,
            sample_batch() if batch is None else batch,
        )
        self.params = tiny_policy_params(1)
        self.prepared, self.state = self.objective.prepare(self.batch, self.objective.init())

    @functools.cached_property
    def measured(self) -> Measured:
        return measure_prepared(self.objective, self.params, self.prepared)

    @functools.cached_property
    def steps(self) -> list[Step]:
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
                steps.append(Step(member, part, run, loss, batch, after))
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
            return measure_prepared(self.objective, params, batch)

        return (jax.jit(run, compiler_options=FAST_COMPILE) if self.compiled else run)(self.params, batch)


class Step(NamedTuple):
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


def assert_same(law: str, at: Setting, found: Measured, tolerance: float = 1e-9) -> None:
    for what, expected, value in zip(("loss", "gradient", "metrics"), at.measured, found, strict=True):
        message = f"{law}: {what} of {at.objective!r}"
        jax.tree.map(
            lambda x, y, message=message: np.testing.assert_allclose(
                np.asarray(y), np.asarray(x), rtol=tolerance, atol=tolerance, err_msg=message
            ),
            expected,
            value,
        )
