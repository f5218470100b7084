"""Checks of a task before a run: does its verifier work, and what does a constant answer earn?"""

from __future__ import annotations

import collections
from typing import NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.math import answers_equal
from jaxrl_llm.rewards.score import computed
from jaxrl_llm.rollout.task import Item, SplitName, Task

__all__ = ["Baseline", "SelfTest", "constant_answer_baseline", "distinct_items", "reward_parts", "self_test"]

HOSTILE = (
    "",
    " ",
    "\n",
    "\x00",
    "banana",
    "<answer></answer>",
    r"\boxed{}",
    r"\boxed{9^{9^{9^{9}}}}",
    "9**9**9**9",
    "(" * 3000,
    "7" * 20000,
    r"\boxed{" * 3000,
    "<answer>" * 3000,
    "__import__('os').getcwd()",
    " ".join(map(str, range(1000))),
)


class SelfTest(NamedTuple):
    """What the verifier self-test looked at."""

    items: int  # items tried
    right: int  # gold answers paid in full
    wrong: int  # wrong, empty and hostile answers that earned 0
    unscored: int  # answers for which the verifier gave no score (None)
    notes: tuple[str, ...]


def self_test(task: Task, *, items: int = 4, seed: int = 0) -> SelfTest:
    """Checks that the gold answer earns 1 and that wrong, empty and hostile answers earn 0.

    Raises:
      InputError: the verifier pays for something it must not pay for, or does not pay for the gold answer; or
        it never produces a score.
    """
    split = task.split("train", seed)
    tried = [split.item(i) for i in range(items if split.size is None else min(items, split.size))]
    right = wrong = unscored = 0
    notes: list[str] = []

    def value(item: Item, completion: str, what: str) -> float | None:
        nonlocal unscored
        try:
            score = computed(task.score(item, completion), task.name)
        except Exception as error:  # any error here would stop a run later; it is reported as bad input
            raise InputError(
                f"verifier self-test: task {task.name} raised {type(error).__name__} on {what}: {error}. A verifier "
                "returns Score(None, reason=…) when it cannot judge."
            ) from error
        if score.value is None:
            unscored += 1
            notes.append(f"no score for {what}: {score.reason}")
        return score.value

    for item in tried:
        if item.answer is None:
            notes.append("no gold answer: only wrong answers could be tried")
        else:
            paid = value(item, task.write(item.answer), "the gold answer")
            if paid is None or paid < 1.0:
                raise InputError(
                    f"verifier self-test: task {task.name} pays {paid} for the gold answer {item.answer!r} to "
                    f"{item.question[:120]!r}. A policy could never be right."
                )
            right += 1
        gold = item.answer or ""
        wrongs = [h for h in HOSTILE if not h.strip() or h.strip() != gold.strip()]
        if task.exact:
            others = [
                o.answer for o in tried if o.answer and not answers_equal(o.answer, gold, percent_asked=True)
            ]
            wrongs += [task.write(answer) for answer in others]
            wrongs.append(task.write(f"{gold} or {others[0] if others else 'not'}"))
        for completion in wrongs:
            paid = value(item, completion, f"the wrong answer {completion[:40]!r}")
            if paid is not None and paid > 0.0:
                raise InputError(
                    f"verifier self-test: task {task.name} pays {paid} for {completion[:80]!r}, which is no answer to "
                    f"{item.question[:120]!r} (gold {item.answer!r}). A policy would learn to write that."
                )
            wrong += paid is not None
    return SelfTest(len(tried), right, wrong, unscored, tuple(dict.fromkeys(notes)))


def reward_parts(task: Task, *, items: int = 4, seed: int = 0) -> tuple[str, ...]:
    """Names of the rewards that a task gives: "reward", its score, and the parts of its score.

    Found by scoring a gold and an empty answer of a few items, so that a task need not declare them.
    """
    split = task.split("train", seed)
    names = {"reward": None}
    for index in range(items if split.size is None else min(items, split.size)):
        item = split.item(index)
        for text in ("" if item.answer is None else task.write(item.answer), ""):
            names |= dict.fromkeys(computed(task.score(item, text), task.name).parts)
    return tuple(names)


def distinct_items(task: Task, n: int, *, seed: int, split: SplitName = "eval") -> list[Item]:
    """The first n items of a split with different contents; fewer when the split has no more.

    The search is bounded by 20 n draws. A small space repeats itself, and an item that is asked twice says
    nothing new while it narrows the confidence interval.
    """
    source = task.split(split, seed)
    limit = 20 * n if source.size is None else source.size
    found: dict[str, Item] = {}
    for index in range(limit):
        if len(found) == n:
            break
        item = source.item(index)
        found.setdefault(item.key or item.question, item)
    return list(found.values())


class Baseline(NamedTuple):
    """The best that one answer to every question can do."""

    accuracy: float
    answer: str | None  # None: no gold answers to choose from


def constant_answer_baseline(
    task: Task, n: int, *, seed: int = 0, split: SplitName = "eval", items: list[Item] | None = None
) -> Baseline:
    """Accuracy of the best constant answer over n items, judged by the task's own verifier.

    Tried are the three most frequent gold answers, 0 and 1: a verifier with a tolerance may pay a constant
    that no gold answer equals.
    """
    items = distinct_items(task, n, seed=seed, split=split) if items is None else items
    counts = collections.Counter(i.answer for i in items if i.answer is not None)
    if not counts:
        return Baseline(0.0, None)
    candidates = dict.fromkeys([answer for answer, _ in counts.most_common(3)] + ["0", "1"])
    best = Baseline(0.0, None)
    for answer in candidates:
        completion = task.write(answer)
        accuracy = sum((task.score(i, completion).value or 0.0) >= 1.0 for i in items) / len(items)
        if accuracy > best.accuracy:
            best = Baseline(accuracy, answer)
    return best
