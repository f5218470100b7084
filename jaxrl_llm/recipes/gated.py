"""Group-relative recipes that gate, mask or spread the ratio instead of clipping it."""

from __future__ import annotations

import math

from jaxrl_llm.recipes.build import Needs, policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    cispo_surrogate,
    divergence_surrogate,
    group_advantage,
    normalize_by_sequence,
    normalize_by_token,
    penalize_log_ratio_square,
    simko_surrogate,
    soft_surrogate,
    token_ratio,
)

__all__ = ["cispo", "dppo", "prime_rl", "sapo", "simko"]


@recipe()
def cispo(
    high: float = 5.0,
    low: float | None = None,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """CISPO (MiniMax-M1, arXiv 2506.13585): l_t = -sg(clip(r_t, low, high)) A log π_t; mean over tokens.

    high and low are ratios, not offsets from 1 (verl, slime and NeMo: offsets, 0.8 to 1.2). The paper does not state
    its cap; 5 is that of ScaleRL (arXiv 2510.13786) and of SkyRL. Its dynamic sampling and length penalty are not
    here. The value is not that of r A; the gradient of a capped token stays.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=cispo_surrogate(high=high, low=low),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def sapo(
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Soft adaptive policy optimisation (arXiv 2511.20347): l_t = -A (4/τ) σ(τ (r_t - 1)); mean over sequences of
    token means. τ is tau_positive where A > 0, else tau_negative.

    1.0 and 1.05 are the paper's and those of verl, TRL, AReaL and SkyRL. On-policy the gradient is REINFORCE's; the
    value is -2 A / τ.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_sequence(),
        ratio=token_ratio(anchor=anchor),
        surrogate=soft_surrogate(tau_positive=tau_positive, tau_negative=tau_negative),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe(k=Needs("kind", "topk_tv or topk_kl", lambda kind: str(kind).startswith("topk")))
def dppo(
    kind: str = "tv",
    low: float | None = None,
    high: float | None = None,
    anchor: str = "behavior",
    cap: float = 10.0,
    k: int = 16,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Divergence PPO (arXiv 2602.04879): l_t = -A sg(min(r_t, cap)) M_t log π_t, M_t = 0 where the divergence of π_t
    and the anchor exceeds its bound in the direction of A; mean over tokens.

    kind: "tv", "kl" (of the sampled token), "topk_tv" or "topk_kl" (of its k likeliest tokens). low and high default
    to 0.2 (tv) and 0.05 (kl), as the authors' examples; cap 10 is theirs (verl in effect 3). The anchor is that of
    the ratio and of the divergence. The top-k kinds with anchor="behavior" need lists recorded by the sampler; with
    "proximal" the learner makes them.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=divergence_surrogate(kind=kind, low=low, high=high, anchor=anchor, cap=cap, k=k),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def simko(
    share: float = 0.01,
    k: int = 3,
    quantile: float = 0.8,
    boost: float = 1.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "proximal",
) -> LossTransform:
    """SimKO (arXiv 2510.14807): l_t = max(-A ρ_t, -A clip(ρ_t)), ρ_t = (1 - share) r_t + share / k · Σ_j sg(r_t /
    r_tj) r_tj over the k likeliest tokens j where A > 0; A times `boost` where A < 0 and the token is the likeliest;
    mean over tokens.

    So a good answer gives the fraction `share` of its gradient to the k likeliest tokens. Both at tokens of an
    entropy above the `quantile` of their sequence. Defaults are the paper's. Departure: the k tokens are those of
    the proximal policy (the authors' code takes each policy's own, which may differ).
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=simko_surrogate(
            share=share, k=k, quantile=quantile, boost=boost, low=clip_low, high=clip_high
        ),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def prime_rl(
    low: float = 0.2,
    high: float = 0.2,
    square_coef: float | None = 1e-3,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """prime-rl's default: l_t = -A sg(r_t) M_t log π_t + square_coef (log r_t)²; DPPO's total-variation mask M_t
    (arXiv 2602.04879) and a squared log-ratio (arXiv 2602.02276); mean over tokens.

    A is the reward minus the group's mean, unscaled; r, to the sampler, is not capped. Their policy term is -A r:
    equal gradients. They also leave tokens of zero advantage out of the denominator. low, high (of the probability)
    and square_coef default to theirs.
    """
    return policy_gradient(
        group_advantage(scale="none"),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor="behavior"),
        surrogate=divergence_surrogate("tv", low=low, high=high, cap=math.inf),
        penalties=[penalize_log_ratio_square(square_coef)] if square_coef else [],
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
