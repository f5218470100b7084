"""Matrix products whose backward pass is as fast as their forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["dense"]

Array = jax.Array


@jax.custom_vjp
def dense(x: Array, w: Array) -> Array:
    """x [..., D] @ w [D, F] in x's dtype; w may be wider (f32 master weights) and is cast here."""
    return x @ w.astype(x.dtype)


def _forward(x, w):
    return dense(x, w), (x, w)


def _backward(residuals, dy):
    x, w = residuals
    dx = dy @ w.astype(x.dtype).T
    # Written as a 3-D einsum because XLA:CPU runs the form that autodiff emits 50 times slower in bf16 (and
    # twice slower in f32); flattened 2-D forms are 5 times slower. The sum is kept in f32, so that the
    # gradient of an f32 master weight is not rounded to the compute dtype.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    flat_x, flat_dy = x.reshape(-1, *x.shape[-2:]), dy.reshape(-1, *dy.shape[-2:])
    dw = jnp.einsum("bsd,bsf->df", flat_x, flat_dy, preferred_element_type=wide)
    return dx, dw.astype(w.dtype)


dense.defvjp(_forward, _backward)
