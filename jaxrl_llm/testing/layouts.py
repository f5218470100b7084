"""The same batch in other rows: parts of it, and several sequences to a row."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import TokenBatch

__all__ = [
    "change_fields",
    "pack",
    "rows",
]

Array = jax.Array


def change_fields(batch: TokenBatch, change: Callable[[Array], Array]) -> TokenBatch:
    """The batch with every [B, T, …] leaf changed."""
    shape = batch.shape
    return jax.tree.map(lambda x: change(x) if jnp.shape(x)[:2] == shape else x, batch)


def rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    """Rows start..stop of a batch."""
    return change_fields(batch, lambda x: x[start:stop])


def pack(batch: TokenBatch, width: int | None = None, *, trees: bool = False) -> TokenBatch:
    """The same sequences, several to a row: first fit, in order, into rows of `width` tokens (default 2 T).

    Args:
      batch: one sequence a row, right-padded, not prepared.
      trees: the untrained tokens that begin all sequences of a group are laid out once, before them, as a shared
        prefix (see `TokenBatch.segments`). The tokens are those of its first sequence.
    """
    lengths = np.asarray(jnp.sum(batch.segments > 0, axis=1))
    families = _families(batch, lengths) if trees else [(0, [row]) for row in range(len(lengths))]
    sizes = [shared + sum(int(lengths[row]) - shared for row in members) for shared, members in families]
    width = max([2 * batch.shape[1], *sizes]) if width is None else width
    bins: list[list[int]] = []
    free: list[int] = []
    for family, size in enumerate(sizes):
        home = next((i for i, space in enumerate(free) if space >= size), None)
        if home is None:
            bins.append([])
            free.append(width)
            home = len(bins) - 1
        bins[home].append(family)
        free[home] -= size
    source_row = np.zeros((len(bins), width), np.int32)
    source_column = np.zeros((len(bins), width), np.int32)
    segment = np.zeros((len(bins), width), np.int32)

    def lay_out(i: int, at: int, row: int, columns: np.ndarray, number: int) -> int:
        cells = slice(at, at + len(columns))
        source_row[i, cells], source_column[i, cells], segment[i, cells] = row, columns, number
        return at + len(columns)

    for i, chosen in enumerate(bins):
        at = number = 0
        # A sequence with a prompt of its own comes before the families: it must not see their prefix.
        for f in sorted(chosen, key=lambda f: families[f][0] > 0):
            shared, members = families[f]
            at = lay_out(i, at, members[0], np.arange(shared), -1 - f)
            for row in members:
                number += 1
                at = lay_out(i, at, row, np.arange(shared, int(lengths[row])), number)
    padding, own = jnp.asarray(segment == 0), jnp.asarray(segment > 0)

    def gather(x: Array, there: Array = own) -> Array:
        x = x[source_row, source_column]
        return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    packed = change_fields(batch, gather)
    return packed.replace(
        tokens=gather(batch.tokens, ~padding),
        positions=gather(batch.positions, ~padding),
        segments=jnp.asarray(segment),
        sequence=jnp.where(own, packed.sequence, -1),
    )


def _families(batch: TokenBatch, lengths: np.ndarray) -> list[tuple[int, list[int]]]:
    """(shared tokens, rows) of each group: what none of them trains, but for the token that predicts the first."""
    group, mask = np.asarray(batch.group)[:, 0], np.asarray(batch.mask)
    first = np.where(mask.any(axis=1), mask.argmax(axis=1), lengths)
    families = []
    for one in dict.fromkeys(group.tolist()):
        members = np.flatnonzero(group == one).tolist()
        families.append((max(0, int(first[members].min()) - 1) if len(members) > 1 else 0, members))
    return families
