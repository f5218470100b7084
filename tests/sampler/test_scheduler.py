"""The scheduler alone: every row ends, nothing leaks, the oldest row always gets on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampler.paged_cache import PageAllocator, pages_for
from jaxrl_llm.sampler.scheduler import Row, Scheduler, distinct_prefixes


def simulate(prompts, n, new_tokens, *, slots, pages, page_size, steps):
    """Runs rows that end after new_tokens[row] tokens; checks the invariants of every plan."""
    allocator = PageAllocator(pages)
    scheduler = Scheduler(slots=slots, allocator=allocator, page_size=page_size, steps=steps)
    rows = [
        Row(
            prompt=i,
            index=j,
            prompt_tokens=p,
            prefix=prefix,
            limit=len(p) + new_tokens,
            key=np.zeros(2, np.uint32),
        )
        for i, (p, prefix) in enumerate(zip(prompts, distinct_prefixes(prompts), strict=True))
        for j in range(n)
    ]
    pages_needed = max(scheduler.pages_needed(len(r.prompt_tokens), r.limit) for r in rows)
    if pages_needed > allocator.capacity:
        return None
    for row in rows:
        scheduler.submit(row)
    preemptions = 0
    for _ in range(10_000):
        if not scheduler.busy:
            break
        oldest = min((r.order for r in scheduler.running), default=None)
        plan = scheduler.plan()
        preemptions += len(plan.preempted)
        assert all(row.order != oldest for row, _, _ in plan.preempted)
        assert len(scheduler.running) <= slots
        assert len({row.slot for row in scheduler.running}) == len(scheduler.running)
        holders = {}
        for row in scheduler.running:
            shared = row.prefix.shared(page_size)
            have = row.prefix.pages[:shared] + row.own
            assert len(have) == len(set(have)) and 0 not in have
            assert len(have) * page_size >= min(row.position + steps, row.limit - 1)
            for page in row.own:
                assert holders.setdefault(page, row) is row and allocator.references(page) == 1
            for page in row.prefix.pages[:shared]:
                assert holders.setdefault(page, row.prefix) is row.prefix
        for _, page in plan.copied:
            assert isinstance(holders[page], Row)
        for row in list(scheduler.running):
            row.tokens += [1] * min(steps, row.limit - row.position - 1)
            if row.position + 1 == row.limit:
                scheduler.finish(row)
    assert not scheduler.busy and allocator.used == 0
    assert all(len(r.tokens) == new_tokens for r in rows)
    return preemptions


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    n=st.integers(1, 5),
    new_tokens=st.integers(1, 40),
    slots=st.integers(2, 6),
    pages=st.integers(3, 40),
    page_size=st.sampled_from([1, 3, 8]),
    steps=st.integers(1, 9),
)
def test_every_row_ends_and_no_page_leaks(lengths, n, new_tokens, slots, pages, page_size, steps):
    prompts = [np.arange(k) + 100 * i * (k > 3) for i, k in enumerate(lengths)]
    simulate(prompts, n, new_tokens, slots=slots, pages=pages, page_size=page_size, steps=steps)


def test_a_tight_cache_preempts_and_still_finishes():
    prompts = [np.arange(9) + i for i in range(4)]
    needed = pages_for(9 - 1, 4) + pages_for(9 + 30, 4)
    assert simulate(prompts, 2, 30, slots=4, pages=needed + 4, page_size=4, steps=4) > 0


def test_members_of_a_group_share_the_full_pages_of_the_prompt():
    allocator = PageAllocator(64)
    scheduler = Scheduler(slots=4, allocator=allocator, page_size=4, steps=4)
    prompt = np.arange(11)  # 10 tokens in the prefix: two full pages and a template of two tokens
    prefix = distinct_prefixes([prompt])[0]
    for j in range(4):
        scheduler.submit(
            Row(prompt=0, index=j, prompt_tokens=prompt, prefix=prefix, limit=30, key=np.zeros(2, np.uint32))
        )
    plan = scheduler.plan()
    assert plan.prefilled == [prefix] and len(plan.admitted) == 4 and plan.hits == 3
    assert [allocator.references(p) for p in prefix.pages] == [5, 5, 1]
    assert [source for source, _ in plan.copied] == [prefix.pages[2]] * 4
    assert len({target for _, target in plan.copied}) == 4


def test_only_a_running_row_can_be_finished():
    scheduler = Scheduler(slots=2, allocator=PageAllocator(8), page_size=4, steps=1)
    prompt = np.arange(3)
    row = Row(
        prompt=0,
        index=0,
        prompt_tokens=prompt,
        prefix=distinct_prefixes([prompt])[0],
        limit=5,
        key=np.zeros(2, np.uint32),
    )
    with pytest.raises(ValueError, match="only a running row"):
        scheduler.finish(row)
