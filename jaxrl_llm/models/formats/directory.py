"""Reads a Hugging Face folder: config, safetensors, tokenizer files."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.formats.cache import combined_digest, file_digest
from jaxrl_llm.models.formats.llama import (
    DERIVED_SUFFIXES,
    EMBED_NAME,
    HEAD_NAME,
    Slot,
    config_from_hf,
    tensor_slots,
)
from jaxrl_llm.models.formats.tensors import StoredTensor, read_tensors
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.parallel.host import place
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["Loaded", "load_directory", "read_config", "read_json"]

_LOG = logging.getLogger(__name__)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.npy", "*.npz", "*.msgpack", "*.h5")
_SHOWN = 8  # names listed in an error


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a folder holds."""

    config: ModelConfig
    params: Any  # the tree of `parameter_specs`, f32
    tokenizer: Tokenizer | None
    digest: str  # of the weight files


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object; {} when an optional file is absent.

    Raises:
      InputError: the file is missing, is not JSON, or holds something else than an object.
    """
    if not path.is_file():
        if os.path.lexists(path):
            raise InputError(
                f"{path} is not a file but a folder, or a link that leads nowhere. Fetch the model again."
            )
        if required:
            raise InputError(
                f"{path.parent} has no {path.name}: a model folder needs it. {_content(path.parent)}"
            )
        return {}
    try:
        value = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(value).__name__}.")
    return value


def _content(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return f"It holds: {', '.join(names[:_SHOWN]) or 'nothing'}{' …' if len(names) > _SHOWN else ''}."


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, the index applied."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
            raise InputError(f"{index}: weight_map must map tensor names to file names.")
        names = sorted(set(mapping.values()))
        outside = [n for n in names if Path(n).name != n]
        if outside:
            raise InputError(f"{index}: {outside[0]!r} is not a plain file name.")
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise InputError(f"{index} names {', '.join(missing[:_SHOWN])}, which {folder} does not hold.")
        return [folder / n for n in names]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise InputError(
            f"{folder} holds {len(found)} safetensors files but neither model.safetensors nor "
            "model.safetensors.index.json, so which belong together is unknown."
        )
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder}: weights only in {', '.join(pickles[:_SHOWN])}. Loading such a file can run code, so "
            "only safetensors/GGUF are read: convert it with a tool that you trust, or fetch a safetensors release."
        )
    raise InputError(f"{folder} holds no weights (only safetensors/GGUF are read). {_content(folder)}")


def _stored(folder: Path, files: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_tensors(file).items():
            if name in tensors:
                raise InputError(
                    f"{folder}: tensor {name} is in {tensors[name].path.name} and in {file.name}."
                )
            tensors[name] = tensor
    index = folder / "model.safetensors.index.json"
    if index.is_file() and files != [folder / "model.safetensors"]:
        mapping = read_json(index)["weight_map"]
        lost = sorted(n for n, f in mapping.items() if n not in tensors or tensors[n].path.name != f)
        if lost:
            raise InputError(f"{index} promises {_listed(lost)}, not found where it says.")
    return tensors


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_names(where: str, tensors: Mapping[str, StoredTensor], slots: Mapping[str, Slot]) -> None:
    missing = [n for n in slots if n not in tensors]
    extra = sorted(n for n in tensors if n not in slots and not n.endswith(DERIVED_SUFFIXES))
    if HEAD_NAME in missing and EMBED_NAME in tensors:
        hint = (
            " The config says tie_word_embeddings=false, so the file must bring an output head; "
            "if the model shares it with the embedding, the config must say true."
        )
    else:
        hint = ""
    if missing or extra:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        parts += [f"left over: {_listed(extra)}"] if extra else []
        raise InputError(
            f"{where}: the tensors do not fit the config. {len(missing)} missing, {len(extra)} left over; "
            f"{'; '.join(parts)}.{hint}"
        )


def _check_tied_head(where: str, tensors: dict[str, StoredTensor]) -> None:
    """A tied model may carry a copy of its head; it is dropped when equal and refused when not (N25)."""
    head = tensors.pop(HEAD_NAME, None)
    embed = tensors.get(EMBED_NAME)
    if head is None or embed is None:
        return
    if head.shape != embed.shape or not np.array_equal(head.read(), embed.read()):
        raise InputError(
            f"{where}: tie_word_embeddings is true, but {HEAD_NAME} differs from {EMBED_NAME}. "
            "Set tie_word_embeddings to false to use the separate head, or remove that tensor."
        )
    _LOG.info("%s: %s equals the tied embedding and is not loaded twice.", where, HEAD_NAME)


def _fill(
    where: str,
    tensors: Mapping[str, StoredTensor],
    slots: Mapping[str, Slot],
    config: ModelConfig,
    shardings: Any,
) -> dict[str, Any]:
    """The parameter tree where `shardings` say, one leaf in host memory at a time and none whole on one device."""
    by_leaf: dict[tuple[str, ...], list[tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        by_leaf.setdefault(slot.path, []).append((name, slot))

    def leaf(path, spec: ParamSpec, sharding: jax.sharding.Sharding | None):
        key = tuple(entry.key for entry in path)
        for name, slot in by_leaf[key]:  # before there is memory for what a damaged config asks for
            shape = spec.shape[len(slot.at) :]
            shape = shape[::-1] if slot.transpose else shape
            if tensors[name].shape != shape:
                raise InputError(
                    f"{where}: tensor {name} has shape {list(tensors[name].shape)}, but the config asks for {list(shape)}."
                )
        values = np.empty(spec.shape, np.float32)
        for name, slot in by_leaf[key]:
            target, stored = values[slot.at], tensors[name]
            target[...] = stored.read().T if slot.transpose else stored.read()
        if not np.isfinite(values.sum()):
            bad = [name for name, _ in by_leaf[key] if not np.isfinite(tensors[name].read()).all()]
            raise InputError(
                f"{where}: NaN or infinite numbers in {_listed(bad) or key}. The file is damaged: fetch it again."
            )
        if sharding is not None and not sharding.is_fully_addressable:
            return place(values, sharding)
        # A copy: the host buffer must not be shared with an array that a learner may donate.
        return jax.device_put(values, sharding, may_alias=False)

    specs = parameter_specs(config)
    if shardings is None:
        shardings = jax.tree.map(lambda _: None, specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return jax.tree_util.tree_map_with_path(
        leaf, specs, shardings, is_leaf=lambda x: isinstance(x, ParamSpec)
    )


def read_config(folder: Path, dtype: str) -> ModelConfig:
    """The config of a Hugging Face model folder, without its weights and its tokenizer.

    Raises:
      InputError: no config.json, or one that is not supported.
    """
    raw = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", required=False)
    return config_from_hf(raw, generation, dtype=dtype, where=str(folder / "config.json"))


def load_directory(
    folder: Path,
    dtype: str = "float32",
    digests: Mapping[str, str] | None = None,
    shardings: Callable[[ModelConfig], Any] | None = None,
) -> Loaded:
    """Loads a Hugging Face model folder.

    Args:
      dtype: compute dtype put into the config; parameters are f32 whatever the files hold.
      digests: SHA-256 of the files by name, where already known.
      shardings: where the parameters of a config go, a tree like them; None: all to the default device.

    Raises:
      InputError: anything missing, left over, damaged, unsupported or inconsistent, by name.
    """
    raw = read_json(folder / "config.json")
    for field in ("auto_map", "model_file"):
        if field in raw:
            _LOG.info("%s: %s names code; it is not imported, the built-in model is used.", folder, field)
    config = read_config(folder, dtype)
    placed = None if shardings is None else shardings(config)  # before anything large is read
    tokenizer = Tokenizer.from_directory(folder, eos_ids=config.eos_ids, pad_id=config.pad_id)
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise InputError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size} embeddings. "
                "They do not belong together: use the tokenizer files of this model."
            )
        if not config.eos_ids and tokenizer.eos_ids:
            config = dataclasses.replace(config, eos_ids=tokenizer.eos_ids)
        if config.pad_id is None and tokenizer.pad_id is not None:
            config = dataclasses.replace(config, pad_id=tokenizer.pad_id)
    files = _weight_files(folder)
    with concurrent.futures.ThreadPoolExecutor(
        1
    ) as pool:  # hashing runs beside reading: both release the lock
        known = digests or {}
        hashes = {f.name: None if f.name in known else pool.submit(file_digest, f) for f in files}
        tensors = _stored(folder, files)
        if config.tie_embeddings:
            _check_tied_head(str(folder), tensors)
        named = config.num_layers * max(1, config.num_experts)
        if named > len(tensors):  # before a name is made for each tensor of each layer
            experts = f" and num_experts={config.num_experts}" if config.num_experts else ""
            raise InputError(
                f"{folder}: the config says num_hidden_layers={config.num_layers}{experts}, and the files hold {len(tensors)} "
                "tensors altogether. They do not belong together, or one of them is damaged."
            )
        slots = tensor_slots(config)
        _check_names(str(folder), tensors, slots)
        params = _fill(str(folder), tensors, slots, config, placed)
        digest = combined_digest({n: known[n] if h is None else h.result() for n, h in hashes.items()})
    return Loaded(config, params, tokenizer, digest)
