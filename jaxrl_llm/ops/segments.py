"""Sums over the sequences, trajectories and groups of a batch.

Two kinds, because two clocks need them:

* *Row-local*: a sequence is a contiguous span of one row, so its sum never leaves the row. Ids are global
  and arbitrary; runs of equal ids are numbered within the row. Right for any subset of rows, hence allowed
  in `apply`.
* *Batch-wide*: a trajectory may be several sequences, even in several rows, and a group is a set of
  trajectories. Ids are arbitrary integers; they are made dense by sorting. Allowed in `prepare` only.

All functions take and return per-token arrays [B, T] and work under `jit`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, quotient

__all__ = [
    "Groups",
    "Members",
    "Trajectories",
    "following",
    "group_sum",
    "groups",
    "last_token",
    "members",
    "sequence_max",
    "sequence_mean",
    "sequence_runs",
    "sequence_sum",
    "suffix_scan",
    "trajectories",
    "trajectory_sum",
]

Array = jax.Array


# -------------------------------------------------------------------------------------- row-local


def sequence_runs(sequence: Array) -> Array:
    """i32[B, T]: the number, within its row, of the run of equal ids that a token belongs to."""
    starts = sequence[:, 1:] != sequence[:, :-1]
    return jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def sequence_sum(values: Array, sequence: Array) -> Array:
    """Σ over the tokens of a sequence, at each of them. values f32[B, T], already zero where masked."""
    runs, width = sequence_runs(sequence), sequence.shape[1]

    def row(x, run):
        return jax.ops.segment_sum(x, run, num_segments=width, indices_are_sorted=True)[run]

    return jax.vmap(row)(values, runs)


def sequence_mean(values: Array, sequence: Array, mask: Array) -> Array:
    """Mean over the masked tokens of a sequence, at each token of it; 0 where it has none."""
    total = sequence_sum(keep(mask, values), sequence)
    return quotient(total, sequence_sum(mask.astype(total.dtype), sequence))


def sequence_max(values: Array, sequence: Array, mask: Array) -> Array:
    """Maximum over the masked tokens of a sequence, at each token of it; -inf where it has none."""
    runs, width = sequence_runs(sequence), sequence.shape[1]

    def row(x, run):
        return jax.ops.segment_max(x, run, num_segments=width, indices_are_sorted=True)[run]

    return jax.vmap(row)(jnp.where(mask, values, -jnp.inf), runs)


# ------------------------------------------------------------------------------------- batch-wide


def _dense(ids: Array) -> Array:
    """i32[B, T]: arbitrary ids renumbered 0..k-1."""
    size = ids.size
    return jnp.unique(ids.reshape(-1), return_inverse=True, size=size)[1].reshape(ids.shape).astype(jnp.int32)


def _sum(values: Array, dense: Array) -> Array:
    """f[N]: Σ of values [B, T] by dense id; N = B·T, a static bound on the number of ids."""
    return jnp.zeros((values.size,), values.dtype).at[dense].add(values)


def trajectory_sum(values: Array, trajectory: Array) -> Array:
    """Σ over the tokens of a trajectory, at each of them. values already zero where masked."""
    dense = _dense(trajectory)
    return _sum(values, dense)[dense]


def group_sum(values: Array, group: Array) -> Array:
    """Σ over the tokens of a group, at each of them. values already zero where masked."""
    return trajectory_sum(values, group)


class Trajectories(NamedTuple):
    """One entry for each trajectory, in arrays of the static length N = B·T; unused entries are empty."""

    entry: Array  # i32[B, T], entry of each token
    length: Array  # f32[N], trained tokens; 0 = not a trajectory, or nothing of it is trained
    present: Array  # bool[N], length > 0
    last: Array  # bool[B, T], its last trained token: a sum over these counts each trajectory once

    def sum(self, values: Array, mask: Array) -> Array:
        """f[N]: Σ over the masked tokens of each trajectory."""
        return _sum(keep(mask, values), self.entry)

    def any(self, flags: Array, mask: Array) -> Array:
        """bool[N]: whether any masked token of the trajectory carries the flag."""
        return _sum((flags & mask).astype(jnp.int32), self.entry) > 0

    def spread(self, values: Array) -> Array:
        """[B, T]: the value of its trajectory at each token."""
        return values[self.entry]


def trajectories(trajectory: Array, mask: Array) -> Trajectories:
    """The trajectories that have at least one masked token. Ids are arbitrary, in any rows."""
    index = _dense(trajectory)
    length = _sum(mask.astype(jnp.result_type(float)), index)
    return Trajectories(index, length, length > 0, _last(index, mask))


class Members(NamedTuple):
    """Which group each trajectory belongs to; totals over the valid trajectories of a group, at each of them."""

    of: Array  # i32[N], group of each trajectory entry
    valid: Array  # bool[N], trajectories that enter

    def sum(self, values: Array) -> Array:
        """f[N]: Σ over the valid trajectories of the group."""
        return jnp.zeros_like(values).at[self.of].add(keep(self.valid, values))[self.of]

    def max(self, values: Array) -> Array:
        """f[N]: maximum over the valid trajectories of the group; -inf where it has none."""
        values = jnp.where(self.valid, values, -jnp.inf)
        return jnp.full_like(values, -jnp.inf).at[self.of].max(values)[self.of]

    def min(self, values: Array) -> Array:
        """f[N]: minimum over the valid trajectories of the group; inf where it has none."""
        return -self.max(-values)


def members(valid: Array, group: Array, mask: Array, each: Trajectories) -> Members:
    """The groups of the trajectories: arguments as of `groups`."""
    # The group of a trajectory: the group of its trained tokens (prompt and padding ids do not matter).
    of = jnp.zeros(valid.shape, jnp.int32).at[each.entry].max(jnp.where(mask, _dense(group), 0))
    return Members(of, valid & each.present)


class Groups(NamedTuple):
    """Statistics of a value over the trajectories of each group, each trajectory counted once.

    Only trajectories with `valid` enter; arrays are indexed by trajectory entry [N].
    """

    size: Array  # f[N], valid trajectories in the group
    mean: Array  # f[N]
    deviation: Array  # f[N], value - mean; exactly 0 where the group is constant
    square: Array  # f[N], Σ deviation² of the group
    constant: Array  # bool[N], all valid values are equal (a group of one is constant), or none is valid


def groups(values: Array, valid: Array, group: Array, mask: Array, each: Trajectories) -> Groups:
    """Statistics over groups.

    Args:
      values: f[N], one value a trajectory.
      valid: bool[N], trajectories that enter the statistics.
      group: i32[B, T] ids, constant over a trajectory.
      mask: bool[B, T], trained tokens.
      each: from `trajectories`.

    Whether a group is constant is decided by max == min and not by a small standard deviation: the f32 mean
    of [0.3] * 8 is off by one unit in the last place, and dividing such a residue by itself gives O(1).
    """
    of = members(valid, group, mask, each)
    values = keep(of.valid, values)
    count = of.sum(jnp.ones_like(values))
    mean = quotient(of.sum(values), count)
    highest, lowest = of.max(values), of.min(values)
    constant = (highest <= lowest) | (count == 0)
    mean = jnp.where(constant, jnp.where(count > 0, highest, 0.0), mean)  # exact, not rounded
    deviation = jnp.where(of.valid & ~constant, values - mean, 0.0)
    return Groups(
        size=count,
        mean=mean,
        deviation=deviation,
        square=of.sum(deviation**2),
        constant=constant,
    )


def _last(dense: Array, mask: Array) -> Array:
    place = jnp.arange(mask.size, dtype=jnp.int32).reshape(mask.shape)
    last = jnp.full((mask.size,), -1, jnp.int32).at[dense].max(jnp.where(mask, place, -1))
    return mask & (place == last[dense])


def last_token(ids: Array, mask: Array) -> Array:
    """bool[B, T]: the last masked token, in row-major order, of each trajectory or group."""
    return _last(_dense(ids), mask)


def suffix_scan(values: Array, factors: Array, trajectory: Array, mask: Array) -> Array:
    """y_t = x_t + f_t · y_next over the masked tokens of each trajectory, from its end backwards.

    Tokens outside the mask are skipped: y crosses them unchanged, and y is 0 at them. A trajectory may be
    several sequences in several rows; they follow each other in row-major order.

    Args:
      values, factors: f32[B, T]; factors multiply the y of the next masked token.
    """
    return _scan_back(values, factors, trajectory, mask)[0]


def following(values: Array, trajectory: Array, mask: Array, end: Array) -> Array:
    """The value at the next masked token of the trajectory, at each masked token; `end` at its last one.

    Args:
      values, end: f32[B, T]. `end` is read at the last masked token of each trajectory only.
    """
    last = last_token(trajectory, mask)
    after = _scan_back(values, jnp.zeros_like(values), trajectory, mask)[1]
    return jnp.where(last, end, after)


def _scan_back(values: Array, factors: Array, trajectory: Array, mask: Array) -> tuple[Array, Array]:
    """(y, y of the next masked token) of `suffix_scan`, both 0 outside the mask."""
    ids = trajectory.reshape(-1)
    order = jnp.argsort(ids, stable=True)  # brings a trajectory together, its tokens in row-major order
    ids = ids[order]
    ends = jnp.concatenate([ids[1:] != ids[:-1], jnp.ones((1,), bool)])
    on = mask.reshape(-1)[order]
    x = keep(on, values.reshape(-1)[order])
    # A masked-out token hands on what comes after it (factor 1); the last of a trajectory hands on nothing.
    f = jnp.where(ends, 0.0, jnp.where(on, factors.reshape(-1)[order], 1.0)).astype(x.dtype)

    def combine(later, earlier):
        f_later, x_later = later
        f_earlier, x_earlier = earlier
        return f_earlier * f_later, x_earlier + f_earlier * x_later

    _, y = jax.lax.associative_scan(combine, (f, x), reverse=True)
    after = jnp.where(ends, 0.0, jnp.concatenate([y[1:], jnp.zeros((1,), y.dtype)]))
    y, after = keep(on, y), keep(on, after)
    zeros = jnp.zeros_like(y)
    return (
        zeros.at[order].set(y).reshape(values.shape),
        zeros.at[order].set(after).reshape(values.shape),
    )
