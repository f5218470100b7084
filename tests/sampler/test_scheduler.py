"""The scheduler alone: every row ends, nothing leaks, the first row always gets on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampler.paged_cache import PageAllocator, pages_for
from jaxrl_llm.sampler.prefix_cache import PrefixCache, page_names
from jaxrl_llm.sampler.scheduler import Row, Scheduler


def make_row(scheduler, id, prompt, limit, priority=0):
    return Row(
        id=id,
        prompt_tokens=prompt,
        prefix=scheduler.prefix(prompt),
        limit=limit,
        key=np.zeros(2, np.uint32),
        priority=priority,
    )


def carry_out(scheduler, plan, *, move, fill=None):
    """What an engine does with a plan: saves, fills (at most `fill` tokens of each prompt) and starts."""
    for row, _, pages in plan.preempted:
        if pages and move:
            row.saved = list(pages)
    for prefix in list(scheduler.filling):
        left = len(prefix.tokens) - prefix.filled
        scheduler.filled(prefix, left if fill is None else min(fill, left))
    copies = []
    for row in scheduler.placed:
        if row.running:
            continue
        if row.saved is None and not row.prefix.ready:
            continue
        row.saved = None
        copies.append(scheduler.start(row))
    return [copy for copy in copies if copy is not None]


def check(scheduler, allocator, *, slots, page_size, steps):
    """No page has two owners, every row has room for its next dispatch."""
    assert len(scheduler.placed) <= slots
    assert len({row.slot for row in scheduler.placed}) == len(scheduler.placed)
    owners = {}
    for row in scheduler.placed:
        assert len(row.pages) == len(set(row.pages)) and 0 not in row.pages
        assert len(row.pages) * page_size >= min(row.position + steps, row.limit - 1)
        for page in row.own:
            assert owners.setdefault(page, row) is row and allocator.references(page) == 1
        for page in row.shared:
            assert allocator.references(page) >= 2 or row.alone or row.prefix.pages is None
            assert not isinstance(owners.get(page), Row)


def simulate(
    prompts,
    n,
    new_tokens,
    *,
    slots,
    pages,
    page_size,
    steps,
    move=True,
    keep=False,
    chunk_pages=1,
    slow_fill=False,
):
    """Runs rows that end after new_tokens tokens; checks the invariants of every plan."""
    allocator = PageAllocator(pages)
    scheduler = Scheduler(
        slots=slots,
        allocator=allocator,
        page_size=page_size,
        steps=steps,
        keep_prefixes=keep,
        chunk_pages=chunk_pages,
    )
    rows = [
        make_row(scheduler, i * n + j, p, len(p) + new_tokens)
        for i, p in enumerate(prompts)
        for j in range(n)
    ]
    if max(scheduler.pages_needed(len(r.prompt_tokens), r.limit) for r in rows) > allocator.capacity:
        return None
    for row in rows:
        scheduler.submit(row)
    preemptions = reused = 0
    for _ in range(10_000):
        if not scheduler.busy:
            break
        first = min((r.order for r in scheduler.placed), default=None)
        plan = scheduler.plan()
        preemptions += sum(bool(pages) for _, _, pages in plan.preempted)
        reused += plan.reused
        assert all(row.order != first for row, _, _ in plan.preempted)
        assert not {row.id for row, _, _ in plan.preempted} & {row.id for row in plan.placed}
        # What was moved away is brought back, it is not computed again.
        assert not move or all(row.refill is None for row in plan.placed)
        carry_out(scheduler, plan, move=move, fill=chunk_pages * page_size if slow_fill else None)
        check(scheduler, allocator, slots=slots, page_size=page_size, steps=steps)
        for row in scheduler.running:
            row.tokens += [1] * min(steps, row.limit - row.position - 1)
            if row.position + 1 == row.limit:
                scheduler.finish(row)
    assert not scheduler.busy and allocator.used == len(scheduler.cache)
    scheduler.cache.clear()
    assert allocator.used == 0
    assert all(len(r.tokens) == new_tokens for r in rows)
    return preemptions, reused


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    n=st.integers(1, 5),
    new_tokens=st.integers(1, 40),
    slots=st.integers(2, 6),
    pages=st.integers(3, 40),
    page_size=st.sampled_from([1, 3, 8]),
    steps=st.integers(1, 9),
    move=st.booleans(),
    keep=st.booleans(),
    chunk_pages=st.sampled_from([1, 2]),
    slow_fill=st.booleans(),
)
def test_every_row_ends_and_no_page_leaks(lengths, n, new_tokens, **options):
    # Long prompts begin differently, short ones alike.
    prompts = [np.arange(k) + 100 * i * (k > 20) for i, k in enumerate(lengths)]
    simulate(prompts, n, new_tokens, **options)


def test_a_row_without_its_prefix_is_not_placed_where_it_was_just_preempted():
    beginning = np.arange(32)
    prompts = [np.append(beginning, 100 * i + np.arange(n)) for i, n in enumerate((15, 7, 7), 1)]
    options = dict(slots=4, pages=18, page_size=8, steps=8, keep=True, chunk_pages=2)
    assert simulate(prompts, 1, 41, **options)[0] > 1


def test_a_tight_cache_preempts_and_still_finishes():
    prompts = [np.arange(9) + i for i in range(4)]
    needed = pages_for(9 - 1, 4) + pages_for(9 + 30, 4)
    assert simulate(prompts, 2, 30, slots=4, pages=needed + 4, page_size=4, steps=4)[0] > 0


def test_members_of_a_group_share_the_full_pages_of_the_prompt():
    allocator = PageAllocator(64)
    scheduler = Scheduler(slots=4, allocator=allocator, page_size=4, steps=4)
    prompt = np.arange(11)  # 10 tokens in the prefix: two full pages and a template of two tokens
    for j in range(4):
        scheduler.submit(make_row(scheduler, j, prompt, 30))
    plan = scheduler.plan()
    (prefix,) = scheduler.filling
    assert len(plan.placed) == 4 and plan.hits == 3
    assert [allocator.references(p) for p in prefix.pages] == [5, 5, 1]
    copied = carry_out(scheduler, plan, move=True)
    assert [source for source, _ in copied] == [prefix.pages[2]] * 4
    assert len({target for _, target in copied}) == 4


def test_prompts_that_begin_alike_share_whole_chunks_one_after_the_other():
    scheduler = Scheduler(
        slots=4, allocator=PageAllocator(64), page_size=4, steps=4, keep_prefixes=True, chunk_pages=2
    )
    system = np.arange(21)  # 5 full pages: two chunks of two are shared, the fifth page is not
    for j in range(3):
        scheduler.submit(make_row(scheduler, j, np.append(system, [50 + j, 60]), 40))
    plan = scheduler.plan()
    assert len(plan.placed) == 1 and plan.reused == 0  # the others wait for what the first one fills
    carry_out(scheduler, plan, move=True)
    plan = scheduler.plan()
    assert len(plan.placed) == 2 and plan.reused == 32
    carry_out(scheduler, plan, move=True)
    first, second, third = scheduler.placed
    assert first.shared[:4] == second.shared[:4] == third.shared[:4]
    assert len({row.shared[4] for row in scheduler.placed}) == 3


def scheduler_of(slots, pages):
    """Prompts that begin alike share pages of 4 tokens, filled one at a time."""
    return Scheduler(
        slots=slots, allocator=PageAllocator(pages), page_size=4, steps=4, keep_prefixes=True, chunk_pages=1
    )


def alike(*last):
    return np.append(np.arange(20), last)


def test_a_row_that_waits_for_anothers_prompt_holds_up_nobody():
    scheduler = scheduler_of(slots=4, pages=64)
    rows = [
        make_row(scheduler, id, prompt, 40)
        for id, prompt in enumerate((alike(50, 60), alike(51, 60), 100 + np.arange(9), 200 + np.arange(9)))
    ]
    for row in rows:
        scheduler.submit(row)
    plan = scheduler.plan()
    # The second one waits for what the first one fills; a slot is kept for it.
    assert [row.id for row in plan.placed] == [0, 2, 3] and scheduler.queued == 1
    carry_out(scheduler, plan, move=True)
    plan = scheduler.plan()
    assert [row.id for row in plan.placed] == [1] and plan.reused == 20


def test_no_slot_of_a_row_that_waits_for_a_prompt_is_taken():
    scheduler = scheduler_of(slots=2, pages=64)
    rows = [
        make_row(scheduler, id, prompt, 40)
        for id, prompt in enumerate((alike(50, 60), alike(51, 60), 100 + np.arange(9)))
    ]
    for row in rows:
        scheduler.submit(row)
    plan = scheduler.plan()
    assert [row.id for row in plan.placed] == [0]
    carry_out(scheduler, plan, move=True)
    assert [row.id for row in scheduler.plan().placed] == [1]


def test_a_row_that_waits_for_pages_holds_up_those_after_it():
    scheduler = scheduler_of(slots=4, pages=1 + 12)
    first = make_row(scheduler, 0, alike(50, 60), 25)
    large = make_row(scheduler, 1, 100 + np.arange(40), 44)
    small = make_row(scheduler, 2, 200 + np.arange(3), 6)
    for row in (first, large, small):
        scheduler.submit(row)
    plan = scheduler.plan()
    assert [row.id for row in plan.placed] == [
        0
    ] and scheduler.allocator.free >= 2  # enough for the small one
    carry_out(scheduler, plan, move=True)
    scheduler.finish(first)
    plan = scheduler.plan()
    assert plan.placed[0] is large


def test_higher_priorities_are_placed_first_and_preempted_last():
    scheduler = Scheduler(slots=2, allocator=PageAllocator(7), page_size=4, steps=4)
    rows = [make_row(scheduler, i, np.arange(3) + i, 12, priority=p) for i, p in enumerate((0, 0, 5))]
    for row in rows:
        scheduler.submit(row)
    plan = scheduler.plan()
    assert [row.id for row in plan.placed] == [2, 0]
    carry_out(scheduler, plan, move=True)
    preempted = []
    while rows[2].slot is not None:
        for row in scheduler.running:
            row.tokens += [1] * min(4, row.limit - row.position - 1)
            if row.position + 1 == row.limit:
                scheduler.finish(row)
        plan = scheduler.plan()
        preempted += [row.id for row, _, _ in plan.preempted]
        carry_out(scheduler, plan, move=True)
    assert 2 not in preempted


def test_only_a_placed_row_can_be_finished():
    scheduler = Scheduler(slots=2, allocator=PageAllocator(8), page_size=4, steps=1)
    with pytest.raises(ValueError, match="only a placed row"):
        scheduler.finish(make_row(scheduler, 0, np.arange(3), 5))


def test_pages_are_named_by_all_that_comes_before():
    a, b = page_names(np.array([1, 2, 3, 4, 5]), 2), page_names(np.array([1, 2, 3, 9]), 2)
    assert len(a) == len(b) == 2 and a[0] == b[0] and a[1] != b[1]
    assert page_names(np.array([7, 7, 3, 4]), 2)[1] != a[1]


def test_the_least_recently_used_pages_go_first_and_ends_before_beginnings():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator)
    one, two = page_names(np.arange(6), 2), page_names(np.arange(10, 16), 2)
    for names in (one, two):
        pages = allocator.allocate(3)
        cache.add(names, pages)
        allocator.release(pages)
    assert allocator.used == 6 and cache.find(one, multiple=2) == cache.find(one)[:2]
    cache.evict(2)
    assert [len(cache.find(names)) for names in (one, two)] == [3, 1]
    held = cache.find(one)
    allocator.retain(held)
    cache.evict(10)
    assert cache.find(one) == held and len(cache) == 3 and cache.evictions == 3
    cache.clear()
    assert allocator.used == 3 and len(cache) == 0
