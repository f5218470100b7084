"""The Llama and Qwen families on disk: `config.json` to and from `ModelConfig`, tensor names to and from the tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.params import parameter_specs
from jaxrl_llm.tokens.tokenizer import id_list

__all__ = [
    "DERIVED_SUFFIXES",
    "EMBED_NAME",
    "HEAD_NAME",
    "SUPPORTED",
    "Slot",
    "config_from_hf",
    "config_to_hf",
    "tensor_slots",
]

SUPPORTED = {  # model_type -> architecture
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
EMBED_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers of old exports, a function of the config: not loaded

_DEFAULT_HEAD_DIM = {"qwen3": 128}  # others: hidden_size / num_attention_heads
_SPARSE = "qwen3_moe"

_LAYER = {  # leaf of the tree: (name in the file, stored as W in W @ x and so transposed)
    "attn_norm": ("input_layernorm.weight", False),
    "q": ("self_attn.q_proj.weight", True),
    "k": ("self_attn.k_proj.weight", True),
    "v": ("self_attn.v_proj.weight", True),
    "q_bias": ("self_attn.q_proj.bias", False),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v_bias": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "o": ("self_attn.o_proj.weight", True),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
    "router": ("mlp.gate.weight", True),
}
_EXPERT = {  # leaf of the tree, of which each expert has a part
    "expert_gate": "gate_proj.weight",
    "expert_up": "up_proj.weight",
    "expert_down": "down_proj.weight",
}


class Slot(NamedTuple):
    """Where one stored tensor belongs in the parameter tree."""

    path: tuple[str, ...]
    at: tuple[int, ...]  # indices on the leading axes of the leaf, () = the whole leaf
    transpose: bool


def tensor_slots(config: ModelConfig) -> dict[str, Slot]:
    """{name in the file: Slot}, every parameter exactly once, in the order of the usual exports."""
    slots = {EMBED_NAME: Slot(("embed",), (), False)}
    leaves = parameter_specs(config)["layers"]
    for i in range(config.num_layers):
        for leaf, (name, transpose) in _LAYER.items():
            if leaf in leaves:
                slots[f"model.layers.{i}.{name}"] = Slot(("layers", leaf), (i,), transpose)
        for e in range(config.num_experts):
            for leaf, name in _EXPERT.items():
                slots[f"model.layers.{i}.mlp.experts.{e}.{name}"] = Slot(("layers", leaf), (i, e), True)
    slots["model.norm.weight"] = Slot(("final_norm",), (), False)
    if not config.tie_embeddings:
        slots[HEAD_NAME] = Slot(("head",), (), True)
    return slots


def _refuse(where: str, what: str, allowed: str) -> InputError:
    return InputError(f"{where}: {what} is not supported. Supported: {allowed}.")


def _architecture(raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("model_type")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise InputError(f"{where}: architectures must be a list of names, got {architectures!r}.")
    named = ", ".join(str(a) for a in architectures) or "no architecture named"
    supported = ", ".join(f"{a} (model_type {k})" for k, a in SUPPORTED.items())
    # Code that a checkpoint brings along (auto_map, model_file) is never looked at.
    if (
        not isinstance(kind, str)
        or kind not in SUPPORTED
        or (architectures and SUPPORTED[kind] not in architectures)
    ):
        raise _refuse(where, f"architecture {named} (model_type {kind})", supported)
    for field, allowed in (("attention_bias", "false"), ("mlp_bias", "false")):
        if raw.get(field):
            raise _refuse(where, f"{field}={raw[field]!r}", f"{field}={allowed} (no biases)")
    layer_types = raw.get("layer_types") or []
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise _refuse(where, "sliding-window attention", "full attention in every layer")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refuse(where, f"hidden_act={raw['hidden_act']!r}", "silu")
    if raw.get("quantization_config"):
        given = raw["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else repr(given)
        raise _refuse(
            where, f"quantization_config (method {method})", "float32, bfloat16, float16 weights, or GGUF"
        )
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise _refuse(where, f"partial_rotary_factor={raw['partial_rotary_factor']!r}", "1.0")


def _experts(raw: Mapping[str, Any], size: Callable[..., int], where: str) -> dict[str, Any]:
    """The fields of `ModelConfig` that say what the experts are. Every layer must have them: one stack is scanned."""
    if raw["model_type"] != _SPARSE:
        return {}
    count = size("num_experts", raw.get("num_local_experts"))  # newer exports have the second name
    chosen = size("num_experts_per_tok")
    if chosen > count:
        raise InputError(f"{where}: num_experts_per_tok={chosen} is more than num_experts={count}.")
    if raw.get("mlp_only_layers"):
        raise _refuse(where, f"mlp_only_layers={raw['mlp_only_layers']!r}", "[] (experts in every layer)")
    if size("decoder_sparse_step", 1) != 1:
        step = raw["decoder_sparse_step"]
        raise _refuse(where, f"decoder_sparse_step={step!r}", "1 (experts in every layer)")
    normalized = raw.get("norm_topk_prob", False)
    if not isinstance(normalized, bool):
        raise InputError(f"{where}: norm_topk_prob must be true or false, got {normalized!r}.")
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_size": size("moe_intermediate_size"),
        "normalize_gates": normalized,
    }


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (newer) or `rope_scaling` and `rope_theta` (older)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"{where}: rope_scaling must be an object, got {rope!r}.")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise InputError(f"{where}: rope_theta must be a positive number, got {theta!r}.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise _refuse(where, f"rope type {kind!r}", "default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values: list[Any] = [rope.get(name) for name in names]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
        raise InputError(
            f"{where}: rope type llama3 needs positive numbers {', '.join(names)}; got {dict(rope)}."
        )
    if not values[1] < values[2]:
        raise InputError(f"{where}: low_freq_factor={values[1]} must be below high_freq_factor={values[2]}.")
    return float(theta), RopeScaling(
        factor=float(values[0]),
        low_freq_factor=float(values[1]),
        high_freq_factor=float(values[2]),
        original_max_positions=int(values[3]),
    )


def config_from_hf(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    dtype: str = "float32",
    where: str = "config.json",
) -> ModelConfig:
    """`ModelConfig` of a `config.json` and `generation_config.json` (may be empty).

    Stop ids are those of the generation config, else of the config. `dtype` is the compute dtype.

    Raises:
      InputError: an unsupported architecture or option, named; a missing or impossible dimension.
    """
    _architecture(raw, where)

    def size(name: str, default: int | None = None) -> int:
        value = raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{where}: {name} must be a positive integer, got {value!r}.")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    if raw.get("head_dim") is None and raw["model_type"] not in _DEFAULT_HEAD_DIM and hidden % heads:
        raise InputError(f"{where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}.")
    family = raw["model_type"]
    head_dim = size("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden // heads))
    if head_dim % 2:
        raise InputError(f"{where}: head_dim={head_dim} must be even (rotary positions pair its entries).")
    if heads % kv_heads:
        raise InputError(
            f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}."
        )
    eps = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise InputError(f"{where}: rms_norm_eps must be a number between 0 and 1, got {eps!r}.")
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InputError(f"{where}: tie_word_embeddings must be true or false, got {tied!r}.")
    vocab = size("vocab_size")
    for field in ("eos_token_id", "pad_token_id"):
        for value in (generation.get(field), raw.get(field)):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise InputError(f"{where}: {field} must be a token id or a list of them, got {value!r}.")
    eos = id_list(generation.get("eos_token_id")) or id_list(raw.get("eos_token_id"))
    pad = id_list(generation.get("pad_token_id")) or id_list(raw.get("pad_token_id"))
    if any(i >= vocab for i in (*eos, *pad)):
        raise InputError(
            f"{where}: eos_token_id {list(eos)} or pad_token_id {list(pad)} is not below vocab_size={vocab}."
        )
    theta, scaling = _rope(raw, where)
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(eps),
        tie_embeddings=tied,
        max_positions=size("max_position_embeddings", 2048),
        eos_ids=eos,
        pad_id=pad[0] if pad else None,
        dtype=dtype,
        attention_bias=family == "qwen2",
        qk_norm=family in ("qwen3", _SPARSE),
        **_experts(raw, size, where),
    )


def _plain_ids(ids: Sequence[int]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def config_to_hf(config: ModelConfig, *, bos_id: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`config.json`, `generation_config.json`), in the spelling that old and new readers understand."""
    # Old readers take `rope_theta` and `rope_scaling`; new ones convert these two themselves.
    scaling = config.rope_scaling
    rope = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
    theta = config.rope_theta
    raw = {
        "architectures": [SUPPORTED[config.family]],
        "model_type": config.family,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": _plain_ids(config.eos_ids),
        "pad_token_id": config.pad_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": rope,
        "rope_theta": int(theta) if math.isfinite(theta) and theta == int(theta) else theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if config.num_experts:
        raw |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": config.expert_size,
            "norm_topk_prob": config.normalize_gates,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "output_router_logits": False,
        }
    if config.family != "qwen2":  # whose q, k and v always have biases
        raw["attention_bias"] = False
    if config.family == "llama":
        raw["mlp_bias"] = False
    else:
        raw["use_sliding_window"] = False
    generation = {
        name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if raw[name] is not None
    }
    return raw, generation
