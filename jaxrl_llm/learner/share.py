"""Which prompts and which lengths an update listens to, after advantages, weights, clipping and normalisation.

The gradient of a loss with respect to the parameters is Σ_t c_t ∇ log π_t with the coefficient c_t = ∂ loss / ∂ log π_t.
|c_t| is what an objective decides about a token; a share is a sum of |c_t| over some tokens, divided by the
sum over all. Two objectives with the same advantages can differ widely here: a mean over tokens gives a group of long answers
more, a mean over sequences the same, a standard deviation in the denominator favours prompts that are nearly
always, or nearly never, answered right.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.ops.segments import trajectories, trajectory_sum
from jaxrl_llm.transforms.base import LossTransform
from jaxrl_llm.transforms.evaluate import evaluate
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = ["coefficients", "gradient_share", "trajectory_shares"]

Array = jax.Array


def coefficients(objective: LossTransform, output: PolicyOutput, batch: TokenBatch, state: dict) -> Array:
    """f32[B, T]: ∂ loss_sum / ∂ logprob of each token of a prepared batch or of some of its rows; detached.

    Terms that depend on the distribution otherwise than through the log-prob of the token (an entropy bonus,
    say) are not in it. Costs no pass of the model.
    """
    detached = jax.lax.stop_gradient(output)

    def loss_sum(logprob: Array) -> Array:
        return evaluate(objective, detached.replace(logprob=logprob), batch, state).loss_sum

    return jax.grad(loss_sum)(detached.logprob)


def trajectory_shares(
    updates: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], number: int
) -> np.ndarray:
    """f64[number]: the part of Σ |c_t| over all updates of a train step that each trajectory has; 0 when there is none.

    Args:
      updates: (|c_t| f32[B, T], trajectory i32[B, T] with ids from 0, mask bool[B, T]) of each; |c_t| may have further,
        inert rows.
      number: of trajectories.
    """
    total = np.zeros(number)
    for mass, trajectory, mask in updates:
        mass = mass[: len(mask)]
        usable = mask & np.isfinite(mass)
        total += np.bincount(trajectory[usable], weights=mass[usable], minlength=number)
    return total / (total.sum() or 1.0)


def gradient_share(coefficient: Array, batch: TokenBatch) -> dict[str, Array]:
    """Shares over a whole batch, f32[] each; 0 when no token has a coefficient.

    Args:
      coefficient: f32[B, T] of `coefficients`.
      batch: reads group, trajectory and mask.

    Returns:
      share_largest_group    of the group that has most
      share_groups           how many groups, all alike, would be as unequal: (Σ m_g)² / Σ m_g², m_g = Σ |c_t|
      share_longest_quarter  of the quarter of the trajectories with most trained tokens (more when lengths tie)
      tokens_longest_quarter the part of the trained tokens that they have, for comparison
    """
    mass = jnp.where(batch.mask, jnp.abs(coefficient), 0.0)
    total = jnp.sum(mass)
    each = trajectories(batch.trajectory, batch.mask)
    # A group's mass at each of its tokens; every token then adds mass_t · m_g, so that Σ is Σ m_g².
    of_group = trajectory_sum(mass, jnp.where(batch.mask, batch.group, -1))
    length = each.length
    count = jnp.sum(each.present)
    ranked = jnp.sort(jnp.where(each.present, length, 0.0))[::-1]
    quarter = ranked[jnp.maximum(-(-count // 4) - 1, 0)]
    long = each.present & (length >= quarter)
    tokens = jnp.sum(length)
    return {
        "share_largest_group": quotient(jnp.max(jnp.where(batch.mask, of_group, 0.0)), total),
        "share_groups": quotient(total * total, jnp.sum(mass * of_group)),
        "share_longest_quarter": quotient(jnp.sum(jnp.where(long, each.sum(mass, batch.mask), 0.0)), total),
        "tokens_longest_quarter": quotient(jnp.sum(jnp.where(long, length, 0.0)), tokens),
    }
