"""Decisions of several processes, with threads in place of processes: each has an index, and what one sends all get."""

import threading

import pytest

from jaxrl_llm.errors import DamagedError, InputError, SnapshotError
from jaxrl_llm.parallel import agree
from jaxrl_llm.stopping import StoppedError, StopRequest


@pytest.fixture
def run_as(monkeypatch):
    """run_as(number, body) -> what body(index) gave or raised, for each of so many processes."""

    def run(number, body):
        own, sent, barrier = threading.local(), {}, threading.Barrier(number, timeout=30)

        def exchange(message, size):
            assert len(message[:size]) <= size
            sent[own.index] = message[:size].ljust(size, b"\0")
            barrier.wait()
            messages = [sent[index] for index in range(number)]
            barrier.wait()
            assert len({len(m) for m in messages}) == 1  # a collective has one shape
            return messages

        monkeypatch.setattr(agree, "several", lambda: True)
        monkeypatch.setattr(agree, "_exchange", exchange)
        monkeypatch.setattr(agree.jax, "process_index", lambda: own.index)
        outcomes = [None] * number

        def start(index):
            own.index = index
            try:
                outcomes[index] = body(index)
            except Exception as error:
                outcomes[index] = error

        threads = [threading.Thread(target=start, args=(index,)) for index in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return outcomes

    return run


def test_alone_everything_is_the_plain_thing():
    assert not agree.several() and agree.is_first()
    assert agree.on_first(lambda: 3) == 3 and agree.together(lambda: 4) == 4
    assert agree.any_process(True) and not agree.any_process(False)
    agree.check_same("config", {"a": 1})
    with pytest.raises(InputError, match="mine"):
        agree.on_first(lambda: (_ for _ in ()).throw(InputError("mine")))


@pytest.mark.parametrize("value", [None, {"a": [1, "é", 0.1]}, "x" * 499, ["y" * 5000]])
def test_the_first_process_alone_decides(run_as, value):
    calls = []

    def decide():
        calls.append(agree.jax.process_index())
        return value

    assert run_as(3, lambda index: agree.on_first(decide)) == [value] * 3
    assert calls == [0]


def test_what_the_first_process_does_need_not_be_told(run_as):
    calls = []
    assert run_as(2, lambda index: agree.do_on_first(lambda: calls.append(index) or object())) == [None, None]
    assert calls == [0]


class Strange(Exception):
    def __init__(self, one, two):  # cannot be made from its text again
        super().__init__(one)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("no " + "x" * 900), InputError),
        (DamagedError("cut"), DamagedError),
        (SnapshotError("disk"), SnapshotError),
        (Strange("odd", 2), RuntimeError),
    ],
)
def test_what_the_first_process_raises_all_raise(run_as, error, kind):
    def fail():
        raise error

    first, second = run_as(2, lambda index: agree.on_first(fail))
    assert first is error  # with its traceback
    assert type(second) is kind and str(error) in str(second)


def test_what_one_process_raises_all_raise(run_as):
    def fails_in_one(index):
        def look():
            if index == 1:
                raise InputError("process 1 does not see it")
            return index

        return agree.together(look)

    assert [str(outcome) for outcome in run_as(3, fails_in_one)] == ["process 1 does not see it"] * 3
    assert run_as(2, lambda index: agree.together(lambda: index)) == [0, 1]


def test_processes_that_were_not_started_alike(run_as):
    same = run_as(2, lambda index: agree.check_same("config", {"steps": 3}))
    assert same == [None, None]
    for other, words in (
        ({"steps": 4}, "steps=4 and process 0 has 3"),
        ({}, "steps=None and process 0 has 3"),
    ):
        for outcome in run_as(
            2, lambda index, other=other: agree.check_same("config", [{"steps": 3}, other][index])
        ):
            assert isinstance(outcome, InputError) and words in str(outcome) and "process 1" in str(outcome)


def test_all_stop_at_the_same_look_when_one_is_asked(run_as):
    def train(index):
        stop = StopRequest(agree.any_process)
        for look in range(100):
            if look == 20 and index == 1:
                stop.asked = True  # as its handler of SIGTERM does
            try:
                stop.check(often=True)
            except StoppedError:
                return look
        return None

    stopped = run_as(3, train)
    assert stopped == [stopped[0]] * 3 and 20 <= stopped[0] < 30


def test_a_stop_between_two_steps_is_agreed_on_at_once(run_as):
    def train(index):
        stop = StopRequest(agree.any_process)
        stop.asked = index == 2
        with pytest.raises(StoppedError):
            stop.check()
        return True

    assert run_as(3, train) == [True] * 3


def test_alone_every_look_counts():
    stop = StopRequest()
    stop.check(often=True)
    stop.asked = True
    with pytest.raises(StoppedError):
        stop.check(often=True)
