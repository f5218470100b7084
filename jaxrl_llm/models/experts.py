"""A mixture of experts in place of the MLP of a layer, as Qwen3-MoE has it.

A router gives each token probabilities over E experts (f32, whatever the compute dtype). The k likeliest are its
experts; their outputs, weighted by these probabilities (which `ModelConfig.normalize_gates` rescales to 1), add up.
With `ModelConfig.router_bias` those with the largest sums of probability and bias are chosen; the weights stay the same.
No token is dropped unless `ModelConfig.expert_capacity` says so.

The pairs (token, expert) are put in the order of their experts, and each expert multiplies its rows:
`jax.lax.ragged_dot` does this on accelerators. On CPUs XLA turns that into a dense product over all experts, so there
the rows of an expert are padded to blocks of one fixed size and a loop runs over the blocks in use. **A block always
has the same shape, and so the bits of a token's output depend neither on its neighbours nor on how many there are.**

Local names carry dimensions: N tokens, K experts of a token, E experts, D residual, F hidden units of an expert.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.dense import DENSE
from jaxrl_llm.ops.quantize import QuantizedMatrix, weight_product
from jaxrl_llm.parallel.rules import DEFAULT_RULES

__all__ = [
    "EXACT",
    "Placement",
    "Routed",
    "dropless",
    "exchanged_bytes",
    "expert_mlp",
    "on_mesh",
    "router_load",
]

Array = jax.Array

EXACT = frozenset(
    {"router", "router_bias"}
)  # parameters of a layer that are never rounded: the choice of experts hangs on them
_MATRICES = ("expert_gate", "expert_up", "expert_down")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the experts of a model are: a mesh with the axes of `parallel.mesh`."""

    mesh: Mesh
    rows: tuple[
        str, ...
    ]  # the mesh axes that the rows of a batch are split over; () = every device has all rows


class Routed(NamedTuple):
    """What the routers did with tokens; [...] is [B, T] of one layer, or [layers, B, T]."""

    ids: Array  # i32[..., K], the experts of each token, likeliest first
    entropy: Array  # f32[...], of the probabilities (nats); detached
    dropped: Array  # f32[...], how many experts of the token had no room for it
    probs: Array | None  # f32[..., E], on the tape
    preferred: Array | None = (
        None  # i32[..., K], the likeliest, whatever the biases; None of a model without biases
    )


def on_mesh(config: ModelConfig, mesh: Mesh | None, rows: tuple[str, ...] = ()) -> ModelConfig:
    """The config with which a mixture of experts is compiled for a mesh; a dense one comes back as it is.

    Args:
      rows: the mesh axes that the rows of a batch are split over.
    """
    if mesh is None or not config.num_experts or mesh.size == 1:
        return config
    return dataclasses.replace(config, placement=Placement(mesh, tuple(rows)))


def dropless(config: ModelConfig) -> ModelConfig:
    """The config of a sampler: a token that it drops would be another one in other company."""
    return dataclasses.replace(config, expert_capacity=None)


def router_load(ids: Array, experts: int, counted: Array) -> Array:
    """f32[layers, E]: tokens of each expert, of ids i32[B, T, layers, K] where `counted` bool[B, T]."""
    chosen = jax.nn.one_hot(ids, experts, dtype=jnp.float32)
    return jnp.einsum("btlke,bt->le", chosen, counted.astype(jnp.float32))


