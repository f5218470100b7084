"""Mixed load on a server: clients that ask, leave and err, and what happens to a server meanwhile.

All requests go through one event loop of this process; only the client that is killed has a process of its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import h11

from jaxrl_llm.bench import victim
from jaxrl_llm.bench.http import Connection, Reply, events_of
from jaxrl_llm.bench.serve_checks import (
    Choice,
    Model,
    References,
    Task,
    check_choice,
    check_choices,
    check_refusal,
    check_usage,
    parse_metrics,
)
from jaxrl_llm.bench.serve_tasks import (
    BAD_REQUESTS,
    FORMS,
    Form,
    Streamed,
    make_task,
    question,
    read_choices,
)
from jaxrl_llm.errors import InputError

__all__ = ["Load", "Target"]

_HANG = 300.0  # seconds: a request that takes longer is one that hangs
_FREED = 15.0  # seconds: pages of a killed client must be free by then
_SHOWN = 50  # faults that are kept word for word
_TRIES = 3  # to kill a client in time
_SPACING = 4.0  # seconds between two things that happen to the server
_VICTIMS = 3  # connections of the client that is killed
# What a client does next, and how often.
_ACTIONS = {"ask": 60, "many": 8, "batch": 4, "leave": 8, "bad": 8, "look": 4}
_BROKEN = (OSError, h11.ProtocolError)  # what a connection that is cut raises, and what is not HTTP
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # an answer of another shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The server under load."""

    host: str
    port: int
    headers: Mapping[str, str]
    model: Model
    slots: int  # rows that it decodes together
    queue: int  # completions that may wait; it refuses what comes then
    snapshot: str | None = None  # run folder whose versions it is given in turn
    versions: tuple[int, ...] = ()  # of `snapshot`; the first is served at the start

    @property
    def most(self) -> int:
        """Completions that it may hold."""
        return self.slots + self.queue


class _Span:
    """Counts the beginnings and ends of something, so that a request knows whether it overlapped."""

    def __init__(self) -> None:
        self.edges = 0

    def __enter__(self) -> None:
        self.edges += 1

    def __exit__(self, *exception: object) -> None:
        self.edges += 1

    def overlapped(self, since: int) -> bool:
        """Whether it was under way at any time since `edges` was `since`."""
        return bool(since % 2) or self.edges != since


