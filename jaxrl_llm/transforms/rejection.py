"""Corrections that reject: whole sequences, or the tokens on which two policies differ most.

Like those of `correction`: weights are detached and multiply the policy term only; a rejected token stays in
the denominator unless `renormalize=True`.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.losses import corrections, divergences
from jaxrl_llm.losses.ratios import token_log_ratio
from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import sequence_mean, sequence_sum
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.correction import MISMATCH, kept_or_counted, mismatch, reject
from jaxrl_llm.transforms.dataflow import require

__all__ = [
    "mask_divergent_sequences",
    "mask_negative_offpolicy",
    "mask_outlier_sequences",
    "mask_second_moment",
]


@stage(
    reads=lambda a: ("batch.advantage", f"batch.logprob_{a['anchor']}"),
    writes=("loss.weight",),
)
def mask_negative_offpolicy(delta: float, anchor: str = "behavior"):
    """weight *= 0 where A_t < 0 and mean over the sequence of log anchor - log π > δ (DeepSeek-V3.2, arXiv 2512.02556).

    A bad answer that the current policy would hardly give any more is not pushed down further. It acts at every
    gradient, on the current policy, detached; the mean is over the trained tokens of the sequence; the denominator
    stays. anchor: behavior (the paper, TRL, slime with rollout log-probs) or proximal (slime's default). The paper
    gives no δ; slime has 1e-4. Metric: `offpolicy_masked`.
    """
    checks.number("mask_negative_offpolicy", "delta", delta)
    checks.choice("mask_negative_offpolicy", "anchor", anchor, ("behavior", "proximal"))

    def apply(loss, batch):
        there = require("mask_negative_offpolicy", batch, f"logprob_{anchor}")
        log_ratio = token_log_ratio(loss.logprob, there, batch.mask)
        dropped = corrections.negative_offpolicy(
            log_ratio, batch.advantage, batch.sequence, batch.mask, delta
        )
        dropped = dropped.astype(log_ratio.dtype)
        return loss.log("offpolicy_masked", dropped).scale_weight(1.0 - dropped)

    return apply


@stage(reads=MISMATCH, writes=kept_or_counted)
def mask_outlier_sequences(low: float | None = 1e-4, high: float | None = 100.0, renormalize: bool = False):
    """Drops every sequence with a trained token whose w_t = proximal / behavior is outside [low, high].

    One such token says that sampler and learner computed different things (SkyRL; its suggested bounds are the
    defaults). Bounds are absolute and inclusive; None does not bind; a token without a finite ratio is an outlier.
    Metric: `outlier_masked`.
    """
    checks.number("mask_outlier_sequences", "low", low, low=0.0, optional=True)
    checks.number("mask_outlier_sequences", "high", high, positive=True, optional=True)

    def prepare(batch):
        weight = corrections.token_weight(
            mismatch("mask_outlier_sequences", batch), batch.sequence, batch.mask
        )
        dropped = corrections.outlier_sequences(weight, batch.sequence, batch.mask, low, high)
        batch = batch.log("outlier_masked", dropped.astype(weight.dtype))
        return reject(batch, ~dropped, renormalize)

    return prepare


@stage(reads=MISMATCH, writes=kept_or_counted)
def mask_divergent_sequences(
    limit: float, estimator: str = "k3", reduce: str = "mean", renormalize: bool = False
):
    """Drops every sequence whose estimated KL(behavior ‖ proximal) is above `limit` nats (inclusive: at it, it stays).

    k_t of x = log behavior - log proximal: x²/2 (k2) or e^-x - 1 + x (k3), which are never negative, so that the
    errors of two tokens do not cancel as they do in a mean log-ratio; their mean over the trained tokens of the
    sequence ("mean"), or their sum ("sum"), which long sequences reach sooner. verl's seq_mean_k2, seq_mean_k3,
    seq_sum_k2 and seq_sum_k3 rejections, where dropped sequences leave the denominator (renormalize=True); AReaL's
    kl_k2. Neither has a default of limit, nor has this. Metrics: `divergent_masked`, `sequence_divergence`.
    """
    checks.number("mask_divergent_sequences", "limit", limit, low=0.0)
    checks.choice("mask_divergent_sequences", "estimator", estimator, ("k2", "k3"))
    checks.choice("mask_divergent_sequences", "reduce", reduce, ("mean", "sum"))
    of_token = {"k2": divergences.k2, "k3": divergences.k3}[estimator]
    pooled = {"mean": sequence_mean, "sum": lambda k, ids, mask: sequence_sum(keep(mask, k), ids)}[reduce]

    def prepare(batch):
        size = pooled(of_token(-mismatch("mask_divergent_sequences", batch)), batch.sequence, batch.mask)
        kept = size <= limit
        batch = batch.log("sequence_divergence", jnp.where(jnp.isfinite(size), size, 0.0))
        return reject(batch.log("divergent_masked", 1.0 - kept.astype(size.dtype)), kept, renormalize)

    return prepare


@stage(
    reads=(*MISMATCH, "batch.counted"),
    writes=lambda a: ("batch.counted",) if a["renormalize"] else ("batch.weight",),
)
def mask_second_moment(limit: float = 0.04, renormalize: bool = True):
    """Drops the tokens with the largest M_t = (log behavior - log proximal)² until the mean of the rest is < limit.

    Second-moment trust policy optimisation (M2PO, arXiv 2510.01161), with the
    proximal policy in the place of the current one, as AReaL computes it: the ranking is over the counted tokens of
    the whole batch, hence made once, before the first gradient. The smallest M always stays. By default dropped
    tokens leave the denominator (AReaL). Departure: equal values go together (AReaL: in the order of a sort), so
    that a batch means the same in any order. Metrics: `mismatch_moment` (mean M before), `mismatch_moment_masked`.
    """
    checks.number("mask_second_moment", "limit", limit, positive=True, finite=False)

    def prepare(batch):
        moment = mismatch("mask_second_moment", batch) ** 2
        valid = batch.mask if batch.counted is None else batch.mask & batch.counted
        kept = corrections.second_moment_kept(moment, valid, limit)
        dropped = (valid & ~kept).astype(moment.dtype)
        batch = batch.log("mismatch_moment", jnp.where(jnp.isfinite(moment), moment, 0.0), valid)
        return reject(batch.log("mismatch_moment_masked", dropped, valid), kept | ~valid, renormalize)

    return prepare
