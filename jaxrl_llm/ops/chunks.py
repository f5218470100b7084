"""Positions of a batch in chunks: the wanted ones first, and only the chunks that hold one of them are visited.

What is as large as the vocabulary (logits, their derivatives) exists for one chunk at a time.

The loop has a trip count that is known when the program runs, and no branch for each chunk: on a mesh nothing has
to be agreed on inside of it.

Local names: R row blocks (one per shard of the rows, 1 on a single device), M positions of a block, C
positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Chunks"]

Array = jax.Array


def _take(x: Array, index_RM: Array) -> Array:
    """x [R, M, ...] permuted along M."""
    return jnp.take_along_axis(x, index_RM.reshape(*index_RM.shape, *(1,) * (x.ndim - 2)), axis=1)


class Chunks(NamedTuple):
    """How the positions of row blocks are cut: within a block the active ones first, then C at a time."""

    order: Array  # i32[R, M], the position at each place
    inverse: Array  # i32[R, M], the place of each position
    needed: Array  # i32[], chunks until no block has an active position left
    size: int  # C

    @classmethod
    def of(cls, active_RM: Array, size: int) -> Chunks:
        """Active positions keep their order. `size` need not divide M."""
        order = jnp.argsort(~active_RM, axis=1, stable=True)
        most = jnp.max(jnp.sum(active_RM, axis=1, dtype=jnp.int32))
        return cls(order, jnp.argsort(order, axis=1, stable=True), (most + size - 1) // size, size)

    def cut(self, tree: Any) -> Any:
        """[R, M, ...] -> [chunks, R, C, ...] of each array; the last chunk is filled up with zeros."""
        R, M = self.order.shape

        def one(x):
            x = _take(x, self.order)
            if M % self.size:
                x = jnp.pad(x, ((0, 0), (0, -M % self.size), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(R, -1, self.size, *x.shape[2:]), 1, 0)

        return jax.tree.map(one, tree)

    def join(self, tree: Any) -> Any:
        """[chunks, R, C, ...] -> [R, M, ...] of each array."""
        R, M = self.order.shape

        def one(x):
            x = jnp.moveaxis(x, 0, 1)
            return _take(x.reshape(R, -1, *x.shape[3:])[:, :M], self.inverse)

        return jax.tree.map(one, tree)

    def fold(self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Any) -> tuple[Any, Any]:
        """(carry, outputs) of step(carry, chunk of inputs) -> (carry, chunk of outputs), one chunk after the other.

        Outputs of chunks without an active position are zeros; `step` does not run for them. Not differentiable.

        Args:
          step: its arrays are those of `inputs` without the first axis.
          carry: given to the first step.
          inputs: a tree of arrays [chunks, ...], see `cut`.
        """
        chunks = -(-self.order.shape[1] // self.size)

        def at(i):
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), inputs)

        shapes = jax.eval_shape(lambda: step(carry, at(0))[1])
        outputs = jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), shapes)

        def body(state):
            i, carry, outputs = state
            carry, new = step(carry, at(i))
            put = jax.lax.dynamic_update_index_in_dim
            return i + 1, carry, jax.tree.map(lambda x, part: put(x, part, i, 0), outputs, new)

        # The second bound never acts; it tells whoever reads the program (`planning.hlo`) how long the loop can be.
        state = (jnp.int32(0), carry, outputs)
        return jax.lax.while_loop(lambda state: (state[0] < self.needed) & (state[0] < chunks), body, state)[
            1:
        ]
