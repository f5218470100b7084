"""`jaxrl plan --search`: which mesh, how many rows at a time, how many pages.

A formula ranks all that is possible: how long the products take, what has to be gathered and summed over the mesh,
and what has to be in memory. The best of those that should fit are compiled, and the executables decide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.parallel.mesh import AXES, BATCH_AXES
from jaxrl_llm.parallel.rules import DEFAULT_RULES
from jaxrl_llm.planning.chips import Topology, topology_of
from jaxrl_llm.planning.known import shape_of
from jaxrl_llm.planning.plan import Plan, make_plan
from jaxrl_llm.planning.programs import Workload, forward_flops, workload_of
from jaxrl_llm.planning.traffic import least_traffic
from jaxrl_llm.sampler.paged_cache import pages_for

__all__ = ["Candidate", "Found", "candidates", "search"]

_MOST_COMPILED = 3
_LEAST_SHARD = 2048  # tokens of a row that are worth a device of their own
_HEADROOM = 0.92  # of the HBM; the rest is for what a formula does not see


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train, with what a formula says of an update."""

    sizes: dict[str, int]  # of the mesh
    micro_rows: int
    seconds: float
    sent: float  # bytes that a chip sends
    bytes: float  # of HBM on a chip

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings that choose it."""
        mesh = tuple(f"mesh.{axis}={size}" for axis, size in self.sizes.items())
        return (*mesh, f"learner.micro_batch_rows={self.micro_rows}")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found."""

    considered: int
    ranked: tuple[Candidate, ...]  # that should fit, best first
    tried: tuple[tuple[Candidate, Plan], ...]  # compiled: the update only
    best: Candidate | None  # None: nothing fits
    pages: int  # of the K/V cache, as many as are of use and fit beside it
    plan: Plan | None  # of the best, with the programs of the sampler

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings that are proposed."""
        return () if self.best is None else (*self.best.overrides, f"sampler.pages={self.pages}")

    def as_data(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "considered": self.considered,
            "should_fit": len(self.ranked),
            "proposed": list(self.overrides),
            "tried": [{**dataclasses.asdict(c), "fits": p.fits, "plan": p.as_data()} for c, p in self.tried],
            "plan": None if self.plan is None else self.plan.as_data(),
        }


def candidates(model: ModelConfig, work: Workload, topology: Topology) -> Iterator[Candidate]:
    """Every mesh that divides the model, with every number of rows at a time that divides the batch."""
    chips = len(topology.devices)
    for sizes in _meshes(chips, work.row_tokens):
        if sizes["data"] % topology.slices == 0 and _divides(model, sizes):
            shards = math.prod(sizes[axis] for axis in BATCH_AXES)
            rows = shards
            while rows <= max(shards, work.update_rows):
                if -(-work.update_rows // rows) * rows <= 2 * work.update_rows:
                    yield _estimate(model, work, topology, sizes, rows)
                rows *= 2


def _meshes(chips: int, row_tokens: int) -> Iterator[dict[str, int]]:
    for data in _divisors(chips):
        for fsdp in _divisors(chips // data):
            for expert in _divisors(chips // data // fsdp):
                for context in _divisors(chips // data // fsdp // expert):
                    if context > 1 and (row_tokens % context or row_tokens < context * _LEAST_SHARD):
                        continue
                    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "context": context}
                    rest = chips // math.prod(sizes.values())
                    yield {axis: sizes.get(axis, rest) for axis in AXES}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _divides(model: ModelConfig, sizes: dict[str, int]) -> bool:
    """Whether every parameter divides into its shards, and no head is cut."""
    import jax

    if model.num_kv_heads % sizes["tensor"] or (sizes["expert"] > 1 and not model.num_experts):
        return False
    specs = jax.tree.leaves(parameter_specs(model), is_leaf=lambda x: isinstance(x, ParamSpec))
    for spec in specs:
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            rule = None if axis is None else DEFAULT_RULES[axis]
            names = (rule,) if isinstance(rule, str) else tuple(rule or ())
            if size % math.prod(sizes.get(name, 1) for name in names):
                return False
    return True


def _estimate(
    model: ModelConfig, work: Workload, topology: Topology, sizes: dict[str, int], rows: int
) -> Candidate:
    chip, chips = topology.chip, len(topology.devices)
    fsdp, context, tensor = (sizes[axis] for axis in ("fsdp", "context", "tensor"))
    shards = fsdp * context  # of the parameters
    mine = rows // math.prod(sizes[axis] for axis in BATCH_AXES)  # rows of a chip at a time
    turns = -(-work.update_rows // rows)
    T, D, L = work.row_tokens, model.hidden_size, model.num_layers
    experts = L * model.mlp_parameters if model.num_experts else 0
    F = model.experts_per_token * model.expert_size if model.num_experts else model.intermediate_size
    weights = (model.num_parameters - experts + experts / sizes["expert"]) / tensor
    sent = least_traffic(model, sizes, rows=work.update_rows, tokens=T, micro_rows=rows)
    dcn = sent.pop("data") if topology.slices > 1 else 0.0
    ici = sum(sent.values())
    # Layers are computed twice; of a row that is split the device with its end sees nearly all of it.
    products = 4 * forward_flops(model, turns * rows * T, T * (1 - 1 / (2 * context))) / chips
    seconds = max(products / chip.flops, ici / chip.ici_speed, dcn / chip.dcn_speed)
    state = 16 * weights / shards  # masters, two moments, gradients
    here = mine * T / context
    keys = mine * T * model.num_kv_heads / tensor * model.head_dim * 2 * 2
    layer = here * (8 * F / tensor + 8 * D) + 2 * keys  # scores stay within the kernels of attention
    head = 12 * D * model.vocab_size / tensor
    held = state + 2 * here * D * L + max(layer, head) + head / 3
    return Candidate(sizes, rows, seconds, ici + dcn, held)


def search(
    config: Config, topology: str, slices: int = 1, *, progress: Callable[[str], None] = lambda _: None
) -> Found:
    """Proposes a mesh, rows at a time and pages for a config on a topology; its own mesh is not read.

    Raises:
      InputError: see `make_plan`; or nothing divides the model over so many chips.
    """
    if config.mesh.sampler:
        raise InputError(
            "plan: --search chooses the mesh of all chips; leave mesh.sampler at 0 (--set mesh.sampler=0)."
        )
    model = shape_of(config.model.source, config.model.dtype)
    found, work = topology_of(topology, slices), workload_of(config)
    everything = list(candidates(model, work, found))
    if not everything:
        raise InputError(
            f"plan: {len(found.devices)} chips do not divide {config.model.source}: its sizes and {work.update_rows} rows of "
            "an update allow no mesh. Choose another topology."
        )
    room = _HEADROOM * found.chip.hbm_bytes
    # Equal seconds: what sends less leaves more room for what the formula does not see.
    ranked = sorted((c for c in everything if c.bytes <= room), key=lambda c: (c.seconds, c.sent, c.bytes))
    progress(f"{len(everything)} ways to split the work, of which {len(ranked)} should fit")
    tried: list[tuple[Candidate, Plan]] = []
    for candidate in ranked[:_MOST_COMPILED]:
        progress(f"compiling the update with {' '.join(candidate.overrides)}")
        plan = make_plan(_with(config, candidate), topology, slices, only=("update",))
        tried.append((candidate, plan))
    good = [(c, p) for c, p in tried if p.fits]
    if not good:
        return Found(len(everything), tuple(ranked), tuple(tried), None, 0, None)
    best, plan = min(good, key=lambda pair: pair[1].step_seconds)
    pages = _pages(config, model, plan, work)
    chosen = _with(config, best)
    chosen = dataclasses.replace(chosen, sampler=dataclasses.replace(chosen.sampler, pages=pages))
    whole = make_plan(chosen, topology, slices, progress=progress)
    return Found(len(everything), tuple(ranked), tuple(tried), best, pages, whole)


def _with(config: Config, candidate: Candidate) -> Config:
    learner = dataclasses.replace(config.learner, micro_batch_rows=candidate.micro_rows)
    mesh = dataclasses.replace(config.mesh, **candidate.sizes)
    return dataclasses.replace(config, mesh=mesh, learner=learner)


def _pages(config: Config, model: ModelConfig, plan: Plan, work: Workload) -> int:
    """As many pages as every slot needs at the whole context, or as fit beside what waits for the update."""
    head = model.head_dim * 2 if config.sampler.kv == "compute" else model.head_dim + 4
    split = plan.mesh["tensor"] if model.num_kv_heads % plan.mesh["tensor"] == 0 else 1
    page = 2 * model.num_layers * model.num_kv_heads * head * work.page_size / split
    update = plan.phases[0].memory
    waits = sum(
        update.get(role, 0) for role in ("master weights", "optimiser", "reference", "critic", "teacher")
    )
    experts = model.num_layers * model.mlp_parameters if model.num_experts else 0
    parameters = model.num_parameters - experts + experts / plan.mesh["expert"]
    copy = 2 * parameters / (plan.mesh["fsdp"] * plan.mesh["context"] * plan.mesh["tensor"])
    free = _HEADROOM * plan.chip.hbm_bytes - waits - copy
    own = pages_for(work.context, work.page_size)
    wanted = 1 + own * min(work.slots, work.samples) + 2 * own
    return max(1 + own, min(wanted, int(free // page)))
