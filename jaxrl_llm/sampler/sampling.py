"""Drawing one token a row, and its log-prob under the very distribution it was drawn from.

Pure functions. Each row is computed from its own logits, key and position only, in an order of
additions that does not depend on what other rows ask for, so neighbours never change a draw.

Drawing inverts the cumulative distribution in two levels (first a block of the vocabulary, then a token
in it, each with its own uniform), which touches the logits once and never sorts them. Truncated rows
draw from a sorted list of candidates; see `_sorted_draw`.

**The contract of the log-prob.** It is that of the distribution that the token was drawn from, renormalised over
the tokens that truncation kept. Whoever computes it again needs these tokens, and cannot find them by itself: the
threshold of top-p lies between two neighbours of a sorted list, which other rounding may exchange. So a truncated
row can hand out its *support*, the ids that it chose among. The list has a limited length K; where truncation keeps
more, only the K best of them are drawn from, so that the list is always the whole support.
"""

from __future__ import annotations

import functools
import hashlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Draw", "RowSampling", "draw", "kept_tokens", "row_key"]

Array = jax.Array

BLOCK = 128  # vocabulary entries in a block of the two-level draw
CANDIDATES = 256  # sorted tokens that nearly every truncated row gets along with
IMPOSSIBLE = -1e4  # nats, of a listed token that cannot be drawn: finite, and its probability is 0 in f32


@flax.struct.dataclass(kw_only=True)
class RowSampling:
    """Sampling parameters of each row; the meaning is that of `SamplingParams`."""

    temperature: Array | np.ndarray  # f32[B], 0 = greedy
    top_k: Array | np.ndarray  # i32[B], 0 = off
    top_p: Array | np.ndarray  # f32[B], 1 = off
    min_p: Array | np.ndarray  # f32[B], 0 = off
    limit: (
        Array | np.ndarray
    )  # i32[B], most tokens that a truncated row keeps, so that they can be listed; 0 = off

    @property
    def truncated(self) -> Array | np.ndarray:
        """bool[B]."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @classmethod
    def uniform(cls, rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, limit=0) -> RowSampling:
        """The same parameters for every row."""
        return cls(
            temperature=np.full(rows, temperature, np.float32),
            top_k=np.full(rows, top_k, np.int32),
            top_p=np.full(rows, top_p, np.float32),
            min_p=np.full(rows, min_p, np.float32),
            limit=np.full(rows, limit, np.int32),
        )


@flax.struct.dataclass(kw_only=True)
class Draw:
    """One sampled token a row."""

    token: Array  # i32[B]
    logprob: Array  # f32[B], nats, under the distribution drawn from; raw for greedy rows
    raw_logprob: Array | None = None  # f32[B], under the unmodified softmax
    top_ids: Array | None = None  # i32[B, K], the likeliest allowed tokens, best first
    top_logprob: Array | None = (
        None  # f32[B, K], of the policy at the row's temperature, before any truncation
    )
    # i32[B, K], the tokens that a truncated row chose among, best first, then -1; all -1: the whole vocabulary
    support_ids: Array | None = None
    support_cut: Array | None = None  # bool[B], truncation had kept more than K


def row_key(seed: int, uid: str, index: int) -> np.ndarray:
    """u32[2]: key of the completion `index` of prompt `uid`; the position is folded in at every draw.

    A 64-bit stable hash, so it is the same in every process and on every platform.
    """
    text = f"{int(seed)}\x1f{int(index)}\x1f{uid}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4").astype(np.uint32)


def _uniforms(keys: Array, positions: Array) -> Array:
    """f32[B, 2] in [0, 1), a pure function of (key, position)."""

    def one(key, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(one)(keys, positions)


def _pick(weights: Array, cumulative: Array, target: Array) -> Array:
    """i32[B]: first i with cumulative[i] > target and weights[i] > 0; [B, n], [B, n], [B].

    A weight of zero is never picked, even where rounding makes `cumulative` not monotone or makes
    `target` reach its end.
    """
    positive = weights > 0
    hit = positive & (cumulative > target[:, None])
    n = weights.shape[1]
    last = n - 1 - jnp.argmax(positive[:, ::-1], axis=1)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), last).astype(jnp.int32)


def _take(x: Array, index: Array) -> Array:
    """x[b, index[b]] of [B, n, ...]."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def _log_sum_exp(logits: Array) -> Array:
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1)) + top[:, 0]


