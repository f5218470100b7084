"""Text that is streamed: whole characters, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxrl_llm.tokens.stream import TextStream
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["Deltas"]


class Deltas:
    """The text of one completion in pieces that add up to `Completion.text`.

    Held back are the bytes of a character that is not complete, and an end of the text with which a stop string
    could begin.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._stream = TextStream(tokenizer)
        self._tokens: list[int] = []  # until the first text
        self._held = ""
        self._begun = False
        self._given = 0  # characters
        self._tail = ""  # of what was given, to check the end against

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        for token in tokens:
            if not self._begun:
                self._tokens.append(int(token))
            self._held += self._stream.push(int(token))
        if not self._begun and self._held:
            self._begun = True
            # Tokenizers made of word pieces drop the space that the first word brings.
            if self._held.startswith(" ") and not self._tokenizer.decode(self._tokens).startswith(" "):
                self._held = self._held[1:]
        ready = len(self._held) - max((_overlap(self._held, s) for s in self._stop), default=0)
        new, self._held = self._held[:ready], self._held[ready:]
        return self._give(new)

    def finish(self, text: str) -> str:
        """The rest of the whole text, which is cut before the stop string.

        Raises:
          RuntimeError: what was given is not how the text begins.
        """
        if len(text) < self._given or not text[: self._given].endswith(self._tail):
            raise RuntimeError("stream: the text that was sent is not how the completion begins.")
        return self._give(text[self._given :])

    def _give(self, new: str) -> str:
        self._given += len(new)
        self._tail = (self._tail + new)[-64:]
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
