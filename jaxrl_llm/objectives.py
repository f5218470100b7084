"""Objectives as configured: a recipe with arguments, a list of stages, or an import path."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import recipes, transforms
from jaxrl_llm.config import setting_named
from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.learner.score import TeacherNeeds, teacher_needs
from jaxrl_llm.transforms import LossTransform
from jaxrl_llm.types import LossOutput, PolicyOutput, TokenBatch

# By the train loop: from the learner's passes, and from the rollout.
FILLED = frozenset(
    """logprob_proximal logprob_reference value bootstrap_value
    rewards baseline_reward agent topk_logprob_behavior""".split()
)

# From a teacher, where the config has one.
TAUGHT = frozenset({"batch.logprob_teacher", "batch.topk_logprob_teacher", "loss.divergence"})

_EXAMPLES = {"limit": 256, "agents": 2}  # most required arguments are coefficients

__all__ = [
    "FILLED",
    "TAUGHT",
    "argument_help",
    "build_objective",
    "check_arguments",
    "check_group_size",
    "check_sampled_precision",
    "check_teacher",
    "check_trainable",
    "described",
    "example_arguments",
    "is_trust_region",
    "required_arguments",
    "uses_groups",
]


def build_objective(spec: str | Mapping[str, Any] | list[Any]) -> LossTransform:
    """The chain that a config names.

    Args:
      spec: `"grpo"`; `{"recipe": "grpo", "clip_high": 0.3, "stages": {"clip_surrogate": {"low": 0.1}}}`;
        `[{"group_advantage": {"scale": "none"}}, "normalize_by_token", …]`; or `"package.module:objective"`,
        which names a LossTransform or a function that returns one.

    Raises:
      InputError: an unknown recipe, stage or argument (with the known ones), or a chain that does not fit.
    """
    if isinstance(spec, str):
        objective = _by_import(spec, {}) if ":" in spec else _recipe({"recipe": spec})
    elif isinstance(spec, Mapping):
        objective = _recipe(dict(spec))
    else:
        objective = _chain(spec)
    try:
        transforms.check_complete(objective)
    except ValueError as error:
        raise InputError(f"objective: {error}") from None
    return objective


def uses_groups(objective: LossTransform) -> bool:
    """True when an advantage compares the samples of one prompt, so that one sample gives no signal."""
    return any("batch.group" in info.reads and "batch.advantage" in info.writes for info in objective.info)


def is_trust_region(spec: Any) -> bool:
    """True for a config's objective that is trained by the trust-region step: the recipe trpo."""
    return (spec.get("recipe") if isinstance(spec, Mapping) else spec) == "trpo"


def check_trainable(objective: LossTransform, parts: Iterable[str] = ("reward",)) -> None:
    """Refuses an objective that reads what a rollout and the learner do not give (a given advantage, say).

    The objective is traced over a batch with the fields that the loop fills; nothing is computed. Whether there is the
    teacher that it reads is for `check_teacher`.

    Args:
      parts: names of the rewards that the task gives (`rollout.checks.reward_parts`).

    Raises:
      InputError: names the stage and the field, or the part of the reward.
    """
    _check_parts(objective, frozenset(parts))
    needed = transforms.needed_fields(objective)
    filled = needed & (FILLED | {"logprob_teacher"})
    # By the sampler, by the learner, by the teacher.
    listed = {"topk_logprob_behavior", "topk_logprob_proximal", "topk_logprob_teacher"} & needed

    def dry_run() -> LossOutput:
        tokens = jnp.zeros((2, 2), jnp.int32)
        zeros = jnp.zeros((2, 2), jnp.float32)
        batch = TokenBatch.from_rows(
            tokens, tokens == 0, reward=zeros[:, 0], logprob_behavior=zeros, version=0
        )
        given: dict[str, Any] = dict.fromkeys(filled, zeros)
        given |= {"agent": tokens} if "agent" in filled else {}
        given |= {"rewards": dict.fromkeys(parts, zeros)} if "rewards" in filled else {}
        batch = batch.replace(**given)
        output = PolicyOutput(logprob=zeros, entropy=zeros, divergence=zeros)
        if listed:
            lists = zeros[..., None]
            batch = batch.replace(topk_ids=lists.astype(jnp.int32), **dict.fromkeys(listed, lists))
            output = output.replace(topk_logprob=lists)
        if needed & {"router_probs", "router_choice"}:
            routers = zeros[..., None, None]
            output = output.replace(router_probs=routers, router_choice=routers)
        state = objective.init()
        batch, state = objective.prepare(batch, state)
        return transforms.evaluate(objective, output, batch, state)

    try:
        jax.eval_shape(dry_run)
    except ValueError as error:
        raise InputError(f"objective: {error} The training loop does not provide it.") from None
    except Exception as error:  # a stage of the user's own, of which anything can be wrong
        raise InputError(
            f"objective: it failed on a small batch, traced as jax.jit does: {described(error)}. A field that is None was not "
            'asked for: name it in reads=("batch.…", …) of the stage.'
        ) from None


