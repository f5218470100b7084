"""Which prompt is with which worker, under which attempt; no clock of its own, no messages.

A group is *pending* (nobody works on it), *under way* (one worker does) or *answered*. Every time its worker is
lost it becomes pending once, and the next worker gets it under the next attempt. Only an answer to the attempt that
is under way counts, so that a group is answered once, whatever arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from jaxrl_llm.fleet.messages import Assignment
from jaxrl_llm.types import Prompt

__all__ = ["Assignments", "Verdict"]

# accepted: of the attempt under way; duplicate: the group was answered by this attempt; late: of an earlier attempt
Verdict = Literal["accepted", "duplicate", "late"]


@dataclasses.dataclass
class _Group:
    prompt: Prompt
    version: int
    attempt: int = 0
    worker: str | None = None  # None: pending, or answered
    since: float = 0.0  # when that worker got it
    answered: bool = False


class Assignments:
    """The groups from their submission until they are forgotten."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._uids: set[str] = set()

    def add(self, number: int, prompt: Prompt, version: int) -> None:
        """A new group, to be answered under the weights of `version`.

        Raises:
          ValueError: a group of this number, or with this uid, is there already: it would be trained on twice.
        """
        if number in self._groups or prompt.uid in self._uids:
            raise ValueError(f"fleet: group {number} ({prompt.uid}) has been submitted already.")
        self._groups[number] = _Group(prompt, version)
        self._uids.add(prompt.uid)

    def forget(self, number: int) -> None:
        """The group is trained on or dropped."""
        self._uids.discard(self._groups.pop(number).prompt.uid)

    def hand_out(self, number: int, worker: str, now: float) -> Assignment:
        """Gives a pending group to a worker."""
        group = self._groups[number]
        if group.worker is not None or group.answered:
            raise ValueError(f"fleet: group {number} is not pending.")
        group.attempt, group.worker, group.since = group.attempt + 1, worker, now
        return Assignment(number, group.attempt, group.version, group.prompt)

    def answer(self, number: int, attempt: int, worker: str) -> Verdict:
        """What an answer is worth; an accepted one ends the group. One of a group that was forgotten is a duplicate."""
        group = self._groups.get(number)
        if group is None or (group.answered and attempt == group.attempt):
            return "duplicate"
        if group.answered or attempt != group.attempt or worker != group.worker:
            return "late"
        group.worker, group.answered = None, True
        return "accepted"

    def take_back(self, worker: str) -> list[int]:
        """Makes everything pending that a worker has; which groups those are."""
        numbers = [number for number, group in self._groups.items() if group.worker == worker]
        for number in numbers:
            self._groups[number].worker = None
        return numbers

    def overdue(self, now: float, limit: Callable[[int], float]) -> dict[str, int]:
        """By worker: its first group that has been with it for longer than limit(attempt)."""
        found: dict[str, int] = {}
        for number, group in self._groups.items():
            if group.worker is not None and now - group.since > limit(group.attempt):
                found.setdefault(group.worker, number)
        return found

    def pending(self) -> list[int]:
        """Groups that nobody works on, ascending."""
        return sorted(n for n, group in self._groups.items() if group.worker is None and not group.answered)

    def load(self, worker: str) -> int:
        """Groups that a worker has."""
        return sum(group.worker == worker for group in self._groups.values())

    def is_current(self, number: int, attempt: int, worker: str) -> bool:
        """Whether this worker works on this attempt."""
        group = self._groups.get(number)
        return group is not None and group.worker == worker and group.attempt == attempt

    def prompt(self, number: int) -> Prompt:
        """Of a group."""
        return self._groups[number].prompt

    def version(self, number: int) -> int:
        """Of the weights that a group is answered under."""
        return self._groups[number].version

    def attempts(self, number: int) -> int:
        """How often a group has been handed out."""
        return self._groups[number].attempt

    def waited(self, number: int, now: float) -> float:
        """Seconds since a group was handed out; 0 of one that is not known."""
        group = self._groups.get(number)
        return 0.0 if group is None else now - group.since

    def versions(self) -> set[int]:
        """Of the groups that are not answered."""
        return {group.version for group in self._groups.values() if not group.answered}
