"""How a training run gets its fleet: what is asked for, what is refused, what is written down."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.dispatcher import FAULTS, Event, Fleet, Patience
from jaxrl_llm.fleet.in_process import InProcess
from jaxrl_llm.fleet.messages import Transport
from jaxrl_llm.fleet.ray_actors import RayActors, check_address, check_ray, parse_resources
from jaxrl_llm.fleet.stream import FleetStream
from jaxrl_llm.models.load import config_of
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.rollout.stream import Judge, Schedule
from jaxrl_llm.sampler import Sampler, SamplingParams

__all__ = ["EVENTS", "Workers", "check_fleet", "fleet_stream", "open_transport"]

EVENTS = "fleet.jsonl"  # in the run folder: what happened to the workers, a line each


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers that a run wants."""

    number: int
    resources: str = "CPU=1"  # of each, by Ray's names
    patience: Patience = dataclasses.field(default_factory=Patience)
    transport: Callable[[], Transport] | None = None  # makes what carries the messages; None: Ray

    @classmethod
    def in_process(cls) -> Workers:
        """One worker in this process."""
        return cls(1, transport=InProcess)


def check_fleet(config: Config, workers: Workers) -> None:
    """Refuses what a fleet cannot do, before anything is loaded.

    Raises:
      InputError: says which setting.
    """
    if workers.number < 1:
        raise InputError(
            f"--workers must be at least 1, got {workers.number}; leave it out to sample in this process."
        )
    s = config.schedule
    refused = [
        (
            bool(s.max_age) and s.swap != "drain",
            f"schedule.swap is {s.swap}, and workers finish every sample with the weights that began it",
            "schedule.swap=drain",
        ),
        (
            bool(config.mesh.sampler),
            f"mesh.sampler is {config.mesh.sampler}, but workers sample on devices of their own already",
            "mesh.sampler=0",
        ),
        (
            bool(s.over_generation),
            f"schedule.over_generation is {s.over_generation}, but which samples of a prompt end first depends on the worker",
            "schedule.over_generation=0",
        ),
    ]
    if found := [(why, remedy) for wrong, why, remedy in refused if wrong]:
        raise InputError(
            f"--workers: {'; '.join(why for why, _ in found)}. Set {' and '.join(remedy for _, remedy in found)}."
        )
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise InputError(f"--workers needs a learner of one process; this one has {jax.process_count()}.")
    if workers.transport is None:
        parse_resources(workers.resources)
        if not check_ray().is_initialized():
            check_address(os.environ.get("RAY_ADDRESS"))


def open_transport(config: Config, workers: Workers) -> Transport:
    """What will carry the messages: for Ray, its cluster. Before the model is loaded, see `RayActors`.

    Raises:
      InputError: no such model.
    """
    if workers.transport is not None:
        return workers.transport()
    model = config_of(config.model.source, config.model.dtype)
    specs = jax.tree.leaves(parameter_specs(model), is_leaf=lambda x: isinstance(x, ParamSpec))
    size = 4 * sum(math.prod(spec.shape) for spec in specs)
    return RayActors(workers.number, parse_resources(workers.resources), (2 + config.schedule.max_age) * size)


def fleet_stream(
    config: Config,
    workers: Workers,
    transport: Transport,
    folder: pathlib.Path,
    sampler: Sampler,
    sampling: SamplingParams,
    source: Any,
    judge: Judge,
    warnings: list[str],
) -> FleetStream:
    """The stream of a run with a fleet, whose workers begin to start.

    Args:
      transport: of `open_transport`.
      folder: of the run; gets fleet.jsonl.
      sampler, sampling: of the workers.
      source, judge: see `FleetStream`.
      warnings: gets a line for everything that went wrong.
    """
    s, r = config.schedule, config.rollout
    schedule = Schedule(
        groups=r.prompts,
        samples=r.group_size,
        max_age=s.max_age,
        sync_every=s.sync_every,
        swap="drain",
        max_drops=r.refill_rounds * r.prompts,
    )

    def report(event: Event) -> None:
        line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")}
        with open(folder / EVENTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | dataclasses.asdict(event)) + "\n")
        if event.kind in FAULTS:
            again = f" {event.reissued} prompts go to others." if event.reissued else ""
            warnings.append(f"Fleet: {event.kind.replace('_', ' ')}: {event.message.rstrip('.')}.{again}")

    transport.employ(sampler, sampling, -(-schedule.outstanding // workers.number) * sampling.per_prompt)
    fleet = Fleet(
        transport,
        workers.number,
        samples=sampling.per_prompt,
        outstanding=schedule.outstanding,
        patience=workers.patience,
        report=report,
    )
    return FleetStream(fleet, source, judge, schedule)
