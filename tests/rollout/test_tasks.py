"""Built-in tasks: items, splits, rendering, scores, and the checks made before a run."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.checks import constant_answer_baseline, distinct_items, self_test
from jaxrl_llm.rollout.task import (
    TASKS,
    HashStream,
    Item,
    PromptFormat,
    is_held_out,
    item_of,
    make_task,
    prompt_of,
    render,
)
from jaxrl_llm.tokens.tiny import tiny_tokenizer

BUILT_IN = ["addition", "subtraction", "multiplication", "mixed", "copy", "reverse", "letter_count", "vowel"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_items_are_pure_functions_of_seed_and_index(name):
    def some(seed, order):
        split = make_task(name).split("train", seed)
        return {i: split.item(i) for i in order}

    forwards, backwards = some(3, range(20)), some(3, reversed(range(20)))
    assert forwards == backwards
    assert forwards != some(4, range(20))
    assert len({i.key for i in forwards.values()}) > 10
    assert make_task(name).split("train", 0).size is None
    for item in forwards.values():
        assert json.loads(json.dumps(item.payload())) == item.payload()


@pytest.mark.parametrize("name", BUILT_IN)
def test_evaluation_items_never_appear_in_training(name):
    task = make_task(name)
    train = {task.split("train", seed).item(i).key for seed in (0, 1) for i in range(400)}
    held_out = {task.split("eval", seed).item(i).key for seed in (0, 1, 7) for i in range(100)}
    assert not train & held_out
    assert len(held_out) > 20


def test_the_division_ignores_order_of_operands_and_name_of_the_task():
    questions = {}
    for name in ("addition", "mixed"):
        for which in ("train", "eval"):
            split = make_task(name).split(which, 5)
            questions[name, which] = {split.item(i).key for i in range(300)}
    assert not questions["addition", "train"] & questions["mixed", "eval"]
    assert not questions["mixed", "train"] & questions["addition", "eval"]
    train = make_task("addition").split("train", 0)
    swapped = {" + ".join(reversed(train.item(i).key.split(" + "))) for i in range(300)}
    texts = {train.item(i).question for i in range(300)}
    assert any(f"What is {s}?" in texts for s in swapped)  # both orders are asked in training
    assert all(
        tuple(map(int, k.split(" + "))) == tuple(sorted(map(int, k.split(" + "))))
        for k in questions["addition", "eval"]
    )


def test_the_whole_space_of_two_digit_addition_is_divided():
    keys = [f"{a} + {b}" for a in range(10, 100) for b in range(a, 100)]
    share = np.mean([is_held_out(k) for k in keys])
    assert len(keys) == 4095 and 0.08 < share < 0.12


def test_items_do_not_change_between_versions_of_the_package():
    """Pinned: another value here means that saved runs and published figures refer to other questions."""
    split = make_task("addition").split("train", 0)
    assert [split.item(i).question for i in range(3)] == PINNED
    assert HashStream("a", 1).below(1000) == PINNED_DRAW


PINNED = ["What is 33 + 27?", "What is 74 + 97?", "What is 64 + 62?"]
PINNED_DRAW = 260


@pytest.mark.parametrize(
    "name,args,check",
    [
        ("addition", {"digits": 1}, lambda a, b, r: a + b == r and 0 <= a <= 9),
        ("addition", {"digits": 3}, lambda a, b, r: a + b == r and 100 <= a <= 999),
        ("subtraction", {}, lambda a, b, r: a - b == r >= 0),
        ("multiplication", {"digits": 2}, lambda a, b, r: a * b == r and 10 <= b <= 99),
    ],
)
def test_arithmetic_is_right(name, args, check):
    task = make_task(name, args)
    for which in ("train", "eval"):
        for i in range(20):
            item = task.split(which, 1).item(i)
            a, _, b = item.question.removeprefix("What is ").removesuffix("?").split()
            assert check(int(a), int(b), int(item.answer))
            assert item.prefix == item.question.removeprefix("What is ").removesuffix("?") + " ="


def test_strings_are_right():
    for i in range(10):
        item = make_task("reverse", length=5).split("train", 0).item(i)
        word = item.question.split()[3]
        assert item.answer == word[::-1] and len(word) == 5
        item = make_task("copy").split("train", 0).item(i)
        assert item.answer in item.question
        item = make_task("letter_count").split("train", 0).item(i)
        _, letter, _, word, _ = item.question.split('"')
        assert item.answer == str(word.count(letter))


def test_a_random_policy_can_learn_vowels():
    task = make_task("vowel")
    item = task.split("train", 0).item(0)
    values = {text: task.score(item, text).value for text in ("a", "ux", "b", "", " a", "banana")}
    assert values == {"a": 1.0, "ux": 1.0, "b": 0.0, "": 0.0, " a": 0.0, "banana": 0.0}
    assert constant_answer_baseline(task, 20).accuracy == 1.0  # which is why it measures nothing


def test_the_quickstart_prompt():
    """The begun assistant turn, and no system turn that a template would add by itself."""
    task = make_task("addition")
    item = dataclasses.replace(
        task.split("train", 0).item(0),
        messages=({"role": "user", "content": "What is 76 + 30?"},),
        prefix="76 + 30 =",
    )
    tokenizer = tiny_tokenizer()
    prompt = prompt_of(task, item, tokenizer, uid="u")
    assert tokenizer.decode(prompt.tokens, skip_special=False) == "<bos>u: What is 76 + 30?\na: 76 + 30 ="
    assert prompt.tokens.dtype == np.int32 and prompt.uid == "u" and prompt.task == "addition"
    assert item_of(prompt) == item
    assert task.stop == ("\n",) and task.max_tokens == 8


def test_prompt_formats():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "q"}]

    def text(form, **more):
        return tokenizer.decode(render(messages, tokenizer, form, **more), skip_special=False)

    assert text(PromptFormat()) == "<bos>u: q\na: "
    assert text(PromptFormat(), prefix="x =") == "<bos>u: q\na: x ="
    assert text(PromptFormat(begin_assistant=False), prefix="x =") == "<bos>u: q\na: "
    assert text(PromptFormat(system="be brief")) == "<bos>s: be brief\nu: q\na: "
    assert text(PromptFormat(chat=False), prefix="x =").endswith("q\nx =")
    task = make_task("addition", system="be brief")
    prompt = prompt_of(task, task.split("train", 0).item(0), tokenizer, uid="u")
    assert tokenizer.decode(prompt.tokens).startswith("s: be brief\nu: What")


@pytest.mark.parametrize(
    "name,args,words",
    [
        (
            "adition",
            {},
            ("adition", "Did you mean addition?", "reverse", "jsonl:FILE", "reasoning_gym:FAMILY"),
        ),
        ("", {}, ("Tasks:",)),
        ("jsonl", {}, ("jsonl:FILE",)),
        ("jsonl:", {}, ("jsonl:FILE",)),
        ("jsonl:a\0b", {}, ("null byte",)),
        ("addition", {"digit": 2}, ("digit", "Did you mean digits?")),
        ("addition", {"digits": 0}, ("digits", "from 1 to 9", "0")),
        ("addition", {"digits": "2"}, ("digits", "'2'")),
        ("addition", {"digits": True}, ("digits", "True")),
        ("mixed", {"operations": ["%"]}, ("operations", "%")),
        ("mixed", {"operations": []}, ("operations",)),
        ("copy", {"length": 1000}, ("length", "64")),
    ],
)
def test_unknown_names_and_values_are_refused(name, args, words):
    with pytest.raises(InputError) as error:
        make_task(name, args)
    for word in words:
        assert word in str(error.value)


def test_a_space_that_is_too_small_says_so():
    with pytest.raises(InputError, match="too few different questions"):
        task = dataclasses.replace(make_task("addition"), held_out=0.0)
        task.split("eval", 0).item(0)
    with pytest.raises(InputError, match="train and eval"):
        make_task("addition").split("test", 0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_self_test_passes_for_built_in_tasks(name):
    result = self_test(make_task(name))
    assert result.items == result.right == 4 and result.wrong > 40 and result.unscored == 0


def broken(score):
    """`addition` with another verifier."""
    task = make_task("addition")
    return dataclasses.replace(task, grader=task.grader._replace(score=score))


@pytest.mark.parametrize(
    "score,words",
    [
        (lambda text, gold, question: Score(1.0), "which is no answer"),
        (lambda text, gold, question: Score(0.0), "for the gold answer"),
        (lambda text, gold, question: Score(float(bool(text.strip()))), "which is no answer"),
        (lambda text, gold, question: Score(float(gold in text)), "which is no answer"),
        (lambda text, gold, question: Score(None, reason="broken"), "for the gold answer"),
        (lambda text, gold, question: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_self_test_finds_broken_verifiers(score, words):
    with pytest.raises(InputError, match=words):
        self_test(broken(score))


def test_distinct_items_are_distinct_and_bounded():
    items = distinct_items(make_task("addition"), 128, seed=0)
    assert len({i.key for i in items}) == len(items) == 128
    small = distinct_items(make_task("addition", digits=1), 128, seed=0)
    assert 5 < len(small) < 55  # all there are


def test_constant_answer_baseline():
    task = make_task("letter_count", length=3)
    accuracy, answer = constant_answer_baseline(task, 200, seed=0)
    items = distinct_items(task, 200, seed=0)
    best = max({i.answer for i in items}, key=lambda a: sum(i.answer == a for i in items))
    assert answer == best and accuracy == sum(i.answer == best for i in items) / 200
    assert constant_answer_baseline(make_task("addition"), 200).accuracy < 0.06

    def tolerant(text, gold, question):  # pays for 0 whatever the gold answer is
        return Score(float(text.strip() in ("0", gold)))

    assert constant_answer_baseline(broken(tolerant), 50) == (1.0, "0")


def test_every_registered_task_is_tested_here():
    assert sorted(TASKS) == sorted(BUILT_IN)


@pytest.mark.parametrize("agent", ["white", -1, 1.0, True])
def test_a_role_is_a_number(agent):
    with pytest.raises(ValueError, match="agent must be the number of a role"):
        Item(messages=({"role": "user", "content": "x"},), answer="1", agent=agent)
