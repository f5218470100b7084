"""Named algorithms: functions of hyper-parameters that return a chain.

Each is a few stages around one shared form (`build.policy_gradient`): shaped reward → advantage → correction →
normaliser → ratio → surrogate → penalties. In their docstrings r_t = π_t / anchor_t, A is the advantage, and a
mean over tokens or sequences is over those of the whole batch.

An argument of 0 or None builds the chain without the stage it belongs to: without `kl_coef` there is no
reference model in memory. An argument that then has no effect is refused when it is set. `anchor` is the
denominator of the ratio: "behavior" (the sampler's own log-probs; one forward pass a token) or "proximal" (the
learner's at the start of the train step; one more pass). Three arguments are shared and off by default:
kl_coef · k3 to the reference, an entropy bonus of entropy_coef, and importance_cap, which multiplies the policy
term by min(proximal / behavior, cap) (verl and SkyRL: 2) and goes with
anchor="proximal".
"""

from __future__ import annotations

from jaxrl_llm.recipes.actor_critic import ppo, trpo
from jaxrl_llm.recipes.baselines import (
    gdpo,
    gpg,
    maxrl,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from jaxrl_llm.recipes.build import RECIPES
from jaxrl_llm.recipes.clipped import dapo, dr_grpo, gmpo, grpo, gspo, gspo_token, prorl
from jaxrl_llm.recipes.gated import cispo, dppo, prime_rl, sapo, simko
from jaxrl_llm.recipes.pairs import cdpo, dpo, hinge, ipo, kto, orpo, reward_model, robust_dpo, simpo
from jaxrl_llm.recipes.stale import decoupled_ppo, icepop, m2po
from jaxrl_llm.recipes.teachers import gkd, opd, sft

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
    "gkd",
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
