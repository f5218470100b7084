"""Families of reasoning_gym, and the traps of their scorers."""

import builtins
import json

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout import gym
from jaxrl_llm.rollout.checks import constant_answer_baseline, distinct_items, self_test
from jaxrl_llm.rollout.task import make_task

SMALL = {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def test_items_are_reproducible_and_divided_by_content():
    task = make_task("reasoning_gym:chain_sum", SMALL)
    train, held_out = task.split("train", 0), task.split("eval", 0)
    again = make_task("reasoning_gym:chain_sum", SMALL).split("train", 0)
    order = [700, 3, 0]
    assert [train.item(i) for i in order] == [again.item(i) for i in order]
    keys = {train.item(i).key for i in range(150)}
    assert not keys & {held_out.item(i).key for i in range(60)}
    assert not keys & {task.split("eval", 1).item(i).key for i in range(60)}
    assert json.loads(json.dumps(train.item(0).payload())) == train.item(0).payload()
    assert train.item(0).prefix == "Answer:" and task.stop == ("\n",)


def test_only_the_exact_extracted_answer_is_paid():
    task = make_task("reasoning_gym:chain_sum", SMALL)
    item = task.split("train", 0).item(0)
    assert task.score(item, f" {item.answer}\n").value == 1.0
    for text in (
        f"The answer is {item.answer}",
        f" {item.answer} .",
        " ".join(map(str, range(100))),
        "",
        "banana",
    ):
        assert task.score(item, text).value == 0.0
    assert task.score(item, f"The answer is {item.answer}").parts == {"format": 1.0, "lenient": 1.0}
    tagged = make_task("reasoning_gym:chain_sum", SMALL, grader="tag")
    item = tagged.split("train", 0).item(0)
    assert "<answer>" in item.question and item.prefix == ""
    assert tagged.score(item, f"hm <answer>0</answer> <answer> {item.answer} </answer>").value == 1.0
    assert tagged.score(item, item.answer).value == 0.0


def test_a_crash_of_the_scorer_is_none_with_a_reason():
    task = make_task("reasoning_gym:prime_factorization")
    item = task.split("train", 0).item(0)
    score = task.score(item, "banana")
    assert score.value is None and "ValueError" in score.reason
    assert task.score(item, f" {item.answer}").value == 1.0
    result = self_test(task)
    assert result.unscored > 0 and any("no score" in note for note in result.notes)


def test_free_credit_is_not_paid():
    task = make_task("reasoning_gym:game_of_life_halting")
    assert task.judge == "text"
    item = task.split("train", 0).item(0)
    assert task.score(item, "banana").value == 0.0
    assert task.score(item, item.answer).value == 1.0
    self_test(task)


def test_families_without_a_gold_answer_are_simulated():
    task = make_task("reasoning_gym:graph_color")
    item = task.split("train", 0).item(0)
    assert item.answer is None and task.judge == "package"
    for text in ("banana", "None", "{}", ""):
        assert (task.score(item, text).value or 0.0) == 0.0
    result = self_test(task)
    assert result.right == 0 and "no gold answer" in result.notes[0]
    assert constant_answer_baseline(task, 5).answer is None


def test_answers_are_never_evaluated_as_code(monkeypatch):
    """Scorers that call eval or sympy's parser are replaced; eval itself must not be reached."""
    tasks = {f: make_task(f"reasoning_gym:{f}") for f in ("spiral_matrix", "countdown", "string_insertion")}
    items = {f: task.split("train", 0).item(0) for f, task in tasks.items()}

    def forbidden(*args, **more):
        raise AssertionError("eval was called")

    monkeypatch.setattr(builtins, "eval", forbidden)
    for family, task in tasks.items():
        assert task.score(items[family], "__import__('os').getcwd()").value == 0.0
        assert task.score(items[family], "9**9**9**9").value == 0.0
        assert task.score(items[family], task.write(items[family].answer)).value == 1.0
    monkeypatch.undo()
    assert tasks["countdown"].judge == "expression" and tasks["spiral_matrix"].judge == "text"
    with pytest.raises(InputError, match="evaluates the answer as code"):
        make_task("reasoning_gym:n_queens", grader="tag")


def test_countdown_needs_exactly_the_given_numbers():
    task = make_task("reasoning_gym:countdown")
    item = task.split("train", 0).item(1)
    assert task.score(item, f"({item.answer}) * 1").value == 0.0
    target = gym.evaluate_expression(item.answer)[0]
    assert task.score(item, str(target)).value == 0.0
    assert task.score(item, f" ({item.answer})").value == 1.0


@pytest.mark.parametrize(
    "name,args,words",
    [
        ("gdc", {}, ("Did you mean gcd?", "chain_sum")),
        ("codeio", {}, ("not reproducible",)),
        ("composite", {}, ("other families",)),
        ("base_conversion", {"config": {"min_base": 2, "max_base": 2}}, ("for ever", "max_base")),
        ("gcd", {"config": {"max_valu": 3}}, ("max_valu", "Did you mean max_value?")),
        ("gcd", {"config": {"size": 3}}, ("size",)),
        ("gcd", {"config": {"min_numbers": 0}}, ("refuses config",)),
        ("gcd", {"graders": "tag"}, ("Did you mean grader?",)),
        ("gcd", {"grader": "boxd"}, ("Did you mean boxed?",)),
        ("rotate_matrix", {}, ("several lines", "tag")),
    ],
)
def test_bad_names_and_settings_are_refused(name, args, words):
    with pytest.raises(InputError) as error:
        make_task(f"reasoning_gym:{name}", args)
    for word in words:
        assert word in str(error.value)


def test_a_family_that_never_produces_an_item_is_given_up_on(monkeypatch):
    import threading

    monkeypatch.setattr(gym, "FIRST_ITEM_SECONDS", 0.2)
    release = threading.Event()
    try:
        with pytest.raises(InputError, match="did not produce an item within 0.2 s"):
            gym._within(gym.FIRST_ITEM_SECONDS, release.wait, "task x")
    finally:
        release.set()
    with pytest.raises(KeyError):
        gym._within(5.0, lambda: {}["x"], "task x")


def test_the_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("reasoning_gym"):
            raise ImportError("No module named 'reasoning_gym'")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"jaxrl-llm\[demo\]"):
        make_task("reasoning_gym:gcd")


def test_a_tolerant_scorer_shows_in_the_constant_baseline():
    """coin_flip accepts anything near the right probability: the constant 0 earns a lot without being a gold answer."""
    task = make_task("reasoning_gym:coin_flip")
    items = distinct_items(task, 20, seed=0)
    accuracy, answer = constant_answer_baseline(task, 20, seed=0)
    assert answer == "0" and accuracy > 0.5 > sum(i.answer == "0" for i in items) / 20


@pytest.mark.slow
def test_every_family_is_judged_or_refused():
    """Each family passes the self-test, or is refused with a message; nothing pays for nonsense."""
    import reasoning_gym.factory

    refused = []
    for family in sorted(reasoning_gym.factory.DATASETS):
        for grader in ("line", "tag"):
            try:
                task = make_task(f"reasoning_gym:{family}", grader=grader)
            except InputError as error:
                message = str(error)
                continue
            self_test(task, items=2)
            break
        else:
            assert family in message
            refused.append(family)
    assert refused == ["codeio", "composite", "intermediate_integration", "n_queens", "simple_integration"]