def described(error: BaseException) -> str:
    """What an error says and where it was raised, in one line."""
    ours, where = os.path.dirname(__file__), ""
    for frame in traceback.extract_tb(error.__traceback__):
        # The last line of the user's own code.
        if not any(part in frame.filename for part in ("site-packages", "importlib", ours)):
            where = f" ({frame.filename}, line {frame.lineno})"
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{f': {first}' if first else ''}{where}"


def check_group_size(objective: LossTransform, size: int) -> None:
    """Refuses groups that are too small for their advantages ever to differ from 0.

    Raises:
      InputError: one sample a group with an objective that compares within groups, or pass@k with k of at least `size`.
    """
    if size < 2 and uses_groups(objective):
        raise InputError(
            "rollout.group_size: with 1 sample per prompt the advantage relative to the group is always 0; "
            "use at least 2, or an objective without group statistics."
        )
    for info in objective.info:
        given = info.arguments
        if info.stage == "pass_at_k_advantage" and given["form"] == "analytic" and given["k"] >= size:
            raise InputError(
                f"rollout.group_size: {size} samples per prompt hold only one set of k={given['k']}, so that every advantage of "
                "pass@k is 0. Use more samples, or a smaller k (objective.k)."
            )


def check_sampled_precision(objective: LossTransform, weights: str, kv: str) -> None:
    """Refuses a sampler in 8 bits for an objective that does not weigh by learner / sampler.

    A ratio anchored at "behavior" holds that quotient, but clips it as if the policy had moved by it.

    Raises:
      InputError: names the settings and what to add.
    """
    reduced = [
        f"sampler.{name}: {value}" for name, value in (("weights", weights), ("kv", kv)) if value != "compute"
    ]
    if not reduced or any(
        {"batch.logprob_proximal", "batch.logprob_behavior"} <= {transforms.Need(r).key for r in info.reads}
        and "batch.weight" in info.writes
        for info in objective.info
    ):
        return
    raise InputError(
        f"{' and '.join(reduced)} samples from a rounded policy, which is not the learner's, and the objective has no "
        "correction for that. Set objective.anchor=proximal and objective.importance_cap=2, where the recipe takes them, or "
        "put truncate_importance(cap=2) or mask_importance into the chain, with a ratio anchored at proximal; "
        "decoupled_ppo and icepop have one. Or leave the sampler at compute."
    )


def _check_parts(objective: LossTransform, parts: frozenset[str]) -> None:
    for info in objective.info:
        weights = info.arguments.get("weights") if info.stage == "multi_reward_advantage" else None
        unknown = sorted(set(weights or ()) - parts)
        if unknown:
            near = did_you_mean(unknown[0], parts)
            raise InputError(
                f"objective: weights names {', '.join(map(repr, unknown))}, which the reward of the task does not have.{near} "
                f"Its parts: {', '.join(sorted(parts))}. Set weights to {{part: number}} with some of them."
            )


def check_teacher(objective: LossTransform, given: bool) -> TeacherNeeds:
    """What an objective reads of its teacher.

    Args:
      given: whether there is a teacher.

    Raises:
      InputError: it reads one and none is given, none and one is given, or two things that exclude each other.
    """
    try:
        wanted = teacher_needs(objective)
    except ValueError as error:
        raise InputError(f"objective: {error}") from None
    if wanted and not given:
        reads = {info.name: [transforms.Need(r).key for r in info.reads] for info in objective.info}
        stage, field = next((name, key) for name, keys in reads.items() for key in keys if key in TAUGHT)
        raise InputError(
            f"objective: {stage} reads {field}, and the config has no teacher. Set teacher.source to a model with the "
            "same vocabulary, or teacher.snapshot to a run folder."
        )
    if given and not wanted:
        raise InputError(
            "teacher: no stage of the objective reads a teacher. Leave it out, or use opd, gkd, or a chain with "
            "distill_advantage, imitate or penalize_kl(anchor=teacher)."
        )
    return wanted


