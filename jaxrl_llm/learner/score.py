"""Log-probs without gradients, for the policies that an objective compares with: proximal and reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows, place_batch
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.logprobs import policy_output
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.types import LearnerState, TokenBatch

__all__ = ["Score", "fill_logprobs", "make_score"]

Array = jax.Array
Score = Callable[[Any, TokenBatch], Array]


def make_score(
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int | None = None,
    chunk: int | None = None,
) -> Score:
    """score(params, batch) -> f32[B, T]: log-probs of the trained tokens, 0 elsewhere.

    The same temperature as in training is applied. Parameters are an argument and never captured, so a new
    policy is scored without a new compilation.

    Args:
      config: of the model.
      mesh: rows are split over its data and fsdp axes; None = one device.
      micro_batch_rows: rows of one forward pass, a multiple of the shards of the rows; None = all rows.
      chunk: positions of a chunk of the head.
    """
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)

    def run(params, batch):
        B = batch.shape[0]
        rows = micro_batch_rows or B
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)

        def one(slices):
            return policy_output(params, config, rebuild(slices), chunk=chunk, blocks=shards).logprob

        out = jax.lax.map(one, split)
        return out.reshape(-1, out.shape[-1])[:B]

    jitted = jax.jit(run)

    def score(params: Any, batch: TokenBatch) -> Array:
        rows = batch.shape[0]
        return jitted(params, place_batch(_inputs(batch), mesh))[:rows]

    return score


def fill_logprobs(
    batch: TokenBatch, state: LearnerState, score: Score, needed: Collection[str]
) -> TokenBatch:
    """Fills the on-demand log-probs that an objective needs, and no others.

    Call it at the start of a train step, before the first update: proximal is the learner at that moment.
    A field that is already there is kept.

    Args:
      batch: not yet prepared.
      state: gives the current parameters and the reference.
      score: from `make_score`.
      needed: `needed_fields(objective)`.

    Raises:
      ValueError: the objective needs the reference and the state has none, or it needs a field that only the
        rollout can give and the batch does not have.
    """
    known = {name for name in needed if hasattr(batch, name)}
    if "logprob_proximal" in known and batch.logprob_proximal is None:
        batch = dataclasses.replace(batch, logprob_proximal=score(state.params, batch))
    if "logprob_reference" in known and batch.logprob_reference is None:
        if state.reference is None:
            raise ValueError(
                "fill_logprobs: the objective needs logprob_reference and the learner state keeps no reference. "
                "Create it with init_state(..., reference=True)."
            )
        batch = dataclasses.replace(batch, logprob_reference=score(state.reference, batch))
    missing = sorted(name for name in known if getattr(batch, name) is None)
    if missing:
        raise ValueError(
            f"fill_logprobs: the objective needs batch.{missing[0]}, which no scoring pass gives. "
            f"Fill it when the batch is made."
        )
    return batch


def _inputs(batch: TokenBatch) -> TokenBatch:
    """Only the fields that are always there, so that filling another one causes no recompilation."""
    optional: dict[str, Any] = {
        field.name: None if field.default is None else {}
        for field in dataclasses.fields(batch)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    return dataclasses.replace(batch, **optional)
