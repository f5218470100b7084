"""Exact match: the first line, or the whole text, is the answer; thinking before it is none of it."""

from __future__ import annotations

import re
import unicodedata

from jaxrl_llm.rewards.extract import after_thinking, answer_line
from jaxrl_llm.rewards.numbers import find_numbers, parse_number
from jaxrl_llm.rewards.score import Score

__all__ = ["contains", "first_line_exact", "first_line_number", "normalise", "whole_text_exact"]

_NO_WORD = re.compile(r"[^\w-]+")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")


def normalise(text: str) -> str:
    """What two answers have in common when they are called equal: runs of white space are one blank, none at
    the ends, and a letter with its accent is one character (NFC). Case, punctuation and accents matter. Applied to the
    answer and to the gold alike.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def contains(text: str, answer: str) -> bool:
    """Whether an answer stands somewhere in a text as whole words, whatever punctuation is around it."""
    text, answer = (unicodedata.normalize("NFC", part) for part in (text, answer))
    words = _NO_WORD.sub(" ", answer).strip()
    return bool(words) and f" {words} " in f" {_NO_WORD.sub(' ', text)} "


def whole_text_exact(completion: str, gold: str) -> Score:
    """1 if the completion, without thinking before it, is the gold answer after `normalise`; else 0.

    For answers of several lines. Parts as in `first_line_exact`.
    """
    text = after_thinking(completion)
    found, gold = normalise(text or ""), normalise(gold)
    right = bool(gold) and found == gold
    return Score(
        float(right),
        {"format": float(bool(found)), "lenient": float(right or contains(text or "", gold))},
        "" if right else f"text {found[:80]!r} is not {gold[:80]!r}",
    )


def first_line_exact(completion: str, gold: str) -> Score:
    """1 if the first line of the completion is the gold answer, after `normalise`; else 0.

    Parts: `format` = the first line is not empty and no longer than the gold answer in words; `lenient` =
    the gold answer stands somewhere in the completion as whole words.
    """
    line, gold = normalise(answer_line(completion)), normalise(gold)
    right = bool(gold) and line == gold
    well_formed = bool(line) and len(line.split(" ")) == len(gold.split(" "))
    anywhere = contains(completion, gold)
    return Score(
        float(right),
        {"format": float(well_formed), "lenient": float(right or anywhere)},
        "" if right else f"first line {line[:80]!r} is not {gold[:80]!r}",
    )


def first_line_number(completion: str, gold: str) -> Score:
    """1 if the first line of the completion is exactly the gold integer, written as Python writes it; else 0.

    `0106`, `106.`, `106.0`, `1,000` and `106 apples` are not `106`: a strict form is what makes the figure
    mean one thing. Parts: `format` = the first line is an integer and nothing else; `lenient` = the gold
    value is among the numbers of the completion, whatever stands around it.
    """
    line, gold = answer_line(completion), gold.strip()
    right = bool(gold) and line == gold
    well_formed = _INTEGER.fullmatch(line) is not None
    value = parse_number(gold)
    anywhere = value is not None and value in find_numbers(completion)
    return Score(
        float(right),
        {"format": float(well_formed), "lenient": float(right or anywhere)},
        "" if right else f"first line {line[:80]!r} is not {gold[:80]!r}",
    )
