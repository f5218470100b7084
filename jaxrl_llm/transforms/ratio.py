"""Ratios of the current policy to an anchor, as log-ratios in loss.log_ratio.

The anchor is *behavior* (the sampler's own log-probs) or *proximal* (the learner's at the start of the train
step). Every ratio logs, over counted tokens: `ratio`, `log_ratio_abs`, and `ratio_low`, `ratio_high`: the
smallest and largest ratio of a sequence, averaged over sequences (a batch-wide extreme could not be added up
over micro-batches).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import corrections, ratios
from jaxrl_llm.ops.numerics import absolute, quotient, safe_exp
from jaxrl_llm.ops.segments import sequence_max, sequence_sum
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import Parts, stage
from jaxrl_llm.transforms.correction import known_versions
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import LossState, Mean, TokenBatch

__all__ = ["approximate_proximal", "sequence_ratio", "sequence_ratio_per_token", "token_ratio"]

ANCHORS = ("behavior", "proximal")


def _reads(arguments) -> tuple[str, ...]:
    return (f"batch.logprob_{arguments['anchor']}",)


def _write(loss: LossState, batch: TokenBatch, log_ratio: jax.Array) -> LossState:
    ratio = safe_exp(log_ratio)
    loss = loss.replace(log_ratio=log_ratio).log("ratio", ratio).log("log_ratio_abs", absolute(log_ratio))
    detached = jax.lax.stop_gradient(log_ratio)
    ones = loss.mask.astype(log_ratio.dtype)
    share = quotient(ones, sequence_sum(ones, batch.sequence))  # sums to 1 over a sequence
    extremes = {
        "ratio_low": safe_exp(-sequence_max(-detached, batch.sequence, loss.mask)),
        "ratio_high": safe_exp(sequence_max(detached, batch.sequence, loss.mask)),
    }
    means = {name: Mean(jnp.sum(x * share), jnp.sum(share)) for name, x in extremes.items()}
    return loss.replace(metrics={**loss.metrics, **means})


@stage(reads=_reads, writes=("loss.log_ratio",))
def token_ratio(anchor: str = "behavior"):
    """log r_t = log π_t - log anchor_t: the importance ratio of each token (PPO, arXiv 1707.06347, eq. 6)."""
    checks.choice("token_ratio", "anchor", anchor, ANCHORS)

    def apply(loss, batch):
        there = require("token_ratio", batch, f"logprob_{anchor}")
        return _write(loss, batch, ratios.token_log_ratio(loss.logprob, there, batch.mask))

    return apply


@stage(reads=_reads, writes=("loss.log_ratio",))
def sequence_ratio(anchor: str = "behavior"):
    """log s = mean over the counted tokens of the sequence of log π_t - log anchor_t (GSPO, arXiv 2507.18071, eq. 7).

    The gradient goes through s, to all tokens of the mean: to those with a weight of 0, too, and not to those that a
    stage with renormalize=True has dropped from the batch.
    """
    checks.choice("sequence_ratio", "anchor", anchor, ANCHORS)

    def apply(loss, batch):
        there = require("sequence_ratio", batch, f"logprob_{anchor}")
        return _write(loss, batch, ratios.sequence_log_ratio(loss.logprob, there, batch.sequence, loss.mask))

    return apply


@stage(reads=_reads, writes=("loss.log_ratio",))
def sequence_ratio_per_token(anchor: str = "behavior"):
    """log s_t = log π_t - sg(log π_t) + sg(log s) (GSPO-token, arXiv 2507.18071, eq. 14).

    The value of the sequence ratio, the gradient of the token. Equals `sequence_ratio` under
    `normalize_by_sequence` when the advantage is constant over the sequence.
    """
    checks.choice("sequence_ratio_per_token", "anchor", anchor, ANCHORS)

    def apply(loss, batch):
        there = require("sequence_ratio_per_token", batch, f"logprob_{anchor}")
        return _write(
            loss, batch, ratios.sequence_log_ratio_per_token(loss.logprob, there, batch.sequence, loss.mask)
        )

    return apply


@stage(
    reads=("batch.logprob_behavior", "batch.version", "batch.learner_version"),
    writes=("loss.log_ratio", "loss.weight"),
)
def approximate_proximal(between: str = "logarithms", cap: float | None = 5.0):
    """log r_t = log π_t - log p_t with an interpolated p, and weight *= p / behavior: decoupled PPO without a second pass.

    p lies between behavior and the current policy by versions: with v = learner_version, the version of the
    proximal policy, and v + 1 the one being made, the share is (v - version) / (v + 1 - version). It is 0 for a
    token of this version, whose proximal policy is the behavior policy, and for one of unknown version (-1).
    between="logarithms": log p = log behavior + share (log π - log behavior); "probabilities": p = (1 - share)
    behavior + share π (AReaL's loglinear and linear, the latter without its 1e-10 inside the logarithm). p is
    detached and follows the current policy at every gradient. A token with p / behavior > cap has weight 0
    (AReaL's behave_imp_weight_cap, 5); None keeps all. Writes the ratio, so no other ratio stands in the chain.
    Metrics: those of a ratio, `importance_weight`, `importance_masked`.

    Raises (in `prepare`): ValueError when a trained token has version -1, as far as values are known.
    """
    checks.choice("approximate_proximal", "between", between, ("logarithms", "probabilities"))
    checks.number("approximate_proximal", "cap", cap, positive=True, optional=True)

    def prepare(batch):
        known_versions("approximate_proximal", batch)
        return batch

    def apply(loss, batch):
        behavior = require("approximate_proximal", batch, "logprob_behavior")
        age = jnp.where(batch.version < 0, 0, jnp.maximum(batch.learner_version - batch.version, 0))
        age = age.astype(loss.logprob.dtype)
        proximal = corrections.interpolated_proximal(
            behavior.astype(age.dtype),
            jax.lax.stop_gradient(loss.logprob),
            age / (age + 1.0),
            between == "probabilities",
        )
        weight = corrections.token_weight(proximal - behavior, batch.sequence, batch.mask)
        kept = corrections.inside(weight, None, cap)
        loss = loss.log("importance_weight", jnp.where(kept, weight, 0.0))
        loss = loss.log("importance_masked", 1.0 - kept.astype(weight.dtype))
        loss = loss.scale_weight(jnp.where(kept, weight, 0.0))
        return _write(loss, batch, ratios.token_log_ratio(loss.logprob, proximal, batch.mask))

    return Parts(prepare=prepare, apply=apply)
