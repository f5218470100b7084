"""Ratios of the current policy to an anchor, as log-ratios in loss.log_ratio.

The anchor is *behavior* (the sampler's own log-probs) or *proximal* (the learner's at the start of the train
step). Every ratio logs, over counted tokens: `ratio`, `log_ratio_abs`, and `ratio_low`, `ratio_high`: the
smallest and largest ratio of a sequence, averaged over sequences (a batch-wide extreme could not be added up
over micro-batches).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import ratios
from jaxrl_llm.ops.numerics import absolute, quotient, safe_exp
from jaxrl_llm.ops.segments import sequence_max, sequence_sum
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import LossState, Mean, TokenBatch

__all__ = ["sequence_ratio", "sequence_ratio_per_token", "token_ratio"]

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
    """log s = mean over the trained tokens of the sequence of log π_t - log anchor_t (GSPO, arXiv 2507.18071, eq. 7).

    The gradient goes through s, to all tokens of the sequence.
    """
    checks.choice("sequence_ratio", "anchor", anchor, ANCHORS)

    def apply(loss, batch):
        there = require("sequence_ratio", batch, f"logprob_{anchor}")
        return _write(loss, batch, ratios.sequence_log_ratio(loss.logprob, there, batch.sequence, batch.mask))

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
            loss, batch, ratios.sequence_log_ratio_per_token(loss.logprob, there, batch.sequence, batch.mask)
        )

    return apply
