"""What an engine refuses before anything is computed: arguments that cannot be, weights of another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.ops.quantize import Precision
from jaxrl_llm.sampler.base import is_integer

__all__ = ["check_options", "check_params"]


def check_options(
    config: ModelConfig,
    *,
    slots: int,
    pages: int | None,
    page_size: int,
    max_context: int | None,
    steps_per_dispatch: int,
    prefill_rows: int,
    prefill_chunk: int,
    prefill_calls: int | None = None,
    preemption: str,
    weights: str,
    kv: str,
) -> None:
    """Raises InputError for arguments of an engine that cannot be."""
    if preemption not in ("move", "recompute"):
        raise InputError(f'sampler: preemption must be "move" or "recompute", got {preemption!r}.')
    for name, choice in (("weights", weights), ("kv", kv)):
        if choice not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise InputError(f"sampler: {name} must be one of {allowed}, got {choice!r}.")
    for name, value, least in (
        ("slots", slots, 2),
        ("page_size", page_size, 1),
        ("steps_per_dispatch", steps_per_dispatch, 1),
        ("prefill_rows", prefill_rows, 1),
        ("prefill_chunk", prefill_chunk, 1),
        ("prefill_calls", 1 if prefill_calls is None else prefill_calls, 1),
        ("pages", 2 if pages is None else pages, 2),
    ):
        if not is_integer(value) or not least <= value < 2**31:
            raise InputError(f"sampler: {name} must be at least {least} (an integer), got {value!r}.")
    if max_context is not None and not (is_integer(max_context) and 2 <= max_context <= config.max_positions):
        raise InputError(
            f"sampler: max_context must be in [2, {config.max_positions}] (the model's positions), "
            f"got {max_context!r}."
        )


def check_params(params: Any, config: ModelConfig) -> None:
    """Raises InputError unless a tree has every parameter of the config, in its shape; it may have more."""
    wrong = []
    specs = jax.tree_util.tree_flatten_with_path(
        parameter_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec)
    )[0]
    for path, spec in specs:
        leaf = params
        for entry in path:
            leaf = leaf[entry.key] if isinstance(leaf, Mapping) and entry.key in leaf else None
        found = None if leaf is None else tuple(np.shape(leaf))
        if found != spec.shape:
            wrong.append(f"{jax.tree_util.keystr(path)} is {found or 'missing'}, expected {spec.shape}")
    if wrong:
        raise InputError(
            f"sampler: params do not fit the config of the sampler: {'; '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. Pass the params of that model."
        )
