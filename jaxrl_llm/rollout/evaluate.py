"""Accuracy on held-out items: greedy and sampled, with intervals, and with format split from skill."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.checks import constant_answer_baseline, distinct_items
from jaxrl_llm.rollout.collect import graded_text, score_completion
from jaxrl_llm.rollout.task import Item, Task, prompt_of
from jaxrl_llm.sampler.base import SamplingParams, TokenSampler
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt, StopReason

__all__ = ["evaluate", "summary", "wilson_interval"]

Z_95 = 1.959963984540054  # two-sided 95 %


def wilson_interval(right: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927, eq. 3 of Brown, Cai, DasGupta 2001): (low, high).

    Unlike mean +- z s it stays inside [0, 1] and has a width at 0 and at n. (0, 1) when n is 0.
    """
    if n == 0:
        return 0.0, 1.0
    share = right / n
    scale = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(scores: Sequence[Score], prefix: str) -> dict[str, float]:
    """Figures of scored answers, under keys that start with `prefix`.

    * `accuracy`, `accuracy_low`, `accuracy_high`: right answers among those that could be scored; Wilson 95 %.
    * `format_rate`: answers in the form that was asked for, right or wrong (part `format`).
    * `accuracy_given_format`: right answers among those; 0 when there are none. A gain in `accuracy` is a gain
      in `format_rate` or in this one: accuracy = format_rate x accuracy_given_format when every right answer
      is well-formed.
    * `lenient_accuracy`: the right answer stands anywhere in the text (part `lenient`): what strictness costs.
    * `reward_errors`: answers that could not be scored.
    """
    scored = [s for s in scores if s.value is not None]
    n = len(scored)
    right = [float(s.value or 0.0) >= 1.0 for s in scored]
    low, high = wilson_interval(sum(right), n)
    figures = {
        "accuracy": sum(right) / n if n else 0.0,
        "accuracy_low": low,
        "accuracy_high": high,
        "reward_errors": float(len(scores) - n),
    }
    format_part, lenient = (_part(scored, name) for name in ("format", "lenient"))
    if format_part is not None:
        formed = [part >= 1.0 for part in format_part]
        both = sum(r and f for r, f in zip(right, formed, strict=True))
        figures["format_rate"] = sum(formed) / n
        figures["accuracy_given_format"] = both / sum(formed) if any(formed) else 0.0
    if lenient is not None:
        figures["lenient_accuracy"] = sum(part >= 1.0 for part in lenient) / n
    return {prefix + name: value for name, value in figures.items()}


def _part(scores: Sequence[Score], name: str) -> list[float] | None:
    """A part of every score; None when there are no scores or one of them lacks it."""
    parts = [part for score in scores if (part := score.parts.get(name)) is not None]
    return parts if parts and len(parts) == len(scores) else None


def evaluate(
    sampler: TokenSampler,
    params: Any,
    task: Task,
    tokenizer: Tokenizer,
    sampling: SamplingParams | None = None,
    *,
    n: int = 128,
    seed: int = 0,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    stop: tuple[str, ...] | None = None,
    sampled: bool = True,
    max_prompt_tokens: int | None = None,
    version: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Accuracy on items that training never sees.

    The same items, uids and sampling seed every time, so two evaluations of a run differ by the policy only.

    Args:
      sampler, params: complete the prompts.
      task, tokenizer: ask and judge.
      sampling: how answers are drawn; one sample an item. Default: built from the next three.
      n: items, all different; fewer when the held-out split has no more.
      seed: of the held-out items, and of the sampling when `sampling` is not given.
      max_tokens, temperature, stop: defaults: the task's, 1, the task's.
      sampled: also at the temperature of `sampling`, not only greedily.
      max_prompt_tokens: items with longer prompts are left out and counted.
      version: stamped by the sampler.
      on_progress: called with (completions done, completions in all).

    Returns:
      `eval/TASK/greedy_…` and `eval/TASK/sampled_…` of `summary`, and of the items: `items`,
      `constant_baseline`, `prompts_skipped`; `format_rate` is that of the greedy answers.

    Raises:
      InputError: no held-out item fits.
    """
    if sampling is None:
        sampling = SamplingParams(
            max_tokens=max_tokens or task.max_tokens,
            temperature=temperature,
            stop=task.stop if stop is None else stop,
            seed=seed,
        )
    sampling = dataclasses.replace(sampling, n=1)
    items, prompts, skipped = _held_out(task, tokenizer, n, seed, max_prompt_tokens)
    key = f"eval/{task.name}/"
    baseline = constant_answer_baseline(task, len(items), items=items)
    figures = {
        f"{key}items": float(len(items)),
        f"{key}prompts_skipped": float(skipped),
        f"{key}constant_baseline": baseline.accuracy,
    }
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    kinds = [("greedy_", greedy)] + ([("sampled_", sampling)] if sampled else [])
    total = len(kinds) * len(prompts)
    for done, (kind, how) in enumerate(kinds):
        before = done * len(prompts)

        def progress(stats: Any, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before + stats.completions, total)

        completions = sampler.generate(params, prompts, how, version=version, on_progress=progress)
        scores = [score_completion(task, c, graded_text(c, tokenizer)) for c in completions]
        figures |= summary(scores, key + kind)
        lengths = [len(c.tokens) for c in completions]
        figures[f"{key}{kind}length_mean"] = float(np.mean(lengths))
        cut = sum(c.stop is StopReason.LENGTH for c in completions)
        figures[f"{key}{kind}truncated_fraction"] = cut / len(completions)
    if f"{key}greedy_format_rate" in figures:
        figures[f"{key}format_rate"] = figures[f"{key}greedy_format_rate"]
    return figures


def _held_out(
    task: Task, tokenizer: Tokenizer, n: int, seed: int, limit: int | None
) -> tuple[list[Item], list[Prompt], int]:
    """(items, their prompts, how many were left out because they are too long)."""
    if n < 1:
        raise InputError(f"evaluation needs at least 1 item, got {n}.")
    items = distinct_items(task, n, seed=seed)
    prompts = [
        prompt_of(task, item, tokenizer, uid=f"{task.name}/eval/{seed}/{i}#0") for i, item in enumerate(items)
    ]
    fits = [limit is None or len(p.tokens) <= limit for p in prompts]
    if not any(fits):
        shortest = min(len(p.tokens) for p in prompts)
        raise InputError(
            f"task {task.name}: none of {len(prompts)} held-out prompts fits into {limit} tokens; the shortest has "
            f"{shortest}. Raise model.max_context or shorten the prompts."
        )
    kept = [i for i, fit in enumerate(fits) if fit]
    return [items[i] for i in kept], [prompts[i] for i in kept], len(items) - len(kept)
