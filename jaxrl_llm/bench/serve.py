"""`jaxrl bench serve`: mixed load on the HTTP server, with every answer checked and leaks looked for.

The server is a process of its own, started here from a config, or one that runs already. Its memory is what
/metrics tells; threads and open files are read from /proc for a server that was started here, on Linux.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import IO, Any

import h11

from jaxrl_llm.bench.http import split_url
from jaxrl_llm.bench.serve_checks import Model, Sample, check_growth, check_rest, growth
from jaxrl_llm.bench.serve_load import Load, Target
from jaxrl_llm.bench.serve_tasks import make_tasks
from jaxrl_llm.config import Config, as_data, parse_config, to_yaml
from jaxrl_llm.diagnostics.display import format_duration
from jaxrl_llm.errors import InputError

__all__ = ["bench_serve", "describe", "progress_lines", "small_config"]

_TASKS = 40  # questions that are asked again and again
_LOADING = 600.0  # seconds for the server to load its model
_REST = 20.0  # seconds for the server to come to rest after the load
_STOP = 120.0  # seconds for the server to end when it is told to
_POINTS = 60  # of a series in the result
_VERSIONS = (1, 2)  # of the snapshots that are made here
_MIB = 2**20


def small_config() -> Config:
    """The tiny model in a cache so small that rows lose their pages and prompts are given up under load."""
    return parse_config(
        {
            "model": {"source": "tiny", "max_context": 256},
            "sampler": {"slots": 8, "page_size": 16, "pages": 81},
        }
    )


def bench_serve(
    config: Config,
    *,
    url: str | None = None,
    api_key: str | None = None,
    minutes: float = 10.0,
    clients: int = 16,
    queue: int = 48,
    seed: int = 0,
    max_growth: float = 1.0,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Loads a server for some minutes and says what was wrong.

    Args:
      config: of the model; with `url` it must be what the server there was started with.
      url: address of a server that runs; None: one is started, and given other weights now and then.
      api_key: that the server wants; None: none.
      minutes: of load, without the start and the end.
      clients: requests under way at a time, bursts aside.
      queue: completions that wait before the server refuses others; of the server at `url`: what it was started with.
      seed: of everything that is asked, and of what happens when.
      max_growth: MiB a thousand requests that the memory of the server may grow by, beyond the first 16 MiB.
      on_progress: told a line of figures about once a second.

    Returns:
      A JSON-able dict. `ok`, `faults` (what was wrong, in plain words) and `leaks` are the verdict.

    Raises:
      InputError: arguments that cannot be, a model that cannot be loaded, or no server at `url`.
    """
    if not 0 < minutes < 1e6 or not 0 < max_growth < 1e6 or not 1 <= clients <= 4096 or queue < 0:
        raise InputError(
            "--minutes and --max-growth must be positive, --clients between 1 and 4096, --queue not negative; got "
            f"{minutes:g}, {max_growth:g}, {clients} and {queue}."
        )
    place = None if url is None else split_url(url)
    from jaxrl_llm.assembly import configured_model

    loaded = configured_model(config, None)
    model = Model(
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.config.vocab_size,
        eos_ids=loaded.config.eos_ids,
        max_context=config.model.max_context,
    )
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    common: dict[str, Any] = {
        "headers": headers,
        "model": model,
        "slots": config.sampler.slots,
        "queue": queue,
    }
    with contextlib.ExitStack() as stack:
        server = None
        if place is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl-bench-")))
            run = folder / "run"
            _save_versions(run, config, loaded.params)
            del loaded  # the server has a copy of its own
            on_progress("starting the server")
            server = stack.enter_context(_running(config, folder, run, queue=queue, api_key=api_key))
            common |= {"snapshot": str(run), "versions": _VERSIONS}
            place = "127.0.0.1", server.port
        target = Target(host=place[0], port=place[1], **common)
        tasks = make_tasks(random.Random(f"tasks-{seed}"), model, _TASKS)
        load = Load(target, tasks, clients=clients, seed=seed)
        watch = _Watch(load, server)
        began = time.perf_counter()
        try:
            asyncio.run(_measure(load, watch, 60 * minutes, on_progress))
        except (OSError, h11.ProtocolError) as error:
            load.fault(f"the server cannot be reached ({type(error).__name__}: {error})")
        seconds = time.perf_counter() - began
        if server is not None:
            for what in server.end():
                load.fault(what)
    settings = {"minutes": minutes, "clients": clients, "queue": queue, "seed": seed}
    return _result(load, watch, seconds=seconds, max_growth=max_growth, settings=settings)


