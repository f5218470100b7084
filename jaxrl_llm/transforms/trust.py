"""Surrogates that read more than a ratio: how far a probability moved, a rank in the batch, the top tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import surrogates, trust
from jaxrl_llm.ops.numerics import absolute, at_least_f32, keep, safe_exp
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import Parts, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.ratio import ANCHORS
from jaxrl_llm.transforms.surrogate import log_clipped
from jaxrl_llm.types import LossState, TokenBatch

__all__ = ["covariance_surrogate", "divergence_surrogate", "simko_surrogate"]

Array = jax.Array

DIVERGENCES = {
    "tv": trust.binary_tv,
    "kl": trust.binary_kl,
    "topk_tv": trust.topk_tv,
    "topk_kl": trust.topk_kl,
}
THRESHOLDS = {"tv": 0.2, "kl": 0.05}


def _divergence_reads(arguments) -> tuple[str, ...]:
    anchor = arguments["anchor"]
    reads = ("loss.log_ratio", "batch.advantage", f"batch.logprob_{anchor}")
    if not str(arguments["kind"]).startswith("topk"):
        return reads
    lists = (f"batch.topk_ids(k={arguments['k']})", f"batch.topk_logprob_{anchor}", "loss.topk_logprob")
    return (*reads, *lists)


def _topk(stage_name: str, loss: LossState, batch: TokenBatch, anchor: str) -> tuple[Array, Array]:
    """(current, anchor) log-probs of the listed tokens, [B, T, K], 0 outside the mask."""
    require(stage_name, batch, "topk_ids")
    current = require(stage_name, loss, "topk_logprob")
    there = require(stage_name, batch, f"topk_logprob_{anchor}")
    if current.shape != there.shape:
        raise ValueError(
            f"{stage_name}: loss.topk_logprob has the shape {current.shape} and batch.topk_logprob_{anchor} "
            f"{there.shape}. Both hold log-probs of the tokens batch.topk_ids, [B, T, K]."
        )
    where = batch.mask[..., None]
    return keep(where, at_least_f32(current)), keep(where, there)


@stage(reads=_divergence_reads, writes=("loss.policy",))
def divergence_surrogate(
    kind: str = "tv",
    low: float | None = None,
    high: float | None = None,
    anchor: str = "behavior",
    cap: float = 10.0,
    k: int = 16,
):
    """l_t = -sg(min(r_t, cap)) M_t A_t log π_t: a mask by divergence in the place of the clip (DPPO, arXiv 2602.04879).

    M_t = 0 where the policy has moved further from the anchor than allowed, in the direction that the advantage
    pushes: A > 0, D > high and p > p₀, or A < 0, D > low and p < p₀. D is, for the sampled token against all
    others, |p - p₀| (kind="tv") or KL(p₀ ‖ p) ("kl"); "topk_tv" and "topk_kl" tell the k tokens of batch.topk_ids
    apart and put the others in one bucket. A clip of the ratio holds back rare tokens, whose ratio swings wildly at
    no change of the distribution, and lets frequent ones move far; this does neither.

    low and high default to 0.2 for tv and 0.05 for kl, as the authors recommend; a token exactly at a threshold is
    kept. cap=10 is the default of the authors' code (verl: clip_ratio_c, 3 in practice; SkyRL: none but e^20).
    anchor is the policy of D; the ratio brings its own (authors: the sampler for both, their `recompute` variants take
    D from the proximal policy; verl takes both from its old policy). SkyRL and prime-rl minimise -A r M with r on the
    gradient tape: same gradient, another value. For top-k kinds the list is the rollout's, or, with
    anchor="proximal", the k likeliest tokens of the proximal policy, which the learner fills in. Under top-k, top-p or
    min-p "tv" and "kl" are of the distribution that was drawn from, the top-k kinds of the whole one.
    Metrics: `divergence`, and `clip_fraction_low`, `_high`, `clip_fraction`: the tokens with M = 0.
    """
    checks.choice("divergence_surrogate", "kind", kind, tuple(DIVERGENCES))
    checks.choice("divergence_surrogate", "anchor", anchor, ANCHORS)
    checks.number("divergence_surrogate", "low", low, low=0.0, optional=True, finite=False)
    checks.number("divergence_surrogate", "high", high, low=0.0, optional=True, finite=False)
    checks.number("divergence_surrogate", "cap", cap, positive=True, finite=False)
    checks.number("divergence_surrogate", "k", k, low=1)
    usual = THRESHOLDS[kind.removeprefix("topk_")]
    below_limit, above_limit = usual if low is None else low, usual if high is None else high

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        logprob = jax.lax.stop_gradient(loss.logprob)
        there = require("divergence_surrogate", batch, f"logprob_{anchor}")
        if kind.startswith("topk"):
            lists = _topk("divergence_surrogate", loss, batch, anchor)
            divergence = DIVERGENCES[kind](*map(jax.lax.stop_gradient, lists))
        else:
            divergence = DIVERGENCES[kind](logprob, there)
        below, above = trust.outside_trust(divergence, logprob, there, advantage, below_limit, above_limit)
        loss = log_clipped(loss, below, above).log("divergence", divergence)
        policy = surrogates.capped_score(loss.logprob, loss.log_ratio, advantage, None, cap)
        return loss.replace(policy=keep(~(below | above), policy))

    return apply


@stage(
    reads=("loss.log_ratio", "batch.advantage", "batch.logprob_proximal"),
    writes=("batch.picked", "loss.policy"),
)
def covariance_surrogate(
    kind: str = "kl",
    fraction: float = 2e-4,
    coef: float = 1.0,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    low: float = 0.2,
    high: float = 0.2,
    *,
    name: str,
):
    """Holds back the few tokens that lower the entropy most (Clip-Cov and KL-Cov, arXiv 2505.22617).

    c_t = (A_t - mean A)(log π_t - mean log π), means over the counted tokens of the batch, N of them. n = max(1,
    ⌊fraction · N⌋) tokens are picked:

      kind="kl": those with the largest c > 0.  l_t = -A_t r_t, plus coef |log r_t| where picked; no clip.
      kind="clip": any n of those with cov_low < c < cov_high.  PPO's clip (low, high), and l_t = 0 where picked.

    Departures: the ranking is made once a rollout batch, from the proximal log-probs, so that it is the same for any
    split into micro-batches; the paper, verl and SkyRL rank within each micro-batch, by current log-probs (equal on
    the first update). KL-Cov picks tokens that tie, and none with c ≤ 0. Clip-Cov picks by a fixed hash of
    (sequence, position, learner version) where the paper draws at random; a token that the clip cuts anyway keeps its
    loss. |x| has derivative 0 at 0 (PyTorch as well). Defaults are verl's, but coef = 1 as in its documentation and in
    SkyRL (its code: 0.1; SkyRL's fraction: 0.2). SkyRL's covariances see advantages already divided by the number of
    tokens, which makes its coef N times larger; ours do not. Metrics: `covariance`, `covariance_picked`, and those of
    `clip_surrogate` for kind="clip".
    """
    checks.choice("covariance_surrogate", "kind", kind, ("kl", "clip"))
    checks.number("covariance_surrogate", "fraction", fraction, low=0.0, high=1.0)
    checks.number("covariance_surrogate", "coef", coef, low=0.0)
    checks.number("covariance_surrogate", "cov_low", cov_low, finite=False)
    checks.number("covariance_surrogate", "cov_high", cov_high, finite=False)
    checks.number("covariance_surrogate", "low", low, low=0.0, finite=False)
    checks.number("covariance_surrogate", "high", high, low=0.0, finite=False)

    def prepare(batch):
        proximal = require("covariance_surrogate", batch, "logprob_proximal")
        counted = batch.mask if batch.counted is None else batch.mask & batch.counted
        scores = trust.covariance(batch.advantage.astype(proximal.dtype), proximal, counted)
        number = jnp.maximum(jnp.floor(jnp.sum(counted) * fraction), 1).astype(jnp.int32)
        if kind == "kl":
            picked = trust.largest(scores, counted & (scores > 0), number)
        else:
            inside = counted & (scores > cov_low) & (scores < cov_high)
            draw = trust.hash_uniform(batch.sequence, batch.positions, batch.learner_version)
            picked = trust.largest(draw, inside, number)
        batch = batch.log("covariance", scores, counted)
        batch = batch.log("covariance_picked", picked.astype(scores.dtype), counted)
        return batch.replace(picked={**batch.picked, name: picked})

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        picked = batch.picked[name]
        if kind == "kl":
            pull = jnp.where(picked, coef * absolute(loss.log_ratio), 0.0)
            return loss.replace(policy=-advantage * safe_exp(loss.log_ratio) + pull)
        below = surrogates.clipped_low(loss.log_ratio, advantage, low)
        above = surrogates.clipped_high(loss.log_ratio, advantage, high)
        policy = surrogates.clipped(loss.log_ratio, advantage, low, high)
        return log_clipped(loss, below, above).replace(policy=keep(~picked | below | above, policy))

    return Parts(prepare=prepare, apply=apply)


@stage(
    reads=lambda a: (
        "loss.log_ratio",
        "batch.advantage",
        f"batch.topk_ids(k={a['k']})",
        "batch.topk_logprob_proximal",
        "loss.topk_logprob",
        "loss.entropy",
    ),
    writes=("loss.policy",),
)
def simko_surrogate(
    share: float = 0.01,
    k: int = 3,
    quantile: float = 0.8,
    boost: float = 1.1,
    low: float = 0.2,
    high: float = 0.2,
):
    """PPO's clip that spreads what a good answer gains over the top-K tokens (SimKO, arXiv 2510.14807).

    At forking tokens, those whose entropy is above the `quantile` of their sequence:

      A_t > 0:  r_t becomes (1 - a) r_t + (a / K) Σ_k sg(r_t / ρ_k) ρ_k, a = share, ρ_k = π_k / proximal_k of the K
                likeliest tokens: the same value, with a share of its gradient on the list;
      A_t < 0:  where the sampled token is the likeliest one, A_t becomes boost · A_t.

    Then l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)). Defaults are the authors'. Departures: the list is that
    of the proximal policy and stays fixed for the train step, so that entry k of both sides is the same token (the
    authors' code takes the current top-K and the old policy's own top-K, which may be other tokens), and an answer is
    good or bad by the sign of its advantage instead of reward = 1 (the same for rewards of 0 and 1). Not a
    REINFORCE gradient on-policy, by design. Metrics: `forking`, and those of `clip_surrogate`.
    """
    checks.number("simko_surrogate", "share", share, low=0.0, high=1.0)
    checks.number("simko_surrogate", "k", k, low=1)
    checks.number("simko_surrogate", "quantile", quantile, low=0.0, high=1.0)
    checks.number("simko_surrogate", "boost", boost, positive=True)
    checks.number("simko_surrogate", "low", low, low=0.0, finite=False)
    checks.number("simko_surrogate", "high", high, low=0.0, finite=False)

    def apply(loss, batch):
        dtype = loss.logprob.dtype
        current, there = _topk("simko_surrogate", loss, batch, "proximal")
        entropy = jax.lax.stop_gradient(require("simko_surrogate", loss, "entropy"))
        threshold = trust.sequence_quantile(entropy, batch.sequence, batch.mask, quantile)
        forking = batch.mask & (entropy > threshold)
        likeliest = batch.topk_ids[..., 0] == batch.tokens

        advantage = batch.advantage.astype(dtype)
        good, bad = forking & (advantage > 0), forking & (advantage < 0) & likeliest
        advantage = jnp.where(bad, boost, 1.0) * advantage
        ratio = trust.spread_ratio(loss.log_ratio, current - there, jnp.where(good, share, 0.0).astype(dtype))
        below = surrogates.clipped_low(loss.log_ratio, advantage, low)
        above = surrogates.clipped_high(loss.log_ratio, advantage, high)
        loss = log_clipped(loss, below, above).log("forking", forking.astype(dtype))
        return loss.replace(policy=surrogates.clipped_ratio(ratio, advantage, low, high))

    return apply
