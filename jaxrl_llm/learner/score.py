"""Log-probs without gradients, for the policies that an objective compares with: proximal and reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows, place_batch
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.logprobs import likeliest_tokens, policy_output
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.transforms.base import LossTransform, needs
from jaxrl_llm.types import LearnerState, TokenBatch

__all__ = ["Score", "ScoreLists", "fill_logprobs", "make_score", "make_score_lists", "topk_size"]

Array = jax.Array
Score = Callable[[Any, TokenBatch], Array]
ScoreLists = Callable[[Any, TokenBatch], TokenBatch]


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
        return jitted(params, place_batch(always_given(batch), mesh))[:rows]

    return score


def topk_size(objective: LossTransform) -> int:
    """K of the lists of tokens that an objective reads; 0 when it reads none."""
    sizes = [int(need.arguments.get("k", 0)) for need in needs(objective) if need.key == "batch.topk_ids"]
    return max(sizes, default=0)


def make_score_lists(
    config: ModelConfig,
    k: int,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int | None = None,
    chunk: int | None = None,
) -> ScoreLists:
    """score_lists(params, batch) -> batch with logprob_proximal, topk_ids and topk_logprob_proximal, in one pass.

    The lists are the k likeliest tokens of the policy at each trained token, likeliest first. Where the batch has
    lists already, they are kept and their log-probs are computed. The arguments are those of `make_score`.

    Raises:
      ValueError: k is not between 1 and the size of the vocabulary.
    """
    if not 1 <= k <= config.vocab_size:
        raise ValueError(
            f"k={k}: a list of the likeliest tokens holds between 1 and {config.vocab_size} tokens, the vocabulary "
            f"of the model."
        )
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)

    def run(params, batch):
        B = batch.shape[0]
        rows = micro_batch_rows or B
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)

        def one(slices):
            micro = rebuild(slices)
            if micro.topk_ids is None:
                return likeliest_tokens(params, config, micro, k, chunk=chunk, blocks=shards)
            out = policy_output(params, config, micro, topk=True, chunk=chunk, blocks=shards)
            return out.logprob, micro.topk_ids, out.topk_logprob

        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:B], jax.lax.map(one, split))

    jitted = jax.jit(run)

    def score_lists(params: Any, batch: TokenBatch) -> TokenBatch:
        rows = batch.shape[0]
        inputs = dataclasses.replace(always_given(batch), topk_ids=batch.topk_ids)
        logprob, ids, listed = (x[:rows] for x in jitted(params, place_batch(inputs, mesh)))
        return dataclasses.replace(
            batch, logprob_proximal=logprob, topk_ids=ids, topk_logprob_proximal=listed
        )

    return score_lists


def fill_logprobs(
    batch: TokenBatch,
    state: LearnerState,
    score: Score,
    needed: Collection[str],
    score_lists: ScoreLists | None = None,
) -> TokenBatch:
    """Fills the on-demand log-probs that an objective needs, and no others.

    Call it at the start of a train step, before the first update: proximal is the learner at that moment.
    A field that is already there is kept.

    Args:
      batch: not yet prepared.
      state: gives the current parameters and the reference.
      score: from `make_score`.
      needed: `needed_fields(objective)`.
      score_lists: from `make_score_lists`, when `topk_size(objective)` is not 0. It fills topk_logprob_proximal (and
        topk_ids, where the rollout gave none). topk_logprob_behavior can only come from the rollout.

    Raises:
      ValueError: the objective needs the reference and the state has none, or it needs a field that only the
        rollout can give and the batch does not have.
    """
    known = {name for name in needed if hasattr(batch, name)}
    lists = "topk_logprob_proximal" in known and batch.topk_logprob_proximal is None
    if lists and score_lists is not None:
        filled = score_lists(state.params, batch)
        if batch.logprob_proximal is not None:  # fixed at the start of the train step
            filled = dataclasses.replace(filled, logprob_proximal=batch.logprob_proximal)
        batch = filled
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


def always_given(batch: TokenBatch) -> TokenBatch:
    """Only the fields that are always there, so that filling another one causes no recompilation."""
    optional: dict[str, Any] = {
        field.name: None if field.default is None else {}
        for field in dataclasses.fields(batch)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    return dataclasses.replace(batch, **optional)