async def _measure(load: Load, watch: _Watch, seconds: float, on_progress: Callable[[str], None]) -> None:
    """Answers alone, load, rest, answers alone again under the other weights, rest."""
    on_progress("asking each question alone")
    await load.greet()
    await load.ask_alone()
    await load.ask_together()
    await watch.start()
    loading = asyncio.create_task(load.run(seconds))
    watching = asyncio.create_task(watch.run(seconds, on_progress))
    try:
        await asyncio.wait([loading, watching], return_when=asyncio.FIRST_COMPLETED)
        await (watching if watching.done() else loading)  # who watches ends by an error only
    finally:
        for task in (loading, watching):
            task.cancel()
        await asyncio.gather(loading, watching, return_exceptions=True)
    await watch.rest()
    others = [version for version in load.target.versions if version != load.target.versions[0]]
    if others:
        await load.update(others[0])
    on_progress("asking each question alone")
    await load.ask_alone()
    await watch.rest()


# ------------------------------------------------------------------------------------ the server


def _save_versions(run: pathlib.Path, config: Config, params: Any) -> None:
    """A run folder with two versions of the weights: those of the model, and others near them."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.snapshots.store import SnapshotStore, fingerprint

    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        x + (0.05 * jnp.std(x) * jax.random.normal(key, x.shape)).astype(x.dtype)
        for x, key in zip(leaves, keys, strict=True)
    ]
    with SnapshotStore(run / "snapshots") as store:
        for version, saved in zip(_VERSIONS, (params, jax.tree.unflatten(tree, moved)), strict=True):
            store.save(
                version, {"params": saved}, {"fingerprint": fingerprint(saved), "config": as_data(config)}
            )
            store.wait()


class _Server:
    """A server that was started here."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: pathlib.Path):
        self.process, self.port, self._log = process, port, log

    def log(self) -> str:
        """The end of what it wrote to standard error."""
        return self._log.read_text("utf-8", "replace")[-2000:]

    def end(self) -> list[str]:
        """Tells it to stop; what is wrong with how it did, and with what it wrote."""
        out = []
        if self.process.poll() is not None:
            out.append(f"the server ended by itself with code {self.process.returncode}: {self.log()}")
        else:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(_STOP)
                if code:
                    out.append(f"the server ended with code {code} when it was told to stop: {self.log()}")
            except subprocess.TimeoutExpired:
                out.append(f"the server did not end within {_STOP:g} s of SIGTERM: {self.log()}")
        if not out and "Traceback" in self._log.read_text("utf-8", "replace"):
            out.append(f"the server wrote an error: {self.log()}")
        return out


@contextlib.contextmanager
def _running(
    config: Config, folder: pathlib.Path, run: pathlib.Path, *, queue: int, api_key: str | None
) -> Iterator[_Server]:
    """`jaxrl serve` in a process of its own, at any free port of this machine."""
    path, log = folder / "config.yaml", folder / "server.log"
    path.write_text(to_yaml(config))
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", str(path), "--snapshot", str(run)]
    command += ["--version", str(_VERSIONS[0]), "--port", "0", "--queue", str(queue), "--grace", "10"]
    environment = {name: value for name, value in os.environ.items() if name != "JAXRL_API_KEY"}
    if api_key is not None:
        environment["JAXRL_API_KEY"] = api_key
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with process:
        try:
            line = _first_line(process, _LOADING)
            if not line.startswith("jaxrl: serving "):
                raise InputError(
                    f"the server did not start ({line.strip() or 'it printed nothing'}): "
                    f"{log.read_text('utf-8', 'replace')[-2000:]}"
                )
            yield _Server(process, split_url(line.split(" at ")[-1].strip())[1], log)
        finally:
            process.kill()


