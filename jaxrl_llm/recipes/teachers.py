"""Recipes that imitate: a teacher's distribution, or the tokens of a data set."""

from __future__ import annotations

import math

from jaxrl_llm.recipes.build import Needs, policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    clip_surrogate,
    distill_advantage,
    imitate,
    next_token,
    normalize_by_sequence,
    normalize_by_token,
    token_ratio,
)

__all__ = ["opd", "sft"]


@recipe(kind=Needs("over", "topk or vocabulary", lambda over: over != "sampled"))
def opd(
    coef: float = 1.0, over: str = "sampled", kind: str = "reverse", entropy_coef: float | None = 0.0
) -> LossTransform:
    """On-policy distillation: the policy's own answers, judged token by token by a teacher (arXiv 2306.13649):
    l_t = -A_t r_t, A_t = coef (log teacher_t - log behavior_t), r_t = π_t / behavior_t; mean over tokens.

    over="sampled" is that, not clipped (tinker's importance sampling, which sums): the reverse KL by policy gradient,
    from one log-prob a token. over="topk" or "vocabulary": the divergence itself, `imitate` with this kind (forward,
    reverse, jsd).
    """
    if over != "sampled":
        return policy_gradient(
            normalize=normalize_by_token(),
            surrogate=imitate(coef, kind=kind, over=over),
            entropy_coef=entropy_coef,
        )
    return policy_gradient(
        distill_advantage(coef),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor="behavior"),
        surrogate=clip_surrogate(low=math.inf, high=math.inf),
        entropy_coef=entropy_coef,
    )


@recipe(threshold=Needs("positive"))
def sft(
    by_sequence: bool = False, positive: bool = False, threshold: float = 0.0, kl_coef: float | None = 0.0
) -> LossTransform:
    """Supervised fine-tuning: -log π_t of the tokens of the data, mean over tokens (InstructGPT, arXiv 2203.02155, §3.5).

    by_sequence=True: mean over sequences of their means. positive=True trains only trajectories with a reward above
    threshold: rejection-sampling fine-tuning (arXiv 2308.01825).
    """
    normalizer = normalize_by_sequence() if by_sequence else normalize_by_token()
    chosen = next_token(where="positive", threshold=threshold, normalize=normalizer)
    return policy_gradient(
        normalize=normalizer, surrogate=chosen if positive else next_token(), kl_coef=kl_coef
    )