def exchanged_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes that all devices together receive in one forward pass over so many tokens, because experts are elsewhere.

    Each device gets all tokens of those that hold other experts, in the compute dtype, and sums of f32 go back. With
    `expert_capacity` it gets the tokens for its experts (as many as there is room for), and their outputs go back.
    """
    placement: Placement | None = config.placement
    if placement is None or "expert" not in placement.rows:
        return 0
    ranks = placement.mesh.shape["expert"]
    if config.expert_capacity is not None:
        shards = math.prod(placement.mesh.shape[axis] for axis in (*placement.rows, "context"))
        room = _room(config, tokens // shards) or 0
        elsewhere = config.num_experts - config.num_experts // ranks
        numbers = 2 * elsewhere * room * config.hidden_size * shards * placement.mesh.shape["tensor"]
        return config.num_layers * numbers * jnp.dtype(config.dtype).itemsize
    there = config.hidden_size * jnp.dtype(config.dtype).itemsize + config.experts_per_token * (4 + 4)
    token = there + config.hidden_size * jnp.dtype(jnp.promote_types(config.dtype, jnp.float32)).itemsize
    return config.num_layers * (ranks - 1) * tokens * token * placement.mesh.shape["tensor"]


def expert_mlp(
    layer: Mapping[str, Any],
    config: ModelConfig,
    h_BTD: Array,
    routing_ids: Array | None = None,
    live: Array | None = None,
) -> tuple[Array, Routed]:
    """([B, T, D], what the router did) of a layer with experts.

    Args:
      layer: router [D, E], expert_gate and expert_up [E, D, F], expert_down [E, F, D]; perhaps router_bias [E], which no
        gradient reaches.
      routing_ids: i32[B, T, K], experts that each token goes through, whatever the router would choose now; the gates
        are the router's for those. -1 in front: the router chooses for this token.
      live: bool[B, T]; other tokens go through no expert and take no room. None = all.
    """
    wide = jnp.promote_types(h_BTD.dtype, jnp.float32)
    # A router that rounds would choose other experts than the one it is compared with.
    logits = jnp.einsum(
        "btd,de->bte", h_BTD.astype(wide), layer["router"].astype(wide), precision=jax.lax.Precision.HIGHEST
    )
    probs = jax.nn.softmax(logits, axis=-1)
    gates, ids = jax.lax.top_k(probs, config.experts_per_token)
    ids, preferred = ids.astype(jnp.int32), None
    if "router_bias" in layer:
        preferred = ids
        sums = jax.lax.stop_gradient(probs + layer["router_bias"].astype(wide))
        ids = jax.lax.top_k(sums, config.experts_per_token)[1].astype(jnp.int32)
    if routing_ids is not None:
        ids = jnp.where(routing_ids[..., :1] < 0, ids, routing_ids.astype(jnp.int32))
    if preferred is not None or routing_ids is not None:
        gates = jnp.take_along_axis(probs, ids, axis=-1)
    if config.normalize_gates:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    matrices = {name: layer[name] for name in _MATRICES}
    run = _local if config.placement is None else _spread
    used = ids if live is None else jnp.where(live[..., None], ids, config.num_experts)
    y, dropped = run(config, h_BTD, used, gates, matrices)
    detached = jax.lax.stop_gradient(probs)
    entropy = -jnp.sum(jax.scipy.special.xlogy(detached, detached), axis=-1)
    return y, Routed(ids, entropy.astype(jnp.float32), dropped, probs, preferred)


# ------------------------------------------------------------------------------------- on one device


def _local(
    config: ModelConfig, h_BTD: Array, ids_BTK: Array, gates_BTK: Array, matrices: Mapping[str, Any]
) -> tuple[Array, Array]:
    """The experts of all tokens, all here."""
    B, T, D = h_BTD.shape
    K = ids_BTK.shape[-1]
    h, ids, gates = h_BTD.reshape(-1, D), ids_BTK.reshape(-1, K), gates_BTK.reshape(-1, K)
    room = _room(config, ids.shape[0])
    y = _experts(h, ids, gates, matrices, config.num_experts, room)
    dropped = _dropped(ids, config.num_experts, room)
    return y.astype(h.dtype).reshape(B, T, D), dropped.reshape(B, T)


def _room(config: ModelConfig, tokens: int) -> int | None:
    """Most tokens of one expert; None = all."""
    if config.expert_capacity is None:
        return None
    mean = tokens * config.experts_per_token / config.num_experts
    return max(1, min(tokens, -int(-config.expert_capacity * mean // 1)))


def _ranks(flat: Array, groups: int) -> tuple[Array, Array]:
    """(rank of each entry among those of its group, in their order; entries of each group) of i32[A]."""
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(groups, jnp.int32).at[flat].add(1, mode="drop")
    first = jnp.cumsum(sizes) - sizes
    ranks = jnp.arange(flat.size, dtype=jnp.int32) - first[jnp.minimum(flat[order], groups - 1)]
    return jnp.zeros_like(flat).at[order].set(ranks), sizes


def _dropped(ids: Array, experts: int, room: int | None) -> Array:
    if room is None:
        return jnp.zeros(ids.shape[0], jnp.float32)
    flat = ids.reshape(-1)
    ranks, _ = _ranks(flat, experts)
    return jnp.sum(((ranks >= room) & (flat < experts)).reshape(ids.shape), axis=-1).astype(jnp.float32)


def _experts(
    h: Array,
    ids: Array,
    gates: Array,
    matrices: Mapping[str, Any],
    experts: int,
    room: int | None,
    whole: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """[N, D] in at least f32: Σ_j gates[:, j] · expert ids[:, j] of h; ids outside [0, experts) give nothing.

    Args:
      h, ids, gates: [N, D], i32[N, K], [N, K].
      experts: E of `matrices`.
      room: most tokens of an expert, the first ones; None = all.
      whole: of products over the columns of h that are here, those over all of them.
    """
    K = ids.shape[1]
    flat = jnp.where((ids < 0) | (ids >= experts), experts, ids).reshape(-1)
    ranks, sizes = _ranks(flat, experts)
    left_out = flat == experts
    if room is not None:
        left_out |= ranks >= room
        sizes = jnp.minimum(sizes, room)

    def mlp(layout, product: Callable[[Array, Any], Array]) -> Array:
        place, rows = layout
        place = jnp.where(left_out, rows, place)  # out of bounds: neither written nor read
        x = jnp.zeros((rows, h.shape[1]), h.dtype)
        x = x.at[place].set(jnp.repeat(h, K, axis=0), mode="drop")
        gate, up = (whole(product(x, matrices[name])) for name in ("expert_gate", "expert_up"))
        y = product(jax.nn.silu(gate) * up, matrices["expert_down"])
        return y.at[place].get(mode="fill", fill_value=0)

    def blocks() -> Array:
        size = _block(flat.size, experts)
        most = -(-flat.size // size) + min(experts, flat.size)
        after = jnp.cumsum(-(-sizes // size))  # blocks of an expert and of those before it
        before = after - (-(-sizes // size))
        owner = jnp.searchsorted(after, jnp.arange(most), side="right").astype(jnp.int32)
        owner = jnp.minimum(owner, experts - 1)
        place = before[jnp.minimum(flat, experts - 1)] * size + ranks
        product = functools.partial(_blocked, owner=owner, used=after[-1])
        return mlp((place, most * size), product)

    def ragged() -> Array:
        first = jnp.cumsum(sizes) - sizes
        place = first[jnp.minimum(flat, experts - 1)] + ranks
        return mlp((place, flat.size), functools.partial(_ragged, sizes=sizes))

    out = jax.lax.platform_dependent(cpu=blocks, default=ragged)
    gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
    out = out.reshape(*ids.shape, -1).astype(gates.dtype)
    return jnp.sum(out * gates[..., None], axis=1)


def _block(pairs: int, experts: int) -> int:
    """Rows of a block: about the mean load of an expert, a power of two from 8 to 128."""
    size = 8
    while size < 128 and size * experts < pairs:
        size *= 2
    return size


def _ragged(x: Array, w: Any, *, sizes: Array) -> Array:
    """Rows of x [A, D], in the order of their experts, times the matrices of w [E, D, F]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(w, QuantizedMatrix):
        sums = jax.lax.ragged_dot(x, w.values.astype(x.dtype), sizes, preferred_element_type=wide)
        owner = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
        return (sums * w.scale.astype(wide)[jnp.minimum(owner, len(sizes) - 1)]).astype(x.dtype)
    return checkpoint_name(jax.lax.ragged_dot(x, w.astype(x.dtype), sizes), DENSE)