class Load:
    """The load, and what came of it.

    Args:
      tasks: what is asked again and again.
      clients: requests under way at a time, bursts aside.
      seed: of everything that is chosen.
    """

    def __init__(self, target: Target, tasks: Sequence[Task], *, clients: int, seed: int):
        self.target, self._clients, self._seed = target, clients, seed
        self._rng = random.Random(f"events-{seed}")
        self.tasks = tuple(tasks)
        self.references = References()
        self.version: int | None = None  # that is served; `greet` asks for it

        self.statuses: collections.Counter[tuple[str, str]] = collections.Counter()
        self.events: collections.Counter[str] = collections.Counter()
        self.tokens = 0  # sampled ones that were received
        self.first: list[float] = []  # seconds to the first token of streams that no pause overlapped
        self.whole: list[float] = []  # seconds to the end of requests that no pause overlapped
        self.freed: list[float] = []  # seconds until the pages of a killed client were free
        self.faults: list[str] = []
        self.fault_count = 0

        self._stopping = False
        self._happened = False  # everything, once
        self._gate = asyncio.Event()  # closed: clients wait before their next request
        self._gate.set()
        self._active = 0  # clients within a request
        self._swaps, self._aborts, self._pauses = _Span(), _Span(), _Span()

    @property
    def answered(self) -> int:
        """Requests that were answered, with whatever status."""
        return sum(count for (_, status), count in self.statuses.items() if status.isdigit())

    @property
    def refused(self) -> int:
        """Requests that were answered with 429."""
        return sum(count for (_, status), count in self.statuses.items() if status == "429")

    # ------------------------------------------------------------------------------ the whole

    async def run(self, seconds: float) -> None:
        """Load for so long, and until everything has happened once; then waits for what is under way."""
        happening = asyncio.create_task(self._happen(seconds))
        tasks = [happening, *(asyncio.create_task(self._client(n)) for n in range(self._clients))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # of clients: by an error
            self._stopping = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def greet(self) -> None:
        """Asks the server whether it is well and which version it serves.

        Raises:
          InputError: it does not answer, or says that it is not well.
        """
        where = f"http://{self.target.host}:{self.target.port}/health"
        try:
            async with self.connect() as connection, asyncio.timeout(_HANG):
                reply = await connection.request("GET", "/health")
                health = await reply.json()
            well = health["status"] == "ok" and not health["paused"]
            self.version = int(health["policy_version"])
        except _BROKEN as error:
            raise InputError(f"{where} does not answer ({error}). Is the server running?") from None
        except _MALFORMED as error:
            raise InputError(f"{where} does not answer as `jaxrl serve` does ({error!r}).") from None
        if not well:
            raise InputError(f"{where} answers {health!s:.200}; the server must be well and not paused.")

    async def ask_alone(self) -> None:
        """Asks every task, one after the other: the answers that those under load must equal."""
        async with self.connect() as connection:
            for number, task in enumerate(self.tasks):
                await self._ask(connection, "alone", task, FORMS[number % len(FORMS)], logprobs=0)

    async def ask_together(self) -> None:
        """Asks every task at once: the server has most of its programs ready afterwards."""

        async def ask(task: Task, form: Form) -> None:
            async with self.connect() as connection:
                await self._ask(connection, "together", task, form)

        for start in range(0, len(self.tasks), self.target.most):
            part = self.tasks[start : start + self.target.most]
            await asyncio.gather(*(ask(task, FORMS[n % len(FORMS)]) for n, task in enumerate(part)))

    def connect(self) -> Connection:
        """A new connection to the server."""
        return Connection(self.target.host, self.target.port, self.target.headers)

    async def metrics(self, connection: Connection) -> dict[str, float]:
        """The figures of the server at this moment.

        Raises:
          OSError, h11.ProtocolError: it does not answer, or not with 200.
          ValueError: what it answers is no page of metrics.
        """
        async with asyncio.timeout(_HANG):
            reply = await connection.request("GET", "/metrics")
            text = (await reply.read()).decode()
        if reply.status != 200:
            raise ConnectionError(f"GET /metrics gave {reply.status}: {text[:200]}")
        return parse_metrics(text)

    def fault(self, what: str) -> None:
        """Notes something that is wrong."""
        self.fault_count += 1
        if len(self.faults) < _SHOWN:
            self.faults.append(what)

    # ------------------------------------------------------------------------------ one request

    async def _ask(
        self,
        connection: Connection,
        kind: str,
        task: Task,
        form: Form,
        *,
        n: int = 1,
        logprobs: int | None = None,
        ids: bool = True,
        prompts: Sequence[tuple[int, ...]] | None = None,
    ) -> int | None:
        """Asks and checks the answer; its status, None when there was none."""
        path, body = question(task, form, n=n, logprobs=logprobs, ids=ids, prompts=prompts)
        kind = f"{kind}/{form}"
        since = self._swaps.edges, self._aborts.edges, self._pauses.edges
        version, began = self.version, time.perf_counter()
        first = None
        async with self._watched(connection, kind) as given:
            reply = await connection.request("POST", path, body)
            self.statuses[kind, str(reply.status)] += 1
            if reply.status != 200:
                value = await reply.json()
                self._blame(kind, check_refusal(reply.status, reply.headers, value, 429))
                if kind.startswith("alone/"):
                    self.fault(f"{kind}: refused with {reply.status}, though nothing else was asked")
                return reply.status
            if form.endswith("_stream"):
                streamed = Streamed(form)
                async for event in events_of(reply):
                    if streamed.push(event) and first is None:
                        first = time.perf_counter() - began
                choices, usage = streamed.choices(), streamed.usage
            else:
                value = await reply.json()
                choices, usage = read_choices(form, value), value["usage"]
            given.append(200)
        if not given:
            return None
        if not self._pauses.overlapped(since[2]):
            self.whole.append(time.perf_counter() - began)
            if first is not None:
                self.first.append(first)
        one_version = None if self._swaps.overlapped(since[0]) else version
        aborted = self._aborts.overlapped(since[1])
        wrong = self._check(choices, usage, task, n, logprobs, prompts or [task.prompt], one_version, aborted)
        self._blame(f"{kind} {body if wrong else ''!s:.400}", wrong)
        return 200

    def _check(
        self,
        choices: Sequence[Choice],
        usage: Any,
        task: Task,
        n: int,
        logprobs: int | None,
        prompts: Sequence[tuple[int, ...]],
        version: int | None,
        aborted: bool,
    ) -> list[str]:
        """Everything that is wrong with an answer; `version`: that all of it must be of, if it is known."""
        wrong = check_choices(choices, n * len(prompts))
        if wrong:
            return wrong
        for choice in choices:
            asked = dataclasses.replace(task, prompt=prompts[choice.index // n])
            wrong += check_choice(
                choice, asked, self.target.model, logprobs=logprobs is not None, aborted=aborted
            )
            if version is not None and choice.version != version:
                wrong.append(f"policy_version is {choice.version}, version {version} was served")
            elif version is not None and choice.finish_reason != "abort":
                numbered = dataclasses.replace(choice, index=choice.index % n)
                wrong += self.references.check(numbered, asked, version)
        asked = dataclasses.replace(task, prompt=tuple(t for prompt in prompts for t in prompt))
        counted = check_usage(usage, asked, choices)
        self.tokens += 0 if counted else usage["completion_tokens"]
        return wrong + counted

    @contextlib.asynccontextmanager
    async def _watched(self, connection: Connection, kind: str) -> AsyncIterator[list[Any]]:
        """Around what is asked on a connection: no answer, a broken one, or one of another shape is a fault.

        Gives a list for the result, which stays empty then; the connection is dropped and the block left.
        """
        try:
            async with asyncio.timeout(_HANG):
                yield []
                return
        except TimeoutError:
            what = f"no answer within {_HANG:g} s"
        except _BROKEN as error:
            what = f"the connection broke ({type(error).__name__}: {error})"
        except _MALFORMED as error:
            what = f"the answer has another shape ({type(error).__name__}: {error})"
        connection.drop()
        self.statuses[kind, "broken"] += 1
        self.fault(f"{kind}: {what}")

    def _blame(self, where: str, wrong: Sequence[str]) -> None:
        for what in wrong:
            self.fault(f"{where}: {what}")

    async def _post(self, path: str, body: Any = b"") -> Any:
        """The answer to a command to the server, which must be 200; None, and a fault is noted, when it is not."""
        async with self.connect() as connection:
            async with self._watched(connection, path) as given:
                reply = await connection.request("POST", path, body)
                self.statuses[f"command{path.split('?')[0]}", str(reply.status)] += 1
                value = await reply.json()
                if reply.status != 200:
                    self.fault(f"POST {path} gave {reply.status}: {value!s:.200}")
                else:
                    given.append(value)
        return given[0] if given else None

    # ------------------------------------------------------------------------------ clients

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client-{self._seed}-{number}")
        actions: dict[str, Callable[[Connection, random.Random], Awaitable[None]]] = {
            "ask": self._some,
            "many": self._many,
            "batch": self._batch,
            "leave": self._leave,
            "bad": self._bad,
            "look": self._look,
        }
        async with self.connect() as connection:
            while not self._stopping:
                await self._gate.wait()
                self._active += 1
                try:
                    (name,) = rng.choices(list(_ACTIONS), list(_ACTIONS.values()))
                    await actions[name](connection, rng)
                finally:
                    self._active -= 1
                await asyncio.sleep(rng.choice((0, 0, 0.01, 0.1)))

    async def _some(self, connection: Connection, rng: random.Random) -> None:
        new = rng.random() < 0.3
        task = make_task(rng, self.target.model, repeatable=False) if new else rng.choice(self.tasks)
        # Few numbers of listed tokens: each needs a program of its own.
        more: dict[str, Any] = {"logprobs": rng.choice((None, 0, 3)), "ids": rng.random() < 0.7}
        await self._ask(connection, "ask", task, rng.choice(FORMS), **more)

    async def _many(self, connection: Connection, rng: random.Random) -> None:
        n = rng.choice((2, 3, 4))
        await self._ask(connection, "many", rng.choice(self.tasks), rng.choice(FORMS), n=n, logprobs=0)

    async def _batch(self, connection: Connection, rng: random.Random) -> None:
        task, *others = rng.sample(self.tasks, 3)
        # Equal prompts are told apart by their number, which no single request has.
        prompts = list(dict.fromkeys(t.prompt for t in (task, *others)))
        if all(task.min_tokens < self.target.model.max_context - len(prompt) for prompt in prompts):
            await self._ask(connection, "batch", task, "completion", n=2, prompts=prompts)

    async def _bad(self, connection: Connection, rng: random.Random) -> None:
        what, path, body, expected = rng.choice(BAD_REQUESTS)
        async with self._watched(connection, f"bad request ({what})"):
            reply = await connection.request("POST", path, body)
            self.statuses["bad", str(reply.status)] += 1
            value = await reply.json()
            self._blame(f"bad request ({what})", check_refusal(reply.status, reply.headers, value, expected))

    async def _look(self, connection: Connection, rng: random.Random) -> None:
        path = rng.choice(("/health", "/liveness", "/v1/models"))
        async with self._watched(connection, path):
            reply = await connection.request("GET", path)
            self.statuses[path, str(reply.status)] += 1
            value = await reply.json()
            if reply.status != 200:
                self.fault(f"GET {path} gave {reply.status}: {value!s:.200}")

    async def _leave(self, connection: Connection, rng: random.Random) -> None:
        """Cuts the connection: within a stream, before an answer, or before the request is whole."""
        how = rng.choice(("stream", "whole", "sending"))
        task = make_task(rng, self.target.model, repeatable=False)
        task = dataclasses.replace(
            task, max_tokens=self.target.model.max_context, ignore_eos=True, stop=(), min_tokens=0
        )
        form: Form = rng.choice(
            ("chat_stream", "completion_stream") if how == "stream" else ("chat", "generate")
        )
        path, body = question(task, form, n=rng.choice((1, 1, 3)))
        async with self._watched(connection, f"leave/{how}"):
            if how == "sending":
                raw = json.dumps(body).encode()
                await connection.send_part(path, raw[: len(raw) // 2], len(raw))
            elif how == "whole":
                with contextlib.suppress(TimeoutError):  # as is wanted
                    async with asyncio.timeout(rng.choice((0.0, 0.01, 0.05, 0.2))):
                        await connection.request("POST", path, body)
            else:
                await self._read_some(await connection.request("POST", path, body), rng.randrange(6))
        connection.drop()
        self.statuses[f"leave/{how}", "left"] += 1

    async def _read_some(self, reply: Reply, count: int) -> None:
        async for _ in events_of(reply) if reply.status == 200 else reply.parts():
            if not count:
                return
            count -= 1

    # ------------------------------------------------------------------------------ events

    async def _happen(self, seconds: float) -> None:
        """One thing after the other happens to the server."""
        end = time.monotonic() + seconds
        kinds = [self.burst, self.burst_while_paused, self.kill, self.pause, self.abort, self.mislead]
        if self.target.versions:
            kinds += [self._update_one, self._update_one]
        while True:
            for happening in self._rng.sample(kinds, len(kinds)):
                if time.monotonic() > end and self._happened:
                    return
                await asyncio.sleep(min(_SPACING, seconds / 40))
                await happening()
            self._happened = True

    async def _ask_at_once(self) -> list[asyncio.Task[int | None]]:
        """More completions than the server may hold, each request on a connection of its own."""
        n = max(1, self.target.most // 16)
        short = [task for task in self.tasks if task.max_tokens <= 16] or self.tasks

        async def ask(task: Task, form: Form) -> int | None:
            async with self.connect() as connection:
                return await self._ask(connection, "burst", task, form, n=n)

        return [
            asyncio.create_task(ask(self._rng.choice(short), self._rng.choice(FORMS)))
            for _ in range(self.target.most // n + 8)
        ]

    async def burst(self) -> None:
        """More at once than the server may hold."""
        self.events["bursts"] += 1
        await asyncio.gather(*await self._ask_at_once())

    async def burst_while_paused(self) -> None:
        """As `burst`; nothing ends meanwhile, so that some of it must be refused."""
        self.events["bursts while paused"] += 1
        refused = self.refused
        with self._pauses:
            await self._post("/pause")
            asked = await self._ask_at_once()
            end = time.monotonic() + _HANG
            while self.refused == refused and time.monotonic() < end:
                await asyncio.sleep(0.01)
            if self.refused == refused:
                self.fault(
                    f"burst: more than {self.target.most} completions were asked for while the server was paused, and "
                    f"none was refused with 429 within {_HANG:g} s. Is --queue what the server was started with?"
                )
            await self._post("/resume")
        await asyncio.gather(*asked)

    async def pause(self) -> None:
        """The server is paused for a moment: nothing may be sampled until it goes on."""
        self.events["pauses"] += 1
        with self._pauses:
            await self._post("/pause")
            async with self.connect() as connection, self._watched(connection, "/metrics"):
                before = await self.metrics(connection)
                await asyncio.sleep(self._rng.choice((0.1, 0.5)))
                after = await self.metrics(connection)
                sampled = after["jaxrl_decoded_tokens_total"] - before["jaxrl_decoded_tokens_total"]
                if sampled:
                    self.fault(f"{sampled:g} tokens were sampled while the server was paused")
            await self._post("/resume")

    async def abort(self) -> None:
        """Whatever runs ends with what it has."""
        self.events["aborts"] += 1
        with self._pauses, self._aborts:
            await self._post("/pause?mode=abort")
            await self._post("/resume")

    async def mislead(self) -> None:
        """Weights that are not there; among the clients' bad requests it would meet other updates."""
        self.events["updates to nothing"] += 1
        async with self.connect() as connection, self._watched(connection, "/update_weights"):
            reply = await connection.request("POST", "/update_weights", {"snapshot": "/no/such/run"})
            self.statuses["command/update_weights", str(reply.status)] += 1
            body = await reply.json()
            self._blame("/update_weights to nothing", check_refusal(reply.status, reply.headers, body, 400))

    async def _update_one(self) -> None:
        others = [version for version in self.target.versions if version != self.version]
        await self.update(self._rng.choice(others or self.target.versions))

    async def update(self, version: int) -> None:
        """Gives the server other weights."""
        self.events["weight updates"] += 1
        pages = self._rng.choice(("keep", "recompute"))
        with self._swaps:
            body = {"snapshot": self.target.snapshot, "version": version, "pages": pages}
            told = await self._post("/update_weights", body)
            if told is not None:
                self.version = version
                if told.get("policy_version") != version:
                    self.fault(f"/update_weights to version {version} answered {told}")

    async def kill(self) -> None:
        """A client in a process of its own is killed while it streams; nothing else is asked meanwhile."""
        self._gate.clear()
        try:
            while self._active:
                await asyncio.sleep(0.01)
            for _ in range(_TRIES):
                if await self._kill_one():
                    return
            self.fault(f"kill: {_TRIES} times all was sampled before the client could be killed")
        finally:
            self._gate.set()

    async def _kill_one(self) -> bool:
        """Whether it was killed in time, before everything was sampled, or something was wrong."""
        target = self.target
        n = max(1, min(target.slots + target.queue // 2, target.most) // _VICTIMS)
        task = Task(prompt=self.tasks[0].prompt, max_tokens=target.model.max_context, ignore_eos=True)
        path, body = question(task, "completion_stream", n=n)
        lines = [f"POST {path} HTTP/1.1", f"Host: {target.host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        script = str(pathlib.Path(victim.__file__))
        command = [sys.executable, "-S", script, target.host, str(target.port), str(_VICTIMS)]
        process = await asyncio.create_subprocess_exec(
            *command, "\r\n".join(lines), json.dumps(body), stdout=asyncio.subprocess.PIPE
        )
        try:
            async with self.connect() as connection, self._watched(connection, "kill"):
                if process.stdout is None:
                    raise RuntimeError("the output of a process that was started with a pipe is none")
                async with asyncio.timeout(_HANG):
                    line = (await process.stdout.readline()).decode().strip()
                rows = _rows(await self.metrics(connection))
                process.kill()
                await process.wait()
                killed = time.perf_counter()
                if " 200 " not in f"{line} ":
                    self.fault(f"kill: the server answered the client that was to be killed with {line!r}")
                elif not rows:
                    self.events["kills too late"] += 1
                    return False
                else:
                    self.events["kills"] += 1
                    await self._measure_freed(connection, killed, rows)
            return True
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _measure_freed(self, connection: Connection, killed: float, rows: float) -> None:
        while True:
            now = await self.metrics(connection)
            seconds = time.perf_counter() - killed
            if (
                not _rows(now)
                and now["jaxrl_pages_free"] == now["jaxrl_pages"]
                and not now["jaxrl_pages_lost"]
            ):
                self.freed.append(seconds)
                return
            if seconds > _FREED:
                self.fault(
                    f"kill: {_FREED:g} s after a client of {rows:g} rows was killed, {_rows(now):g} rows are left and "
                    f"{now['jaxrl_pages_free']:g} of {now['jaxrl_pages']:g} pages are free"
                )
                return
            await asyncio.sleep(0.002)


def _rows(metrics: Mapping[str, float]) -> float:
    return metrics["jaxrl_rows_running"] + metrics["jaxrl_rows_queued"]
