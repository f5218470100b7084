"""One optimiser step as one jitted function: the learner's only way to change parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.learner.exact import with_exact_value
from jaxrl_llm.learner.optimizer import applied_learning_rate
from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows, place_batch
from jaxrl_llm.learner.score import teacher_needs
from jaxrl_llm.learner.share import coefficients, gradient_share
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.experts import exchanged_bytes, on_mesh, router_load
from jaxrl_llm.ops.logprobs import TeacherHead, policy_output
from jaxrl_llm.parallel.mesh import BATCH_AXES, batch_shards
from jaxrl_llm.parallel.offload import fetched, on_host, put_back
from jaxrl_llm.parallel.rules import DEFAULT_RULES, Rules, layout_of, state_shardings
from jaxrl_llm.transforms.adaptive import expert_capacity, moves_router_bias, router_shift
from jaxrl_llm.transforms.base import LossTransform, needed_fields
from jaxrl_llm.transforms.evaluate import evaluate
from jaxrl_llm.types import LearnerState, Mean, PolicyOutput, TokenBatch

__all__ = [
    "Metrics",
    "Policy",
    "UpdateStep",
    "apply_gradients",
    "figure",
    "make_prepare",
    "make_update_step",
    "merge_extremes",
    "ratio_extremes",
    "reads_routers",
]

Array = jax.Array
Metrics = dict[str, Mean]
Policy = Callable[[Any, TokenBatch], PolicyOutput]


def make_prepare(
    objective: LossTransform, mesh: Mesh | None = None
) -> Callable[[TokenBatch, dict[str, Any]], tuple[TokenBatch, dict[str, Any]]]:
    """prepare(batch, objective_state) -> (batch, objective_state), jitted; once a rollout batch.

    On a mesh the rows are split over it first; sums over groups and over the batch are global.
    """
    jitted = jax.jit(objective.prepare)

    def prepare(batch: TokenBatch, state: dict[str, Any]) -> tuple[TokenBatch, dict[str, Any]]:
        return jitted(place_batch(batch, mesh), state)

    return prepare


def apply_gradients(
    optimizer: optax.GradientTransformation, state: LearnerState, grads: Any, usable: Array
) -> LearnerState:
    """The state after one optimiser step, or, where `usable` bool[] is False, after a skipped one.

    A skipped step leaves parameters, moments and the count of the schedule as they are and adds 1 to `skipped`.
    """

    def once(carry):
        _, params, resting = carry
        updates, opt_state = optimizer.update(grads, fetched(resting), params)
        return jnp.zeros((), bool), optax.apply_updates(params, updates), put_back(opt_state, resting)

    # A loop of one turn or none works in place; selecting between old and new would keep both in memory. Moments that rest
    # on the host are fetched within it, when the activations are gone; before it, they would come while those are there.
    carry = (usable, state.params, state.opt_state)
    _, params, opt_state = jax.lax.while_loop(lambda carry: carry[0], once, carry)
    skipped = state.skipped + jnp.where(usable, 0, 1).astype(jnp.int32)
    return dataclasses.replace(state, params=params, opt_state=opt_state, skipped=skipped)


def figure(value: Array) -> Mean:
    """A figure that is not a mean over tokens, in the form of the others."""
    return Mean(value.astype(jnp.float32), jnp.ones((), jnp.float32))


def make_update_step(
    objective: LossTransform,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    micro_batch_rows: int | None = None,
    remat: Remat = True,
    chunk: int | None = None,
    entropy: bool = True,
    rules: Rules = DEFAULT_RULES,
    policy: Policy | None = None,
    teacher: ModelConfig | None = None,
    donate: bool = True,
    masses: bool = False,
) -> UpdateStep:
    """Builds step(state, batch) -> (state, metrics), one jitted optimiser step.

    The batch is cut into micro-batches of rows; their gradients and metrics are added up in f32 by a scan and
    divided once by the denominator of the whole batch. So the split changes memory and nothing else.

    **The state is consumed**: its buffers are donated and `state.params` cannot be read after the call.
    Whoever else holds the parameters (a sampler, a snapshot being written) takes them from the new state.

    A step whose gradient is not finite, or whose batch has nothing to train on, is skipped: see
    `apply_gradients`.

    Args:
      objective: a complete chain; the batch must come from its `prepare`. Where it has logprob_exact, those are the
        values of the current log-probs, and the forward pass gives their gradient.
      config: of the model; `dtype` is the precision of the products. Master weights, gradients and moments
        are f32.
      optimizer: any optax transformation, clipping included (it sees the whole gradient once).
      mesh: None = one device.
      micro_batch_rows: rows of one forward and backward pass, a multiple of the shards of the rows; None =
        the whole batch at once. When the rows do not divide, inert ones are added.
      remat: what the backward pass recomputes, see `models.decoder.forward`.
      chunk: positions of a chunk of the head.
      entropy: report the mean entropy, also when the objective does not need it (costs one more pass over
        the logits of a chunk in the forward pass).
      rules: logical axis -> mesh axis.
      policy: replaces the decoder: policy(params, micro_batch) -> PolicyOutput. For tests and for models of
        one's own.
      teacher: config of the teacher, for an objective that reads a divergence over the vocabulary. Its parameters are
        then a third argument, step(state, batch, teacher_params), and the batch has hidden_teacher: the teacher's
        decoder ran once for all updates (`learner.score.make_score_teacher`), here only its output head does.
      donate: False keeps the state that was passed in alive, at the price of a second copy.
      masses: also give gradient_mass.

    Returns:
      step. Its metrics are `Mean`s: those of `evaluate`, and
        loss                 loss of the batch
        grad_norm            global norm of the gradient before clipping
        learning_rate        of the last update that was applied, when the optimizer records it (`make_optimizer` does)
        skipped              1 when the step was skipped
        trained_tokens       tokens with a gradient
        expert_…, router_…   of a model with experts: see `router_figures`
        logprob_gap_max      largest |current - behavior| of a trained token (nats), with behavior log-probs
        ratio_min, ratio_max smallest and largest current / anchor of a trained token; the anchor is the proximal
                             policy where the batch has its log-probs, else the behavior policy
        share_…              which prompts and lengths the update listens to, see `learner.share`
        gradient_mass        with `masses`: |∂ loss_sum / ∂ logprob| f32[B, T] of each token, the one that is not a number

    Raises:
      ValueError: micro_batch_rows does not fit the mesh, or the objective reads a divergence and there is no teacher.
    """
    if (capacity := expert_capacity(objective)) is not None:
        config = dataclasses.replace(config, expert_capacity=capacity)
    config = on_mesh(config, mesh, BATCH_AXES)
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)
    wants_entropy = "entropy" in needed_fields(objective)
    wants_lists = "topk_logprob" in needed_fields(objective)
    wants_routers = reads_routers(objective, config, policy is None)
    divergence = teacher_needs(objective).divergence if policy is None else None
    if divergence is not None and teacher is None:
        raise ValueError(
            "make_update_step: the objective reads a divergence from a teacher; give the teacher's config as teacher=, "
            "and its parameters with each step."
        )

    accumulate = policy is None and remat is True

    def run_policy(params, micro, teacher_params, gradient_sums=None):
        if policy is not None:
            return policy(params, micro)
        head = None
        if divergence is not None and teacher is not None:
            head = TeacherHead(teacher_params, teacher.logits_dtype, divergence)
        return policy_output(
            params,
            config,
            micro,
            entropy=True if wants_entropy else ("detached" if entropy else False),
            topk=wants_lists,
            remat=remat,
            chunk=chunk,
            blocks=shards,
            gradient_sums=gradient_sums,
            teacher=head,
            **wants_routers,
            layout=layout_of(mesh, rules),
        )

    def pinned(tree, shardings):
        def one(x, sharding):
            return x if on_host(x) else jax.lax.with_sharding_constraint(x, sharding)

        return tree if mesh is None else jax.tree.map(one, tree, shardings)

    def update(
        state: LearnerState, batch: TokenBatch, teacher_params: Any = None
    ) -> tuple[LearnerState, Metrics]:
        shardings = None if mesh is None else state_shardings(state, optimizer, config, mesh, rules)
        param_shardings = None if shardings is None else shardings.params
        rows = micro_batch_rows or batch.shape[0]
        padded = pad_rows(batch, rows)
        split, rebuild = micro_batches(padded, rows, mesh)

        def loss_sum(params, slices, gradient_sums=None):
            micro = rebuild(slices)
            output = with_exact_value(run_policy(params, micro, teacher_params, gradient_sums), micro)
            result = evaluate(objective, output, micro, state.objective_state)
            coefficient = coefficients(objective, output, micro, state.objective_state)
            routers = routers_of(output, micro, config)
            return result.loss_sum, (result, ratio_extremes(output, micro), coefficient, routers)

        gradients = jax.grad(loss_sum, has_aux=True)

        def add(sums, slices):
            grads, outputs = gradients(state.params, slices, sums["layers"] if accumulate else None)
            if accumulate:  # the layers, nearly all of the parameters, come back added up
                rest = {name: sums[name] for name in sums if name != "layers"}
                rest = jax.tree.map(jnp.add, rest, {name: grads[name] for name in rest})
                grads = {**rest, "layers": grads["layers"]}
            else:
                grads = jax.tree.map(jnp.add, sums, grads)
            return pinned(grads, param_shardings), outputs

        if split[0].shape[0] == 1:
            grads, outputs = gradients(state.params, [x[0] for x in split])
            grads, outputs = pinned(grads, param_shardings), jax.tree.map(lambda x: x[None], outputs)
        else:
            zeros = pinned(jax.tree.map(jnp.zeros_like, state.params), param_shardings)
            grads, outputs = jax.lax.scan(add, zeros, split)
        results, extremes, coefficient, routers = outputs
        total, denominator, metrics = jax.tree.map(
            lambda x: jnp.sum(x, axis=0), (results.loss_sum, results.denominator, results.metrics)
        )

        trained = denominator > 0
        scale = jnp.where(trained, 1.0 / jnp.where(trained, denominator, 1.0), 0.0)
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        grad_norm = optax.global_norm(grads)
        usable = trained & jnp.isfinite(grad_norm) & jnp.isfinite(total)

        new = apply_gradients(optimizer, state, grads, usable)
        advanced = objective.update(state.objective_state, metrics)
        objective_state = jax.tree.map(
            lambda after, before: jnp.where(usable, after, before), advanced, state.objective_state
        )
        new = dataclasses.replace(new, objective_state=objective_state)
        shift = router_shift(advanced) if policy is None else None
        if shift is not None:
            new = _shifted(new, state.params, jnp.where(usable, shift, 0.0))
        metrics = {
            name: mean for name, mean in metrics.items() if not mean.total.ndim
        }  # the others are for `update`
        metrics = metrics | {
            "loss": Mean(total, denominator),
            "grad_norm": figure(grad_norm),
            "skipped": figure(~usable),
            "trained_tokens": figure(jnp.sum(batch.mask)),
            **merge_extremes(extremes),
            **router_figures(routers, config, padded.tokens.size, new.params),
        }
        coefficient = coefficient.reshape(padded.shape)
        shares = gradient_share(coefficient, padded)
        if masses:
            mass = jnp.abs(coefficient[: batch.shape[0]])
            metrics["gradient_mass"] = Mean(mass, jnp.ones((), mass.dtype))
        metrics |= {name: figure(value) for name, value in shares.items()}
        rate = applied_learning_rate(new.opt_state)
        if rate is not None:
            metrics["learning_rate"] = figure(rate)
        return pinned(new, shardings), metrics

    return UpdateStep(jax.jit(update, donate_argnums=0 if donate else ()), mesh)


@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """step(state, batch) -> (state, metrics), and with a teacher step(state, batch, its parameters).

    See `make_update_step`.
    """

    jitted: Any  # the jitted function, for callers that want to lower or compile it themselves
    mesh: Mesh | None

    def __call__(self, state: LearnerState, batch: TokenBatch, *teacher: Any) -> tuple[LearnerState, Metrics]:
        return self.jitted(state, place_batch(batch, self.mesh), *teacher)


def reads_routers(objective: LossTransform, config: ModelConfig, decoder: bool = True) -> dict[str, bool]:
    """What an objective reads of routers, as arguments of `policy_output`; `decoder`: the policy is that of `config`.

    Raises:
      ValueError: it reads something and the model has no experts; it moves their biases and the model has none.
    """
    needed = needed_fields(objective)
    reads = {name: name in needed for name in ("router_probs", "router_choice")}
    if any(reads.values()) and decoder and not config.num_experts:
        raise ValueError(
            "the objective reads the probabilities of routers, or their choices, and the model has no experts. Leave the "
            "stage out (balance_experts, balance_experts_by_bias), or train a mixture of experts."
        )
    if decoder and moves_router_bias(objective) and not config.router_bias:
        raise ValueError(
            "the objective moves the biases of routers (balance_experts_by_bias), and the model has none. Give it some: "
            "model = jaxrl_llm.models.load.with_router_bias(model)."
        )
    return reads


def _shifted(state: LearnerState, before: Any, shift: Array) -> LearnerState:
    """The state with the biases of the routers moved from where they were before, whatever the optimiser did to them."""
    bias = before["layers"]["router_bias"]
    layers = {**state.params["layers"], "router_bias": bias + shift.astype(bias.dtype)}
    return dataclasses.replace(state, params={**state.params, "layers": layers})


def routers_of(output: PolicyOutput, micro: TokenBatch, config: ModelConfig) -> dict[str, Array]:
    """What the routers did with the tokens of a micro-batch, prompts included; adds up over micro-batches."""
    if output.routed is None:
        return {}
    ids, entropy, dropped, _, preferred = output.routed
    counted = micro.segments != 0
    known = counted[..., None] if micro.routing_ids is None else micro.routing_ids[..., 0] >= 0
    replayed = (
        jnp.zeros((), jnp.float32) if micro.routing_ids is None else jnp.sum(known & counted[..., None])
    )
    unbiased = {} if preferred is None else {"preferred": router_load(preferred, config.num_experts, counted)}
    return {
        **unbiased,
        "load": router_load(ids, config.num_experts, counted),
        "entropy": jnp.sum(jnp.where(counted[..., None], entropy, 0.0)),
        "dropped": jnp.sum(jnp.where(counted[..., None], dropped, 0.0)),
        "replayed": replayed.astype(jnp.float32),
    }


def router_figures(
    routers: dict[str, Array], config: ModelConfig, places: int, params: Any
) -> dict[str, Mean]:
    """Figures of the routers in one update, from `routers_of` each micro-batch; {} of a dense model.

    `params` are those after the update.

    expert_load_max        tokens of the busiest expert of a layer over the mean of the layer, of the worst layer
    expert_load_min        likewise of the idlest expert
    expert_idle            fraction of the experts of all layers that no token went through
    expert_dropped         fraction of (token, expert) pairs for which the expert had no room
    expert_replayed        fraction of tokens that went through the experts that the sampler had chosen
    expert_exchange        bytes that all devices together receive in the forward passes, because experts are elsewhere
    router_entropy         mean entropy of the router's probabilities, in nats
    Of a model with biases of routers also:
    expert_preferred_max   as expert_load_max, had each token gone through the experts that its router prefers without a bias
    router_bias_max        largest absolute value of a bias after the update
    """
    if not routers:
        return {}
    total = {name: jnp.sum(x, axis=0) for name, x in routers.items()}
    load = total["load"]
    pairs = jnp.sum(load)
    tokens = pairs / config.experts_per_token  # in each layer

    def relative(load: Array) -> Array:
        return load / jnp.maximum(jnp.mean(load, axis=1, keepdims=True), 1.0)

    biased = {}
    if "preferred" in total:
        biased = {
            "expert_preferred_max": figure(jnp.max(relative(total["preferred"]))),
            "router_bias_max": figure(jnp.max(jnp.abs(params["layers"]["router_bias"]))),
        }
    return {
        **biased,
        "expert_load_max": figure(jnp.max(relative(load))),
        "expert_load_min": figure(jnp.min(relative(load))),
        "expert_idle": figure(jnp.mean(load == 0)),
        "expert_dropped": Mean(total["dropped"], pairs),
        "expert_replayed": Mean(total["replayed"], tokens),
        "expert_exchange": figure(jnp.float32(exchanged_bytes(config, places))),
        "router_entropy": Mean(total["entropy"], tokens),
    }


def ratio_extremes(output: PolicyOutput, micro: TokenBatch) -> dict[str, Array]:
    """Figures that merge by the maximum (`_max`) or the minimum (`_min`)."""
    anchor = micro.logprob_behavior if micro.logprob_proximal is None else micro.logprob_proximal
    if anchor is None:
        return {}
    logprob = jax.lax.stop_gradient(output.logprob)
    log_ratio = logprob - anchor
    out = {
        "ratio_max": jnp.exp(jnp.max(jnp.where(micro.mask, log_ratio, -jnp.inf))),
        "ratio_min": jnp.exp(jnp.min(jnp.where(micro.mask, log_ratio, jnp.inf))),
    }
    if micro.logprob_behavior is not None:
        gap = jnp.where(micro.mask, jnp.abs(logprob - micro.logprob_behavior), 0.0)
        out["logprob_gap_max"] = jnp.max(gap)
    return out


def merge_extremes(extremes: dict[str, Array]) -> dict[str, Mean]:
    """One figure for each of `ratio_extremes`, from arrays over micro-batches; a batch without tokens gives 0.

    What is NaN or infinite because of a token stays so: the worst case must not look like the best.
    """
    out = {}
    for name, values in extremes.items():
        if name.endswith("_min"):
            value = jnp.min(values)
            value = jnp.where(jnp.isposinf(value), 0.0, value)  # the minimum of nothing
        else:
            value = jnp.max(values)
        out[name] = figure(value)
    return out
