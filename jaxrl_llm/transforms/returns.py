"""Advantages that differ from token to token: from streams of rewards, critics, baselines and teachers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import advantages, divergences
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import suffix_scan, trajectories
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.advantage import outcomes, write_advantage
from jaxrl_llm.transforms.base import Parts, stage
from jaxrl_llm.transforms.dataflow import require

__all__ = [
    "agent_baseline_advantage",
    "distill_advantage",
    "gae",
    "greedy_baseline_advantage",
    "returns_to_go",
]

Array = jax.Array


@stage(reads=("batch.reward", "batch.reward_valid"), writes=("batch.advantage", "batch.returns"))
def returns_to_go(gamma: float = 1.0):
    """A_t = G_t = r_t + γ G_{t+1} over the trained tokens of a trajectory (REINFORCE; Sutton & Barto, 13.3).

    Masked spans (tool output) are crossed, without discount. Without a baseline: add `whiten_advantage`
    (REINFORCE++, arXiv 2501.03262). Also writes batch.returns.
    """
    checks.number("returns_to_go", "gamma", gamma, low=0.0, high=1.0)

    def prepare(batch):
        returns = advantages.discounted_returns(batch.reward, gamma, batch.trajectory, batch.mask)
        batch = batch.replace(returns=returns)
        return write_advantage(batch, returns, batch.reward_valid)

    return prepare


@stage(
    reads=lambda a: (
        "batch.reward",
        "batch.reward_valid",
        "batch.value",
        *(("batch.truncated", "batch.bootstrap_value") if a["bootstrap"] else ()),
    ),
    writes=("batch.advantage", "batch.returns"),
)
def gae(
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_value: float | None = None,
    length_adaptive: float | None = None,
    bootstrap: bool = False,
):
    """A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t; returns G_t = A_t + V_t (GAE, arXiv 1506.02438, eq. 16).

    t + 1 is the next trained token of the trajectory: spans outside the mask carry values and advantages across (verl,
    tunix, NeMo-RL, AReaL; SkyRL and slime recurse over them, OpenRLHF takes them as states of value 0). V is
    batch.value, the critic's estimate before the token, detached. γ = λ = 1 as in verl, SkyRL, slime, OpenRLHF, AReaL.
    Not whitened: add `whiten_advantage` (verl, SkyRL, tunix, OpenRLHF always do, after the returns are taken).

    lam_value: another λ for the returns (decoupled GAE of VAPO, arXiv 2504.05118, which has 1.0 there); None: lam.
    length_adaptive: α > 0 replaces lam by 1 - 1 / max(α n, 1), n the trained tokens of the trajectory (VAPO: 0.05).
    bootstrap: a truncated trajectory goes on with batch.bootstrap_value after its last token (AReaL does so where an
    answer fills its window); False: with 0, as an end.

    A trajectory without a reward has advantage 0 and returns V: it teaches neither policy nor critic. Metrics:
    `returns`, `explained_variance` = 1 - var(G - V) / var(G).
    """
    checks.number("gae", "gamma", gamma, low=0.0, high=1.0)
    checks.number("gae", "lam", lam, low=0.0, high=1.0)
    checks.number("gae", "lam_value", lam_value, low=0.0, high=1.0, optional=True)
    checks.number("gae", "length_adaptive", length_adaptive, positive=True, optional=True)
    checks.choice("gae", "bootstrap", bootstrap, (False, True))

    def prepare(batch):
        each = trajectories(batch.trajectory, batch.mask)
        value = keep(batch.mask, jax.lax.stop_gradient(require("gae", batch, "value")))
        end = jnp.zeros_like(value)
        if bootstrap:
            after = jax.lax.stop_gradient(require("gae", batch, "bootstrap_value"))
            end = keep(each.last & batch.truncated, after)

        def advantage(factor: float | Array) -> Array:
            found = advantages.generalized_advantages(
                batch.reward, value, end, gamma, factor, batch.trajectory, batch.mask
            )
            return keep(batch.mask & batch.reward_valid, found)

        policy_lam = (
            lam
            if length_adaptive is None
            else 1.0 - 1.0 / each.spread(jnp.maximum(length_adaptive * each.length, 1.0))
        )
        policy = advantage(policy_lam)
        same = lam_value is None and length_adaptive is None
        returns = value + (policy if same else advantage(lam if lam_value is None else lam_value))
        batch = write_advantage(batch.replace(returns=returns), policy, batch.reward_valid)
        explained = advantages.explained_variance(value, returns, batch.mask & batch.reward_valid)
        return batch.log("returns", returns, batch.reward_valid).log(
            "explained_variance", jnp.broadcast_to(explained, batch.shape)
        )

    return prepare


@stage(
    reads=("batch.reward", "batch.reward_valid", "batch.baseline_reward"),
    writes=("batch.advantage", "batch.returns"),
)
def greedy_baseline_advantage():
    """A_t = G_t - b, G_t = Σ_{s ≥ t} r_s, b the reward of the greedy answer to the same prompt (ReMax, arXiv 2310.10505).

    b is batch.baseline_reward, which the rollout fills. A trajectory without a reward, or whose baseline is not
    finite (the greedy answer could not be scored), has advantage 0. Also writes batch.returns = G, as verl.

    Metric: `baseline_reward`, mean over trajectories.
    """

    def prepare(batch):
        baseline = require("greedy_baseline_advantage", batch, "baseline_reward")
        known = batch.reward_valid & jnp.isfinite(baseline)
        baseline = keep(known, baseline)
        returns = advantages.discounted_returns(batch.reward, 1.0, batch.trajectory, batch.mask)
        batch = write_advantage(batch.replace(returns=returns), returns - baseline, known)
        last = trajectories(batch.trajectory, batch.mask).last
        return batch.log("baseline_reward", baseline, last & known)

    return prepare


@stage(
    reads=lambda a: (
        "batch.reward",
        "batch.reward_valid",
        *(("batch.agent",) if a["agents"] > 1 else ()),
    ),
    writes=("batch.advantage",),
)
def agent_baseline_advantage(agents: int = 1, decay: float = 0.95, initial: float = 0.0):
    """A_i = R_i - b_a, b_a a running mean of the rewards of the agent a that answered (RAE of SPIRAL, arXiv 2506.24119).

    For games that a policy plays in several roles, whose rewards have different means. batch.agent gives the role,
    0 … agents - 1; with agents=1 it is not read: REINFORCE with a moving baseline. The baselines are the state of the
    stage: they start at `initial`, are read before the batch and move once a rollout batch,
    b ← d^n b + (1 - d^n) mean of its n rewards.

    Departure: the paper and prime-rl take the trajectories of a batch one after the other, each against a baseline
    that the ones before it have moved, so that the advantage depends on their order. Equal for batches of one.
    A trajectory without a reward, or of an agent outside the range, has advantage 0. Metric: `agent_baseline`.
    """
    if isinstance(agents, bool) or not isinstance(agents, int) or agents < 1:
        raise ValueError(f"agent_baseline_advantage: agents must be an integer ≥ 1, got {agents!r}.")
    checks.number("agent_baseline_advantage", "decay", decay, low=0.0, high=1.0)
    checks.number("agent_baseline_advantage", "initial", initial)

    def init():
        return {"baseline": jnp.full((agents,), initial, jnp.result_type(float))}

    def prepare(batch, state):
        each, reward, valid = outcomes(batch)
        of = jnp.zeros(valid.shape, jnp.int32)
        if agents > 1:
            agent = require("agent_baseline_advantage", batch, "agent")
            # The largest of -1 and the role + 1, so that a role below the range is not taken for 0.
            of = of.at[each.entry].max(jnp.where(batch.mask, agent.astype(jnp.int32) + 1, 0)) - 1
        known = valid & (of >= 0) & (of < agents)
        of = jnp.where(known, of, 0)
        old = state["baseline"]
        advantage = keep(known, reward - old[of].astype(reward.dtype))
        count = jnp.zeros((agents,), old.dtype).at[of].add(known.astype(old.dtype))
        total = jnp.zeros((agents,), old.dtype).at[of].add(keep(known, reward).astype(old.dtype))
        batch = write_advantage(batch, each.spread(advantage), each.spread(known))
        batch = batch.log("agent_baseline", each.spread(old[of].astype(reward.dtype)), each.last)
        return batch, {"baseline": advantages.moving_average(old, total, count, decay)}

    return Parts(init=init, prepare=prepare)


@stage(
    reads=lambda a: (
        *(("batch.advantage",) if a["add"] else ()),
        *(("batch.counted",) if a["center"] else ()),
        f"batch.logprob_{a['policy']}",
        f"batch.logprob_{a['anchor']}",
    ),
    writes=("batch.advantage",),
)
def distill_advantage(
    coef: float = 1.0,
    add: bool = False,
    estimator: str = "k1",
    policy: str = "behavior",
    anchor: str = "teacher",
    gamma: float = 0.0,
    center: bool = False,
    limit: float | None = None,
):
    """A_t = -coef · k(log policy_t - log teacher_t), the reverse KL to a teacher as advantage of each sampled token.

    On-policy distillation: with k1 and `reinforce_surrogate`, the gradient of KL(policy ‖ teacher) on the policy's own
    answers, up to the dependence of later tokens (tinker-cookbook, slime and NeMo-RL do this; arXiv 2306.13649 is the
    source of the idea, with full distributions). No reward is read.

    add=True adds this to the advantage that the chain has made (slime: coef 1.0; tinker: 0.1), for the tokens that have
    a signal. With anchor="reference" that is a KL penalty which group statistics do not see (REINFORCE++ of slime and
    NeMo-RL; OpenRLHF with gamma=1.0), unlike `penalize_kl_in_reward` before them.

    estimator: k1, k2 or k3. policy: behavior or proximal. gamma: A_t sums the estimates of the later tokens too, with
    γ^(s-t); 0 as in slime and NeMo-RL. center: minus their mean over the counted tokens (tinker). limit: estimates
    are clipped to ±limit (verl: 10); None: not clipped. Metric: `kl_in_advantage`, before centring.
    """
    estimators = {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}
    name = "distill_advantage"
    checks.number(name, "coef", coef)
    checks.choice(name, "add", add, (False, True))
    checks.choice(name, "estimator", estimator, tuple(estimators))
    checks.choice(name, "policy", policy, ("behavior", "proximal"))
    checks.choice(name, "anchor", anchor, ("teacher", "reference"))
    checks.number(name, "gamma", gamma, low=0.0, high=1.0)
    checks.choice(name, "center", center, (False, True))
    checks.number(name, "limit", limit, positive=True, optional=True)

    def prepare(batch):
        here = keep(batch.mask, require(name, batch, f"logprob_{policy}"))
        there = keep(batch.mask, require(name, batch, f"logprob_{anchor}"))
        kl = estimators[estimator](here - there)
        kl = kl if limit is None else jnp.clip(kl, -limit, limit)
        batch = batch.log("kl_in_advantage", kl)
        if center:
            counted = batch.mask if batch.counted is None else batch.mask & batch.counted
            kl = kl - quotient(jnp.sum(keep(counted, kl)), jnp.sum(counted).astype(kl.dtype))
        taught = suffix_scan(-coef * kl, jnp.broadcast_to(gamma, kl.shape), batch.trajectory, batch.mask)
        if not add:
            return write_advantage(batch, taught, batch.mask)
        signal = batch.mask if batch.signal is None else batch.mask & batch.signal
        return batch.replace(advantage=batch.advantage + keep(signal, taught))

    return prepare
