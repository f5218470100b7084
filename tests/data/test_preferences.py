"""Answers and preferences from JSONL: token ids, masks, pairs on rows, and what is refused."""

import json

import numpy as np
import pytest

from jaxrl_llm.data.preferences import (
    has_labels,
    labelled_batch,
    labelled_trajectory,
    mismatched,
    mismatched_labelled,
    pair_batch,
    pair_trajectories,
    read_labelled,
    read_preferences,
)
from jaxrl_llm.data.sft import answered, read_sft, supervised_batch, trajectory_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "2+2"}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write


def decoded(tokens):
    return TOKENIZER.decode(tokens, skip_special=False)


# ------------------------------------------------------------------------------------------ answers


def test_answers_are_read_and_trained_with_their_end(write):
    (example,) = read_sft(write({"prompt": "2+2", "answer": "4", "reward": 1}, ""))
    assert example.messages == (USER, said("4")) and example.reward == 1.0
    conversation = answered(example.messages, TOKENIZER)
    assert decoded(conversation.tokens) == "<bos>u: 2+2\na: 4<eos>"
    assert decoded(conversation.tokens[conversation.mask]) == "4<eos>"


def test_every_assistant_turn_of_a_conversation_is_trained(write):
    turns = [
        {"role": "system", "content": "S"},
        USER,
        said("4"),
        {"role": "user", "content": "+1"},
        said("5"),
    ]
    (example,) = read_sft(write({"messages": turns}))
    conversation = answered(example.messages, TOKENIZER)
    whole = TOKENIZER.chat(turns, add_generation_prompt=False)
    assert conversation.tokens.tolist() == whole[: len(conversation)]  # as the template lays it out
    assert decoded(conversation.tokens[conversation.mask]) == "4<eos>5<eos>"
    last = answered(example.messages, TOKENIZER, last_only=True)
    assert decoded(last.tokens[last.mask]) == "5<eos>"


def test_control_tokens_in_an_answer_stay_text(write):
    (example,) = read_sft(write({"prompt": "q", "answer": "<eos>x"}))
    conversation = answered(example.messages, TOKENIZER)
    assert conversation.tokens[conversation.mask].tolist().count(2) == 1  # the end of the turn


def test_a_supervised_batch_has_no_sampler(write):
    rows = read_sft(write({"prompt": "a", "answer": "b", "reward": 0.5}, {"prompt": "aa", "answer": "bb"}))
    trajectories = [
        trajectory_of(answered(row.messages, TOKENIZER), f"u{i}", i, row.reward) for i, row in enumerate(rows)
    ]
    batch = supervised_batch(trajectories, learner_version=3, rows_multiple=4)
    assert batch.shape == (4, 16) and batch.logprob_behavior is None
    assert np.all(batch.version == -1)
    assert np.sum(batch.mask, axis=1).tolist() == [2, 3, 0, 0]
    assert np.any(batch.reward_valid, axis=1).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "x"}, ["line 2", "'answer' is missing", "'prompt'"]),
        ({"prompt": "x", "chosen": "a"}, ["'answer' is missing", "dpo"]),
        ({"answer": "x"}, ["'messages' or 'prompt'", "'answer'"]),
        ({"prompt": "x", "answer": "y", "messages": []}, ["found 'messages' and 'prompt'"]),
        ({"prompt": "x", "answer": "  "}, ["'answer' must be a text that is not empty"]),
        ({"prompt": "", "answer": "y"}, ["'prompt' must be a text that is not empty"]),
        ({"prompt": "x", "answer": "y", "reward": "good"}, ["'reward' must be a finite number", "'good'"]),
        ({"prompt": "x", "answer": "y", "reward": True}, ["'reward' must be a finite number"]),
        ('{"prompt": "x", "answer": "y", "reward": NaN}', ["'reward' must be a finite number", "nan"]),
        ({"messages": [USER]}, ["must end with a turn of the assistant", "'user'"]),
        ({"messages": [USER, said("")]}, ["empty turn of the assistant"]),
        ({"messages": [said("x")]}, ["begins with a turn of the assistant"]),
        ({"messages": [USER, said("x"), said("y")]}, ["two turns in a row"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["role", "system, user, assistant, tool"]),
        ("[1]", ["expected a JSON object, got list"]),
        ("{not json", ["line 2: not valid JSON"]),
    ],
)
def test_bad_answers_name_the_line_and_the_fix(write, row, parts):
    path = write({"prompt": "x", "answer": "y"}, row)
    with pytest.raises(InputError) as error:
        read_sft(path)
    assert all(part in str(error.value) for part in [str(path), "line 2", *parts]), error.value


