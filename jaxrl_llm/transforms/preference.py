"""Preferences: losses of pairs of answers to one prompt.

The chosen answer of pair i is row 2i of the batch, the rejected one row 2i + 1, one sequence a row; micro-batches
hold whole pairs (`micro_batch_rows` is even). A pair's loss is not a sum over its tokens, but it fits the same
formula: each stage writes the value of the pair at every token of both rows, and `normalize_by_pair` gives each
of these tokens the share of its row, so that

    loss = Σ norm · weight · policy / Σ count = mean over pairs.

h = Σ_t log π/π_ref of the chosen answer - the same of the rejected one. Sums over an answer may be thousands of
nats; nothing here exponentiates them, so they are not clipped. A pair with an empty side counts nowhere.

`kto_preference` judges each answer by itself: it also takes answers with a label and no partner (batch.desirable),
several to a row and split anywhere.

All stages log, by pair: `pair_accuracy` (the policy's own reward prefers the chosen answer), `pair_margin`,
`reward_chosen`, `reward_rejected`; the reward is β Σ log π/π_ref (without a reference β Σ log π, or its mean).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import preference
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import sequence_max, sequence_sum, trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, Parts, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.normalize import READS, WRITES, counted
from jaxrl_llm.types import LossState, TokenBatch

__all__ = [
    "hinge_preference",
    "imitate_chosen",
    "kto_preference",
    "logistic_preference",
    "normalize_by_pair",
    "odds_preference",
    "robust_preference",
    "score_preference",
    "square_preference",
    "takes_labels",
    "takes_pairs",
]

Array = jax.Array

PAIR_STAGES = frozenset(
    """hinge_preference imitate_chosen kto_preference logistic_preference normalize_by_pair odds_preference
    robust_preference score_preference square_preference""".split()
)


def takes_pairs(objective: LossTransform) -> bool:
    """Whether an objective reads pairs of rows, which a rollout does not give."""
    return any(info.stage in PAIR_STAGES for info in objective.info)


def takes_labels(objective: LossTransform) -> bool:
    """Whether an objective over pairs takes answers with a label each as well, which have no partner."""
    infos = [info for info in objective.info if info.stage in PAIR_STAGES]
    return bool(infos) and all(info.stage == "kto_preference" for info in infos)


# -------------------------------------------------------------------------------------------- pairs


class Pairs(NamedTuple):
    """One entry for each pair, N = B / 2."""

    chosen: Array  # f32[N]
    rejected: Array  # f32[N]
    valid: Array  # bool[N], both answers have counted tokens


def check_rows(stage_name: str, batch: TokenBatch) -> None:
    """Raises ValueError unless rows can be pairs; what tokens are in them is not known while tracing."""
    if batch.shape[0] % 2:
        raise ValueError(
            f"{stage_name} reads pairs on rows 2i and 2i + 1, but the batch has {batch.shape[0]} rows. Give every "
            "chosen answer its rejected one in the next row, and use an even micro_batch_rows."
        )
    low = jnp.min(jnp.where(batch.mask, batch.sequence, jnp.iinfo(jnp.int32).max), axis=1)
    high = jnp.max(jnp.where(batch.mask, batch.sequence, jnp.iinfo(jnp.int32).min), axis=1)
    packed = jnp.sum(low < high)
    if isinstance(packed, jax.core.Tracer):  # also where the batch is not one: within a trace every sum is
        return
    if packed:
        raise ValueError(
            f"{stage_name} reads pairs on rows 2i and 2i + 1, but {int(packed)} rows hold several sequences. Lay out one "
            "sequence a row (learner.row_tokens: null)."
        )


def two(x: Array) -> tuple[Array, Array]:
    """(chosen, rejected) [N] of one value a row [B]."""
    pairs = x.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def spread(values: Array, width: int) -> Array:
    """f32[B, T]: the value of its pair at each token."""
    return jnp.broadcast_to(jnp.repeat(values, 2)[:, None], (2 * values.shape[0], width))


def answer_values(loss: LossState, batch: TokenBatch, stage_name: str, reference: bool) -> Array:
    """f32[B, T]: log π, or log π/π_ref, of the counted tokens; 0 elsewhere."""
    values = loss.logprob
    if reference:
        values = values - require(stage_name, batch, "logprob_reference").astype(values.dtype)
    return keep(loss.mask, values)


def row_sums(values: Array, mask: Array, average: bool) -> Array:
    """f32[B]: Σ_t, or the mean over the counted tokens of the row."""
    total = jnp.sum(values, axis=1)
    return quotient(total, jnp.sum(mask, axis=1).astype(total.dtype)) if average else total


def pairs_of(loss: LossState, batch: TokenBatch, stage_name: str, *, reference: bool, average: bool) -> Pairs:
    """The log-ratios (or log-probs) of the two answers of each pair."""
    check_rows(stage_name, batch)
    values = answer_values(loss, batch, stage_name, reference)
    chosen, rejected = two(row_sums(values, loss.mask, average))
    return Pairs(chosen, rejected, both(loss.mask))


def both(mask: Array) -> Array:
    """bool[N]: both rows of the pair have counted tokens."""
    chosen, rejected = two(jnp.any(mask, axis=1))
    return chosen & rejected


def log_pairs(loss: LossState, pairs: Pairs, scale: float) -> LossState:
    """Logs accuracy, margin and the two rewards, each pair once."""
    width = loss.mask.shape[1]
    # The last counted token of the chosen row.
    later = jnp.cumsum(loss.mask[:, ::-1], axis=1)[:, ::-1]
    chosen_row = (jnp.arange(loss.mask.shape[0]) % 2 == 0)[:, None]
    once = loss.mask & (later == 1) & chosen_row & spread(pairs.valid, width)
    margin = scale * (pairs.chosen - pairs.rejected)
    loss = loss.log("pair_accuracy", spread((margin > 0).astype(margin.dtype), width), once)
    loss = loss.log("pair_margin", spread(margin, width), once)
    loss = loss.log("reward_chosen", spread(scale * pairs.chosen, width), once)
    return loss.log("reward_rejected", spread(scale * pairs.rejected, width), once)


def write_pairs(loss: LossState, value: Array, pairs: Pairs, scale: float) -> LossState:
    """The loss with the value of each pair as its policy term."""
    policy = spread(keep(pairs.valid, value), loss.mask.shape[1])
    return log_pairs(loss.replace(policy=policy), pairs, scale)


def pair_stage(stage_name: str, value, *, scale: float, reference: bool, average: bool) -> Parts:
    """Parts of a stage whose policy term is value(pairs) f32[N]."""

    def prepare(batch):
        check_rows(stage_name, batch)
        return batch

    def apply(loss, batch):
        pairs = pairs_of(loss, batch, stage_name, reference=reference, average=average)
        return write_pairs(loss, value(pairs), pairs, scale)

    return Parts(prepare=prepare, apply=apply)


REFERENCE = ("batch.logprob_reference",)


def check_beta(stage_name: str, beta) -> None:
    checks.number(stage_name, "beta", beta, positive=True)


# ------------------------------------------------------------------------------------------- stages


@stage(reads=READS, writes=WRITES)
def normalize_by_pair():
    """Mean over pairs: Σ_pairs l / number of pairs with counted tokens in both answers.

    norm = count = 1 / (2 · length of the row), at the counted tokens of such pairs. NeMo divides by the valid pairs
    too; others by all of the batch. Metric: `pair_missing` (fraction of pairs with an empty side).
    """

    def prepare(batch):
        check_rows("normalize_by_pair", batch)
        ones = counted(batch)
        valid = both(ones > 0)
        share = quotient(ones, 2.0 * jnp.sum(ones, axis=1, keepdims=True))
        share = jnp.where(spread(valid, batch.shape[1]), share, 0.0)
        some = jnp.any(jnp.any(ones > 0, axis=1).reshape(-1, 2), axis=1)
        first = jnp.cumsum(ones.reshape(valid.shape[0], -1), axis=1).reshape(ones.shape)
        once = (ones > 0) & (first == 1) & spread(some, batch.shape[1])
        batch = batch.log("pair_missing", spread(1.0 - valid.astype(ones.dtype), batch.shape[1]), once)
        return batch.replace(norm=share, count=share)

    return prepare


def _reads(arguments) -> tuple[str, ...]:
    return REFERENCE if arguments["reference"] else ()


@stage(reads=_reads, writes=("loss.policy",))
def logistic_preference(
    beta: float = 0.1,
    smoothing: float = 0.0,
    margin: float = 0.0,
    reference: bool = True,
    average: bool = False,
):
    """-(1 - ε) log σ(x) - ε log σ(-x), x = β h - γ (DPO, arXiv 2305.18290, eq. 7; ε > 0: cDPO).

    smoothing is ε, margin γ. reference=False takes log π alone; average=True divides each answer's sum by its own
    length: together they are SimPO (arXiv 2405.14734, eq. 6). β = 0.1 as in TRL, OpenRLHF and tunix (NeMo 0.05).
    Label smoothing as OpenRLHF and tunix have it; TRL has it only in other losses of its own.
    """
    check_beta("logistic_preference", beta)
    checks.number("logistic_preference", "smoothing", smoothing, low=0.0, high=0.5)
    checks.number("logistic_preference", "margin", margin)

    def value(pairs):
        return preference.logistic(beta * (pairs.chosen - pairs.rejected) - margin, smoothing)

    return pair_stage("logistic_preference", value, scale=beta, reference=reference, average=average)


@stage(reads=REFERENCE, writes=("loss.policy",))
def robust_preference(beta: float = 0.1, smoothing: float = 0.1):
    """[-(1 - ε) log σ(β h) + ε log σ(-β h)] / (1 - 2ε) (robust DPO, arXiv 2403.00409, eq. 12).

    Unbiased under labels flipped with probability ε < ½, hence not bounded below; ε as in TRL's `robust`.
    """
    check_beta("robust_preference", beta)
    checks.number("robust_preference", "smoothing", smoothing, low=0.0, high=0.499)

    def value(pairs):
        return preference.robust_logistic(beta * (pairs.chosen - pairs.rejected), smoothing)

    return pair_stage("robust_preference", value, scale=beta, reference=True, average=False)


@stage(reads=REFERENCE, writes=("loss.policy",))
def square_preference(beta: float = 0.1, average: bool = True):
    """(h - 1 / (2β))² (IPO, arXiv 2310.12036, eq. 17).

    average=True: h of the mean log-ratios of each answer, as the authors later advised and TRL and AReaL do;
    False: of the sums, as in the paper's equation and OpenRLHF.
    """
    check_beta("square_preference", beta)

    def value(pairs):
        return preference.square(pairs.chosen - pairs.rejected, beta)

    return pair_stage("square_preference", value, scale=beta, reference=True, average=average)


@stage(reads=REFERENCE, writes=("loss.policy",))
def hinge_preference(beta: float = 0.1):
    """max(0, 1 - β h) (SLiC-style hinge on DPO's margin; arXiv 2309.06657, eq. 10). Derivative 0 at the kink."""
    check_beta("hinge_preference", beta)

    def value(pairs):
        return preference.hinge(beta * (pairs.chosen - pairs.rejected))

    return pair_stage("hinge_preference", value, scale=beta, reference=True, average=False)


@stage(writes=("loss.policy",))
def odds_preference(beta: float = 0.1, average: bool = True):
    """-β log σ(log odds(a_w) - log odds(a_l)) (the ratio term of ORPO, arXiv 2403.07691, eq. 7). No reference.

    a: mean log-prob of an answer, as in the paper and TRL; average=False: the sum (tunix's default). Add
    `imitate_chosen(1.0)` for the other term. a is at most -1e-7 (tunix); TRL computes it in f32.
    """
    check_beta("odds_preference", beta)

    def value(pairs):
        return beta * preference.logistic(preference.log_odds_ratio(pairs.chosen, pairs.rejected), 0.0)

    return pair_stage("odds_preference", value, scale=beta, reference=False, average=average)


@stage(
    reads=(*REFERENCE, "batch.desirable", "batch.reference_point"),
    writes=("batch.reference_point", "loss.policy"),
)
def kto_preference(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0):
    """λ_D [1 - σ(β (h_i - z))] for good answers, λ_U [1 - σ(β (z - h_i))] for bad ones (KTO, arXiv 2402.01306).

    h_i = Σ_t log π/π_ref of answer i, a sequence. z = max(0, mean over the batch of Σ_t log π/π_ref of a prompt with
    the answer of another), from batch.reference_point. The mean is over answers, not pairs (`normalize_by_sequence`).

    Which answers are good: batch.desirable, for answers with a label each; any layout and any split of rows will do.
    Where it is None the batch holds pairs: good on even rows, bad on odd ones, and a pair may lack a side.

    Departure: z is taken once a train step, from the policy that starts it (the systems: from the current one, a
    micro-batch at a time, which makes the loss depend on the split). Metrics also: `kto_point` (z). Without pairs only
    `reward_chosen` and `reward_rejected`, of the good and of the bad answers.
    """
    check_beta("kto_preference", beta)
    checks.number("kto_preference", "desirable", desirable, low=0.0)
    checks.number("kto_preference", "undesirable", undesirable, low=0.0)

    def good_answers(batch):
        if batch.desirable is not None:
            return batch.desirable
        check_rows("kto_preference", batch)
        return jnp.broadcast_to((jnp.arange(batch.shape[0]) % 2 == 0)[:, None], batch.shape)

    def prepare(batch):
        good_answers(batch)  # the layout is checked
        given = require("kto_preference", batch, "reference_point")
        each = trajectories(batch.sequence, batch.mask)
        mean = quotient(each.sum(given, batch.mask), each.length)  # it is constant over an answer
        point = jnp.maximum(quotient(jnp.sum(mean), jnp.sum(each.present).astype(mean.dtype)), 0.0)
        point = jnp.where(batch.mask, point, 0.0)
        return batch.replace(reference_point=point).log("kto_point", point)

    def apply(loss, batch):
        good = good_answers(batch)
        values = answer_values(loss, batch, "kto_preference", reference=True)
        log_ratio = sequence_sum(values, batch.sequence)
        point = require("kto_preference", batch, "reference_point").astype(log_ratio.dtype)
        value = jnp.where(good, desirable, undesirable) * preference.kto(log_ratio, point, good, beta)
        loss = loss.replace(policy=keep(loss.mask, value))
        if batch.desirable is None:
            pairs = Pairs(*two(row_sums(values, loss.mask, average=False)), both(loss.mask))
            return log_pairs(loss, pairs, beta)
        place = jnp.broadcast_to(jnp.arange(loss.mask.shape[1]), loss.mask.shape).astype(log_ratio.dtype)
        last = loss.mask & (place == sequence_max(place, batch.sequence, loss.mask))
        loss = loss.log("reward_chosen", beta * log_ratio, last & good)
        return loss.log("reward_rejected", beta * log_ratio, last & ~good)

    return Parts(prepare=prepare, apply=apply)


@stage(reads=lambda a: ("loss.value", *(("batch.reward",) if a["margin"] else ())), writes=("loss.policy",))
def score_preference(margin: float = 0.0, center: float = 0.0):
    """-log σ(s_w - s_l - m) + c (s_w + s_l)², the Bradley-Terry loss of a reward model (arXiv 2203.02155, eq. 1).

    s: the value head's output at the last trained token of the answer, which has seen all tokens before it: end
    answers with an end-of-turn token. m = margin · (R_w - R_l), R the rewards of the data (Llama 2, arXiv 2307.09288,
    eq. 2), 0 where a pair has none. center is c (arXiv 2312.09244); TRL's option, 0.01 there.
    """
    checks.number("score_preference", "margin", margin, low=0.0)
    checks.number("score_preference", "center", center, low=0.0)

    def last_of(mask, values):
        last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
        return jnp.sum(keep(last, values), axis=1)

    def prepare(batch):
        check_rows("score_preference", batch)
        return batch

    def apply(loss, batch):
        check_rows("score_preference", batch)
        chosen, rejected = two(last_of(loss.mask, require("score_preference", loss, "value")))
        reward = jnp.sum(keep(loss.mask & batch.reward_valid, batch.reward), axis=1).astype(chosen.dtype)
        known = both(loss.mask & batch.reward_valid)
        better, worse = two(reward)
        gap = margin * jnp.where(known, better - worse, 0.0)
        pairs = Pairs(chosen, rejected, both(loss.mask))
        return write_pairs(loss, preference.bradley_terry(chosen, rejected, gap, center), pairs, 1.0)

    return Parts(prepare=prepare, apply=apply)


@stage(writes=("loss.penalties",))
def imitate_chosen(coef: float, average: bool = True, *, name: str):
    """coef · NLL of the chosen answer, a term beside a preference loss: its mean over tokens, or its sum.

    ORPO's first term (coef 1); RPO's (arXiv 2404.19733), NeMo's `sft_loss_weight` (sums) and TRL's `cpo_alpha`.
    TRL takes one mean over the tokens of all chosen answers, here each answer has its own.
    """
    checks.number("imitate_chosen", "coef", coef)

    def prepare(batch):
        check_rows(name, batch)
        return batch

    def apply(loss, batch):
        pairs = pairs_of(loss, batch, name, reference=False, average=average)
        width = loss.mask.shape[1]
        return loss.penalize(name, spread(keep(pairs.valid, -coef * pairs.chosen), width))

    return Parts(prepare=prepare, apply=apply)
