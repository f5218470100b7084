"""The ledger of assignments, alone."""

import numpy as np
import pytest

from jaxrl_llm.fleet.assignments import Assignments
from jaxrl_llm.types import Prompt


def prompt(number):
    return Prompt(uid=f"p{number}", tokens=np.array([1, 2, number]))


@pytest.fixture
def two():
    ledger = Assignments()
    for number in (0, 1):
        ledger.add(number, prompt(number), version=3)
    return ledger


def test_a_group_is_handed_out_answered_and_forgotten(two):
    given = two.hand_out(0, "a", now=5.0)
    assert (given.number, given.attempt, given.version, given.prompt.uid) == (0, 1, 3, "p0")
    assert two.pending() == [1] and two.load("a") == 1 and two.versions() == {3}
    assert two.answer(0, 1, "a") == "accepted"
    assert two.answer(0, 1, "a") == "duplicate"
    two.forget(0)
    assert two.answer(0, 1, "a") == "duplicate"
    assert two.pending() == [1]


def test_what_a_lost_worker_had_is_pending_once_and_its_answers_are_late(two):
    two.hand_out(0, "a", now=0.0)
    two.hand_out(1, "a", now=0.0)
    assert two.answer(0, 1, "a") == "accepted"
    assert two.take_back("a") == [1] and two.take_back("a") == []
    assert two.pending() == [1]
    assert two.answer(1, 1, "a") == "late"  # before anybody else has it
    assert two.hand_out(1, "b", now=1.0).attempt == 2
    assert two.answer(1, 1, "a") == "late"
    assert two.answer(1, 2, "a") == "late"
    assert two.answer(1, 2, "b") == "accepted"
    assert two.answer(1, 1, "a") == "late" and two.answer(1, 2, "b") == "duplicate"


def test_nothing_is_submitted_or_handed_out_twice(two):
    with pytest.raises(ValueError, match=r"group 0 \(p9\) has been submitted"):
        two.add(0, prompt(9), version=3)
    with pytest.raises(ValueError, match=r"group 7 \(p0\) has been submitted"):
        two.add(7, prompt(0), version=3)
    two.hand_out(0, "a", now=0.0)
    with pytest.raises(ValueError, match="not pending"):
        two.hand_out(0, "b", now=0.0)


def test_overdue_counts_from_the_hand_out_and_knows_the_attempt(two):
    two.hand_out(0, "a", now=0.0)
    two.hand_out(1, "b", now=8.0)
    limit = lambda attempt: 10.0 * attempt  # noqa: E731
    assert two.overdue(10.0, limit) == {}
    assert two.overdue(11.0, limit) == {"a": 0}
    two.take_back("a")
    two.hand_out(0, "b", now=11.0)
    assert two.overdue(19.0, limit) == {"b": 1}
