"""Surrogates: the policy term of each token, to be minimised. A chain has one."""

from __future__ import annotations

from jaxrl_llm.losses import surrogates
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import stage

__all__ = ["clip_surrogate", "reinforce_surrogate"]


@stage(reads=("batch.advantage",), writes=("loss.policy",))
def reinforce_surrogate():
    """l_t = -A_t log π_t (Williams, 1992). No ratio: on-policy, or with a correction's weight."""

    def apply(loss, batch):
        return loss.replace(policy=surrogates.reinforce(loss.logprob, batch.advantage))

    return apply


@stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.policy",))
def clip_surrogate(low: float = 0.2, high: float = 0.2, dual: float | None = None):
    """l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7).

    Bounds are offsets from 1; high > low is clip-higher (DAPO, arXiv 2503.14476, eq. 8); infinity does not
    clip. dual=c: l_t is at most -c A_t where A_t < 0 (arXiv 1912.09729); off by default (verl: always on, 3).
    Metrics: `clip_fraction` = `clip_fraction_low` (A < 0, r < 1 - low) + `clip_fraction_high` (A > 0, r > 1 +
    high); `clip_fraction_dual`.
    """
    checks.number("clip_surrogate", "low", low, low=0.0, finite=False)
    checks.number("clip_surrogate", "high", high, low=0.0, finite=False)
    checks.number("clip_surrogate", "dual", dual, low=1.0, optional=True)

    def apply(loss, batch):
        advantage = batch.advantage.astype(loss.logprob.dtype)
        policy = surrogates.clipped(loss.log_ratio, advantage, low, high)
        below = surrogates.clipped_low(loss.log_ratio, advantage, low).astype(policy.dtype)
        above = surrogates.clipped_high(loss.log_ratio, advantage, high).astype(policy.dtype)
        loss = loss.log("clip_fraction_low", below).log("clip_fraction_high", above)
        loss = loss.log("clip_fraction", below + above)
        if dual is not None:
            policy = surrogates.dual_clipped(policy, advantage, dual)
            cut = surrogates.dual_clipped_tokens(loss.log_ratio, advantage, dual)
            loss = loss.log("clip_fraction_dual", cut.astype(policy.dtype))
        return loss.replace(policy=policy)

    return apply
