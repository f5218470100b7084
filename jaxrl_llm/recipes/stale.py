"""Recipes for tokens that another policy sampled, or another program: proximal and behavior policy apart."""

from __future__ import annotations

import math

from jaxrl_llm.recipes.build import policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    approximate_proximal,
    clip_surrogate,
    group_advantage,
    mask_importance,
    mask_second_moment,
    normalize_by_sequence,
    normalize_by_token,
    token_ratio,
    truncate_importance,
)
from jaxrl_llm.transforms.checks import number

__all__ = ["decoupled_ppo", "icepop", "m2po"]


@recipe()
def decoupled_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 5.0,
    approximate: bool = False,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5): w_t max(-A r_t, -A clip(r_t)), r_t = π / proximal, w_t =
    proximal / behavior, detached; mean over tokens.

    Tokens with w above cap are dropped and stay in the denominator (AReaL's behave_imp_weight_cap, by default 5).
    approximate=True interpolates the proximal policy by versions and needs no second forward pass. Departure: the
    advantage is relative to the group, without a critic.
    """
    number("decoupled_ppo", "cap", cap, positive=True, optional=True)
    if approximate:
        corrections, ratio = [], approximate_proximal(cap=cap)
    else:
        corrections, ratio = [mask_importance(None, cap)], token_ratio(anchor="proximal")
    return policy_gradient(
        group_advantage(scale="std"),
        *corrections,
        normalize=normalize_by_token(),
        ratio=ratio,
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def icepop(
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """IcePop (Ring-1T, arXiv 2510.18855): w_t max(-A r_t, -A clip(r_t)), r_t = π / proximal, w_t = proximal /
    behavior where that is in [low, high], else 0; mean over sequences of token means.

    Sampler and learner that compute one token differently teach nothing by it. Dropped tokens stay in the
    denominator (verl: they leave it). By default 0.5 and 5, the bounds of OpenRLHF and NeMo; clip 0.2 as every
    system.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        mask_importance(low, high),
        normalize=normalize_by_sequence(),
        ratio=token_ratio(anchor="proximal"),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def m2po(
    limit: float = 0.04,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Second-moment trust policy optimisation (M2PO, arXiv 2510.01161): w_t max(-A r_t, -A clip(r_t)) of the tokens
    left, r_t = π / proximal, w_t = proximal / behavior.

    For stale data: the fewest tokens are dropped that bring the mean of (log behavior - log proximal)² below limit,
    and leave the denominator, as AReaL does it; mean over tokens. limit 0.04 is the paper's and AReaL's.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        mask_second_moment(limit),
        truncate_importance(math.inf),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor="proximal"),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
