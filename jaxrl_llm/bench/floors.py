"""What this machine can do at best: the rate of a large matrix product and the speed of streaming through memory.

A benchmark divides its floating-point operations and its bytes by these to get the time below which no
program of the same work can go, and reports how many times longer it took.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Floors", "floor_seconds", "measure_floors"]


class Floors(NamedTuple):
    """Rates of the default device."""

    flops_per_second: float  # multiply and add count as two
    bytes_per_second: float  # read plus written, streaming through a large array


def _fastest(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls after one warm-up call."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def measure_floors(dtype: str = "float32", *, size: int = 1536, repeats: int = 5) -> Floors:
    """Measures the default device once per process and dtype; takes about a second.

    Args:
      dtype: of the operands of the matrix product; the sum is kept in f32.
      size: rows and columns of the operands. Large enough to reach the plateau of a CPU core's matrix unit.
      repeats: the fastest of this many runs counts, because other programs only ever slow a run down.
    """
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(dtype))
    flops = 2.0 * size**3 / _fastest(lambda: product(x, x), repeats)
    # In place: a program that writes fresh memory would measure the page faults of the operating system.
    update = jax.jit(lambda a: a + 1.0, donate_argnums=0)
    block = jnp.zeros((2**26,), jnp.float32)  # 256 MB
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        block = jax.block_until_ready(update(block))
        best = min(best, time.perf_counter() - start)
    return Floors(flops, 2.0 * block.nbytes / best)


def floor_seconds(flops: float, bytes_moved: float, floors: Floors) -> float:
    """Seconds below which the work cannot go when computing and moving overlap perfectly."""
    return max(flops / floors.flops_per_second, bytes_moved / floors.bytes_per_second)
