"""Advantages, made in `prepare` from rewards of the whole batch.

Conventions, where systems disagree: groups are sets of *trajectories* (a trajectory may be several sequences),
each counted once; a group of one, or of equal rewards, has advantage exactly 0 and counts as "no signal"; a
reward of None is outside mean and std and has advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import advantages
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import Groups, Members, Trajectories, groups, last_token, members, trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import TokenBatch

__all__ = [
    "given_advantage",
    "group_advantage",
    "leave_one_out_advantage",
    "length_weighted_advantage",
    "multi_reward_advantage",
    "pass_at_k_advantage",
    "rescaled_group_advantage",
    "whiten_advantage",
]

Array = jax.Array

REWARDS = ("batch.reward", "batch.reward_valid", "batch.group")


def outcomes(batch: TokenBatch) -> tuple[Trajectories, Array, Array]:
    """(each, reward, valid): trajectories, the sum of their rewards, and which of them have one."""
    each = trajectories(batch.trajectory, batch.mask)
    return each, each.sum(batch.reward, batch.mask), each.any(batch.reward_valid, batch.mask)


def over_groups(batch: TokenBatch) -> tuple[Trajectories, Groups, Array, Members, Array]:
    """(each, stats, reward, of, valid): `outcomes`, statistics of the rewards over groups, and who is in which."""
    each, reward, valid = outcomes(batch)
    stats = groups(reward, valid, batch.group, batch.mask, each)
    return each, stats, reward, members(valid, batch.group, batch.mask, each), valid


def over_batch(values: Array, valid: Array, batch: TokenBatch, each: Trajectories) -> Groups:
    """Statistics of values f[N] over all valid trajectories of the batch, as if they were one group."""
    return groups(values, valid, jnp.zeros_like(batch.group), batch.mask, each)


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


# What divides a centred reward: (stats of the groups, stats of the batch) -> advantage f[N].
Scaling = Callable[[Groups, Groups], Array]


def scaling(stage_name: str, scale: str, ddof: int, eps: float) -> Scaling:
    """The kernel that `scale` names; the arguments are checked."""
    checks.choice(stage_name, "scale", scale, ("std", "batch", "none", "mean"))
    checks.choice(stage_name, "ddof", ddof, (0, 1))
    checks.number(stage_name, "eps", eps, low=0.0)
    kernels: dict[str, Scaling] = {
        "std": lambda stats, whole: advantages.centered_by_std(stats, ddof, eps),
        "batch": lambda stats, whole: advantages.centered_by_std(
            stats._replace(square=whole.square, size=whole.size), ddof, eps
        ),
        "none": lambda stats, whole: advantages.centered(stats),
        "mean": lambda stats, whole: advantages.centered_by_mean(stats, eps),
    }
    return kernels[scale]


@stage(reads=REWARDS, writes=("batch.advantage",))
def group_advantage(scale: str = "std", ddof: int = 1, eps: float = 1e-6):
    """A_i = (R_i - mean_g) / scale_g, R the reward of a trajectory, over the trajectories of its group.

    scale="std": / (std_g + eps) (GRPO, arXiv 2402.03300, §4.1.2); "batch": / (std of all rewards of the batch +
    eps) (TRL's scale_rewards="batch"); "none": not divided (Dr.GRPO, arXiv 2503.20783); "mean": / (mean_g + eps),
    and 0 where the mean is not positive (MaxRL, arXiv 2602.02710). ddof=1 as in every system that has a std
    (NumPy's default is 0); eps outside the root: 1e-6 (verl, SkyRL, slime), where TRL has 1e-4, AReaL 1e-5,
    OpenRLHF 1e-9.

    Departures: a group of one has advantage 0 (verl and SkyRL give R, others NaN); equal rewards give exactly
    0 (tested by max == min, since the f32 mean of [0.3] * 8 is off by one ulp). AReaL's batch std is that of the
    centred rewards: scale="none", then `whiten_advantage(level="trajectory")`. Metrics: `group_no_signal`,
    `group_reward_std`.
    """
    kernel = scaling("group_advantage", scale, ddof, eps)

    def prepare(batch):
        each, stats, reward, _, valid = over_groups(batch)
        advantage = kernel(stats, over_batch(reward, valid, batch, each))
        batch = write_advantage(batch, each.spread(advantage), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def leave_one_out_advantage(scale: str = "none", eps: float = 1e-6):
    """A_i = R_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, eq. 6).

    scale="std" divides by the Bessel-corrected std of the others + eps, and not where they are equal or fewer than
    two (NeMo-RL's default for GRPO; in no paper).

    Departures: a group of one has advantage 0 (verl's `rloo` gives R). Metrics: `group_no_signal`,
    `group_reward_std`.
    """
    checks.choice("leave_one_out_advantage", "scale", scale, ("none", "std"))
    checks.number("leave_one_out_advantage", "eps", eps, low=0.0)

    def prepare(batch):
        each, stats, reward, of, valid = over_groups(batch)
        if scale == "std":
            advantage = advantages.leave_one_out_by_std(reward, stats, of, eps)
        else:
            advantage = advantages.leave_one_out(stats)
        batch = write_advantage(batch, each.spread(advantage), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def length_weighted_advantage():
    """A_i = R_i - Σ_j n_j R_j / Σ_j n_j over the group, n the trained tokens (OPO, arXiv 2505.23585).

    The baseline of least variance when the squared gradient of an answer grows with its length. The paper trains
    strictly on-policy, without clipping: with `reinforce_surrogate`.

    Departures: a group of one, or of equal rewards, has advantage exactly 0 (verl gives R for one). Metrics:
    `group_no_signal`, `group_reward_std`.
    """

    def prepare(batch):
        each, stats, _, of, valid = over_groups(batch)
        advantage = advantages.length_weighted(each.length, stats, of)
        batch = write_advantage(batch, each.spread(advantage), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def rescaled_group_advantage(rescale: str = "signal"):
    """A_i = α (R_i - mean_g), α = B / B_signal (GPG, arXiv 2504.02546): trajectories, over those that teach something.

    rescale="signal": B_signal counts the trajectories of groups whose rewards differ, as the paper does, so that
    groups without a signal do not shrink the update; "nonzero": trajectories whose reward is not 0, as verl's `gpg`.
    At least 1. B counts trajectories with a reward (verl: all rows). The paper's further normaliser F_norm is 1, as
    in verl.

    Metrics: `group_no_signal`, `group_reward_std`, `advantage_rescale` (α).
    """
    checks.choice("rescaled_group_advantage", "rescale", rescale, ("signal", "nonzero"))

    def prepare(batch):
        each, stats, reward, of, valid = over_groups(batch)
        taught = ~stats.constant if rescale == "signal" else reward != 0
        total = jnp.sum(of.valid).astype(reward.dtype)
        alpha = total / jnp.maximum(jnp.sum(of.valid & taught).astype(reward.dtype), 1.0)
        batch = write_advantage(batch, each.spread(alpha * stats.deviation), each.spread(valid))
        batch = batch.log("advantage_rescale", jnp.broadcast_to(alpha, batch.shape))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=REWARDS, writes=("batch.advantage",))
def pass_at_k_advantage(
    k: int = 4, form: str = "analytic", success: float = 0.5, scale: str = "std", eps: float = 1e-6
):
    """Advantages that raise the chance that one of k answers is right, not that each is.

    form="analytic" (Pass@k Training, arXiv 2508.10751): the exact mean over all k-subsets of a group of n answers
    with F failures. R̄ = 1 - C(F, k) / C(n, k), σ = sqrt(R̄ (1 - R̄)); A = (1 - R̄) / σ for a success,
    (1 - R̄ - C(F-1, k-1) / C(n-1, k-1)) / σ for a failure, 0 where σ = 0. A success has R > `success`; k=1 is
    GRPO with ddof=0. A group smaller than k is taken whole (k = n). k=4 as in the paper.

    form="max" (arXiv 2503.19595; verl's `grpo_passk`): k is the size of the group. Only the best answer has an
    advantage, R_max - R_second, divided by std_g + eps (ddof=1) with scale="std" and not with "none"; 0 where two
    are best. Reads no k and no success.

    Departures: a group of one has advantage 0 (verl raises). Metrics: `group_no_signal`, `group_reward_std`.
    """
    checks.choice("pass_at_k_advantage", "form", form, ("analytic", "max"))
    checks.choice("pass_at_k_advantage", "scale", scale, ("std", "none"))
    checks.number("pass_at_k_advantage", "success", success)
    checks.number("pass_at_k_advantage", "eps", eps, low=0.0)
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"pass_at_k_advantage: k must be an integer ≥ 1, got {k!r}.")

    def analytic(reward, stats, of):
        right = of.valid & (reward > success)
        failures = of.sum((~right).astype(reward.dtype))
        return keep(of.valid, advantages.pass_at_k(right, stats.size, failures, k))

    def best(reward, stats, of):
        margin = advantages.best_margin(reward, of)
        if scale == "none":
            return margin
        std = jnp.sqrt(quotient(stats.square, jnp.maximum(stats.size - 1.0, 1.0)))
        return quotient(margin, std + eps)

    kernel = {"analytic": analytic, "max": best}[form]

    def prepare(batch):
        each, stats, reward, of, valid = over_groups(batch)
        advantage = jnp.where(stats.constant, 0.0, kernel(reward, stats, of))
        batch = write_advantage(batch, each.spread(advantage), each.spread(valid))
        return log_groups(batch, each, stats)

    return prepare


@stage(reads=("batch.rewards", "batch.reward_valid", "batch.group"), writes=("batch.advantage",))
def multi_reward_advantage(
    weights: Mapping[str, float] | None = None, scale: str = "std", ddof: int = 1, eps: float = 1e-6
):
    """A = Σ_k w_k (R_k - mean_g R_k) / scale_g(R_k): each part of the reward is normalised before they are summed.

    GDPO (arXiv 2601.05242): a sum of rewards that is normalised once maps different combinations of parts to one
    advantage; this does not. `weights` by name of the part (default: all parts of batch.rewards, each 1); `scale`,
    `ddof` and `eps` as in `group_advantage`. The paper then normalises over the batch: add
    `whiten_advantage(level="trajectory")` (TRL, NeMo-RL), or plain `whiten_advantage()` (over tokens: verl).

    A part that is not finite has no signal: it is outside the statistics of that part and adds 0. A trajectory
    without a reward (reward_valid) has advantage 0. batch.reward itself is not read.

    Raises (in `prepare`): ValueError when batch.rewards is None or lacks a part that `weights` names.
    Metrics: `group_no_signal` (groups in which no part differs), and `reward_part_missing`.
    """
    name = "multi_reward_advantage"
    kernel = scaling(name, scale, ddof, eps)
    if not isinstance(weights, Mapping | None):
        raise ValueError(f"{name}: weights must be {{part of the reward: number}}, or None, got {weights!r}.")
    for part, weight in (weights or {}).items():
        checks.number(name, f"weights[{part!r}]", weight)
    if weights is not None and not weights:
        raise ValueError(
            f"{name}: weights must name at least one part of the reward, or be None for all, got {{}}."
        )

    def prepare(batch):
        parts: Mapping[str, Any] = require(name, batch, "rewards")
        chosen = dict.fromkeys(sorted(parts), 1.0) if weights is None else weights
        missing = sorted(set(chosen) - set(parts))
        if missing or not chosen:
            raise ValueError(
                f"{name}: batch.rewards has no part {', '.join(missing) or 'at all'}; it has "
                f"{', '.join(sorted(parts)) or 'none'}. Name the parts that the grader gives in weights=."
            )
        each = trajectories(batch.trajectory, batch.mask)
        scored = each.any(batch.reward_valid, batch.mask)
        total = jnp.zeros_like(each.length)
        silent, any_part = jnp.ones_like(scored), jnp.zeros_like(scored)
        absent = jnp.zeros_like(each.length)
        for part, weight in chosen.items():
            value = each.sum(parts[part], batch.mask)
            valid = scored & jnp.isfinite(value)
            value = keep(valid, value)
            stats = groups(value, valid, batch.group, batch.mask, each)
            advantage = kernel(stats, over_batch(value, valid, batch, each))
            total = total + weight * keep(valid, advantage)
            silent, any_part = silent & stats.constant, any_part | valid
            absent = absent + (scored & ~valid)
        batch = write_advantage(batch, each.spread(total), each.spread(any_part))
        batch = batch.log("reward_part_missing", each.spread(absent / len(chosen)), each.last)
        once = last_token(batch.group, batch.mask)
        return batch.log("group_no_signal", each.spread(silent.astype(total.dtype)), once)

    return prepare


@stage(reads=("batch.advantage", "batch.counted"), writes=("batch.advantage",))
def whiten_advantage(ddof: int = 1, eps: float = 1e-8, level: str = "token"):
    """A ← (A - mean) / std over the batch: the counted tokens that have a signal, or the trajectories of such tokens.

    level="token": (A_t - mean) / sqrt(var + eps), each token once, so that long answers dominate mean and variance.
    Bessel-corrected (ddof=1) and re-masked, as verl's REINFORCE++; OpenRLHF and NeMo take the biased variance.

    level="trajectory": (A - mean) / (std + eps), each trajectory once, by the advantage of its last counted token:
    for advantages that are constant over a trajectory (TRL's RLOO and GDPO, eps 1e-4; NeMo's GDPO, eps 0). Exactly
    0 when all are equal.
    """
    checks.choice("whiten_advantage", "ddof", ddof, (0, 1))
    checks.number("whiten_advantage", "eps", eps, low=0.0)
    checks.choice("whiten_advantage", "level", level, ("token", "trajectory"))

    def over_tokens(batch, where):
        return advantages.whitened(batch.advantage, where, ddof, eps)

    def over_trajectories(batch, where):
        each = trajectories(batch.trajectory, where)
        value = each.sum(batch.advantage, each.last)
        stats = over_batch(value, each.present, batch.replace(mask=where), each)
        std = jnp.sqrt(quotient(stats.square, jnp.maximum(stats.size - ddof, 1.0)))
        white = quotient(batch.advantage - each.spread(stats.mean), each.spread(std + eps))
        return keep(where, jnp.where(each.spread(stats.constant), 0.0, white))

    kernel = {"token": over_tokens, "trajectory": over_trajectories}[level]

    def prepare(batch):
        where = batch.mask if batch.signal is None else batch.mask & batch.signal
        where = where if batch.counted is None else where & batch.counted
        return batch.replace(advantage=kernel(batch, where))

    return prepare
