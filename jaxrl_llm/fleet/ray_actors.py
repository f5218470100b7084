"""Workers as Ray actors (extra [ray]): the one file that imports Ray."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.messages import Gone, Load, Package, Ready, Reply, Request
from jaxrl_llm.fleet.worker import Engines, Worker
from jaxrl_llm.sampler.base import SamplingParams

__all__ = ["RayActors", "check_address", "check_ray", "parse_resources"]

_FETCH = 2.0  # seconds that a worker waits for something to say before it says that it is alive


def check_ray() -> Any:
    """The module `ray`.

    Raises:
      InputError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"--workers needs Ray ({error}). Install it with: pip install 'jaxrl-llm[ray]', or leave --workers out."
        ) from None
    return ray


def parse_resources(text: str) -> dict[str, float]:
    """Resources of a worker by Ray's name, from "CPU=2,GPU=1".

    Raises:
      InputError: not of that form.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if not name or name in found or not 0 <= amount < float("inf"):
            raise InputError(
                f"--worker-resources: {text!r} is not NAME=NUMBER, several of them separated by commas, each name once; for "
                "example CPU=1, or TPU=4,CPU=8."
            )
        found[name] = amount
    return found


def check_address(address: str | None) -> None:
    """Refuses what RAY_ADDRESS cannot be, at once: Ray would try for minutes.

    Raises:
      InputError: it is not host and port, or nobody listens there.
    """
    if address is None or address in ("", "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise InputError(
            f"--workers: RAY_ADDRESS={address} is not HOST:PORT of a cluster. Run on one of its machines, with the address that "
            "`ray start` printed, or unset it to start Ray here."
        )
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--workers: nobody answers at RAY_ADDRESS={address} ({error}). Start the cluster, or unset it to start Ray here."
        ) from None


class _Host:
    """The process of a worker: one thread samples, others take and give messages."""

    def __init__(self, sampler: Engines, sampling: SamplingParams, rows: int):
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._worker = Worker(sampler, sampling, rows)
        threading.Thread(target=self._run, daemon=True, name="sampling").start()

    def _run(self) -> None:
        try:
            while True:
                if not self._worker.busy:
                    self._reply(self._worker.receive(self._inbox.get()))
                while not self._inbox.empty():
                    self._reply(self._worker.receive(self._inbox.get()))
                self._reply(self._worker.step())
        # Whatever ends this thread ends the worker; the learner says why and starts another one.
        except BaseException:
            self._outbox.put(Gone(traceback.format_exc(limit=-4)))

    def _reply(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._outbox.put(reply)

    def post(self, request: Request) -> None:
        """Takes a message."""
        self._inbox.put(request)

    def load(self, package: Package, attempt: int) -> None:
        """Takes weights: Ray hands over by reference only what is an argument of its own."""
        self._inbox.put(Load(package, attempt))

    def fetch(self, timeout: float) -> list[Reply]:
        """What there is to say; waits for it at most so many seconds."""
        replies: list[Reply] = []
        try:
            replies.append(self._outbox.get(timeout=timeout))
            while True:
                replies.append(self._outbox.get_nowait())
        except queue.Empty:
            return replies

    def whereabouts(self) -> tuple[str, int]:
        """(node, process id)."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()


