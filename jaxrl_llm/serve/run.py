"""From a config to a listening server: what can be refused is refused before the model is loaded.

The address is taken first. Once the model is loaded the server answers there, and says in /health that it warms up
until its programs are compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.serve.protocol import Limits, Served

__all__ = ["Settings", "listen", "make_server", "serve"]

_KEEP_ALIVE = 30  # seconds that an idle connection stays open
_ENGINE_SECONDS = 60.0  # for the dispatch that is under way when the server stops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How the server presents itself."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = None
    name: str | None = None  # of the model; default: model.source
    grace: float = 30.0  # seconds that running requests have to finish when the server is told to stop
    replicas: int = 1  # engines, each on a device of its own
    warm_up: bool = True  # compile the programs before clients are served
    limits: Limits = dataclasses.field(default_factory=Limits)


def serve(
    config: Config,
    settings: Settings,
    *,
    snapshot: str | None = None,
    version: int | None = None,
    on_loaded: Callable[[], None] = lambda: None,
    on_ready: Callable[[str], None] = print,
) -> int:
    """Serves a model, or a snapshot of it, until SIGTERM or Ctrl-C; the exit code.

    Args:
      on_loaded: called when the model is in memory.
      on_ready: told one line when requests are answered: address, model, version.

    Raises:
      InputError: the extra [serve] is missing, the address cannot be used or is open to others without a key, or there
        is no such model or snapshot.
    """
    try:
        import uvicorn  # noqa: F401  # whether it is there is asked before anything is loaded

        from jaxrl_llm.serve.app import Service, is_loopback
    except ImportError as error:
        raise InputError(
            f"jaxrl serve needs the extra [serve]: pip install 'jaxrl-llm[serve]' ({error})."
        ) from None
    _check(settings, is_loopback)
    from jaxrl_llm.snapshots.store import locate

    if snapshot is not None:
        locate(snapshot)
    with contextlib.closing(listen(settings.host, settings.port)) as sock:
        import jax

        from jaxrl_llm.assembly import build_engine, inference_mesh, replica_devices
        from jaxrl_llm.inference import load_policy, load_weights
        from jaxrl_llm.memory import refuse_too_large, sampler_parts
        from jaxrl_llm.serve.worker import Worker

        replica_devices(settings.replicas)  # are there so many?
        # Replicas are copies, each whole on a device of its own.
        mesh = inference_mesh(config) if settings.replicas == 1 else None
        model, version = load_policy(config, snapshot, version, mesh=mesh)
        slots = config.sampler.slots
        parts = sampler_parts(config, model.config, rows=slots, max_tokens=config.model.max_context)
        refuse_too_large([[dataclasses.replace(p, bytes=p.bytes * settings.replicas) for p in parts]])
        engine = build_engine(config, model, settings.replicas)
        fingerprint = engine.swap(model.params, version=version, pages="recompute")
        served = Served(
            name=settings.name or config.model.source,
            tokenizer=model.tokenizer,
            vocab_size=model.config.vocab_size,
            eos_ids=model.config.eos_ids,
            max_context=config.model.max_context,
        )
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.params
        )
        del model  # the engine has the parameters
        worker = Worker(engine, version=version, fingerprint=fingerprint)
        service = Service(
            worker,
            served,
            slots=slots * settings.replicas,
            replicas=settings.replicas,
            load=lambda path, wanted: load_weights(path, wanted, shapes),
            limits=settings.limits,
            source=config.model.source,
            api_key=settings.api_key,
        )
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        line = (
            f"jaxrl: serving {served.name} (version {version}, weights {fingerprint[:12]}) at "
            f"http://{shown}:{sock.getsockname()[1]}/v1"
        )
        server = make_server(service, settings, lambda: on_ready(line))
        worker.on_fault = server.stop_soon
        on_loaded()
        try:
            asyncio.run(server.serve(sockets=[sock]))
        finally:
            ended = worker.stop(_ENGINE_SECONDS)
    return 0 if worker.fault is None and ended else 1


def _check(settings: Settings, is_loopback: Callable[[str], bool]) -> None:
    if not 0 <= settings.port < 65536:
        raise InputError(f"--port must be in [0, 65535] (0: any free one), got {settings.port}.")
    if settings.api_key is not None and not settings.api_key.strip():
        raise InputError(
            "the API key is empty; give a secret, or leave the option out to serve this machine only."
        )
    key = settings.api_key
    if key is not None and (not key.isprintable() or key != key.strip()):  # not shown: it is a secret
        raise InputError(
            "the API key begins or ends with a blank, or holds a line end or another character that is not printed, so that no "
            "client could send it. Give another; a file that it is read from may end with a line end."
        )
    if settings.name is not None and not (settings.name.strip() and settings.name.isprintable()):
        raise InputError(
            f"--name {settings.name!a}: give a name of printed characters, or leave the option out."
        )
    if settings.api_key is None and not is_loopback(settings.host):
        raise InputError(
            f"--host {settings.host} can be reached from other machines, and there is no API key. Set JAXRL_API_KEY or "
            "--api-key, or serve 127.0.0.1."
        )
    if not settings.grace >= 0 or not settings.limits.seconds > 0 or settings.limits.queued < 0:
        raise InputError("--grace and --queue must not be negative, and --timeout must be positive.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a second server on the port is told before it loads a model.

    Raises:
      InputError: the address is taken, unknown or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host!a} is not an address of this machine ({error}).") from None
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # a port that was just given up may be used again
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {port} of {host} is in use; choose another with --port, or --port 0 for any free one."
            ) from None
        raise InputError(f"cannot listen at {host} port {port}: {error.strerror or error}.") from None
    return sock


def make_server(service: Any, settings: Settings, on_ready: Callable[[], None]) -> Any:
    """A uvicorn server of a `Service`, with `stop_soon()`; it ends well when it is told to by a signal.

    Args:
      on_ready: called in the loop of the server when requests are answered, after the warm-up.
    """
    import uvicorn

    from jaxrl_llm.serve.app import build_app
    from jaxrl_llm.serve.worker import EngineError

    service.warming = settings.warm_up

    async def become_ready() -> None:
        if settings.warm_up:
            try:
                await service.warm_up()
            except EngineError:  # whoever made the worker stops the server
                return
        if not service.stopping:
            on_ready()

    class Server(uvicorn.Server):
        ready: asyncio.Task[None] | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)

            def ended(task: asyncio.Task[None]) -> None:
                if not task.cancelled() and task.exception() is not None:
                    self.stop_soon()  # `shutdown` raises it

            self.ready = asyncio.create_task(become_ready())
            self.ready.add_done_callback(ended)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn raises the signal again at the end, and the process would end by it.
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            numbers = (signal.SIGINT, signal.SIGTERM)
            before = {number: signal.signal(number, self.handle_exit) for number in numbers}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, number: int, frame: Any) -> None:
            self.force_exit = self.should_exit  # the second time: at once
            self.stop_soon()

        def stop_soon(self) -> None:
            """No new request; those that run may finish within the grace period. From any thread."""
            service.stopping = self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            async def abort() -> None:
                if not service.worker.view.paused:  # paused rows would never finish
                    await asyncio.sleep(settings.grace)
                await service.end_all()

            task = asyncio.create_task(abort())
            if self.ready is not None:
                self.ready.cancel()
            try:
                await super().shutdown(sockets=sockets)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if self.ready is not None and self.ready.done() and not self.ready.cancelled():
                self.ready.result()

    return Server(
        uvicorn.Config(
            build_app(service),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(settings.grace) + 10,
        )
    )
