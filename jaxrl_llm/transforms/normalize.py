"""Normalisers: how much each token counts, in the loss and in its denominator.

    loss = Σ norm · weight · policy / Σ count

Each writes two per-token fields from `counted`, the trained tokens that count (`mask`, unless a stage that
renormalises has cleared some). Both sums add over any split of the batch. A sequence without counted tokens
counts nowhere. These are the only owners of a denominator in the package.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.ops.segments import group_sum, sequence_sum
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, Parts, stage
from jaxrl_llm.types import TokenBatch

__all__ = [
    "normalize_by_constant",
    "normalize_by_group",
    "normalize_by_length_limit",
    "normalize_by_sequence",
    "normalize_by_sequence_sum",
    "normalize_by_token",
]

Array = jax.Array

READS = ("batch.counted",)
WRITES = ("batch.norm", "batch.count")


def counted(batch: TokenBatch) -> Array:
    """f32[B, T]: 1 at the tokens that count."""
    on = batch.mask if batch.counted is None else batch.mask & batch.counted
    return on.astype(jnp.promote_types(batch.reward.dtype, jnp.float32))


@stage(reads=READS, writes=WRITES)
def normalize_by_token():
    """Σ_t l_t / N, N counted tokens of the batch: every token weighs the same (DAPO, arXiv 2503.14476, eq. 8).

    norm = count = 1. Others call it token-mean. Long answers weigh more than short ones.
    """

    def prepare(batch):
        ones = counted(batch)
        return batch.replace(norm=ones, count=ones)

    return prepare


@stage(reads=READS, writes=WRITES)
def normalize_by_sequence():
    """Mean over sequences of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3; GSPO).

    norm = count = 1 / len. Others call it seq-mean-token-mean. Sequences without a counted token are not in
    the mean (as in verl, OpenRLHF, tunix; TRL and SkyRL count them).
    """

    def prepare(batch):
        ones = counted(batch)
        share = quotient(ones, sequence_sum(ones, batch.sequence))
        return batch.replace(norm=share, count=share)

    return prepare


@stage(reads=READS, writes=WRITES)
def normalize_by_length_limit(limit: float):
    """Mean over sequences of Σ_t l_t / L, L a constant in tokens (Dr.GRPO, arXiv 2503.20783).

    norm = 1, count = L / len: no length bias. L is usually the maximal completion length. Sequences without
    a counted token are not in the mean.
    """
    checks.number("normalize_by_length_limit", "limit", limit, positive=True)

    def prepare(batch):
        ones = counted(batch)
        length = sequence_sum(ones, batch.sequence)
        return batch.replace(norm=ones, count=limit * quotient(ones, length))

    return prepare


@stage(reads=READS, writes=WRITES)
def normalize_by_sequence_sum():
    """Mean over sequences of the sum over their tokens. norm = 1, count = 1 / len (seq-mean-token-sum)."""

    def prepare(batch):
        ones = counted(batch)
        return batch.replace(norm=ones, count=quotient(ones, sequence_sum(ones, batch.sequence)))

    return prepare


@stage(reads=READS, writes=WRITES)
def normalize_by_group():
    """Mean over groups of the mean over all tokens of the group (prompt-mean; ScaleRL, arXiv 2510.13786).

    norm = count = 1 / tokens of the group.
    """

    def prepare(batch):
        ones = counted(batch)
        share = quotient(ones, group_sum(ones, batch.group))
        return batch.replace(norm=share, count=share)

    return prepare


@stage(reads=READS, writes=WRITES)
def normalize_by_constant(constant: float):
    """Σ_t l_t / c: a token sum (c = 1), or a denominator from outside. norm = 1, count = c / N."""
    checks.number("normalize_by_constant", "constant", constant, positive=True)

    def prepare(batch):
        ones = counted(batch)
        return batch.replace(norm=ones, count=constant * quotient(ones, jnp.sum(ones)))

    return prepare


# ------------------------------------------------------------------- a penalty with its own normaliser


def own_norm(name: str, normalizer: LossTransform | None):
    """`prepare` of a penalty that brings its own normaliser, or None.

    The penalty's term is Σ norm_p · value / Σ count_p. So that the loss keeps one denominator, norm_p is
    scaled here, on the whole rollout batch, by Σ count / Σ count_p.
    """
    if normalizer is None:
        return None
    if not isinstance(normalizer, LossTransform) or [info.writes for info in normalizer.info] != [WRITES]:
        raise ValueError(f"{name}: normalize must be a normalize_by_... stage or None, got {normalizer!r}.")

    def prepare(batch):
        own, _ = normalizer.prepare(batch, None)
        scale = quotient(jnp.sum(batch.count), jnp.sum(own.count))
        return batch.replace(norms={**batch.norms, name: own.norm * scale})

    return prepare


def penalty_parts(name: str, normalizer: LossTransform | None, value) -> Parts:
    """The parts of a penalty: `value(loss, batch) -> (loss, f32[B, T])` and the norm it is summed with."""

    def apply(loss, batch):
        loss, penalty = value(loss, batch)
        return loss.penalize(name, penalty, batch.norms.get(name))

    return Parts(prepare=own_norm(name, normalizer), apply=apply)
