"""Workers in the learner's own process, one dispatch each in turn: what a replay uses, and tests."""

from __future__ import annotations

import traceback
from typing import Any

from jaxrl_llm.fleet.messages import Gone, Ready, Reply, Request
from jaxrl_llm.fleet.worker import Engines, Worker
from jaxrl_llm.sampler.base import SamplingParams

__all__ = ["InProcess"]


class InProcess:
    """A `Transport` that loses nothing."""

    def __init__(self) -> None:
        self._arguments: tuple[Any, ...] = ()
        self._workers: dict[str, Worker] = {}
        self._replies: list[tuple[str, Reply]] = []

    def employ(self, sampler: Engines, sampling: SamplingParams, rows: int) -> None:
        """See `Transport`."""
        self._arguments = (sampler, sampling, rows)

    def start(self, worker: str) -> None:
        """See `Transport`."""
        self._workers[worker] = Worker(*self._arguments)
        self._replies.append((worker, Ready()))

    def stop(self, worker: str) -> None:
        """See `Transport`."""
        self._workers.pop(worker, None)

    def send(self, worker: str, request: Request) -> None:
        """See `Transport`."""
        if worker in self._workers:
            self._replies += [(worker, reply) for reply in self._workers[worker].receive(request)]

    def forget(self, before: int) -> None:
        """See `Transport`."""

    def receive(self, timeout: float) -> list[tuple[str, Reply]]:
        """See `Transport`. Works instead of waiting: one dispatch of every worker that has something to do."""
        for name, worker in list(self._workers.items()):
            self._replies.append((name, Ready()))
            if timeout and worker.busy:
                try:
                    self._replies += [(name, reply) for reply in worker.step()]
                except Exception:  # as in a process of its own, which would end
                    self._replies.append((name, Gone(traceback.format_exc(limit=-3))))
                    del self._workers[name]
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """See `Transport`."""
        self._workers.clear()
