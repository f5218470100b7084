"""Runs one command as one or more local processes and looks after them until the last has ended.

It is what `tpu_run.py --backend here` runs, and what every other backend runs on each host of a slice:

- the output of each worker goes to the terminal with the worker's name before each line, and to a file of its own;
- SIGTERM and SIGINT are passed on to every worker once; whoever has not ended after the grace is killed;
- when a worker fails, the others are told to end in the same way, and the exit code is that of the first failure;
- a worker that was preempted (it saved a snapshot and ended, or was terminated) is started again with all others;
- a run whose folder exists goes on: `--resume` is appended to the command.

Standard library only, one file: it starts before anything is installed, and as process 1 of a container.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

__all__ = ["PREEMPTED", "Settings", "command_of", "environment_of", "main", "supervise"]

EXIT_STOPPED = 75  # `jaxrl train`: stopped on request, snapshot saved
# Exit codes of a worker that was told to end and has nothing wrong with it. 143: told before there was anything to save.
PREEMPTED = frozenset({EXIT_STOPPED, 143})
_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
_POLL = 0.05  # seconds between two looks at the workers
_SHORTEST_LINE = 6  # characters of a line of a secret that is hidden on its own
_READERS = 5.0  # seconds that the readers of output may take after the last worker has ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run, and how.

    Raises:
      ValueError: a number that makes no sense.
    """

    command: tuple[str, ...]
    processes: int = 1
    devices: int | None = None  # virtual CPU devices of each process; None: whatever the machine has
    grace: float = 120.0  # seconds between SIGTERM and SIGKILL
    max_restarts: int = 0  # after preemptions
    logs: pathlib.Path | None = None  # folder of worker-N.log; None: no files
    resume: pathlib.Path | None = None  # run folder; where it holds a run, --resume is appended
    host: str | None = None  # name of the only worker; None: worker-0, worker-1, …
    secrets: tuple[str, ...] = ()  # variables whose values are hidden, besides those named like secrets

    def __post_init__(self) -> None:
        for what, value, least in (
            ("processes", self.processes, 1),
            ("devices per process", 1 if self.devices is None else self.devices, 1),
            ("restarts", self.max_restarts, 0),
            ("seconds of grace", self.grace, 0),
        ):
            if value < least:
                raise ValueError(f"{what}: {value} was given; at least {least} is needed.")
        if not self.command:
            raise ValueError("there is no command to run. Give it after --.")
        if self.host is not None and self.processes > 1:
            raise ValueError("a name can be given to one worker only.")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers, as in the terminal and in the names of their logs."""
        return tuple(f"worker-{i}" for i in range(self.processes)) if self.host is None else (self.host,)


def environment_of(settings: Settings, index: int, address: str, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that worker `index` gets besides those in `base`; where they are in `base`, they replace it.

    Several processes find each other by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
    `jaxrl_llm.parallel.processes.initialize_processes` reads. Those and virtual devices are for CPUs: a TPU belongs to
    one process.
    """
    extra = {"PYTHONUNBUFFERED": "1"}
    if settings.processes > 1 or settings.devices is not None:
        extra["JAX_PLATFORMS"] = "cpu"
    if settings.devices is not None:
        kept = [flag for flag in base.get("XLA_FLAGS", "").split() if not flag.startswith(_VIRTUAL_DEVICES)]
        extra["XLA_FLAGS"] = " ".join([*kept, f"{_VIRTUAL_DEVICES}={settings.devices}"])
    if settings.processes > 1:
        extra["JAX_COORDINATOR_ADDRESS"] = address
        extra["JAX_NUM_PROCESSES"] = str(settings.processes)
        extra["JAX_PROCESS_ID"] = str(index)
    return extra


def command_of(settings: Settings) -> tuple[str, ...]:
    """The command as it is run now: with --resume when the folder already holds a run."""
    if settings.resume is None or not (settings.resume / "config.yaml").is_file():
        return settings.command
    return settings.command if "--resume" in settings.command else (*settings.command, "--resume")


