"""Continuous batching over fixed slots: who runs, on which pages, and who has to wait.

Pure host logic over a `PageAllocator`; it decides, the sampler carries out. Decisions depend on the
requests and on the sampled tokens only, never on time.

- The prompt of a group is a `Prefix`: its full pages are shared by all its rows (one reference each), its
  last, partly filled page is a template that each row copies before it writes. The newest token of a
  prompt is not part of the prefix: the first decode step of each row feeds it.
- A row is admitted when a slot is free and the pages for its next dispatch are. Preempted rows come first.
- When a running row needs a page and none is free, prefixes without a running row are dropped (prefill
  is a pure function of the prompt, so computing one again gives the same bits), then the row admitted
  last is preempted. The row admitted first therefore always gets on.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sampler.paged_cache import PageAllocator, pages_for
from jaxrl_llm.types import StopReason

__all__ = ["Plan", "Prefix", "Row", "Scheduler", "distinct_prefixes"]


@dataclasses.dataclass(eq=False)
class Prefix:
    """The prompt of one or several rows, without its last token."""

    tokens: np.ndarray  # i32[P - 1]
    pages: list[int] | None = None  # None: not in the cache
    unfinished: int = 0  # rows that still need it
    running: int = 0
    served: bool = False  # a row has used it

    def shared(self, page_size: int) -> int:
        """Full pages, which rows use without copying."""
        return len(self.tokens) // page_size


@dataclasses.dataclass(eq=False)
class Row:
    """One completion that is being sampled."""

    prompt: int  # index of the prompt in the call
    index: int  # which of its n samples
    prompt_tokens: np.ndarray  # i32[P]
    prefix: Prefix
    limit: int  # tokens, prompt included, at which the row ends
    key: np.ndarray  # u32[2]
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled
    logprobs: list[float] = dataclasses.field(default_factory=list)
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)  # i32[K] each
    top_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)  # f32[K] each
    support_ids: list[np.ndarray] = dataclasses.field(default_factory=list)  # i32[K] each
    support_cut: list[bool] = dataclasses.field(default_factory=list)
    text: bytearray = dataclasses.field(default_factory=bytearray)  # of the sampled tokens, for stop strings
    own: list[int] = dataclasses.field(default_factory=list)  # pages after the shared ones
    saved: Any = None  # (k, v) of `own` in host memory while preempted, or None
    slot: int | None = None
    order: int = -1  # admission number, kept when the row is preempted
    preemptions: int = 0
    stop: StopReason | None = None
    started: float = 0.0  # seconds since the call began
    ended: float = 0.0

    @property
    def position(self) -> int:
        """Position of the newest token = tokens whose K/V are in the pages."""
        return len(self.prompt_tokens) + len(self.tokens) - 1

    @property
    def newest(self) -> int:
        """The token that the next decode step feeds."""
        return self.tokens[-1] if self.tokens else int(self.prompt_tokens[-1])


@dataclasses.dataclass
class Plan:
    """What has to happen before the next dispatch, in this order."""

    preempted: list[tuple[Row, int, list[int]]] = dataclasses.field(default_factory=list)  # slot, own pages
    prefilled: list[Prefix] = dataclasses.field(default_factory=list)
    resumed: list[Row] = dataclasses.field(default_factory=list)  # their `own` pages must be filled again
    copied: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (template, own page)
    admitted: list[Row] = dataclasses.field(default_factory=list)  # new and resumed rows, slot set
    grown: list[Row] = dataclasses.field(default_factory=list)  # running rows with more pages than before
    hits: int = 0  # new rows whose prefix was in the cache


class Scheduler:
    """Decides before every dispatch. See the module docstring for the rules."""

    def __init__(
        self, *, slots: int, allocator: PageAllocator, page_size: int, steps: int, prefill_rows: int = 1
    ):
        """
        Args:
          steps: most tokens that a dispatch adds to a row.
          prefill_rows: prompts that one prefill call computes at the price of one.
        """
        self.allocator = allocator
        self._prefill_rows = prefill_rows
        self._page_size = page_size
        self._steps = steps
        self._free_slots = list(range(slots - 1, -1, -1))
        self._waiting: deque[Row] = deque()
        self._preempted: list[Row] = []
        self._resident: list[Prefix] = []  # oldest first
        self._admissions = 0
        self.running: list[Row] = []  # by admission number

    @property
    def queued(self) -> int:
        """Rows that wait for a slot or for pages."""
        return len(self._waiting) + len(self._preempted)

    @property
    def busy(self) -> bool:
        """True while a row is unfinished."""
        return bool(self.running or self._waiting or self._preempted)

    def pages_needed(self, prompt_tokens: int, limit: int) -> int:
        """Pages that one row needs when it runs alone."""
        S = self._page_size
        return pages_for(prompt_tokens - 1, S) + pages_for(limit - 1, S) - (prompt_tokens - 1) // S

    def submit(self, row: Row) -> None:
        """Appends a row to the queue."""
        row.prefix.unfinished += 1
        self._waiting.append(row)

    def plan(self) -> Plan:
        """Allocates the pages of the next dispatch and says what has to be done."""
        plan = Plan()
        for row in list(self.running):
            if row.slot is not None:  # not preempted for an older row
                self._grow(row, plan)
        while self._free_slots and (self._preempted or self._waiting):
            row = self._preempted[0] if self._preempted else self._waiting[0]
            if not self._admit(row, plan):
                break
            if self._preempted:
                self._preempted.pop(0)
            else:
                self._waiting.popleft()
        self._look_ahead(plan)
        self.running.sort(key=lambda row: row.order)
        if not self.running and self.busy:
            raise RuntimeError(
                "scheduler: no row can run with an empty cache; a request is too large for it."
            )
        return plan

    def finish(self, row: Row) -> int:
        """Ends a running row and gives back its pages; returns its slot."""
        slot = self._leave(row)
        row.prefix.unfinished -= 1
        if not row.prefix.unfinished:
            self._drop(row.prefix)
        return slot

    # ------------------------------------------------------------------------------------- internals

    def _target(self, row: Row) -> int:
        """Own pages that a row needs for its next dispatch."""
        # The last token of a row is never written to the pages, hence limit - 1.
        tokens = min(row.position + self._steps, row.limit - 1)
        return max(0, pages_for(tokens, self._page_size) - row.prefix.shared(self._page_size))

    def _grow(self, row: Row, plan: Plan) -> None:
        missing = self._target(row) - len(row.own)
        if missing <= 0:
            return
        while not self._make_room(missing):
            victim = max(self.running, key=lambda r: r.order)
            self._preempt(victim, plan)
            if victim is row:
                return
        row.own += self.allocator.allocate(missing)
        plan.grown.append(row)

    def _admit(self, row: Row, plan: Plan) -> bool:
        prefix, S = row.prefix, self._page_size
        own = self._target(row)
        new = 0 if prefix.pages is not None else pages_for(len(prefix.tokens), S)
        prefix.running += 1  # keeps it from being dropped
        if not self._make_room(own + new):
            prefix.running -= 1
            return False
        if prefix.pages is None:
            prefix.pages = self.allocator.allocate(new)
            self._resident.append(prefix)
            if new:
                plan.prefilled.append(prefix)
        plan.hits += bool(prefix.pages) and prefix.served and row.order < 0
        prefix.served = True
        shared = prefix.shared(S)
        self.allocator.retain(prefix.pages[:shared])
        row.own = self.allocator.allocate(own)
        if row.order >= 0:
            plan.resumed.append(row)
        else:
            row.order, self._admissions = self._admissions, self._admissions + 1
            if len(prefix.tokens) % S:
                plan.copied.append((prefix.pages[shared], row.own[0]))
        row.slot = self._free_slots.pop()
        self.running.append(row)
        plan.admitted.append(row)
        return True

    def _look_ahead(self, plan: Plan) -> None:
        """Fills up the last prefill call with the prompts that come next, while pages are plentiful."""
        places = -len(plan.prefilled) % self._prefill_rows
        for row in self._waiting:
            new = pages_for(len(row.prefix.tokens), self._page_size)
            if not places or self.allocator.free - new < len(self.running):
                break
            if row.prefix.pages is None and new:
                row.prefix.pages = self.allocator.allocate(new)
                self._resident.append(row.prefix)
                plan.prefilled.append(row.prefix)
                places -= 1

    def _make_room(self, pages: int) -> bool:
        """Drops idle prefixes, the oldest first, until `pages` pages are free; False if that is not enough."""
        idle = [prefix for prefix in self._resident if not prefix.running]
        if self.allocator.free + sum(len(prefix.pages or ()) for prefix in idle) < pages:
            return False
        for prefix in idle:
            if self.allocator.free >= pages:
                break
            self._drop(prefix)
        return True

    def _drop(self, prefix: Prefix) -> None:
        if prefix.pages is not None:
            self.allocator.release(prefix.pages)
            prefix.pages = None
            self._resident.remove(prefix)

    def _preempt(self, row: Row, plan: Plan) -> None:
        own = row.own
        slot = self._leave(row)
        row.preemptions += 1
        plan.preempted.append((row, slot, own))
        self._preempted.append(row)
        self._preempted.sort(key=lambda r: r.order)

    def _leave(self, row: Row) -> int:
        if row.slot is None or row.prefix.pages is None:
            raise ValueError("scheduler: only a running row can leave its slot.")
        self.allocator.release(row.prefix.pages[: row.prefix.shared(self._page_size)])
        self.allocator.release(row.own)
        slot, row.slot, row.own = row.slot, None, []
        row.prefix.running -= 1
        self.running.remove(row)
        self._free_slots.append(slot)
        return slot


def distinct_prefixes(prompts: Sequence[np.ndarray]) -> list[Prefix]:
    """One `Prefix` for each prompt; equal prompts share one."""
    known: dict[bytes, Prefix] = {}
    return [
        known.setdefault(np.ascontiguousarray(p[:-1], np.int32).tobytes(), Prefix(tokens=np.asarray(p[:-1])))
        for p in prompts
    ]
