"""Weight sync: the same tree in another layout and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["transfer"]


@functools.lru_cache(maxsize=32)
def _program(tree: Any, leaves: tuple[jax.sharding.Sharding, ...], dtype: str | None) -> Callable[[Any], Any]:
    def convert(x):
        wanted = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != dtype
        return x.astype(dtype) if wanted else jnp.copy(x)

    return jax.jit(
        lambda params: jax.tree.map(convert, params), out_shardings=jax.tree.unflatten(tree, leaves)
    )


def transfer(params: Any, shardings: Any, dtype: str | None = None) -> Any:
    """A copy of `params` laid out as `shardings`, floating-point leaves cast to `dtype`.

    One jitted call on one mesh. The result shares no memory with `params`, so the learner may donate its
    own tree while the sampler still reads the result.

    Args:
      params: any tree of arrays.
      shardings: a tree of `Sharding`s of the same structure. When its devices are not those of `params`,
        the leaves are cast first and then moved.
      dtype: for example "bfloat16"; None keeps each leaf's.

    Raises:
      ValueError: the structures differ.
    """
    leaves, tree = jax.tree.flatten(shardings)
    given = jax.tree.structure(params)
    if str(given) != str(tree):
        raise ValueError(
            f"transfer: params and shardings differ in structure.\n  params: {given}\n  shardings: {tree}"
        )
    sources = [x.sharding for x in jax.tree.leaves(params)]
    same_devices = all(a.device_set == b.device_set for a, b in zip(sources, leaves, strict=True))
    if same_devices:
        return _program(tree, tuple(leaves), dtype)(params)
    return jax.device_put(_program(tree, tuple(sources), dtype)(params), shardings)
