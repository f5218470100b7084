r"""Numbers in text, compared exactly.

Nothing is evaluated: a number is read by one linear pattern or it is not a number. Powers, factorials and
nested expressions are therefore never computed, however small they look; they are equal to a gold answer
only as strings. A power of ten with a written exponent is not a computation but a way of writing a number
(1.5 \times 10^{3} is 1.5e3). Values are `Fraction`s, so 0.5 equals 1/2 and 0.333 does not equal 1/3.

Percent policy: `x%`, `x\%` and `x percent` are the number x/100, on both sides alike. So 35% equals 0.35
and neither equals 35; 100% equals 1. Where the question itself asks for a percentage, pass
`percent_asked=True`: then a bare 35 also equals 35%.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

__all__ = [
    "Number",
    "find_numbers",
    "numbers_equal",
    "parse_number",
    "plain_text",
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
_SPACE = re.compile(r"\\[,;: ]|(?<=[0-9])~(?=[0-9\\])|\s")
_PART = r"[0-9]+(?:\.[0-9]+)?"
_RATIO = re.compile(rf"(?:(?P<whole>[0-9]+) +)?(?P<over>{_PART}) */ *(?P<under>-?{_PART})")
_FRAC = re.compile(
    rf"(?:(?P<whole>[0-9]+) *)?\\[cdt]?frac *(?:\{{ *(?P<over>-?{_PART}) *\}}|(?P<over1>[0-9]))"
    rf" *(?:\{{ *(?P<under>-?{_PART}) *\}}|(?P<under1>[0-9]))"
)
_SCIENTIFIC = re.compile(
    rf"(?:(?P<figures>{_UNSIGNED}) *(?:\\times|\\cdot|[\u00d7\u00b7*x]) *)?"
    r"10 *(?:\^|\*\*) *(?:\{ *(?P<exponent>[-+]?[0-9]{1,4}) *\}|(?P<exponent1>[-+]?[0-9]{1,4}))"
)
_PERCENT = re.compile(r"(?: *\\?%| +(?:per ?cent|pct))$", re.IGNORECASE)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_INLINE = re.compile(rf"(?<![0-9A-Za-z.,/])[-+]?(?:{_UNSIGNED})(?![0-9A-Za-z])")

# Characters that stand for others: minus signs, fraction slashes, percent signs, separators of Arabic and full-width
# text; and characters of no width, which stand for nothing.
_SAME = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\u2044\u2215\uff0f", "/")
    | dict.fromkeys("\u066a\ufe6a\uff05", "%")
    | {"\u066b": ".", "\uff0e": ".", "\u066c": ",", "\uff0c": ",", "\uff0b": "+"}
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
)
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # one character for a fraction
_SWISS_GROUP = re.compile(r"(?<=[0-9])['\u2019](?=[0-9]{3}(?![0-9]))")
_STYLED = re.compile(r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|textrm|mbox)[ ]?\{([^{}]*)\}")


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction  # already divided by 100 where a percent sign was written
    percent: bool


def plain_text(text: str) -> str:
    r"""The text in the characters that numbers are read from; every other character stays.

    Digits of any script are 0 to 9, minus signs and slashes are ASCII, \u00bd is " 1/2", 1'234 is 1,234, and what
    stands inside `\text{\u2026}` and its like stands by itself.
    """
    text = _STYLED.sub(r"\1", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]), text).translate(_SAME)
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    return _SWISS_GROUP.sub(",", text)


def read_number(text: str) -> Number | None:
    r"""Reads a whole text as one number.

    Read are, after `plain_text`: an optional sign, integers with or without thousands commas or blanks, decimals,
    exponents (1e3, 1 \times 10^{3}), `a/b`, `\frac{a}{b}` (also \dfrac, \tfrac), mixed numbers `n a/b` and
    `n\frac{a}{b}` (the sign covers the whole of it, and a < b is required: 4 10/3 is not a mixed number), a percent
    sign, dollar signs around the whole. LaTeX spaces are blanks; blanks join digits only between groups of three
    (1 000). Everything else is None.
    """
    if len(text) > MAX_CHARS:
        return None
    text = plain_text(text).strip()
    for left, right in _WRAPPERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
            break
    text = text.replace("{,}", ",").replace(r"\!", "")
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


def _decimal(figures: str, exponent: int) -> Fraction | None:
    """figures · 10^exponent; None beyond MAX_EXPONENT."""
    if abs(exponent) > MAX_EXPONENT:
        return None
    whole, _, fraction = figures.replace(",", "").partition(".")
    return Fraction(int((whole + fraction) or "0"), 1) * Fraction(10) ** (exponent - len(fraction))


def _unsigned(text: str) -> Fraction | None:
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        return _decimal(decimal["figures"], int(decimal["exponent"] or 0))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return _decimal(scientific["figures"] or "1", int(scientific["exponent"] or scientific["exponent1"]))
    for pattern in (_RATIO, _FRAC):
        match = pattern.fullmatch(text)
        if not match:
            continue
        named = match.groupdict()
        over, under = named["over"] or named["over1"], named["under"] or named["under1"]
        if Fraction(under) == 0:
            return None
        part = Fraction(over) / Fraction(under)
        if named["whole"] is None:
            return part
        if not (over.isdigit() and under.isdigit()) or part >= 1:
            return None
        if pattern is _RATIO and over.startswith("0"):
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
