"""Graders by name: (completion, gold answer, question) -> Score."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.rewards.exact import first_line_exact, first_line_number
from jaxrl_llm.rewards.math import grade_boxed, grade_tag
from jaxrl_llm.rewards.score import Score

__all__ = ["GRADERS", "Grader"]


class Grader(NamedTuple):
    """How answers are read from completions, and how an answer would be written in one."""

    score: Callable[[str, str, str], Score]  # (completion, gold, question)
    write: Callable[[str], str]  # answer -> the completion of a model that gives it


GRADERS: dict[str, Grader] = {
    "line": Grader(lambda text, gold, question: first_line_exact(text, gold), lambda answer: f" {answer}\n"),
    "number": Grader(
        lambda text, gold, question: first_line_number(text, gold), lambda answer: f" {answer}\n"
    ),
    "boxed": Grader(
        lambda text, gold, question: grade_boxed(text, gold, question=question),
        lambda answer: rf"The answer is \boxed{{{answer}}}.",
    ),
    "tag": Grader(
        lambda text, gold, question: grade_tag(text, gold, question=question),
        lambda answer: f"<answer>{answer}</answer>",
    ),
}
