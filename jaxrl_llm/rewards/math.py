r"""Mathematical answers in `\boxed{…}` or `<answer>…</answer>`: the exact, instant part.

An answer equals the gold when both are the same number (`rewards.numbers`), lists or sets of the same numbers, or the
same LaTeX text after `normalise_latex`; `x = 5` is the answer 5, and `(A)` the choice A. All of it is symmetric and
needs no clock, no signal and no thread of its own, so it gives the same score in any thread or process. Units are part
of an answer (5 cm is not 5). Symbolic equality ((x+1)^2 = x^2+2x+1) is not attempted here.
"""

from __future__ import annotations

import re
from fractions import Fraction

from jaxrl_llm.rewards.extract import after_thinking, answer_tag, last_boxed
from jaxrl_llm.rewards.numbers import (
    find_numbers,
    numbers_equal,
    parse_number,
    plain_text,
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
_SHORT_ROOT = re.compile(r"\\sqrt ?([0-9])")
_LONG_SCRIPT = re.compile(r"([\^_]) ?\{ ?(\w|\\circ) ?\}")
_DEGREES = re.compile(r"\^ ?\\circ(?![a-z])|\\degree(?![a-z])")
_CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])[):]")
_ASSIGNED = re.compile(r"\s*\\?[A-Za-z]\w{0,15}(?:_\{\w{1,15}\})?\s*=(?!=)(?P<value>.*)", re.DOTALL)
_LISTS = (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), (r"\{", r"\}"), ("{", "}"))
_ASKS_PERCENT = re.compile(r"\bper ?cent(?:age)?\b", re.IGNORECASE)


def asks_percent(question: str) -> bool:
    """True when a question asks for, or speaks of, a percentage."""
    return _ASKS_PERCENT.search(question) is not None


def normalise_latex(text: str) -> str:
    r"""The text without \left, \right, dollar signs, spaces and a final full stop, with \dfrac and \tfrac written \frac,
    \frac12 written \frac{1}{2}, \sqrt2 written \sqrt{2}, x^{2} written x^2, ^\circ written \u00b0, \text{a} written a, and
    (A) written A. Applied to both sides.

    A space goes only where it says nothing: `4 10/3` does not become 410/3, nor `1, 234` the number 1,234.
    """
    text = (
        _DROPPED.sub(" ", _NO_SPACE.sub("", plain_text(text)))
        .replace(r"\dfrac", r"\frac")
        .replace(r"\tfrac", r"\frac")
    )
    text = without_spaced_groups(text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    text = _DEGREES.sub("\u00b0", _LONG_SCRIPT.sub(r"\1\2", text))
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    joined = _REMOVABLE.sub("", text)
    if read_number(text) is None and read_number(joined) is not None:
        return text
    choice = _CHOICE.fullmatch(joined)
    return choice[1] or choice[2] if choice else joined


def _members(text: str) -> tuple[str, list[Fraction | str]] | None:
    """(kind of brackets, members) of a normalised text that is a list; None if it is no list of two or more."""
    for left, right in _LISTS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            parts, depth, start = [], 0, 0
            inside = text[len(left) : -len(right)]
            for at, char in enumerate(inside):
                depth += (char in "([{") - (char in ")]}")
                if depth < 0:
                    return None
                if char == "," and not depth:
                    parts.append(inside[start:at])
                    start = at + 1
            parts.append(inside[start:])
            values: list[Fraction | str] = []
            for part in parts:
                value = parse_number(part)
                values.append(part if value is None else value)
            return (left[-1] + right[-1], values) if len(parts) > 1 else None
    return None


def answers_equal(a: str, b: str, *, percent_asked: bool = False) -> bool:
    """Whether two answers are the same number or, if not both are numbers, the same list or text; symmetric.

    The members of a list in parentheses or brackets have an order, those of a set in braces have none. An answer
    `x = 5` equals 5, and `y = 5` only if it says the same of the same letter.
    """
    assigned = [_ASSIGNED.fullmatch(text) for text in (a, b)]
    if (assigned[0] is None) != (assigned[1] is None):
        a, b = (
            text if match is None else match["value"] for text, match in zip((a, b), assigned, strict=True)
        )
    same = numbers_equal(a, b, percent_asked=percent_asked)
    if same is not None:
        return same
    first, second = normalise_latex(a), normalise_latex(b)
    if first == second:
        return bool(first)
    lists = _members(first), _members(second)
    if lists[0] is None or lists[1] is None or lists[0][0] != lists[1][0]:
        return False
    if lists[0][0] == "{}":
        return set(lists[0][1]) == set(lists[1][1])
    return lists[0][1] == lists[1][1]


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
