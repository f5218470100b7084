"""From logical axes (what a dimension is) to mesh axes (where it is split). Strict: nothing is guessed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.parallel.mesh import BATCH_AXES
from jaxrl_llm.parallel.offload import check_offload, host_shardings
from jaxrl_llm.types import LearnerState, TokenBatch

__all__ = [
    "DEFAULT_RULES",
    "Layout",
    "Rules",
    "batch_shardings",
    "layout_of",
    "param_shardings",
    "partition_spec",
    "replicated",
    "rows_spec",
    "state_shardings",
]

Rules = Mapping[str, str | tuple[str, ...] | None]

DEFAULT_RULES: Rules = {
    "layers": None,  # scanned over, so every device walks through all of them
    "embed": ("fsdp", "context"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
}


def partition_spec(axes: tuple[str | None, ...], rules: Rules = DEFAULT_RULES) -> PartitionSpec:
    """The mesh axes of one array.

    Args:
      axes: logical axis of each dimension; None = never split.
      rules: logical axis -> mesh axis, several mesh axes, or None.

    Raises:
      ValueError: a logical axis has no rule, or one mesh axis would split two dimensions.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(
            f"sharding rules: no rule for the logical axis {unknown[0]!r} of {axes}. "
            f"Known: {', '.join(sorted(rules))}. Add it, with None for an axis that is never split."
        )
    spec = PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))
    used: list[str] = []
    for entry in spec:
        used += [entry] if isinstance(entry, str) else list(entry or ())
    for name in used:
        if used.count(name) > 1:
            raise ValueError(
                f"sharding rules: mesh axis {name!r} would split two dimensions of one array: "
                f"logical axes {axes} map to {spec}. Give one of the two another mesh axis or None."
            )
    return spec


def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _canonical(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The same places, written as programs write those of their results: otherwise a second step is compiled anew."""

    def split(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        names = tuple(name for name in names if mesh.shape[name] > 1)
        return names if len(names) > 1 else (names[0] if names else None)

    entries = [split(entry) for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _sharding(name: str, spec: ParamSpec, mesh: Mesh, rules: Rules) -> NamedSharding:
    split = partition_spec(spec.axes, rules)
    for axis, size, entry in zip(spec.axes, spec.shape, split, strict=True):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        lacking = [mesh_axis for mesh_axis in names if mesh_axis not in mesh.shape]
        if lacking:
            raise ValueError(
                f"sharding rules: {axis!r} maps to {lacking[0]!r}, which is not an axis of the mesh "
                f"({', '.join(mesh.axis_names)})."
            )
        shards = math.prod(mesh.shape[mesh_axis] for mesh_axis in names)
        if size % shards:
            splitting = " x ".join(repr(mesh_axis) for mesh_axis in names if mesh.shape[mesh_axis] > 1)
            raise ValueError(
                f"sharding rules: parameter {name} has {size} entries along {axis!r}, which do not divide "
                f"into {shards} shards of mesh axis {splitting}. Choose another size for {splitting}."
            )
    return NamedSharding(mesh, _canonical(split, mesh))


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """The tree of `NamedSharding` of a model's parameters.

    Raises:
      ValueError: see `partition_spec`; or a dimension does not divide into its shards.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: _sharding(jax.tree_util.keystr(path), spec, mesh, rules),
        parameter_specs(config),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )


def state_shardings(
    state: LearnerState,
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    *,
    offload: Collection[str] = (),
) -> LearnerState:
    """The shardings of a learner state: moments lie where their parameters lie, scalars everywhere.

    Args:
      state: arrays or `jax.ShapeDtypeStruct`s.
      optimizer: the one whose state is in `state`.
      offload: what rests in the memory of the host, see `parallel.offload`.
    """
    offload = check_offload(offload)
    params = param_shardings(config, mesh, rules)
    everywhere = replicated(mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    rest = jax.tree.map(
        lambda _: everywhere, dataclasses.replace(state, params=None, opt_state=None, reference=None)
    )
    if "optimizer" in offload:
        opt_state = host_shardings(state.opt_state, opt_state)
    reference = None if state.reference is None else params
    if "reference" in offload and reference is not None:
        reference = host_shardings(state.reference, reference)
    return dataclasses.replace(rest, params=params, opt_state=opt_state, reference=reference)


class Layout(NamedTuple):
    """How the values between parameters and loss lie on a mesh.

    Left to itself, XLA splits activations as the weights are split, and sums them over the mesh in every layer. Held to
    their rows, the weights of a layer are gathered instead, which moves less.
    """

    tokens: NamedSharding  # of [B, T, ...]: rows over the batch axes, the tokens of each over context
    blocks: NamedSharding  # of [R, ...], one block of tokens a device
    heads: NamedSharding  # of [B, T, heads, ...]
    looked_up: NamedSharding  # of [B, T, D], rows of the embedding before they go to where their sequence is
    moving: NamedSharding  # of [B, T, D], half way from there: compilers move one mesh axis at a time, or copy everything
    head: NamedSharding  # of [D, V], the output head while it is multiplied with: gathered once, not in each chunk
    head_gradient: NamedSharding  # of [D, V]

    @property
    def context(self) -> int:
        """Shards of the tokens of a row."""
        return self.tokens.mesh.shape["context"]


def layout_of(mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> Layout | None:
    """The layout on a mesh; None without one."""
    if mesh is None:
        return None
    embed, vocab = rules["embed"], rules["vocab"]
    split = (embed,) if isinstance(embed, str) else tuple(embed or ())
    others = tuple(axis for axis in BATCH_AXES if axis not in split)
    specs = (
        (BATCH_AXES, "context"),
        ((*BATCH_AXES, "context"),),
        (BATCH_AXES, "context", rules["kv_heads"]),
        (others, None, embed),
        (others, "context", tuple(axis for axis in split if axis != "context")),
        (None, vocab),
        (embed, vocab),
    )
    return Layout(*(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs))


def rows_spec(dimensions: int) -> PartitionSpec:
    """How an array [B, T, ...] of a batch lies on a mesh: rows split over the batch axes.

    What has several numbers a token is also split along T, over context; single numbers are small, and the losses, which
    read them, see all tokens of a row.
    """
    return PartitionSpec(BATCH_AXES, "context") if dimensions > 2 else PartitionSpec(BATCH_AXES)


def batch_shardings(batch: TokenBatch, mesh: Mesh) -> TokenBatch:
    """Arrays of rows as `rows_spec` says; scalars everywhere.

    Raises:
      ValueError: the tokens of a row do not divide over context.
    """
    shards = mesh.shape["context"]
    if batch.shape[1] % shards:
        raise ValueError(
            f"batch: rows of {batch.shape[1]} tokens do not divide into the {shards} shards of the mesh axis context. Pad "
            f"them to a multiple of {shards} (pad_to_multiple of `pack`), or choose another size of context."
        )
    return jax.tree.map(
        lambda x: NamedSharding(mesh, rows_spec(x.ndim) if x.ndim >= 2 else PartitionSpec()), batch
    )