def _first_line(process: subprocess.Popen[str], seconds: float) -> str:
    """The first line of its output; "" if it ends or takes too long."""
    lines: SimpleQueue[str] = SimpleQueue()
    output = process.stdout
    if output is None:
        raise RuntimeError("the output of a process that was started with a pipe is none")
    threading.Thread(target=lambda: lines.put(output.readline()), daemon=True).start()
    try:
        return lines.get(timeout=seconds)
    except Empty:
        return ""


# ------------------------------------------------------------------------------------ leaks


class _Watch:
    """Looks at the server while it is loaded, and when it should be at rest."""

    def __init__(self, load: Load, server: _Server | None):
        self._load, self._server = load, server
        self.samples: list[Sample] = []
        self.leaks: list[str] = []
        self._tasks = self._tokens = 0
        self.tokens = 0  # received during the load
        self._files: int | None = None
        self.began = 0.0

    async def start(self) -> None:
        """Remembers what the server holds before the load."""
        async with self._load.connect() as connection:
            now = await self._load.metrics(connection)
            _, self._files = self._process()
        missing = {"jaxrl_pages_lost", "jaxrl_tasks", "process_resident_memory_bytes"} - now.keys()
        if missing:
            raise InputError(
                f"/metrics of the server has no {', '.join(sorted(missing))}; it must be of this version."
            )
        self._tasks = int(now["jaxrl_tasks"])
        self._tokens = self._load.tokens
        self.began = time.perf_counter()

    async def run(self, seconds: float, on_progress: Callable[[str], None]) -> None:
        """Takes samples until it is cancelled."""
        period = min(1.0, seconds / 40)
        async with self._load.connect() as connection:
            while True:
                self._take(await self._load.metrics(connection))
                last, load = self.samples[-1], self._load
                rate = self.tokens / max(1e-9, last.seconds)
                newest = f", the last: {load.faults[-1]:.200}" if load.faults else ""
                on_progress(
                    f"{format_duration(last.seconds)} of {format_duration(seconds)}: {load.answered:,} requests, "
                    f"{rate:,.0f} tokens/s, {load.refused:,} times 429, {len(load.freed)} kills, "
                    f"{last.resident / _MIB:,.0f} MiB, {load.fault_count} faults{newest}"
                )
                await asyncio.sleep(period)

    def _take(self, now: Mapping[str, float]) -> None:
        threads, files = self._process()
        self.tokens = self._load.tokens - self._tokens
        self.samples.append(
            Sample(
                seconds=time.perf_counter() - self.began,
                requests=self._load.answered,
                resident=now["process_resident_memory_bytes"],
                threads=threads,
                files=files,
            )
        )

    def _process(self) -> tuple[int | None, int | None]:
        """(threads, open files) of the server, where the system tells."""
        if self._server is None or not sys.platform.startswith("linux"):
            return None, None
        try:
            proc = pathlib.Path("/proc", str(self._server.process.pid))
            return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))
        except FileNotFoundError:  # it has ended, which is told elsewhere
            return None, None

    async def rest(self) -> None:
        """Waits until the server holds nothing any more; what it still holds after a while is a leak."""
        end = time.monotonic() + _REST
        async with self._load.connect() as connection:
            while True:
                held = check_rest(await self._load.metrics(connection), self._tasks)
                _, files = self._process()
                if files is not None and self._files is not None and files > self._files:
                    held.append(f"at rest {files} files are open, {self._files} before the load")
                if not held or time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
        self.leaks += held


