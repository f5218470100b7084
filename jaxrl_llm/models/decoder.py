"""The decoder as pure functions over a parameter tree.

`decoder_layer` is the one definition of a layer. How a query finds its keys is injected as a function
`attend`, so that the learner (dense attention within segments) and the sampler (attention over a paged
cache) run the same arithmetic around it.

Local names carry dimensions: B rows, T tokens, D residual, H query heads, N key/value heads, K head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import segment_attention, sight_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import Routed, expert_mlp
from jaxrl_llm.ops.dense import DENSE, dense
from jaxrl_llm.parallel.rules import Layout

__all__ = [
    "Remat",
    "apply_rope",
    "decoder_layer",
    "embed",
    "forward",
    "forward_routed",
    "head_matrix",
    "head_weight",
    "pinned",
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
    layer: Mapping[str, Any],
    config: ModelConfig,
    x_BTD: Array,
    rope: tuple[Array, Array],
    attend: Attend,
    product: Callable[[Array, Any], Array] = dense,
    routing_ids: Array | None = None,
    live: Array | None = None,
) -> tuple[Array, Any, Routed | None]:
    """One layer: ([B, T, D], what `attend` gave beside its result, what the router did where there are experts).

    `attend(q [B,T,H,K], k [B,T,N,K], v [B,T,N,K])` returns ([B,T,H,K], anything). `product(x [..., D], w)` is x @ w in
    whatever form the matrices of the layer are. For `routing_ids` i32[B,T,K] and `live` bool[B,T] see
    `experts.expert_mlp`.
    """
    B, T, _ = x_BTD.shape
    K = config.head_dim
    h = rms_norm(x_BTD, layer["attn_norm"], config.rms_norm_eps)

    def heads(name: str, count: int) -> Array:
        y = product(h, layer[name])
        if config.attention_bias:
            y = y + layer[f"{name}_bias"].astype(y.dtype)
        return y.reshape(B, T, count, K)

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    attended, carry = attend(apply_rope(q, rope), apply_rope(k, rope), v)
    x_BTD = x_BTD + product(attended.reshape(B, T, config.num_heads * K), layer["o"])
    h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
    if config.num_experts:
        mixed, routed = expert_mlp(layer, config, h, routing_ids, live)
        return x_BTD + mixed, carry, routed
    gated = jax.nn.silu(product(h, layer["gate"])) * product(h, layer["up"])
    return x_BTD + product(gated, layer["down"]), carry, None


def pinned(x: Array, sharding: jax.sharding.Sharding | None) -> Array:
    """x, split as given; None: as XLA likes."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def embed(params: Any, config: ModelConfig, tokens: Array, layout: Layout | None = None) -> Array:
    """[B, T, D] in the compute dtype."""
    # Gathered before the cast: the gradient then adds up in the dtype of the parameter. Held to the shards of the table,
    # it goes from rows to them in the compute dtype; else all of it is gathered on every device.
    looked_up = None if layout is None else layout.looked_up
    x = pinned(pinned(params["embed"][tokens], looked_up).astype(config.dtype), looked_up)
    return pinned(x, layout.moving) if layout is not None and layout.context > 1 else x


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
    gradient_sums: Any = None,
    routing_ids: Array | None = None,
    layout: Layout | None = None,
) -> Array:
    """Final hidden states [B, T, D] (after the last norm), for training and scoring.

    Args:
      params: the tree of `parameter_specs`.
      tokens, positions, segments: i32[B, T]; which tokens of a row see each other is said in
        `TokenBatch.segments`.
      remat: recompute each layer in the backward pass instead of keeping its activations; "dots" keeps the
        outputs of its products with weights and recomputes the cheap rest.
      gradient_sums: the structure of params["layers"]; only with remat=True. The gradient with respect to
        params["layers"] then comes out with these added, in their memory: see `_accumulating_scan`.
      routing_ids: i32[B, T, layers, K] of a model with experts, see `experts.expert_mlp`; a dense one reads none.
      layout: of the activations on a mesh.
    """
    return forward_routed(
        params,
        config,
        tokens,
        positions,
        segments,
        remat=remat,
        gradient_sums=gradient_sums,
        routing_ids=routing_ids,
        layout=layout,
    )[0]


