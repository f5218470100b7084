"""Whether a completion has the form that was asked for, whatever it says."""

from __future__ import annotations

from jaxrl_llm.rewards.extract import mask_code_fences, small
from jaxrl_llm.rewards.score import Score

__all__ = ["think_answer_format"]


def think_answer_format(completion: str) -> Score:
    """1 if the completion is `<think>…</think><answer>…</answer>` and nothing else, else 0; never more than 1.

    Each tag must occur once, in this order, with only white space before, between and after the two blocks.
    Mismatched, repeated, nested or reordered tags give 0; tags inside a code fence do not count. Tags match whatever
    their case, as they do for the graders.
    """
    masked = small(mask_code_fences(completion))
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    at = [masked.find(tag) for tag in tags]
    for tag in tags:
        if masked.count(tag) != 1:
            return Score(0.0, {}, f"{tag} occurs {masked.count(tag)} times, must occur once")
    if at != sorted(at):
        return Score(0.0, {}, "the tags are not in the order <think> </think> <answer> </answer>")
    outside = (
        completion[: at[0]] + completion[at[1] + len(tags[1]) : at[2]] + completion[at[3] + len(tags[3]) :]
    )
    if outside.strip():
        return Score(0.0, {}, f"text outside the two blocks: {outside.strip()[:80]!r}")
    return Score(1.0)
