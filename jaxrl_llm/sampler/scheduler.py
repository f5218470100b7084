"""Continuous batching over fixed slots: who runs, on which pages, and who has to wait.

Pure host logic over a `PageAllocator`; it decides, the engine carries out. Decisions depend on the
requests, on the sampled tokens and on when requests come, never on time.

- The prompt of a group is a `Prefix`: its full pages are shared by all its rows (one reference each), its
  last, partly filled page is a template that each row copies before it writes. The newest token of a
  prompt is not part of the prefix: the first decode step of each row feeds it. Full pages that another prompt
  begins with come from the `PrefixCache`.
- A row is placed when a slot is free and the pages for its next dispatch are; it runs once its prefix is filled,
  which can take several turns of the engine while other rows decode.
- Rows wait in the order of priority (higher first) and arrival. Preempted rows come before those that have not
  started, unless these have a higher priority. A row for which there is no slot or too few pages holds up all that
  come after it, so that large ones get their turn. One that waits only until another row's prompt is filled, since
  both begin alike, does not: those after it may start in the slots that it leaves over.
- When a running row needs a page and none is free, prefixes without a placed row and pages that only the cache
  holds are dropped (prefill is a pure function of the prompt, so computing one again gives the same bits), then
  the placed row that comes last in that order is preempted, and waits at least until the next plan. The first one
  therefore always gets on.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.sampler.paged_cache import PageAllocator, pages_for
from jaxrl_llm.sampler.prefix_cache import PrefixCache, page_names
from jaxrl_llm.types import StopReason

__all__ = ["Plan", "Prefix", "Row", "Scheduler"]


@dataclasses.dataclass(eq=False)
class Prefix:
    """The prompt of one or several rows, without its last token."""

    key: tuple[bytes, bool, int]
    tokens: np.ndarray  # i32[P - 1]
    following: np.ndarray | None = None  # i32[P - 1], the token after each, when their log-probs are wanted
    top: int = 0  # likeliest tokens that are wanted beside each
    names: list[bytes] = dataclasses.field(default_factory=list)  # of its full pages
    pages: list[int] | None = None  # None: not in the cache
    filled: int = 0  # tokens whose K/V are in the pages
    unfinished: int = 0  # rows that still need it
    placed: int = 0
    served: bool = False  # a row has used it
    scores: list[Any] = dataclasses.field(default_factory=list)  # of `following`, chunk by chunk

    @property
    def scored(self) -> bool:
        """Whether log-probs of the prompt are wanted: all of it is computed, nothing comes from the cache."""
        return self.following is not None

    def shared(self, page_size: int) -> int:
        """Full pages, which rows use without copying."""
        return len(self.tokens) // page_size

    @property
    def ready(self) -> bool:
        """Whether rows can start from it."""
        return self.pages is not None and self.filled == len(self.tokens)


@dataclasses.dataclass(eq=False)
class Row:
    """One completion that is being sampled."""

    id: int
    prompt_tokens: np.ndarray  # i32[P]
    prefix: Prefix
    limit: int  # tokens, prompt included, at which the row ends
    key: np.ndarray  # u32[2]
    priority: int = 0  # higher runs first
    request: Any = None  # what the engine knows of it besides
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled
    shared: list[int] = dataclasses.field(default_factory=list)  # pages of the prefix that it holds
    own: list[int] = dataclasses.field(default_factory=list)  # pages after the shared ones
    saved: Any = None  # K/V of all its tokens in host memory while preempted, or None
    slot: int | None = None
    alone: bool = False  # has K/V of other weights than its prefix would get now: it never shares pages again
    attached: bool = False  # placed, and uses its prefix
    running: bool = False  # placed, and what it continues from is in its pages
    refill: int | None = (
        None  # placed, tokens that are in its pages again, of `position`; None: nothing to refill
    )
    order: int = -1  # of its first placement, kept when the row is preempted
    preemptions: int = 0
    stop: StopReason | None = None

    @property
    def position(self) -> int:
        """Position of the newest token = tokens whose K/V are in the pages."""
        return len(self.prompt_tokens) + len(self.tokens) - 1

    @property
    def newest(self) -> int:
        """The token that the next decode step feeds."""
        return self.tokens[-1] if self.tokens else int(self.prompt_tokens[-1])

    @property
    def pages(self) -> list[int]:
        """All its pages, in order."""
        return self.shared + self.own

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Sorts rows: the first one is served first."""
        return -self.priority, self.order < 0, self.order, self.id


