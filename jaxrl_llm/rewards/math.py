r"""Mathematical answers in `\boxed{…}` or `<answer>…</answer>`: the exact, instant part.

An answer equals the gold when both are the same number (`rewards.numbers`) or the same LaTeX text after
`normalise_latex`. Both tests are symmetric, need no clock, no signal and no thread of their own, so they
give the same score in any thread or process. Symbolic equality ((x+1)^2 = x^2+2x+1) is not attempted here.
"""

from __future__ import annotations

import re

from jaxrl_llm.rewards.extract import after_thinking, answer_tag, last_boxed
from jaxrl_llm.rewards.numbers import (
    find_numbers,
    numbers_equal,
    parse_number,
    read_number,
    without_spaced_groups,
)
from jaxrl_llm.rewards.score import Score

__all__ = ["answers_equal", "asks_percent", "grade_boxed", "grade_tag", "normalise_latex"]

_NO_SPACE = re.compile(r"\\!")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\$")
_SHORT_FRACTION = re.compile(r"\\frac ?([0-9]) ?([0-9])")
# A blank that keeps two numbers apart: 4 10, 1 .5, 1. 5.
_REMOVABLE = re.compile(r"(?!(?<=\d) \.?\d)(?!(?<=\d\.) \d) ")
_ASKS_PERCENT = re.compile(r"\bper ?cent(?:age)?\b", re.IGNORECASE)


def asks_percent(question: str) -> bool:
    """True when a question asks for, or speaks of, a percentage."""
    return _ASKS_PERCENT.search(question) is not None


def normalise_latex(text: str) -> str:
    r"""The text without \left, \right, dollar signs, spaces and a final full stop, with \dfrac and \tfrac written \frac
    and \frac12 written \frac{1}{2}. Applied to both sides.

    A space goes only where it says nothing: `4 10/3` does not become 410/3, nor `1, 234` the number 1,234.
    """
    text = (
        _DROPPED.sub(" ", _NO_SPACE.sub("", text)).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    )
    text = without_spaced_groups(text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    joined = _REMOVABLE.sub("", text)
    return text if read_number(text) is None and read_number(joined) is not None else joined


def answers_equal(a: str, b: str, *, percent_asked: bool = False) -> bool:
    """Whether two answers are the same number or, if not both are numbers, the same text; symmetric."""
    same = numbers_equal(a, b, percent_asked=percent_asked)
    if same is not None:
        return same
    first, second = normalise_latex(a), normalise_latex(b)
    return bool(first) and first == second


def _grade(found: str | None, gold: str, gradable: str | None, question: str, missing: str) -> Score:
    percent = asks_percent(question)
    value = parse_number(gold)
    anywhere = value is not None and gradable is not None and value in find_numbers(gradable)
    if found is None:
        reason = "the thinking was never closed" if gradable is None else missing
        return Score(0.0, {"format": 0.0, "lenient": float(anywhere)}, reason)
    right = answers_equal(found, gold, percent_asked=percent)
    return Score(
        float(right),
        {"format": 1.0, "lenient": float(right or anywhere)},
        "" if right else f"answer {found[:80]!r} is not {gold[:80]!r}",
    )


def grade_boxed(completion: str, gold: str, *, question: str = "", thinking_opened: bool = False) -> Score:
    r"""1 if the last `\boxed{…}` after the thinking equals the gold answer, else 0.

    Args:
      completion: the sampled text.
      gold: the right answer, without a box.
      question: read only to see whether it asks for a percentage.
      thinking_opened: the prompt ends inside an open thinking block.
    """
    gradable = after_thinking(completion, opened=thinking_opened)
    found = None if gradable is None else last_boxed(gradable)
    return _grade(found, gold, gradable, question, r"no closed \boxed{…}")


def grade_tag(completion: str, gold: str, *, question: str = "", thinking_opened: bool = False) -> Score:
    """1 if the last `<answer>…</answer>` after the thinking equals the gold answer, else 0. See `grade_boxed`."""
    gradable = after_thinking(completion, opened=thinking_opened)
    found = None if gradable is None else answer_tag(gradable)
    return _grade(found, gold, gradable, question, "no complete <answer>…</answer>")
