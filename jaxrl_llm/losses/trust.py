"""Kernels of the surrogates that look at more than the ratio of a token: divergences, covariances, top-K lists."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, quotient, safe_exp
from jaxrl_llm.ops.segments import sequence_runs, sequence_sum

__all__ = [
    "binary_kl",
    "binary_tv",
    "covariance",
    "hash_uniform",
    "largest",
    "outside_trust",
    "sequence_quantile",
    "spread_ratio",
    "topk_kl",
    "topk_tv",
]

Array = jax.Array

SMALL = 1e-8  # added to both sides of the odds of "any other token", where they may be 0
REST_FLOOR = 1e-12  # smallest mass of the tokens outside the list


# ------------------------------------------------------------------------------ divergences of a token


def _probability(logprob: Array) -> Array:
    """At most 1, whatever rounding or a broken log-prob says."""
    return jnp.exp(jnp.minimum(logprob, 0.0))


def binary_tv(logprob: Array, anchor: Array) -> Array:
    """|p - p₀|: total variation between "this token" and "another one" (DPPO, arXiv 2602.04879)."""
    chex.assert_equal_shape([logprob, anchor])
    return jnp.abs(_probability(logprob) - _probability(anchor))


def binary_kl(logprob: Array, anchor: Array) -> Array:
    """p₀ log(p₀ / p) + (1 - p₀) log((1 - p₀ + 1e-8) / (1 - p + 1e-8)) (DPPO, arXiv 2602.04879)."""
    chex.assert_equal_shape([logprob, anchor])
    other, other_anchor = (jnp.maximum(-jnp.expm1(x), 0.0) for x in (logprob, anchor))
    return _probability(anchor) * (anchor - logprob) + other_anchor * (
        jnp.log(other_anchor + SMALL) - jnp.log(other + SMALL)
    )


def _rest(logprob: Array) -> Array:
    """Mass of the tokens outside the list; logprob [B, T, K]."""
    return jnp.maximum(1.0 - jnp.sum(_probability(logprob), axis=-1), REST_FLOOR)


def topk_tv(logprob: Array, anchor: Array) -> Array:
    """½ (Σ_k |π_k - μ_k| + |π_rest - μ_rest|), [B, T] of [B, T, K]; the other tokens are one bucket."""
    chex.assert_equal_shape([logprob, anchor])
    listed = jnp.sum(jnp.abs(_probability(logprob) - _probability(anchor)), axis=-1)
    return 0.5 * (listed + jnp.abs(_rest(logprob) - _rest(anchor)))


def topk_kl(logprob: Array, anchor: Array) -> Array:
    """KL(μ ‖ π) = Σ_k μ_k log(μ_k / π_k) + μ_rest log(μ_rest / π_rest), [B, T] of [B, T, K]."""
    chex.assert_equal_shape([logprob, anchor])
    listed = jnp.sum(_probability(anchor) * (anchor - logprob), axis=-1)
    rest, rest_anchor = _rest(logprob), _rest(anchor)
    return listed + rest_anchor * (jnp.log(rest_anchor) - jnp.log(rest))


def outside_trust(
    divergence: Array, logprob: Array, anchor: Array, advantage: Array, low: float, high: float
) -> tuple[Array, Array]:
    """(low, high) bool: tokens that moved further than allowed in the direction their advantage pushes them.

    high: A > 0, D > high and p > p₀. low: A < 0, D > low and p < p₀.
    """
    chex.assert_equal_shape([divergence, logprob, anchor, advantage])
    below = (advantage < 0) & (divergence > low) & (logprob < anchor)
    above = (advantage > 0) & (divergence > high) & (logprob > anchor)
    return below, above


# ------------------------------------------------------------------------------------ ranks in the batch


def covariance(advantage: Array, logprob: Array, counted: Array) -> Array:
    """c_t = (A_t - mean A) (log π_t - mean log π), means over the counted tokens (arXiv 2505.22617)."""
    chex.assert_equal_shape([advantage, logprob, counted])
    number = jnp.sum(counted).astype(logprob.dtype)

    def centred(x):
        return keep(counted, x - quotient(jnp.sum(keep(counted, x)), number))

    return centred(advantage) * centred(logprob)


def largest(score: Array, among: Array, number: Array) -> Array:
    """bool: the `number` i32[] entries of `among` with the largest scores; entries that tie with the last too.

    So the answer depends on values only, never on where a token lies in the batch.
    """
    chex.assert_equal_shape([score, among])
    descending = -jnp.sort(-jnp.where(among, score, -jnp.inf).reshape(-1))
    last = descending[jnp.clip(number - 1, 0, score.size - 1)]
    return among & (score >= last) & (number > 0)


def hash_uniform(*words: Array) -> Array:
    """f32 in [0, 1), a fixed pseudo-random function of integers: the same wherever a token lies."""
    state = jnp.uint32(0x9E3779B9)
    for word in words:
        state = state ^ jnp.asarray(word).astype(jnp.uint32)
        # finaliser of MurmurHash3: every input bit reaches every output bit
        state = (state ^ (state >> 16)) * jnp.uint32(0x85EBCA6B)
        state = (state ^ (state >> 13)) * jnp.uint32(0xC2B2AE35)
        state = state ^ (state >> 16)
    return (state >> 8).astype(jnp.float32) / 2.0**24


def sequence_quantile(values: Array, sequence: Array, mask: Array, q: float) -> Array:
    """The q-quantile of the masked tokens of a sequence, at each token of it, linearly interpolated; 0 where none.

    Row-local: values are sorted within their sequence, so it may be used in `apply`.
    """
    chex.assert_equal_shape([values, sequence, mask])
    width = values.shape[1]
    runs = sequence_runs(sequence)
    number = sequence_sum(mask.astype(jnp.int32), sequence)

    def row(value, run, on, n):
        # A masked token sorts behind the others of its run.
        order = jnp.lexsort((jnp.where(on, value, jnp.inf), run))
        first = jax.ops.segment_min(jnp.arange(width), run[order], num_segments=width)[run]
        ranked = jnp.where(on, value, 0.0)[order]
        place = q * jnp.maximum(n - 1, 0)
        below = jnp.floor(place).astype(jnp.int32)
        a = ranked[first + below]
        b = ranked[jnp.minimum(first + jnp.minimum(below + 1, jnp.maximum(n - 1, 0)), width - 1)]
        return jnp.where(n > 0, a + (b - a) * (place - below).astype(value.dtype), 0.0)

    return jax.vmap(row)(values, runs, mask, number)


# ------------------------------------------------------------------------------------------ top-K lists


def spread_ratio(log_ratio: Array, topk_log_ratio: Array, share: Array) -> Array:
    """(1 - a) r + (a / K) Σ_k sg(r / ρ_k) ρ_k (SimKO, arXiv 2510.14807): [B, T] of [B, T] and [B, T, K].

    The value is r; the fraction a of its gradient goes to the K tokens of the list in equal parts.
    """
    chex.assert_equal_shape([log_ratio, share])
    ratio, listed = safe_exp(log_ratio), safe_exp(topk_log_ratio)
    scale = jax.lax.stop_gradient(ratio[..., None] / (listed + SMALL))
    return (1.0 - share) * ratio + share * jnp.mean(scale * listed, axis=-1)
