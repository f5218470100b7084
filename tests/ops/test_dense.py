"""The product whose weight gradient is written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.dense import dense


def _operands(shape=(2, 5, 6), features=7):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    return x, rng.standard_normal((shape[-1], features)), rng.standard_normal((*shape[:-1], features))


@pytest.mark.parametrize("shape", [(2, 5, 6), (4, 6), (2, 3, 4, 6)])
def test_value_and_gradients_equal_numpy(shape):
    x, w, dy = _operands(shape)
    y, back = jax.vjp(dense, *(jnp.asarray(a, jnp.float32) for a in (x, w)))
    dx, dw = back(jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(y, x @ w, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ w.T, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("nd,nf->df", x.reshape(-1, 6), dy.reshape(-1, 7)), atol=1e-5)


def test_bf16_weight_gradient_of_an_f32_master_is_not_rounded():
    """The operands are bf16, the sum and its result f32: a gradient rounded to bf16 would be 1e-3 off."""
    x, w, dy = _operands((4, 64, 6))
    x16, dy16 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16)
    y, back = jax.vjp(dense, x16, jnp.asarray(w, jnp.float32))
    dx, dw = back(dy16)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.einsum("btd,btf->df", np.asarray(x16, np.float64), np.asarray(dy16, np.float64))
    np.testing.assert_allclose(dw, exact, rtol=1e-5, atol=1e-4)
    assert np.max(np.abs(np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64) - exact)) > 1e-2


def test_inside_a_scanned_rematerialised_layer():
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.standard_normal((3, 4, 4)) * 0.3, jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)

    def through(product, remat):
        def body(x, w):
            return jnp.tanh(product(x, w)), None

        body = jax.checkpoint(body) if remat else body
        return jax.jit(jax.grad(lambda weights: jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)))(weights)

    reference = through(jnp.matmul, False)
    for remat in (False, True):
        np.testing.assert_allclose(through(dense, remat), reference, atol=1e-6)
