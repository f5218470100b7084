"""The critic of PPO: what it estimates, how a batch gets its values, how it learns.

The value at entry t is the estimate *before* token t, of what the trajectory still earns: it is read off the hidden
state of token t - 1, as log-probs are, so an entry has seen the same tokens as its log-prob.

Three arrangements, told apart by where the parameters are:

    own model      state.critic = init_critic(params, config), a decoder of its own with a value head. It learns by
                   `make_critic_step`.
    own head       state.critic = init_value_head(config), a vector and a bias on the policy's hidden states, which
                   are detached: the critic learns by `make_critic_step` and never moves the policy.
    shared         the value head is part of state.params, which the objective trains as a whole:
                   `penalize_value_error` in the chain and `make_update_step(..., policy=value_policy(config))`.

A train step:

    batch = fill_values(batch, state, score_values, needed)    before fill_logprobs; score_values = make_values(config)
    batch = fill_logprobs(batch, state, score, needed), then `prepare`, whose `gae` writes advantages and returns
    state, metrics = critic_step(state, minibatch)             beside step(state, minibatch), except when shared

An own head reads the policy as it is when the critic step runs, so take the critic step before the policy's. On a
mesh the rows are split as everywhere; the parameters of state.critic and their moments are whole on every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.learner.optimizer import applied_learning_rate
from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows, place_batch
from jaxrl_llm.learner.score import always_given
from jaxrl_llm.learner.update import Metrics, Policy, UpdateStep, apply_gradients, figure
from jaxrl_llm.losses.values import clipped_square_error, square_error, value_clipped
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat, forward, head_matrix
from jaxrl_llm.ops.logprobs import Entropy, head_logprobs
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import trajectories
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.rules import Layout, layout_of
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import LearnerState, Mean, PolicyOutput, TokenBatch

__all__ = [
    "ScoreValues",
    "fill_values",
    "init_critic",
    "init_value_head",
    "make_critic_step",
    "make_values",
    "value_policy",
    "values",
]

Array = jax.Array
ScoreValues = Callable[[LearnerState, TokenBatch], tuple[Array, Array]]

_VARIANCE_FLOOR = 1e-8  # of returns, below which they are not whitened


def init_value_head(config: ModelConfig, dtype: str = "float32") -> dict[str, Array]:
    """A vector and a bias, all zero: the first estimate is 0 everywhere, and its gradient is not."""
    return {"value": jnp.zeros((config.hidden_size,), dtype), "value_bias": jnp.zeros((), dtype)}


def init_critic(params: Any, config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """A critic with a decoder of its own: copies of the policy's `params` without its output head, a value head."""
    body = {name: jax.tree.map(jnp.copy, leaf) for name, leaf in params.items() if name != "head"}
    return {**body, **init_value_head(config, dtype)}


# ------------------------------------------------------------------------------------------- values


