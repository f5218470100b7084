"""AdamW with warm-up and a schedule, as one optax chain."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["RecordedScheduleState", "applied_learning_rate", "decayed", "make_optimizer", "make_schedule"]

Array = jax.Array
Schedule = Literal["constant", "linear", "cosine"]


def make_schedule(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Schedule = "constant",
    final_fraction: float = 0.0,
) -> optax.Schedule:
    """Learning rate as a function of the number of updates done before this one.

    The first update of a warm-up of n already moves: it uses learning_rate / n, and update n uses
    learning_rate. (optax's warm-up schedules start at 0, which wastes one rollout batch.)

    Args:
      learning_rate: the peak.
      warmup_steps: updates of linear warm-up.
      total_steps: updates of the whole run; needed unless `schedule` is "constant".
      schedule: what follows the warm-up.
      final_fraction: learning rate that the decay would reach after the last update, as a fraction of the peak.

    Raises:
      ValueError: an unknown schedule, or one that has no end, or a warm-up longer than the run.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}.")
    if learning_rate < 0 or warmup_steps < 0:
        raise ValueError(
            f"learning_rate and warmup_steps must not be negative, got {learning_rate} and {warmup_steps}."
        )
    if schedule != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ValueError(
            f"schedule={schedule!r} needs total_steps greater than warmup_steps={warmup_steps}, got {total_steps}."
        )

    def rate(count: Array) -> Array:
        step = jnp.asarray(count, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1) / max(warmup_steps, 1))
        if schedule == "constant" or total_steps is None:
            return learning_rate * warm
        # From the peak at the first update after the warm-up to the end after the last one, which still moves.
        progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        shape = 1 - progress if schedule == "linear" else 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return learning_rate * warm * (final_fraction + (1 - final_fraction) * shape)

    return rate


class RecordedScheduleState(NamedTuple):
    """State of the last link of the chain."""

    updates_done: Array  # i32[]
    learning_rate: Array  # f32[], of the last update


def _scale_by_recorded_schedule(rate: optax.Schedule) -> optax.GradientTransformation:
    """Multiplies by -rate(count) and keeps the rate in the state, where it can be reported."""

    def init(params):
        del params
        return RecordedScheduleState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates, state, params=None):
        del params
        scale = jnp.asarray(rate(state.updates_done), jnp.float32)
        updates = jax.tree.map(lambda u: (-scale).astype(u.dtype) * u, updates)
        return updates, RecordedScheduleState(optax.safe_increment(state.updates_done), scale)

    return optax.GradientTransformation(init, update)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with the moments finished before the update is computed from them.

    The compiler would otherwise compute the update from the old moments a second time, keep a copy of those
    for it, and so need 8 more bytes a parameter.
    """

    def init(params):
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros(params), nu=zeros(params))

    def update(grads, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        step = count.astype(jnp.float32)
        first, second = 1 - b1**step, 1 - b2**step
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _check_f32(*, learning_rate: float, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    """Raises ValueError for numbers that are fine as such and make the update infinite or NaN in f32."""
    f32, smallest = np.float32, float(np.finfo(np.float32).tiny)
    with np.errstate(over="ignore", under="ignore"):
        for name, value in (("b1", b1), ("b2", b2)):
            if not 0 <= value < 1 or f32(value) >= 1:
                raise ValueError(f"{name} must be in [0, 1) and not round to 1 in float32, got {value!r}.")
        if not f32(eps) >= smallest or not np.isfinite(f32(eps)):
            raise ValueError(f"eps must be a float32 number of at least {smallest:.3g}, got {eps!r}.")
        for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            if not np.isfinite(f32(value)):
                raise ValueError(f"{name} must be finite in float32, got {value!r}.")
        if not np.isfinite(f32(learning_rate) * f32(weight_decay)):
            raise ValueError(f"learning_rate x weight_decay overflows: {learning_rate!r} x {weight_decay!r}.")


def decayed(params: Any) -> Any:
    """bool for each leaf: whether weight decay applies. Norm weights and biases are left alone."""

    def matrix(path, _):
        name = str(getattr(path[-1], "key", path[-1])) if path else ""
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(matrix, params)


def make_optimizer(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Schedule = "constant",
    final_fraction: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, 2019, algorithm 2) with the gradient clipped once by its global norm.

    The decay is multiplied by the learning rate, as in PyTorch. b2 is 0.99 and not 0.999, because runs of
    RL are a few hundred updates long.

    Args:
      learning_rate, warmup_steps, total_steps, schedule, final_fraction: see `make_schedule`.
      b1, b2, eps: of Adam.
      weight_decay: per update and unit of learning rate; not applied to norm weights.
      clip_norm: largest global norm of the gradient; 0 or None: no clipping.

    Returns:
      An optax transformation. Its state keeps the learning rate of the last update; read it with
      `applied_learning_rate`.
    """
    _check_f32(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    if clip_norm is not None and clip_norm < 0:
        raise ValueError(f"clip_norm must be positive, or 0 or None for no clipping; got {clip_norm}.")
    rate = make_schedule(
        learning_rate,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        schedule=schedule,
        final_fraction=final_fraction,
    )
    links = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    links.append(_scale_by_adam(b1, b2, eps))
    if weight_decay:
        links.append(optax.add_decayed_weights(weight_decay, mask=decayed))
    links.append(_scale_by_recorded_schedule(rate))
    return optax.chain(*links)


def applied_learning_rate(opt_state: Any) -> Array | None:
    """f32[], the learning rate of the last update, or None when the optimizer does not record it."""
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    return found[0][1] if found else None
