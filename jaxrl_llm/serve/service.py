"""What all requests share: who is admitted, what is counted, and the way to the engine's thread."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxrl_llm.sampler.base import Completion, as_prompts
from jaxrl_llm.serve import reply
from jaxrl_llm.serve.figures import Counts
from jaxrl_llm.serve.protocol import ApiError, Ask, Limits, Served, parse_completion
from jaxrl_llm.serve.worker import EngineError, Job, Part, Worker

__all__ = ["RETRY_WARM", "Load", "Service", "engine_failed", "timed_out"]

# (snapshot, version or None) -> (params, version, fingerprint or None)
Load = Callable[[str, int | None], tuple[Any, int, str | None]]

RETRY_WARM = 5  # seconds after which a client is told to try again while the server warms up
_RETRY_SECONDS = (1, 60)
# One request for each program that most requests need: sampling, truncated sampling, and scoring of the prompt. Others
# (lists of likeliest tokens, a bias) are compiled when they are first asked for.
_WARM = (
    {"max_tokens": 1},
    {"max_tokens": 1, "top_p": 0.9},
    {"max_tokens": 0, "prompt_logprobs": 0},
)


class Service:
    """What the routes share; lives in one event loop.

    Args:
      worker: drives the engine.
      served: the model.
      slots: rows that the engine decodes together, on all replicas.
      replicas: of the engine.
      load: reads the parameters of a snapshot for /update_weights.
      api_key: every request but /health and /liveness must bear it; None: requests must come from this machine.
    """

    def __init__(
        self,
        worker: Worker,
        served: Served,
        *,
        slots: int,
        replicas: int = 1,
        load: Load,
        limits: Limits | None = None,
        source: str = "",
        api_key: str | None = None,
    ):
        self.worker, self.served, self.load = worker, served, load
        self.replicas = replicas
        self.limits = limits or Limits()
        self.source, self.api_key = source, api_key
        self.created = int(time.time())
        self.counts = Counts()
        self.stopping = False
        self.warming = False  # requests are refused until the programs are compiled
        self.in_flight = 0  # requests
        self._most = slots + self.limits.queued
        self.open_completions = 0  # completions that were asked for and not given
        self.updating = asyncio.Lock()
        self._pace = 0.0  # seconds between two completions, smoothed
        self._last = time.perf_counter()

    def admit(self, ask: Ask) -> Job:
        """A job for a request, or its refusal.

        Raises:
          ApiError: 429 when the queue is full, 503 when the server warms up, is stopping or its engine has failed.
        """
        if self.stopping:
            raise ApiError(503, "The server is stopping.", kind="service_unavailable_error", code="stopping")
        if self.worker.fault is not None:
            raise engine_failed(
                EngineError(f"The engine has failed ({self.worker.fault}); restart the server.")
            )
        if self.warming:
            raise ApiError(
                503,
                f"The server is warming up: it compiles its programs. Try again in {RETRY_WARM} s; GET /health says "
                "when it is ready.",
                kind="service_unavailable_error",
                code="warming_up",
                headers={"retry-after": str(RETRY_WARM)},
            )
        if ask.completions > self._most:
            raise ApiError(
                400,
                f"n: {ask.completions} completions are more than the {self._most} that this server may hold at a time; send "
                "several requests.",
                param="n",
            )
        if self.open_completions + ask.completions > self._most:
            self.counts.refused.add()
            least, most = _RETRY_SECONDS
            wait = math.ceil(min(max(self._pace * self.limits.queued / 2, least), most))
            raise ApiError(
                429,
                f"The queue is full: {self.open_completions} completions are running or waiting, {self._most} at most. "
                f"Try again in {wait} s.",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )
        self.open_completions += ask.completions
        return Job(ask.completions, stream=ask.stream)

    async def warm_up(self) -> None:
        """Compiles what most requests need, on every replica, by small requests; then takes those of clients.

        Raises:
          EngineError: the engine failed or was stopped.
        """
        self.warming = True
        try:
            await self.worker.settle_reading()
            # Short prompts that begin differently: each goes to the replica that has the least to do.
            prompts = [[i % self.served.vocab_size, 0] for i in range(self.replicas)]
            for body in _WARM:
                ask = parse_completion({**body, "prompt": prompts}, self.served, self.limits)
                job = Job(ask.completions, stream=False)
                await self.worker.submit(job, as_prompts(ask.prompts), ask.sampling)
                await job.completions()
        finally:
            self.warming = False

    def close(self, job: Job, ask: Ask, reason: str) -> None:
        """Ends a job: what it has not finished is cancelled, for `reason`."""
        self.open_completions -= ask.completions
        if job.open:
            self.counts.cancelled.add(job.open, reason=reason)
            self.worker.cancel(job)

    async def start(self, job: Job, ask: Ask) -> None:
        """Gives a job to the engine."""
        self.counts.prompt_tokens.add(sum(map(len, ask.prompts)))
        await self.worker.submit(job, as_prompts(ask.prompts), ask.sampling, ask.priority, ask.session)

    def record(self, job: Job, completion: Completion) -> None:
        """Counts a completion that ended."""
        now = time.perf_counter()
        self._pace = 0.9 * self._pace + 0.1 * (now - self._last) if self._pace else now - self._last
        self._last = now
        self.counts.ended.add(finish_reason=reply.finish_reason(completion))
        self.counts.tokens.add(len(completion.tokens))
        self.counts.rate.add(len(completion.tokens))
        if "queued" in completion.timings:
            self.counts.queue_delay.observe(completion.timings["queued"])
        if not job.open:
            self.counts.latency.observe(now - job.began)
            if job.first_token is not None:
                self.counts.first_token.observe(job.first_token)

    def answer(self, ask: Ask, prefix: str) -> reply.Answer:
        """Id and names of the answer to a request."""
        return reply.Answer(
            ask=ask,
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self.served.name,
            fingerprint=self.worker.view.fingerprint,
            tokenizer=self.served.tokenizer,
        )

    async def parts(self, job: Job, ask: Ask) -> AsyncIterator[Part]:
        """What a client gets of a job, which is counted.

        Raises:
          EngineError: see `Job.parts`.
        """
        async for part in job.parts():
            given = reply.without_sample(part) if ask.score_only else part
            if given.completion is not None:
                self.record(job, given.completion)
            yield given

    async def gather(self, job: Job, ask: Ask) -> list[Completion]:
        """All completions of a job, in order; raises what `parts` raises."""
        done = {p.index: p.completion async for p in self.parts(job, ask) if p.completion is not None}
        return [done[index] for index in sorted(done)]

    async def end_all(self) -> None:
        """Ends what runs and waits with what it has, for the stop of the server."""
        try:
            await self.worker.abort()
        except EngineError:  # it has failed, and its requests have been told
            return

    async def control(self, command: Awaitable[Any]) -> Any:
        """What a command to the worker gives back.

        Raises:
          ApiError: 503, the engine failed or was stopped.
        """
        try:
            return await command
        except EngineError as error:
            raise engine_failed(error) from None


def timed_out(limits: Limits) -> ApiError:
    """The request took longer than it may."""
    return ApiError(
        504,
        f"The request took longer than {limits.seconds:g} s. Ask for fewer tokens or completions, or start the server "
        "with a longer --timeout.",
        kind="server_error",
        code="timeout",
    )


def engine_failed(error: EngineError) -> ApiError:
    """The engine could not finish."""
    return ApiError(503, str(error), kind="service_unavailable_error", code="engine_error")
