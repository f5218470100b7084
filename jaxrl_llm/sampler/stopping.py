"""Stop strings, matched on the bytes of the sampled tokens, so that token boundaries do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["StopStrings", "bytes_of_tokens"]


def bytes_of_tokens(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes of every token; `tokenizer` has `vocab_size` and `token_bytes(id)`. Nothing for ids beyond its own."""
    known = min(vocab_size, tokenizer.vocab_size)
    return [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)


class StopStrings:
    """Finds stop strings in growing byte strings.

    A stop string counts where it ends within the sampled text, however the tokenizer has cut it. Every
    token that was sampled up to there is kept.
    """

    def __init__(self, stop: tuple[str, ...], token_bytes: Sequence[bytes]):
        """`token_bytes`: of every token of the vocabulary, see `bytes_of_tokens`."""
        self.strings = stop
        self._needles = [s.encode() for s in stop]
        self._bytes = token_bytes
        # Tokens that contain a stop string end a row wherever they appear: the device can tell by itself.
        self.complete = np.array([any(n in b for n in self._needles) for b in self._bytes], bool)

    def push(self, text: bytearray, token: int) -> bool:
        """Appends a token to `text`; True when a stop string now ends in that token."""
        before = len(text)
        text += self._bytes[token]
        return any(text.find(n, max(0, before - len(n) + 1)) >= 0 for n in self._needles)

    def cut(self, text: str, kept: str) -> str:
        """`text` up to the first stop string that ends after the prefix `kept`."""
        # Bytes that the last token completes to a character show as U+FFFD before it.
        begun = len(kept.rstrip("\ufffd"))
        ends = [text.find(s, max(0, begun - len(s) + 1)) for s in self.strings]
        ends = [end for end in ends if end >= 0]
        return text[: min(ends)] if ends else text