class _Signals:
    """SIGTERM and SIGINT as data: what was asked for, and how often. A terminal that closes counts as SIGTERM."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Callable | int | None] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, _: object) -> None:
        self.received.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Worker:
    """One process, the thread that reads its output, and the file that keeps it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path | None,
        show: Callable[[str, str], str],
    ):
        self.name = name
        # Opened first: a worker that was started is not left alone because its log cannot be written.
        self._file: IO[str] | None = None if log is None else _opened(log)
        try:
            # A session of its own: Ctrl-C reaches it through the supervisor only, once; and all it starts can be killed.
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._close_file()
            raise ValueError(f"{command[0]} cannot be started: {error.strerror}.") from None
        self._show = show
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            text = self._show(self.name, line.decode(errors="replace").rstrip("\r\n"))
            if self._file is not None:
                try:
                    self._file.write(text + "\n")
                    self._file.flush()
                except (
                    OSError
                ) as error:  # a full disk; the worker must still find a reader, or it would wait for one
                    self._show("launch", f"the log of {self.name} ends here: {error.strerror}")
                    self._close_file()

    def code(self) -> int | None:
        """Its exit code as a shell counts it (128 + signal), None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def tell(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it and whatever it has started and left behind."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nothing is left in its session
        self.process.wait()

    def close(self) -> None:
        self.reader.join(_READERS)
        if self.reader.is_alive():
            return  # a process in a session of its own still holds the pipe
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # it was said when it was written
                self._file.close()
            self._file = None


def _opened(log: pathlib.Path) -> IO[str]:
    try:
        return log.open("a", encoding="utf-8")
    except OSError as error:
        raise _no_logs(log, error) from None


def _no_logs(path: pathlib.Path, error: OSError) -> ValueError:
    return ValueError(
        f"{path}: the logs of the workers cannot be written there: {error.strerror}. Give another folder with --logs, or "
        "another run folder."
    )


def supervise(settings: Settings, environment: Mapping[str, str] | None = None) -> int:
    """Runs the workers to their end, with restarts. Must be called in the main thread.

    Returns:
      0 when all ended with 0, else the exit code of the first that failed (128 + signal for one killed by a signal);
      75 when it was told to stop and every worker ended for that reason or with 0.

    Raises:
      ValueError: the command cannot be started, or its logs cannot be written.
    """
    base = dict(os.environ if environment is None else environment)
    show = _printer(settings, base)
    if settings.logs is not None:
        try:
            settings.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_logs(settings.logs, error) from None
    with _Signals() as signals:
        for attempt in range(settings.max_restarts + 1):
            code = _attempt(settings, base, signals, show)
            if code not in PREEMPTED or signals.received or attempt == settings.max_restarts:
                return code
            show("launch", f"preempted (exit code {code}); restart {attempt + 1} of {settings.max_restarts}")
    raise AssertionError("unreachable")


def _attempt(
    settings: Settings, base: Mapping[str, str], signals: _Signals, show: Callable[[str, str], str]
) -> int:
    """One start of all workers, to the end of the last."""
    command = command_of(settings)
    address = f"127.0.0.1:{_free_port()}" if settings.processes > 1 else ""
    workers: list[_Worker] = []
    try:
        for index, name in enumerate(settings.names):
            extra = environment_of(settings, index, address, base)
            log = None if settings.logs is None else settings.logs / f"{name}.log"
            workers.append(_Worker(name, command, {**base, **extra}, log, show))
        return _watch(workers, settings.grace, signals, show)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()


def _watch(
    workers: Sequence[_Worker], grace: float, signals: _Signals, show: Callable[[str, str], str]
) -> int:
    """Waits for all workers. The first failure, or a signal, begins the end of the others."""
    first: int | None = None  # exit code of the first that failed
    deadline: float | None = None  # when those that still run are killed
    heard = 0

    def end(number: int) -> None:
        nonlocal deadline
        if deadline is None:
            deadline = time.monotonic() + grace
            for worker in workers:
                worker.tell(number)

    while True:
        codes = [worker.code() for worker in workers]
        if first is None:
            failed = [(worker.name, code) for worker, code in zip(workers, codes, strict=True) if code]
            if failed:
                name, first = failed[0]
                if len(workers) > 1 and None in codes:
                    show("launch", f"{name} ended with exit code {first}; the others are told to end")
        if None not in codes:
            return first or 0
        if len(signals.received) > heard:
            number = signals.received[heard]
            heard += 1
            name = signal.Signals(number).name
            if number == signal.SIGINT and heard > 1:
                show("launch", "interrupted again: the workers are killed")
                deadline = time.monotonic()
            elif deadline is None:
                show("launch", f"{name}: passed on to the workers, which have {grace:g} s to end")
                end(number)
        elif first is not None:
            end(signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            for worker, code in zip(workers, codes, strict=True):
                if code is None:
                    show("launch", f"{worker.name} did not end within {grace:g} s and is killed")
                    worker.kill()
            continue
        time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _printer(settings: Settings, environment: Mapping[str, str]) -> Callable[[str, str], str]:
    """show(name, line): prints a line without secrets, under the name of a worker; returns what was printed of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows ? for the rest
    hide = _hider(settings.secrets, environment)
    lock = threading.Lock()
    closed = False

    def show(name: str, line: str) -> str:
        nonlocal closed
        text = hide(line)
        with lock:
            if not closed:
                try:
                    print(f"[{name}] {text}", flush=True)
                except OSError:  # whoever read has left; the run goes on
                    closed = True
        return text

    return show


def _hider(secrets: Sequence[str], environment: Mapping[str, str]) -> Callable[[str], str]:
    whole = {environment[name] for name in secrets if environment.get(name)}
    # Text is hidden line by line, so a value of several lines is hidden in parts.
    parts = {line for value in whole for line in value.splitlines() if len(line) >= _SHORTEST_LINE}
    values = sorted(whole | parts, key=len, reverse=True)
    redact = load_redact()

    def hide(text: str) -> str:
        for value in values:
            text = text.replace(value, redact.REDACTED)
        return redact.hide_environment_secrets(text, environment)

    return hide


def load_redact():
    """jaxrl_llm/diagnostics/redact.py, which needs no other module, without importing the package and its dependencies."""
    path = pathlib.Path(__file__).resolve().parents[1] / "jaxrl_llm" / "diagnostics" / "redact.py"
    spec = importlib.util.spec_from_file_location("_jaxrl_redact", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """The command line, used on the hosts of a slice: supervise.py [options] -- COMMAND ..."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="supervise.py", description=main.__doc__)
    parser.add_argument("--grace", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--logs", type=pathlib.Path)
    parser.add_argument("--resume-folder", type=pathlib.Path)
    parser.add_argument("--name", default=None, help="of this worker; default: the name of the host")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME")
    options = parser.parse_args(arguments[:cut])
    name = options.name or re.sub(r"[^A-Za-z0-9.\-]", "-", socket.gethostname())
    try:
        settings = Settings(
            command=tuple(arguments[cut + 1 :]),
            grace=options.grace,
            max_restarts=options.max_restarts,
            logs=options.logs,
            resume=options.resume_folder,
            host=name,
            secrets=tuple(options.secret),
        )
        missing = [name for name in options.secret if name not in os.environ]
        if missing:
            raise ValueError(f"secret variables that are not set on this host: {', '.join(missing)}.")
        print(f"[{name}] {shlex.join(command_of(settings))}", flush=True)
        return supervise(settings)
    except ValueError as error:
        print(f"supervise: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
