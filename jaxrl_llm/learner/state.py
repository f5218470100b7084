"""The learner's state: how it begins and how a train step ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel.host import place
from jaxrl_llm.parallel.offload import check_offload, fetched, host_shardings, on_host, put_back
from jaxrl_llm.parallel.rules import DEFAULT_RULES, Rules, state_shardings
from jaxrl_llm.transforms.adaptive import EXPERT_LOAD, ROUTER_SHIFT
from jaxrl_llm.transforms.base import LossTransform
from jaxrl_llm.types import LearnerState

__all__ = ["finish_train_step", "init_state", "move_reference", "reset_reference"]


def _master(x: jax.Array) -> jax.Array:
    """Small updates round away in bf16, so parameters are kept in f32 (f64 stays f64)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _sized(objective_state: dict[str, Any], params: Any) -> dict[str, Any]:
    """The state of an objective in which what depends on the size of the model has it: the loads of its experts, say."""
    router = params["layers"].get("router") if isinstance(params, dict) and "layers" in params else None

    def sized(path, x):
        if router is None or getattr(path[-1], "key", None) not in (EXPERT_LOAD, ROUTER_SHIFT):
            return x
        return jnp.zeros((router.shape[0], router.shape[-1]), x.dtype)

    return jax.tree_util.tree_map_with_path(sized, objective_state)


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    objective: LossTransform,
    *,
    key: jax.Array,
    reference: bool = False,
    critic: Any = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    offload: Collection[str] = (),
) -> LearnerState:
    """The state before the first train step.

    Args:
      params: of the model, cast to f32 where they are narrower. On a single device the state takes them over
        without a copy, and the update step donates its state: **do not use `params` after the first update**.
      optimizer: any optax transformation.
      objective: a chain; its initial state is stored by stage name.
      key: PRNG key, stored in the state.
      reference: keep a frozen copy of the parameters (never aliased with the trained ones), for objectives
        that read `logprob_reference`.
      critic: parameters of a critic, see `learner.critic`; cast and taken over like `params`, with which it must
        share no array (`init_critic` copies).
      critic_optimizer: of the critic.
      config, mesh, rules: with a mesh the state is created in its shards; `config` is then required.
      offload: "optimizer", "reference": what rests in the memory of the host between the programs that read it, see
        `parallel.offload`. No number changes.

    Raises:
      ValueError: an unknown name in offload, a mesh without a config, a parameter that does not fit the mesh, or one of critic and
        critic_optimizer without the other.
    """
    if (critic is None) != (critic_optimizer is None):
        given, lacks = (
            ("critic", "critic_optimizer") if critic_optimizer is None else ("critic_optimizer", "critic")
        )
        raise ValueError(f"init_state: {given} without {lacks}; give both, or neither.")

    offload = check_offload(offload)

    def build(params, critic, key):
        params, critic = jax.tree.map(_master, (params, critic))
        return LearnerState(
            version=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            objective_state=_sized(objective.init(), params),
            reference=jax.tree.map(jnp.copy, params) if reference else None,
            critic=critic,
            critic_opt_state=None if critic_optimizer is None else critic_optimizer.init(critic),
            key=key,
            skipped=jnp.zeros((), jnp.int32),
        )

    if mesh is None:
        # Committed to its device, as what a snapshot or an update gives is: every program then meets one kind of
        # arguments, and is compiled once.
        state = jax.device_put(build(params, critic, key), jax.local_devices()[0])
        return _laid_to_rest(state, offload)
    if config is None:
        raise ValueError(
            "init_state: a mesh needs config=, which says along which axes each parameter may be split."
        )
    shardings = state_shardings(jax.eval_shape(build, params, critic, key), optimizer, config, mesh, rules)
    placed = place(params, shardings.params)
    critic = place(critic, shardings.critic)
    state = jax.jit(build, out_shardings=shardings)(placed, critic, place(key, shardings.key))
    return _laid_to_rest(state, offload)


def _on_host(tree: Any) -> Any:
    return jax.device_put(tree, host_shardings(tree, jax.tree.map(lambda x: x.sharding, tree)))


def _laid_to_rest(state: LearnerState, offload: Collection[str]) -> LearnerState:
    if "optimizer" in offload:
        state = dataclasses.replace(state, opt_state=_on_host(state.opt_state))
    if "reference" in offload and state.reference is not None:
        state = dataclasses.replace(state, reference=_on_host(state.reference))
    return state


def finish_train_step(state: LearnerState) -> LearnerState:
    """The state after all updates of one rollout batch: snapshot `version + 1`."""
    return dataclasses.replace(state, version=state.version + 1)


def _reference(state: LearnerState, caller: str) -> Any:
    if state.reference is None:
        raise ValueError(
            f"{caller}: the learner state keeps no reference. Create it with init_state(..., reference=True)."
        )
    return state.reference


def reset_reference(
    state: LearnerState, optimizer: optax.GradientTransformation | None = None
) -> LearnerState:
    """The reference becomes a copy of the current parameters (ProRL, arXiv 2505.24864, §3.2.1).

    Args:
      optimizer: also starts the optimiser anew, as ProRL does; None keeps its moments.

    Raises:
      ValueError: the state keeps no reference.
    """
    before = _reference(state, "reset_reference")
    state = dataclasses.replace(state, reference=put_back(jax.tree.map(jnp.copy, state.params), before))
    if optimizer is None:
        return state
    # Perhaps another optimiser, whose state has another structure.
    resting = any(on_host(x) for x in jax.tree.leaves(state.opt_state))
    anew = optimizer.init(state.params)
    return dataclasses.replace(state, opt_state=_on_host(anew) if resting else anew)


def move_reference(state: LearnerState, tau: float) -> LearnerState:
    """reference ← tau · params + (1 - tau) · reference (TR-DPO, arXiv 2404.09656; TRL: tau 0.6 every 512 steps).

    Raises:
      ValueError: the state keeps no reference, or tau is not in [0, 1].
    """
    reference = _reference(state, "move_reference")
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"move_reference: tau must lie in [0, 1], got {tau!r}.")

    def between(there: jax.Array, here: jax.Array) -> jax.Array:
        if not jnp.issubdtype(there.dtype, jnp.floating):
            return here
        return (there + tau * (here - there)).astype(there.dtype)

    moved = jax.tree.map(between, fetched(reference), state.params)
    return dataclasses.replace(state, reference=put_back(moved, reference))
