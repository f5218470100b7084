"""Log-probs without gradients, for the policies that an objective compares with: proximal, reference and teacher.

All are taken at the temperature of the sampler and, where top-k, top-p or min-p acted, over the recorded tokens that each
token was drawn from (`TokenBatch.support_ids`): of every policy the same softmax, so that a ratio compares like with like.
Lists of likeliest tokens and divergences over the vocabulary are of the whole distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows, place_batch
from jaxrl_llm.losses.divergences import Divergence
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import on_mesh
from jaxrl_llm.ops.logprobs import hidden_states, likeliest_tokens, policy_output
from jaxrl_llm.parallel.mesh import BATCH_AXES, batch_shards
from jaxrl_llm.parallel.offload import fetched
from jaxrl_llm.parallel.rules import layout_of
from jaxrl_llm.transforms.base import LossTransform, needs
from jaxrl_llm.types import LearnerState, TokenBatch

__all__ = [
    "Score",
    "ScoreLists",
    "TeacherNeeds",
    "fill_logprobs",
    "make_score",
    "make_score_lists",
    "make_score_teacher",
    "teacher_needs",
    "topk_size",
]

Array = jax.Array
Score = Callable[[Any, TokenBatch], Array]
ScoreLists = Callable[[Any, TokenBatch], TokenBatch]


def _by_rows(
    one: Callable[[Any, TokenBatch], Any], mesh: Mesh | None, micro_batch_rows: int | None
) -> Callable[[Any, TokenBatch], Any]:
    """run(params, batch), jitted: `one(params, micro-batch)`, the rows of its results put together again."""

    def run(params, batch):
        params = fetched(params)
        B = batch.shape[0]
        rows = micro_batch_rows or B
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)
        out = jax.lax.map(lambda slices: one(params, rebuild(slices)), split)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:B], out)

    return jax.jit(run)


def make_score(
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int | None = None,
    chunk: int | None = None,
) -> Score:
    """score(params, batch) -> f32[B, T]: log-probs of the trained tokens, 0 elsewhere.

    The temperature and the support of the sampler are applied, as in training. Parameters are an argument and never captured, so a new
    policy is scored without a new compilation.

    Args:
      config: of the model.
      mesh: rows are split over its data and fsdp axes; None = one device.
      micro_batch_rows: rows of one forward pass, a multiple of the shards of the rows; None = all rows.
      chunk: positions of a chunk of the head.
    """
    config = on_mesh(config, mesh, BATCH_AXES)
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)

    def one(params, micro):
        return policy_output(
            params, config, micro, chunk=chunk, blocks=shards, layout=layout_of(mesh)
        ).logprob

    jitted = _by_rows(one, mesh, micro_batch_rows)

    def score(params: Any, batch: TokenBatch) -> Array:
        rows = batch.shape[0]
        return jitted(params, place_batch(_read_by_head(batch), mesh))[:rows]

    return score


def topk_size(objective: LossTransform) -> int:
    """K of the lists of tokens that an objective reads; 0 when it reads none."""
    sizes = [int(need.arguments.get("k", 0)) for need in needs(objective) if need.key == "batch.topk_ids"]
    return max(sizes, default=0)


def _check_list(config: ModelConfig, k: int) -> None:
    if not 1 <= k <= config.vocab_size:
        raise ValueError(
            f"k={k}: a list of the likeliest tokens holds between 1 and {config.vocab_size} tokens, the vocabulary "
            f"of the model."
        )


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
    _check_list(config, k)
    config = on_mesh(config, mesh, BATCH_AXES)
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)

    def one(params, micro):
        return _listed(params, config, micro, k, chunk, mesh)

    jitted = _by_rows(one, mesh, micro_batch_rows)

    def score_lists(params: Any, batch: TokenBatch) -> TokenBatch:
        rows = batch.shape[0]
        inputs = dataclasses.replace(_read_by_head(batch), topk_ids=batch.topk_ids)
        logprob, ids, listed = (x[:rows] for x in jitted(params, place_batch(inputs, mesh)))
        return dataclasses.replace(
            batch, logprob_proximal=logprob, topk_ids=ids, topk_logprob_proximal=listed
        )

    return score_lists


def _listed(
    params: Any, config: ModelConfig, batch: TokenBatch, k: int, chunk: int | None, mesh: Mesh | None
) -> tuple[Array, Array, Array]:
    """(log-prob of each token, ids of a list of others, their log-probs): the batch's own list, else the likeliest."""
    blocks, layout = batch_shards(mesh), layout_of(mesh)
    if batch.topk_ids is None:
        return likeliest_tokens(params, config, batch, k, chunk=chunk, blocks=blocks, layout=layout)
    out = policy_output(params, config, batch, topk=True, chunk=chunk, blocks=blocks, layout=layout)
    assert out.topk_logprob is not None  # it was asked for
    return out.logprob, batch.topk_ids, out.topk_logprob


# ------------------------------------------------------------------------------------------ teacher


class TeacherNeeds(NamedTuple):
    """What an objective reads of a teacher; falsy when it is nothing."""

    logprob: bool  # of the sampled tokens
    k: int  # size of the lists of its likeliest tokens, 0 = none
    divergence: Divergence | None  # over the whole vocabulary

    def __bool__(self) -> bool:
        return self.logprob or bool(self.k) or self.divergence is not None


