"""Penalties that follow a measured figure, which the stage's state holds.

It moves once an optimiser update, in `update`, from the exact mean over the whole batch; it is constant within an
update, so that micro-batches agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, Parts, stage
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.normalize import own_norm
from jaxrl_llm.transforms.penalty import check_kl, kl_of, kl_reads, own_count
from jaxrl_llm.types import LossState, Mean, TokenBatch

__all__ = [
    "EXPERT_LOAD",
    "ROUTER_SHIFT",
    "adaptive_entropy",
    "adaptive_kl",
    "balance_experts",
    "balance_experts_by_bias",
    "expert_capacity",
    "moves_router_bias",
    "router_shift",
]

Array = jax.Array
State = dict[str, Array]

EXPERT_LOAD = (
    "expert_load"  # of a state: f32[layers, experts]; [0, 0] until `learner.init_state` knows the model
)
ROUTER_SHIFT = "router_shift"  # likewise: what the last update added to the biases of the routers


def _controlled(
    name: str,
    normalize: LossTransform | None,
    init: Callable[[], State],
    value: Callable[[LossState, TokenBatch, State], tuple[LossState, Array]],
    update: Callable[[State, Mapping[str, Mean]], State],
) -> Parts:
    """The parts of a penalty with a state."""
    own = own_norm(name, normalize)

    def prepare(batch: TokenBatch, state: State) -> tuple[TokenBatch, State]:
        return own(batch), state

    def apply(loss: LossState, batch: TokenBatch, state: State) -> LossState:
        loss, penalty = value(loss, batch, state)
        return loss.penalize(name, penalty, batch.norms.get(name))

    return Parts(prepare=None if own is None else prepare, apply=apply, init=init, update=update)


def _measured(metrics: Mapping[str, Mean], key: str) -> tuple[Array, Array]:
    """(mean, whether it says anything): a batch that trains nothing, or NaN, moves no coefficient."""
    mean = metrics[key]
    return mean.value, (mean.count > 0) & jnp.isfinite(mean.value)


@stage(reads=kl_reads, writes=("loss.penalties",))
def adaptive_kl(
    target: float,
    coef: float = 0.2,
    horizon: float = 40.0,
    estimator: str = "k3",
    anchor: str = "reference",
    normalize: LossTransform | None = None,
    *,
    name: str,
):
    """β · k(x_t), and after every update β ← β (1 + clip(KL / target - 1, -0.2, 0.2) / horizon).

    The controller of arXiv 1909.08593, §2.2, on the penalty of `penalize_kl` (same estimators and anchors). KL is
    the mean of the estimator over the counted tokens of the batch, in nats per token (the paper's target 6 is per
    sequence). horizon is in optimiser updates: verl's and TRL's factor is samples / horizon, and their 10000 with
    256 samples is 39. coef is the first β (verl, TRL: 0.2). An update without trained tokens leaves β.
    State: {"coef": f32[]}. Metrics: `kl_controlled`, `kl_coef`.
    """
    checks.number("adaptive_kl", "target", target, positive=True)
    checks.number("adaptive_kl", "coef", coef, low=0.0)
    checks.number("adaptive_kl", "horizon", horizon, low=1.0)
    check_kl("adaptive_kl", estimator, anchor)

    def init() -> State:
        return {"coef": jnp.asarray(coef, jnp.float32)}

    def value(loss, batch, state):
        kl = kl_of(name, loss, batch, estimator, anchor)
        loss = loss.log("kl_controlled", kl).log("kl_coef", jnp.full_like(kl, state["coef"]))
        return loss, state["coef"] * kl

    def update(state: State, metrics: Mapping[str, Mean]) -> State:
        kl, known = _measured(metrics, "kl_controlled")
        factor = 1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) / horizon
        moved = (state["coef"] * factor).astype(state["coef"].dtype)
        return {"coef": jnp.where(known, moved, state["coef"])}

    return _controlled(name, normalize, init, value, update)


@stage(reads=lambda a: ("loss.entropy", *own_count(a)), writes=("loss.penalties",))
def adaptive_entropy(
    target: float = 0.2,
    coef: float = 0.0,
    step: float = 0.005,
    high: float = 1.0,
    normalize: LossTransform | None = None,
    *,
    name: str,
):
    """-c · H_t while the entropy is at most `target` (nats); after every update c ← clip(c ± step, 0, high), + where H < target.

    Skywork-OR1, arXiv 2505.22312, §4; target 0.2 and step 0.005 as in TRL. H is the mean entropy over the counted
    tokens of the batch. Whether the bonus acts is decided by the H of the last update (Skywork and TRL: of the same
    batch), since one micro-batch does not know the mean; it acts in the first update if coef > 0. `high` is ours.
    State: {"coef": f32[], "acts": f32[]}. Metrics: `entropy`, `entropy_coef` (0 where it does not act).
    """
    checks.number("adaptive_entropy", "target", target, low=0.0)
    checks.number("adaptive_entropy", "coef", coef, low=0.0)
    checks.number("adaptive_entropy", "step", step, low=0.0)
    checks.number("adaptive_entropy", "high", high, low=0.0)

    def init() -> State:
        return {"coef": jnp.asarray(coef, jnp.float32), "acts": jnp.ones((), jnp.float32)}

    def value(loss, batch, state):
        entropy = require(name, loss, "entropy")
        now = state["coef"] * state["acts"]
        return loss.log("entropy_coef", jnp.full_like(entropy, now)), -now * entropy

    def update(state: State, metrics: Mapping[str, Mean]) -> State:
        entropy, known = _measured(metrics, "entropy")
        moved = state["coef"] + jnp.where(entropy < target, step, -step)
        moved = jnp.clip(moved, 0.0, high).astype(state["coef"].dtype)
        acts = (entropy <= target).astype(state["acts"].dtype)
        return {
            "coef": jnp.where(known, moved, state["coef"]),
            "acts": jnp.where(known, acts, state["acts"]),
        }

    return _controlled(name, normalize, init, value, update)


@stage(reads=lambda a: ("loss.router_probs", "loss.router_choice", *own_count(a)), writes=("loss.penalties",))
def balance_experts(
    coef: float = 0.001,
    normalize: LossTransform | None = None,
    capacity: float | None = None,
    *,
    name: str,
):
    """coef · E · Σ_i f_i p_i of each token, averaged over layers: p its router's probabilities, f the loads of the experts.

    The auxiliary loss of Switch Transformers (arXiv 2101.03961, eq. 4) for k experts of a token: f_i is the share of the
    (token, expert) pairs that expert i had. It is 1 · coef where loads are even, and more where the router prefers what is
    busy. Others take f from the same batch, which no micro-batch knows; here it is that of the counted tokens of the last
    update (even in the first one, which then has no gradient). f is detached. coef: 0.001 is Qwen3-MoE's.
    capacity: room of an expert in a pass of the learner, in mean loads of the tokens of one device (§2.2, there 1 to 1.25):
    later tokens pass it by, are counted in `policy/expert_dropped` and have another log-prob than the sampler, which drops
    none, has recorded. None: no token is dropped. Experts on other devices then get as many tokens as they have room for.
    State: {"expert_load": f32[layers, experts]}. Of a model with experts only.
    """
    checks.number("balance_experts", "coef", coef, low=0.0)
    checks.number("balance_experts", "capacity", capacity, positive=True, optional=True)
    key = f"load_of_{name}"

    def init() -> State:
        return {EXPERT_LOAD: jnp.zeros((0, 0), jnp.float32)}

    def value(loss, batch, state):
        probs, choice = require(name, loss, "router_probs"), require(name, loss, "router_choice")
        layers, experts = probs.shape[2:]
        load = state[EXPERT_LOAD]
        if not load.size:
            load = jnp.zeros((layers, experts), load.dtype)
        known = jnp.sum(load, axis=-1, keepdims=True) > 0
        load = jax.lax.stop_gradient(jnp.where(known, load, 1.0 / experts))
        penalty = coef * experts * jnp.einsum("btle,le->bt", probs, load.astype(probs.dtype)) / layers
        counted = loss.mask.astype(probs.dtype)
        mean = Mean(jnp.einsum("btle,bt->le", choice, counted), jnp.sum(counted))
        return loss.replace(metrics={**loss.metrics, key: mean}), penalty

    def update(state: State, metrics: Mapping[str, Mean]) -> State:
        load, known = metrics[key].value, metrics[key].count > 0
        before = state[EXPERT_LOAD] if state[EXPERT_LOAD].size else jnp.zeros_like(load)
        return {EXPERT_LOAD: jnp.where(known, load, before).astype(state[EXPERT_LOAD].dtype)}

    return _controlled(name, normalize, init, value, update)


@stage(reads=("loss.router_choice",))
def balance_experts_by_bias(rate: float = 0.001, *, name: str):
    """b_i ← b_i + rate · sign(mean load - load_i) after every update; a token's experts are the k with the largest p_i + b_i.

    Balancing without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, §2.1.2): each
    router has a bias per expert, which says who is chosen and not how much an output counts, so that no gradient is bent.
    The load of an expert is the number of counted tokens of the whole batch, over all devices, that went through it. Where
    the experts of the sampler are replayed, they were chosen with the biases of that time. rate: 0.001 is the papers', whose
    scores are sigmoids; here a bias is added to a probability, so that among many experts a smaller rate may do.
    The biases are parameters of the model (`ModelConfig.router_bias`), which the sampler and snapshots have, too, and which
    no gradient, decay or clipping touches. Hugging Face's format of Qwen3-MoE has no place for them.
    State: {"router_shift": f32[layers, experts]}, the last change. Of a model with experts only.
    """
    checks.number("balance_experts_by_bias", "rate", rate, low=0.0)
    key = f"load_of_{name}"

    def init() -> State:
        return {ROUTER_SHIFT: jnp.zeros((0, 0), jnp.float32)}

    def apply(loss: LossState, batch: TokenBatch, state: State) -> LossState:
        choice = require(name, loss, "router_choice")
        # Whole numbers, whose sums are the same in any order: the sign of what is even must not hang on a rounding.
        pairs = jnp.einsum("btle,bt->le", (choice > 0).astype(choice.dtype), loss.mask.astype(choice.dtype))
        mean = Mean(pairs, jnp.sum(loss.mask.astype(choice.dtype)))
        return loss.replace(metrics={**loss.metrics, key: mean})

    def update(state: State, metrics: Mapping[str, Mean]) -> State:
        load = metrics[key].total
        mean = jnp.mean(load, axis=-1, keepdims=True)
        return {ROUTER_SHIFT: (rate * jnp.sign(mean - load)).astype(state[ROUTER_SHIFT].dtype)}

    return Parts(apply=apply, init=init, update=update)


def router_shift(objective_state: Any) -> Array | None:
    """f32[layers, experts], what an update adds to the biases of the routers; None of an objective that leaves them alone.

    Args:
      objective_state: after its `update`.
    """
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(objective_state)[0]
        if path and getattr(path[-1], "key", None) == ROUTER_SHIFT
    ]
    return sum(found[1:], found[0]) if found else None


def expert_capacity(objective: LossTransform) -> float | None:
    """The smallest `capacity` of the `balance_experts` of an objective; None: no token is dropped."""
    given = [info.arguments["capacity"] for info in objective.info if info.stage == "balance_experts"]
    return min((float(capacity) for capacity in given if capacity is not None), default=None)


def moves_router_bias(objective: LossTransform) -> bool:
    """Whether an objective moves biases of routers, so that the model must have them."""
    return router_shift(objective.init()) is not None
