"""The decoder as pure functions over a parameter tree.

`decoder_layer` is the one definition of a layer. How a query finds its keys is injected as a function
`attend`, so that the learner (dense attention within segments) and the sampler (attention over a paged
cache) run the same arithmetic around it.

Local names carry dimensions: B rows, T tokens, D residual, H query heads, N key/value heads, K head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import segment_attention, visible_tokens
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.dense import DENSE, dense

__all__ = [
    "Remat",
    "apply_rope",
    "decoder_layer",
    "embed",
    "forward",
    "head_matrix",
    "head_weight",
    "rms_norm",
    "rope_tables",
]

Array = jax.Array
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]

# What the backward pass recomputes: nothing, all of a layer, or all but the outputs of its weight products.
Remat = bool | Literal["dots"]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis, computed in f32 (f64 stays f64), returned in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # HF Llama rounds to the activation dtype before the weight is applied.
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> Array:
    """f32[K / 2]: rotary angular frequencies, radians per position, with Llama 3 scaling if any."""
    K = config.head_dim
    inverse = 1.0 / (config.rope_theta ** (jnp.arange(0, K, 2, dtype=jnp.float32) / K))
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    middle = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = jnp.where(wavelength > low, inverse / scaling.factor, middle)
    return jnp.where(wavelength < high, inverse, scaled)


def rope_tables(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """(cos, sin), f32[..., K / 2], of i32[...] positions."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BTHK: Array, rope: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + K/2) of each head, the half-split convention of Hugging Face weights."""
    cos, sin = (table[..., None, :].astype(jnp.promote_types(x_BTHK.dtype, jnp.float32)) for table in rope)
    first, second = jnp.split(x_BTHK.astype(cos.dtype), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


def decoder_layer(
    layer: dict[str, Array], config: ModelConfig, x_BTD: Array, rope: tuple[Array, Array], attend: Attend
) -> tuple[Array, Any]:
    """One layer. `attend(q [B,T,H,K], k [B,T,N,K], v [B,T,N,K])` returns ([B,T,H,K], anything)."""
    B, T, _ = x_BTD.shape
    K = config.head_dim
    h = rms_norm(x_BTD, layer["attn_norm"], config.rms_norm_eps)
    q = dense(h, layer["q"]).reshape(B, T, config.num_heads, K)
    k = dense(h, layer["k"]).reshape(B, T, config.num_kv_heads, K)
    v = dense(h, layer["v"]).reshape(B, T, config.num_kv_heads, K)
    attended, carry = attend(apply_rope(q, rope), apply_rope(k, rope), v)
    x_BTD = x_BTD + dense(attended.reshape(B, T, config.num_heads * K), layer["o"])
    h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
    gated = jax.nn.silu(dense(h, layer["gate"])) * dense(h, layer["up"])
    return x_BTD + dense(gated, layer["down"]), carry


def embed(params: Any, config: ModelConfig, tokens: Array) -> Array:
    """[B, T, D] in the compute dtype."""
    # Gathered before the cast: the gradient then adds up in the dtype of the parameter.
    return params["embed"][tokens].astype(config.dtype)


def head_matrix(params: Any) -> Array:
    """[D, V] output head as stored, in x @ W orientation (a tied head is transposed here)."""
    return params["head"] if "head" in params else params["embed"].T


def head_weight(params: Any, config: ModelConfig) -> Array:
    """[D, V] output head in `config.logits_dtype`."""
    return head_matrix(params).astype(config.logits_dtype)


def forward(
    params: Any,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    segments: Array,
    *,
    remat: Remat = False,
) -> Array:
    """Final hidden states [B, T, D] (after the last norm), for training and scoring.

    Args:
      params: the tree of `parameter_specs`.
      tokens, positions, segments: i32[B, T]; which tokens of a row see each other is said in
        `TokenBatch.segments`.
      remat: recompute each layer in the backward pass instead of keeping its activations; "dots" keeps the
        outputs of its products with weights and recomputes the cheap rest.
    """
    rope = rope_tables(config, positions)

    visible = visible_tokens(segments)

    def attend(q, k, v):
        return segment_attention(q, k, v, visible), None

    def body(x, layer):
        x, _ = decoder_layer(layer, config, x, rope, attend)
        return x, None

    if remat:
        policy = jax.checkpoint_policies.save_only_these_names(DENSE) if remat == "dots" else None
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    x, _ = jax.lax.scan(body, embed(params, config, tokens), params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)