@dataclasses.dataclass
class Plan:
    """What has changed before the next dispatch, in this order."""

    preempted: list[tuple[Row, int, list[int]]] = dataclasses.field(
        default_factory=list
    )  # slot, all its pages
    placed: list[Row] = dataclasses.field(default_factory=list)  # new and resumed rows, slot set
    grown: list[Row] = dataclasses.field(default_factory=list)  # placed rows with more pages than before
    hits: int = 0  # new rows whose prefix was in the cache
    reused: int = 0  # tokens of prefixes that were found in the cache


class Scheduler:
    """Decides before every dispatch. See the module docstring for the rules."""

    def __init__(
        self,
        *,
        slots: int,
        allocator: PageAllocator,
        page_size: int,
        steps: int,
        prefill_rows: int = 1,
        chunk_pages: int = 1,
        keep_prefixes: bool = False,
    ):
        """
        Args:
          steps: most tokens that a dispatch adds to a row.
          prefill_rows: prompts that one prefill call computes at the price of one.
          chunk_pages: pages that one prefill call fills of a prompt; found pages are used in such multiples.
          keep_prefixes: full pages of prompts outlive their rows, for prompts that begin alike.
        """
        self.allocator = allocator
        self.cache = PrefixCache(allocator)
        self._keep = keep_prefixes
        self._prefill_rows = prefill_rows
        self._chunk_pages = chunk_pages
        self._page_size = page_size
        self._steps = steps
        self._free_slots = list(range(slots - 1, -1, -1))
        self._waiting: list[Row] = []  # by rank
        self._prefixes: dict[tuple[bytes, bool, int], Prefix] = {}  # those that rows need
        self._resident: list[Prefix] = []  # oldest first
        self._placements = 0
        self.placed: list[Row] = []  # by rank

    @property
    def queued(self) -> int:
        """Rows that wait for a slot or for pages."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """True while a row is unfinished."""
        return bool(self.placed or self._waiting)

    @property
    def running(self) -> list[Row]:
        """Placed rows that decode."""
        return [row for row in self.placed if row.running]

    @property
    def filling(self) -> list[Prefix]:
        """Resident prefixes that are not complete yet, oldest first; a placed row waits for each, or soon will."""
        return [prefix for prefix in self._resident if not prefix.ready]

    def prefix(self, prompt: np.ndarray, scored: bool = False, top: int = 0) -> Prefix:
        """The prefix of a prompt i32[P]; equal prompts share one as long as a row needs it."""
        prompt = np.ascontiguousarray(prompt, np.int32)
        tokens, following = prompt[:-1], prompt[1:] if scored else None
        key = (prompt if scored else tokens).tobytes(), scored, top
        if key not in self._prefixes:
            names = page_names(tokens, self._page_size) if self._keep else []
            self._prefixes[key] = Prefix(key=key, tokens=tokens, following=following, top=top, names=names)
        return self._prefixes[key]

    def pages_needed(self, prompt_tokens: int, limit: int) -> int:
        """Pages that one row needs when it runs alone."""
        S = self._page_size
        return pages_for(prompt_tokens - 1, S) + pages_for(limit - 1, S) - (prompt_tokens - 1) // S

    def submit(self, row: Row) -> None:
        """Adds a row to the queue."""
        row.prefix.unfinished += 1
        bisect.insort(self._waiting, row, key=lambda r: r.rank)

    def adopt(self, row: Row, tokens: list[int], *, begun: bool) -> None:
        """Makes a row that has just been submitted one that was preempted elsewhere, after so many tokens."""
        self._waiting.remove(row)
        row.tokens = tokens
        if begun:
            row.order, self._placements = self._placements, self._placements + 1
        bisect.insort(self._waiting, row, key=lambda r: r.rank)

    def plan(self) -> Plan:
        """Allocates the pages of the next dispatch and says what has to be done."""
        plan = Plan()
        for row in list(self.placed):
            if row.slot is not None:  # not preempted for an earlier row
                self._grow(row, plan)
        kept = 0  # slots of rows that can start as soon as what they begin with is filled
        lost = {row for row, _, _ in plan.preempted}
        for row in list(self._waiting):
            # What has just been preempted is moved away when the plan is carried out. Until then it looks as if it
            # had to be computed again, which can take fewer pages and gives other bits.
            if len(self._free_slots) <= kept or row in lost:
                break
            found = self._beginning(row)
            if found is None:
                kept += 1
            elif self._place(row, found, plan):
                self._waiting.remove(row)
            else:
                break
        self._look_ahead(plan)
        self.placed.sort(key=lambda row: row.rank)
        if not self.placed and self.busy and not self.filling:
            raise RuntimeError(
                "scheduler: no row can run with an empty cache; a request is too large for it."
            )
        return plan

    def start(self, row: Row) -> tuple[int, int] | None:
        """Marks a placed row as running; (template, own page) to copy first, if its prefix ends within a page."""
        row.running, row.refill = True, None
        if row.tokens or not len(row.prefix.tokens) % self._page_size:
            return None
        if row.prefix.pages is None:
            raise RuntimeError("scheduler: a row starts without its prefix.")
        return row.prefix.pages[-1], row.own[0]

    def filled(self, prefix: Prefix, tokens: int) -> None:
        """So many more tokens of a prefix are in its pages; full pages can now be found by other prompts."""
        prefix.filled += tokens
        if self._keep and not prefix.scored and prefix.pages is not None:
            full = prefix.filled // self._page_size
            self.cache.add(prefix.names[:full], prefix.pages[:full])

    def keep(self, row: Row, tokens: np.ndarray) -> None:
        """Makes the full pages of a placed row findable, which hold the beginning of `tokens`."""
        names = page_names(tokens, self._page_size)[: len(row.pages)]
        self.cache.add(names, row.pages[: len(names)])

    def finish(self, row: Row) -> int:
        """Ends a placed row and gives back its pages; returns its slot."""
        slot = self._leave(row)
        self._forget(row)
        return slot

    def cancel(self, row: Row) -> int | None:
        """Ends a row that may be placed or wait; returns its slot if it had one."""
        if row.slot is not None:
            return self.finish(row)
        self._waiting.remove(row)
        row.saved = None
        self._forget(row)
        return None

    def preempt_all(self, *, running: bool) -> Plan:
        """Takes every placed row out of its slot, those that run only if asked to."""
        plan = Plan()
        for row in list(self.placed):
            if running or not row.running:
                self._preempt(row, plan)
        return plan

    def forget_pages(self) -> None:
        """No prefix that was computed so far is used again. Rows that run keep the pages that they hold.

        Placed rows that do not run yet must have been preempted before.
        """
        self.cache.clear()
        for row in self.placed:
            self._detach(row)
            row.alone = True
        for row in self._waiting:
            row.alone = row.saved is not None
        for prefix in list(self._resident):
            self._drop(prefix)

    # ------------------------------------------------------------------------------------- internals

    def _total(self, row: Row) -> int:
        """Pages that a row needs for its next dispatch."""
        # The last token of a row is never written to the pages, hence limit - 1.
        return pages_for(min(row.position + self._steps, row.limit - 1), self._page_size)

    def _grow(self, row: Row, plan: Plan) -> None:
        missing = self._total(row) - len(row.pages)
        if missing <= 0:
            return
        while not self._make_room(missing):
            victim = max(self.placed, key=lambda r: r.rank)
            self._preempt(victim, plan)
            if victim is row:
                return
        row.own += self.allocator.allocate(missing)
        plan.grown.append(row)

    def _by_itself(self, row: Row) -> bool:
        """Whether a row needs no prefix, since its K/V come back whole."""
        return row.saved is not None and (row.alone or not row.prefix.ready)

    def _beginning(self, row: Row) -> list[int] | None:
        """Pages that are there already for a prefix that has none; None: the row has to wait, see `_find`."""
        if row.prefix.pages is not None or self._by_itself(row):
            return []
        return self._find(row.prefix)

    def _place(self, row: Row, found: list[int], plan: Plan) -> bool:
        """Places a row whose prefix can begin with the pages `found`; False: there are too few pages."""
        prefix, S = row.prefix, self._page_size
        alone = self._by_itself(row)
        shared = 0 if alone else prefix.shared(S)
        own = max(0, self._total(row) - shared)
        settle = prefix.pages is None and not alone
        new = pages_for(len(prefix.tokens), S) - len(found) if settle else 0
        self.allocator.retain(found)  # not to be evicted for this very row
        if not alone:
            row.attached = True
            prefix.placed += 1  # keeps it from being dropped
        if not self._make_room(own + new):
            self.allocator.release(found)
            self._detach(row)
            return False
        if settle:
            self._settle(prefix, found, plan)
        plan.hits += bool(prefix.pages) and prefix.served and row.order < 0
        prefix.served = True
        row.shared = [] if alone else (prefix.pages or [])[:shared]
        self.allocator.retain(row.shared)
        row.own = self.allocator.allocate(own)
        if row.order < 0:
            row.order, self._placements = self._placements, self._placements + 1
        row.refill = shared * S if row.tokens and row.saved is None else None
        row.slot = self._free_slots.pop()
        bisect.insort(self.placed, row, key=lambda r: r.rank)
        plan.placed.append(row)
        return True

    def _find(self, prefix: Prefix) -> list[int] | None:
        """The pages that a prefix can begin with; None: what it can use next is being filled, so wait for that."""
        if prefix.scored:
            return []
        found = self.cache.find(prefix.names, self._chunk_pages)
        coming = prefix.names[len(found) : len(found) + self._chunk_pages]
        if len(coming) == self._chunk_pages and any(
            other.names[len(found) : len(found) + self._chunk_pages] == coming
            for other in self.filling
            if not other.scored
        ):
            return None
        return found

    def _settle(self, prefix: Prefix, found: list[int], plan: Plan) -> None:
        """Gives a prefix its pages: those that were found, which it takes over, and new ones."""
        prefix.pages = found + self.allocator.allocate(
            pages_for(len(prefix.tokens), self._page_size) - len(found)
        )
        prefix.filled = len(found) * self._page_size
        prefix.scores = []
        plan.reused += prefix.filled
        self._resident.append(prefix)

    def _look_ahead(self, plan: Plan) -> None:
        """Fills up the last prefill call with the prompts that come next, while pages are plentiful."""
        places = -len(self.filling) % self._prefill_rows
        for row in self._waiting:
            prefix = row.prefix
            new = pages_for(len(prefix.tokens), self._page_size)
            if not places or self.allocator.free - new < len(self.placed):
                break
            if prefix.pages is None and new and not row.tokens:
                found = self._find(prefix)
                if found is None:
                    continue
                self.allocator.retain(found)
                self._settle(prefix, found, plan)
                places -= 1

    def _make_room(self, pages: int) -> bool:
        """Drops what is idle, the oldest first, until `pages` pages are free; False if that is not enough."""
        if self.allocator.free >= pages:
            return True
        idle = [prefix for prefix in self._resident if not prefix.placed]
        held = {page for prefix in self._resident if prefix.placed for page in prefix.pages or ()}
        held |= {page for row in self.placed for page in row.pages}
        known = {page for prefix in idle for page in prefix.pages or ()} | set(self.cache.pages)
        if self.allocator.free + len(known - held) < pages:
            return False
        for prefix in idle:
            if self.allocator.free >= pages:
                break
            self._drop(prefix)
        self.cache.evict(pages - self.allocator.free)
        return self.allocator.free >= pages

    def _drop(self, prefix: Prefix) -> None:
        if prefix.pages is not None:
            self.allocator.release(prefix.pages)
            prefix.pages, prefix.filled = None, 0
            self._resident.remove(prefix)

    def _forget(self, row: Row) -> None:
        """One row less needs its prefix."""
        prefix = row.prefix
        prefix.unfinished -= 1
        if not prefix.unfinished:
            self._drop(prefix)
            self._prefixes.pop(prefix.key, None)

    def _preempt(self, row: Row, plan: Plan) -> None:
        pages, running = row.pages, row.running
        slot = self._leave(row)
        row.preemptions += running
        plan.preempted.append((row, slot, pages if running else []))
        bisect.insort(self._waiting, row, key=lambda r: r.rank)

    def _detach(self, row: Row) -> None:
        if row.attached:
            row.attached = False
            row.prefix.placed -= 1

    def _leave(self, row: Row) -> int:
        if row.slot is None:
            raise ValueError("scheduler: only a placed row can leave its slot.")
        self.allocator.release(row.pages)
        slot, row.slot, row.shared, row.own = row.slot, None, [], []
        row.running, row.refill = False, None
        self._detach(row)
        self.placed.remove(row)
        self._free_slots.append(slot)
        return slot