def _blocked(x: Array, w: Any, *, owner: Array, used: Array) -> Array:
    """Blocks of x [blocks · m, D] times w[owner of the block], the first `used`; the others come out as 0."""
    if isinstance(w, QuantizedMatrix):
        return _loop(x, w, owner, used, weight_product, w.scale.shape[-1])
    return checkpoint_name(_blocked_product(x, w, owner, used), DENSE)


def _loop(x: Array, w: Any, owner: Array, used: Array, product: Callable, width: int) -> Array:
    m = x.shape[0] // owner.size

    def one(b, y):
        part = jax.lax.dynamic_slice_in_dim(x, b * m, m)
        matrix = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, owner[b], keepdims=False), w)
        return jax.lax.dynamic_update_slice_in_dim(y, product(part, matrix), b * m, 0)

    return jax.lax.fori_loop(0, used, one, jnp.zeros((x.shape[0], width), x.dtype))


@jax.custom_vjp
def _blocked_product(x: Array, w: Array, owner: Array, used: Array) -> Array:
    return _loop(x, w.astype(x.dtype), owner, used, jnp.matmul, w.shape[-1])


def _blocked_forward(x, w, owner, used):
    return _blocked_product(x, w, owner, used), (x, w, owner, used)


def _blocked_backward(residuals, dy):
    x, w, owner, used = residuals
    dx = _loop(dy, w.astype(dy.dtype), owner, used, lambda d, matrix: d @ matrix.T, w.shape[-2])
    m = x.shape[0] // owner.size
    wide = jnp.promote_types(x.dtype, jnp.float32)  # as in `ops.dense`, the sum is not rounded

    def one(b, dw):
        here = (jax.lax.dynamic_slice_in_dim(a, b * m, m).astype(wide) for a in (x, dy))
        added = jax.lax.dynamic_index_in_dim(dw, owner[b], keepdims=False) + jnp.einsum("md,mf->df", *here)
        return jax.lax.dynamic_update_index_in_dim(dw, added, owner[b], 0)

    dw = jax.lax.fori_loop(0, used, one, jnp.zeros(w.shape, wide))
    return dx, dw.astype(w.dtype), None, None


