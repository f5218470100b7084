"""jaxrl_llm: RL post-training of language models in JAX.

    import jaxrl_llm as jrl
    objective = jrl.chain(jrl.group_advantage(), jrl.normalize_by_sequence(), jrl.token_ratio(),
                          jrl.clip_surrogate())

Names are loaded on first use, so that importing the package is cheap and pulls no optional dependency.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "jaxrl_llm.types": (
        "LearnerState",
        "LossOutput",
        "LossState",
        "Mean",
        "PolicyOutput",
        "PolicySnapshot",
        "Prompt",
        "StopReason",
        "TokenBatch",
        "Trajectory",
    ),
    "jaxrl_llm.errors": ("InputError",),
    "jaxrl_llm.models.config": ("ModelConfig",),
    "jaxrl_llm.models.load": ("Model", "load_model"),
    "jaxrl_llm.ops.logprobs": ("policy_output", "token_logprobs"),
    "jaxrl_llm.sampler": ("Completion", "Engine", "Sampler", "SamplingParams"),
    "jaxrl_llm.config": ("Config", "load_config"),
    "jaxrl_llm.objectives": ("build_objective",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}
_MODULES = ("recipes", "testing", "transforms", "losses")

__all__ = sorted([*_HOME, *_MODULES])  # the stages and recipes are added by __getattr__ and __dir__


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"jaxrl_llm.{name}")
    if not name.startswith("_"):
        # Every public stage and every recipe is a name of the package.
        for module in ("jaxrl_llm.transforms", "jaxrl_llm.recipes"):
            found = importlib.import_module(module)
            if name in found.__all__:
                return getattr(found, name)
    raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    stages = importlib.import_module("jaxrl_llm.transforms").__all__
    recipes = importlib.import_module("jaxrl_llm.recipes").__all__
    return sorted({*__all__, *stages, *recipes})
