"""GRPO and what differs from it in scale, normaliser, clip or level of the ratio."""

from __future__ import annotations

from jaxrl_llm.recipes.build import Needs, policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    clip_surrogate,
    drop_truncated,
    geometric_surrogate,
    group_advantage,
    normalize_by_length_limit,
    normalize_by_sequence,
    normalize_by_token,
    sequence_ratio,
    sequence_ratio_per_token,
    shape_overlong,
    token_ratio,
)

__all__ = ["dapo", "dr_grpo", "gmpo", "grpo", "gspo", "gspo_token", "prorl"]


@recipe(kl_estimator=Needs("kl_coef"))
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
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, eq. 3): l_t = max(-A r_t, -A clip(r_t, 1 -
    clip_low, 1 + clip_high)), A = (R - mean) / (std + eps) over the group; mean over sequences of token means.

    Departures: no KL penalty by default (paper: 0.04, k3), hence no reference model in memory; std with ddof 1 and
    eps 1e-6 (verl, SkyRL, slime, tunix; TRL 1e-4, AReaL 1e-5, OpenRLHF 1e-9); a group of one has advantage 0 (verl:
    its reward). clip 0.2 as the paper and every system; dual (arXiv 1912.09729) is off (verl: always on, 3).
    """
    return policy_gradient(
        group_advantage(scale="std", eps=eps),
        normalize=normalize_by_sequence(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high, dual=dual),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
    )


@recipe()
def dr_grpo(
    limit: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GRPO done right (arXiv 2503.20783): l_t = max(-A r_t, -A clip(r_t)) with A = R - mean, summed over tokens /
    (sequences · limit).

    limit: the most tokens that an answer can have, so that a token weighs the same in a short and a long answer. The
    sequences are those that train a token, as in verl now (TRL and SkyRL count empty ones; verl until January 2026
    did not divide by them). clip 0.2 and no KL as the paper.
    """
    return policy_gradient(
        group_advantage(scale="none"),
        normalize=normalize_by_length_limit(limit),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe(overlong_buffer=Needs("overlong_limit"), overlong_penalty=Needs("overlong_limit"))
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
    """DAPO (arXiv 2503.14476): l_t = max(-A r_t, -A clip(r_t)) with clip-higher, A that of GRPO with a soft overlong
    punishment; mean over tokens, no KL.

    overlong_limit and overlong_buffer (tokens; buffer defaults to a fifth of the limit, as 4096 of 20480 in the
    paper) add the punishment, floored at -overlong_penalty as in the paper and OpenRLHF (verl, AReaL, tunix: no
    floor); filter_truncated adds overlong filtering. 0.2 and 0.28 are the paper's. Dynamic sampling is not here: it
    changes what is sampled, and is set in the config (rollout.refill_rounds).
    """
    overlong = []
    if overlong_limit:
        buffer = overlong_buffer or max(1, overlong_limit // 5)
        overlong.append(shape_overlong(limit=overlong_limit, buffer=buffer, penalty=overlong_penalty))
    return policy_gradient(
        *overlong,
        group_advantage(scale="std"),
        reject=[drop_truncated()] if filter_truncated else [],
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
    )


@recipe()
def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5): max(-A s, -A clip(s)), s = exp(mean log r_t) of
    the sequence; mean over sequences.

    0.0003 and 0.0004 are the paper's. The gradient goes through s, as in TRL, OpenRLHF, slime and NeMo (verl and
    SkyRL have the token form, `gspo_token`; AReaL weighs sequences by their tokens). No KL, as the paper.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_sequence(),
        ratio=sequence_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def gspo_token(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GSPO-token (arXiv 2507.18071, eq. 13): GRPO's l_t with r_t = sg(s) π_t / sg(π_t): value of the sequence ratio
    s, gradient and advantage of the token; mean over sequences of token means.

    Equal to `gspo` where the advantage is constant over a sequence. Defaults are those of the paper, as there.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_sequence(),
        ratio=sequence_ratio_per_token(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def gmpo(
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Geometric-mean policy optimisation (arXiv 2507.20673): -A exp(mean of the clipped log r_t); mean over
    sequences.

    The bounds are in nats, and clip on the side that the sign of A names, before the mean. 0.4 is the paper's and
    TRL's (verl takes its clip_ratio, 0.2). Sequences without a trained token count nowhere (verl counts them).
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_sequence(),
        ratio=token_ratio(anchor=anchor),
        surrogate=geometric_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def prorl(
    clip_low: float = 0.2,
    clip_high: float = 0.4,
    kl_coef: float | None = 1e-3,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """ProRL (arXiv 2505.24864): l_t = max(-A r_t, -A clip(r_t)) + kl_coef · k3_t to a reference that is reset, A
    that of GRPO; mean over tokens.

    The reset, every few hundred steps or when validation stalls, is set in the config (reference.reset_every and
    reset_optimizer), and so is dynamic sampling (rollout.refill_rounds). 0.2 and 0.4 are the paper's; the default of
    kl_coef is ours: that of verl and SkyRL.
    """
    return policy_gradient(
        group_advantage(scale="std"),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