def teacher_needs(objective: LossTransform) -> TeacherNeeds:
    """What an objective reads of a teacher.

    Raises:
      ValueError: it reads two divergences over the vocabulary, or lists of the likeliest tokens of a teacher and of
        another policy: a batch holds one of each.
    """
    found = needs(objective)
    fields = {need.field for need in found if need.record == "batch"}
    divergences = sorted(
        {
            Divergence(need.arguments.get("kind", "forward"), float(need.arguments.get("beta", 0.5)))
            for need in found
            if need.key == "loss.divergence"
        }
    )
    if len(divergences) > 1:
        shown = " and ".join(f"kind={d.kind!r}, beta={d.beta:g}" for d in divergences)
        raise ValueError(
            f"the objective reads two divergences from the teacher over the vocabulary ({shown}), and a forward pass "
            'gives one. Keep one of them, or take the other over="topk".'
        )
    listed = "topk_logprob_teacher" in fields
    others = sorted(fields & {"topk_logprob_behavior", "topk_logprob_proximal"})
    if listed and others:
        raise ValueError(
            f"the objective reads topk_logprob_teacher, over the teacher's likeliest tokens, and {others[0]}, over those "
            'of another policy; a batch holds one list a token. Take the teacher over="vocabulary".'
        )
    return TeacherNeeds(
        "logprob_teacher" in fields,
        max(topk_size(objective), 1) if listed else 0,
        divergences[0] if divergences else None,
    )


def make_score_teacher(
    config: ModelConfig,
    wanted: TeacherNeeds,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int | None = None,
    chunk: int | None = None,
) -> ScoreLists:
    """score_teacher(params, batch) -> batch with what is wanted of the teacher with these parameters.

    logprob_teacher f32[B, T]; topk_ids and topk_logprob_teacher [B, T, K], its likeliest tokens (or its log-probs at the
    lists that the batch has); hidden_teacher [B, T, E], from which the update takes a divergence over the vocabulary.
    The temperature is that of training. The arguments are those of `make_score`, `config` is the teacher's.

    Raises:
      ValueError: the lists are larger than the vocabulary.
    """
    if wanted.k:
        _check_list(config, wanted.k)
    config = on_mesh(config, mesh, BATCH_AXES)
    shards, layout = batch_shards(mesh), layout_of(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)

    def one(params, micro):
        out = {}
        if wanted.k:
            logprob, ids, listed = _listed(params, config, micro, wanted.k, chunk, mesh)
            out = {"topk_ids": ids, "topk_logprob_teacher": listed, "logprob_teacher": logprob}
        elif wanted.logprob:
            given = policy_output(params, config, micro, chunk=chunk, blocks=shards, layout=layout)
            out = {"logprob_teacher": given.logprob}
        if wanted.divergence is not None:
            out["hidden_teacher"] = hidden_states(params, config, micro, layout)
        return out

    jitted = _by_rows(one, mesh, micro_batch_rows)

    def score_teacher(params: Any, batch: TokenBatch) -> TokenBatch:
        rows = batch.shape[0]
        topk = batch.topk_ids if wanted.k else None
        inputs = dataclasses.replace(_read_by_head(batch), topk_ids=topk, routing_ids=None)
        return dataclasses.replace(
            batch, **{name: x[:rows] for name, x in jitted(params, place_batch(inputs, mesh)).items()}
        )

    return score_teacher


def fill_logprobs(
    batch: TokenBatch,
    state: LearnerState,
    score: Score,
    needed: Collection[str],
    score_lists: ScoreLists | None = None,
    teach: Callable[[TokenBatch], TokenBatch] | None = None,
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
      teach: from `make_score_teacher`, bound to the parameters of the teacher, when `teacher_needs(objective)`.

    Raises:
      ValueError: the objective needs the reference and the state has none, or it needs a field that only the
        rollout can give and the batch does not have.
    """
    known = {name for name in needed if hasattr(batch, name)}
    if teach is not None:
        filled = teach(batch)
        kept = {
            name: x
            for name in ("logprob_teacher", "topk_logprob_teacher")
            if (x := getattr(batch, name)) is not None
        }
        batch = dataclasses.replace(filled, **kept)
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
        # The experts of the sampler's policy are not those of another one.
        free = dataclasses.replace(batch, routing_ids=None)
        batch = dataclasses.replace(batch, logprob_reference=score(state.reference, free))
    missing = sorted(name for name in known if getattr(batch, name) is None)
    if missing:
        raise ValueError(
            f"fill_logprobs: the objective needs batch.{missing[0]}, which no scoring pass gives. "
            f"Fill it when the batch is made."
        )
    return batch


def _read_by_head(batch: TokenBatch) -> TokenBatch:
    """`always_given`, and the support and the routing, which are part of what a log-prob is."""
    return dataclasses.replace(
        always_given(batch), support_ids=batch.support_ids, routing_ids=batch.routing_ids
    )


def always_given(batch: TokenBatch) -> TokenBatch:
    """Only the fields that are always there, so that filling another one causes no recompilation."""
    optional: dict[str, Any] = {
        field.name: None if field.default is None else {}
        for field in dataclasses.fields(batch)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    return dataclasses.replace(batch, **optional)
