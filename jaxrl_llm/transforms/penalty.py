"""Penalties: named regularisers beside the policy term, untouched by its weights.

Each may bring its own normaliser (`normalize=normalize_by_token()`), since systems reduce them differently;
by default it shares the chain's.
"""

from __future__ import annotations

import jax

from jaxrl_llm.losses import divergences, values
from jaxrl_llm.losses.ratios import token_log_ratio
from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, Parts, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.normalize import normalize_by_token, own_norm, penalty_parts
from jaxrl_llm.types import LossState, TokenBatch

__all__ = [
    "next_token",
    "penalize_kl",
    "penalize_log_ratio_square",
    "penalize_value_error",
    "reward_entropy",
]

Array = jax.Array

ESTIMATORS = {
    "k1": divergences.k1,
    "k2": divergences.k2,
    "k3": divergences.k3,
    "abs": divergences.magnitude,
    "k1_straight_through": divergences.k1_straight_through,
    "k3_straight_through": divergences.k3_straight_through,
}
# These also take log π - log behavior.
WEIGHTED = {
    "k1_weighted": divergences.k1_weighted,
    "k1_policy_gradient": divergences.k1_policy_gradient,
    "k2_weighted": divergences.k2_weighted,
    "k3_weighted": divergences.k3_weighted,
}
ANCHORS = ("reference", "teacher", "proximal", "behavior")


def own_count(arguments) -> tuple[str, ...]:
    """What a penalty with a normaliser of its own reads of the chain's."""
    return () if arguments["normalize"] is None else ("batch.count",)


def kl_reads(a) -> tuple[str, ...]:
    weighted = ("batch.logprob_behavior",) if a["estimator"] in WEIGHTED else ()
    return tuple(dict.fromkeys((f"batch.logprob_{a['anchor']}", *weighted, *own_count(a))))


def check_kl(stage_name: str, estimator: str, anchor: str) -> None:
    checks.choice(stage_name, "estimator", estimator, (*ESTIMATORS, *WEIGHTED))
    checks.choice(stage_name, "anchor", anchor, ANCHORS)


def kl_of(name: str, loss: LossState, batch: TokenBatch, estimator: str, anchor: str) -> Array:
    """f32[B, T]: the estimator of KL(π ‖ anchor) at each token."""
    x = token_log_ratio(loss.logprob, require(name, batch, f"logprob_{anchor}"), batch.mask)
    if estimator not in WEIGHTED:
        return ESTIMATORS[estimator](x)
    there = require(name, batch, "logprob_behavior")
    return WEIGHTED[estimator](x, token_log_ratio(loss.logprob, there, batch.mask))


