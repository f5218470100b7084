"""Named algorithms: functions of hyper-parameters that return a chain.

An argument of 0 or None builds the chain without the stage it belongs to: without `kl_coef` there is no
reference model in memory. `anchor` is the denominator of the ratio: "behavior" (the sampler's own log-probs;
one forward pass a token) or "proximal" (the learner's at the start of the train step; one more pass).
What a recipe leaves out of its paper is in its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jaxrl_llm.transforms import (
    LossTransform,
    approximate_proximal,
    chain,
    cispo_surrogate,
    clip_surrogate,
    distill_advantage,
    divergence_surrogate,
    drop_truncated,
    gae,
    geometric_surrogate,
    greedy_baseline_advantage,
    group_advantage,
    hinge_preference,
    imitate,
    imitate_chosen,
    kto_preference,
    leave_one_out_advantage,
    length_weighted_advantage,
    logistic_preference,
    mask_importance,
    mask_second_moment,
    multi_reward_advantage,
    next_token,
    normalize_by_length_limit,
    normalize_by_pair,
    normalize_by_sequence,
    normalize_by_sequence_sum,
    normalize_by_token,
    odds_preference,
    pass_at_k_advantage,
    penalize_kl,
    penalize_kl_in_reward,
    penalize_log_ratio_square,
    penalize_value_error,
    reinforce_surrogate,
    rescaled_group_advantage,
    returns_to_go,
    reward_entropy,
    robust_preference,
    score_preference,
    sequence_ratio,
    sequence_ratio_per_token,
    shape_overlong,
    simko_surrogate,
    soft_surrogate,
    square_preference,
    token_ratio,
    truncate_importance,
    whiten_advantage,
)

__all__ = [
    "RECIPES",
    "cdpo",
    "cispo",
    "dapo",
    "decoupled_ppo",
    "dpo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "gspo_token",
    "hinge",
    "icepop",
    "ipo",
    "kto",
    "m2po",
    "maxrl",
    "opd",
    "opo",
    "orpo",
    "pass_at_k",
    "ppo",
    "prime_rl",
    "prorl",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "reward_model",
    "rloo",
    "robust_dpo",
    "sapo",
    "sft",
    "simko",
    "simpo",
    "trpo",
]


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


# ---------------------------------------------------------------------------- other baselines and advantages


def reinforce_pp(
    gamma: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reward_kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE++ (arXiv 2501.03262): returns to go, whitened over the tokens of the batch, PPO's clip, no critic.

    reward_kl_coef is the paper's KL in the reward, k1 for every token; it needs a reference model and is off here.
    """
    return chain(
        *([penalize_kl_in_reward(reward_kl_coef)] if reward_kl_coef else []),
        returns_to_go(gamma),
        whiten_advantage(),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(entropy_coef=entropy_coef),
    )


