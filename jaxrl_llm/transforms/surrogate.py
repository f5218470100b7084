"""Surrogates: the policy term of each token, to be minimised. A chain has one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import surrogates
from jaxrl_llm.ops.numerics import safe_exp
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import Parts, stage
from jaxrl_llm.transforms.correction import known_versions
from jaxrl_llm.types import LossState

__all__ = [
    "cispo_surrogate",
    "clip_surrogate",
    "geometric_surrogate",
    "lag_clip_surrogate",
    "quadratic_surrogate",
    "reinforce_surrogate",
    "soft_surrogate",
    "vespo_surrogate",
]

Array = jax.Array


def log_clipped(loss: LossState, below: Array, above: Array) -> LossState:
    """Logs `clip_fraction_low`, `clip_fraction_high` and their sum `clip_fraction`."""
    low, high = below.astype(loss.logprob.dtype), above.astype(loss.logprob.dtype)
    loss = loss.log("clip_fraction_low", low).log("clip_fraction_high", high)
    return loss.log("clip_fraction", low + high)


@stage(reads=("batch.advantage",), writes=("loss.policy",))
def reinforce_surrogate():
    """l_t = -A_t log π_t (Williams, 1992). No ratio: on-policy, or with a correction's weight."""

    def apply(loss, batch):
        return loss.replace(policy=surrogates.reinforce(loss.logprob, batch.advantage))

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def clip_surrogate(low: float = 0.2, high: float = 0.2, dual: float | None = None):
    """l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7).

    Bounds are offsets from 1; high > low is clip-higher (DAPO, arXiv 2503.14476, eq. 8); infinity does not
    clip. dual=c: l_t is at most -c A_t where A_t < 0 (arXiv 1912.09729); off by default (verl: always on, 3).
    It is also two-sided clipping (INTELLECT-2, arXiv 2505.07291; TRL's `delta`), which replaces the unclipped r by
    min(r, c): for c ≥ 1 + high the two agree everywhere.
    Metrics: `clip_fraction` = `clip_fraction_low` (A < 0, r < 1 - low) + `clip_fraction_high` (A > 0, r > 1 +
    high); `clip_fraction_dual`.
    """
    checks.number("clip_surrogate", "low", low, low=0.0, finite=False)
    checks.number("clip_surrogate", "high", high, low=0.0, finite=False)
    checks.number("clip_surrogate", "dual", dual, low=1.0, optional=True)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        policy = surrogates.clipped(loss.log_ratio, advantage, low, high)
        below = surrogates.clipped_low(loss.log_ratio, advantage, low)
        loss = log_clipped(loss, below, surrogates.clipped_high(loss.log_ratio, advantage, high))
        if dual is not None:
            policy = surrogates.dual_clipped(policy, advantage, dual)
            cut = surrogates.dual_clipped_tokens(loss.log_ratio, advantage, dual)
            loss = loss.log("clip_fraction_dual", cut.astype(policy.dtype))
        return loss.replace(policy=policy)

    return apply