# ------------------------------------------------------------------------------------ the result


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The value that so many of the values do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _thinned(values: Sequence[Any]) -> list[Any]:
    """At most `_POINTS` of the values, evenly."""
    step = -(-len(values) // _POINTS) or 1
    return list(values[::step])


def _result(
    load: Load, watch: _Watch, *, seconds: float, max_growth: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    leaks = watch.leaks + check_growth(watch.samples, max_growth)
    found = growth(watch.samples)
    loaded = watch.samples[-1].seconds if watch.samples else 0.0
    by_status: collections.Counter[str] = collections.Counter()
    for (_, status), count in load.statuses.items():
        by_status[status] += count
    faults = list(load.faults)
    if load.fault_count > len(faults):
        faults.append(f"and {load.fault_count - len(faults)} more faults")
    if not load.refused:
        faults.append("no request was refused with 429")
    if not load.freed:
        faults.append("no client was killed while it streamed: the load was too short")
    return {
        "ok": not faults and not leaks,
        **settings,
        "seconds": seconds,
        "requests": load.answered,
        "requests_per_second": (watch.samples[-1].requests - watch.samples[0].requests) / loaded
        if loaded
        else None,
        **{f"status/{status}": count for status, count in sorted(by_status.items())},
        **{f"requests/{kind}/{status}": count for (kind, status), count in sorted(load.statuses.items())},
        **{f"events/{name}": count for name, count in sorted(load.events.items())},
        "tokens": load.tokens,
        "tokens_per_second": watch.tokens / max(1e-9, loaded),
        "first_token_seconds/p50": _quantile(load.first, 0.5),
        "first_token_seconds/p99": _quantile(load.first, 0.99),
        "request_seconds/p50": _quantile(load.whole, 0.5),
        "request_seconds/p99": _quantile(load.whole, 0.99),
        "answers_compared": load.references.compared,
        "refused": load.refused,
        "kills": len(load.freed),
        "freed_seconds/max": max(load.freed, default=None),
        "freed_seconds/p50": _quantile(load.freed, 0.5),
        "resident_mib/start": watch.samples[0].resident / _MIB if watch.samples else None,
        "resident_mib/end": watch.samples[-1].resident / _MIB if watch.samples else None,
        "growth_mib": None if found is None else found.bytes / _MIB,
        "growth_mib_per_thousand_requests": None if found is None else found.per_thousand / _MIB,
        "threads/most": max((s.threads for s in watch.samples if s.threads is not None), default=None),
        "files/most": max((s.files for s in watch.samples if s.files is not None), default=None),
        "series": [_rounded(sample) for sample in _thinned(watch.samples)],
        "leaks": leaks,
        "faults": faults,
        "load_average": os.getloadavg()[0],
    }


def _rounded(sample: Sample) -> dict[str, Any]:
    return {
        "seconds": round(sample.seconds, 1),
        "requests": sample.requests,
        "resident_mib": round(sample.resident / _MIB, 1),
        "threads": sample.threads,
        "files": sample.files,
    }


def describe(result: Mapping[str, Any]) -> str:
    """A result of `bench_serve` for people."""

    def number(key: str, unit: str = "", digits: str = ".3g") -> str:
        value = result[key]
        return "—" if value is None else f"{value:{digits}}{unit}"

    def both(key: str) -> str:
        return (
            f"{number(key + '/p50', ' s')} in the middle, {number(key + '/p99', ' s')} at the 99th percentile"
        )

    statuses = [
        f"{key.removeprefix('status/')} {value:,}"
        for key, value in result.items()
        if key.startswith("status/")
    ]
    lines = [
        f"{result['requests']:,} requests, {number('requests_per_second')} a second under load, "
        f"{number('tokens_per_second')} tokens a second; {result['answers_compared']:,} completions compared with an "
        "earlier one",
        f"by status: {', '.join(statuses)}",
        f"time to the first token of a stream: {both('first_token_seconds')}",
        f"time to a whole answer: {both('request_seconds')}",
        f"clients killed: {result['kills']}; their pages were free after {number('freed_seconds/p50', ' s')} in the "
        f"middle, {number('freed_seconds/max', ' s')} at most",
        f"memory: {number('resident_mib/start', ' MiB', '.0f')} at the start, {number('resident_mib/end', ' MiB', '.0f')} "
        f"at the end; from the second to the last quarter {number('growth_mib', ' MiB', '+.1f')}, "
        f"{number('growth_mib_per_thousand_requests', ' MiB', '+.2f')} a thousand requests",
        f"threads: {number('threads/most', digits='d')} at most; open files: {number('files/most', digits='d')} at most",
    ]
    wrong = [
        *(f"leak: {leak}" for leak in result["leaks"]),
        *(f"wrong: {fault}" for fault in result["faults"]),
    ]
    return "\n".join([*lines, *(wrong or ["Every answer was right, and nothing leaked."])])


def progress_lines(stream: IO[str], every: float = 10.0) -> Callable[[str], None]:
    """An `on_progress` that prints: the first line, and one after so many seconds."""
    told = -every

    def tell(line: str) -> None:
        nonlocal told
        if time.monotonic() - told >= every:
            told = time.monotonic()
            print(f"jaxrl: {line}", file=stream, flush=True)

    return tell
