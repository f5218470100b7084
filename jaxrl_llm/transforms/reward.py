"""Changes of the reward stream; they stand before the advantage that reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import divergences, rewards
from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import Trajectories, groups, members, trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import TokenBatch

__all__ = ["penalize_kl_in_reward", "rescale_reward", "shape_length", "shape_overlong", "shape_truncated"]

Array = jax.Array


def add_outcome(batch: TokenBatch, each: Trajectories, change: Array) -> TokenBatch:
    """The batch with `change` f[N] added to the reward of each trajectory that has one, on its last trained token."""
    return batch.replace(reward=batch.reward + keep(each.last & batch.reward_valid, each.spread(change)))


@stage(reads=("batch.reward", "batch.reward_valid"), writes=("batch.reward",))
def rescale_reward(scale: float = 1.0, bias: float = 0.0, limit: float | None = None):
    """R ← clip((R + bias) · scale, ±limit), R the reward of a trajectory (AReaL: limit 20; OpenRLHF clips to ±10).

    The change lands on the last trained token, so that R is the sum of the stream as before. limit=None: not clipped.
    A reward of None stays None.
    """
    checks.number("rescale_reward", "scale", scale)
    checks.number("rescale_reward", "bias", bias)
    checks.number("rescale_reward", "limit", limit, positive=True, optional=True)

    def prepare(batch):
        each = trajectories(batch.trajectory, batch.mask)
        reward = each.sum(batch.reward, batch.mask)
        return add_outcome(batch, each, rewards.affine(reward, scale, bias, limit) - reward)

    return prepare


@stage(reads=("batch.reward", "batch.reward_valid", "batch.truncated"), writes=("batch.reward",))
def shape_truncated(factor: float = 0.0, value: float | None = None):
    """The reward of an answer that was cut by a length limit: R ← factor · R, or R ← value where one is given.

    The stop-properly penalty (DAPO's and ProRL's runs; OpenRLHF's stop_properly_penalty_coef: c ≥ 0 is factor=c,
    c < 0 is value=c). factor=0 pays nothing for truncated answers (AReaL's mask_no_eos_with_zero). A factor also
    shrinks a negative reward, so prefer `value` where rewards are negative. The whole stream is multiplied; a value
    lands on the last trained token. A reward of None stays None. Metric: `stopped_improperly`, fraction of
    trajectories with a reward that this touched.
    """
    checks.number("shape_truncated", "factor", factor)
    checks.number("shape_truncated", "value", value, optional=True)

    def prepare(batch):
        each = trajectories(batch.trajectory, batch.mask)
        cut = batch.truncated & batch.reward_valid & batch.mask
        if value is None:
            changed = factor * batch.reward
        else:
            changed = keep(each.last, jnp.full_like(batch.reward, value))
        batch = batch.replace(reward=jnp.where(cut, changed, batch.reward))
        return batch.log("stopped_improperly", cut.astype(batch.reward.dtype), each.last & batch.reward_valid)

    return prepare


@stage(reads=("batch.reward", "batch.reward_valid", "batch.group"), writes=("batch.reward",))
def shape_length(output: float = 0.25, context: float = 0.1, turns: float = 0.1):
    """R ← R - max(mean_g R, 0) · (output · n_i / max_g n + context · c_i / max_g c + turns · s_i / max_g s).

    The length penalty of prime-rl, with its weights: n trained tokens, c other tokens up to the last trained one
    (prompt, tool output), s spans of trained tokens (turns); each relative to the largest of the group, at least 1. It
    scales with the mean reward of the group, so that it weighs nothing while nothing is solved. A group of equal
    rewards gets a signal from it: shorter is better.

    Departures: a negative mean counts as 0 (prime-rl would pay long answers). A trajectory without a reward is in no
    maximum. Metric: `length_cost`, mean over trajectories.
    """
    for name, weight in (("output", output), ("context", context), ("turns", turns)):
        checks.number("shape_length", name, weight, low=0.0)

    def prepare(batch):
        each = trajectories(batch.trajectory, batch.mask)
        valid = each.any(batch.reward_valid, batch.mask)
        reward = each.sum(batch.reward, batch.mask)
        mean = groups(reward, valid, batch.group, batch.mask, each).mean
        of = members(valid, batch.group, batch.mask, each)
        before = jnp.pad(batch.mask, ((0, 0), (1, 0)))[:, :-1]
        # A span never crosses into another sequence: the first token of one is not trained.
        spans = each.sum((batch.mask & ~before).astype(reward.dtype), batch.mask)
        reached = (
            jnp.zeros(valid.shape, jnp.int32)
            .at[each.entry]
            .max(jnp.where(batch.mask, batch.positions + 1, 0))
        )
        others = jnp.maximum(reached.astype(reward.dtype) - each.length, 0.0)
        cost = jnp.zeros_like(reward)
        for weight, amount in ((output, each.length), (context, others), (turns, spans)):
            cost = cost + weight * rewards.relative_length_cost(mean, amount, keep(of.valid, of.max(amount)))
        batch = add_outcome(batch, each, -cost)
        return batch.log("length_cost", each.spread(cost), each.last & batch.reward_valid)

    return prepare


@stage(reads=("batch.reward", "batch.reward_valid"), writes=("batch.reward",))
def shape_overlong(limit: int, buffer: int, penalty: float = 1.0):
    """Adds -penalty · clip((len - (limit - buffer)) / buffer, 0, 1) to the reward (DAPO, arXiv 2503.14476, eq. 13).

    len is the number of trained tokens of the trajectory; limit and buffer are in tokens. Floored at -penalty
    (verl, AReaL, tunix let it fall further beyond the limit). A reward of None stays None. Metric:
    `overlong_penalty`, mean over trajectories.
    """
    checks.number("shape_overlong", "limit", limit, positive=True)
    checks.number("shape_overlong", "buffer", buffer, positive=True, high=limit)
    checks.number("shape_overlong", "penalty", penalty, low=0.0)

    def prepare(batch):
        each = trajectories(batch.trajectory, batch.mask)
        shaped = each.spread(rewards.overlong_penalty(each.length, limit, buffer, penalty))
        shaped = keep(batch.mask & batch.reward_valid, shaped)
        batch = batch.replace(reward=batch.reward + keep(each.last, shaped))
        return batch.log("overlong_penalty", shaped, each.last)

    return prepare


@stage(
    reads=lambda a: (
        "batch.reward",
        "batch.reward_valid",
        f"batch.logprob_{a['policy']}",
        f"batch.logprob_{a['anchor']}",
    ),
    writes=("batch.reward",),
)
def penalize_kl_in_reward(
    coef: float, estimator: str = "k1", policy: str = "behavior", anchor: str = "reference"
):
    """r_t ← r_t - coef · k(log policy_t - log anchor_t), a reward for every trained token (arXiv 1909.08593, eq. 2).

    Unbiased with k1, since the reward is not differentiated. `policy` is behavior or proximal (verl and TRL
    take the proximal one). Advantages of whole trajectories see the sum of the stream. Metric: `kl_in_reward`.
    """
    estimators = {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}
    checks.number("penalize_kl_in_reward", "coef", coef)
    checks.choice("penalize_kl_in_reward", "estimator", estimator, tuple(estimators))
    checks.choice("penalize_kl_in_reward", "policy", policy, ("behavior", "proximal"))
    checks.choice("penalize_kl_in_reward", "anchor", anchor, ("reference", "teacher"))

    def prepare(batch):
        here = require("penalize_kl_in_reward", batch, f"logprob_{policy}")
        there = require("penalize_kl_in_reward", batch, f"logprob_{anchor}")
        kl = estimators[estimator](here - there)
        paid = batch.mask & batch.reward_valid
        batch = batch.replace(reward=batch.reward - jnp.where(paid, coef * kl, 0.0))
        return batch.log("kl_in_reward", kl)

    return prepare
