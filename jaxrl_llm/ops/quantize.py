"""Symmetric 8-bit numbers with one scale a channel: weights and keys/values of rollouts in half the memory.

x ≈ values · scale, scale = max|x| / largest value, over the axis that shares a scale. int8 rounds to the nearest of
255 levels: the error is at most scale / 2. fp8 is e4m3 (3 bits of mantissa): at most |x| / 16 for all but the
smallest numbers, and 2⁻¹⁰ · scale for those.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.dense import dense
from jaxrl_llm.ops.numerics import at_least_f32

__all__ = [
    "Precision",
    "QuantizedMatrix",
    "Stored",
    "quantize",
    "quantize_matrix",
    "restore",
    "weight_product",
]

Array = jax.Array

# How weights or pages are held for sampling; "compute" = in the compute dtype of the model.
Precision = Literal["compute", "int8", "fp8"]

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}


class Stored(NamedTuple):
    """Numbers that share a scale along their last axis."""

    values: Array  # [..., K], int8 or float8_e4m3fn
    scale: Array  # f32[...]


@flax.struct.dataclass(kw_only=True)
class QuantizedMatrix:
    """A weight in x @ W orientation with a scale for each output channel."""

    values: Array  # [..., D, F], int8 or float8_e4m3fn
    scale: Array  # f32[..., F]


def quantize(x: Array, kind: str, axis: int = -1) -> Stored:
    """The 8-bit form of x; numbers along `axis` share a scale. NaN and infinity come back as NaN."""
    wide = at_least_f32(x)
    scale = jnp.max(jnp.abs(wide), axis=axis) / LARGEST[kind]
    scale = scale.astype(jnp.float32)
    values = wide / jnp.expand_dims(jnp.where(scale == 0, 1, scale), axis)
    if kind == "int8":
        values = jnp.round(values)
    return Stored(values.astype(DTYPES[kind]), scale)


def restore(stored: Stored, dtype: jnp.dtype) -> Array:
    """The numbers that a quantised array stands for."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (stored.values.astype(wide) * stored.scale[..., None].astype(wide)).astype(dtype)


def quantize_matrix(w: Array, kind: str) -> QuantizedMatrix:
    """The 8-bit form of a matrix [..., D, F]: a scale for each of the F columns, so that it can follow the product."""
    return QuantizedMatrix(**quantize(w, kind, axis=-2)._asdict())


def weight_product(x: Array, w: Array | QuantizedMatrix) -> Array:
    """x [..., D] @ w [D, F] in x's dtype, as `dense`.

    The activations stay as they are. Every int8 and e4m3 value is a bfloat16 value, so that the only error is that of
    the rounded weights; the scale is applied to the f32 sums.
    """
    if not isinstance(w, QuantizedMatrix):
        return dense(x, w)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    sums = jnp.einsum("...d,df->...f", x, w.values.astype(x.dtype), preferred_element_type=wide)
    return (sums * w.scale.astype(wide)).astype(x.dtype)
