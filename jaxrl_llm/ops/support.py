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

__all__ = ["NOTHING", "first_left_out", "is_left_out", "left_out", "left_out_ids", "support_fault"]

Array = jax.Array

NOTHING = -1
_FROM = -2 - 2**30  # _FROM - n stands for all ids from n on; vocabularies are far smaller than 2**30


def left_out(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """i32[K]: the codes that leave out these tokens; the last tokens of the vocabulary take one code together.

    Raises:
      ValueError: ids outside of the vocabulary, or all of it, so that nothing is left to draw.
    """
    out = set(tokens)
    outside = [token for token in out if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"left_out: token ids must lie in [0, {vocab_size}), got {sorted(outside)[:5]}.")
    if len(out) == vocab_size:
        raise ValueError(
            f"left_out: all {vocab_size} tokens are left out; at least one must be left to draw."
        )
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
    return jnp.min(jnp.where(support <= _FROM, _FROM - support, vocab_size), axis=-1, initial=vocab_size)


def is_left_out(support: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """bool[...]: whether support i32[..., K] leaves out the token i32[...] in its place."""
    codes, token = np.asarray(support), np.asarray(tokens)[..., None]
    return ((codes == -2 - token) | ((codes <= _FROM) & (token >= _FROM - codes))).any(axis=-1)


def support_fault(
    support: np.ndarray, tokens: np.ndarray, mask: np.ndarray, vocab_size: int | None = None
) -> str | None:
    """What is wrong with lists i32[..., K] of what the tokens i32[...] were drawn from where mask bool[...]; None: nothing.

    Args:
      vocab_size: of the model; None: not known, and not checked.
    """
    ids = np.asarray(support)
    if ids.dtype.kind not in "iu":
        return f"support_ids must hold integers, got {ids.dtype}"
    ids, tokens = ids[mask].astype(np.int64), np.asarray(tokens)[mask]
    if ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**30:
        return f"support_ids hold {ids.min() if ids.min() < -(2**31) else ids.max()}, which is neither a token id nor a code"
    if vocab_size is not None and ids.size and ids.max() >= vocab_size:
        return f"support_ids hold {ids.max()}, and the vocabulary of the model ends at {vocab_size - 1}"
    found = (ids == tokens[:, None]).any(axis=1) | (ids < 0).all(axis=1) & ~is_left_out(ids, tokens)
    if not found.all():
        place = tuple(int(i) for i in np.argwhere(mask)[int(np.flatnonzero(~found)[0])])
        return (
            f"token {place[0] if len(place) == 1 else place} is not among its support_ids, so that it cannot have been drawn "
            "from them"
        )
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        return "support_ids name a token twice, which would count twice in the sum of probabilities"
    return None