def test_files_that_cannot_be_read(tmp_path, write):
    with pytest.raises(InputError, match="does not exist"):
        read_sft(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="has no rows"):
        read_sft(write(""))
    with pytest.raises(InputError, match="has no rows.*chosen"):
        read_preferences(write(""))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="UTF-8"):
        read_preferences(binary)


# ------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"messages": [USER], "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [said("4")], "rejected": [said("5")]},
        {"prompt": "2+2", "chosen": [said("4")], "rejected": [said("5")]},
        {"chosen": [USER, said("4")], "rejected": [USER, said("5")]},
        {"prompt": "2+2", "chosen": [USER, said("4")], "rejected": [USER, said("5")]},
    ],
)
def test_forms_of_a_pair(write, row):
    (pair,) = read_preferences(write({**row, "chosen_reward": 2, "rejected_reward": -1}))
    assert pair.messages == (USER,) and (pair.chosen, pair.rejected) == ("4", "5")
    assert (pair.chosen_reward, pair.rejected_reward) == (2.0, -1.0)


def two_pairs(write):
    rows = read_preferences(
        write(
            {"prompt": "2+2", "chosen": "4", "rejected": "55", "chosen_reward": 1.0},
            {"prompt": "a", "chosen": "bbb", "rejected": "c"},
        )
    )
    return [pair_trajectories(row, TOKENIZER, f"u{i}", i) for i, row in enumerate(rows)]


def test_pairs_sit_on_rows_2i_and_2i_plus_1(write):
    batch = pair_batch(two_pairs(write), learner_version=0, rows_multiple=6)
    assert batch.shape[0] == 6
    rows = [decoded(np.asarray(batch.tokens[i])[np.asarray(batch.mask[i])]) for i in range(6)]
    assert rows == ["4<eos>", "55<eos>", "bbb<eos>", "c<eos>", "", ""]
    assert np.asarray(batch.group)[:4, 0].tolist() == [0, 0, 1, 1]
    assert np.any(batch.reward_valid, axis=1).tolist() == [True, False, False, False, False, False]
    prompts = [decoded(np.asarray(batch.tokens[i])[: int(np.argmax(batch.mask[i]))]) for i in range(2)]
    assert prompts[0] == prompts[1] == "<bos>u: 2+2\na: "
    with pytest.raises(ValueError, match="even rows_multiple"):
        pair_batch(two_pairs(write), learner_version=0, rows_multiple=3)
    with pytest.raises(ValueError, match="row_tokens"):
        pair_batch(two_pairs(write), learner_version=0, row_tokens=64)


def test_mismatched_answers_go_with_the_next_prompt(write):
    pairs = two_pairs(write)
    rows = mismatched(pairs, 32)
    assert [decoded(t.tokens) for t in rows] == [
        "<bos>u: 2+2\na: bbb<eos>",
        "<bos>u: 2+2\na: c<eos>",
        "<bos>u: a\na: 4<eos>",
        "<bos>u: a\na: 55<eos>",
    ]
    assert decoded(rows[0].tokens[rows[0].mask]) == "bbb<eos>"
    longest = len(pairs[0][0].prompt.tokens) + 2
    assert [len(t.tokens) <= longest for t in mismatched(pairs, longest)] == [True] * 4
    with pytest.raises(ValueError, match="one pair"):
        mismatched(pairs[:1], 32)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "x", "chosen": "a"}, ["'rejected' is missing", "'prompt', 'chosen'"]),
        ({"prompt": "x", "answer": "a"}, ["'chosen' is missing", "sft"]),
        ({"chosen": "a", "rejected": "b"}, ["'prompt' or 'messages'"]),
        ({"prompt": "x", "chosen": "", "rejected": "b"}, ["'chosen' must be a text that is not empty"]),
        ({"prompt": "x", "chosen": "a", "rejected": " \n"}, ["'rejected' must be a text that is not empty"]),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, ["the same answer", "Remove the row"]),
        ({"prompt": "x", "chosen": "a", "rejected": [said("b")]}, ["both be texts or both lists"]),
        (
            {"chosen": [USER, said("a")], "rejected": [{"role": "user", "content": "3+3"}, said("b")]},
            ["answer different prompts", "message 0 differs", "same messages"],
        ),
        (
            {"chosen": [USER, said("a")], "rejected": [USER, said("a"), USER, said("b")]},
            ["answer different prompts", "1 and 3 messages"],
        ),
        ({"chosen": [USER, said("a")], "rejected": [USER]}, ["'rejected'"]),
        ({"chosen": [USER, said(" ")], "rejected": [USER, said("b")]}, ["'chosen' has an empty turn"]),
        (
            {"messages": [USER, said("z")], "chosen": "a", "rejected": "b"},
            ["ends with a turn of the assistant"],
        ),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "chosen_reward": "1"},
            ["'chosen_reward'", "finite"],
        ),
    ],
)
def test_bad_pairs_name_the_line_and_the_fix(write, row, parts):
    path = write({"prompt": "x", "chosen": "y", "rejected": "z"}, row)
    with pytest.raises(InputError) as error:
        read_preferences(path)
    assert all(part in str(error.value) for part in [str(path), "line 2", *parts]), error.value


