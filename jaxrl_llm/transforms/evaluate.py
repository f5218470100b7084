"""From an objective, a forward pass and a prepared batch to one sum and one denominator.

Metrics that `evaluate` adds to those of the stages:

    loss_policy            the policy term of the loss
    penalty_NAME           a penalty's term of the loss, coefficient included
    entropy                mean entropy (nats), when the forward pass computed it
    kl_behavior            k1 estimate of KL(behavior ‖ current): mean of log behavior - log current
    kl_behavior_k3         k3 estimate of the same: mean of r - 1 - log r, r = current / behavior
    kl_proximal            k1 estimate of KL(proximal ‖ current), when proximal log-probs are there
    logprob_gap            mean |log proximal - log behavior|: sampler against learner, same or near weights
    length                 trained tokens a trajectory          reward           mean over trajectories with one
    reward_missing         trajectories without a reward        truncated        trajectories cut by a limit
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.losses import divergences
from jaxrl_llm.ops.numerics import absolute, at_least_f32, keep, quotient
from jaxrl_llm.transforms.base import LossTransform, check_complete
from jaxrl_llm.transforms.begin import clean
from jaxrl_llm.types import LossOutput, LossState, Mean, PolicyOutput, TokenBatch

__all__ = ["evaluate", "loss", "start_loss"]

Array = jax.Array


def start_loss(output: PolicyOutput, batch: TokenBatch) -> LossState:
    """The `LossState` that the first `apply` gets: masked values are 0 from here on, weight is detached."""
    mask = batch.mask
    logprob = keep(mask, at_least_f32(output.logprob))
    weight = jnp.ones_like(logprob) if batch.weight is None else jax.lax.stop_gradient(batch.weight)
    return LossState(
        logprob=logprob,
        entropy=None if output.entropy is None else keep(mask, at_least_f32(output.entropy)),
        value=None if output.value is None else keep(mask, at_least_f32(output.value)),
        topk_logprob=None if output.topk_logprob is None else keep(mask[..., None], output.topk_logprob),
        divergence=None if output.divergence is None else keep(mask, at_least_f32(output.divergence)),
        router_probs=None
        if output.router_probs is None
        else keep(mask[..., None, None], at_least_f32(output.router_probs)),
        router_choice=None
        if output.router_choice is None
        else jax.lax.stop_gradient(keep(mask[..., None, None], at_least_f32(output.router_choice))),
        weight=weight,
        mask=mask if batch.counted is None else mask & batch.counted,
    )


def evaluate(
    objective: LossTransform, output: PolicyOutput, batch: TokenBatch, state: Any = None
) -> LossOutput:
    """Runs `apply` of the stages over a prepared batch, or over any subset of its rows.

    Args:
      objective: a complete chain.
      output: the current policy at the same tokens; on the gradient tape.
      batch: as `objective.prepare` returned it.
      state: of the objective; None = its initial state.

    Returns:
      LossOutput. loss_sum, denominator and metrics add up over subsets: the loss is the sum of the
      loss_sums over the sum of the denominators.

    Raises:
      ValueError: the objective is incomplete, the batch is not prepared, or a field that a stage reads is
        None.
    """
    check_complete(objective)
    if batch.norm is None or batch.count is None:
        raise ValueError(
            "evaluate(): batch.norm is None. Call batch, state = objective.prepare(batch, state) on the whole "
            "rollout batch first (or use `loss`, which does)."
        )
    norm, count = batch.norm, batch.count
    batch = clean(batch)
    result = objective.apply(start_loss(output, batch), batch, state)

    total = jnp.zeros((), result.logprob.dtype)
    denominator = jnp.sum(count).astype(total.dtype)
    metrics = {}
    if result.policy is not None:
        policy = jnp.sum(keep(batch.mask, norm * result.weight * result.policy))
        total = total + policy
        metrics["loss_policy"] = Mean(jax.lax.stop_gradient(policy), denominator)
    for name, (value, own) in result.penalties.items():
        penalty = jnp.sum(keep(batch.mask, (norm if own is None else own) * value))
        total = total + penalty
        metrics[f"penalty_{name}"] = Mean(jax.lax.stop_gradient(penalty), denominator)
    metrics |= _policy_metrics(result, batch).metrics | result.metrics
    metrics |= {name: Mean(jnp.sum(m.total), jnp.sum(m.count)) for name, m in batch.logged.items()}
    return LossOutput(loss_sum=total, denominator=denominator, metrics=metrics)


def _policy_metrics(result: LossState, batch: TokenBatch) -> LossState:
    """Drift of the current policy from the ones before it, over the counted tokens."""
    log = result.replace(metrics={})
    if batch.logprob_behavior is not None:
        x = batch.logprob_behavior - result.logprob
        log = log.log("kl_behavior", x).log("kl_behavior_k3", divergences.k3(x))
        # Sampler against learner at equal weights: the proximal policy, or the current one before the first update.
        learner = result.logprob if batch.logprob_proximal is None else batch.logprob_proximal
        log = log.log("logprob_gap_mean", absolute(learner - batch.logprob_behavior))
    if batch.logprob_proximal is not None:
        log = log.log("kl_proximal", batch.logprob_proximal - result.logprob)
    return log if result.entropy is None else log.log("entropy", result.entropy)


def loss(
    objective: LossTransform, logprob: Array | PolicyOutput, batch: TokenBatch, state: Any = None
) -> tuple[Array, dict[str, Mean]]:
    """The loss of a raw batch in one call: prepares, evaluates, divides.

    Args:
      objective: a complete chain.
      logprob: f32[B, T] of the current policy, or a whole `PolicyOutput` (for entropy and the like).
      batch: not yet prepared.
      state: of the objective; None = its initial state. What `prepare` makes of it is dropped.

    Returns:
      (scalar, {name: Mean}); 0 with zero gradients when nothing is trained. Differentiable in `logprob`,
      and works under `jit`, `grad` and `vmap`.
    """
    output = logprob if isinstance(logprob, PolicyOutput) else PolicyOutput(logprob=jnp.asarray(logprob))
    if output.logprob.shape != batch.shape:
        raise ValueError(
            f"loss(): logprob has shape {output.logprob.shape}, the batch {batch.shape}. Entry t is the log-prob "
            f"of token t given the tokens before it, for every token of the batch."
        )
    check_complete(objective)
    batch, state = objective.prepare(batch, state)
    result = evaluate(objective, output, batch, state)
    return quotient(result.loss_sum, result.denominator), result.metrics
