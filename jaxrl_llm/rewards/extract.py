r"""Finding the answer inside a completion.

Every function is linear in the length of the text, never recursive and never evaluates anything, because
the text is written by a policy that is paid for finding holes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = [
    "THINKING_TAGS",
    "after_thinking",
    "answer_line",
    "answer_tag",
    "first_line",
    "is_thinking_tag",
    "last_boxed",
    "last_line",
    "mask_code_fences",
    "opens_thinking",
    "small",
]

_BOX = re.compile(r"\\boxed[ \t\n]*\{")
_SMALL = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def small(text: str) -> str:
    """The text with A to Z in small letters; every position stays, as it would not with `str.lower`."""
    return text.translate(_SMALL)


def first_line(text: str) -> str:
    """The text up to the first line break, without surrounding blanks."""
    return re.split(r"[\r\n]", text, maxsplit=1)[0].strip()


def last_line(text: str) -> str:
    """The last line that is not blank, without surrounding blanks; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# What models put around thinking: DeepSeek and Qwen, others after them, Magistral, Kimi, Seed.
THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<seed:think>", "</seed:think>"),
)


def _tag_pattern(tags: Iterable[str]) -> re.Pattern[str]:
    """Any of the tags, whatever their case and the blanks inside their brackets."""
    spaced = (rf"{re.escape(t[0])}\s*{re.escape(t[1:-1])}\s*{re.escape(t[-1])}" for t in tags)
    return re.compile("|".join(spaced), re.IGNORECASE | re.ASCII)


_OPENING, _CLOSING = (_tag_pattern(tags) for tags in zip(*THINKING_TAGS, strict=True))


def is_thinking_tag(text: str) -> bool:
    """Whether a text is a tag that opens or closes thinking, and nothing else."""
    return any(pattern.fullmatch(text) for pattern in (_OPENING, _CLOSING))


def opens_thinking(text: str) -> str:
    """The opening tag of thinking that a text ends with (white space after it apart), "" if it does not."""
    text = text.rstrip()
    for match in _OPENING.finditer(text, max(0, len(text) - 64)):
        if match.end() == len(text):
            return match[0]
    return ""


def after_thinking(text: str, *, opened: bool = False, tags: tuple[str, str] | None = None) -> str | None:
    """The part of a completion that may be graded when the model thinks aloud first.

    Only what follows the last closing tag counts, and thinking that is opened again after it does not. A
    text without any tag is returned whole, so that models that do not think are graded too. Tags match whatever
    their case.

    Args:
      text: the sampled text.
      opened: the prompt has already opened the thinking, so a text without a closing tag is all thought.
      tags: (opening, closing); default: any of `THINKING_TAGS`.

    Returns:
      The gradable part, or None when the thinking was never closed.
    """
    opening, closing = (
        (_OPENING, _CLOSING) if tags is None else (_tag_pattern(tags[:1]), _tag_pattern(tags[1:]))
    )
    start = max((match.end() for match in closing.finditer(text)), default=-1)
    if start >= 0:
        again = opening.search(text, start)
        return text[start : None if again is None else again.start()]
    return None if opened or opening.search(text) else text


def answer_line(text: str) -> str:
    """The first line of a completion; of one that begins with thinking, the first line that follows it ("" if it was
    never closed)."""
    if _OPENING.match(text.lstrip()) is None:
        return first_line(text)
    return first_line((after_thinking(text) or "").lstrip())


def last_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{…}`, with balanced braces, stripped.

    `\{` and `\}` are literal text. When the last box is not closed there is no answer: the text was cut
    there, and an earlier box is one that the writer went on from. An empty box is no answer either.

    Returns:
      The contents, or None.
    """
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth, at = 1, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1  # whatever follows a backslash is no brace of the markup
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start:at].strip() or None
        at += 1
    return None


def mask_code_fences(text: str) -> str:
    """The text with every character inside ``` … ``` (fences included) replaced by a blank.

    Positions are kept, so that a match in the masked text can be cut out of the original. A fence that is
    never closed reaches to the end.
    """
    pieces = text.split("```")
    masked = []
    for index, piece in enumerate(pieces):
        masked.append(" " * len(piece) if index % 2 else piece)
    return "   ".join(masked)


def answer_tag(text: str, tag: str = "answer") -> str | None:
    """The contents of the last complete `<answer>…</answer>`, stripped; tags inside code fences do not count, and
    the case of a tag does not matter.

    Returns:
      The contents ("" if the block is empty), or None when there is no complete block.
    """
    masked = small(mask_code_fences(text))
    opening, closing = small(f"<{tag}>"), small(f"</{tag}>")
    end = masked.rfind(closing)
    if end < 0:
        return None
    start = masked.rfind(opening, 0, end)
    if start < 0:
        return None
    return text[start + len(opening) : end].strip()
