"""Distillation: the distribution of a teacher at the same tokens, whoever sampled them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import divergences
from jaxrl_llm.ops.numerics import at_least_f32, keep
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.normalize import penalty_parts
from jaxrl_llm.transforms.penalty import own_count

__all__ = ["imitate"]


def _reads(a) -> tuple[str, ...]:
    if a["over"] == "topk":
        lists = ("loss.topk_logprob", "batch.topk_logprob_teacher", f"batch.topk_ids(k={a['k']})")
        return (*lists, *own_count(a))
    beta = f", beta={a['beta']}" if a["kind"] == "jsd" else ""
    return (f"loss.divergence(kind={a['kind']}{beta})", *own_count(a))


@stage(reads=_reads, writes=("loss.penalties",))
def imitate(
    coef: float = 1.0,
    kind: str = "forward",
    over: str = "vocabulary",
    beta: float = 0.5,
    rest: bool = True,
    floor: float = -80.0,
    k: int = 64,
    normalize: LossTransform | None = None,
    *,
    name: str,
):
    """coef · D_t, a divergence between teacher T and current policy S over the next token, exact and not sampled.

    kind="forward": KL(T ‖ S) (covers the teacher's modes; with tokens of the teacher, soft-label fine-tuning);
    "reverse": KL(S ‖ T) (seeks them); "jsd": β KL(T ‖ M) + (1 - β) KL(S ‖ M), M = (1 - β) S + β T (GKD, arXiv
    2306.13649; TRL's β = 0 is "forward", β = 1 "reverse").
    over="vocabulary": D comes ready made from the forward pass, as `loss.divergence`: `ops.logprobs` takes it chunk by
    chunk, from the logits of both. over="topk": it is summed here over the teacher's K = k most likely tokens (NeMo-RL:
    64; `batch.topk_ids`, `batch.topk_logprob_teacher`, and `loss.topk_logprob` of the policy at the same ids; the size
    of lists that are given counts); rest=True adds all other tokens as one, which makes it a true divergence, ≥ 0 and
    no larger than that over the vocabulary. rest=False sums over the K alone, not renormalised, as verl and NeMo do;
    it may be negative, and kind="reverse" then rewards leaving the K. `floor` (nats) bounds each log-prob from below
    (verl: -10); no clamp of the sum (verl: 0 to 10). Metric: `divergence_teacher`.

    Both stay over the vocabulary where top-k, top-p or min-p chose the tokens: the policy as a whole is to become the
    teacher, and truncation only says at which places they are compared.
    """
    checks.number("imitate", "coef", coef)
    checks.choice("imitate", "kind", kind, divergences.KINDS)
    checks.choice("imitate", "over", over, ("vocabulary", "topk"))
    checks.number("imitate", "beta", beta, low=0.0, high=1.0)
    if kind == "jsd" and not isinstance(beta, jax.core.Tracer) and beta in (0, 1):
        raise ValueError(
            f'imitate: kind="jsd" needs 0 < beta < 1, got {beta!r}. Its limits are kind="forward" (beta 0) and '
            f'kind="reverse" (beta 1).'
        )
    checks.number("imitate", "floor", floor, high=0.0)
    checks.number("imitate", "k", k, low=1)

    def over_top(loss, batch):
        at = batch.mask[..., None]
        student = require(name, loss, "topk_logprob")
        teacher = keep(at, require(name, batch, "topk_logprob_teacher"))
        if student.shape != teacher.shape:
            raise ValueError(
                f"{name}: loss.topk_logprob has shape {student.shape} and batch.topk_logprob_teacher "
                f"{teacher.shape}; both must be [B, T, K], at the K ids of batch.topk_ids."
            )
        student, teacher = at_least_f32(student), at_least_f32(teacher)
        if rest:
            student, teacher = divergences.with_rest(student), divergences.with_rest(teacher)
        student, teacher = jnp.maximum(student, floor), jnp.maximum(teacher, floor)
        return divergences.Divergence(kind, beta).value(student, teacher)

    def value(loss, batch):
        divergence = require(name, loss, "divergence") if over == "vocabulary" else over_top(loss, batch)
        divergence = keep(batch.mask, divergence)
        return loss.log("divergence_teacher", divergence), coef * divergence

    return penalty_parts(name, normalize, value)
