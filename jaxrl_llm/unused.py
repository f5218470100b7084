"""Settings that a run leaves unread: they were given, and its objective or its command has no use for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl_llm import recipes
from jaxrl_llm.config import Config, as_data, flatten
from jaxrl_llm.objectives import build_objective, example_arguments, is_trust_region
from jaxrl_llm.transforms import LossTransform, needs

__all__ = ["reads_values", "unused_settings"]

_MOST_NAMES = 6


def reads_values(objective: LossTransform) -> bool:
    """Whether a critic is trained beside the policy."""
    return any(
        need.record == "batch" and need.field in ("value", "bootstrap_value") for need in needs(objective)
    )


def unused_settings(config: Config, objective: LossTransform, command: str = "train") -> list[str]:
    """One sentence for each section whose settings differ from their defaults and are not read.

    Settings that say nothing here are no error: one file serves several objectives, by `--set objective=…`, and several
    commands. A setting that `jaxrl eval` or `jaxrl sample` reads from the file of the run is not named.

    Args:
      command: "train" or "sft".
    """
    notes = []
    trust_region, critic = is_trust_region(config.objective), reads_values(objective)
    if not critic and (given := _given(config, "critic")):
        readers = _recipes(lambda name: reads_values(_built(name)))
        notes.append(f"{given}: no effect, the objective has no critic. Read with {readers}.")
    if not trust_region and (given := _given(config, "trust_region")):
        notes.append(
            f"{given}: no effect, the objective is trained by an optimiser. Read with {_recipes(is_trust_region)}."
        )
    # A critic beside it would have an optimiser with the rest of the section.
    steps = ("learning_rate", "warmup_updates") if critic else ()
    if trust_region and (given := _given(config, "optimizer", steps)):
        notes.append(
            f"{given}: no effect, trpo has no optimiser (see trust_region.*). Read with every other objective."
        )
    offloaded = config.learner.offload
    if "optimizer" in offloaded and trust_region:
        notes.append("learner.offload: optimizer has no effect, trpo has no optimiser.")
    if "reference" in offloaded and not any(need.field == "logprob_reference" for need in needs(objective)):
        notes.append("learner.offload: reference has no effect, the objective compares with no reference.")
    if command == "train" and (given := _given(config, "data")):
        notes.append(
            f"{given}: no effect, `jaxrl train` samples its data from task.name. Read by `jaxrl sft`."
        )
    return notes


def _given(config: Config, section: str, only: tuple[str, ...] = ()) -> str:
    """The settings of a section that are not at their defaults, as text; "" for none."""
    default = flatten(as_data(Config()))
    changed = [
        key
        for key, value in flatten(as_data(config)).items()
        if key.startswith(f"{section}.") and value != default[key]
    ]
    return ", ".join(key for key in changed if not only or key.rsplit(".", 1)[-1] in only)


def _recipes(reads: Callable[[str], bool]) -> str:
    names = sorted(name for name in recipes.RECIPES if reads(name))
    return ", ".join([*names[:_MOST_NAMES], *(["…"] if len(names) > _MOST_NAMES else [])])


def _built(name: str) -> LossTransform:
    spec: dict[str, Any] = {"recipe": name, **example_arguments(recipes.RECIPES[name])}
    return build_objective(spec)
