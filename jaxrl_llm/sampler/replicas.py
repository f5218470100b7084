"""Several engines behind one interface, each with a copy of the weights: replicas on the data axis.

Requests are routed where pages help them: the turns of a conversation to the replica that served it, prompts that
begin alike to the same one, the rest to the least loaded. Decisions depend on the requests and on what has ended,
never on time, and since a row's tokens depend on no replica, routing changes nothing that is sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sampler.base import Completion, SamplerStats, SamplingParams, as_prompts
from jaxrl_llm.sampler.engine import Engine, Pages
from jaxrl_llm.sampler.prefix_cache import page_names
from jaxrl_llm.sampler.requests import Carried, Event
from jaxrl_llm.types import Prompt

__all__ = ["Replicas"]

_REMEMBERED = 65_536  # conversations and beginnings of prompts whose replica is known


class Replicas:
    """Looks like one `Engine`; ids are those of the whole."""

    def __init__(
        self,
        config: ModelConfig,
        devices: Sequence[jax.Device],
        *,
        slots: int = 64,
        page_size: int = 64,
        imbalance: int | None = None,
        **options: Any,
    ):
        """
        Args:
          devices: one replica each; `parallel.mesh.data_devices(mesh)` gives those of a mesh.
          slots: of each replica.
          imbalance: a prompt goes to the least loaded replica all the same when the one that knows it has so many
            unfinished rows more. None: `slots`.
          options: of each `Engine`.
        """
        if not devices:
            raise InputError("sampler: replicas need at least one device.")
        self.config = config
        self._page_size = page_size
        self._imbalance = slots if imbalance is None else imbalance
        self._engines = [
            Engine(config, slots=slots, page_size=page_size, device=device, **options) for device in devices
        ]
        self._load = [0] * len(devices)  # unfinished rows
        self._ids: dict[int, tuple[int, int]] = {}  # whole -> (replica, its id)
        self._wholes: list[dict[int, int]] = [{} for _ in devices]
        self._known: OrderedDict[Any, int] = OrderedDict()  # conversation or name of a page -> replica
        self._next_id = 0

    # ------------------------------------------------------------------------- what an engine has

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The replicas, in the order of the devices."""
        return tuple(self._engines)

    @property
    def version(self) -> int:
        """Of the weights that are served."""
        return self._engines[0].version

    @property
    def fingerprint(self) -> str | None:
        """Of the weights that are served."""
        return self._engines[0].fingerprint

    @property
    def max_context(self) -> int:
        """Tokens of prompt and completion."""
        return self._engines[0].max_context

    @property
    def busy(self) -> bool:
        """True while a request is unfinished."""
        return any(engine.busy for engine in self._engines)

    @property
    def queued(self) -> int:
        """Rows that wait for a slot or for pages."""
        return sum(engine.queued for engine in self._engines)

    @property
    def running(self) -> int:
        """Rows in slots."""
        return sum(engine.running for engine in self._engines)

    @property
    def pages(self) -> int:
        """Usable pages of all replicas."""
        return sum(engine.pages for engine in self._engines)

    @property
    def free_pages(self) -> int:
        """See `Engine.free_pages`."""
        return sum(engine.free_pages for engine in self._engines)

    @property
    def lost_pages(self) -> int:
        """See `Engine.lost_pages`."""
        return sum(engine.lost_pages for engine in self._engines)

    def settle_reading(self) -> None:
        """See `Engine.settle_reading`."""
        for engine in self._engines:
            engine.settle_reading()

    @property
    def filled_share(self) -> float:
        """The mean of `Engine.filled_share` over replicas that have rows."""
        shares = [engine.filled_share for engine in self._engines if engine.running]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def stats(self) -> SamplerStats:
        """Sums over the replicas; seconds are those of the slowest."""
        total = SamplerStats()
        for engine in self._engines:
            for name, value in vars(engine.stats).items():
                before = getattr(total, name)
                setattr(total, name, max(before, value) if name.endswith("seconds") else before + value)
        return total

    def swap(
        self,
        params: Any,
        *,
        version: int = 0,
        pages: Pages = "keep",
        expect: str | None = None,
        own: bool = False,
    ) -> str:
        """`Engine.swap` of every replica. All of them serve the new weights, or, when anything is raised, none.

        Each has copies on its device, so that they are its own in any case.
        """
        weights, print_ = self._engines[0].accept(params, version=version, pages=pages, expect=expect)
        staged = [engine.stage(weights, version=version, fingerprint=print_) for engine in self._engines]
        jax.block_until_ready(staged)  # a device that lacks the memory says so before any of them has changed
        for engine, new in zip(self._engines, staged, strict=True):
            engine.commit(new, pages=pages)
        return print_

    def submit(
        self, prompt: Prompt | Any, sampling: SamplingParams, *, priority: int = 0, session: str | None = None
    ) -> list[int]:
        """`Engine.submit` to one of the replicas; all completions of a prompt run there.

        Args:
          session: name of a conversation; its turns go to the same replica.
        """
        (prompt,) = as_prompts([prompt])
        names = page_names(np.asarray(prompt.tokens), self._page_size)
        replica = self._route(names, session)
        ids = self._engines[replica].submit(prompt, sampling, priority=priority)
        if session is not None:
            self._remember([("session", session)], replica)
        self._remember(names, replica)
        return self._registered(replica, ids)

    def unfinished(self) -> list[tuple[int, Carried]]:
        """`Engine.unfinished` of every replica, one replica after the other."""
        return [
            (self._wholes[i][id], carried)
            for i, engine in enumerate(self._engines)
            for id, carried in engine.unfinished()
        ]

    def begun_at(self) -> dict[int, int]:
        """`Engine.begun_at` of all replicas."""
        return {
            self._wholes[i][id]: version
            for i, engine in enumerate(self._engines)
            for id, version in engine.begun_at().items()
        }

    def resume(self, carried: Carried, sampling: SamplingParams) -> int:
        """`Engine.resume` in one of the replicas, chosen as for a new prompt: the same state gives the same places."""
        names = page_names(np.asarray(carried.so_far.prompt.tokens), self._page_size)
        replica = self._route(names, None)
        id = self._engines[replica].resume(carried, sampling)
        self._remember(names, replica)
        return self._registered(replica, [id])[0]

    def check(self, prompts: list[Prompt], sampling: SamplingParams) -> None:
        """`Engine.check`; the replicas are alike."""
        self._engines[0].check(prompts, sampling)

    def cancel(self, id: int) -> Completion | None:
        """`Engine.cancel`."""
        if id not in self._ids:
            return None
        replica, inner = self._ids[id]
        completion = self._engines[replica].cancel(inner)
        self._forget(replica, inner)
        return completion

    def step(self) -> list[Event]:
        """`Engine.step` of every replica that has work, all at the same time on their devices."""
        working = [i for i, engine in enumerate(self._engines) if engine.busy]
        for i in working:
            self._engines[i].begin()
        events = []
        for i in working:
            for event in self._engines[i].finish():
                events.append(event._replace(id=self._wholes[i][event.id]))
                if event.completion is not None:
                    self._forget(i, event.id)
        return sorted(events, key=lambda event: event.id)

    def release(self) -> None:
        """`Engine.release`."""
        for engine in self._engines:
            engine.release()

    # ------------------------------------------------------------------------------------- internals

    def _route(self, names: list[bytes], session: str | None) -> int:
        least = min(range(len(self._engines)), key=lambda i: (self._load[i], i))
        wanted = self._known.get(("session", session)) if session is not None else None
        if wanted is None:
            # The replica that has seen most of the prompt.
            wanted = next((self._known[name] for name in reversed(names) if name in self._known), None)
        if wanted is None or self._load[wanted] - self._load[least] > self._imbalance:
            return least
        return wanted

    def _remember(self, names: Sequence[Any], replica: int) -> None:
        for name in names:
            self._known[name] = replica
            self._known.move_to_end(name)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _registered(self, replica: int, ids: Sequence[int]) -> list[int]:
        """Numbers, as a whole, of requests that a replica has taken."""
        wholes = list(range(self._next_id, self._next_id + len(ids)))
        self._next_id += len(ids)
        self._load[replica] += len(ids)
        for whole, id in zip(wholes, ids, strict=True):
            self._ids[whole] = replica, id
            self._wholes[replica][id] = whole
        return wholes

    def _forget(self, replica: int, inner: int) -> None:
        whole = self._wholes[replica].pop(inner)
        del self._ids[whole]
        self._load[replica] -= 1
