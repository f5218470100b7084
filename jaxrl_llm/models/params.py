"""The parameter tree: one line a parameter gives shape, dtype, logical axes and initialiser.

Initialisation, sharding, restoring, conversion and export all derive from `parameter_specs`. Every
matrix is stored in x @ W orientation; the layers are stacked on a leading axis and scanned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig

__all__ = ["ParamSpec", "abstract_params", "init_params", "parameter_specs"]


class ParamSpec(NamedTuple):
    """One parameter: shape, logical axis of each dimension (None = never sharded), initialiser scale."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # "normal" (std 1/sqrt(fan in)), "embed" (std 0.02), "ones" or "zeros"
    fan_in: int = 1


def parameter_specs(config: ModelConfig) -> dict[str, Any]:
    """The tree of `ParamSpec` of a model.

    Logical axes: vocab, embed (the residual stream), heads, kv_heads, mlp, experts, layers.
    """
    D, F, V, L = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_layers
    Q, KV = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "attn_norm": ParamSpec((L, D), ("layers", None), "ones"),
        "q": ParamSpec((L, D, Q), ("layers", "embed", "heads"), "normal", D),
        "k": ParamSpec((L, D, KV), ("layers", "embed", "kv_heads"), "normal", D),
        "v": ParamSpec((L, D, KV), ("layers", "embed", "kv_heads"), "normal", D),
        "o": ParamSpec((L, Q, D), ("layers", "heads", "embed"), "normal", Q),
        "mlp_norm": ParamSpec((L, D), ("layers", None), "ones"),
    }
    if config.num_experts:
        E, F = config.num_experts, config.expert_size
        layer |= {
            "router": ParamSpec((L, D, E), ("layers", None, None), "normal", D),
            "expert_gate": ParamSpec((L, E, D, F), ("layers", "experts", "embed", "mlp"), "normal", D),
            "expert_up": ParamSpec((L, E, D, F), ("layers", "experts", "embed", "mlp"), "normal", D),
            "expert_down": ParamSpec((L, E, F, D), ("layers", "experts", "mlp", "embed"), "normal", F),
        }
        if config.router_bias:  # no gradient reaches it
            layer["router_bias"] = ParamSpec((L, E), ("layers", None), "zeros")
    else:
        layer |= {
            "gate": ParamSpec((L, D, F), ("layers", "embed", "mlp"), "normal", D),
            "up": ParamSpec((L, D, F), ("layers", "embed", "mlp"), "normal", D),
            "down": ParamSpec((L, F, D), ("layers", "mlp", "embed"), "normal", F),
        }
    if config.attention_bias:
        for name, size, axis in (("q", Q, "heads"), ("k", KV, "kv_heads"), ("v", KV, "kv_heads")):
            layer[f"{name}_bias"] = ParamSpec((L, size), ("layers", axis), "zeros")
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            layer[name] = ParamSpec((L, config.head_dim), ("layers", None), "ones")
    specs: dict[str, Any] = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), "embed"),
        "layers": layer,
        "final_norm": ParamSpec((D,), (None,), "ones"),
    }
    if not config.tie_embeddings:
        specs["head"] = ParamSpec((D, V), ("embed", "vocab"), "normal", D)
    if config.value_head:
        specs["value"] = ParamSpec((D,), (None,), "zeros")
    return specs


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def abstract_params(config: ModelConfig, dtype: str = "float32") -> Any:
    """The tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), parameter_specs(config), is_leaf=_is_spec
    )


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Any:
    """Random parameters. `key` is consumed."""
    specs, tree = jax.tree.flatten(parameter_specs(config), is_leaf=_is_spec)
    keys = jax.random.split(key, len(specs))
    scale = {"embed": lambda s: 0.02, "normal": lambda s: s.fan_in**-0.5}
    leaves = [
        jnp.full(s.shape, 1 if s.init == "ones" else 0, dtype)
        if s.init in ("ones", "zeros")
        else (jax.random.normal(k, s.shape) * scale[s.init](s)).astype(dtype)
        for s, k in zip(specs, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)