def required_arguments(factory: Callable[..., Any]) -> list[str]:
    """The arguments of a recipe or stage that have no default."""
    return [
        name
        for name, p in inspect.signature(factory).parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def argument_help(factory: Callable[..., Any], name: str) -> str:
    """What an argument means: the sentence of the docstring that begins with "NAME: ", or ""."""
    text = inspect.getdoc(factory) or ""
    found = re.search(rf"^{re.escape(name)}: (.+?)(?:\.(?=\s|$)|\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def example_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """A value for each required argument, to show how it is spelled."""
    return {name: _EXAMPLES.get(name, 0.1) for name in required_arguments(factory)}


def check_arguments(where: str, call: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuses arguments that a function does not have.

    Raises:
      InputError: begins with `where`, and lists those that it has.
    """
    try:
        known = list(inspect.signature(call).parameters)
    except ValueError:
        raise InputError(f"{where} is no function of Python, whose arguments could be read.") from None
    for key in names:
        if key not in known:
            raise InputError(
                f"{where} has no argument {key!r}.{did_you_mean(str(key), known) or setting_named(str(key))} It takes: "
                f"{', '.join(known) or 'none'}."
            )


def _checked(where: str, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    check_arguments(where, call, kwargs)
    missing = [name for name in required_arguments(call) if name not in kwargs]
    if missing:
        name = missing[0]
        means, value = argument_help(call, name), example_arguments(call)[name]
        # A recipe is an argument of `objective`; a stage of a list has its arguments below its name.
        spelled = (
            f"{{{call.__name__}: {{{name}: {value}}}}}"
            if getattr(call, "__name__", "") in transforms.STAGES and "stage" in where
            else f"--set objective.{name}={value}"
        )
        raise InputError(
            f"{where} needs {name}{f' ({means})' if means else ''}. Set it, for example: {spelled}"
        )
    try:
        return call(**kwargs)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
    except Exception as error:  # of a function of the user's own
        raise InputError(f"{where} failed: {described(error)}.") from None


def _recipe(spec: dict[str, Any]) -> LossTransform:
    stages = spec.pop("stages", {})
    name = spec.pop("recipe", None)
    if not isinstance(name, str):
        raise InputError(f"objective: expected a recipe name under `recipe`, got {name!r}.")
    if ":" in name:
        objective = _by_import(name, spec)
    elif name in recipes.RECIPES:
        objective = _checked(f"objective: recipe {name}", recipes.RECIPES[name], spec)
    else:
        near = did_you_mean(name, recipes.RECIPES)
        raise InputError(
            f"objective: no recipe {name!r}.{near} Recipes: {', '.join(sorted(recipes.RECIPES))}."
        )
    if not stages:
        return objective
    if not isinstance(stages, Mapping) or not all(isinstance(v, Mapping) for v in stages.values()):
        raise InputError(f"objective.stages: expected {{stage: {{argument: value}}}}, got {stages!r}.")
    changes = {f"{stage}.{key}": value for stage, args in stages.items() for key, value in args.items()}
    try:
        return transforms.rebuild(objective, changes)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"objective.stages: {error.args[0] if error.args else error}") from None


def _chain(spec: list[Any]) -> LossTransform:
    built = []
    for index, item in enumerate(spec):
        where = f"objective[{index}]"
        if isinstance(item, str):
            item = {item: {}}
        if not isinstance(item, Mapping) or len(item) != 1:
            raise InputError(f"{where}: expected a stage name or {{stage: {{arguments}}}}, got {item!r}.")
        ((name, kwargs),) = item.items()
        if not isinstance(kwargs, Mapping | None):
            raise InputError(f"{where}: expected {{argument: value}} below {name}, got {kwargs!r}.")
        factory = transforms.STAGES.get(name)
        if factory is None:
            near = did_you_mean(str(name), transforms.STAGES)
            raise InputError(
                f"{where}: no stage {name!r}.{near} Stages: {', '.join(sorted(transforms.STAGES))}."
            )
        built.append(_checked(f"{where}: stage {name}", factory, kwargs or {}))
    try:
        return transforms.chain(*built)
    except ValueError as error:
        raise InputError(f"objective: {error}") from None


def _by_import(path: str, kwargs: Mapping[str, Any]) -> LossTransform:
    module, _, name = path.partition(":")
    if not {"", os.getcwd()} & set(sys.path):  # a console script does not search the folder it is called in
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise InputError(f"objective: cannot import {path!r}: {described(error)}.") from None
    if isinstance(found, LossTransform) and kwargs:
        raise InputError(
            f"objective: {path} is a chain already, which takes no arguments (got {', '.join(map(str, kwargs))}). Set those of "
            "its stages (--set objective.stages.STAGE.ARGUMENT=…), or name a function that returns the chain."
        )
    if not isinstance(found, LossTransform):
        found = _checked(f"objective: {path}", found, kwargs) if callable(found) else found
    if not isinstance(found, LossTransform):
        raise InputError(
            f"objective: {path!r} is {type(found).__name__}, not a LossTransform or a function of one."
        )
    return found
