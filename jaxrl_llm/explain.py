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
from jaxrl_llm.learner.share import coefficients
from jaxrl_llm.objectives import build_objective
from jaxrl_llm.transforms import LossTransform
from jaxrl_llm.transforms.preference import takes_pairs
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = ["WEIGHT_LENGTHS", "WEIGHT_RATES", "derivation", "list_objectives", "token_weights"]

WEIGHT_LENGTHS = (8, 32, 128)  # trained tokens of an answer
WEIGHT_RATES = (1, 4, 7)  # right answers of a group of 8
_GROUP = 8


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


def _required(factory: Callable[..., Any]) -> bool:
    return any(p.default is inspect.Parameter.empty for p in inspect.signature(factory).parameters.values())


def _needs(objective: LossTransform) -> str:
    return ", ".join(sorted(transforms.needs(objective))) or "nothing beyond the rollout"


def list_objectives() -> str:
    """Every recipe and every public stage: arguments with defaults, equation and source, fields that it needs."""
    lines = ["RECIPES                     objective: NAME, or objective: {recipe: NAME, ARGUMENT: VALUE}", ""]
    for name, factory in sorted(recipes.RECIPES.items()):
        lines.append(f"{name}({_arguments(factory)})")
        lines.append(f"    {_first_line(factory)}")
        if not _required(factory):
            lines.append(f"    needs: {_needs(factory())}")
    lines += ["", "STAGES                      objective: [NAME, {NAME: {ARGUMENT: VALUE}}, …]", ""]
    for name in sorted(transforms.STAGES):
        factory = transforms.STAGES[name]
        lines.append(f"{name}({_arguments(factory)})")
        lines.append(f"    {_first_line(factory)}")
        reads = getattr(factory, "reads", ())
        if reads and not callable(reads):
            lines.append(f"    reads: {', '.join(reads)}")
    return "\n".join(lines)


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
    if takes_pairs(objective):
        return [
            "No table of token weights: it compares given answers, whose weight depends on both of a pair."
        ]
    try:
        weights = token_weights(objective)
    except (TypeError, ValueError) as error:
        return [f"No table of token weights: {str(error).splitlines()[0]}"]
    head = ["right answers of 8"] + [f"{length} tokens" for length in WEIGHT_LENGTHS]
    rows = [
        [f"{rate}"] + ["{:+.2f} / {:+.2f}".format(*weights[rate, length]) for length in WEIGHT_LENGTHS]
        for rate in WEIGHT_RATES
    ]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return [
        "Weight of a token of a right / of a wrong answer, on-policy, by the length of the answers and by how many of",
        "the group are right (1 = the mean over all tokens of such a batch; reward 1 or 0):",
        "",
        *("  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)) for r in [head, *rows]),
    ]


def derivation(name: str, arguments: Mapping[str, Any] | None = None) -> str:
    """How an objective comes about: the chain, each stage's equation with its numbers, and the token weights.

    Args:
      name: a recipe, or "package.module:objective".
      arguments: of the recipe.

    Raises:
      InputError: an unknown recipe or argument.
    """
    objective = build_objective({"recipe": name, **(arguments or {})})
    lines = []
    if name in recipes.RECIPES:
        lines += [f"{name}: {_first_line(recipes.RECIPES[name])}", ""]
    lines += [transforms.describe(objective), ""]
    lines += ["loss = Σ norm · weight · policy / Σ count  +  Σ norm · penalty / Σ count for each penalty", ""]
    for index, info in enumerate(objective.info):
        factory = transforms.STAGES.get(info.stage)
        equation = _first_line(factory) if factory is not None else ""
        lines.append(f"{index}  {info}")
        if equation:
            lines.append(f"   {equation}")
            lines.append(f"   {_numbers(equation, info.arguments)}".rstrip())
    lines += ["", f"Needs: {_needs(objective)}.", "", *_weight_table(objective)]
    return "\n".join(line for line in lines if line is not None)


def _numbers(equation: str, arguments: Mapping[str, Any]) -> str:
    """The equation's hyper-parameters with their values, those first that it names."""
    named = [key for key in arguments if re.search(rf"\b{re.escape(key)}\b", equation)]
    rest = [key for key in arguments if key not in named]
    shown = ", ".join(f"{key} = {arguments[key]}" for key in (*named, *rest) if arguments[key] is not None)
    return f"with {shown}" if shown else ""
