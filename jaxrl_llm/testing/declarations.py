"""The law of declarations: a stage reads and writes what it says, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.testing.setting import Setting, Step
from jaxrl_llm.transforms.dataflow import ON_DEMAND, PRODUCED, Need, require
from jaxrl_llm.types import TokenBatch

__all__ = [
    "check_declarations",
]

Array = jax.Array

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
    "router_probs",
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


def check_declarations(at: Setting) -> None:
    """Each stage reads the on-demand fields that it declares, and writes the fields that it declares, no others."""
    for member in dict.fromkeys(step.member.info.name for step in at.steps):  # type: ignore[union-attr]
        steps = [step for step in at.steps if step.member.info.name == member]  # type: ignore[union-attr]
        _check_writes(steps)
        _check_reads(steps)


def _check_writes(steps: Sequence[Step]) -> None:
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


def _untouched(step: Step, field: str, old: Any, new: Any) -> bool:
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


def _check_reads(steps: Sequence[Step]) -> None:
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


def _results(step: Step, after: Any, without: Sequence[str]) -> dict[str, Any]:
    """What a part gives, but for the fields that it was given and passes on."""
    return {field: value for field, value in _fields_of(after).items() if field not in without}


def _depends(step: Step, fields: Sequence[str]) -> bool:
    """Without these fields the part fails or gives something else."""
    try:
        after = step.given(**dict.fromkeys(fields))
    except AssertionError:
        return True
    return not _equal(_results(step, step.after, fields), _results(step, after, fields))


def _uses(step: Step, field: str) -> bool:
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


def _pulled(step: Step, field: str, value: Any) -> Array:
    """Gradient of a sum of what an apply gives in the log-probs."""
    loss = require("loss", step, "loss")

    def total(logprob: Array) -> Array:
        after = step.given(**{"loss.logprob": logprob, field: value})
        kept = [after.policy, after.log_ratio, *(v for v, _ in after.penalties.values())]
        return sum((jnp.sum(x) for x in kept if x is not None), jnp.zeros(()))

    return jax.grad(total)(loss.logprob)
