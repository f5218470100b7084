"""Graders by name: where the answer stands in a completion, and what makes it right."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.rewards.exact import first_line_exact, first_line_number, whole_text_exact
from jaxrl_llm.rewards.extract import after_thinking, answer_line, answer_tag, last_boxed
from jaxrl_llm.rewards.math import grade_boxed, grade_tag
from jaxrl_llm.rewards.score import Score

__all__ = ["GRADERS", "Grader"]


class Grader(NamedTuple):
    """One convention for writing an answer down."""

    find: Callable[[str], str | None]  # completion -> the answer in it, None if there is none
    score: Callable[[str, str, str], Score]  # (completion, gold, question)
    write: Callable[[str], str]  # answer -> the completion of a model that gives it
    instruction: str  # one sentence that tells a model about the convention; "" = nothing to say


def _after_thinking(extract: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def find(completion: str) -> str | None:
        gradable = after_thinking(completion)
        return None if gradable is None else extract(gradable)

    return find


GRADERS: dict[str, Grader] = {
    "line": Grader(
        find=answer_line,
        score=lambda text, gold, question: first_line_exact(text, gold),
        write=lambda answer: f" {answer}\n",
        instruction="",
    ),
    "number": Grader(
        find=answer_line,
        score=lambda text, gold, question: first_line_number(text, gold),
        write=lambda answer: f" {answer}\n",
        instruction="",
    ),
    "text": Grader(
        find=_after_thinking(str.strip),
        score=lambda text, gold, question: whole_text_exact(text, gold),
        write=lambda answer: answer,
        instruction="Write the answer and nothing else.",
    ),
    "boxed": Grader(
        find=_after_thinking(last_boxed),
        score=lambda text, gold, question: grade_boxed(text, gold, question=question),
        write=lambda answer: rf"The answer is \boxed{{{answer}}}.",
        instruction=r"Put the final answer in \boxed{}.",
    ),
    "tag": Grader(
        find=_after_thinking(answer_tag),
        score=lambda text, gold, question: grade_tag(text, gold, question=question),
        write=lambda answer: f"<answer>{answer}</answer>",
        instruction="Put the final answer between <answer> and </answer>.",
    ),
}
