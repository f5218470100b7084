"""Text that grows token by token: whole characters only, and stop strings across token boundaries."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["StopMatcher", "TextStream"]


class TextStream:
    """Text of a growing list of ids. A character whose bytes are still incomplete is held back.

    Args:
      skip_special: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """What has been given out so far."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        hidden = self._skip and self._tokenizer.is_special(token)
        new = "" if hidden else self._decoder.decode(self._tokenizer.token_bytes(token))
        self._parts.append(new)
        return new

    def finish(self) -> str:
        """The rest: U+FFFD for bytes that never became a character, else ""."""
        new = self._decoder.decode(b"", final=True)
        self._parts.append(new)
        return new


class StopMatcher:
    """Finds the first stop string in the text of a growing list of ids.

    It compares bytes, so a stop string may begin and end anywhere inside tokens, and control tokens count
    with the text that spells them. Work per token does not grow with the length of the text.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        if any(not s for s in stop):
            raise ValueError("stop strings must not be empty.")
        self._tokenizer = tokenizer
        self._stops = [s.encode() for s in stop]
        self._longest = max((len(s) for s in self._stops), default=0)
        self._bytes = bytearray()
        self._end: int | None = None  # bytes before the stop string

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been seen."""
        return self._end is not None

    @property
    def text(self) -> str:
        """The text before the stop string, or all of it."""
        return bytes(self._bytes[: self._end]).decode("utf-8", errors="replace")

    def push(self, token: int) -> bool:
        """Adds a token; True once the text contains a stop string."""
        start = max(0, len(self._bytes) - self._longest + 1)
        self._bytes += self._tokenizer.token_bytes(token)
        if self._end is None:
            found = [at for s in self._stops if (at := self._bytes.find(s, start)) >= 0]
            self._end = min(found, default=None)
        return self.stopped

    def push_all(self, tokens: Iterable[int]) -> int | None:
        """How many of these tokens it takes to reach a stop string (the last one included), or None."""
        for count, token in enumerate(tokens, 1):
            if self.push(token):
                return count
        return None