def forward_routed(
    params: Any,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    segments: Array,
    *,
    remat: Remat = False,
    gradient_sums: Any = None,
    routing_ids: Array | None = None,
    router_probs: bool = False,
    layout: Layout | None = None,
) -> tuple[Array, Routed | None]:
    """As `forward`, and what the routers of all layers did, [layers, B, T, …]; None of a dense model.

    `router_probs`: with their probabilities, which are on the tape and take layers × experts numbers a token.
    """
    held = None if layout is None else layout.tokens
    tokens, positions, segments = (pinned(x, held) for x in (tokens, positions, segments))
    visible = sight_for(segments, config.key_blocks, layout)
    context = (rope_tables(config, positions), visible, positions, segments != 0)
    if routing_ids is not None and config.num_experts:
        routing_ids = jnp.moveaxis(routing_ids, 2, 0)
    else:
        routing_ids = None

    def body(x, layer, chosen, context):
        rope, visible, positions, live = context
        x, _, routed = decoder_layer(
            layer,
            config,
            x,
            rope,
            lambda q, k, v: (segment_attention(q, k, v, visible, config.key_blocks, positions, layout), None),
            routing_ids=chosen,
            live=live,
        )
        x = pinned(x, held)
        if routed is None:
            return x, None, None
        return x, routed.probs if router_probs else None, routed._replace(probs=None)

    x = pinned(embed(params, config, tokens, layout), held)
    if gradient_sums is not None:
        if remat is not True:
            raise ValueError(f"forward: gradient_sums needs remat=True, got {remat!r}.")
        x, probs, routed = _accumulating_scan(
            body, x, params["layers"], gradient_sums, (routing_ids, context)
        )
    else:
        if remat:
            policy = jax.checkpoint_policies.save_only_these_names(DENSE) if remat == "dots" else None
            body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        x, probs, routed = _scan(body, x, params["layers"], routing_ids, context)
    if routed is not None:
        routed = routed._replace(probs=probs)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), routed


def _scan(body: Callable, x: Array, layers: Any, chosen: Any, context: Any) -> tuple[Array, Any, Any]:
    def step(x, at):
        x, *given = body(x, *at, context)
        return x, tuple(given)

    x, (taped, rest) = jax.lax.scan(step, x, (layers, chosen))
    return x, taped, rest


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _accumulating_scan(
    body: Callable, x: Array, layers: Any, sums: Any, context: Any
) -> tuple[Array, Any, Any]:
    """`_scan` with every layer rematerialised; its backward pass adds the gradient of `layers` onto `sums`.

    Adding micro-batches up outside would need two trees of gradients at once, the sum and the one being
    made: 4 more bytes a parameter. What the backward pass returns for `layers` is therefore sums +
    gradient, written layer by layer into the buffers of `sums`. The last result is off the tape.
    """
    del sums
    return _scan(body, x, layers, *context)


def _accumulating_forward(body, x, layers, sums, context):
    chosen, shared = context

    def step(x, at):
        after, *given = body(x, *at, shared)
        return after, (x, *given)

    x, (inputs, taped, rest) = jax.lax.scan(step, x, (layers, chosen))
    return (x, taped, rest), (inputs, layers, sums, context)


def _accumulating_backward(body, residuals, cotangents):
    inputs, layers, sums, (chosen, shared) = residuals
    dx, d_taped, _ = cotangents

    def step(carry, at):
        dx, sums = carry
        index, x, layer, chosen, d_taped = at

        def taped(x, layer):
            return body(x, layer, chosen, shared)[:2]

        dx, d_layer = jax.vjp(taped, x, layer)[1]((dx, d_taped))

        def add(total, d):
            here = jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(total, here + d, index, 0)

        return (dx, jax.tree.map(add, sums, d_layer)), None

    indices = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
    (dx, sums), _ = jax.lax.scan(step, (dx, sums), (indices, inputs, layers, chosen, d_taped), reverse=True)
    return dx, sums, None, None


_accumulating_scan.defvjp(_accumulating_forward, _accumulating_backward)
