"""Whether what a config asks for can fit into the memory of the machine, before anything is compiled.

Every figure is a lower bound of what will be allocated, so that nothing is refused that could run; what is
refused would have ended hours later, or at once, in an allocation error that names no setting.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.rows import HEAD_CHUNK
from jaxrl_llm.models.blockwise import BLOCK, goes_in_blocks
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel.agree import on_first
from jaxrl_llm.sampler.paged_cache import pages_for

__all__ = [
    "Part",
    "available_memory",
    "cache_parts",
    "check_memory",
    "learner_parts",
    "refuse_too_large",
    "sampler_parts",
    "teacher_parts",
]

_ROW_BYTES = 1_000  # of a completion on the host: its trajectory, its texts, the bookkeeping of the sampler
_TOKEN_BYTES = (
    30  # of a token of a batch: ids, positions, segments, mask, log-probs, advantage, weight, versions
)
_PREFILL = (8, 32)  # rows and least tokens of the sampler's prefill program


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that is held in memory."""

    what: str
    bytes: int
    settings: tuple[str, ...]  # what makes it smaller


def _width(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _head_positions(config: Config, positions: int) -> int:
    """Of the positions of a micro-batch, those whose logits are in memory at once, on all devices together."""
    return min(HEAD_CHUNK * config.mesh.learner // config.mesh.tensor, positions)


def _support_bytes(config: Config, model: ModelConfig) -> int:
    """Of the tokens that one was drawn from, which are kept of each sampled token under top-k, top-p or min-p."""
    r = config.rollout
    if not (r.top_k or r.top_p < 1 or r.min_p):
        return 0
    return 4 * min(r.max_support, r.top_k or model.vocab_size, model.vocab_size)


def sampler_parts(config: Config, model: ModelConfig, *, rows: int, max_tokens: int) -> list[Part]:
    """What `rows` completions of up to `max_tokens` tokens need."""
    s = config.sampler
    pages = s.pages
    if pages is None:
        step = max(16, s.slots)
        pages = -(-(1 + min(s.slots, rows) * (pages_for(max_tokens, s.page_size) + 1)) // step) * step
    return [
        *cache_parts(
            model,
            slots=s.slots,
            pages=pages,
            page_size=s.page_size,
            steps_per_dispatch=s.steps_per_dispatch,
            prefill=(_PREFILL[0], max(_PREFILL[1], s.page_size)),
            kv=s.kv,
            step_bytes=_support_bytes(config, model),
            bounded_by="pages" if s.pages else "slots",
            where="sampler.",
        ),
        *_weight_copies(config, model),
        Part("completions", rows * _ROW_BYTES, ("rollout.prompts", "rollout.group_size", "evaluation.items")),
    ]


def cache_parts(
    model: ModelConfig,
    *,
    slots: int,
    pages: int,
    page_size: int,
    steps_per_dispatch: int,
    prefill: tuple[int, int],
    kv: str = "compute",
    step_bytes: int = 0,
    bounded_by: str = "pages",
    where: str = "",
) -> list[Part]:
    """What a sampler holds on the device, whatever it samples.

    Args:
      prefill: rows and tokens of the prefill program.
      kv: precision of the pages.
      step_bytes: what a decode step gives back of a slot beside token and log-prob.
      bounded_by: the setting that says how many pages there are.
      where: what the names of the settings begin with.
    """
    # 8-bit numbers have an f32 scale for each token and head.
    head = model.head_dim * _width(model.dtype) if kv == "compute" else model.head_dim + 4
    token = 2 * model.num_layers * model.num_kv_heads * head
    sequences, tokens = prefill
    # 16 bytes of bookkeeping of a page; logits and what a dispatch gives back of a slot
    return [
        Part(
            "K/V cache",
            pages * (page_size * token + 16),
            (f"{where}{bounded_by}", f"{where}page_size") + ((f"{where}kv",) if kv == "compute" else ()),
        ),
        Part(
            "decoding",
            slots * (4 * model.vocab_size + (9 + step_bytes) * steps_per_dispatch),
            (f"{where}slots", f"{where}steps_per_dispatch"),
        ),
        Part("prefill", 4 * sequences * model.num_heads * tokens**2, (f"{where}page_size",)),
    ]


def teacher_parts(config: Config, teacher: ModelConfig) -> list[Part]:
    """What a frozen teacher needs: its weights, held all the time, and the logits of a chunk while it scores."""
    learner = config.learner
    width = learner.row_tokens or config.row_multiple
    positions = _head_positions(config, learner.micro_batch_rows * width)
    dtype = config.teacher.dtype or config.model.dtype
    return [
        Part("teacher", teacher.num_parameters * _width(dtype), ("teacher.source", "teacher.dtype")),
        Part("logits of the teacher", 4 * positions * teacher.vocab_size, ("teacher.source",)),
    ]


def _weight_copies(config: Config, model: ModelConfig) -> list[Part]:
    """What sampling keeps of the weights beside the f32 master weights."""
    kind, compute = config.sampler.weights, _width(model.dtype)
    matrices = model.num_layers * (
        2 * model.hidden_size * (model.num_heads + model.num_kv_heads) * model.head_dim + model.mlp_parameters
    )
    # f32 weights are not copied, unless they outlive the train step that begins with them
    shared = compute == 4 and config.schedule.sync_every == 1
    width = 1 if kind != "compute" else 0 if shared else compute
    settings = ("sampler.weights", "model.source") if kind == "compute" else ("model.source",)
    return [Part("weights of the sampler", matrices * width, settings)] if width else []


def learner_parts(
    config: Config,
    model: ModelConfig,
    *,
    rows: int,
    settings: tuple[str, ...],
    adam: bool = True,
    sampled: bool = True,
) -> list[Part]:
    """What train steps of `rows` sequences need beside the parameters; `settings` say how many rows there are.

    `sampled` rows come from a rollout, and not from a file.
    """
    learner, size = config.learner, _width(model.dtype)
    R, T = learner.micro_batch_rows, learner.row_tokens or config.row_multiple
    least = -(-rows // learner.row_tokens) if learner.row_tokens else rows  # packed, a row holds several
    width = "learner.row_tokens" if learner.row_tokens else "model.max_context"
    padded = -(-max(least, 1) // R) * R
    # With every layer recomputed, the backward pass holds the input of each layer and the attention of one.
    scores = BLOCK**2 if goes_in_blocks(T) else T**2
    activations = R * T * model.hidden_size * model.num_layers * size + 4 * R * model.num_heads * scores
    logits = 4 * _head_positions(config, R * T) * model.vocab_size
    weights = 4 * model.num_parameters
    support = _support_bytes(config, model) if sampled else 0
    # On the host they take nothing of an accelerator, and as much of a machine without one.
    apart = jax.default_backend() != "cpu"
    moments = 2 * weights if adam and not (apart and "optimizer" in learner.offload) else 0
    lower = ("learner.offload", "model.source") if apart else ("model.source",)
    return [
        Part("gradients", weights, ("model.source",)),
        Part("moments of the optimiser", moments, lower),
        Part(
            "batch",
            padded * T * (_TOKEN_BYTES + support) + rows * _ROW_BYTES,
            (*settings, "learner.micro_batch_rows", width, *(("rollout.max_support",) if support else ())),
        ),
        Part("activations", activations, ("learner.micro_batch_rows", width)),
        Part("logits", logits, ("model.source", "learner.micro_batch_rows")),
    ]


def check_memory(
    config: Config,
    model: ModelConfig,
    *,
    rows: int,
    settings: tuple[str, ...],
    max_tokens: int | None = None,
    evaluated: int = 0,
    adam: bool = True,
    teacher: ModelConfig | None = None,
) -> None:
    """Refuses a run that cannot fit.

    Args:
      rows: sequences of a train step; `settings` say how many.
      max_tokens: of a completion; None: nothing is sampled.
      evaluated: held-out items that are sampled together.
      adam: whether the optimiser keeps moments.
      teacher: a frozen model that is loaded beside this one, and is not yet.

    Raises:
      InputError: what is needed, what is free, and which settings to lower.
    """
    learner = learner_parts(
        config, model, rows=rows, settings=settings, adam=adam, sampled=max_tokens is not None
    )
    taught = [] if teacher is None else teacher_parts(config, teacher)
    phases = [[*learner, *taught]]
    if max_tokens is not None:
        kept = ("moments of the optimiser", "teacher")
        moments = [part for part in (*learner, *taught) if part.what in kept]
        sampled = max(rows, evaluated)
        phases.append([*moments, *sampler_parts(config, model, rows=sampled, max_tokens=max_tokens)])
    refuse_too_large(phases)


def refuse_too_large(phases: Sequence[Sequence[Part]], available: int | None = None) -> None:
    """Raises InputError when one of the phases, which take turns, cannot fit.

    Args:
      available: bytes that are free; default: what this machine says. Where it does not say, nothing is refused.
    """
    # What is free differs a little between processes, and all must refuse, or none.
    free = on_first(available_memory) if available is None else available
    parts = max(phases, key=lambda phase: sum(part.bytes for part in phase))
    needed = sum(part.bytes for part in parts)
    if free is None or needed <= free:
        return
    largest = sorted(parts, key=lambda part: -part.bytes)
    shown = [part for part in largest if part.bytes >= 0.05 * needed]
    listed = "; ".join(f"{p.what} {_bytes(p.bytes)} ({', '.join(p.settings)})" for p in shown)
    raise InputError(
        f"memory: this needs at least {_bytes(needed)}, and {_bytes(free)} are free. It goes to: {listed}. Lower the "
        "settings that are named first."
    )


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} TB" if number >= 10 else f"{number:.1f} TB"


# ------------------------------------------------------------------------------------- the machine


def available_memory() -> int | None:
    """Bytes that are free: of all accelerators of the run, else of the machine and of the container that this runs in.

    Those of other processes are taken to be as free as the local ones.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [int(s.get("bytes_limit", 0)) - int(s.get("bytes_in_use", 0)) for s in stats]
    if any("bytes_limit" in s for s in stats):
        return sum(limits) * jax.process_count()
    known = [free for free in (_machine(), _container()) if free is not None]
    return min(known, default=None)


def _machine() -> int | None:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, KeyError, IndexError):  # not Linux: the memory that is built in
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None


def _container(folder: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int | None:
    """What the limit of the control group leaves; None without a limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / cache).read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        # Cached files count as used and are given up when memory is asked for.
        reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return max(0, most - now + reclaimable)
    return None