@stage(
    reads=("loss.log_ratio", "batch.advantage", "batch.version", "batch.learner_version"),
    writes=("loss.policy",),
)
def lag_clip_surrogate(low: float = 0.2, high: float = 0.2, decay: float = 0.8, floor: float = 0.02):
    """PPO's clip with bounds that tighten with the age of a token: eps(age) = max(eps · decay^age, floor).

    l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low(age_t), 1 + high(age_t))), age_t = learner_version - version_t in
    train steps, eps one of low and high. Ours, not from a paper: in an asynchronous run, where one trajectory
    holds tokens of several versions, what is old may move the policy less. decay=1 is `clip_surrogate`; decay > 1
    widens. A token of unknown version counts as one at the floor. Bounds are offsets from 1.
    Metrics: those of `clip_surrogate`, `age`, and `clip_bound`: the mean upper offset.

    Raises (in `prepare`): ValueError when a trained token has version -1 (unknown), as far as values are known.
    """
    checks.number("lag_clip_surrogate", "low", low, low=0.0)
    checks.number("lag_clip_surrogate", "high", high, low=0.0)
    checks.number("lag_clip_surrogate", "decay", decay, positive=True)
    checks.number("lag_clip_surrogate", "floor", floor, low=0.0)

    def prepare(batch):
        known_versions("lag_clip_surrogate", batch)
        age = jnp.maximum(batch.learner_version - batch.version, 0)
        return batch.log("age", age.astype(jnp.promote_types(batch.reward.dtype, jnp.float32)))

    def apply(loss, batch):
        dtype = loss.logprob.dtype
        advantage = batch.advantage.astype(dtype)
        age = jnp.maximum(batch.learner_version - batch.version, 0).astype(dtype)
        known = batch.version >= 0

        def bound(eps):
            return jnp.where(known, surrogates.shrunk_bound(eps, age, decay, floor), jnp.minimum(floor, eps))

        below, above = bound(low), bound(high)
        loss = log_clipped(
            loss,
            surrogates.clipped_low(loss.log_ratio, advantage, below),
            surrogates.clipped_high(loss.log_ratio, advantage, above),
        ).log("clip_bound", above)
        return loss.replace(policy=surrogates.clipped(loss.log_ratio, advantage, below, above))

    return Parts(prepare=prepare, apply=apply)


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def cispo_surrogate(high: float, low: float | None = None):
    """l_t = -sg(clip(r_t, low, high)) A_t log π_t (CISPO: MiniMax-M1, arXiv 2506.13585).

    A clipped token keeps its gradient, at the weight of the bound. Bounds are ratios, not offsets from 1; low=None
    does not bind. ScaleRL (arXiv 2510.13786) recommends high=5. Elsewhere: TRL's epsilon_high is this `high`, without
    a lower bound; verl, slime, NeMo-RL and SkyRL give offsets (1 - low, 1 + high), with defaults of PPO (0.8 to
    1.2) in verl and NeMo-RL and 0 to 5 in SkyRL. Metrics: `clip_fraction_low` and `_high`, whatever the sign of
    the advantage, and `clip_fraction`, their sum.
    """
    checks.number("cispo_surrogate", "high", high, positive=True, finite=False)
    checks.number("cispo_surrogate", "low", low, low=0.0, optional=True)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise ValueError(f"cispo_surrogate: low must be at most high, got low={low!r}, high={high!r}.")

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        ratio = safe_exp(loss.log_ratio)
        below = jnp.zeros(ratio.shape, bool) if low is None else ratio < low
        loss = log_clipped(loss, below, ratio > high)
        return loss.replace(
            policy=surrogates.capped_score(loss.logprob, loss.log_ratio, advantage, low, high)
        )

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def soft_surrogate(tau_positive: float = 1.0, tau_negative: float = 1.05):
    """l_t = -A_t 4/τ σ(τ (r_t - 1)), τ = tau_positive where A_t > 0, else tau_negative (SAPO, arXiv 2511.20347).

    A gate without an edge in the place of the clip: the gradient is that of REINFORCE at r = 1 and fades on both
    sides, faster the larger τ. Defaults are the paper's, and those of verl, TRL, AReaL and SkyRL. The value at
    r = 1 is -2 A / τ, not -A. The paper averages over sequences (`normalize_by_sequence`; verl forces it, AReaL
    averages over tokens). With `sequence_ratio` the gate is that of the sequence (AReaL's sequence level).
    Metric: `soft_gate`, the mean share of the gradient that the gate leaves, 1 at r = 1.
    """
    checks.number("soft_surrogate", "tau_positive", tau_positive, positive=True)
    checks.number("soft_surrogate", "tau_negative", tau_negative, positive=True)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        gate = surrogates.soft_gate(loss.log_ratio, advantage, tau_positive, tau_negative)
        sigma = gate * jnp.where(advantage > 0, tau_positive, tau_negative) / 4.0
        loss = loss.log("soft_gate", 4.0 * sigma * (1.0 - sigma))
        return loss.replace(policy=-advantage * gate)

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def geometric_surrogate(low: float = 0.4, high: float = 0.4):
    """l_t = -A_t s, s = exp(mean of d'_t over the trained tokens of the sequence) (GMPO, arXiv 2507.20673).

    d_t is the log-ratio of a token, clipped before it is averaged: d'_t = min(d_t, high) where A_t > 0 and
    max(d_t, -low) where A_t < 0, so bounds are in nats: 0.4 allows e^-0.4 to e^0.4. The gradient flows through s
    to every token of the sequence. Goes with `token_ratio` and `normalize_by_sequence`. Defaults are the paper's
    and TRL's (verl: clip_ratio, 0.2). A token with A_t = 0 adds 0 to the mean, as in verl. verl and TRL divide by
    all rows, empty ones too; we by sequences with tokens. Metrics: `clip_fraction_low`, `_high`, `clip_fraction`.
    """
    checks.number("geometric_surrogate", "low", low, low=0.0, finite=False)
    checks.number("geometric_surrogate", "high", high, low=0.0, finite=False)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        ratio = surrogates.geometric_ratio(loss.log_ratio, advantage, batch.sequence, loss.mask, low, high)
        below = (advantage < 0) & (loss.log_ratio < -low)
        loss = log_clipped(loss, below, (advantage > 0) & (loss.log_ratio > high))
        return loss.replace(policy=-advantage * ratio)

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def quadratic_surrogate(beta: float):
    """l_t = -A_t log π_t + β/2 d_t², d_t = log π_t - log anchor_t (DRO, arXiv 2405.19107; verl's `dro`).

    A policy gradient with a quadratic pull to the anchor and no clip: d need not be small. The paper fits a value
    function beside it; here the advantage is what the chain gives. β has no default (verl: required, > 0).
    Metric: `quadratic_pull`, the mean of β/2 d².
    """
    checks.number("quadratic_surrogate", "beta", beta, positive=True)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        policy = surrogates.quadratic(loss.logprob, loss.log_ratio, advantage, beta)
        loss = loss.log("quadratic_pull", 0.5 * beta * loss.log_ratio**2)
        return loss.replace(policy=policy)

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def vespo_surrogate(
    k_positive: float = 2.0, lam_positive: float = 3.0, k_negative: float = 3.0, lam_negative: float = 2.0
):
    """l_t = -φ A_t log π_t, φ = sg(W^k e^{λ (1 - W)}), W = Π_t r_t over the sequence (VESPO, arXiv 2602.10693).

    (k, λ) = (k_positive, lam_positive) where A_t ≥ 0, else (k_negative, lam_negative). φ is 1 on-policy, cuts
    sequences that have become much likelier and, because of W^k, much less likely ones. log W sums token log-ratios
    that are clipped to ±20 and is kept in [log 1e-8, 20], as in TRL; goes with `token_ratio(anchor="behavior")`, so
    that the mismatch of sampler and learner is part of W (TRL adds its logarithm). Defaults are TRL's; it averages over
    tokens. Metric: `vespo_weight`.
    """
    for argument, value in (
        ("k_positive", k_positive),
        ("lam_positive", lam_positive),
        ("k_negative", k_negative),
        ("lam_negative", lam_negative),
    ):
        checks.number("vespo_surrogate", argument, value, low=0.0)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        weight = surrogates.sequence_gamma_weight(
            loss.log_ratio,
            advantage,
            batch.sequence,
            loss.mask,
            (k_positive, lam_positive),
            (k_negative, lam_negative),
        )
        loss = loss.log("vespo_weight", weight)
        return loss.replace(policy=-weight * advantage * loss.logprob)

    return apply
