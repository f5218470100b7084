"""The side that samples: an engine, and the weights that its assignments ask for. Knows nothing of who calls it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.messages import (
    Answer,
    Assignment,
    Drop,
    Failed,
    Held,
    Load,
    Package,
    Refused,
    Reply,
    Request,
    Work,
)
from jaxrl_llm.fleet.weights import DamagedWeightsError, check, unpack
from jaxrl_llm.sampler.base import Completion, SamplingParams

__all__ = ["Engines", "Worker"]


class Engines(Protocol):
    """Makes engines without weights: a `Sampler`."""

    def engine(self, rows: int) -> Any:
        """An `Engine` for so many completions at a time."""


@dataclasses.dataclass
class _Group:
    assignment: Assignment
    ids: set[int]  # of its completions that have not ended
    done: list[Completion] = dataclasses.field(default_factory=list)


class Worker:
    """Answers assignments, each under the weights of its version alone.

    Weights are held when every leaf of them is verified, and served, whole, when the groups under way have ended:
    no sample spans versions. Within a version new groups join those under way.
    """

    def __init__(self, sampler: Engines, sampling: SamplingParams, rows: int):
        """
        Args:
          sampler: makes the engine.
          sampling: of every prompt.
          rows: most completions that are under way here; more assignments wait.
        """
        self._sampler, self._sampling = sampler, sampling
        self._groups_at_once = max(1, rows // sampling.per_prompt)
        self._engine: Any = None
        self._held: dict[int, Package] = {}
        self._served: Package | None = None
        self._fingerprint = ""  # of what the engine serves, as the engine computed it
        self._waiting: dict[int, Assignment] = {}  # by number
        self._groups: dict[int, _Group] = {}  # under way, by number
        self._seen: dict[int, Assignment] = {}  # the latest attempt of what has arrived here, by number

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._groups) or any(a.version in self._held for a in self._waiting.values())

    def receive(self, request: Request) -> list[Reply]:
        """Takes a message; what there is to say to it."""
        match request:
            case Load():
                return [self._load(request.package)]
            case Work():
                for assignment in request.assignments:
                    known = self._seen.get(assignment.number)
                    if (
                        known is None or known.attempt < assignment.attempt
                    ):  # one that comes twice is worked on once
                        self._seen[assignment.number] = assignment
                        self._waiting[assignment.number] = assignment
            case Drop():
                self._held = {v: package for v, package in self._held.items() if v >= request.before}
                for of in (self._seen, self._waiting):
                    for number in [n for n, a in of.items() if a.version < request.before]:
                        del of[number]
        return []

    def step(self) -> list[Reply]:
        """One dispatch of the engine, after new weights and new groups where there are some."""
        replies: list[Reply] = []
        ready = sorted(n for n, a in self._waiting.items() if a.version in self._held)
        if not self._groups and ready:
            self._serve(self._held[self._waiting[ready[0]].version])
        for number in ready:
            if len(self._groups) >= self._groups_at_once:
                break
            if self._served is not None and self._waiting[number].version == self._served.version:
                replies += self._begin(self._waiting.pop(number))
        if not self._groups:
            return replies
        ended = {e.id: e.completion for e in self._engine.step() if e.completion is not None}
        for number, group in list(self._groups.items()):
            for id in sorted(group.ids & ended.keys()):
                group.ids.discard(id)
                group.done.append(ended[id])
            if not group.ids:
                del self._groups[number]
                done = sorted(group.done, key=lambda c: c.index)
                replies.append(Answer(number, group.assignment.attempt, self._fingerprint, done))
        return replies

    def _load(self, package: Package) -> Reply:
        try:
            check(package)
        except DamagedWeightsError as error:
            return Refused(package.version, str(error))
        self._held[package.version] = package
        return Held(package.version, package.fingerprint)

    def _serve(self, package: Package) -> None:
        served = self._served
        if served is not None and (served.version, served.fingerprint) == (
            package.version,
            package.fingerprint,
        ):
            return
        if self._engine is None:
            self._engine = self._sampler.engine(self._groups_at_once * self._sampling.per_prompt)
        print_ = self._engine.swap(unpack(package), version=package.version, expect=package.fingerprint)
        self._served, self._fingerprint = package, print_

    def _begin(self, assignment: Assignment) -> list[Reply]:
        try:
            ids = self._engine.submit(assignment.prompt, self._sampling)
        except InputError as error:
            return [Failed(assignment.number, assignment.attempt, str(error))]
        self._groups[assignment.number] = _Group(assignment, set(ids))
        return []
