"""Advantages, made in `prepare` from rewards of the whole batch.

Conventions, where systems disagree: groups are sets of *trajectories* (a trajectory may be several sequences),
each counted once; a group of one, or of equal rewards, has advantage exactly 0 and counts as "no signal"; a
reward of None is outside mean and std and has advantage 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import advantages
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import Groups, Trajectories, groups, last_token, trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import TokenBatch

__all__ = [
    "given_advantage",
    "group_advantage",
    "leave_one_out_advantage",
    "returns_to_go",
    "whiten_advantage",
]

Array = jax.Array

REWARDS = ("batch.reward", "batch.reward_valid", "batch.group")


def over_groups(batch: TokenBatch) -> tuple[Trajectories, Groups, Array]:
    """(each, stats, valid): trajectories, statistics of their rewards over groups, which have a reward."""
    each = trajectories(batch.trajectory, batch.mask)
    valid = each.any(batch.reward_valid, batch.mask)
    reward = each.sum(batch.reward, batch.mask)
    return each, groups(reward, valid, batch.group, batch.mask, each), valid


def write_advantage(batch: TokenBatch, advantage: Array, signal: Array) -> TokenBatch:
    """The batch with an advantage; `signal` is where it is defined."""
    signal = batch.mask & signal
    return batch.replace(advantage=keep(signal, advantage), signal=signal)


def log_groups(batch: TokenBatch, each: Trajectories, stats: Groups) -> TokenBatch:
    """Logs, by group: `group_no_signal` (fraction with nothing to learn from) and `group_reward_std`."""
    once = last_token(batch.group, batch.mask)
    std = jnp.sqrt(quotient(stats.square, jnp.maximum(stats.size - 1.0, 1.0)))
    batch = batch.log("group_no_signal", each.spread(stats.constant.astype(std.dtype)), once)
    return batch.log("group_reward_std", each.spread(std), once)


@stage(reads=(), writes=("batch.advantage",))
def given_advantage():
    """Uses the advantage that the batch carries (`TokenBatch.from_rows(advantage=...)`), masked.

    Raises (in `prepare`): ValueError when batch.advantage is None.
    """

    def prepare(batch):
        return write_advantage(batch, require("given_advantage", batch, "advantage"), batch.mask)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def group_advantage(scale: str = "std", ddof: int = 1, eps: float = 1e-6):
    """A_i = (R_i - mean_g) / scale_g, R the reward of a trajectory, over the trajectories of its group.

    scale="std": / (std_g + eps) (GRPO, arXiv 2402.03300, §4.1.2); "none": not divided (Dr.GRPO,
    arXiv 2503.20783); "mean": / (mean_g + eps), and 0 where the mean is not positive (MaxRL, arXiv
    2602.02710). ddof=1 as in every system that has a std (NumPy's default is 0); eps outside the root.

    Departures: a group of one has advantage 0 (verl and SkyRL give R, others NaN); equal rewards give exactly
    0 (tested by max == min, since the f32 mean of [0.3] * 8 is off by one ulp). Metrics: `group_no_signal`,
    `group_reward_std`.
    """
    checks.choice("group_advantage", "scale", scale, ("std", "none", "mean"))
    checks.choice("group_advantage", "ddof", ddof, (0, 1))
    checks.number("group_advantage", "eps", eps, low=0.0)
    kernel = {
        "std": lambda stats: advantages.centered_by_std(stats, ddof, eps),
        "none": advantages.centered,
        "mean": lambda stats: advantages.centered_by_mean(stats, eps),
    }[scale]

    def prepare(batch):
        each, stats, valid = over_groups(batch)
        batch = write_advantage(batch, each.spread(kernel(stats)), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def leave_one_out_advantage():
    """A_i = R_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, eq. 6).

    Departures: a group of one has advantage 0 (verl's `rloo` gives R). Metrics: `group_no_signal`,
    `group_reward_std`.
    """

    def prepare(batch):
        each, stats, valid = over_groups(batch)
        batch = write_advantage(batch, each.spread(advantages.leave_one_out(stats)), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=("batch.reward", "batch.reward_valid"), writes=("batch.advantage", "batch.returns"))
def returns_to_go(gamma: float = 1.0):
    """A_t = G_t = r_t + γ G_{t+1} over the trained tokens of a trajectory (REINFORCE; Sutton & Barto, 13.3).

    Masked spans (tool output) are crossed, without discount. Without a baseline: add `whiten_advantage`
    (REINFORCE++, arXiv 2501.03262). Also writes batch.returns.
    """
    checks.number("returns_to_go", "gamma", gamma, low=0.0, high=1.0)

    def prepare(batch):
        returns = advantages.discounted_returns(batch.reward, gamma, batch.trajectory, batch.mask)
        batch = batch.replace(returns=returns)
        return write_advantage(batch, returns, batch.reward_valid)

    return prepare


@stage(reads=("batch.advantage", "batch.counted"), writes=("batch.advantage",))
def whiten_advantage(ddof: int = 1, eps: float = 1e-8):
    """A_t ← (A_t - mean) / sqrt(var + eps) over the counted tokens of the batch that have a signal.

    Bessel-corrected (ddof=1) and re-masked, as verl's REINFORCE++; OpenRLHF and NeMo take the biased
    variance. Every token counts once, so long answers dominate mean and variance.
    """
    checks.choice("whiten_advantage", "ddof", ddof, (0, 1))
    checks.number("whiten_advantage", "eps", eps, low=0.0)

    def prepare(batch):
        where = batch.mask if batch.signal is None else batch.mask & batch.signal
        where = where if batch.counted is None else where & batch.counted
        return batch.replace(advantage=advantages.whitened(batch.advantage, where, ddof, eps))

    return prepare
