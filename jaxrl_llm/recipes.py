"""Named algorithms: functions of hyper-parameters that return a chain.

An argument of 0 or None builds the chain without the stage it belongs to: without `kl_coef` there is no
reference model in memory. `anchor` is the denominator of the ratio: "behavior" (the sampler's own log-probs;
one forward pass a token) or "proximal" (the learner's at the start of the train step; one more pass).
What a recipe leaves out of its paper is in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    clip_surrogate,
    drop_truncated,
    group_advantage,
    leave_one_out_advantage,
    normalize_by_length_limit,
    normalize_by_sequence,
    normalize_by_sequence_sum,
    normalize_by_token,
    penalize_kl,
    reinforce_surrogate,
    returns_to_go,
    reward_entropy,
    sequence_ratio,
    sequence_ratio_per_token,
    shape_overlong,
    token_ratio,
    truncate_importance,
    whiten_advantage,
)

__all__ = ["RECIPES", "dapo", "dr_grpo", "grpo", "gspo", "gspo_token", "reinforce", "rloo"]


def _optional(
    *,
    kl_coef: float | None = None,
    kl_estimator: str = "k3",
    entropy_coef: float | None = None,
) -> list[LossTransform]:
    """The penalties whose coefficient is neither 0 nor None."""
    penalties = []
    if kl_coef:
        penalties.append(penalize_kl(kl_coef, estimator=kl_estimator))
    if entropy_coef:
        penalties.append(reward_entropy(entropy_coef))
    return penalties


def _corrections(importance_cap: float | None, anchor: str | None = None) -> list[LossTransform]:
    """truncate_importance, where a cap is given; `anchor` is that of the chain's ratio, if it has one."""
    if not importance_cap:
        return []
    if anchor == "behavior":
        raise ValueError(
            'importance_cap weighs by proximal / behavior, which a ratio anchored at "behavior" already '
            'contains. Set anchor="proximal", or leave importance_cap out.'
        )
    return [truncate_importance(importance_cap)]


def reinforce(
    gamma: float = 1.0,
    whiten: bool = True,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE with returns to go (Williams, 1992): l_t = -A_t log π_t, mean over tokens.

    whiten=False leaves out the whitening of the advantage over the batch, which is its only baseline.
    """
    return chain(
        returns_to_go(gamma),
        *([whiten_advantage()] if whiten else []),
        *_corrections(importance_cap),
        normalize_by_token(),
        reinforce_surrogate(),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def rloo(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE leave-one-out (arXiv 2402.14740): sum over the tokens, mean over sequences.

    The paper's KL penalty is in the reward (`penalize_kl_in_reward`); kl_coef here is a k3 penalty in the loss.
    """
    return chain(
        leave_one_out_advantage(),
        *_corrections(importance_cap),
        normalize_by_sequence_sum(),
        reinforce_surrogate(),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    dual: float | None = None,
    importance_cap: float | None = None,
    eps: float = 1e-6,
) -> LossTransform:
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, eq. 3): mean over sequences of token means.

    Departure: no KL penalty by default (the paper has 0.04), hence no reference model in memory.
    importance_cap adds `truncate_importance` and goes with anchor="proximal".
    """
    return chain(
        group_advantage(scale="std", eps=eps),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high, dual=dual),
        *_optional(kl_coef=kl_coef, kl_estimator=kl_estimator, entropy_coef=entropy_coef),
    )


def dr_grpo(
    limit: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GRPO done right (arXiv 2503.20783): no std, and a constant length `limit` (tokens) as the normaliser."""
    return chain(
        group_advantage(scale="none"),
        *_corrections(importance_cap, anchor),
        normalize_by_length_limit(limit),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def dapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    overlong_limit: int | None = None,
    overlong_buffer: int | None = None,
    overlong_penalty: float = 1.0,
    filter_truncated: bool = False,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """DAPO (arXiv 2503.14476): clip-higher, mean over tokens, soft overlong punishment, no KL.

    overlong_limit and overlong_buffer (tokens; buffer defaults to a fifth of the limit, as 4096 of 20480 in the
    paper) add the punishment; filter_truncated adds overlong filtering. Dynamic sampling is not here: it
    changes what is sampled, and is a filter of the rollout.
    """
    overlong = []
    if overlong_limit:
        buffer = overlong_buffer or max(1, overlong_limit // 5)
        overlong.append(shape_overlong(limit=overlong_limit, buffer=buffer, penalty=overlong_penalty))
    return chain(
        *overlong,
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        *([drop_truncated()] if filter_truncated else []),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(entropy_coef=entropy_coef),
    )


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5): the ratio of the sequence, clipped."""
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        sequence_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def gspo_token(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GSPO-token (arXiv 2507.18071, eq. 13): value of the sequence ratio, gradient and advantage of the token."""
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        sequence_ratio_per_token(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


RECIPES: dict[str, Callable[..., LossTransform]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "gspo_token": gspo_token,
}
"""{name: recipe}; what a config names."""
