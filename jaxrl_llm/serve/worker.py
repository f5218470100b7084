"""The thread that owns the engine, and the asyncio side's view of it.

The engine is not thread safe and its dispatches take milliseconds to seconds, so one thread drives it and nobody else
touches it. Commands reach the thread through a queue and are carried out between two dispatches; what was sampled
goes back to the event loop of whoever asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxrl_llm.sampler.base import Completion, PromptScores, SamplerStats, SamplingParams
from jaxrl_llm.types import Prompt

__all__ = ["Engine", "EngineError", "Event", "Job", "Part", "View", "Worker"]

T = TypeVar("T")


class Event(Protocol):
    """What one dispatch did to one row."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> Any: ...  # i32[N], new ones
    @property
    def logprobs(self) -> Any: ...  # f32[N]
    @property
    def top_ids(self) -> Any: ...  # i32[N, K] or None
    @property
    def top_logprobs(self) -> Any: ...  # f32[N, K] or None
    @property
    def prompt_scores(self) -> PromptScores | None: ...  # set in the first one of a row, on request
    @property
    def completion(self) -> Completion | None: ...  # set when the row has ended


class Engine(Protocol):
    """A sampler that lives on: rows come and go between dispatches."""

    @property
    def busy(self) -> bool: ...
    @property
    def stats(self) -> SamplerStats: ...
    @property
    def queued(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def lost_pages(self) -> int: ...
    @property
    def filled_share(self) -> float: ...
    def settle_reading(self) -> None: ...
    def swap(self, params: Any, *, version: int, pages: Any = ..., expect: str | None = ...) -> str: ...
    def submit(
        self, prompt: Prompt, sampling: SamplingParams, *, priority: int = ..., session: str | None = ...
    ) -> list[int]: ...
    def cancel(self, id: int) -> Completion | None: ...
    def step(self) -> Sequence[Event]: ...


class EngineError(RuntimeError):
    """The engine failed or was stopped, and its rows with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """New tokens of one completion of a job."""

    index: int  # which completion
    tokens: np.ndarray  # i32[N]
    logprobs: np.ndarray  # f32[N]
    top_ids: np.ndarray | None = None  # i32[N, K]
    top_logprobs: np.ndarray | None = None  # f32[N, K]
    prompt_scores: PromptScores | None = None  # in its first part, on request
    completion: Completion | None = None  # set in its last part


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The engine as it was after the last dispatch."""

    stats: SamplerStats
    queued: int
    running: int
    free_pages: int
    pages: int
    lost_pages: int  # of nobody, though held; told when there is no row
    filled_share: float  # tokens of running rows over the room in their pages; 0 without rows
    version: int
    fingerprint: str
    paused: bool


class Job:
    """The completions of one request, as they come. Make it in the event loop that reads it.

    Args:
      rows: completions.
      stream: whether tokens are wanted before a completion has ended.
    """

    def __init__(self, rows: int, *, stream: bool):
        self.stream = stream
        self.began = time.perf_counter()
        self.first_token: float | None = None  # seconds after `began`
        self.open = rows  # completions that are not in the hands of the reader yet
        self.ids: list[int] = []  # of the worker's thread
        self.loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Part | Exception] = asyncio.Queue()

    def put(self, part: Part | Exception) -> None:
        """Called in the loop of the job."""
        self._parts.put_nowait(part)

    async def parts(self) -> AsyncIterator[Part]:
        """The parts until every completion has ended.

        Raises:
          EngineError: the engine failed or was stopped.
        """
        while self.open:
            part = await self._parts.get()
            if isinstance(part, Exception):
                raise part
            if part.completion is not None:
                self.open -= 1
            yield part

    async def completions(self) -> list[Completion]:
        """All completions, in order."""
        done = {part.index: part.completion async for part in self.parts() if part.completion is not None}
        return [done[index] for index in sorted(done)]


