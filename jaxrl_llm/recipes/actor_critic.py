"""PPO with a critic, and TRPO."""

from __future__ import annotations

import math

from jaxrl_llm.recipes.build import Needs, policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    clip_surrogate,
    gae,
    group_advantage,
    normalize_by_token,
    penalize_value_error,
    token_ratio,
    whiten_advantage,
)

__all__ = ["ppo", "trpo"]


@recipe(kl_estimator=Needs("kl_coef"), value_clip=Needs("value_coef"))
def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: bool = False,
    whiten: bool = True,
    value_coef: float | None = 0.0,
    value_clip: float | None = 0.2,
    kl_coef: float | None = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float | None = 0.0,
    anchor: str = "proximal",
    dual: float | None = None,
    importance_cap: float | None = None,
) -> LossTransform:
    """Proximal policy optimisation with a critic (arXiv 1707.06347, eq. 7 and 9): l_t = max(-A_t r_t, -A_t
    clip(r_t)), A_t by GAE(gamma, lam), whitened; mean over tokens.

    The critic (`learner.critic`) has parameters and a loss of its own; value_coef adds that loss, clipped by
    value_clip, to this one (eq. 9's c_1), for a critic that shares the policy's parameters. gamma = lam = 1, as in
    every system for language models (the paper: 0.99 and 0.95). The paper's values are not clipped (value_clip 0.2:
    SkyRL, slime). bootstrap: an answer cut by the length limit is worth what the critic expects after it. dual
    (arXiv 1912.09729) is off (verl: always on, 3).
    """
    return policy_gradient(
        gae(gamma=gamma, lam=lam, bootstrap=bootstrap),
        *([whiten_advantage()] if whiten else []),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high, dual=dual),
        penalties=[penalize_value_error(value_coef, clip=value_clip)] if value_coef else [],
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
    )


@recipe(
    gamma=Needs("lam", holds=lambda lam: lam is not None),
    eps=Needs("lam", "None", lambda lam: lam is None),
)
def trpo(
    gamma: float = 1.0,
    lam: float | None = None,
    eps: float = 1e-6,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Trust region policy optimisation (arXiv 1502.05477, eq. 14): l_t = -A_t r_t, r_t = π_t / proximal_t, not
    clipped.

    What keeps the policy close is the step that minimises it, within a bound on the KL:
    `learner.trust_region.make_trust_region_step`. The advantage is relative to the group (scaled by std + eps),
    without a critic; with lam it is GAE(gamma, lam), whitened, of the critic's values. Mean over tokens. No system
    for language models has it; gamma = 1 as in `ppo`.
    """
    by_group = [group_advantage(scale="std", eps=eps)]
    return policy_gradient(
        *(by_group if lam is None else [gae(gamma=gamma, lam=lam), whiten_advantage()]),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor="proximal"),
        surrogate=clip_surrogate(low=math.inf, high=math.inf),
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