def reinforce_pp_baseline(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE++-baseline (arXiv 2501.03262): the mean of the group as baseline, then whitening over the batch.

    The paper's KL in the loss is k2, off by default here.
    """
    return chain(
        group_advantage(scale="none"),
        whiten_advantage(),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, kl_estimator="k2", entropy_coef=entropy_coef),
    )


def remax(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy answer as baseline, sum over tokens.

    Needs batch.baseline_reward. The paper's KL is in the reward (`penalize_kl_in_reward`); kl_coef here is a k3
    penalty in the loss.
    """
    return chain(
        greedy_baseline_advantage(),
        *_corrections(importance_cap),
        normalize_by_sequence_sum(),
        reinforce_surrogate(),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def opo(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """On-policy RL with the optimal baseline (arXiv 2505.23585): length-weighted baseline, no clip, no KL.

    One update a batch, as the paper: with more, its advantage is no longer that of the sampling policy. Mean over
    tokens.
    """
    return chain(
        length_weighted_advantage(),
        *_corrections(importance_cap),
        normalize_by_token(),
        reinforce_surrogate(),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def gpg(
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """Group policy gradient (arXiv 2504.02546): plain REINFORCE, rescaled for groups without a signal, no KL.

    Mean over tokens.
    """
    return chain(
        rescaled_group_advantage(),
        *_corrections(importance_cap),
        normalize_by_token(),
        reinforce_surrogate(),
        *_optional(entropy_coef=entropy_coef),
    )


def maxrl(
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
    eps: float = 0.0,
) -> LossTransform:
    """Maximum likelihood RL (arXiv 2602.02710): A = (R - mean) / mean, REINFORCE, mean over tokens, no KL.

    For rewards ≥ 0. Towards rare successes its gradient is that of log p and not of p. eps = 0 as prime-rl (authors:
    1e-6); a group whose mean is not positive has advantage 0.
    """
    return chain(
        group_advantage(scale="mean", eps=eps),
        *_corrections(importance_cap),
        normalize_by_token(),
        reinforce_surrogate(),
        *_optional(entropy_coef=entropy_coef),
    )


def pass_at_k(
    k: int = 4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Pass@k training (arXiv 2508.10751): the analytic advantage of the best of k, in DAPO's loss without clip-higher.

    Groups must hold more than k answers for it to differ from rewarding the whole group.
    """
    return chain(
        pass_at_k_advantage(k=k),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def gdpo(
    weights: Mapping[str, float] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GDPO (arXiv 2601.05242): each part of the reward normalised in its group, summed, normalised over trajectories.

    Needs batch.rewards, the parts by name; `weights` chooses among them. The loss is GRPO's.
    """
    return chain(
        multi_reward_advantage(weights),
        whiten_advantage(level="trajectory", eps=1e-4),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


# ---------------------------------------------------------------------------------- over pairs of answers


def cispo(
    high: float = 5.0,
    low: float | None = None,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE under a capped, detached ratio; mean over tokens.

    high and low are ratios. The paper does not state its cap; 5 is that of ScaleRL (arXiv 2510.13786) and of SkyRL. Its
    dynamic sampling and length penalty are not here.
    """
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        cispo_surrogate(high=high, low=low),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def sapo(
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate for the clip; mean over sequences."""
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        token_ratio(anchor=anchor),
        soft_surrogate(tau_positive=tau_positive, tau_negative=tau_negative),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


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
    """Divergence PPO (arXiv 2602.04879): tokens are masked by how far their probability moved; mean over tokens.

    kind: "tv", "kl", "topk_tv" or "topk_kl". The anchor is that of the ratio and of the divergence. The top-k kinds
    with anchor="behavior" need lists recorded by the sampler; with "proximal" the learner makes them.
    """
    return chain(
        group_advantage(scale="std"),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        divergence_surrogate(kind=kind, low=low, high=high, anchor=anchor, cap=cap, k=k),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


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
    """SimKO (arXiv 2510.14807): GRPO that spreads the gain of good answers over the top-k tokens; mean over tokens."""
    return chain(
        group_advantage(scale="std"),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        simko_surrogate(share=share, k=k, quantile=quantile, boost=boost, low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def gmpo(
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Geometric-mean policy optimisation (arXiv 2507.20673): bounds in nats, applied before the mean of log-ratios."""
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_sequence(),
        token_ratio(anchor=anchor),
        geometric_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def _pairs(surrogate: LossTransform, nll_coef: float | None, average: bool = True) -> LossTransform:
    """Mean over pairs of a preference loss, with nll_coef times the NLL of the chosen answer where it is given."""
    extra = [imitate_chosen(nll_coef, average=average)] if nll_coef else []
    return chain(normalize_by_pair(), surrogate, *extra)


def dpo(beta: float = 0.1, nll_coef: float | None = 0.0, average: bool = False) -> LossTransform:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7).

    average=True takes mean log-ratios of an answer (TRL's sigmoid_norm); nll_coef adds the NLL of the chosen answer
    (RPO, arXiv 2404.19733), a mean over its tokens.
    """
    return _pairs(logistic_preference(beta, average=average), nll_coef)


def cdpo(beta: float = 0.1, smoothing: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """DPO (arXiv 2305.18290) with labels that are flipped with probability `smoothing` (E. Mitchell, "A note on DPO
    with noisy preferences and relationship to IPO", 2023)."""
    return _pairs(logistic_preference(beta, smoothing), nll_coef)


def robust_dpo(beta: float = 0.1, smoothing: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """Provably robust DPO (arXiv 2403.00409, eq. 12): unbiased under flipped labels."""
    return _pairs(robust_preference(beta, smoothing), nll_coef)


def ipo(beta: float = 0.1, average: bool = True, nll_coef: float | None = 0.0) -> LossTransform:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17), over mean log-ratios unless average=False."""
    return _pairs(square_preference(beta, average), nll_coef)


def hinge(beta: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """The hinge loss on DPO's margin (arXiv 2309.06657, eq. 10)."""
    return _pairs(hinge_preference(beta), nll_coef)


def kto(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> LossTransform:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): mean over answers, good or bad each by itself."""
    return chain(normalize_by_sequence(), kto_preference(beta, desirable, undesirable))


def orpo(beta: float = 0.1, average: bool = True) -> LossTransform:
    """Odds ratio preference optimisation (arXiv 2403.07691, eq. 6): NLL of the chosen answer + β × ratio term.

    No reference model. average=False takes sums for both terms (tunix's default).
    """
    return _pairs(odds_preference(beta, average), 1.0, average)


def simpo(beta: float = 2.0, gamma: float = 1.0, nll_coef: float | None = 0.0) -> LossTransform:
    """SimPO (arXiv 2405.14734, eq. 6): mean log-probs with a target margin γ. No reference model.

    β = 2 and γ / β = 0.5 are within the paper's ranges (its appendix); TRL has β = 0.1, γ = 0.5 and adds the NLL
    (`cpo_alpha` = 1), which is nll_coef here and off.
    """
    return _pairs(logistic_preference(beta, margin=gamma, reference=False, average=True), nll_coef)


def reward_model(margin: float = 0.0, center: float | None = 0.0) -> LossTransform:
    """Bradley-Terry reward model (arXiv 2203.02155, eq. 1) on the score of a value head.

    margin multiplies the difference of the rewards of the data; center pulls the sum of scores to 0.
    """
    return _pairs(score_preference(margin, center or 0.0), None)


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
    """Proximal policy optimisation with a critic (arXiv 1707.06347, eq. 7 and 9): GAE, whitened, mean over tokens.

    The critic (`learner.critic`) has parameters and a loss of its own; value_coef adds that loss, clipped by
    value_clip, to this one (eq. 9's c_1), for a critic that shares the policy's parameters. gamma = lam = 1, as in
    every system for language models (the paper: 0.99 and 0.95). The paper's values are not clipped. bootstrap: an answer cut by
    the length limit is worth what the critic expects after it.
    """
    return chain(
        gae(gamma=gamma, lam=lam, bootstrap=bootstrap),
        *([whiten_advantage()] if whiten else []),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high, dual=dual),
        *([penalize_value_error(value_coef, clip=value_clip)] if value_coef else []),
        *_optional(kl_coef=kl_coef, kl_estimator=kl_estimator, entropy_coef=entropy_coef),
    )


def trpo(
    gamma: float = 1.0,
    lam: float | None = None,
    eps: float = 1e-6,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Trust region policy optimisation (arXiv 1502.05477, eq. 14): l_t = -A_t r_t, r_t = π_t / proximal_t, not clipped.

    What keeps the policy close is the step that minimises it, within a bound on the KL:
    `learner.trust_region.make_trust_region_step`. The advantage is relative to the group (scaled by std + eps),
    without a critic; with lam it is GAE(gamma, lam), whitened, of the critic's values. Mean over tokens.
    """
    by_group = [group_advantage(scale="std", eps=eps)]
    return chain(
        *(by_group if lam is None else [gae(gamma=gamma, lam=lam), whiten_advantage()]),
        normalize_by_token(),
        token_ratio(anchor="proximal"),
        clip_surrogate(low=math.inf, high=math.inf),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def decoupled_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 5.0,
    approximate: bool = False,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5): clip around the proximal policy, weigh by proximal / behavior.

    Tokens whose weight exceeds cap are dropped (AReaL's behave_imp_weight_cap); the denominator stays.
    approximate=True interpolates the proximal policy by versions and needs no second forward pass. Departure: the
    advantage is relative to the group, without a critic.
    """
    if approximate:
        corrections, ratio = [], approximate_proximal(cap=cap)
    else:
        corrections, ratio = [mask_importance(None, cap)], token_ratio(anchor="proximal")
    return chain(
        group_advantage(scale="std"),
        *corrections,
        normalize_by_token(),
        ratio,
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def icepop(
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """IcePop (Ring-1T, arXiv 2510.18855): GRPO whose tokens are weighed by proximal / behavior in [low, high], else dropped.

    Sampler and learner that compute one token differently teach nothing by it. Dropped tokens stay in the denominator.
    """
    return chain(
        group_advantage(scale="std"),
        mask_importance(low, high),
        normalize_by_sequence(),
        token_ratio(anchor="proximal"),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def m2po(
    limit: float = 0.04,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """Second-moment trust policy optimisation (M2PO; Zheng et al., "Prosperity before Collapse", 2025; on PPO, arXiv 1707.06347).

    For stale data: the fewest tokens are dropped that bring the mean of (log behavior - log proximal)² below limit;
    the rest is weighed by proximal / behavior and clipped around the proximal policy, as AReaL does it.
    """
    return chain(
        group_advantage(scale="std"),
        mask_second_moment(limit),
        truncate_importance(math.inf),
        normalize_by_token(),
        token_ratio(anchor="proximal"),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def prime_rl(
    low: float = 0.2,
    high: float = 0.2,
    square_coef: float | None = 1e-3,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
) -> LossTransform:
    """prime-rl's default: DPPO's total-variation mask (arXiv 2602.04879) and a squared log-ratio (arXiv 2602.02276).

    The advantage is the reward minus the group's mean, unscaled; the ratio to the sampler is not capped. The policy
    term is -A sg(r) log π, theirs -A r: equal gradients. They also leave tokens of zero advantage out of the
    denominator.
    """
    return chain(
        group_advantage(scale="none"),
        normalize_by_token(),
        token_ratio(anchor="behavior"),
        divergence_surrogate("tv", low=low, high=high, cap=math.inf),
        *([penalize_log_ratio_square(square_coef)] if square_coef else []),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


def prorl(
    clip_low: float = 0.2,
    clip_high: float = 0.4,
    kl_coef: float | None = 1e-3,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """ProRL (arXiv 2505.24864): GRPO's advantage, DAPO's clip and token mean, and a KL to a reference that is reset.

    The reset, every few hundred steps or when validation stalls, is set in the config (reference.reset_every and
    reset_optimizer), and dynamic sampling is a filter of the rollout. The default of kl_coef is ours: that of verl
    and SkyRL.
    """
    return chain(
        group_advantage(scale="std"),
        *_corrections(importance_cap, anchor),
        normalize_by_token(),
        token_ratio(anchor=anchor),
        clip_surrogate(low=clip_low, high=clip_high),
        *_optional(kl_coef=kl_coef, entropy_coef=entropy_coef),
    )


# ------------------------------------------------------------------------------------------ imitation


def opd(
    coef: float = 1.0, over: str = "sampled", kind: str = "reverse", entropy_coef: float | None = 0.0
) -> LossTransform:
    """On-policy distillation: the policy's own answers, judged token by token by a teacher (arXiv 2306.13649).

    over="sampled": A_t = coef (log teacher - log behavior) of the sampled token, times the ratio to the sampler,
    not clipped (tinker's importance sampling): the reverse KL by policy gradient, from one log-prob a token.
    over="topk" or "vocabulary": the divergence itself, `imitate` with this kind (forward, reverse, jsd).
    """
    if over != "sampled":
        return chain(
            normalize_by_token(),
            imitate(coef, kind=kind, over=over),
            *_optional(entropy_coef=entropy_coef),
        )
    return chain(
        distill_advantage(coef),
        normalize_by_token(),
        token_ratio(anchor="behavior"),
        clip_surrogate(low=math.inf, high=math.inf),
        *_optional(entropy_coef=entropy_coef),
    )


def sft(
    by_sequence: bool = False, positive: bool = False, threshold: float = 0.0, kl_coef: float | None = 0.0
) -> LossTransform:
    """Supervised fine-tuning: -log π_t of the tokens of the data, mean over tokens (InstructGPT, arXiv 2203.02155, §3.5).

    by_sequence=True: mean over sequences of their means. positive=True trains only trajectories with a reward above
    threshold: rejection-sampling fine-tuning (arXiv 2308.01825).
    """
    normalizer = normalize_by_sequence() if by_sequence else normalize_by_token()
    chosen = next_token(where="positive", threshold=threshold, normalize=normalizer)
    return chain(normalizer, chosen if positive else next_token(), *_optional(kl_coef=kl_coef))


RECIPES: dict[str, Callable[..., LossTransform]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "simko": simko,
    "gmpo": gmpo,
    "dpo": dpo,
    "cdpo": cdpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "hinge": hinge,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
    "reward_model": reward_model,
    "ppo": ppo,
    "trpo": trpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "decoupled_ppo": decoupled_ppo,
    "icepop": icepop,
    "m2po": m2po,
    "prime_rl": prime_rl,
    "prorl": prorl,
    "opd": opd,
    "sft": sft,
}
"""{name: recipe}; what a config names."""
