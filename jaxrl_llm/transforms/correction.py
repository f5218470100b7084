"""Corrections: how much of the policy term each token keeps, and what is dropped.

Weights are detached, multiply the policy term only and commute. A stage that rejects tokens lowers their
weight and leaves the denominator alone; with `renormalize=True` it clears `counted` instead, so that the
normaliser after it does not count them (and no term of the loss trains them).

q = log proximal - log behavior is the mismatch between the policy that sampled and the one that starts the
train step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import corrections
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import sequence_sum
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import TokenBatch

__all__ = ["decay_stale", "drop_stale", "drop_truncated", "mask_importance", "truncate_importance"]

Array = jax.Array

WEIGHTS = {
    "token": corrections.token_weight,
    "sequence": corrections.sequence_weight,
    "geometric": corrections.geometric_weight,
}


def kept_or_counted(arguments) -> tuple[str, ...]:
    """What a stage that rejects tokens writes."""
    return ("batch.counted",) if arguments["renormalize"] else ("batch.weight",)


def reject(batch: TokenBatch, kept: Array, renormalize: bool) -> TokenBatch:
    """Drops the tokens outside `kept` from the policy term, or from the batch when renormalising."""
    if not renormalize:
        return batch.scale_weight(kept.astype(jnp.promote_types(batch.reward.dtype, jnp.float32)))
    counted = batch.mask if batch.counted is None else batch.counted
    return batch.replace(counted=counted & kept)


def mismatch(stage_name: str, batch: TokenBatch) -> Array:
    """q, f32[B, T]."""
    proximal = require(stage_name, batch, "logprob_proximal")
    return proximal - require(stage_name, batch, "logprob_behavior")


MISMATCH = ("batch.logprob_proximal", "batch.logprob_behavior")


def weight_of(level: str, log_ratio: Array, batch: TokenBatch) -> Array:
    return WEIGHTS[level](log_ratio, batch.sequence, batch.mask)


@stage(reads=MISMATCH, writes=("batch.weight",))
def truncate_importance(
    cap: float, floor: float | None = None, level: str = "token", divide_by_mean: bool = False
):
    """weight *= clip(w, floor, cap), w = proximal / behavior: truncated importance sampling.

    level="token": w_t = e^{q_t}; "sequence": e^{Σ q}; "geometric": e^{mean q}, over the trained tokens of the
    sequence; cap=inf does not truncate. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
    decoupled PPO, arXiv 2505.24298, eq. 5. divide_by_mean=True divides by the mean of the truncated weights over
    the trained tokens of the batch (over its sequences at the other levels), as verl can: self-normalised
    importance sampling, biased and of less variance. Metrics: `importance_weight`, `importance_weight_square`
    (effective sample size = mean² / mean of squares), `importance_truncated`.
    """
    checks.number("truncate_importance", "cap", cap, positive=True, finite=False)
    checks.number("truncate_importance", "floor", floor, low=0.0, high=cap, optional=True)
    checks.choice("truncate_importance", "level", level, tuple(WEIGHTS))

    def prepare(batch):
        weight = weight_of(level, mismatch("truncate_importance", batch), batch)
        cut = corrections.truncated(weight, cap, floor)
        batch = batch.log("importance_truncated", (cut != weight).astype(cut.dtype))
        if divide_by_mean:
            share = jnp.ones_like(cut)
            if level != "token":
                share = quotient(share, sequence_sum(keep(batch.mask, share), batch.sequence))
            cut = corrections.over_mean(cut, share, batch.mask)
        batch = batch.log("importance_weight", cut).log("importance_weight_square", cut**2)
        return batch.scale_weight(cut)

    return prepare


@stage(
    reads=MISMATCH,
    writes=lambda a: (
        *(("batch.weight",) if a["reweight"] or not a["renormalize"] else ()),
        *(("batch.counted",) if a["renormalize"] else ()),
    ),
)
def mask_importance(
    low: float | None,
    high: float | None,
    level: str = "token",
    reweight: bool = True,
    renormalize: bool = False,
):
    """weight *= w if low ≤ w ≤ high else 0, w = proximal / behavior: masked importance sampling.

    level="token": each token by its own ratio (IcePop); "sequence": the whole sequence by the product of its
    ratios (MIS); "geometric": the sequence is kept or dropped by its geometric mean, the weight is the token's
    ratio. reweight=False only drops, and leaves the weight of what is kept at 1. Bounds are absolute and
    inclusive; None does not bind. Metric: `importance_masked`.
    """
    checks.number("mask_importance", "low", low, low=0.0, optional=True)
    checks.number("mask_importance", "high", high, positive=True, optional=True)
    bounds = [x for x in (low, high) if x is not None and not isinstance(x, jax.core.Tracer)]
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        raise ValueError(f"mask_importance: low={low} is above high={high}, so that no token would be left.")
    checks.choice("mask_importance", "level", level, tuple(WEIGHTS))
    own = "token" if level == "geometric" else level

    def prepare(batch):
        log_ratio = mismatch("mask_importance", batch)
        kept = corrections.inside(weight_of(level, log_ratio, batch), low, high)
        batch = batch.log("importance_masked", 1.0 - kept.astype(log_ratio.dtype))
        if reweight:
            batch = batch.scale_weight(weight_of(own, log_ratio, batch))
        return reject(batch, kept, renormalize)

    return prepare


@stage(reads=("batch.version", "batch.learner_version"), writes=kept_or_counted)
def drop_stale(max_age: int, renormalize: bool = False):
    """Drops tokens with age = learner_version - version > max_age, in train steps.

    Group statistics still use the whole group. Metrics: `age`, `stale`.

    Raises (in `prepare`): ValueError when a trained token has version -1 (unknown), as far as values are
    known: under `jit` an unknown version counts as too old.
    """
    checks.number("drop_stale", "max_age", max_age, low=0)

    def prepare(batch):
        known_versions("drop_stale", batch)
        age = batch.learner_version - batch.version
        kept = (age <= max_age) & (batch.version >= 0)
        dtype = jnp.promote_types(batch.reward.dtype, jnp.float32)
        batch = batch.log("age", age.astype(dtype)).log("stale", 1.0 - kept.astype(dtype))
        return reject(batch, kept, renormalize)

    return prepare


@stage(reads=("batch.version", "batch.learner_version"), writes=("batch.weight",))
def decay_stale(rate: float, grace: int = 0):
    """weight *= rate^max(age - grace, 0), age = learner_version - version in train steps, 0 ≤ rate ≤ 1.

    The soft form of `drop_stale`, and ours: systems bound the age or drop (AReaL, prime-rl, SkyRL). rate=1 changes
    nothing; tokens no older than `grace` keep their weight. Metrics: `age`, `stale_weight`.

    Raises (in `prepare`): as `drop_stale`; under `jit` an unknown version has weight 0.
    """
    checks.number("decay_stale", "rate", rate, low=0.0, high=1.0)
    checks.number("decay_stale", "grace", grace, low=0)

    def prepare(batch):
        known_versions("decay_stale", batch)
        age = batch.learner_version - batch.version
        factor = corrections.stale_weight(age, rate, grace)
        factor = jnp.where(batch.version >= 0, factor, 0.0)
        batch = batch.log("age", age.astype(factor.dtype)).log("stale_weight", factor)
        return batch.scale_weight(factor)

    return prepare


def known_versions(stage_name: str, batch: TokenBatch) -> None:
    """Raises ValueError when a trained token has no version, or one of the future; cannot tell while tracing."""
    unknown = batch.mask & (batch.version < 0)
    future = batch.mask & (batch.version > batch.learner_version)
    if isinstance(unknown, jax.core.Tracer) or isinstance(future, jax.core.Tracer):
        return
    if jnp.any(future):
        newest = int(jnp.max(jnp.where(batch.mask, batch.version, -1)))
        raise ValueError(
            f"{stage_name}: the batch has learner_version {int(batch.learner_version)} and tokens that were sampled from version "
            f"{newest}, so that their age would be negative. Pass learner_version= (train steps done when the train step on this "
            "batch starts) to TokenBatch.from_rows or pack."
        )
    number = int(jnp.sum(unknown))
    if number:
        raise ValueError(
            f"{stage_name} reads batch.version, which is -1 (unknown) on {number} trained tokens. Stamp every "
            f"sampled token with the version of its snapshot (the sampler does), or pass version= to "
            f"TokenBatch.from_rows."
        )


@stage(reads=("batch.truncated",), writes=kept_or_counted)
def drop_truncated(renormalize: bool = True):
    """Drops trajectories that a length limit cut (overlong filtering; DAPO, arXiv 2503.14476, §3.4).

    By default they leave the denominator too: the loss is that of a batch without them. Their rewards stay in
    the statistics of their group.
    """

    def prepare(batch):
        return reject(batch, ~batch.truncated, renormalize)

    return prepare