class Worker:
    """Drives an engine in a thread of its own.

    Args:
      engine: with its weights loaded; from now on nobody else may call it.
      version, fingerprint: of these weights.
    """

    def __init__(self, engine: Engine, *, version: int, fingerprint: str):
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows: dict[int, tuple[Job, int]] = {}
        self._paused = self._stopping = False
        self._ended = threading.Event()
        self._version, self._fingerprint = version, fingerprint
        self.fault: Exception | None = None  # what the engine died of
        self.on_fault: Callable[[], None] = lambda: None  # called in the thread
        self.view = self._look()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------- the event loop's side

    async def submit(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        priority: int = 0,
        session: str | None = None,
    ) -> None:
        """Queues a job; returns when the engine has taken it. Higher priorities go first.

        Args:
          session: name of a conversation, whose turns go to one replica.

        Raises:
          InputError: it can never run.
          EngineError: the engine has failed or was stopped.
        """
        await self._call(lambda: self._submit(job, prompts, sampling, priority, session))

    def cancel(self, job: Job) -> None:
        """Frees the slots and pages of what a job has not finished, after the dispatch that is under way."""
        self._commands.put(lambda: self._cancel(job))

    async def pause(self, *, abort: bool) -> None:
        """No dispatch from now on; rows keep their place, or (`abort`) end with what they have."""
        await self._call(lambda: self._pause(abort))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._call(self._resume)

    async def settle_reading(self) -> None:
        """See `sampler.engine.Engine.settle_reading`."""
        await self._call(self._engine.settle_reading)

    async def swap(self, params: Any, *, version: int, pages: str, expect: str | None = None) -> str:
        """Serves other weights from the next dispatch on; returns their fingerprint, which must be `expect`."""
        return await self._call(lambda: self._swap(params, version, pages, expect))

    async def abort(self) -> None:
        """Ends every row with what it has."""
        await self._call(self._abort)

    def stop(self, timeout: float | None = None) -> bool:
        """Fails what is open and ends the thread; False if a dispatch took longer than `timeout` seconds."""

        def stop() -> None:
            self._stopping = True

        self._commands.put(stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    async def _call(self, command: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # nobody waits any more
                return
            future.set_result(result) if error is None else future.set_exception(error)

        def carry_out() -> None:
            try:
                self._check()
                result, error = command(), None
                self.view = self._look()  # before the caller hears of it
            except Exception as raised:  # handed to the caller
                result, error = None, raised
            _in_loop(loop, settle, result, error)

        self._commands.put(carry_out)
        if self._ended.is_set():  # nobody may carry it out any more
            settle(None, EngineError("The server is stopping."))
        return await future

    # -------------------------------------------------------------------------- the thread's side

    def _check(self) -> None:
        if self._stopping:
            raise EngineError("The server is stopping.")
        if self.fault is not None:
            raise EngineError(f"The engine has failed ({self.fault}); restart the server.")

    def _look(self) -> View:
        engine = self._engine
        return View(
            stats=dataclasses.replace(engine.stats),
            queued=engine.queued,
            running=engine.running,
            free_pages=engine.free_pages,
            pages=engine.pages,
            lost_pages=engine.lost_pages,
            filled_share=engine.filled_share,
            version=self._version,
            fingerprint=self._fingerprint,
            paused=self._paused,
        )

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._carry_out(wait=not self._has_work())
                if self._has_work():
                    events = self._engine.step()
                    self.view = self._look()  # before the caller hears of it
                    self._hand_out(events)
            except Exception as error:  # its state is unknown now: nothing more is asked of it
                traceback.print_exc()
                self._fail(error)
        stopped = EngineError("The server is stopping.")
        self._give({job: [stopped] for job, _ in self._rows.values()})
        self._rows.clear()
        self._ended.set()
        while True:  # answers commands that came too late
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _has_work(self) -> bool:
        return self.fault is None and not self._paused and not self._stopping and self._engine.busy

    def _carry_out(self, *, wait: bool) -> None:
        """Carries out all commands that are there, and waits for one first if there is nothing else to do."""
        try:
            command = self._commands.get() if wait else self._commands.get_nowait()
            while True:
                command()
                if self.fault is None:
                    self.view = self._look()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _fail(self, error: Exception) -> None:
        self.fault = error
        failed = EngineError(f"The engine has failed ({error}); restart the server.")
        self._give({job: [failed] for job, _ in self._rows.values()})
        self._rows.clear()
        self.on_fault()

    def _submit(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        priority: int,
        session: str | None,
    ) -> None:
        try:
            for prompt in prompts:
                job.ids += self._engine.submit(prompt, sampling, priority=priority, session=session)
        except Exception:
            for id in job.ids:
                self._engine.cancel(id)
            job.ids.clear()
            raise
        self._rows |= {id: (job, index) for index, id in enumerate(job.ids)}

    def _cancel(self, job: Job) -> None:
        for id in job.ids:
            if self._rows.pop(id, None) is not None:
                self._engine.cancel(id)

    def _pause(self, abort: bool) -> None:
        self._paused = True
        if abort:
            self._abort()

    def _resume(self) -> None:
        self._paused = False

    def _abort(self) -> None:
        given: dict[Job, list[Part | Exception]] = {}
        for id, (job, index) in self._rows.items():
            completion = self._engine.cancel(id)
            part: Part | Exception = EngineError("The request was aborted.")
            if completion is not None:
                part = Part(
                    index=index,
                    tokens=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    completion=completion,
                )
            given.setdefault(job, []).append(part)
        self._rows.clear()
        self.view = self._look()  # before the callers hear of it
        self._give(given)

    def _swap(self, params: Any, version: int, pages: str, expect: str | None) -> str:
        self._fingerprint = self._engine.swap(params, version=version, pages=pages, expect=expect)
        self._version = version
        return self._fingerprint

    def _hand_out(self, events: Sequence[Event]) -> None:
        given: dict[Job, list[Part | Exception]] = {}
        now = time.perf_counter()
        for event in events:
            done = event.completion
            known = self._rows.get(event.id) if done is None else self._rows.pop(event.id, None)
            if known is None:  # cancelled while the dispatch ran
                continue
            job, index = known
            if job.first_token is None and len(event.tokens):
                job.first_token = now - job.began
            if done is None and not job.stream:
                continue
            if done is not None and done.stop.value == "error":
                given.setdefault(job, []).append(EngineError("A log-prob of the policy is not finite."))
                continue
            part = Part(
                index=index,
                tokens=np.asarray(event.tokens, np.int32),
                logprobs=np.asarray(event.logprobs, np.float32),
                top_ids=event.top_ids,
                top_logprobs=event.top_logprobs,
                prompt_scores=event.prompt_scores,
                completion=done,
            )
            given.setdefault(job, []).append(part)
        self._give(given)

    def _give(self, given: dict[Job, list[Part | Exception]]) -> None:
        """One call a loop, however many rows there are."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Job, list[Part | Exception]]]] = {}
        for job, parts in given.items():
            loops.setdefault(job.loop, []).append((job, parts))
        for loop, jobs in loops.items():
            _in_loop(loop, _put_all, jobs)


def _put_all(jobs: list[tuple[Job, list[Part | Exception]]]) -> None:
    for job, parts in jobs:
        for part in parts:
            job.put(part)


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in an event loop, from this thread; a loop that has ended has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
