"""`jaxrl plan`: every program of a run compiled for a TPU topology that is not there, and what that says.

Libtpu compiles without a TPU, so memory, collectives and kernels are those of the executable that a pod would run.
Seconds are not measured: each is the largest of what compute, HBM and the network need at their published peaks
(`chips.CHIPS`), so a run is slower than its plan.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.assembly import check_experts, for_objective
from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.objectives import build_objective, check_teacher
from jaxrl_llm.parallel.mesh import AXES, learner_and_sampler, make_mesh
from jaxrl_llm.planning.chips import Chip, Topology, peak_time, topology_of
from jaxrl_llm.planning.executables import Executable, compiled
from jaxrl_llm.planning.hlo import Cost, cost
from jaxrl_llm.planning.known import shape_of
from jaxrl_llm.planning.programs import (
    Program,
    Workload,
    learner_programs,
    sampler_programs,
    workload_of,
)
from jaxrl_llm.transforms import takes_pairs

__all__ = ["PROGRAMS", "Compiled", "Plan", "make_plan"]

PROGRAMS = ("update", "score", "teacher", "values", "critic", "prefill", "decode", "transfer")
Progress = Callable[[str], None]
_AT_A_TIME = 2  # programs; each takes 1 to 2 GB of memory while it is compiled


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the executable of a program says."""

    program: Program
    chips: int
    arguments: int  # bytes on one chip
    temporaries: int
    results: int  # that do not take the place of arguments
    cost: Cost
    hbm_bytes: float  # read and written, kernels included
    seconds: dict[str, float]  # by resource, of one run
    compile_seconds: float

    @property
    def time(self) -> float:
        """Seconds of one run, when what is busy longest hides the rest."""
        return max(self.seconds.values())

    @property
    def limited_by(self) -> str:
        """The resource that is busy longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def memory(self) -> dict[str, int]:
        """Bytes on one chip by role."""
        gradients = min(self.program.gradients, self.temporaries)
        roles = dict(self.program.holds)
        rest = self.arguments - sum(roles.values())
        roles |= {
            "gradients": gradients,
            "temporaries": self.temporaries - gradients,
            "results": self.results,
            "other arguments": max(rest, 0),
        }
        return {role: size for role, size in roles.items() if size > 0}


@dataclasses.dataclass(frozen=True)
class Phase:
    """A time of a train step, with all that is in the memory of a chip then."""

    program: str
    memory: Mapping[str, int]  # bytes by role

    @property
    def bytes(self) -> int:
        """Together."""
        return sum(self.memory.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jaxrl plan` found."""

    model: str
    shape: ModelConfig
    topology: Topology
    mesh: dict[str, int]
    samplers: int  # chips that only sample, 0 = the learner's sample
    work: Workload
    compiled: tuple[Compiled, ...]
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]

    @property
    def chip(self) -> Chip:
        """The kind of chip."""
        return self.topology.chip

    @property
    def largest(self) -> Phase:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def spare_bytes(self) -> int:
        """HBM of a chip that is never used; negative: so much is missing."""
        return self.chip.hbm_bytes - self.largest.bytes

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.spare_bytes >= 0

    def seconds(self, part: Compiled) -> float:
        """Of all runs of a program in a train step."""
        return part.time * part.program.runs

    @property
    def step_seconds(self) -> float:
        """Of a train step. Chips that only sample work beside the others; those that do both take turns."""
        sampling = sum(self.seconds(c) for c in self.compiled if c.program.name in ("prefill", "decode"))
        learning = sum(self.seconds(c) for c in self.compiled) - sampling
        return max(sampling, learning) if self.samplers else sampling + learning

    def utilisation(self, part: Compiled) -> float:
        """Useful products / what the chips could have done meanwhile (MFU)."""
        possible = part.time * part.chips * self.chip.flops
        return part.program.useful_flops / possible if possible else 0.0

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Tokens trained, prompts included, of a whole train step."""
        tokens = self.work.samples * self.work.context
        return tokens / self.step_seconds / len(self.topology.devices) if self.step_seconds else 0.0

    def as_data(self) -> dict[str, Any]:
        """One JSON object; bytes, seconds and FLOPs of one chip unless a key says otherwise."""
        return {
            "model": self.model,
            "parameters": self.shape.num_parameters,
            "topology": self.topology.name,
            "slices": self.topology.slices,
            "chips": len(self.topology.devices),
            "mesh": self.mesh,
            "sampler_chips": self.samplers,
            "hbm_bytes": self.chip.hbm_bytes,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "largest_phase": self.largest.program,
            "work": {**dataclasses.asdict(self.work), "new": self.work.new},
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_chip": self.tokens_per_second_per_chip,
            "phases": {
                phase.program: {"bytes": phase.bytes, "by_role": dict(phase.memory)} for phase in self.phases
            },
            "programs": {c.program.name: self._program(c) for c in self.compiled},
            "notes": list(self.notes),
        }

    def _program(self, c: Compiled) -> dict[str, Any]:
        return {
            "runs_per_step": c.program.runs,
            "memory": c.memory(),
            "temporary_bytes": c.temporaries,
            "flops": c.cost.flops,
            "useful_flops_all_chips": c.program.useful_flops,
            "hbm_traffic_bytes": c.hbm_bytes,
            "collectives": [{**dataclasses.asdict(x), "axes": list(x.axes)} for x in c.cost.collectives],
            "ici_bytes": c.cost.network_bytes("ICI"),
            "dcn_bytes": c.cost.network_bytes("DCN"),
            "least_network_bytes": c.program.least_sent,
            "seconds": c.time,
            "seconds_by_resource": c.seconds,
            "limited_by": c.limited_by,
            "mfu": self.utilisation(c),
            "largest_arrays": [
                {"dtype": a.dtype, "shape": list(a.shape), "bytes": a.bytes, "made_by": where}
                for a, where in c.cost.largest
            ],
            "loops_that_the_data_end": list(c.cost.dynamic_loops),
            "kernels": list(c.cost.kernels),
            "compile_seconds": c.compile_seconds,
        }


def make_plan(
    config: Config,
    topology: str,
    slices: int = 1,
    *,
    only: tuple[str, ...] = (),
    progress: Progress = lambda _: None,
) -> Plan:
    """Compiles the programs of a config for a topology.

    Args:
      config: as loaded; its mesh must take all chips.
      topology: KIND:SHAPE of one slice, for example "v5p:4x4x4".
      slices: of that topology, with the slower network between them.
      only: names of `PROGRAMS`; empty: all that the config has.
      progress: is told what is being compiled.

    Raises:
      InputError: libtpu is missing, an unknown topology or model, or what the run itself would refuse.
    """
    unknown = [name for name in only if name not in PROGRAMS]
    if unknown:
        raise InputError(f"plan: there is no program {unknown[0]!r}; there are: {', '.join(PROGRAMS)}.")
    objective = build_objective(config.objective)
    if takes_pairs(objective):
        raise InputError("plan: preference losses are trained by `jaxrl sft`, which is not planned.")
    check_teacher(objective, config.teacher.given)
    model = _model(config.model.source, config.model.dtype, config.model.head_dtype)
    if config.model.max_context > model.max_positions:
        raise InputError(
            f"model.max_context: {config.model.max_context} tokens, but {config.model.source} has positions for "
            f"{model.max_positions}; use at most that."
        )
    check_experts(config, model)
    model = for_objective(config, model)
    teacher = None
    if config.teacher.snapshot is not None:
        raise InputError("plan: a teacher of a snapshot is not planned; give its model as teacher.source.")
    if config.teacher.source is not None:
        teacher = _model(config.teacher.source, config.teacher.dtype or config.model.dtype, None)
    found = topology_of(topology, slices)
    mesh, apart = meshes(config, found)
    work = workload_of(config)
    learned, learner_keeps = learner_programs(config, objective, model, mesh, work, teacher)
    samplers = 0 if apart is None else len(found.devices) - mesh.devices.size
    sampled, sampler_keeps = sampler_programs(
        config, objective, model, mesh if apart is None else apart, work, mesh, replicas=max(1, samplers)
    )
    names = [program.name for program in (*learned, *sampled)]
    lacking = [name for name in only if name not in names]
    if lacking:
        raise InputError(
            f"--programs: this config runs no program {lacking[0]}; it runs {', '.join(dict.fromkeys(names))}. Name some of these."
        )
    programs = [p for p in (*learned, *sampled) if not only or p.name in only]
    parts = compile_programs(programs, found, progress)
    phases = [
        _phase(c, learner_keeps, sampler_keeps, apart is not None, config.schedule.max_age > 0) for c in parts
    ]
    return Plan(
        config.model.source,
        model,
        found,
        dict(mesh.shape),
        samplers,
        work,
        tuple(parts),
        tuple(phases),
        _notes(parts, found) + _copies(model, samplers),
    )


def _model(source: str, dtype: str, head_dtype: str | None) -> ModelConfig:
    return dataclasses.replace(shape_of(source, dtype), head_dtype=head_dtype)


def meshes(config: Config, topology: Topology) -> tuple[Mesh, Mesh | None]:
    """(mesh of the learner, mesh of one chip that only samples or None)."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    sampler, chips = config.mesh.sampler, len(topology.devices)
    if not sampler:
        return _mesh(topology, sizes, topology.devices), None
    left = chips - sampler
    if left < 1:
        raise InputError(
            f"mesh.sampler: {sampler} chips that only sample leave none of the {chips} of {topology.name} for the learner."
        )
    mesh = _mesh(topology, sizes, learner_and_sampler(topology.devices, left, sampler)[0])
    # Libtpu compiles for slices whole or in part, but for none without a device: the same chips of fewer slices.
    slices = math.ceil(left * topology.slices / chips)
    if slices < topology.slices:
        part = topology_of(topology.name, slices)
        mesh = make_mesh(**sizes, devices=part.devices[:left])
    single = topology_of(topology.name)
    return mesh, make_mesh(devices=single.devices[:1])