class RayActors:
    """A `Transport` over Ray: one actor a worker, weights through Ray's object store."""

    def __init__(self, size: int, resources: Mapping[str, float], store_bytes: int):
        """Connects to Ray. Where it is not running and RAY_ADDRESS names no cluster, one is started on this machine,
        and ended by `close`; best before JAX has threads, since Ray forks.

        Args:
          size: workers that are expected.
          resources: of each worker, by Ray's name.
          store_bytes: of weights that are outstanding at a time, for the object store of a cluster that is started.
        """
        self._ray = ray = check_ray()
        self._mine = not ray.is_initialized()
        address = os.environ.get("RAY_ADDRESS")
        others = {name: value for name, value in resources.items() if name not in ("CPU", "GPU")}
        self._options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,
        }
        if not (others or resources.get("GPU")) and os.environ.get("JAX_PLATFORMS") != "cpu":
            # A worker without an accelerator of its own must not take the learner's.
            self._options["runtime_env"] = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
        if self._mine:
            options: dict[str, Any] = dict(
                include_dashboard=False, log_to_driver=False, logging_level="error"
            )
            if address in (None, "", "local"):
                options |= {
                    "num_cpus": max(1, round(size * resources.get("CPU", 0))),
                    "object_store_memory": max(100_000_000, int(1.2 * store_bytes)),
                }
                if others:
                    options["resources"] = {name: size * value for name, value in others.items()}
            try:
                ray.init(**options)
            except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                where = os.environ.get("RAY_ADDRESS")
                what = (
                    f"the cluster at RAY_ADDRESS={where} cannot be reached"
                    if where
                    else "Ray cannot be started here"
                )
                raise InputError(f"--workers: {what}: {_short(error)}") from error
        self._class = ray.remote(concurrency_groups={"post": 1, "fetch": 1})(_Host)
        self._arguments: tuple[Any, ...] = ()
        self._actors: dict[str, Any] = {}
        self._fetches: dict[Any, str] = {}  # reference -> worker
        self._hellos: dict[Any, str] = {}
        self._at: dict[str, tuple[str, int]] = {}  # node and process of a worker that runs
        self._packages: dict[int, Any] = {}  # reference by version

    def employ(self, sampler: Engines, sampling: SamplingParams, rows: int) -> None:
        """What each `Worker` is made of; the sampler is sent to it, it holds no weights."""
        self._arguments = (sampler, sampling, rows)

    def start(self, worker: str) -> None:
        """See `Transport`."""
        actor = self._class.options(**self._options).remote(*self._arguments)
        self._actors[worker] = actor
        self._hellos[actor.whereabouts.remote()] = worker

    def stop(self, worker: str) -> None:
        """See `Transport`."""
        actor = self._actors.pop(worker, None)
        if actor is None:
            return
        for of in (self._fetches, self._hellos):
            for reference in [r for r, name in of.items() if name == worker]:
                del of[reference]
        self._ray.kill(actor, no_restart=True)
        node, process = self._at.pop(worker, ("", 0))
        # Ray asks the process to end, which one that is stopped or stuck does not do.
        if node == self._ray.get_runtime_context().get_node_id():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                return

    def send(self, worker: str, request: Request) -> None:
        """See `Transport`."""
        actor = self._actors.get(worker)
        if actor is None:
            return
        if not isinstance(request, Load):
            actor.post.options(concurrency_group="post").remote(request)
            return
        version = request.package.version
        if version not in self._packages or request.attempt > 1:  # after damage: not the same copy again
            self._packages[version] = self._ray.put(request.package)
        actor.load.options(concurrency_group="post").remote(self._packages[version], request.attempt)

    def forget(self, before: int) -> None:
        """See `Transport`."""
        self._packages = {v: reference for v, reference in self._packages.items() if v >= before}

    def receive(self, timeout: float) -> list[tuple[str, Reply]]:
        """See `Transport`."""
        waiting = [*self._fetches, *self._hellos]
        if not waiting:
            time.sleep(timeout)
            return []
        done, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout)
        if done:
            done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        replies: list[tuple[str, Reply]] = []
        for reference in done:
            worker = self._hellos.pop(reference, None) or self._fetches.pop(reference)
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:  # its process, its node, or what it needs to start
                replies.append((worker, Gone(_short(error))))
                continue
            replies.append((worker, Ready()))
            if isinstance(result, tuple):
                self._at[worker] = result
            else:
                replies += [(worker, reply) for reply in result]
            fetch = self._actors[worker].fetch.options(concurrency_group="fetch")
            self._fetches[fetch.remote(_FETCH)] = worker
        return replies

    def close(self) -> None:
        """See `Transport`."""
        for worker in list(self._actors):
            self.stop(worker)
        if self._mine:
            self._ray.shutdown()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 250 else f"{text[:250]}…"
