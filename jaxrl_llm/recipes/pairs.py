"""Recipes over pairs of answers. h = (log π - log reference) of the chosen answer minus that of the rejected one."""

from __future__ import annotations

from jaxrl_llm.recipes.build import over_pairs, recipe
from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    hinge_preference,
    kto_preference,
    logistic_preference,
    normalize_by_sequence,
    odds_preference,
    robust_preference,
    score_preference,
    square_preference,
)

__all__ = ["cdpo", "dpo", "hinge", "ipo", "kto", "orpo", "reward_model", "robust_dpo", "simpo"]


@recipe()
def dpo(beta: float = 0.1, nll_coef: float | None = 0.0, average: bool = False) -> LossTransform:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log σ(beta h), sums over the tokens; mean over
    pairs.

    average=True takes mean log-ratios of an answer (TRL's sigmoid_norm); nll_coef adds the NLL of the chosen answer
    (RPO, arXiv 2404.19733), a mean over its tokens. beta = 0.1 as TRL, OpenRLHF and tunix (NeMo: 0.05).
    """
    return over_pairs(logistic_preference(beta, average=average), nll_coef)


@recipe()
def cdpo(beta: float = 0.1, smoothing: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """Conservative DPO: -(1 - ε) log σ(beta h) - ε log σ(-beta h), ε = smoothing; mean over pairs. DPO (arXiv
    2305.18290) with labels that are flipped with probability ε (E. Mitchell, "A note on DPO with noisy preferences
    and relationship to IPO", 2023).

    As OpenRLHF and tunix have it under label_smoothing, there 0 by default; 0.1 is ours. beta and nll_coef as in
    `dpo`.
    """
    return over_pairs(logistic_preference(beta, smoothing), nll_coef)


@recipe()
def robust_dpo(beta: float = 0.1, smoothing: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """Provably robust DPO (arXiv 2403.00409, eq. 12): (-(1 - ε) log σ(beta h) + ε log σ(-beta h)) / (1 - 2 ε), ε =
    smoothing; mean over pairs.

    Unbiased under labels flipped with probability ε. TRL has ε = 0 by default; 0.1 is ours. beta and nll_coef as in
    `dpo`.
    """
    return over_pairs(robust_preference(beta, smoothing), nll_coef)


@recipe()
def ipo(beta: float = 0.1, average: bool = True, nll_coef: float | None = 0.0) -> LossTransform:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17): (h - 1 / (2 beta))²; mean over pairs.

    h of mean log-ratios, as TRL and AReaL; average=False takes sums (the paper, OpenRLHF). beta = 0.1 as TRL;
    nll_coef as in `dpo`.
    """
    return over_pairs(square_preference(beta, average), nll_coef)


@recipe()
def hinge(beta: float = 0.1, nll_coef: float | None = 0.0) -> LossTransform:
    """The hinge loss on DPO's margin (RSO, arXiv 2309.06657): max(0, 1 - beta h); mean over pairs.

    beta = 0.1 as TRL; nll_coef as in `dpo`.
    """
    return over_pairs(hinge_preference(beta), nll_coef)


@recipe()
def kto(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> LossTransform:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): w (1 - σ(±beta (h_i - z))), h_i = log π - log reference of
    an answer, + for a good one, w = desirable or undesirable; mean over answers.

    Answers are good or bad each by itself. z ≥ 0 is the KL on mismatched pairs, given with the batch
    (reference_point) and detached. Defaults as TRL.
    """
    return chain(normalize_by_sequence(), kto_preference(beta, desirable, undesirable))


@recipe()
def orpo(beta: float = 0.1, average: bool = True) -> LossTransform:
    """Odds ratio preference optimisation (arXiv 2403.07691, eq. 6): NLL of the chosen answer - beta log σ(log of the
    ratio of the odds p / (1 - p)), log p a mean log-prob; mean over pairs.

    No reference model. average=False takes sums for both terms (tunix's default). beta = 0.1 as TRL.
    """
    return over_pairs(odds_preference(beta, average), 1.0, average)


@recipe()
def simpo(beta: float = 2.0, gamma: float = 1.0, nll_coef: float | None = 0.0) -> LossTransform:
    """SimPO (arXiv 2405.14734, eq. 6): -log σ(beta (mean log π of chosen - of rejected) - gamma); mean over pairs.

    No reference model. beta = 2 and gamma / beta = 0.5 are within the paper's ranges (its appendix); TRL has 0.1 and
    0.5, and adds the NLL (`cpo_alpha` = 1), which is nll_coef here and off.
    """
    return over_pairs(logistic_preference(beta, margin=gamma, reference=False, average=True), nll_coef)


@recipe()
def reward_model(margin: float = 0.0, center: float | None = 0.0) -> LossTransform:
    """Bradley-Terry reward model (arXiv 2203.02155, eq. 1): -log σ(s_chosen - s_rejected - margin · (R_chosen -
    R_rejected)) + center (s_chosen + s_rejected)²; mean over pairs.

    s is the score of a value head. margin multiplies the difference of the rewards of the data; center pulls the sum
    of scores to 0, as TRL's center_rewards_coefficient. Both are off, as in TRL.
    """
    return over_pairs(score_preference(margin, center or 0.0))
