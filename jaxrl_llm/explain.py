"""What the objectives are, for people: the lists and derivations that `jaxrl objectives` prints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import recipes, transforms
from jaxrl_llm.config import CriticSettings
from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.learner.share import coefficients
from jaxrl_llm.objectives import (
    TAUGHT,
    argument_help,
    build_objective,
    check_arguments,
    example_arguments,
    required_arguments,
)
from jaxrl_llm.transforms import LossTransform
from jaxrl_llm.transforms.preference import takes_labels, takes_pairs
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = [
    "WEIGHT_LENGTHS",
    "WEIGHT_RATES",
    "derivation",
    "list_objectives",
    "objectives_as_data",
    "token_weights",
]

WEIGHT_LENGTHS = (8, 32, 128)  # trained tokens of an answer
WEIGHT_RATES = (1, 4, 7)  # right answers of a group of 8
_GROUP = 8

_TEACHER = "a teacher: set teacher.source or teacher.snapshot"
_CRITIC = (
    "a critic, trained beside the policy: see critic.* (critic.learning_rate, default "
    f"{CriticSettings().learning_rate}, and the others)".replace("e-0", "e-")
)
_VALUE_HEAD = "a value head on the model itself (`jaxrl sft` adds one for reward_model)"
_LISTS = "the likeliest tokens of every place, with their log-probs"
_WORDS = {  # each on-demand field, for people
    "batch.logprob_proximal": "one forward pass more over each batch, before its first update",
    "batch.logprob_reference": "a frozen copy of the start (the reference, in memory beside the policy; see reference.*)",
    "batch.reference_point": "one pass more over prompts with the answers to others (`jaxrl sft` does it)",
    "batch.value": _CRITIC,
    "batch.bootstrap_value": _CRITIC,
    "batch.rewards": "several named rewards of the task",
    "batch.baseline_reward": "one greedy answer more per prompt",
    "batch.agent": "the role of each answer: `agent` of the task's items",
    "batch.support_ids": "the tokens that each token was drawn from",
    "batch.topk_ids": _LISTS,
    "batch.topk_logprob_behavior": _LISTS,
    "batch.topk_logprob_proximal": _LISTS,
    "batch.routing_ids": "the experts that each token went through",
    "loss.entropy": "the entropy of the policy at each token",
    "loss.value": _VALUE_HEAD,
    "loss.topk_logprob": _LISTS,
    "loss.router_choice": "the experts that each token went through",
    "loss.router_probs": "the router's probabilities of each token",
    **dict.fromkeys(TAUGHT, _TEACHER),
}


def _first_line(factory: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(factory) or ""
    return " ".join(text.split("\n\n")[0].split())


def _arguments(factory: Callable[..., Any]) -> str:
    """The hyper-parameters with their defaults."""
    shown = []
    for name, parameter in inspect.signature(factory).parameters.items():
        if name == "name":  # every stage has it
            continue
        default = parameter.default
        shown.append(name if default is inspect.Parameter.empty else f"{name}={default}")
    return ", ".join(shown)


def _keys(objective: LossTransform) -> set[str]:
    return {need.key for need in transforms.needs(objective)}


def _taught(objective: LossTransform) -> bool:
    return any(transforms.Need(read).key in TAUGHT for info in objective.info for read in info.reads)


def _needs(objective: LossTransform) -> str:
    """What an objective needs beyond the samples and their rewards, in words."""
    keys = _keys(objective) - {"batch.topk_ids"} if _taught(objective) else _keys(objective)
    words = sorted({_WORDS.get(key, key) for key in keys})
    if takes_labels(objective):
        words.insert(
            0,
            "given answers (`jaxrl sft`): rows {prompt, completion, label}, or {prompt, chosen, rejected}",
        )
    elif takes_pairs(objective):
        words.insert(0, "given pairs of answers (`jaxrl sft`): rows {prompt, chosen, rejected}")
    return "; ".join(words) or "nothing beyond the rollout"


def _required_lines(factory: Callable[..., Any]) -> list[str]:
    lines = []
    for name, value in example_arguments(factory).items():
        means = argument_help(factory, name)
        lines.append(
            f"    must be set: {name}{f' ({means})' if means else ''}, for example objective.{name}={value}"
        )
    return lines


def list_objectives() -> str:
    """Every recipe and every public stage: arguments with defaults, equation and source, fields that it needs."""
    lines = ["RECIPES                     objective: NAME, or objective: {recipe: NAME, ARGUMENT: VALUE}", ""]
    for name, factory in sorted(recipes.RECIPES.items()):
        lines.append(f"{name}({_arguments(factory)})")
        lines.append(f"    {_first_line(factory)}")
        lines += _required_lines(factory)
        lines.append(f"    needs: {_needs(factory(**example_arguments(factory)))}")
    lines += ["", "STAGES                      objective: [NAME, {NAME: {ARGUMENT: VALUE}}, …]", ""]
    for name in sorted(transforms.STAGES):
        factory = transforms.STAGES[name]
        lines.append(f"{name}({_arguments(factory)})")
        lines.append(f"    {_first_line(factory)}")
        reads = getattr(factory, "reads", ())
        if reads and not callable(reads):
            lines.append(f"    reads: {', '.join(reads)}")
    return "\n".join(lines)


def objectives_as_data() -> dict[str, Any]:
    """`list_objectives` as JSON values: {"recipes": {name: …}, "stages": {name: …}}.

    Of each: doc; arguments, {name: default}, without those that are required; required, their names. Of a recipe also
    reads, the on-demand fields (with example arguments).
    """

    def described(factory: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(factory).parameters.values()
        given = {p.name: p.default for p in parameters if p.default is not p.empty}
        plain = {k: v if isinstance(v, str | int | float | None) else str(v) for k, v in given.items()}
        return {
            "doc": inspect.getdoc(factory) or "",
            "arguments": plain,
            "required": required_arguments(factory),
        }

    return {
        "recipes": {
            name: described(factory) | {"reads": sorted(_keys(factory(**example_arguments(factory))))}
            for name, factory in sorted(recipes.RECIPES.items())
        },
        "stages": {name: described(factory) for name, factory in sorted(transforms.STAGES.items())},
    }


def _example(rates: tuple[int, ...], lengths: tuple[int, ...]) -> TokenBatch:
    """One group of 8 for each (rate, length): `rate` right answers of 8, all with `length` trained tokens."""
    width = 1 + max(lengths)
    cells = [(rate, length) for rate in rates for length in lengths for _ in range(_GROUP)]
    trained = np.array([length for _, length in cells])
    right = np.array([i % _GROUP < rate for i, (rate, _) in enumerate(cells)], float)
    columns = np.arange(width)
    mask = (columns >= 1) & (columns < 1 + trained[:, None])
    batch = TokenBatch.from_rows(
        np.where(mask, 5, 0),
        mask,
        group=np.arange(len(cells)) // _GROUP,
        reward=right,
        lengths=1 + trained,
        logprob_behavior=np.where(mask, -1.0, 0.0),
        version=0,
    )
    there, zeros = batch.logprob_behavior, jnp.zeros(batch.shape)
    return batch.replace(
        logprob_proximal=there,
        logprob_reference=there,
        logprob_teacher=there,
        value=zeros,
        bootstrap_value=zeros,
        baseline_reward=zeros,
        rewards={"reward": batch.reward},
    )


def token_weights(
    objective: LossTransform,
    rates: tuple[int, ...] = WEIGHT_RATES,
    lengths: tuple[int, ...] = WEIGHT_LENGTHS,
) -> dict[tuple[int, int], tuple[float, float]]:
    """{(rate, length): (weight of a token of a right answer, of a wrong one)}, on-policy.

    The weight is -∂ loss / ∂ log π of the token, in units of the mean |weight| over all tokens: positive
    raises its probability. The batch has one group of 8 for each pair: `rate` of its answers are right (reward 1,
    else 0), all are `length` tokens long. Averages over the tokens of an answer.

    Raises:
      ValueError: the objective reads a field that such a batch does not have.
    """
    batch = _example(rates, lengths)
    # Whatever the policy reports besides the log-prob is on-policy, too.
    output = PolicyOutput(
        logprob=jnp.where(batch.mask, -1.0, 0.0), entropy=jnp.ones(batch.shape), value=jnp.zeros(batch.shape)
    )
    prepared, state = objective.prepare(batch, objective.init())
    weight = -np.asarray(jax.jit(lambda b: coefficients(objective, output, b, state))(prepared))
    mask = np.asarray(prepared.mask)
    unit = np.abs(weight[mask]).mean() or 1.0
    out = {}
    row = 0
    for rate in rates:
        for length in lengths:
            rows = slice(row, row + _GROUP)
            each = (weight[rows] * mask[rows]).sum(axis=1) / length / unit
            out[rate, length] = (float(each[:rate].mean()), float(each[rate:].mean()))
            row += _GROUP
    return out


def _weight_table(objective: LossTransform) -> list[str]:
    keys = _keys(objective)
    for applies, why in (
        (takes_pairs(objective), "it compares given answers, whose weight depends on both of a pair."),
        (
            _taught(objective),
            "a teacher decides, by how much likelier it finds a token than the policy does; not the reward alone.",
        ),
        (
            "batch.value" in keys,
            "a critic decides: a token weighs by how much the reward exceeds the values that the critic has learned.",
        ),
        (
            _LISTS in {_WORDS.get(key) for key in keys},
            "the likeliest tokens in its place decide with, and those of an example would be made up.",
        ),
    ):
        if applies:
            return [f"No table of token weights: {why}"]
    try:
        weights = token_weights(objective)
    except (TypeError, ValueError) as error:
        return [f"No table of token weights: {str(error).splitlines()[0]}"]
    assumed = [
        text
        for key, text in (
            ("batch.logprob_reference", "the policy is still the reference"),
            ("batch.baseline_reward", "the greedy answer has reward 0"),
            ("batch.rewards", "the task has one reward"),
        )
        if key in keys
    ]
    head = ["right answers of 8"] + [f"{length} tokens" for length in WEIGHT_LENGTHS]
    rows = [
        [f"{rate}"] + ["{:+.2f} / {:+.2f}".format(*weights[rate, length]) for length in WEIGHT_LENGTHS]
        for rate in WEIGHT_RATES
    ]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return [
        "Weight of a token of a right / of a wrong answer, on-policy, by the length of the answers and by how many of",
        "the group are right (1 = the mean over all tokens of such a batch; reward 1 or 0):",
        *([f"Assumed: {', '.join(assumed)}."] if assumed else []),
        "",
        *("  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)) for r in [head, *rows]),
    ]


def derivation(name: str, arguments: Mapping[str, Any] | None = None) -> str:
    """How an objective comes about: the chain, each stage's equation with its numbers, and the token weights.

    Args:
      name: a recipe, a stage, or "package.module:objective".
      arguments: of the recipe or stage.

    Raises:
      InputError: an unknown recipe, stage or argument.
    """
    if name in transforms.STAGES and name not in recipes.RECIPES:
        return _stage(name, arguments or {})
    if name not in recipes.RECIPES and ":" not in name:
        near = did_you_mean(name, [*recipes.RECIPES, *transforms.STAGES])
        raise InputError(
            f"no recipe or stage {name!r}.{near} Recipes: {', '.join(sorted(recipes.RECIPES))}. "
            "`jaxrl objectives` lists the stages, too."
        )
    objective = build_objective({"recipe": name, **(arguments or {})})
    lines = []
    if name in recipes.RECIPES:
        factory = recipes.RECIPES[name]
        lines += [f"{name}({_arguments(factory)})", "", inspect.getdoc(factory) or "", ""]
        lines += [
            f"An argument is set as --set objective.ARGUMENT=VALUE, the recipe as --set objective={name}.",
            "",
        ]
    lines += [transforms.describe(objective), ""]
    lines += ["loss = Σ norm · weight · policy / Σ count  +  Σ norm · penalty / Σ count for each penalty", ""]
    for index, info in enumerate(objective.info):
        stage = transforms.STAGES.get(info.stage)
        equation = _first_line(stage) if stage is not None else ""
        lines.append(f"{index}  {info}")
        if equation:
            lines.append(f"   {equation}")
            lines.append(f"   {_numbers(equation, info.arguments)}".rstrip())
    lines += ["", f"Needs: {_needs(objective)}.", "", *_weight_table(objective)]
    return "\n".join(line for line in lines if line is not None)


def _stage(name: str, arguments: Mapping[str, Any]) -> str:
    """A stage by itself: signature, docstring, and the fields that it reads and writes with these arguments."""
    factory = transforms.STAGES[name]
    check_arguments(f"stage {name}", factory, arguments)
    given = {**example_arguments(factory), **arguments}
    try:
        (info,) = factory(**given).info
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {name}: {error}") from None
    spelled = ", ".join(f"{key}: {given[key]}" for key in (required_arguments(factory) or given))
    return "\n".join(
        [
            f"{name}({_arguments(factory)})",
            "",
            inspect.getdoc(factory) or "",
            "",
            f"Reads: {', '.join(info.reads) or 'nothing'}.",
            f"Writes: {', '.join(info.writes) or 'nothing but metrics'}.",
            f"Clock: {info.clock}.",
            "",
            f"A stage of a list: objective: [{f'{{{name}: {{{spelled}}}}}' if spelled else name}, …]. In a recipe that has "
            f"it, its arguments are set as --set objective.stages.{name}.ARGUMENT=VALUE.",
        ]
    )


def _numbers(equation: str, arguments: Mapping[str, Any]) -> str:
    """The equation's hyper-parameters with their values, those first that it names."""
    named = [key for key in arguments if re.search(rf"\b{re.escape(key)}\b", equation)]
    rest = [key for key in arguments if key not in named]
    shown = ", ".join(f"{key} = {arguments[key]}" for key in (*named, *rest) if arguments[key] is not None)
    return f"with {shown}" if shown else ""
