"""The learner's side: hands groups out, delivers weights, watches the workers and replaces those that fail.

Everything happens in `pump`, on the thread of the training loop. Between two pumps the workers go on with what they
have. Deadlines count *attended* seconds, at most one for every pump, so that nobody is found slow because the
learner was busy with an update.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.assignments import Assignments
from jaxrl_llm.fleet.messages import (
    Answer,
    Drop,
    Failed,
    Gone,
    Held,
    Load,
    Package,
    Ready,
    Refused,
    Reply,
    Transport,
    Work,
)
from jaxrl_llm.fleet.weights import pack
from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.types import Prompt, StopReason

__all__ = ["FAULTS", "Event", "Fleet", "FleetError", "Patience"]

FAULTS = (
    "died",  # its process ended
    "hung",  # it says nothing any more
    "slow",  # it is alive, and a prompt has been with it for too long
    "not_started",  # it did not come up in time
    "refused_weights",  # they arrived damaged; sent again
    "unanswered_weights",  # nothing was heard of them; sent again
    "undelivered_weights",  # sent as often as is allowed; the worker is replaced
    "invalid_answer",  # of another prompt or other weights, or not whole; the worker is replaced
    "late_answer",  # to an attempt that somebody else has by now; not used
    "duplicate_answer",  # to what was answered before; not used
)


class FleetError(RuntimeError):
    """The fleet cannot go on; says why and what to do. The last snapshot of the run is good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """When a worker is given up, in attended seconds, and when the fleet is."""

    start: float = 300.0  # until a new worker runs: imports, and a place in the cluster
    silence: float = 60.0  # without a sign of life
    weights: float = 120.0  # until weights that were sent are held
    first_answer: float = 1800.0  # while fewer than 8 answers are known: workers compile
    answer: float = 300.0  # at least so long for an answer
    slow: float = 10.0  # and so many times the median of the last answers
    sends: int = 4  # of the weights of a version to one worker
    attempts: int = 5  # at a prompt
    losses: int = 8  # of workers, one after the other, without any answer in between
    backoff: float = 0.5  # before the second try of anything; doubled for each one after, at most 30


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in a fleet."""

    kind: str  # one of FAULTS, "joined", or "left"
    worker: str
    message: str
    uid: str | None = None  # of the prompt it is about
    attempt: int | None = None
    version: int | None = None  # of the weights it is about
    reissued: int = 0  # prompts that went back to be given to others
    step: int = 0  # train steps done when it was noticed


@dataclasses.dataclass
class _Delivery:
    """Weights on their way to one worker."""

    sends: int = 0
    sent: float | None = None  # None: not on the way
    again: float = 0.0  # not before


@dataclasses.dataclass
class _Worker:
    started: float
    heard: float
    ready: bool = False
    overdue: bool = False  # its start has been reported
    held: set[int] = dataclasses.field(default_factory=set)
    deliveries: dict[int, _Delivery] = dataclasses.field(default_factory=dict)  # by version


class Fleet:
    """Workers that answer prompts. Which of them does, and how often it was tried, changes no answer."""

    def __init__(
        self,
        transport: Transport,
        size: int,
        *,
        samples: int,
        outstanding: int,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[Event], None] | None = None,
    ):
        """
        Args:
          transport: starts the workers and carries the messages.
          size: workers, at least 1.
          samples: completions of a prompt.
          outstanding: most groups that are submitted and not forgotten.
          clock: seconds.
          report: is told everything that happens, as it happens.
        """
        self._transport, self._samples, self._outstanding = transport, samples, outstanding
        self._patience = Patience() if patience is None else patience
        self._clock, self._report = clock, report
        self._assignments = Assignments()
        self._answers: dict[int, Sequence[Completion]] = {}
        self._packages: dict[int, Package] = {}  # by version, those that prompts need and the newest
        self._workers: dict[str, _Worker] = {}
        self._names = 0
        self._size = 0
        self._attended = 0.0
        self._last = clock()
        self._losses: list[str] = []  # reasons, since the last answer
        self._start_again = 0.0  # no worker is started before
        self._times: collections.deque[float] = collections.deque(maxlen=64)  # of the last answers
        self._counts: collections.Counter[str] = collections.Counter()  # since `figures`
        self.resize(size)

    # ------------------------------------------------------------------------------------- work

    def publish(self, params: Any, version: int) -> None:
        """Weights that prompts submitted from now on may ask for. Copies them."""
        if version not in self._packages:
            self._packages[version] = pack(params, version)

    def submit(self, number: int, prompt: Prompt, version: int) -> None:
        """A prompt to be answered under published weights; lower numbers are handed out first.

        Raises:
          ValueError: the number or the uid is there already, or the version is not published.
        """
        if version not in self._packages:
            raise ValueError(f"fleet: no weights of version {version} are published.")
        self._assignments.add(number, prompt, version)

    def answer(self, number: int) -> Sequence[Completion] | None:
        """The samples of a group by index, or None while it is not answered."""
        return self._answers.get(number)

    def forget(self, number: int) -> None:
        """The group has been trained on or dropped."""
        self._assignments.forget(number)
        self._answers.pop(number, None)

    def pump(self, timeout: float = 0.0) -> None:
        """Takes what has arrived (waits for it so many seconds), and does what follows from it and from the time.

        Raises:
          FleetError: the fleet cannot go on.
          InputError: a prompt that can never be answered.
        """
        replies = self._transport.receive(timeout)
        now = self._clock()
        self._attended += min(max(0.0, now - self._last), 1.0)
        self._last = now
        for worker, reply in replies:
            self._take(worker, reply)
        self._watch()
        self._staff()
        self._deliver()
        self._hand_out()

    # ------------------------------------------------------------------------------------- workers

    def resize(self, size: int) -> None:
        """So many workers from now on: new ones join, or the youngest leave and their prompts go to others."""
        if size < 1:
            raise ValueError(f"fleet: size must be at least 1, got {size}.")
        self._size = size
        for name in list(self._workers)[size:]:
            self._remove(name, "left", "the fleet is made smaller")
        self._staff()

    @property
    def workers(self) -> list[str]:
        """Names of the workers that run."""
        return [name for name, worker in self._workers.items() if worker.ready]

    def figures(self) -> dict[str, float]:
        """What happened since the last call, by `time/fleet/…`; and how many workers run."""
        counts, self._counts = self._counts, collections.Counter()
        names = (*FAULTS, "joined", "left", "reissued")
        return {
            "time/fleet/workers": float(len(self.workers)),
            "time/fleet/faults": float(sum(counts[kind] for kind in FAULTS)),
        } | {f"time/fleet/{name}": float(counts[name]) for name in names}

    def close(self) -> None:
        """Ends all workers."""
        self._transport.close()

    # ------------------------------------------------------------------------------------- what arrives

    def _take(self, name: str, reply: Reply) -> None:
        worker = self._workers.get(name)
        if worker is not None:
            worker.heard = self._attended
        match reply:
            case Answer():
                self._answered(name, reply)
            case Ready() if worker is not None and not worker.ready:
                worker.ready = True
                self._tell(Event("joined", name, f"{name} runs"))
            case Held() if worker is not None:
                self._is_held(name, worker, reply)
            case Refused() if worker is not None:
                self._is_refused(name, worker, reply)
            case Failed() if self._assignments.is_current(reply.number, reply.attempt, name):
                uid = self._assignments.prompt(reply.number).uid
                raise InputError(f"fleet: the prompt {uid} cannot be answered. {reply.reason}")
            case Gone() if worker is not None:
                self._lose(name, "died", reply.reason)
            case _:
                pass  # of a worker that was given up, or nothing new

    def _answered(self, name: str, answer: Answer) -> None:
        problem = None
        if self._assignments.is_current(answer.number, answer.attempt, name):
            problem = self._wrong(answer)
        uid = answer.completions[0].prompt.uid if answer.completions else None
        about: dict[str, Any] = {"uid": uid, "attempt": answer.attempt}
        if problem is not None:
            self._lose(name, "invalid_answer", problem, **about)
            return
        taken = self._assignments.waited(answer.number, self._attended)
        verdict = self._assignments.answer(answer.number, answer.attempt, name)
        if verdict != "accepted":
            what = "has been given to another worker" if verdict == "late" else "has been answered"
            self._tell(Event(f"{verdict}_answer", name, f"{name} answered {uid}, which {what}", **about))
            return
        self._answers[answer.number] = answer.completions
        self._times.append(taken)
        self._losses.clear()

    def _wrong(self, answer: Answer) -> str | None:
        """What is wrong with an answer to the attempt that is under way."""
        prompt, version = self._assignments.prompt(answer.number), self._assignments.version(answer.number)
        if answer.fingerprint != self._packages[version].fingerprint:
            return f"it served weights with the fingerprint {answer.fingerprint or 'of nothing'}, not version {version}"
        if [c.index for c in answer.completions] != list(range(self._samples)):
            return f"it has the samples {[c.index for c in answer.completions]} of {self._samples}"
        for c in answer.completions:
            if c.prompt.uid != prompt.uid or not np.array_equal(c.prompt.tokens, prompt.tokens):
                return f"it is about the prompt {c.prompt.uid}, not {prompt.uid}"
            if not len(c.tokens) == len(c.logprobs) == len(c.versions) == len(c.kv_versions):
                return f"sample {c.index} is not whole"
            if not (np.all(c.versions == version) and np.all(c.kv_versions == version)):
                stamps = sorted({*c.versions.tolist(), *c.kv_versions.tolist()})
                return f"sample {c.index} has tokens of the versions {stamps}, not of {version}"
            if c.stop is StopReason.CANCELLED:
                return f"sample {c.index} was cancelled"
        return None

    def _is_held(self, name: str, worker: _Worker, held: Held) -> None:
        package = self._packages.get(held.version)
        if package is None:
            return  # not needed any more
        if held.fingerprint != package.fingerprint:
            self._is_refused(
                name, worker, Refused(held.version, f"it has the fingerprint {held.fingerprint} of others")
            )
            return
        worker.held.add(held.version)
        worker.deliveries.pop(held.version, None)

    def _is_refused(self, name: str, worker: _Worker, refused: Refused) -> None:
        delivery = worker.deliveries.get(refused.version)
        if delivery is not None and delivery.sent is not None:
            self._send_again(name, delivery, "refused_weights", refused.version, refused.reason)

    # ------------------------------------------------------------------------------------- what time brings

    def _watch(self) -> None:
        patience, now = self._patience, self._attended
        for name, worker in list(self._workers.items()):
            if not worker.ready:
                if now - worker.started > patience.start and not worker.overdue:
                    worker.overdue = True
                    reason = f"{name} has not come up in {patience.start:.0f} s; it is still waited for"
                    self._tell(Event("not_started", name, reason))
                continue
            if now - worker.heard > patience.silence:
                self._lose(name, "hung", f"nothing was heard of it for {now - worker.heard:.0f} s")
                continue
            for version, delivery in list(worker.deliveries.items()):
                if (
                    name in self._workers
                    and delivery.sent is not None
                    and now - delivery.sent > patience.weights
                ):
                    reason = f"nothing was heard of them for {now - delivery.sent:.0f} s"
                    self._send_again(name, delivery, "unanswered_weights", version, reason)
        for name, number in self._assignments.overdue(now, self._limit).items():
            if name in self._workers:
                waited = self._assignments.waited(number, now)
                about: dict[str, Any] = {
                    "uid": self._assignments.prompt(number).uid,
                    "attempt": self._assignments.attempts(number),
                }
                self._lose(name, "slow", f"a prompt has been with it for {waited:.0f} s", **about)
        if self._workers and all(worker.overdue and not worker.ready for worker in self._workers.values()):
            raise FleetError(
                f"fleet: none of {self._size} workers has come up in {patience.start:.0f} s. Does the cluster have room for "
                "them (`ray status`), and can its machines import jaxrl_llm?"
            )

    def _limit(self, attempt: int) -> float:
        """Attended seconds that a worker may take for a prompt; doubled with every attempt at it."""
        p = self._patience
        usual = p.first_answer
        if len(self._times) >= 8:
            usual = max(p.answer, p.slow * statistics.median(self._times))
        return usual * 2 ** (attempt - 1)

    def _backoff(self, tries: int) -> float:
        """Attended seconds before the next try, after so many that failed."""
        return min(30.0, self._patience.backoff * 2 ** (tries - 1)) if tries else 0.0

    def _send_again(self, name: str, delivery: _Delivery, kind: str, version: int, reason: str) -> None:
        delivery.sent, delivery.again = None, self._attended + self._backoff(delivery.sends)
        message = f"weights of version {version}: {reason}"
        self._tell(Event(kind, name, message, version=version, attempt=delivery.sends))
        if delivery.sends >= self._patience.sends:
            self._lose(
                name,
                "undelivered_weights",
                f"{message}; they were sent {delivery.sends} times",
                version=version,
            )

    # ------------------------------------------------------------------------------------- what follows

    def _staff(self) -> None:
        """Starts the workers that are missing."""
        while len(self._workers) < self._size and self._attended >= self._start_again:
            name = f"worker-{self._names}"
            self._names += 1
            self._workers[name] = _Worker(self._attended, self._attended)
            self._transport.start(name)

    def _deliver(self) -> None:
        """Sends weights that prompts wait for to every worker, and says which are not needed any more."""
        needed = self._assignments.versions()
        newest = max(self._packages, default=0)
        oldest = min(needed, default=newest)
        stale = [version for version in self._packages if version < oldest]
        for version in stale:
            del self._packages[version]
        if stale:
            self._transport.forget(oldest)
        for name, worker in self._workers.items():
            if not worker.ready:
                continue
            if stale:
                worker.held = {version for version in worker.held if version >= oldest}
                worker.deliveries = {v: d for v, d in worker.deliveries.items() if v >= oldest}
                self._transport.send(name, Drop(oldest))
            for version in sorted(needed - worker.held):
                delivery = worker.deliveries.setdefault(version, _Delivery())
                if delivery.sent is None and self._attended >= delivery.again:
                    delivery.sends, delivery.sent = delivery.sends + 1, self._attended
                    self._transport.send(name, Load(self._packages[version], delivery.sends))

    def _hand_out(self) -> None:
        """Gives pending groups to the workers that have fewest, a fair share to each and no more."""
        share = -(-self._outstanding // self._size)
        loads = {name: self._assignments.load(name) for name, worker in self._workers.items() if worker.ready}
        work: dict[str, list[Any]] = {name: [] for name in loads}
        for number in self._assignments.pending():
            name = min(loads, key=lambda name: loads[name], default=None)
            if name is None or loads[name] >= share:
                break
            if self._assignments.attempts(number) >= self._patience.attempts:
                raise FleetError(
                    f"fleet: {self._patience.attempts} workers in a row were lost while they had the prompt "
                    f"{self._assignments.prompt(number).uid}; the last: {self._losses[-1] if self._losses else 'left'}. See "
                    "fleet.jsonl in the run folder."
                )
            loads[name] += 1
            work[name].append(self._assignments.hand_out(number, name, self._attended))
        for name, assignments in work.items():
            if assignments:
                self._transport.send(name, Work(tuple(assignments)))

    def _lose(self, name: str, kind: str, reason: str, **about: Any) -> None:
        """Gives a worker up: its prompts go to others, and another one is started in its place.

        Raises:
          FleetError: too many were lost, one after the other.
        """
        self._remove(name, kind, reason, **about)
        self._losses.append(f"{name}: {reason}")
        if len(self._losses) >= self._patience.losses + self._size:
            last = "; ".join(self._losses[-3:])
            raise FleetError(
                f"fleet: {len(self._losses)} workers were lost without an answer in between. The last: {last}. See fleet.jsonl in "
                "the run folder; go on with --resume when the cause is gone."
            )
        self._start_again = self._attended + self._backoff(len(self._losses) - 1)

    def _remove(self, name: str, kind: str, reason: str, **about: Any) -> None:
        del self._workers[name]
        back = self._assignments.take_back(name)
        self._counts["reissued"] += len(back)
        self._transport.stop(name)
        self._tell(Event(kind, name, f"{name}: {reason}", reissued=len(back), **about))

    def _tell(self, event: Event) -> None:
        self._counts[event.kind] += 1
        if self._report is not None:
            self._report(dataclasses.replace(event, step=max(self._packages, default=0)))
