"""Penalties: named regularisers beside the policy term, untouched by its weights.

Each may bring its own normaliser (`normalize=normalize_by_token()`), since systems reduce them differently;
by default it shares the chain's.
"""

from __future__ import annotations

from jaxrl_llm.losses import divergences
from jaxrl_llm.losses.ratios import token_log_ratio
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.normalize import penalty_parts

__all__ = ["penalize_kl", "reward_entropy"]

ESTIMATORS = {
    "k1": divergences.k1,
    "k2": divergences.k2,
    "k3": divergences.k3,
    "k3_straight_through": divergences.k3_straight_through,
}


def _own(arguments) -> tuple[str, ...]:
    return () if arguments["normalize"] is None else ("batch.count",)


def _kl_reads(a) -> tuple[str, ...]:
    weighted = ("batch.logprob_behavior",) if a["estimator"] == "k3_weighted" else ()
    return tuple(dict.fromkeys((f"batch.logprob_{a['anchor']}", *weighted, *_own(a))))


@stage(reads=_kl_reads, writes=("loss.penalties",))
def penalize_kl(
    coef: float,
    estimator: str = "k3",
    anchor: str = "reference",
    normalize: LossTransform | None = None,
    *,
    name: str,
):
    """coef · k(x_t), x_t = log π_t - log anchor_t, an estimate of KL(π ‖ anchor) (GRPO, arXiv 2402.03300, eq. 4).

    estimator: k1 = x (expected gradient 0, for completeness); k2 = x²/2 (gradient of the reverse KL); k3 =
    e^{-x} - 1 + x (gradient of the forward KL); k3_straight_through: value of k3, gradient of k2 (verl's "k3+",
    NeMo's default); k3_weighted: r · k3 with the differentiable r = π / behavior (DeepSeek-V3.2). The exponent
    is clipped to ±20; no clamp of the result (verl and SkyRL clamp it to ±10). anchor: reference, teacher,
    proximal or behavior. Metric: `kl_reference` (value of the estimator, for that anchor).
    """
    checks.number("penalize_kl", "coef", coef)
    checks.choice("penalize_kl", "estimator", estimator, (*ESTIMATORS, "k3_weighted"))
    checks.choice("penalize_kl", "anchor", anchor, ("reference", "teacher", "proximal", "behavior"))

    def value(loss, batch):
        x = token_log_ratio(loss.logprob, require(name, batch, f"logprob_{anchor}"), batch.mask)
        if estimator == "k3_weighted":
            there = require(name, batch, "logprob_behavior")
            kl = divergences.k3_weighted(x, token_log_ratio(loss.logprob, there, batch.mask))
        else:
            kl = ESTIMATORS[estimator](x)
        if anchor == "reference":
            loss = loss.log("kl_reference", kl)
        return loss, coef * kl

    return penalty_parts(name, normalize, value)


@stage(reads=lambda a: ("loss.entropy", *_own(a)), writes=("loss.penalties",))
def reward_entropy(coef: float, normalize: LossTransform | None = None, *, name: str):
    """-coef · H_t, H_t the entropy (nats) of the current policy at token t: an entropy bonus (A3C, arXiv 1602.01783).

    The metric `entropy` is logged whenever the forward pass computes it, which this stage makes it do.
    """
    checks.number("reward_entropy", "coef", coef)

    def value(loss, batch):
        return loss, -coef * require(name, loss, "entropy")

    return penalty_parts(name, normalize, value)