_blocked_product.defvjp(_blocked_forward, _blocked_backward)


# ------------------------------------------------------------------------------------------ on a mesh


def _split(w: Any, name: str, columns: str | tuple[str, ...] | None) -> Any:
    """How the matrices of the experts, [E, D, F] or [E, F, D], lie where they are multiplied with."""
    down = name == "expert_down"
    axes = ("expert", "tensor", columns) if down else ("expert", columns, "tensor")
    whole = PartitionSpec(*axes)
    if not isinstance(w, QuantizedMatrix):
        return whole
    return QuantizedMatrix(values=whole, scale=PartitionSpec(axes[0], axes[2]))  # type: ignore[arg-type]


def _sent(h: Array, ids: Array, gates: Array, matrices: Mapping[str, Any], experts: int, room: int) -> Array:
    """As `_experts`, where the experts are split over the mesh axis "expert" and each takes `room` tokens of every device.

    With a bound on what one device sends to one expert, only those tokens travel: an all-to-all there and one back.
    """
    N, D = h.shape
    K = ids.shape[1]
    flat = ids.reshape(-1)
    ranks, _ = _ranks(flat, experts)
    place = jnp.where((ranks < room) & (flat < experts), flat * room + ranks, experts * room)
    outgoing = jnp.zeros((experts * room, D), h.dtype).at[place].set(jnp.repeat(h, K, axis=0), mode="drop")

    def exchange(x: Array, split: int, joined: int) -> Array:
        return jax.lax.all_to_all(x, "expert", split, joined, tiled=True)

    x = exchange(outgoing.reshape(experts, room, D), 0, 1)  # [experts here, devices · room, D]

    def product(x: Array, w: Any) -> Array:
        if isinstance(w, QuantizedMatrix):
            return jax.vmap(weight_product)(x, w)
        return checkpoint_name(jnp.einsum("erd,edf->erf", x, w.astype(x.dtype)), DENSE)

    hidden = jax.nn.silu(product(x, matrices["expert_gate"])) * product(x, matrices["expert_up"])
    y = exchange(product(hidden, matrices["expert_down"]), 1, 0).reshape(experts * room, D)
    gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
    back = y.at[place].get(mode="fill", fill_value=0).reshape(N, K, D).astype(gates.dtype)
    return jnp.sum(back * gates[..., None], axis=1)


_ROOM = 1.25  # rows of a round, in the mean load of a device


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(
    experts: int, rows: int, h: Array, ids: Array, gates: Array, matrices: Mapping[str, Any]
) -> Array:
    """`_experts` without a bound on the tokens of an expert, in memory for `rows` pairs of token and expert at a time.

    All pairs of all devices might be for the experts of one of them, and hardly ever are. The pairs for the experts that
    are here are put in order and taken `rows` at a time, until none is left: one round where loads are about even, and as
    many as it takes otherwise. Where a round ends decides in which order the outputs of a token's experts are added, in f32,
    and nothing else. Nothing is kept for the backward pass, which computes each round again.
    """
    return _rounds_forward(experts, rows, h, ids, gates, matrices)[0]


def _round(experts: int, rows: int, ids: Array) -> tuple[Callable[..., Array], Callable[[Array], Array]]:
    """(part(first, h, gates, matrices) -> [N, D], the share of the pairs first …; whether there are pairs from a first on)."""
    N, K = ids.shape
    flat = jnp.where((ids < 0) | (ids >= experts), experts, ids).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # those for experts elsewhere come last
    here = jnp.sum(flat < experts)

    def part(first: Array, h: Array, gates: Array, matrices: Mapping[str, Any]) -> Array:
        at = first + jnp.arange(rows)
        pair = jnp.where(at < here, order[jnp.minimum(at, N * K - 1)], N * K)  # out of bounds: no pair
        token = pair // K
        # In f32, in which the gradients of the pairs of a token then add up.
        x = h.astype(jnp.promote_types(h.dtype, jnp.float32)).at[token].get(mode="fill", fill_value=0)
        owner = flat.at[pair].get(mode="fill", fill_value=experts)
        gate = gates.reshape(-1).at[pair].get(mode="fill", fill_value=0)
        y = _experts(x.astype(h.dtype), owner[:, None], gate[:, None], matrices, experts, None)
        return jnp.zeros((N, h.shape[1]), y.dtype).at[token].add(y, mode="drop")

    return part, lambda first: first < here


