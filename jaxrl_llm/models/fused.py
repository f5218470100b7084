"""Attention of the learner on a TPU: three Pallas kernels, so that scores never leave the fast memory of a chip.

The same attention as `models.blockwise`, of rows of any length: a block of queries (all query heads of a key/value head
together) meets the blocks of keys that it may see, and only those are read. Which ones is found before from the ranges of
segments and families in each block, so a kernel visits a few blocks in vain and never misses one; within a block every
pair of tokens is compared. The kernels that come with JAX know causal order and equal segments, and not the shared
prefix of a family, hence these.

Padding (segment 0) sees nothing: its result is 0, where `blockwise` mixes the padding before it. Nobody reads either.

Scores are held with the keys in rows and the queries in columns: highest scores, sums and log-sum-exps are then rows, which
is how a chip keeps numbers of one dimension.

Local names as in `models.blockwise`; Q = G times the queries of a block, of which those of one head lie together.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.models.blockwise import Sight, blockwise_attention, gathered

__all__ = ["fused_attention"]

Array = jax.Array

_LANES = 128
_QUERIES = 1024  # of all heads in a block, where 128 tokens are not more than that
_MOST = 512  # tokens of a block
_SCORES = _QUERIES * _MOST  # of two blocks; in f32 they are 2 MB
_NOT_SEEN = -(2**31)  # a segment that no key has


class _Plan(NamedTuple):
    """The static part."""

    queries: int  # tokens of a block
    keys: int
    axis: str | None  # mesh axis that the tokens of a row are split over
    interpret: bool


def fused_attention(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    sight: Sight,
    *,
    axis: str | None = None,
    interpret: bool = False,
    block: tuple[int, int] | None = None,
) -> Array:
    """Grouped-query attention of each token to those that it sees, [B, T, H, K]; scores and softmax f32; padding gives 0.

    Differentiable once in q, k and v; what its gradient is linear in can be differentiated again. Query head h reads
    key/value head h // (H / N).

    Args:
      q_BTHK, k_BTNK, v_BTNK: float32 or bfloat16.
      axis: inside of `jax.shard_map`, the mesh axis that the tokens are split over, in order; T are those of one device.
      interpret: runs the kernels on any device, slowly, to check them.
      block: tokens of a block of queries and of one of keys, multiples of 128; default: by the heads of a group.

    Raises:
      ValueError: another dtype.
    """
    if q_BTHK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"fused_attention: the kernels compute in float32 or bfloat16, got {q_BTHK.dtype}; set model.dtype to one "
            "of them."
        )
    T, group = q_BTHK.shape[1], q_BTHK.shape[2] // k_BTNK.shape[2]
    return _attention(_Plan(*(block or _fitting(T, group)), axis, interpret), q_BTHK, k_BTNK, v_BTNK, sight)


def _fitting(tokens: int, group: int) -> tuple[int, int]:
    """Tokens of a block of queries and of one of keys, multiples of 128, so that `_SCORES` are not exceeded."""
    whole = -(-tokens // _LANES) * _LANES

    def most(room: int) -> int:
        return min(max(room // _LANES * _LANES, _LANES), _MOST, whole)

    queries = most(_QUERIES // group)
    return queries, most(_SCORES // (queries * group))


# -------------------------------------------------------------------------------- blocks of a row


def _padded(x: Array, multiple: int, fill: int = 0) -> Array:
    """[B, T, ...] with T a multiple."""
    extra = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)


def _query_blocks(x: Array, size: int, heads: int) -> Array:
    """[B, T, H, ...] -> [B, N, blocks, Q, ...]."""
    x = _padded(x, size)
    B, T, H = x.shape[:3]
    x = x.reshape(B, T // size, size, heads, H // heads, *x.shape[3:])
    x = jnp.moveaxis(x, (3, 1, 4, 2), (1, 2, 3, 4))
    return x.reshape(B, heads, T // size, H // heads * size, *x.shape[5:])


def _tokens(x_BNIKQ: Array, size: int, tokens: int) -> Array:
    """[B, N, blocks, K, Q] -> [B, T, H, K]."""
    B, N, blocks, K, Q = x_BNIKQ.shape
    x = x_BNIKQ.reshape(B, N, blocks, K, Q // size, size)
    return jnp.transpose(x, (0, 2, 5, 1, 4, 3)).reshape(B, blocks * size, -1, K)[:, :tokens]


class _Where(NamedTuple):
    """Who sees whom, for the kernels."""

    queries: Array  # i32[B, query blocks, 3, Q]: segment, family asked for, column
    keys: Array  # i32[B, key blocks, 8, S]: segment, family opened, column; the rest is not read
    visits: Array  # of `_visits`: the blocks of keys that a block of queries visits
    visitors: Array  # the blocks of queries that visit a block of keys


def _where(plan: _Plan, sight: Sight, row: Sight, first: Array, group: int) -> _Where:
    """`first` is the column of the first query in the row."""
    asks, opens = _padded(sight.asks, plan.queries), _padded(row.opens, plan.keys, -1)
    segments, of_keys = _padded(sight.segments, plan.queries), _padded(row.segments, plan.keys)
    B, T = segments.shape
    columns = jnp.broadcast_to(first + jnp.arange(T, dtype=jnp.int32), (B, T))
    places = jnp.broadcast_to(jnp.arange(of_keys.shape[1], dtype=jnp.int32), of_keys.shape)
    asking = jnp.stack([jnp.where(segments == 0, _NOT_SEEN, segments), asks, columns], axis=1)
    asking = jnp.swapaxes(asking.reshape(B, 3, -1, plan.queries), 1, 2)
    there = jnp.stack([of_keys, opens, *[places] * 6], axis=1)

    def cut(x, size):
        return x.reshape(B, -1, size)

    def meet(queries, keys):
        """Whether the ranges of positive numbers in a block of queries and one of keys have something in common."""
        (low, high), (lowest, highest) = (
            (jnp.min(jnp.where(x > 0, x, 2**31 - 1), axis=-1), jnp.max(x, axis=-1)) for x in (queries, keys)
        )
        both = (low[:, :, None] <= highest[:, None]) & (lowest[:, None] <= high[:, :, None])
        return both & (high > 0)[:, :, None] & (highest > 0)[:, None]

    own = meet(cut(jnp.abs(segments), plan.queries), cut(jnp.abs(of_keys), plan.keys))
    shared = meet(cut(asks, plan.queries), cut(opens, plan.keys))
    ends, begins = cut(columns, plan.queries)[:, :, -1], cut(places, plan.keys)[:, :, 0]
    own, shared = (x & (begins[:, None] <= ends[:, :, None]) for x in (own, shared))
    return _Where(
        jnp.tile(asking, (1, 1, 1, group)),
        jnp.swapaxes(there.reshape(B, 8, -1, plan.keys), 1, 2),
        _visits(own, shared),
        _visits(jnp.swapaxes(own, 1, 2), jnp.swapaxes(shared, 1, 2)),
    )


def _visits(own: Array, shared: Array) -> Array:
    """i32[B, blocks, 4] of bool[B, blocks, others]: how many a block visits, the first, how many from there on, the next.

    What lies between two blocks of its own sequences is visited too, and between two of shared prefixes. A chip has little
    memory for such numbers: one a pair of blocks would be too many for a row of 131,072 tokens.
    """

    def ends(x):
        there = jnp.any(x, axis=-1)
        first, last = jnp.argmax(x, axis=-1), x.shape[-1] - 1 - jnp.argmax(x[..., ::-1], axis=-1)
        return there, first.astype(jnp.int32), last.astype(jnp.int32)

    (one, a, b), (other, c, d) = ends(own), ends(shared)
    a, b = jnp.where(one, a, c), jnp.where(one, b, d)
    c, d = jnp.where(other, c, a), jnp.where(other, d, b)
    first, next_ = jnp.minimum(a, c), jnp.maximum(a, c)
    whole = jnp.maximum(b, d) - first + 1
    gap = jnp.maximum(next_ - jnp.minimum(b, d) - 1, 0)
    length = jnp.where(gap > 0, jnp.minimum(b, d) - first + 1, whole)
    return jnp.stack([jnp.where(one | other, whole - gap, 0), first, length, next_], axis=-1)


def _visited(visits_ref: Any, block: Array, turn: Array) -> Array:
    """The block that the given one visits in a turn; the last one again in turns after that, which reads nothing anew."""
    count, first, length, next_ = (visits_ref[4 * block + i] for i in range(4))
    turn = jnp.minimum(turn, jnp.maximum(count - 1, 0))
    return jnp.where(turn < length, first + turn, next_ + turn - length)


# ---------------------------------------------------------------------------------------- kernels


def _product(a: Array, b: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _scores(q_ref, k_ref, queries_ref, keys_ref) -> Array:
    """f32[S, Q], -inf where a key is not seen."""
    scores = _product(k_ref[...], q_ref[...], (1, 1)) * q_ref.shape[-1] ** -0.5
    keys = keys_ref[...].T  # [S, 8]
    segment, family, column = (keys[:, i : i + 1] for i in range(3))
    own = (segment == queries_ref[0:1]) & (column <= queries_ref[2:3])
    return jnp.where(own | (family == queries_ref[1:2]), scores, -jnp.inf)


def _turn(visits_ref):
    """(turn, whether there is a block to visit in it, whether it is the last)."""
    turn = pl.program_id(3)
    here = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    return turn, turn < visits_ref[4 * here], turn == pl.num_programs(3) - 1


_LOWEST = float(jnp.finfo(jnp.float32).min)  # and not -inf: the difference of two of them is 0 and not NaN


def _forward_kernel(
    visits_ref, q_ref, k_ref, v_ref, queries_ref, keys_ref, out_ref, lse_ref, high, mass, mixed
):
    """v is [K, S], the result [K, Q]."""
    turn, visits, last = _turn(visits_ref)

    @pl.when(turn == 0)
    def begin():
        high[...] = jnp.full(high.shape, _LOWEST, jnp.float32)
        mass[...] = jnp.zeros(mass.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    @pl.when(visits)
    def meet():
        scores = _scores(q_ref, k_ref, queries_ref, keys_ref)
        higher = jnp.maximum(high[...], jnp.max(scores, axis=0, keepdims=True))
        rescale, weights = jnp.exp(high[...] - higher), jnp.exp(scores - higher)
        high[...] = higher
        mass[...] = mass[...] * rescale + jnp.sum(weights, axis=0, keepdims=True)
        mixed[...] = mixed[...] * rescale + _product(v_ref[...], weights.astype(v_ref.dtype))

    @pl.when(last)
    def end():
        total = jnp.where(mass[...] > 0, mass[...], 1.0)
        out_ref[...] = (mixed[...] / total).astype(out_ref.dtype)
        lse_ref[...] = high[...] + jnp.log(total)


def _weights(q_ref, k_ref, v_ref, d_ref, lse_ref, mean_ref, queries_ref, keys_ref) -> tuple[Array, Array]:
    """(weights, gradient of the scores before they are scaled), f32[S, Q]."""
    weights = jnp.exp(_scores(q_ref, k_ref, queries_ref, keys_ref) - lse_ref[...])
    return weights, weights * (_product(v_ref[...], d_ref[...], (1, 1)) - mean_ref[...])


def _queries_kernel(
    visits_ref, q_ref, k_ref, k_KS_ref, v_ref, d_ref, lse_ref, mean_ref, queries_ref, keys_ref, out_ref, sums
):  # fmt: skip
    """The gradient [K, Q] of a block of queries."""
    turn, visits, last = _turn(visits_ref)

    @pl.when(turn == 0)
    def begin():
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(visits)
    def meet():
        _, d_scores = _weights(q_ref, k_ref, v_ref, d_ref, lse_ref, mean_ref, queries_ref, keys_ref)
        sums[...] += _product(k_KS_ref[...], d_scores.astype(k_ref.dtype))

    @pl.when(last)
    def end():
        out_ref[...] = (sums[...] * q_ref.shape[-1] ** -0.5).astype(out_ref.dtype)


def _keys_kernel(
    visits_ref, q_ref, k_ref, v_ref, d_ref, lse_ref, mean_ref, queries_ref, keys_ref, d_k_ref, d_v_ref, of_k, of_v
):  # fmt: skip
    """The gradients [S, K] of a block of keys and of its values."""
    turn, visits, last = _turn(visits_ref)

    @pl.when(turn == 0)
    def begin():
        of_k[...] = jnp.zeros(of_k.shape, jnp.float32)
        of_v[...] = jnp.zeros(of_v.shape, jnp.float32)

    @pl.when(visits)
    def meet():
        weights, d_scores = _weights(q_ref, k_ref, v_ref, d_ref, lse_ref, mean_ref, queries_ref, keys_ref)
        of_v[...] += _product(weights.astype(d_ref.dtype), d_ref[...])
        of_k[...] += _product(d_scores.astype(q_ref.dtype), q_ref[...])

    @pl.when(last)
    def end():
        d_k_ref[...] = (of_k[...] * q_ref.shape[-1] ** -0.5).astype(d_k_ref.dtype)
        d_v_ref[...] = of_v[...].astype(d_v_ref.dtype)


class _Call(NamedTuple):
    """A kernel over (rows, key/value heads, blocks, visits of each)."""

    plan: _Plan
    name: str
    kernel: Any
    visits: Array  # of `_Where`
    by_keys: bool  # the blocks are of keys, and what they visit of queries
    products: int  # of each pair of a key and a query, K numbers long

    def __call__(self, given: list[tuple[str, Array]], results: list[tuple[str, Any]], scratch: list) -> Any:
        """`given` and `results` by kind, see `spec`."""
        B, mine, _ = self.visits.shape
        N = given[0][1].shape[1]
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, N, mine, jnp.maximum(jnp.max(self.visits[..., 0]), 1)),
            in_specs=[self.spec(kind, x.shape) for kind, x in given],
            out_specs=[self.spec(kind, x.shape) for kind, x in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        )
        return pl.pallas_call(
            self.kernel,
            out_shape=[x for _, x in results],
            grid_spec=grid,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            cost_estimate=self.cost(given, results),
            interpret=self.plan.interpret,
            name=self.name,
        )(self.visits.reshape(-1), *(x for _, x in given))

    def spec(self, kind: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Of an array of blocks: "queries" or "keys" [B, N, blocks, …], or with "all heads" [B, blocks, …]."""
        visited, mine = kind.startswith("queries") == self.by_keys, self.visits.shape[1]

        def place(b, n, i, turn, visits):
            here = _visited(visits, b * mine + i, turn) if visited else i
            at = (b, here) if kind.endswith("all heads") else (b, n, here)
            return (*at, *[0] * (len(shape) - len(at)))

        leading = 2 if kind.endswith("all heads") else 3
        return pl.BlockSpec((*[None] * leading, *shape[leading:]), place)

    def cost(self, given: list[tuple[str, Array]], results: list[tuple[str, Any]]) -> pl.CostEstimate:
        """At most: of rows of one sequence, and of a row that is split for the device with its end."""
        B, N, of_queries, Q, K = given[0][1].shape
        of_keys, S = given[1][1].shape[2:4]
        others = of_queries if self.by_keys else of_keys
        start = max(0, of_keys * S - of_queries * self.plan.queries)
        pairs = sum(min(of_keys, -(-(start + (i + 1) * self.plan.queries) // S)) for i in range(of_queries))
        moved = 0
        for kind, x in (*given, *results):
            size = x.size * x.dtype.itemsize
            times = N if kind.endswith("all heads") else 1
            visited = kind.startswith("queries") == self.by_keys
            moved += size * times * pairs // others if visited else size * times
        return pl.CostEstimate(
            flops=2 * self.products * B * N * pairs * S * Q * K,
            transcendentals=B * N * pairs * S * Q,
            bytes_accessed=moved,
        )


# ------------------------------------------------------------------------------ values and gradients


def _given(plan: _Plan, q: Array, k: Array, v: Array, sight: Sight) -> tuple[Array, Array, Array, _Where]:
    """(queries [B, N, blocks, Q, K], keys and values [B, N, blocks, S, K], who sees whom)."""
    # Bound to q, see `blockwise`.
    q, sight, start = jax.lax.optimization_barrier((q, sight, jnp.int32(0)))
    T, N = q.shape[1], k.shape[2]
    first, row = start, sight
    if plan.axis is not None:
        first = start + jax.lax.axis_index(plan.axis) * T
        k, v, row = (gathered(x, plan.axis) for x in (k, v, sight))
    where = _where(plan, sight, row, first, q.shape[2] // N)
    k, v = (_query_blocks(x, plan.keys, N) for x in (k, v))
    return _query_blocks(q, plan.queries, N), k, v, where


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, q: Array, k: Array, v: Array, sight: Sight) -> Array:
    return _forward(plan, q, k, v, sight)[0]


def _forward(plan, q, k, v, sight):
    queries, keys, values, where = _given(plan, q, k, v, sight)
    B, N, blocks, Q, K = queries.shape
    call = _Call(plan, "attention_forward", _forward_kernel, where.visits, False, 2)
    out, lse = call(
        [
            ("queries", queries),
            ("keys", keys),
            ("keys", jnp.swapaxes(values, -1, -2)),
            ("queries, all heads", where.queries),
            ("keys, all heads", where.keys),
        ],
        [
            ("queries", jax.ShapeDtypeStruct((B, N, blocks, K, Q), q.dtype)),
            ("queries", jax.ShapeDtypeStruct((B, N, blocks, 1, Q), jnp.float32)),
        ],
        [(1, Q), (1, Q), (K, Q)],
    )
    out = _tokens(out, plan.queries, q.shape[1])
    return out, (q, k, v, sight, out, lse)


def _backward(plan, residuals, d_out):
    return *_pulled(plan, residuals, d_out), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pulled(plan: _Plan, residuals: tuple, d_out: Array) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v; linear in `d_out`."""
    q, k, v, sight, out, lse = residuals
    T = q.shape[1]
    queries, keys, values, where = _given(plan, q, k, v, sight)
    B, N, blocks, Q, K = queries.shape
    d_blocks, mean = (
        _query_blocks(x, plan.queries, N)
        for x in (
            d_out.astype(q.dtype),
            jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1),
        )
    )
    told = [
        ("queries", d_blocks),
        ("queries", lse),
        ("queries", mean[..., None, :]),
        ("queries, all heads", where.queries),
        ("keys, all heads", where.keys),
    ]
    call = _Call(plan, "attention_queries", _queries_kernel, where.visits, False, 3)
    (d_q,) = call(
        [
            ("queries", queries),
            ("keys", keys),
            ("keys", jnp.swapaxes(keys, -1, -2)),
            ("keys", values),
            *told,
        ],
        [("queries", jax.ShapeDtypeStruct((B, N, blocks, K, Q), q.dtype))],
        [(K, Q)],
    )
    call = _Call(plan, "attention_keys", _keys_kernel, where.visitors, True, 4)
    d_k, d_v = call(
        [("queries", queries), ("keys", keys), ("keys", values), *told],
        [("keys", jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (keys, values)],
        [(plan.keys, K)] * 2,
    )
    row = T if plan.axis is None else T * jax.lax.psum(1, plan.axis)
    d_k, d_v = (jnp.moveaxis(x.reshape(B, N, -1, K), 1, 2)[:, :row] for x in (d_k, d_v))
    if plan.axis is not None:
        d_k, d_v = (jax.lax.psum_scatter(x, plan.axis, scatter_dimension=1, tiled=True) for x in (d_k, d_v))
    return _tokens(d_q, plan.queries, T), d_k, d_v


def _pulled_forward(plan, residuals, d_out):
    return _pulled(plan, residuals, d_out), (residuals, d_out)


def _pulled_backward(plan, kept, directions):
    """The transpose of `_pulled`, by which trust regions push a direction forward: of `blockwise`, as kernels have none."""
    residuals, d_out = kept

    def pulled(d_out):
        q, k, v, sight, *_ = residuals
        return jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, sight, axis=plan.axis), q, k, v)[1](d_out)

    return None, jax.vjp(pulled, d_out)[1](directions)[0]


_pulled.defvjp(_pulled_forward, _pulled_backward)
_attention.defvjp(_forward, _backward)
