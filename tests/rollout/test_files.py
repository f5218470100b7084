"""Tasks from JSONL files."""

import json

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.checks import self_test
from jaxrl_llm.rollout.files import read_jsonl
from jaxrl_llm.rollout.task import make_task


def write(path, rows, encoding="utf-8", end="\n"):
    path.write_bytes(end.join(json.dumps(r, ensure_ascii=False) for r in rows).encode(encoding))
    return str(path)


def questions(n):
    return [{"prompt": f"q{i}", "answer": str(i)} for i in range(n)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_line_ends_and_byte_order_marks(tmp_path, end, encoding):
    rows = [{"prompt": "wie groß?\u2028ja", "answer": "5 °C"}, {"prompt": "b", "answer": 7}]
    items = read_jsonl(write(tmp_path / "d.jsonl", rows, encoding, end))
    assert [(i.question, i.answer) for i in items] == [("wie groß?\u2028ja", "5 °C"), ("b", "7")]


@pytest.mark.parametrize(
    "content,words",
    [
        (b"", ("no rows",)),
        (b"\n \r\n", ("no rows",)),
        (b"\xef\xbb\xbf", ("no rows",)),
        (b'{"prompt": "a", "answer": "1"}\n{"prompt": "b", ', ("line 2", "not valid JSON")),
        (b'\n\n["a"]', ("line 3", "list")),
        (b'{"prompt": "a"}', ("line 1", "'answer'", "found: prompt")),
        (b'{"answer": "a"}', ("line 1", "'prompt'", "found: answer")),
        (b"{}", ("line 1", "nothing")),
        (b'{"prompt": "a", "messages": [], "answer": "1"}', ("line 1", "both")),
        (b'{"prompt": "", "answer": "1"}', ("line 1", "'prompt'")),
        (b'{"prompt": 5, "answer": "1"}', ("line 1", "'prompt'")),
        (b'{"prompt": "a", "answer": " "}', ("line 1", "empty")),
        (b'{"prompt": "a", "answer": null}', ("line 1", "'answer'", "None")),
        (b'{"prompt": "a", "answer": true}', ("line 1", "True")),
        (b'{"prompt": "a", "answer": NaN}', ("line 1", "finite")),
        (b'{"messages": [], "answer": "1"}', ("line 1", "'messages'")),
        (b'{"messages": [{"role": "robot", "content": "x"}], "answer": "1"}', ("line 1", "robot")),
        (b'{"messages": [{"role": "user"}], "answer": "1"}', ("line 1", "content")),
        (b'{"messages": [{"role": "system", "content": "x"}], "answer": "1"}', ("line 1", "user")),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [1]}], '
            b'"answer": "1"}',
            ("line 1", "tool_calls", "not read"),
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "y", "reasoning_content": "z"}], "answer": "1"}',
            ("line 1", "reasoning_content"),
        ),
        (b'{"prompt": "a", "answer": "\xff"}', ("UTF-8", "byte")),
        ("{}".encode("utf-16"), ("UTF-8",)),
        (b"[" * 100_000, ("line 1", "not valid JSON")),
        (b"\x00\x00", ("line 1", "not valid JSON")),
        (b'{"prompt": "\\ud800", "answer": "1"}', ("line 1", "surrogate")),
        (b'{"prompt": "a", "answer": "1", "agent": "x"}', ("line 1", "'agent'", "'x'")),
        (b'{"prompt": "a", "answer": "1", "agent": -1}', ("line 1", "'agent'", "-1")),
        (b'{"prompt": "a", "answer": "1", "answer": "2"}', ("line 1", "'answer' is there twice")),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, content, words):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(InputError) as error:
        make_task(f"jsonl:{tmp_path / 'd.jsonl'}")
    for word in ("d.jsonl", *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"stop": 5}, ("stop", "5")),
        ({"stop": "x"}, ("stop", "list")),
        ({"stop": [""]}, ("stop", "not empty")),
        ({"answer_after": 5}, ("answer_after", "text")),
        ({"eval_path": 5}, ("eval_path", "text")),
        ({"grader": ["a"]}, ("grader", "text")),
        ({"instruction": 5}, ("instruction", "text")),
        ({"max_tokens": "x"}, ("max_tokens", "'x'")),
        ({"max_tokens": 0}, ("max_tokens", "from 1")),
        ({"max_tokens": 1.5}, ("max_tokens", "1.5")),
        ({"max_tokens": True}, ("max_tokens", "True")),
        ({"prompt_field": "messages"}, ("prompt_field",)),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(tmp_path, args, words):
    path = write(tmp_path / "d.jsonl", questions(10))
    with pytest.raises(InputError) as error:
        make_task(f"jsonl:{path}", args)
    for word in ("d.jsonl", *words):
        assert word in str(error.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        make_task(f"jsonl:{tmp_path / 'nothing.jsonl'}")
    with pytest.raises(InputError, match="cannot be read"):
        make_task(f"jsonl:{tmp_path}")


def test_the_file_is_divided_by_content(tmp_path):
    rows = questions(40) + questions(40)  # every prompt twice
    task = make_task("jsonl", path=write(tmp_path / "my data.jsonl", rows))
    train, held_out = task.split("train", 0), task.split("eval", 0)
    assert task.name == "jsonl:my_data.jsonl"
    assert (train.size, held_out.size) == (72, 8)
    keys = [{split.item(i).key for i in range(split.size)} for split in (train, held_out)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 40


def test_one_row_can_be_trained_on_but_not_held_out(tmp_path):
    task = make_task(f"jsonl:{write(tmp_path / 'd.jsonl', questions(1))}")
    assert task.split("train", 0).size == 1
    with pytest.raises(InputError, match="eval_path"):
        task.split("eval", 0)


def test_an_evaluation_file_is_kept_out_of_training(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", questions(10)), write(tmp_path / "b.jsonl", questions(3))
    task = make_task(f"jsonl:{train}", eval_path=held_out)
    assert (task.split("train", 0).size, task.split("eval", 0).size, task.overlap) == (7, 3, 3)
    with pytest.raises(InputError, match="every row"):
        make_task(f"jsonl:{held_out}", eval_path=train)


def test_messages_fields_markers_and_instructions(tmp_path):
    rows = [
        {
            "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "2 + 2 ="}],
            "gold": 4.0,
        },
        {"question": "half?", "gold": 0.5},
    ]
    path = write(tmp_path / "d.jsonl", rows)
    task = make_task(
        f"jsonl:{path}",
        prompt_field="question",
        answer_field="gold",
        grader="number",
        held_out=0.0,
        instruction="Now.",
    )
    first, second = (task.split("train", 0).item(i) for i in range(2))
    assert (first.question, first.prefix, first.answer) == ("2 + 2?\nNow.", "2 + 2 =", "4")
    assert (second.question, second.answer) == ("half?\nNow.", "0.5")
    assert task.stop == ("\n",)

    path = write(
        tmp_path / "gsm.jsonl",
        [{"prompt": "q", "answer": "so 3 #### no, 7 #### 42"}, {"prompt": "r", "answer": "#### 1"}],
    )
    task = make_task(f"jsonl:{path}", answer_after="####", grader="boxed")
    item = next(
        task.split(s, 0).item(0) for s in ("train", "eval") if task.split(s, 0).item(0).question == "q"
    )
    assert item.answer == "42" and task.stop == ()
    assert task.score(item, r"hence \boxed{42}").value == 1.0
    assert self_test(task).right == 1
    with pytest.raises(InputError, match="marker"):
        make_task(f"jsonl:{path}", answer_after="=>")
    with pytest.raises(InputError, match="Did you mean boxed"):
        make_task(f"jsonl:{path}", grader="boxd")
    with pytest.raises(InputError, match="held_out"):
        make_task(f"jsonl:{path}", held_out=1.5)


def test_percent_questions(tmp_path):
    rows = [{"prompt": f"What percent is it, {i}?", "answer": "35%"} for i in range(2)]
    task = make_task(f"jsonl:{write(tmp_path / 'd.jsonl', rows)}", grader="boxed")
    assert task.score(task.split("train", 0).item(0), r"\boxed{35}").value == 1.0


def test_self_test_allows_answers_that_look_hostile_and_equal_golds(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": a} for i, a in enumerate(["banana", "0.5", "1/2", "banana"])]
    for grader in ("line", "boxed", "tag", "text"):
        self_test(make_task(f"jsonl:{write(tmp_path / 'd.jsonl', rows)}", grader=grader))


def test_rows_may_name_a_role(tmp_path):
    rows = [{"prompt": "a", "answer": "1", "agent": 1}, {"prompt": "b", "answer": "2"}]
    items = read_jsonl(write(tmp_path / "d.jsonl", rows))
    assert [item.agent for item in items] == [1, 0]
    assert items[0].payload()["agent"] == 1 and "agent" not in items[1].payload()