def _mesh(topology: Topology, sizes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    try:
        return make_mesh(**sizes, devices=devices)
    except ValueError as error:
        of = f" x {topology.slices} slices" if topology.slices > 1 else ""
        beside = "" if len(devices) == len(topology.devices) else ", beside those of mesh.sampler"
        raise InputError(f"{error} They are the chips of {topology.name}{of}{beside}.") from None


def compile_programs(
    programs: Sequence[Program], topology: Topology, progress: Progress = lambda _: None
) -> list[Compiled]:
    """Compiles programs, several at a time, and counts them.

    Raises:
      RuntimeError: one does not compile, and not because it is larger than a chip.
    """
    found = []
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        # Tracing holds the interpreter and is quick; the compiler does not, and works on about one core a program.
        under_way = []
        for program in programs:
            progress(f"compiling {program.name}")
            under_way.append(pool.submit(compiled, program.lower(), program.mesh))
        for number, (program, executable) in enumerate(zip(programs, under_way, strict=True)):
            found.append(_counted(program, topology, executable))
            progress(f"compiled {program.name} ({number + 1} of {len(programs)})")
    return found


def _counted(
    program: Program, topology: Topology, under_way: concurrent.futures.Future[Executable]
) -> Compiled:
    try:
        executable = under_way.result()
    except jax.errors.JaxRuntimeError as error:
        return _too_large(program, str(error))
    counted = cost(
        executable.text,
        dict(program.mesh.shape),
        [getattr(device, "slice_index", 0) or 0 for device in program.mesh.devices.flat],
        program.dynamic_trips,
    )
    # Some kernels do not say what they cost; all products are at least the useful ones.
    hbm = counted.hbm_bytes + (program.kernel_bytes if counted.untold else 0.0)
    useful = program.useful_flops / program.mesh.devices.size
    flops = max(counted.flops, useful) if counted.untold else counted.flops
    return Compiled(
        program,
        program.mesh.devices.size,
        executable.arguments,
        executable.temporaries,
        max(0, executable.results - executable.replaced),
        counted,
        hbm,
        peak_time(topology.chip, flops, hbm, counted.network_bytes("ICI"), counted.network_bytes("DCN")),
        executable.seconds,
    )


def _too_large(program: Program, error: str) -> Compiled:
    """What the compiler says of a program that alone takes more than a chip has; it counts nothing then.

    Raises:
      RuntimeError: it failed for another reason.
    """
    used = re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", error)
    if "RESOURCE_EXHAUSTED" not in error or used is None:
        raise RuntimeError(
            f"plan: {program.name} does not compile for this topology: {error[:2000]}"
        ) from None
    size = int(float(used.group(1)) * {"K": 2**10, "M": 2**20, "G": 2**30}[used.group(2)])
    arguments = sum(program.holds.values())
    return Compiled(
        program,
        program.mesh.devices.size,
        arguments,
        max(0, size - arguments),
        0,
        Cost(0.0, 0.0, (), (), (), (), ()),
        0.0,
        dict.fromkeys(("compute", "hbm", "ici", "dcn"), 0.0),
        0.0,
    )


def _phase(
    part: Compiled,
    learner: Mapping[str, int],
    sampler: Mapping[str, int],
    apart: bool,
    stream: bool,
) -> Phase:
    """What is in memory while a program runs: its own, and what waits for the next one.

    A synchronous run has pages and the sampler's weights only while it samples; with a stream they stay.
    """
    memory = part.memory()
    samples = part.program.name in ("prefill", "decode", "transfer")
    if not (apart and part.program.name in ("prefill", "decode")):
        memory = {**learner, **memory}
    if stream and not apart and not samples:
        memory = {**memory, **sampler}
    return Phase(part.program.name, memory)


def _copies(model: ModelConfig, samplers: int) -> tuple[str, ...]:
    """What goes to chips of their own, which no compiled program shows."""
    if not samplers:
        return ()
    size = model.num_parameters * (2 if model.dtype == "bfloat16" else 4)
    return (
        f"every train step sends the weights, {size / 1e9:.1f} GB, to each of {samplers} chips that sample; that is in none "
        "of these seconds.",
    )


def _notes(compiled: list[Compiled], topology: Topology) -> tuple[str, ...]:
    notes = []
    for c in compiled:
        if not c.time:
            notes.append(
                f"{c.program.name} alone is larger than a chip, so the compiler gave up and counts nothing."
            )
            continue
        if c.program.donated and c.results > 0.1 * c.arguments:
            notes.append(
                f"{c.program.name}: {c.results / 2**30:.2f} GiB of its results do not take the place of its arguments."
            )
        network = c.seconds["ici"] + c.seconds["dcn"]
        if network > max(c.seconds["compute"], c.seconds["hbm"]):
            kind = max(c.cost.collectives, key=lambda x: x.bytes)
            notes.append(
                f"{c.program.name} waits for the network: {kind.kind} along {' and '.join(kind.axes) or 'no axis'} moves "
                f"{kind.bytes / 1e9:.2f} GB a chip."
            )
        if c.program.least_sent:
            sent = c.cost.network_bytes("ICI") + c.cost.network_bytes("DCN")
            notes.append(
                f"{c.program.name} sends {sent / c.program.least_sent:.2f} times the bytes that its mesh needs at least."
            )
    if topology.slices > 1 and not any(c.cost.network_bytes("DCN") for c in compiled):
        notes.append("nothing crosses between the slices.")
    return tuple(notes)
