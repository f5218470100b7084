"""Writes a model as a Hugging Face folder, which this package and transformers read back bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.formats.llama import Slot, config_to_hf, tensor_slots
from jaxrl_llm.models.formats.tensors import TensorLayout, write_tensors
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["hf_tensors", "save_hf"]


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _check_tree(params: Any, config: ModelConfig) -> None:
    def shapes(tree, is_leaf=None):
        pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in pairs}

    found, expected = shapes(params), shapes(parameter_specs(config), lambda x: isinstance(x, ParamSpec))
    if found != expected:
        wrong = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        listed = "; ".join(f"{n}: found {found.get(n)}, expected {expected.get(n)}" for n in wrong[:8])
        raise ValueError(f"save_hf: the parameters do not fit the config. {listed}.")


def _check_router_bias(params: Any, config: ModelConfig) -> None:
    largest = (
        float(np.max(np.abs(jax.device_get(params["layers"]["router_bias"])))) if config.router_bias else 0.0
    )
    if largest:
        raise InputError(
            f"the routers of this model choose their experts with biases (balance_experts_by_bias; up to {largest:.3g}, added "
            f"to probabilities), and the Hugging Face format of {config.family} has no place for them: any tool that loads the "
            "folder would send tokens through other experts and compute other log-probs than this policy. Sample from the run "
            "itself (`jaxrl sample` or `jaxrl serve` with --snapshot), or write the model without the biases, as another "
            "policy, and measure it anew: `jaxrl convert --drop-router-bias`."
        )


def _value(params: Any, slot: Slot) -> np.ndarray:
    leaf = _leaf(params, slot.path)
    value = np.asarray(jax.device_get(leaf[slot.at] if slot.at else leaf))
    return value.T if slot.transpose else value


def hf_tensors(params: Any, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, values) of every stored tensor, in Hugging Face names and orientation."""
    for name, slot in tensor_slots(config).items():
        yield name, _value(params, slot)


def save_hf(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer | None,
    folder: str | os.PathLike,
    *,
    drop_router_bias: bool = False,
) -> Path:
    """Writes config, weights (in their own dtype) and tokenizer files; returns the folder.

    A tied model is written without an output head and with tie_word_embeddings true, an untied one with
    both and false. The folder is created; files of the same names are replaced.

    Args:
      drop_router_bias: leave out what the format has no place for: biases of routers that are not 0.

    Raises:
      ValueError: the tree does not have the shapes of the config.
      InputError: there are such biases.
    """
    _check_tree(params, config)
    if not drop_router_bias:
        _check_router_bias(params, config)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    slots = tensor_slots(config)

    def layout(name: str, slot: Slot) -> TensorLayout:
        leaf = _leaf(params, slot.path)
        shape = tuple(leaf.shape[len(slot.at) :])
        return TensorLayout(name, np.dtype(leaf.dtype), shape[::-1] if slot.transpose else shape)

    layouts = [layout(name, slot) for name, slot in slots.items()]
    write_tensors(target / "model.safetensors", layouts, lambda name: _value(params, slots[name]))
    raw, generation = config_to_hf(config, bos_id=None if tokenizer is None else tokenizer.bos_id)
    raw["torch_dtype"] = str(layouts[0].dtype)
    _write(target / "config.json", raw)
    _write(target / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save(target)
    return target


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), "utf-8")