@stage(reads=kl_reads, writes=("loss.penalties",))
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
    e^{-x} - 1 + x (gradient of the forward KL); abs = |x|; k1_straight_through, k3_straight_through: that value,
    gradient of k2 (verl's "k1+", "k3+"; the latter is NeMo's default). With the differentiable r = π / behavior:
    k3_weighted = r · k3 (DeepSeek-V3.2), k1_weighted, k2_weighted (NeMo), and k1_policy_gradient = r · sg(x), the
    reverse KL by policy gradient (on-policy distillation, with anchor="teacher"). The exponent is clipped to ±20;
    no clamp of the result (verl, SkyRL, NeMo, OpenRLHF and AReaL clamp it to ±10). anchor: reference, teacher,
    proximal or behavior. Metrics: `kl_reference`, `kl_teacher` (value of the estimator, for that anchor).
    """
    checks.number("penalize_kl", "coef", coef)
    check_kl("penalize_kl", estimator, anchor)

    def value(loss, batch):
        kl = kl_of(name, loss, batch, estimator, anchor)
        if anchor in ("reference", "teacher"):
            loss = loss.log(f"kl_{anchor}", kl)
        return loss, coef * kl

    return penalty_parts(name, normalize, value)


@stage(reads=lambda a: ("loss.entropy", *own_count(a)), writes=("loss.penalties",))
def reward_entropy(coef: float, normalize: LossTransform | None = None, *, name: str):
    """-coef · H_t, H_t the entropy (nats) of the current policy at token t: an entropy bonus (A3C, arXiv 1602.01783).

    The metric `entropy` is logged whenever the forward pass computes it, which this stage makes it do.
    """
    checks.number("reward_entropy", "coef", coef)

    def value(loss, batch):
        return loss, -coef * require(name, loss, "entropy")

    return penalty_parts(name, normalize, value)


@stage(
    reads=lambda a: (f"batch.logprob_{a['anchor']}", *own_count(a)),
    writes=("loss.penalties",),
)
def penalize_log_ratio_square(
    coef: float, anchor: str = "behavior", normalize: LossTransform | None = None, *, name: str
):
    """coef · (log π_t - log anchor_t)² (Kimi K2.5, arXiv 2602.02276; prime-rl, with coef 1e-3).

    No ½, as in both: 2 coef times the estimator k2. It also holds tokens that a correction or a clip leaves
    without a gradient of the policy term. Metric: `log_ratio_square`.
    """
    checks.number("penalize_log_ratio_square", "coef", coef)
    checks.choice("penalize_log_ratio_square", "anchor", anchor, ANCHORS)

    def value(loss, batch):
        there = require(name, batch, f"logprob_{anchor}")
        square = token_log_ratio(loss.logprob, there, batch.mask) ** 2
        return loss.log("log_ratio_square", square), coef * square

    return penalty_parts(name, normalize, value)


@stage(
    reads=lambda a: (
        "loss.value",
        "batch.returns",
        *(() if a["clip"] is None else ("batch.value",)),
        *own_count(a),
    ),
    writes=("loss.penalties",),
)
def penalize_value_error(
    coef: float = 1.0, clip: float | None = 0.2, normalize: LossTransform | None = None, *, name: str
):
    """coef · ½ max((v_t - R_t)², (v_c - R_t)²), v_c = v_old + clip(v_t - v_old, -clip, clip): the critic's loss.

    v is the current value (`loss.value`), v_old the one that made the advantages (`batch.value`), R `batch.returns`
    (PPO; arXiv 2005.12729, §3). clip=None: ½ (v - R)², without v_old. The default 0.2 is SkyRL's and slime's; verl,
    OpenRLHF and AReaL have 0.5, NeMo none. The ½ is everybody's but slime's. Tokens without an advantage (reward
    None) pay nothing. Metrics: `value_error` (mean of (v - R)²), `value_clipped`.
    """
    checks.number("penalize_value_error", "coef", coef)
    checks.number("penalize_value_error", "clip", clip, positive=True, optional=True)

    def value(loss, batch):
        defined = batch.mask if batch.signal is None else batch.mask & batch.signal
        now = keep(defined, require(name, loss, "value"))
        returns = keep(defined, require(name, batch, "returns")).astype(now.dtype)
        error = values.square_error(now, returns)
        loss = loss.log("value_error", 2.0 * error, defined)
        if clip is not None:
            old = keep(defined, require(name, batch, "value")).astype(now.dtype)
            error = values.clipped_square_error(now, returns, old, clip)
            cut = values.value_clipped(now, returns, old, clip)
            loss = loss.log("value_clipped", cut.astype(now.dtype), defined)
        return loss, coef * keep(defined, error)

    return penalty_parts(name, normalize, value)


@stage(
    reads=lambda a: (
        *(("batch.reward", "batch.reward_valid", "batch.count") if a["where"] == "positive" else ()),
        *own_count(a),
    ),
    writes=("loss.penalties",),
)
def next_token(
    coef: float = 1.0,
    where: str = "all",
    threshold: float = 0.0,
    normalize: LossTransform | None = None,
    *,
    name: str,
) -> Parts:
    """-coef · log π_t: cross-entropy of the tokens themselves (supervised fine-tuning).

    where="positive": only trajectories with a reward > threshold: the imitation of good answers beside a policy term
    (VAPO, arXiv 2504.05118, eq. 15; NeMo's positive_example_nll_weight), or alone (rejection-sampling fine-tuning).
    It is then a mean over their tokens, or by the given normaliser over them. Tokens of an environment's output
    (ECHO; prime-rl's `ce` component) are trained when the batch's mask has them: `masked(next_token(...), where=...)`
    restricts the stage to them, and the other stages to the rest. Metric: `nll`.
    """
    checks.number("next_token", "coef", coef)
    checks.choice("next_token", "where", where, ("all", "positive"))
    checks.number("next_token", "threshold", threshold)
    if where == "positive" and normalize is None:
        normalize = normalize_by_token()
    own = own_norm(name, normalize)

    def prepare(batch: TokenBatch) -> TokenBatch:
        chosen = batch.mask if batch.counted is None else batch.mask & batch.counted
        if where == "positive":
            each = trajectories(batch.trajectory, batch.mask)
            total = each.spread(each.sum(batch.reward, batch.mask))
            chosen = chosen & batch.reward_valid & (total > threshold)
        return batch.replace(norms=own(batch.replace(counted=chosen)).norms)

    def apply(loss: LossState, batch: TokenBatch) -> LossState:
        norm = batch.norms.get(name)
        nll = -loss.logprob
        return loss.log("nll", nll, None if norm is None else norm > 0).penalize(name, coef * nll, norm)

    return Parts(prepare=None if own is None else prepare, apply=apply)
