"""Changes of the reward stream; they stand before the advantage that reads it."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.losses import divergences, rewards
from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require

__all__ = ["penalize_kl_in_reward", "shape_overlong"]


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
