"""Shapes of published models by name, so that a plan needs neither their weights nor the network.

The fields are those of the config.json that the model is published with, as far as its shape depends on them.
"""

from __future__ import annotations

import os
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.formats.llama import config_from_hf
from jaxrl_llm.models.load import config_of

__all__ = ["KNOWN", "shape_of"]

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "eos_token_id": 151_645,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 128_001,
}
_LLAMA3_8B = _LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3_8B | {"eos_token_id": 128_009},
}


def shape_of(source: str, dtype: str) -> ModelConfig:
    """The config of a model, from its name where it lies on the hub.

    Args:
      source: as `model.source` of a config.

    Raises:
      InputError: a model of the hub that is not `KNOWN`, or what `config_of` refuses.
    """
    scheme, separator, rest = source.partition("://")
    if not separator or scheme != "hf":
        return config_of(source, dtype)
    name = rest.partition("@")[0]
    if name not in KNOWN:
        raise InputError(
            f"model.source {source}: the shape of this model is not built in.{did_you_mean(name, KNOWN)} Known: "
            f"{', '.join(KNOWN)}. For another, give a folder with its config.json (no weights are needed): "
            f"--set model.source={os.path.join('FOLDER', name.rpartition('/')[2])}"
        )
    return config_from_hf(KNOWN[name], {}, dtype=dtype, where=f"model.source {source}")