def _blocked_cumsum(x: Array) -> Array:
    """Cumulative sums along the last axis in blocks of `CANDIDATES`.

    The first block's sums are the same bits whatever the length of x: what makes a row's draw independent
    of whether a neighbour needed the long list.
    """
    B, n = x.shape
    if n <= CANDIDATES:
        return jnp.cumsum(x, axis=1)
    padded = jnp.pad(x, ((0, 0), (0, -n % CANDIDATES))).reshape(B, -1, CANDIDATES)
    inner = jnp.cumsum(padded, axis=2)
    before = jnp.cumsum(inner[:, :, -1], axis=1) - inner[:, :, -1]
    before = jnp.concatenate([jnp.zeros((B, 1), x.dtype), before[:, 1:]], axis=1)
    return (inner + before[:, :, None]).reshape(B, -1)[:, :n]


def _kept_count(values: Array, cumulative: Array, total: Array, rows: RowSampling, vocab: int) -> Array:
    """i32[B]: how many of the best tokens survive top-k, top-p and min-p. At least one.

    Args:
      values: f32[B, n], tempered logits sorted in descending order.
      cumulative: f32[B, n], running sum of exp(values - values[:, :1]).
      total: f32[B], that sum over the whole vocabulary.
    """
    n = values.shape[1]
    rank = jnp.arange(n)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    mass = jnp.where(k < vocab, _take(cumulative, jnp.minimum(k, n) - 1), total)
    before = jnp.concatenate([jnp.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], axis=1)
    # A token is kept while the mass before it has not reached top_p. The tolerance is that of f32 sums:
    # without it rounding would add a token where the mass equals top_p exactly.
    reached = before >= (rows.top_p * mass * (1 - 1e-6))[:, None]
    kept = rank < k[:, None]
    kept &= ~reached | (rows.top_p >= 1)[:, None]
    kept &= values - values[:, :1] >= jnp.log(rows.min_p)[:, None]
    kept &= values > -jnp.inf
    kept |= rank == 0
    return jnp.sum(kept, axis=1)


def _sorted_draw(z: Array, total: Array, uniform: Array, rows: RowSampling, n: int, support: int = 0):
    """(token, logprob, complete, support ids, cut) of truncated rows from the n best tokens.

    The kept set is always a prefix of the tokens in descending order (ties by id), no longer than the row's limit, of
    which n must be larger (or the vocabulary). `complete` bool[B] says that n tokens were enough to know
    the set. Support ids i32[B, support] end with -1; they and `cut` bool[B] are None without `support`.
    """
    V = z.shape[1]
    values, ids = jax.lax.top_k(z, n)
    weights = jnp.exp(values - values[:, :1])
    cumulative = _blocked_cumsum(weights)
    count = _kept_count(values, cumulative, total, rows, V)
    # top-p asks for a share of what top-k leaves, so that a long top-k must be there as a whole.
    known = (rows.top_k <= n) | (rows.top_k >= V) | (rows.top_p >= 1)
    ids_kept = cut = None
    if support:
        listed = rows.limit > 0
        cut = listed & (count > rows.limit)
        count = jnp.where(cut, rows.limit, count)
        inside = listed[:, None] & (jnp.arange(support) < count[:, None])
        ids_kept = jnp.where(inside, ids[:, :support], -1).astype(jnp.int32)
    complete = (known & (count < n)) | ((rows.top_k > 0) & (rows.top_k <= n)) | (n == V)
    mass = _take(cumulative, count - 1)
    kept = jnp.where(jnp.arange(n) < count[:, None], weights, 0.0)
    choice = _pick(kept, cumulative, uniform * mass)
    logprob = _take(values, choice) - values[:, 0] - jnp.log(mass)
    return _take(ids, choice).astype(jnp.int32), logprob, complete, ids_kept, cut


