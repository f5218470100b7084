"""GGUF files of the Llama family, turned into a Hugging Face folder that is kept in the cache.

Dequantising is done once. The folder is found again by the digest of the GGUF file, and every file in it
is checked against its own digest before it is used.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.formats.cache import build_sealed, file_digest, sealed_digests
from jaxrl_llm.models.formats.llama import EMBED_NAME, HEAD_NAME, config_from_hf, config_to_hf, tensor_slots
from jaxrl_llm.models.formats.progress import report
from jaxrl_llm.models.formats.tensors import TensorLayout, write_tensors
from jaxrl_llm.tokens.rebuild import tokenizer_from_gguf
from jaxrl_llm.tokens.tokenizer import id_list

__all__ = ["convert_gguf", "converted_gguf", "llama3_scaling_of_factors", "unpermute_rotary"]

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # raise it when the conversion changes, so that old cache folders are not used

_GLOBAL = {
    "token_embd.weight": EMBED_NAME,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD_NAME,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FACTORS = "rope_freqs.weight"


def unpermute_rotary(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order that GGUF gives the q and k matrices of Llama models.

    `rows` is [heads * head_dim, inputs]. A GGUF head holds its rows as [0, h, 1, h + 1, …] with
    h = head_dim / 2 (rotary pairs side by side); Hugging Face and this package hold [0, 1, …, h, h + 1, …].
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def llama3_scaling_of_factors(factors: np.ndarray, theta: float, original: int | None) -> RopeScaling:
    """The Llama 3 rope scaling whose divisors of the rotary frequencies are `factors`, f32[head_dim / 2].

    GGUF stores the outcome and not the four numbers. Divisors are 1 for short waves, `factor` for long
    ones, and between them a line in 1 / wavelength that only depends on low : high : original, so
    low_freq_factor is taken as 1 where the usual values do not fit.

    Raises:
      InputError: no such scaling gives these divisors.
    """
    count = factors.size
    wavelength = 2 * np.pi * theta ** (np.arange(count) / count)
    factor = float(factors.max())
    if factor <= 1.0:
        raise InputError(
            f"{_ROPE_FACTORS}: all divisors are at most 1; remove the tensor or use another export."
        )

    def divisors(low: float, high: float, positions: float) -> np.ndarray:
        smooth = np.clip((positions / wavelength - low) / (high - low), 0.0, 1.0)
        return 1.0 / ((1.0 - smooth) / factor + smooth)

    candidates = [(1.0, 4.0, float(n)) for n in dict.fromkeys((original or 8192, 8192))]
    smooth = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = np.flatnonzero((smooth > 1e-4) & (smooth < 1.0 - 1e-4))
    if between.size >= 2:
        slope, offset = np.polyfit(1.0 / wavelength[between], smooth[between], 1)
        if offset < 0 < slope:  # smooth = (positions / wavelength - low) / (high - low), low = 1
            high = 1.0 - 1.0 / offset
            candidates.append((1.0, float(high), float(round(slope * (high - 1.0)))))
    for low, high, positions in candidates:
        if high > low and positions >= 1 and np.allclose(divisors(low, high, positions), factors, rtol=1e-3):
            return RopeScaling(
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_positions=int(positions),
            )
    raise InputError(
        f"{_ROPE_FACTORS}: these rotary divisors are not of the llama3 kind. Supported rope types: default, llama3."
    )


class _Metadata:
    """Typed access to the key-value part of a GGUF file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]):
        self._path = path
        self._values = {name: field.contents() for name, field in fields.items()}

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{self._path}: {name} must be one integer, got {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self._path}: {name} must be a number, got {value!r}.")
        # Stored as f32; the shortest decimal of that f32 is what the author wrote (1e-05, 100000.0).
        return float(str(np.float32(value)))


