"""What learner and workers say to each other. Any message may be lost, late, doubled or out of order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.sampler.base import Completion, SamplingParams
from jaxrl_llm.types import Prompt

__all__ = [
    "Answer",
    "Assignment",
    "Drop",
    "Failed",
    "Gone",
    "Held",
    "Load",
    "Package",
    "Ready",
    "Refused",
    "Reply",
    "Request",
    "Transport",
    "Work",
]


@dataclasses.dataclass(frozen=True)
class Package:
    """The parameters of one version as bytes, with what they must be."""

    version: int
    fingerprint: str  # of the whole tree, see `snapshots.digest`
    records: Mapping[str, Mapping[str, Any]]  # by path: dtype, shape and digest of a leaf
    leaves: Mapping[str, np.ndarray]  # by path: u8[bytes]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One prompt for one worker."""

    number: int  # of the group, in the order of submission
    attempt: int  # 1 for the first worker that gets it
    version: int  # of the weights that it must be answered under
    prompt: Prompt


# ------------------------------------------------------------------------------------- to a worker


@dataclasses.dataclass(frozen=True)
class Load:
    """Weights to hold, and to serve when an assignment asks for them."""

    package: Package
    attempt: int  # how often they have been sent to this worker


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts to answer; those of a version that the worker does not hold yet wait for it."""

    assignments: tuple[Assignment, ...]


@dataclasses.dataclass(frozen=True)
class Drop:
    """No prompt needs the weights of versions before this one any more."""

    before: int


Request = Load | Work | Drop


# ------------------------------------------------------------------------------------- from a worker


@dataclasses.dataclass(frozen=True)
class Ready:
    """The worker runs. Sent again and again, it says that the worker is alive."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Weights have arrived, and every leaf is what was sent."""

    version: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """Weights that did not arrive as they were sent; those before are still held."""

    version: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """All samples of a prompt."""

    number: int
    attempt: int
    fingerprint: str  # of the weights that were served, computed where they were
    completions: Sequence[Completion]


@dataclasses.dataclass(frozen=True)
class Failed:
    """A prompt that no worker can answer (`InputError` of the engine)."""

    number: int
    attempt: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Gone:
    """The worker is no more."""

    reason: str


Reply = Ready | Held | Refused | Answer | Failed | Gone


class Transport(Protocol):
    """Starts workers and carries messages. Nothing here may block for long or raise because a worker is gone."""

    def employ(self, sampler: Any, sampling: SamplingParams, rows: int) -> None:
        """What every worker is made of, see `fleet.worker.Worker`; called once, before `start`."""

    def start(self, worker: str) -> None:
        """Begins to start a worker; it says Ready when it runs. Names are never used twice."""

    def stop(self, worker: str) -> None:
        """Ends a worker at once, whatever state it is in."""

    def send(self, worker: str, request: Request) -> None:
        """Sends, without any promise."""

    def forget(self, before: int) -> None:
        """No weights of versions before this one will be sent any more."""

    def receive(self, timeout: float) -> list[tuple[str, Reply]]:
        """What has arrived; waits for something at most so many seconds."""

    def close(self) -> None:
        """Ends all workers."""