def draw(
    logits: Array,
    keys: Array | None,
    positions: Array | None,
    rows: RowSampling,
    *,
    forbidden: Array | None = None,
    bias: Array | None = None,
    truncate: bool = True,
    raw: bool = False,
    top: int = 0,
    support: int = 0,
    given: Array | None = None,
) -> Draw:
    """Samples one token a row, or gives the log-prob that a given token would have been recorded with.

    Args:
      logits: f32[B, V].
      keys: u32[B, 2] of `row_key`.
      positions: i32[B], position of the token to be drawn in its sequence.
      rows: sampling parameters.
      forbidden: bool[B, V] (or broadcastable), tokens that must not be drawn, or None.
      bias: f32[B, V] (or broadcastable), added to the logits before the temperature, or None.
      truncate: static; False promises that no row asks for top-k, top-p or min-p.
      raw: static; also return raw log-probs.
      top: static; also list the so many likeliest allowed tokens. 0 costs nothing.
      support: static, K; with `truncate`, also give the support of truncated rows that have a limit, and draw from no
        more than that. At least every limit, at most V; 0 promises that no row has one, and costs nothing.
      given: i32[B], tokens that were drawn before; nothing is drawn then (`keys` and `positions` are not read).
        Only with truncate=False.

    Greedy rows take the best allowed token (the lowest id among equals) and report its raw log-prob.
    """
    B, V = logits.shape
    if given is not None and truncate:
        raise ValueError("draw: log-probs of given tokens under a truncated distribution are not computed.")
    greedy = rows.temperature <= 0
    z = logits if bias is None else logits + bias
    z = z / jnp.where(greedy, 1.0, rows.temperature)[:, None].astype(logits.dtype)
    if forbidden is not None:
        z = jnp.where(forbidden, -jnp.inf, z)
    # What neighbours ask for makes this another program, which must not round this row's sums in another way.
    z = jax.lax.optimization_barrier(z)
    blocks = jnp.pad(z, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(B, -1, BLOCK)
    block_best = jnp.max(blocks, axis=2)
    best = jnp.max(block_best, axis=1)
    block_mass = jnp.sum(jnp.exp(blocks - best[:, None, None]), axis=2)
    cumulative = jnp.cumsum(block_mass, axis=1)
    total = cumulative[:, -1]

    if given is None:
        if keys is None or positions is None:
            raise ValueError("draw: keys and positions are needed to draw tokens; or give the tokens.")
        uniform = _uniforms(keys, positions)
        block = _pick(block_mass, cumulative, uniform[:, 0] * total)
        block = jnp.where(greedy, jnp.argmax(block_best, axis=1), block)
        inner = _take(blocks, block)
        weights = jnp.exp(inner - best[:, None])
        cumulative = jnp.cumsum(weights, axis=1)
        place = _pick(weights, cumulative, uniform[:, 1] * cumulative[:, -1])
        place = jnp.where(greedy, jnp.argmax(inner, axis=1), place)
    else:
        block, place = given // BLOCK, given % BLOCK
        inner = _take(blocks, block)
    token = (block * BLOCK + place).astype(jnp.int32)
    logprob = _take(inner, place) - best - jnp.log(total)

    support_ids = support_cut = None
    if truncate:
        few = min(max(CANDIDATES, support + 1), V)
        short = _sorted_draw(z, total, uniform[:, 0], rows, few, support)
        enough = jnp.all(short[2] | ~rows.truncated)
        full = functools.partial(_sorted_draw, n=V, support=support)
        sorted_token, sorted_logprob, _, support_ids, support_cut = jax.lax.cond(
            enough, lambda *_: short, full, z, total, uniform[:, 0], rows
        )
        token = jnp.where(rows.truncated, sorted_token, token)
        logprob = jnp.where(rows.truncated, sorted_logprob, logprob)
        if support:
            support_ids = jnp.where(rows.truncated[:, None], support_ids, -1)
            support_cut = rows.truncated & support_cut

    top_ids = top_logprob = None
    if top:
        listed, top_ids = jax.lax.top_k(z, top)
        top_logprob = jnp.maximum(listed - best[:, None] - jnp.log(total)[:, None], IMPOSSIBLE)

    raw_logprob = None
    if raw or forbidden is not None or bias is not None:
        raw_logprob = _take(logits, token) - _log_sum_exp(jax.lax.optimization_barrier(logits))
        # A greedy row with the logits of the model has its raw log-prob already, in the bits of any other program.
        changed = jnp.any(z != logits, axis=1)
        logprob = jnp.where(greedy & changed, raw_logprob, logprob)
    return Draw(
        token=token,
        logprob=logprob.astype(jnp.float32),
        raw_logprob=raw_logprob.astype(jnp.float32) if raw and raw_logprob is not None else None,
        top_ids=None if top_ids is None else top_ids.astype(jnp.int32),
        top_logprob=None if top_logprob is None else top_logprob.astype(jnp.float32),
        support_ids=support_ids,
        support_cut=support_cut,
    )


def kept_tokens(logits: Array, rows: RowSampling, forbidden: Array | None = None) -> Array:
    """bool[B, V]: the support of the distribution that `draw` samples from (of greedy rows: everything).

    Sorts the vocabulary; for tests, and for whoever needs the support of another policy.
    """
    V = logits.shape[1]
    temperature = jnp.asarray(rows.temperature)
    z = logits / jnp.where(temperature <= 0, 1.0, temperature)[:, None].astype(logits.dtype)
    if forbidden is not None:
        z = jnp.where(forbidden, -jnp.inf, z)
    values, ids = jax.lax.top_k(z, V)
    weights = jnp.exp(values - values[:, :1])
    total = jnp.sum(weights, axis=1)
    count = _kept_count(values, _blocked_cumsum(weights), total, rows, V)
    count = jnp.where(rows.limit > 0, jnp.minimum(count, rows.limit), count)
    count = jnp.where(rows.truncated, count, V)
    kept = (jnp.arange(V) < count[:, None]) & (values > -jnp.inf)
    return jnp.zeros(z.shape, bool).at[jnp.arange(z.shape[0])[:, None], ids].set(kept)