def _until_done(part: Callable[[Array], Any], more: Callable[[Array], Array], rows: int) -> Any:
    """The sum of part(0), part(rows), … as long as there are more."""

    def again(carry):
        first, total = carry
        return first + rows, jax.tree.map(jnp.add, total, part(first))

    first = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(lambda carry: more(carry[0]), again, (first + rows, part(first)))[1]


def _rounds_forward(experts, rows, h, ids, gates, matrices):
    part, more = _round(experts, rows, ids)
    y = _until_done(lambda first: part(first, h, gates, matrices), more, rows)
    return y, (h, ids, gates, matrices)


def _rounds_backward(experts, rows, residuals, dy):
    h, ids, gates, matrices = residuals
    part, more = _round(experts, rows, ids)
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))

    def pulled(first):
        def narrow(wide, gates, matrices):
            return part(first, wide.astype(h.dtype), gates, matrices)

        return jax.vjp(narrow, wide, gates, matrices)[1](dy)

    dh, d_gates, d_matrices = _until_done(pulled, more, rows)
    return dh.astype(h.dtype), None, d_gates, d_matrices


_in_rounds.defvjp(_rounds_forward, _rounds_backward)


def _spread(
    config: ModelConfig, h_BTD: Array, ids_BTK: Array, gates_BTK: Array, matrices: Mapping[str, Any]
) -> tuple[Array, Array]:
    """The same on a mesh: experts split over its axis "expert", their hidden units over "tensor".

    Where every device has all rows, as in the sampler, they are few: the matrices stay split as all others are, and sums
    over their columns travel. Elsewhere an expert has more rows than columns, and its matrices are gathered over it.
    """
    placement: Placement = config.placement
    mesh, rows = placement.mesh, placement.rows
    ranks = mesh.shape["expert"]
    mine = config.num_experts // ranks  # divides: `parallel.rules` has refused other meshes
    split = PartitionSpec(rows, "context") if rows else PartitionSpec()
    columns = None if rows else DEFAULT_RULES["embed"]
    hidden = PartitionSpec(*split, columns) if rows else PartitionSpec(None, None, columns)
    inner = {name: _split(w, name, columns) for name, w in matrices.items()}

    def whole(x: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return x if columns is None else jax.lax.psum(x.astype(wide), columns).astype(x.dtype)

    def here(h, ids, gates, matrices):
        B, T, D = h.shape
        K = ids.shape[-1]
        # Counted among the rows of each device, so that none waits for another's counts.
        room = _room(config, B * T)
        dropped = _dropped(ids.reshape(-1, K), config.num_experts, room).reshape(B, T)
        exchanged = ranks > 1 and "expert" in rows
        if exchanged and room is not None:
            flat_h, flat_ids, flat_gates = (x.reshape(B * T, -1) for x in (h, ids, gates))
            y = _sent(flat_h, flat_ids, flat_gates, matrices, config.num_experts, room)
            y = jax.lax.psum(y, "tensor")
            return y.astype(h.dtype).reshape(B, T, D), dropped
        if room is not None:
            ranked, _ = _ranks(ids.reshape(-1), config.num_experts)
            ids = jnp.where((ranked >= room).reshape(ids.shape), config.num_experts, ids)
        if exchanged:
            h, ids, gates = (jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in (h, ids, gates))
        first = jax.lax.axis_index("expert") * mine
        local = jnp.where((ids >= first) & (ids < first + mine), ids - first, mine)
        flat_h, flat_ids, flat_gates = h.reshape(-1, D), local.reshape(-1, K), gates.reshape(-1, K)
        if exchanged:
            enough = math.ceil(_ROOM * flat_ids.size / ranks)
            y = _in_rounds(mine, enough, flat_h, flat_ids, flat_gates, matrices)
        else:
            y = _experts(flat_h, flat_ids, flat_gates, matrices, mine, None, whole)
        y = y.reshape(-1, T, D)
        if exchanged:
            y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
            y = jax.lax.psum(y, "tensor")
        else:
            y = jax.lax.psum(y, ("expert", "tensor"))
        return y.astype(h.dtype), dropped

    return jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(hidden, split, split, inner),
        out_specs=(hidden, split),
        check_vma=False,
    )(h_BTD, ids_BTK, gates_BTK, dict(matrices))
