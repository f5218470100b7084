"""Stages that change other stages: where they act, and hyper-parameters that move with the updates."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.transforms.base import ChainInfo, LossTransform, StageInfo
from jaxrl_llm.types import TokenBatch

__all__ = ["masked", "scheduled"]

Array = jax.Array


def masked(transform: LossTransform, where: Callable[[TokenBatch], Array]) -> LossTransform:
    """The stage acts only on the trained tokens for which `where(batch)` is True.

    The stage sees a batch whose mask is `mask & where(batch)`, so its statistics are over those tokens.
    Elsewhere every field keeps the value that it had; a field that did not exist is 0 there, a weight 1.

    Args:
      transform: one stage (not a chain).
      where: batch -> bool[B, T]. Of data only, since it also runs in `prepare`.
    """
    info = _stage_info("masked", transform)

    def merge(on: Array, new: Any, old: Any, default: float = 0.0) -> Any:
        if new is None or new is old:
            return new
        old = jnp.full(new.shape, default, new.dtype) if old is None else old
        return jnp.where(on, new, old)

    def inner_batch(batch: TokenBatch) -> tuple[Array, TokenBatch]:
        on = batch.mask & where(batch)
        return on, batch.replace(mask=on)

    def prepare(batch, state):
        on, seen = inner_batch(batch)
        result, state = transform.prepare(seen, state)
        fields = {
            field: merge(on, getattr(result, field), getattr(batch, field))
            for field in ("reward", "advantage", "returns", "norm", "count")
        }
        fields["weight"] = merge(on, result.weight, batch.weight, 1.0)
        for field in ("signal", "counted"):
            old = getattr(batch, field)
            fields[field] = merge(on, getattr(result, field), batch.mask if old is None else old)
        return batch.replace(logged=result.logged, norms=result.norms, **fields), state

    def apply(loss, batch, state):
        on, seen = inner_batch(batch)
        result = transform.apply(loss.replace(mask=loss.mask & on), seen, state)
        penalties = dict(loss.penalties)
        for key, (value, norm) in result.penalties.items():
            if key not in penalties:
                penalties[key] = (jnp.where(on, value, 0.0), norm)
        return result.replace(
            mask=loss.mask,
            weight=merge(on, result.weight, loss.weight),
            log_ratio=merge(on, result.log_ratio, loss.log_ratio),
            policy=merge(on, result.policy, loss.policy),
            penalties=penalties,
        )

    arguments = {**info.arguments, "where": where}

    def remake(changes):
        inner = {k: v for k, v in changes.items() if k != "where"}
        return masked(info.remake(inner), changes.get("where", where))

    return transform._replace(
        prepare=prepare, apply=apply, info=dataclasses.replace(info, arguments=arguments, remake=remake)
    )


def scheduled(
    factory: Callable[..., LossTransform], *, name: str | None = None, **arguments: Any
) -> LossTransform:
    """A stage some of whose hyper-parameters are schedules: functions of the optimiser updates done.

        scheduled(reward_entropy, coef=optax.linear_schedule(1e-3, 0.0, 500))

    Args:
      factory: of a stage.
      **arguments: its arguments; a callable is a schedule, i32[] -> f32[], with 0 at the first update.

    The state is {"updates": i32[]} and the state of the stage. A schedule also sets what `prepare` uses.

    Raises:
      ValueError: no argument is callable, or the stage refuses the values at update 0.
    """
    schedules = {key: value for key, value in arguments.items() if _is_schedule(value)}
    fixed = {key: value for key, value in arguments.items() if key not in schedules}
    if not schedules:
        raise ValueError(
            f"scheduled(): none of {', '.join(arguments) or 'the arguments'} is a schedule. Pass at least one "
            f"function of the number of updates, or use the stage without `scheduled`."
        )
    first = factory(**fixed, **{k: float(s(0)) for k, s in schedules.items()}, name=name)
    info = _stage_info("scheduled", first)

    def now(state) -> LossTransform:
        values = {key: schedule(state["updates"]) for key, schedule in schedules.items()}
        return factory(**fixed, **values, name=name)

    def init():
        return {"updates": jnp.zeros((), jnp.int32), "stage": first.init()}

    def prepare(batch, state):
        batch, inner = now(state).prepare(batch, state["stage"])
        return batch, {**state, "stage": inner}

    def apply(loss, batch, state):
        return now(state).apply(loss, batch, state["stage"])

    def update(state, metrics):
        return {"updates": state["updates"] + 1, "stage": now(state).update(state["stage"], metrics)}

    def remake(changes):
        new = {**arguments, **changes}
        if any(_is_schedule(value) for value in new.values()):
            return scheduled(factory, name=name, **new)
        return factory(**new, name=name)  # a schedule overridden by a constant

    shown = {**info.arguments, **schedules}
    return LossTransform(
        init, prepare, apply, update, dataclasses.replace(info, arguments=shown, remake=remake)
    )


def _is_schedule(value: Any) -> bool:
    return callable(value) and not isinstance(value, LossTransform) and not inspect.isclass(value)


def _stage_info(wrapper: str, transform: LossTransform) -> StageInfo:
    if not isinstance(transform, LossTransform) or isinstance(transform.info, ChainInfo):
        raise ValueError(
            f"{wrapper}(): expected one stage, got {transform!r}. Wrap the stages of a chain one by one."
        )
    return transform.info
