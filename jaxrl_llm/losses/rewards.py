"""Changes of the reward before it becomes an advantage."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["overlong_penalty"]

Array = jax.Array


def overlong_penalty(length: Array, limit: float, buffer: float, penalty: float) -> Array:
    """-penalty · clip((length - (limit - buffer)) / buffer, 0, 1) (DAPO, arXiv 2503.14476, eq. 13).

    Lengths in tokens. 0 up to limit - buffer, then linear, and -penalty from `limit` on. (verl, AReaL and
    tunix have no floor: theirs keeps falling beyond the limit.)
    """
    return -penalty * jnp.clip((length - (limit - buffer)) / buffer, 0.0, 1.0)
