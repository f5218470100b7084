"""Pages of prompts that were computed before, found again by what they hold.

A page is named by a hash of its tokens and of all tokens before it. Only pages that prefill computed from whole
chunks are kept, and they are reused in whole chunks: prefill of the rest then runs the same chunks that it would
have run without the cache, so that a hit changes no bit of what is sampled.

A cache belongs to one set of weights: whoever swaps weights clears it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.sampler.paged_cache import PageAllocator

__all__ = ["PrefixCache", "page_names"]


def page_names(tokens: np.ndarray, page_size: int) -> list[bytes]:
    """The name of each full page of a sequence, 16 bytes."""
    names: list[bytes] = []
    before = b""
    data = np.ascontiguousarray(tokens, "<i4")
    for end in range(page_size, len(data) + 1, page_size):
        before = hashlib.blake2b(before + data[end - page_size : end].tobytes(), digest_size=16).digest()
        names.append(before)
    return names


class PrefixCache:
    """Holds one reference to each page that it knows; gives up the least recently used ones on request."""

    def __init__(self, allocator: PageAllocator):
        self._allocator = allocator
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # the next to go first
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, names: Sequence[bytes], multiple: int = 1) -> list[int]:
        """The pages of the longest known beginning, a multiple of so many pages. The caller retains them."""
        pages: list[int] = []
        for name in names:
            if name not in self._pages:
                break
            pages.append(self._pages[name])
        pages = pages[: len(pages) // multiple * multiple]
        # The first page of a sequence goes last: what comes after it is of no use without it.
        for name in reversed(names[: len(pages)]):
            self._pages.move_to_end(name)
        return pages

    def add(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keeps pages under their names, and one reference to each that is new."""
        for name, page in zip(reversed(names), reversed(pages), strict=True):
            if name not in self._pages:
                self._allocator.retain([page])
                self._pages[name] = page
            self._pages.move_to_end(name)

    @property
    def pages(self) -> list[int]:
        """The pages that it holds, the next to go first."""
        return list(self._pages.values())

    def evict(self, count: int) -> None:
        """Frees up to `count` pages that nobody else holds, the least recently used first."""
        for name, page in list(self._pages.items()):
            if count <= 0:
                return
            if self._allocator.references(page) == 1:
                del self._pages[name]
                self._allocator.release([page])
                self.evictions += 1
                count -= 1

    def clear(self) -> None:
        """Forgets everything; pages that rows still hold stay theirs."""
        for page in self._pages.values():
            self._allocator.release([page])
        self._pages.clear()
