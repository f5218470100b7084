"""Recipes that differ in the advantage: REINFORCE and what is subtracted from its return."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_llm.recipes.build import policy_gradient, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    clip_surrogate,
    greedy_baseline_advantage,
    group_advantage,
    leave_one_out_advantage,
    length_weighted_advantage,
    multi_reward_advantage,
    normalize_by_sequence,
    normalize_by_sequence_sum,
    normalize_by_token,
    pass_at_k_advantage,
    penalize_kl_in_reward,
    reinforce_surrogate,
    rescaled_group_advantage,
    returns_to_go,
    token_ratio,
    whiten_advantage,
)

__all__ = [
    "gdpo",
    "gpg",
    "maxrl",
    "opo",
    "pass_at_k",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
]


@recipe()
def reinforce(
    gamma: float = 1.0,
    whiten: bool = True,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE with returns to go (Williams, 1992): l_t = -A_t log π_t, A_t = Σ gamma^(s-t) R_s; mean over tokens.

    Departure: A is whitened over the tokens of the batch, which is its only baseline; whiten=False leaves it out.
    gamma = 1 as in every system for language models.
    """
    return policy_gradient(
        returns_to_go(gamma),
        *([whiten_advantage()] if whiten else []),
        normalize=normalize_by_token(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def rloo(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE leave-one-out (arXiv 2402.14740): l_t = -A log π_t, A = R - mean of the others of the group; sum
    over the tokens, mean over sequences.

    The paper's KL penalty is in the reward (`penalize_kl_in_reward`; TRL: 0.05); kl_coef here is a k3 penalty in the
    loss, off. A group of one has advantage 0 (verl's plain form: its reward).
    """
    return policy_gradient(
        leave_one_out_advantage(),
        normalize=normalize_by_sequence_sum(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def reinforce_pp(
    gamma: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reward_kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE++ (arXiv 2501.03262): l_t = max(-A_t r_t, -A_t clip(r_t)), A_t the return to go, whitened over the
    tokens of the batch; no critic; mean over tokens.

    gamma = 1 as in every system for language models. reward_kl_coef is the paper's KL in the reward, k1 for every
    token; it needs a reference model and is off here (OpenRLHF: 0.01). Returns pass over masked spans and A is 0
    there, as in verl now (SkyRL and older verl: reset).
    """
    return policy_gradient(
        *([penalize_kl_in_reward(reward_kl_coef)] if reward_kl_coef else []),
        returns_to_go(gamma),
        whiten_advantage(),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
    )


@recipe()
def reinforce_pp_baseline(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """REINFORCE++-baseline (arXiv 2501.03262): l_t = max(-A r_t, -A clip(r_t)), A = R - mean of the group, then
    whitened over the tokens of the batch; mean over tokens.

    The paper's KL in the loss is k2, off by default here. slime does not whiten.
    """
    return policy_gradient(
        group_advantage(scale="none"),
        whiten_advantage(),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        kl_estimator="k2",
        entropy_coef=entropy_coef,
    )


@recipe()
def remax(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """ReMax (arXiv 2310.10505): l_t = -A log π_t, A = R - the reward of the greedy answer; sum over tokens, mean over
    sequences.

    Needs batch.baseline_reward. The paper's KL is in the reward (`penalize_kl_in_reward`); kl_coef here is a k3
    penalty in the loss, off.
    """
    return policy_gradient(
        greedy_baseline_advantage(),
        normalize=normalize_by_sequence_sum(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def opo(
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """On-policy RL with the optimal baseline (arXiv 2505.23585): l_t = -A log π_t, A = R - Σ n R / Σ n over the
    group, n the tokens of an answer; mean over tokens.

    No clip, no KL. One update a batch, as the paper: with more, its advantage is no longer that of the sampling
    policy.
    """
    return policy_gradient(
        length_weighted_advantage(),
        normalize=normalize_by_token(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def gpg(
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
) -> LossTransform:
    """Group policy gradient (arXiv 2504.02546): l_t = -A log π_t, A = α (R - mean of the group), α rescales for the
    groups without a signal; mean over tokens.

    Plain REINFORCE, no KL. verl's α counts answers whose reward is not 0 instead (rescale="nonzero" of the stage).
    There are no hyper-parameters of its own.
    """
    return policy_gradient(
        rescaled_group_advantage(),
        normalize=normalize_by_token(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
    )


@recipe()
def maxrl(
    entropy_coef: float | None = 0.0,
    importance_cap: float | None = None,
    eps: float = 0.0,
) -> LossTransform:
    """Maximum likelihood RL (arXiv 2602.02710): l_t = -A log π_t, A = (R - mean) / (mean + eps) over the group; mean
    over tokens.

    For rewards ≥ 0, no KL. Towards rare successes its gradient is that of log p and not of p. eps = 0 as prime-rl
    (authors: 1e-6); a group whose mean is not positive has advantage 0.
    """
    return policy_gradient(
        group_advantage(scale="mean", eps=eps),
        normalize=normalize_by_token(),
        surrogate=reinforce_surrogate(),
        importance_cap=importance_cap,
        entropy_coef=entropy_coef,
    )


@recipe()
def pass_at_k(
    k: int = 4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """Pass@k training (arXiv 2508.10751): l_t = max(-A r_t, -A clip(r_t)), A the analytic advantage of the best of k;
    mean over tokens (DAPO's loss without clip-higher).

    Groups must hold more than k answers for it to differ from rewarding the whole group. k = 4 is ours.
    """
    return policy_gradient(
        pass_at_k_advantage(k=k),
        normalize=normalize_by_token(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


@recipe()
def gdpo(
    weights: Mapping[str, float] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float | None = 0.0,
    entropy_coef: float | None = 0.0,
    anchor: str = "behavior",
    importance_cap: float | None = None,
) -> LossTransform:
    """GDPO (arXiv 2601.05242): GRPO's l_t with A = Σ w_k (R_k - mean_k) / std_k over the parts k of the reward, each
    in its group, then normalised over the trajectories of the batch; mean over sequences of token means.

    Needs batch.rewards, the parts by name; `weights` chooses among them (default: all, 1). The last normalisation is
    over trajectories as in TRL and NeMo (verl: over tokens), with TRL's eps 1e-4.
    """
    return policy_gradient(
        multi_reward_advantage(weights),
        whiten_advantage(level="trajectory", eps=1e-4),
        normalize=normalize_by_sequence(),
        ratio=token_ratio(anchor=anchor),
        surrogate=clip_surrogate(low=clip_low, high=clip_high),
        anchor=anchor,
        importance_cap=importance_cap,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
