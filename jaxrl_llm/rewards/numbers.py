r"""Numbers in text, compared exactly.

Nothing is evaluated: a number is read by one linear pattern or it is not a number. Powers, factorials and
nested expressions are therefore never computed, however small they look; they are equal to a gold answer
only as strings. Values are `Fraction`s, so 0.5 equals 1/2 and 0.333 does not equal 1/3.

Percent policy: `x%`, `x\%` and `x percent` are the number x/100, on both sides alike. So 35% equals 0.35
and neither equals 35; 100% equals 1. Where the question itself asks for a percentage, pass
`percent_asked=True`: then a bare 35 also equals 35%.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

__all__ = [
    "Number",
    "find_numbers",
    "numbers_equal",
    "parse_number",
    "read_number",
    "without_spaced_groups",
]

MAX_CHARS = 200  # longer texts are no numbers; keeps every conversion cheap
MAX_EXPONENT = 300  # 1e300 is read, 1e301 is not: a Fraction stores the whole integer

_UNSIGNED = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_DECIMAL = re.compile(rf"(?P<figures>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}}))?")
# 1 000: blanks between groups of exactly three digits. Not 4 100/3, which may mean a mixed number.
_SPACED_GROUPS = re.compile(
    r"(?<![0-9.,/])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9/,]| ?\\[dt]?frac)"
)
_SPACE = re.compile(r"\\[,;: ]|\s")
_RATIO = re.compile(r"(?:(?P<whole>[0-9]+) +)?(?P<over>[0-9]+) */ *(?P<under>[0-9]+)")
_FRAC = re.compile(
    r"(?:(?P<whole>[0-9]+) *)?\\[dt]?frac *(?:\{ *(?P<minus>-?) *(?P<over>[0-9]+) *\} *\{ *(?P<under>[0-9]+) *\}"
    r"|(?P<over1>[0-9]) *(?P<under1>[0-9]))"
)
_PERCENT = re.compile(r"(?: *\\?%| +per ?cent)$", re.IGNORECASE)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_INLINE = re.compile(rf"(?<![0-9A-Za-z.,/])[-+]?(?:{_UNSIGNED})(?![0-9A-Za-z])")


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction  # already divided by 100 where a percent sign was written
    percent: bool


def read_number(text: str) -> Number | None:
    r"""Reads a whole text as one number.

    Read are: an optional sign (ASCII or U+2212), integers with or without thousands commas or blanks, decimals,
    exponents, `a/b`, `\frac{a}{b}` (also \dfrac, \tfrac), mixed numbers `n a/b` and `n\frac{a}{b}` (the sign
    covers the whole of it, and a < b is required: 4 10/3 is not a mixed number), a percent sign, dollar
    signs around the whole. LaTeX spaces are blanks; blanks join digits only between groups of three (1 000).
    Everything else is None.
    """
    if len(text) > MAX_CHARS:
        return None
    text = text.strip()
    for left, right in _WRAPPERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
            break
    text = text.replace("\u2212", "-").replace("{,}", ",").replace(r"\!", "")
    text = without_spaced_groups(text)
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()]
    sign = 1
    if text[:1] in ("-", "+"):
        sign = -1 if text[0] == "-" else 1
        text = text[1:].lstrip()
    value = _unsigned(text)
    if value is None:
        return None
    return Number(sign * value / (100 if percent else 1), bool(percent))


def without_spaced_groups(text: str) -> str:
    r"""The text with every run of white space and LaTeX spaces (`\,` `\ ` …) as one blank, none at the ends, and none
    between the groups of three digits of a number (1 000 is 1000; 1 00 and 4 10/3 stay)."""
    text = " ".join(_SPACE.sub(" ", text).split())
    return _SPACED_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)


def _unsigned(text: str) -> Fraction | None:
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        exponent = int(decimal["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        figures = decimal["figures"].replace(",", "")
        whole, _, fraction = figures.partition(".")
        return Fraction(int((whole + fraction) or "0"), 1) * Fraction(10) ** (exponent - len(fraction))
    for pattern in (_RATIO, _FRAC):
        match = pattern.fullmatch(text)
        if not match:
            continue
        named = match.groupdict()
        over, under = int(named["over"] or named["over1"]), int(named["under"] or named["under1"])
        if under == 0:
            return None
        part = Fraction(over, under)
        if named["whole"] is None:
            return -part if named.get("minus") else part
        if over >= under or named.get("minus"):
            return None
        if pattern is _RATIO and named["over"].startswith("0"):
            return None  # 1 000/3: a thousand thirds as likely as one and no thirds
        return int(named["whole"]) + part
    return None


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number (percent divided by 100), else None. See `read_number`."""
    number = read_number(text)
    return None if number is None else number.value


def numbers_equal(a: str, b: str, *, percent_asked: bool = False) -> bool | None:
    """Whether two texts are the same number; symmetric. None when one of them is not a number.

    Args:
      a, b: texts, each one number.
      percent_asked: the question asks for a percentage, so a bare 35 and 35% are the same answer.
    """
    first, second = read_number(a), read_number(b)
    if first is None or second is None:
        return None
    if first.value == second.value:
        return True
    if percent_asked and first.percent != second.percent:
        marked, bare = (first, second) if first.percent else (second, first)
        return marked.value * 100 == bare.value
    return False


def find_numbers(text: str, *, limit: int = 1000) -> list[Fraction]:
    """Every plain number (integer or decimal) that stands by itself in a text, in order, at most `limit`."""
    found = []
    for match in _INLINE.finditer(text.replace("\u2212", "-")):
        value = parse_number(match.group())
        if value is not None:
            found.append(value)
        if len(found) == limit:
            break
    return found
