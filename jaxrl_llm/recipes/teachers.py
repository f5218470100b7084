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
from jaxrl_llm.transforms.checks import number

__all__ = ["gkd", "opd", "sft"]


@recipe(
    kind=Needs("over", "topk or vocabulary", lambda over: over != "sampled"),
    k=Needs("over", "topk", lambda over: over == "topk"),
)
def opd(
    coef: float = 1.0,
    over: str = "sampled",
    kind: str = "reverse",
    k: int = 64,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """On-policy distillation: the policy's own answers, judged token by token by a teacher (arXiv 2306.13649):
    l_t = -A_t r_t, A_t = coef (log teacher_t - log behavior_t), r_t = π_t / behavior_t; mean over tokens.

    over="sampled" is that, not clipped (tinker's importance sampling, which sums): the reverse KL by policy gradient,
    from one log-prob a token. over="topk" or "vocabulary": the divergence itself, `imitate` with this kind (forward,
    reverse, jsd), over the teacher's k likeliest tokens and the rest as one, or over all.
    """
    if over != "sampled":
        return policy_gradient(
            normalize=normalize_by_token(),
            surrogate=imitate(coef, kind=kind, over=over, k=k),
            entropy_coef=entropy_coef,
        )
    return policy_gradient(
        distill_advantage(coef),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor="behavior"),
        surrogate=clip_surrogate(low=math.inf, high=math.inf),
        entropy_coef=entropy_coef,
    )


@recipe()
def gkd(beta: float = 0.5, coef: float = 1.0, entropy_coef: float | None = 0.0) -> LossTransform:
    """Generalised knowledge distillation (arXiv 2306.13649, eq. 1 and 4): l_t = coef JSD_β(teacher_t, π_t) over the
    whole vocabulary, JSD_β = β KL(T ‖ M) + (1 - β) KL(π ‖ M), M = (1 - β) π + β T; mean over tokens.

    beta=0 is KL(T ‖ π) and beta=1 KL(π ‖ T), as in TRL, whose default 0.5 this is; towards the ends JSD_β itself
    vanishes with β or 1 - β. On the policy's own answers it is the paper's λ = 1, on given ones (`jaxrl sft`) λ = 0;
    a mixture of both (TRL: half of the batches) is left out. Both are taken at rollout.temperature (TRL: 0.9).
    """
    number("gkd", "beta", beta, low=0.0, high=1.0)
    kind = "forward" if beta == 0 else "reverse" if beta == 1 else "jsd"
    arguments = {"beta": beta} if kind == "jsd" else {}
    return policy_gradient(
        normalize=normalize_by_token(),
        surrogate=imitate(coef, kind=kind, **arguments),
        entropy_coef=entropy_coef,
    )


@recipe(threshold=Needs("positive"))
def sft(
    by_sequence: bool = False, positive: bool = False, threshold: float = 0.0, kl_coef: float | None = 0.0
) -> LossTransform:
    """Supervised fine-tuning: -log π_t of the tokens of the data, mean over tokens (InstructGPT, arXiv 2203.02155,
    §3.5).

    by_sequence=True: mean over sequences of their means. positive=True trains only trajectories with a reward above
    threshold: rejection-sampling fine-tuning (arXiv 2308.01825). By default a mean over tokens, as OpenRLHF and
    prime-rl.
    """
    normalizer = normalize_by_sequence() if by_sequence else normalize_by_token()
    chosen = next_token(where="positive", threshold=threshold, normalize=normalizer)
    return policy_gradient(
        normalize=normalizer, surrogate=chosen if positive else next_token(), kl_coef=kl_coef
    )
