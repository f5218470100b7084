"""The stream of prompts: order, epochs, resumption, prompts that are too long."""

import json

import pytest

from jaxrl_llm.data.source import PromptSource
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.task import make_task
from jaxrl_llm.tokens.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def file_task(tmp_path):
    def build(prompts):
        path = tmp_path / "d.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": p, "answer": "1"}) for p in prompts))
        return make_task(f"jsonl:{path}", held_out=0.0)

    return build


def stream(source, batch, steps):
    return [[p.uid for p in source.next_batch(batch)] for _ in range(steps)]


def eight(file_task):
    return file_task([f"question {i}" for i in range(8)])


def test_k01_saving_at_every_step_continues_identically(file_task):
    """8 rows, batches of 2, 2 epochs: 8 steps, whatever step was saved, the end of an epoch included."""
    task = eight(file_task)

    def fresh():
        return PromptSource(task, TOKENIZER, seed=0, epochs=2)

    whole = stream(fresh(), 2, 8)
    assert all(len(batch) == 2 for batch in whole)
    for step in range(9):
        before = fresh()
        stream(before, 2, step)
        state = json.loads(json.dumps(before.state()))
        after = fresh()
        after.restore(state)
        assert stream(after, 2, 8 - step) == whole[step:]
        assert after.next_batch(2) == [] and after.epoch == 2
    first, second = sum(whole[:4], []), sum(whole[4:], [])
    rows = [[u.split("#")[0] for u in epoch] for epoch in (first, second)]
    assert sorted(rows[0]) == sorted(rows[1]) and len(set(rows[0])) == 8  # every row once in each epoch
    assert rows[0] != rows[1]  # in another order
    assert not set(first) & set(second)  # and under another uid


def test_k01_batches_that_straddle_the_end_of_an_epoch(file_task):
    task = eight(file_task)
    whole = stream(PromptSource(task, TOKENIZER, seed=0), 3, 16)
    for step in range(16):
        source = PromptSource(task, TOKENIZER, seed=0)
        source.restore({**source.state(), "cursor": 3 * step})
        assert stream(source, 3, 16 - step) == whole[step:]
    source = PromptSource(task, TOKENIZER, seed=0, epochs=1)
    assert [len(source.next_batch(3)) for _ in range(4)] == [3, 3, 2, 0]


@pytest.mark.parametrize("name", ["addition", "file"])
def test_k03_three_steps_a_save_and_three_more_are_six_steps(name, file_task):
    task = eight(file_task) if name == "file" else make_task("addition")
    whole, half = (PromptSource(task, TOKENIZER, seed=0) for _ in range(2))
    expected = [whole.next_batch(4) for _ in range(6)]
    got = [half.next_batch(4) for _ in range(3)]
    rest = PromptSource(task, TOKENIZER, seed=0)
    rest.restore(json.loads(json.dumps(half.state())))
    got += [rest.next_batch(4) for _ in range(3)]
    for a, b in zip(expected, got, strict=True):
        assert [p.uid for p in a] == [p.uid for p in b]
        assert [p.tokens.tolist() for p in a] == [p.tokens.tolist() for p in b]
        assert [p.payload for p in a] == [p.payload for p in b]
    uids = [p.uid for batch in expected for p in batch]
    assert (
        len(set(uids)) == len(uids) == 24
    )  # the sampler's key of a later step is never that of an earlier one
    other = PromptSource(task, TOKENIZER, seed=1)
    assert [p.tokens.tolist() for p in other.next_batch(4)] != [p.tokens.tolist() for p in expected[0]]


def test_batches_of_another_size_read_the_same_stream():
    task = make_task("addition")
    a, b = (PromptSource(task, TOKENIZER, seed=0) for _ in range(2))
    assert sum(stream(a, 6, 2), []) == sum(stream(b, 4, 3), [])


def test_the_order_of_the_file_without_shuffling(file_task):
    source = PromptSource(eight(file_task), TOKENIZER, shuffle=False)
    assert [p.payload["messages"][0]["content"] for p in source.next_batch(9)] == [
        f"question {i % 8}" for i in range(9)
    ]


def test_shards_are_disjoint_and_complete(file_task):
    task = eight(file_task)
    shares = [
        set(sum(stream(PromptSource(task, TOKENIZER, seed=2, epochs=1, shard=(i, 3)), 2, 3), []))
        for i in range(3)
    ]
    assert sum(len(s) for s in shares) == 8 and len(set().union(*shares)) == 8
    assert sorted(len(s) for s in shares) == [2, 3, 3]
    with pytest.raises(ValueError, match="shard"):
        PromptSource(task, TOKENIZER, shard=(3, 3))
    with pytest.raises(InputError, match="fewer"):
        PromptSource(file_task(["a"]), TOKENIZER, shard=(1, 2))


def test_long_prompts_are_skipped_and_counted(file_task):
    task = file_task(["short 1", "long " * 40, "short 2", "long " * 41])
    source = PromptSource(task, TOKENIZER, seed=0, max_prompt_tokens=60)
    batch = source.next_batch(6)
    assert len(batch) == 6 and all(len(p.tokens) <= 60 for p in batch)
    assert source.skipped in range(4, 7) and source.max_prompt_tokens == 60
    resumed = PromptSource(task, TOKENIZER, seed=0, max_prompt_tokens=60)
    resumed.restore(source.state())
    assert resumed.skipped == source.skipped
    assert stream(resumed, 2, 3) == stream(source, 2, 3)


@pytest.mark.parametrize("epochs", [None, 1, 2, 5])
def test_when_no_prompt_fits_the_search_ends(file_task, epochs):
    task = file_task(["long " * 40, "long " * 50])
    source = PromptSource(task, TOKENIZER, seed=0, max_prompt_tokens=60, epochs=epochs)
    with pytest.raises(InputError) as error:
        source.next_batch(1)
    assert "60 tokens" in str(error.value) and "shortest has 2" in str(error.value)
    endless = PromptSource(make_task("addition"), TOKENIZER, max_prompt_tokens=5)
    with pytest.raises(InputError, match="none of 1000 prompts"):
        endless.next_batch(1)


def test_one_prompt_that_fits_is_found_wherever_it_is(file_task):
    task = file_task(["long " * 40] * 30 + ["short"])
    for seed in range(6):
        source = PromptSource(task, TOKENIZER, seed=seed, max_prompt_tokens=60)
        assert len(source.next_batch(5)) == 5


def test_a_state_of_other_data_is_refused(file_task):
    state = PromptSource(eight(file_task), TOKENIZER, seed=0).state()
    with pytest.raises(InputError, match="seed: saved 0, now 1"):
        PromptSource(eight(file_task), TOKENIZER, seed=1).restore(state)
    changed = file_task([f"question {i}" for i in range(7)] + ["another"])
    with pytest.raises(InputError, match="digest"):
        PromptSource(changed, TOKENIZER, seed=0).restore(state)
    digits = PromptSource(make_task("addition", digits=2), TOKENIZER).state()
    with pytest.raises(InputError, match="digest"):
        PromptSource(make_task("addition", digits=3), TOKENIZER).restore(digits)


def test_epochs_of_an_endless_task_are_refused():
    with pytest.raises(ValueError, match="endless"):
        PromptSource(make_task("addition"), TOKENIZER, epochs=2)
