"""What a token was drawn from, as a short list of integers: `support_ids` of trajectories and batches.

- ids >= 0: from these tokens only, filled up with -1 (top-k, top-p, min-p).
- codes <= -2 and no id >= 0: from the vocabulary without some tokens (stop ids before min_tokens, suppressed ids, the
  padding of a vocabulary), see `left_out`.
- nothing but -1: from the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["NOTHING", "first_left_out", "is_left_out", "left_out", "left_out_ids"]

Array = jax.Array

NOTHING = -1
_FROM = -2 - 2**30  # _FROM - n stands for all ids from n on; vocabularies are far smaller than 2**30


def left_out(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """i32[K]: the codes that leave out these tokens; the last tokens of the vocabulary take one code together."""
    out = set(tokens)
    outside = [token for token in out if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"left_out: token ids must lie in [0, {vocab_size}), got {sorted(outside)[:5]}.")
    end = vocab_size
    while end - 1 in out:
        end -= 1
    codes = [-2 - token for token in sorted(out) if token < end]
    return np.array(codes + ([_FROM - end] if end < vocab_size else []), np.int32)


def left_out_ids(support: Array, vocab_size: int) -> Array:
    """i32[..., K]: the single tokens that are left out; `vocab_size` in the other places."""
    return jnp.where((support <= -2) & (support > _FROM), -2 - support, vocab_size)


def first_left_out(support: Array, vocab_size: int) -> Array:
    """i32[...]: the id from which on all tokens are left out; `vocab_size` if none are."""
    return jnp.min(jnp.where(support <= _FROM, _FROM - support, vocab_size), axis=-1)


def is_left_out(support: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """bool[...]: whether support i32[..., K] leaves out the token i32[...] in its place."""
    codes, token = np.asarray(support), np.asarray(tokens)[..., None]
    return ((codes == -2 - token) | ((codes <= _FROM) & (token >= _FROM - codes))).any(axis=-1)
