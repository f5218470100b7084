"""Importance ratios, as log-ratios: log π(token) - log anchor(token)."""

from __future__ import annotations

import chex
import jax

from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import sequence_mean

__all__ = ["sequence_log_ratio", "sequence_log_ratio_per_token", "token_log_ratio"]

Array = jax.Array


def token_log_ratio(logprob: Array, anchor: Array, mask: Array) -> Array:
    """d_t = log π_t - log anchor_t; 0 outside the mask."""
    chex.assert_equal_shape([logprob, anchor, mask])
    return keep(mask, logprob) - keep(mask, anchor)


def sequence_log_ratio(logprob: Array, anchor: Array, sequence: Array, mask: Array) -> Array:
    """s = mean_t d_t over the trained tokens of the sequence, at each of them (GSPO, eq. 7).

    The geometric mean of the token ratios, not their product; the gradient flows to every token.
    """
    return keep(mask, sequence_mean(token_log_ratio(logprob, anchor, mask), sequence, mask))


def sequence_log_ratio_per_token(logprob: Array, anchor: Array, sequence: Array, mask: Array) -> Array:
    """s_t = log π_t - sg(log π_t) + sg(s): the value of s, the gradient of token t alone (GSPO-token)."""
    mean = sequence_log_ratio(jax.lax.stop_gradient(logprob), anchor, sequence, mask)
    logprob = keep(mask, logprob)
    # The difference first: it is exactly 0, whatever the magnitude of the log-prob.
    return (logprob - jax.lax.stop_gradient(logprob)) + mean