def _open(path: Path):
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs the package gguf: pip install 'jaxrl-llm[gguf]' (or pip install gguf)."
        ) from error
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise InputError(f"{path}: not a GGUF file (it starts with {magic!r}).")
    try:
        reader = gguf.GGUFReader(str(path))
        metadata = _Metadata(path, reader.fields)
    except (
        Exception
    ) as error:  # the reader has no error type of its own: anything can come out of a damaged file
        raise InputError(
            f"{path}: the GGUF file is truncated or damaged ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    return reader, metadata


def _config(metadata: _Metadata, tensors: Mapping[str, Any], path: Path) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise InputError(
            f"{path}: architecture {architecture!r} is not supported in GGUF files. Supported: llama."
        )
    if metadata.get("llama.expert_count", 0):
        raise InputError(
            f"{path}: a mixture of experts (llama.expert_count) is not supported. Supported: dense llama."
        )
    if "token_embd.weight" not in tensors:
        raise InputError(f"{path}: tensor token_embd.weight is missing.")
    heads = metadata.integer("llama.attention.head_count")
    hidden = metadata.integer("llama.embedding_length")
    head_dim = metadata.integer("llama.attention.key_length", hidden // max(heads, 1))
    rotary = metadata.integer("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise InputError(
            f"{path}: rotary positions on {rotary} of {head_dim} entries of a head are not supported."
        )
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "llama3"):
        raise InputError(f"{path}: rope scaling {kind!r} is not supported. Supported: none, llama3.")
    theta = metadata.number("llama.rope.freq_base", 10_000.0)
    scaling = None
    if _ROPE_FACTORS in tensors:
        factors = np.asarray(tensors[_ROPE_FACTORS].data, np.float32).reshape(-1)
        if factors.size != head_dim // 2:
            raise InputError(f"{path}: {_ROPE_FACTORS} has {factors.size} entries, expected {head_dim // 2}.")
        original = metadata.get("llama.rope.scaling.original_context_length")
        scaling = llama3_scaling_of_factors(factors, theta, original)
    eos = id_list([metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")])
    raw = {
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "max_position_embeddings": metadata.integer("llama.context_length", 2048),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(eos),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config_from_hf(raw, {}, where=str(path))


def _hf_name(name: str) -> str | None:
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER_NAME.fullmatch(name)
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight" if match and match[2] in _LAYER else None


def convert_gguf(path: Path, folder: Path) -> dict[str, str]:
    """Writes a Llama-family GGUF file as a Hugging Face folder (f32); returns the digest of the weights.

    Raises:
      InputError: damaged, of another architecture or quantisation, or with tensors that do not fit.
    """
    reader, metadata = _open(path)
    import gguf

    tensors = {t.name: t for t in reader.tensors}
    config = _config(metadata, tensors, path)
    slots = tensor_slots(config)
    sources = {_hf_name(name): name for name in tensors if name != _ROPE_FACTORS}
    missing = [n for n in slots if n not in sources]
    extra = sorted(n for n in tensors if n != _ROPE_FACTORS and _hf_name(n) not in slots)
    if missing or extra:
        raise InputError(
            f"{path}: the tensors do not fit the metadata. {len(missing)} missing: {', '.join(missing[:8]) or 'none'}; "
            f"{len(extra)} left over: {', '.join(extra[:8]) or 'none'}."
        )
    rotary_heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def shape(name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(tensors[sources[name]].shape))

    number = {name: i for i, name in enumerate(slots)}

    def values(name: str) -> np.ndarray:
        report("converting (tensors)", number[name], len(slots))
        tensor = tensors[sources[name]]
        try:
            dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(
                f"{path}: quantisation {tensor.tensor_type.name} of {tensor.name} cannot be read."
            ) from error
        dense = np.asarray(dense, np.float32).reshape(shape(name))
        heads = rotary_heads.get(slots[name].path[-1])
        if heads is None:
            return dense
        if dense.shape[0] != heads * config.head_dim:
            raise InputError(
                f"{path}: {tensor.name} has {dense.shape[0]} rows, expected {heads} heads of {config.head_dim}."
            )
        return unpermute_rotary(dense, heads)

    tokenizer = tokenizer_from_gguf(metadata.get, str(path))
    layouts = [TensorLayout(name, np.dtype(np.float32), shape(name)) for name in slots]
    digest = write_tensors(folder / "model.safetensors", layouts, values)
    raw, generation = config_to_hf(config, bos_id=tokenizer.bos_id if tokenizer else None)
    (folder / "config.json").write_text(json.dumps(raw, indent=1), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), "utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
    return {"model.safetensors": digest}


def converted_gguf(path: Path, root: Path) -> tuple[Path, Mapping[str, str]]:
    """The folder below `root` that a GGUF file is converted into, with its digests; a damaged one is built again."""
    folder = root / "gguf" / f"{file_digest(path)}-{_FORMAT}"
    digests = sealed_digests(folder)
    if digests is None:
        if folder.exists():
            _LOG.warning("%s is damaged or incomplete; converting %s again.", folder, path)
        digests = build_sealed(folder, lambda made: convert_gguf(path, made))
        report("loading")
    return folder, digests