def _read(params: Any, hidden: Array) -> Array:
    """The value head on hidden states, f32[B, T] (f64 stays f64). The bias is optional."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    value = jnp.einsum("btd,d->bt", hidden.astype(wide), params["value"].astype(wide))
    return value + params["value_bias"].astype(wide) if "value_bias" in params else value


def _before(after: Array, mask: Array) -> Array:
    """From the estimate after each token to the one before it; 0 outside the mask."""
    return keep(mask, jnp.pad(after[:, :-1], ((0, 0), (1, 0))))


def _after(
    params: Any, config: ModelConfig, batch: TokenBatch, *, remat: Remat = False, layout: Layout | None = None
) -> Array:
    """f32[B, T]: the estimate after each token."""
    hidden = forward(
        params, config, batch.tokens, batch.positions, batch.segments, remat=remat, layout=layout
    )
    return _read(params, hidden)


def values(
    params: Any, config: ModelConfig, batch: TokenBatch, *, remat: Remat = False, layout: Layout | None = None
) -> Array:
    """The critic's estimate before each trained token, f32[B, T], aligned as `batch.value`; 0 outside the mask.

    Args:
      params: a tree with a decoder and a value head: of `init_critic`, or a policy's with `init_value_head` added.
      config: of the model; `dtype` is the precision of its products, the head is f32.
      batch: reads tokens, positions, segments and mask.
      remat, layout: see `models.decoder.forward`.
    """
    return _before(_after(params, config, batch, remat=remat, layout=layout), batch.mask)


def _tree(critic: Any, params: Any) -> Any:
    """Decoder and value head: the critic's own, or its head on the policy's decoder, through which no gradient flows.

    Raises:
      ValueError: there is no value head.
    """
    if critic is None and "value" not in params:
        raise ValueError(
            "critic: the learner state has no critic, and its parameters have no value head. Create it with "
            "init_state(..., critic=init_critic(params, config) or init_value_head(config), critic_optimizer=...), "
            "or put init_value_head(config) into the parameters of the policy."
        )
    if critic is None:
        return params
    return critic if "layers" in critic else {**jax.lax.stop_gradient(params), **critic}


def make_values(
    config: ModelConfig, mesh: Mesh | None = None, *, micro_batch_rows: int | None = None
) -> ScoreValues:
    """score(state, batch) -> (value, bootstrap_value), f32[B, T] each, without gradients.

    `value` is `values`; `bootstrap_value` is the estimate after the last trained token of a truncated trajectory,
    at all of its trained tokens, and 0 elsewhere.

    Args:
      config: of the critic's decoder.
      mesh: rows are split over its data and fsdp axes; None = one device.
      micro_batch_rows: rows of one forward pass, a multiple of the shards of the rows; None = all rows.
    """
    check_micro_batch_rows(micro_batch_rows, batch_shards(mesh))

    def run(params: Any, critic: Any, batch: TokenBatch) -> tuple[Array, Array]:
        tree = _tree(critic, params)
        rows = micro_batch_rows or batch.shape[0]
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)
        after = jax.lax.map(
            lambda slices: _after(tree, config, rebuild(slices), layout=layout_of(mesh)), split
        )
        after = after.reshape(-1, after.shape[-1])[: batch.shape[0]]
        each = trajectories(batch.trajectory, batch.mask)
        end = each.spread(each.sum(keep(each.last, after), batch.mask))
        return _before(after, batch.mask), keep(batch.mask & batch.truncated, end)

    jitted = jax.jit(run)

    def score(state: LearnerState, batch: TokenBatch) -> tuple[Array, Array]:
        rows = batch.shape[0]
        value, end = jitted(state.params, state.critic, place_batch(always_given(batch), mesh))
        return value[:rows], end[:rows]

    return score


def fill_values(
    batch: TokenBatch, state: LearnerState, score: ScoreValues, needed: Collection[str]
) -> TokenBatch:
    """Fills batch.value and batch.bootstrap_value where an objective needs them; a field that is there is kept.

    Call it at the start of a train step, before `fill_logprobs` (which refuses fields that are still missing).

    Args:
      batch: not yet prepared.
      state: gives the critic.
      score: from `make_values`.
      needed: `needed_fields(objective)`.

    Raises:
      ValueError: a value is needed and the state has no critic.
    """
    missing = [n for n in ("value", "bootstrap_value") if n in needed and getattr(batch, n) is None]
    if not missing:
        return batch
    value, end = score(state, batch)
    given: dict[str, Any] = {"value": value, "bootstrap_value": end}
    return batch.replace(**{name: given[name] for name in missing})


def value_policy(
    config: ModelConfig,
    *,
    detach: bool = False,
    entropy: Entropy = "detached",
    remat: Remat = True,
    chunk: int | None = None,
    blocks: int = 1,
) -> Policy:
    """policy(params, batch) for `make_update_step`, where policy and critic share `params`: one forward pass gives both.

    Args:
      config: of the model; params have a value head beside its parameters.
      detach: the value's gradient stops at the hidden states, and trains the head only.
      entropy: True where the objective trains on the entropy, see `ops.logprobs.policy_output`.
      remat, chunk, blocks: see `ops.logprobs.policy_output`.
    """

    def policy(params: Any, batch: TokenBatch) -> PolicyOutput:
        hidden = forward(
            params,
            config,
            batch.tokens,
            batch.positions,
            batch.segments,
            remat=remat,
            routing_ids=batch.routing_ids,
        )
        logprob, spread = head_logprobs(
            jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))),
            head_matrix(params),
            batch.tokens,
            batch.temperature,
            batch.mask,
            dtype=config.logits_dtype,
            entropy=entropy,
            support=batch.support_ids,
            chunk=chunk,
            blocks=blocks,
        )
        value = _read(params, jax.lax.stop_gradient(hidden) if detach else hidden)
        return PolicyOutput(logprob=logprob, entropy=spread, value=_before(value, batch.mask))

    return policy


# ---------------------------------------------------------------------------------------- learning


def make_critic_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    clip: float | None = None,
    whiten: bool = False,
    micro_batch_rows: int | None = None,
    remat: Remat = True,
    donate: bool = True,
) -> UpdateStep:
    """Builds step(state, batch) -> (state, metrics), one jitted optimiser step of `state.critic` and of nothing else.

        mean over the tokens with a return of  ½ (v - R)²,  or with clip  ½ max((v - R)², (v_c - R)²),
        v_c = v_old + clip(v - v_old, -c, c),  v_old = batch.value

    The mean is over tokens (AReaL, NeMo and tunix; verl follows the policy's normaliser, SkyRL takes the mean over
    sequences). The ½ is everybody's but slime's. Micro-batches are added up before the one division, and steps whose
    gradient is not finite are skipped, as in `make_update_step`.

    Args:
      config: of the critic's decoder.
      optimizer: the one whose state is state.critic_opt_state.
      mesh, micro_batch_rows, remat, donate: as in `make_update_step`. The state is consumed.
      clip: c, in units of the return; None: no clipping (NeMo's default; verl, OpenRLHF and AReaL 0.5, SkyRL and
        slime 0.2).
      whiten: divide the error by the standard deviation of the batch's returns, which is the loss of a critic of
        whitened returns, (v - mean) / std against (R - mean) / std; the values stay in units of the return, and
        the learning rate no longer depends on the scale of the reward. Returns that are all equal are not divided.

    Returns:
      step. `batch` must have been prepared by a chain with `gae`, or another stage that writes returns. Metrics:
        critic_loss           the loss above
        critic_error          mean of (v - R)²
        critic_value          mean of v
        critic_clip_fraction  fraction of tokens whose gradient the clip cuts, with clip
        critic_grad_norm      global norm of the gradient before clipping
        critic_learning_rate  of the last update that was applied, when the optimizer records it
        critic_skipped        1 when the step was skipped

    Raises (when the step is called):
      ValueError: the state has no critic, or the batch no returns.
    """
    checks.number("make_critic_step", "clip", clip, positive=True, optional=True)
    check_micro_batch_rows(micro_batch_rows, batch_shards(mesh))

    def errors(critic: Any, params: Any, batch: TokenBatch, scale: Array) -> tuple[Array, dict[str, Mean]]:
        """(Σ of the losses of the tokens, metrics), of a micro-batch."""
        on = _learned(batch)
        now = keep(on, values(_tree(critic, params), config, batch, remat=remat, layout=layout_of(mesh)))
        returns = keep(on, require("make_critic_step", batch, "returns")).astype(now.dtype)
        error = square_error(now, returns)
        shown = {"critic_error": 2.0 * error, "critic_value": now}
        if clip is not None:
            old = keep(on, require("make_critic_step", batch, "value")).astype(now.dtype)
            error = clipped_square_error(now, returns, old, clip)
            shown["critic_clip_fraction"] = value_clipped(now, returns, old, clip).astype(now.dtype)
        total = jnp.sum(keep(on, error)) * scale.astype(now.dtype)
        count = jnp.sum(on).astype(now.dtype)
        shown["critic_loss"] = keep(on, error) * scale.astype(now.dtype)
        means = {name: Mean(jnp.sum(jax.lax.stop_gradient(keep(on, x))), count) for name, x in shown.items()}
        return total, means

    def update(state: LearnerState, batch: TokenBatch) -> tuple[LearnerState, Metrics]:
        if state.critic is None:
            raise ValueError(
                "make_critic_step: state.critic is None. Create it with init_state(..., critic=..., "
                "critic_optimizer=...); a value head among the policy's parameters is trained by the objective."
            )
        rows = micro_batch_rows or batch.shape[0]
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)
        scale = _one_over_variance(batch) if whiten else jnp.ones(())

        def add(sums, slices):
            grads, means = jax.grad(errors, has_aux=True)(state.critic, state.params, rebuild(slices), scale)
            return jax.tree.map(jnp.add, sums, grads), means

        sums, stacked = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.critic), split)
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)
        total, count = metrics["critic_loss"]
        grads = jax.tree.map(lambda g: quotient(g, count.astype(g.dtype)), sums)
        norm = optax.global_norm(grads)
        usable = (count > 0) & jnp.isfinite(norm) & jnp.isfinite(total)

        lent = dataclasses.replace(state, params=state.critic, opt_state=state.critic_opt_state)
        done = apply_gradients(optimizer, lent, grads, usable)
        new = dataclasses.replace(
            state, critic=done.params, critic_opt_state=done.opt_state, skipped=done.skipped
        )
        metrics |= {"critic_grad_norm": figure(norm), "critic_skipped": figure(~usable)}
        rate = applied_learning_rate(done.opt_state)
        return new, metrics if rate is None else metrics | {"critic_learning_rate": figure(rate)}

    return UpdateStep(jax.jit(update, donate_argnums=0 if donate else ()), mesh)


def _learned(batch: TokenBatch) -> Array:
    """bool[B, T]: the counted tokens whose return is defined."""
    on = batch.mask if batch.counted is None else batch.mask & batch.counted
    return on if batch.signal is None else on & batch.signal


def _one_over_variance(batch: TokenBatch) -> Array:
    """1 / Var(R) over the tokens of a batch, and 1 where their returns are all equal."""
    on = _learned(batch)
    count = jnp.sum(on)
    returns = keep(on, require("make_critic_step", batch, "returns"))
    deviation = keep(on, returns - quotient(jnp.sum(returns), count))
    variance = quotient(jnp.sum(deviation**2), jnp.maximum(count - 1, 1))
    defined = variance > _VARIANCE_FLOOR
    return jnp.where(defined, 1.0 / jnp.where(defined, variance, 1.0), 1.0)