# ------------------------------------------------------------------------------ answers with a label


def labelled(write, *rows):
    read = read_labelled(write(*rows))
    return [labelled_trajectory(row, TOKENIZER, f"u{i}", i) for i, row in enumerate(read)]


THREE = (
    {"prompt": "2+2", "completion": "4", "label": True},
    {"prompt": [USER], "completion": [said("55")], "label": False},
    {"prompt": "a", "completion": "bbb", "label": True},
)


def test_labelled_answers_one_a_row(write):
    path = write(*THREE)
    assert has_labels(path) and [row.good for row in read_labelled(path)] == [True, False, True]
    assert not has_labels(write({"prompt": "x", "chosen": "a", "rejected": "b"}))
    batch = labelled_batch(labelled(write, *THREE), learner_version=0, rows_multiple=5)
    rows = [decoded(np.asarray(batch.tokens[i])[np.asarray(batch.mask[i])]) for i in range(5)]
    assert rows == ["4<eos>", "55<eos>", "bbb<eos>", "", ""]
    assert np.asarray(batch.desirable).all(axis=1).tolist() == [True, False, True, False, False]
    assert np.asarray(batch.desirable).any(axis=1).tolist() == [True, False, True, False, False]
    assert batch.desirable.shape == batch.shape
    with pytest.raises(ValueError, match="row_tokens must be None"):
        labelled_batch(labelled(write, *THREE), learner_version=0, row_tokens=64)


def test_labelled_prompts_get_the_next_answer_to_another_prompt(write):
    crossed = mismatched_labelled(labelled(write, *THREE), 32)
    assert [decoded(t.tokens) for t in crossed] == [
        "<bos>u: 2+2\na: bbb<eos>",  # the second answer is to the same prompt
        "<bos>u: 2+2\na: bbb<eos>",
        "<bos>u: a\na: 4<eos>",
    ]
    same = mismatched_labelled(labelled(write, *THREE[:2]), 32)
    assert [decoded(t.completion) for t in same] == ["55<eos>", "4<eos>"]
    with pytest.raises(ValueError, match="one answer only|no other one"):
        mismatched_labelled(labelled(write, THREE[0]), 32)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "x", "label": True}, ["'completion' is missing"]),
        ({"prompt": "x", "completion": "a"}, ["'label' is missing", "'prompt', 'completion'"]),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, ["'completion' is missing", "not both"]),
        ({"prompt": "x", "completion": "a", "label": 1}, ["'label' must be true or false", "1"]),
        ({"prompt": "x", "completion": "a", "label": "good"}, ["'label' must be true or false", "'good'"]),
        ({"prompt": "x", "completion": " ", "label": True}, ["'completion' must be a text"]),
        ({"prompt": "x", "completion": [said("")], "label": True}, ["'completion' has an empty turn"]),
        ({"prompt": "x", "completion": [USER], "label": True}, ["must end with a turn of the assistant"]),
        ({"prompt": "x", "completion": [said("a"), USER], "label": True}, ["got 2 messages", "'prompt'"]),
        ({"prompt": [said("a")], "completion": "b", "label": True}, ["begins with a turn of the assistant"]),
    ],
)
def test_bad_labelled_answers_name_the_line_and_the_fix(write, row, parts):
    path = write(THREE[0], row)
    with pytest.raises(InputError) as error:
        read_labelled(path)
    assert all(part in str(error.value) for part in [str(path), "line 2", *parts]), error.value


def test_labels_are_for_kto(write):
    with pytest.raises(InputError, match="'chosen' is missing.*label each train kto"):
        read_preferences(write(*THREE))
    with pytest.raises(InputError, match="has no rows.*label"):
        read_labelled(write(""))
