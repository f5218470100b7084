"""TRPO's step: along the natural gradient, as far as the exact KL of the policy allows.

    maximise the surrogate    subject to    mean over trained tokens of KL(π_start ‖ π) <= max_kl

The Fisher matrix F of that KL at π_start is never formed. Its product with a vector v is Jᵀ H J v: J takes a
change of the parameters to a change of the logits, H = diag(p) - p pᵀ is the Fisher matrix of a softmax. The
decoder part of J is differentiated forwards by transposing its backward pass (our attention and products define
their own backward pass, which rules out `jax.jvp`); the head part, H and the KL itself run over chunks of
positions, so logits of a whole batch never exist.

Local names: R row blocks (one per shard of the rows), M positions of a block, C positions of a chunk, D residual,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.learner.rows import check_micro_batch_rows, micro_batches, pad_rows
from jaxrl_llm.learner.update import Metrics, UpdateStep, figure, merge_extremes, ratio_extremes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat, forward, head_matrix
from jaxrl_llm.ops.chunks import Chunks
from jaxrl_llm.ops.logprobs import Entropy, default_chunk, head_logprobs
from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.rules import DEFAULT_RULES, Rules, param_shardings
from jaxrl_llm.transforms import checks
from jaxrl_llm.transforms.base import LossTransform, needed_fields
from jaxrl_llm.transforms.evaluate import evaluate
from jaxrl_llm.types import LearnerState, Mean, PolicyOutput, TokenBatch

__all__ = [
    "Features",
    "conjugate_gradient",
    "decoder_features",
    "fisher_product",
    "head_fisher",
    "head_kl",
    "make_trust_region_step",
]

Array = jax.Array
Features = Callable[[Any, TokenBatch], tuple[Array, Array]]
"""policy(params, batch) -> (h [B, T, D], w [D, V]): token t is drawn from softmax(h_t w / temperature_t)."""


# ------------------------------------------------------------------------- softmaxes, chunk by chunk


def _chunks(active: Array, vocabulary: int, chunk: int | None, blocks: int) -> Chunks:
    if active.shape[0] % blocks:
        raise ValueError(f"{active.shape[0]} rows do not divide into {blocks} blocks; pad the rows.")
    active = active.reshape(blocks, -1)
    chunk = default_chunk(vocabulary) if chunk is None else chunk
    return Chunks.of(active, max(1, min(chunk // blocks, active.shape[1])))


def _cut(chunks: Chunks, *arrays: Array) -> tuple[Array, ...]:
    """[B, T, …] -> [chunks, R, C, …]."""
    R, M = chunks.order.shape
    return chunks.cut(tuple(x.reshape(R, M, *x.shape[2:]) for x in arrays))


def _scores(x_RCD: Array, w_DV: Array, dtype: str) -> Array:
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum("rcd,dv->rcv", x_RCD.astype(dtype), w_DV.astype(dtype), preferred_element_type=wide)


def head_kl(
    start: tuple[Array, Array],
    end: tuple[Array, Array],
    temperature: Array,
    active: Array,
    *,
    dtype: str,
    chunk: int | None = None,
    blocks: int = 1,
) -> Array:
    """KL(p ‖ q) = Σ_v p_v (log p_v - log q_v) at each position (nats), f32[B, T], exactly 0 where not active.

    Args:
      start, end: (h [B, T, D], w [D, V]) of p and of q.
      temperature: f32[B, T], positive where active.
      active: bool[B, T].
      dtype: of the operands of the products.
      chunk: positions whose logits exist at the same time; default: about 128 MB of them.
      blocks: shards of the rows.
    """
    chunks = _chunks(active, start[1].shape[1], chunk, blocks)
    inverse = keep(active, 1.0 / jnp.where(active, temperature, 1.0))

    def compute(_, part):
        x, y, tau = part
        p = jax.nn.log_softmax(_scores(x, start[1], dtype) * tau[..., None])
        q = jax.nn.log_softmax(_scores(y, end[1], dtype) * tau[..., None])
        return None, jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    inputs = _cut(chunks, *(keep(active[..., None], h) for h in (start[0], end[0])), inverse)
    return keep(active, chunks.join(chunks.fold(compute, None, inputs)[1]).reshape(active.shape))


def head_fisher(
    at: tuple[Array, Array],
    change: tuple[Array, Array],
    temperature: Array,
    weight: Array,
    *,
    dtype: str,
    chunk: int | None = None,
    blocks: int = 1,
) -> tuple[Array, Array]:
    """Jᵀ diag(weight) H J · change, J and H of the logits z = h w / temperature, as (for h, for w).

    With dz = J · change:  H dz = p ∘ (dz - Σ_v p_v dz_v), the Fisher matrix of softmax z applied to dz.

    Args:
      at, change: (h [B, T, D], w [D, V]), where and along what.
      weight: f32[B, T]; positions of weight 0 are skipped.
      temperature, dtype, chunk, blocks: see `head_kl`.
    """
    active = weight != 0
    (h, w), (dh, dw) = at, change
    chunks = _chunks(active, w.shape[1], chunk, blocks)
    inverse = keep(active, 1.0 / jnp.where(active, temperature, 1.0))
    wide = jnp.promote_types(dtype, jnp.float32)

    def compute(out_RDV, part):
        x, dx, tau, share = part
        p = jax.nn.softmax(_scores(x, w, dtype) * tau[..., None])
        dz = (_scores(dx, w, dtype) + _scores(x, dw, dtype)) * tau[..., None]
        u = p * (dz - jnp.sum(p * dz, axis=-1, keepdims=True)) * (share * tau)[..., None]
        u = u.astype(dtype)
        out_x = jnp.einsum("rcv,dv->rcd", u, w.astype(dtype), preferred_element_type=wide)
        return out_RDV + jnp.einsum("rcd,rcv->rdv", x.astype(dtype), u, preferred_element_type=wide), out_x

    inputs = _cut(
        chunks, *(keep(active[..., None], x) for x in (h, dh)), inverse.astype(wide), weight.astype(wide)
    )
    out_RDV, out_h = chunks.fold(compute, jnp.zeros((blocks, *w.shape), wide), inputs)
    return chunks.join(out_h).reshape(h.shape).astype(h.dtype), jnp.sum(out_RDV, axis=0).astype(w.dtype)


def fisher_product(
    policy: Features,
    params: Any,
    vector: Any,
    batch: TokenBatch,
    weight: Array,
    *,
    dtype: str,
    chunk: int | None = None,
    blocks: int = 1,
) -> Any:
    """F · vector: F = Σ over tokens of weight · E_{v ~ π}[∇log π(v) ∇log π(v)ᵀ], the Hessian of Σ weight · KL.

    Args:
      policy, params, batch: give the distributions.
      vector: a tree like `params`.
      weight: f32[B, T]; tokens of weight 0 are skipped.
      dtype, chunk, blocks: see `head_kl`.
    """
    at, pull = jax.vjp(lambda p: policy(p, batch), params)
    # u -> Jᵀ u is linear, and its transpose is v -> J v.
    push = jax.vjp(lambda u: pull(u)[0], jax.tree.map(jnp.zeros_like, at))[1]
    change = push(vector)[0]
    product = head_fisher(at, change, batch.temperature, weight, dtype=dtype, chunk=chunk, blocks=blocks)
    return pull(product)[0]


# ------------------------------------------------------------------------------------ linear algebra


def _dot(a: Any, b: Any) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))


def _along(a: Any, scale: Array, b: Any) -> Any:
    """a + scale · b."""
    return jax.tree.map(lambda x, y: x + scale.astype(x.dtype) * y, a, b)


def conjugate_gradient(
    product: Callable[[Any], Any], target: Any, *, iterations: int, residual: float
) -> tuple[Any, Any]:
    """(x, target - A x) after at most `iterations` steps of conjugate gradient from x = 0 on A x = target.

    Args:
      product: v -> A v, for a symmetric positive definite A, over trees like `target`.
      residual: stop once |target - A x|² <= residual · |target|². (Relative: the gradient of a mean over tokens
        is small, and an absolute bound would stop before the first step.)

    A direction in which A is not positive, by rounding or because it is not finite, ends the iteration.
    """
    first = _dot(target, target)

    def going(carry):
        i, _, _, _, square, sound = carry
        return (i < iterations) & sound & (square > residual * first)

    def step(carry):
        i, x, r, p, square, _ = carry
        Ap = product(p)
        curvature = _dot(p, Ap)
        sound = (curvature > 0) & jnp.isfinite(curvature)
        length = jnp.where(sound, square / jnp.where(sound, curvature, 1.0), 0.0)
        x = _along(x, length, p)
        # Not r - length · Ap where the product is not finite: 0 · NaN would spoil the residual.
        r = jax.tree.map(lambda a, b: jnp.where(sound, a - length.astype(a.dtype) * b, a), r, Ap)
        new = _dot(r, r)
        p = _along(r, quotient(new, square), p)
        return i + 1, x, r, p, new, sound

    zeros = jax.tree.map(jnp.zeros_like, target)
    carry = (jnp.zeros((), jnp.int32), zeros, target, target, first, jnp.isfinite(first))
    _, x, r, _, _, _ = jax.lax.while_loop(going, step, carry)
    return x, r


# -------------------------------------------------------------------------------------------- the step


def decoder_features(config: ModelConfig, remat: Remat = True) -> Features:
    """The decoder as `Features`: hidden state t - 1 at entry t, and the output head."""

    def features(params: Any, batch: TokenBatch) -> tuple[Array, Array]:
        h = forward(
            params,
            config,
            batch.tokens,
            batch.positions,
            batch.segments,
            remat=remat,
            routing_ids=batch.routing_ids,
        )
        return jnp.pad(h[:, :-1], ((0, 0), (1, 0), (0, 0))), head_matrix(params)

    return features


def make_trust_region_step(
    objective: LossTransform,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    max_kl: float = 0.01,
    damping: float = 0.1,
    cg_iterations: int = 10,
    cg_residual: float = 1e-10,
    backtracks: int = 10,
    micro_batch_rows: int | None = None,
    remat: Remat = True,
    chunk: int | None = None,
    entropy: bool = True,
    rules: Rules = DEFAULT_RULES,
    policy: Features | None = None,
    donate: bool = True,
) -> UpdateStep:
    """Builds step(state, batch) -> (state, metrics), one jitted step of TRPO (arXiv 1502.05477, appendix C).

        g = gradient of the loss          x ≈ -(F + damping · I)⁻¹ g          by conjugate gradient
        step = sqrt(2 max_kl / xᵀ (F + damping · I) x) · x

    and the first of step, step / 2, step / 4, … is taken for which the loss of the batch is lower than before and
    the mean KL(π_start ‖ π) over the trained tokens is at most max_kl. When none is, nothing changes: the step is
    counted in `skipped`, as is one whose gradient is zero or not finite.

    π_start is the policy that the step is given, over its full vocabulary and at the temperature of each token. That also
    holds where top-k, top-p or min-p acted and the loss has log-probs over the support of each token: the region bounds
    the policy, and the tokens outside, which the loss does not see, move with it (the KL over a support that holds
    the share P of π_start is at most 1/P of it).
    With one update a train step, TRPO's setting, that is the proximal policy; several updates each get max_kl.
    The loss is the whole chain's, penalties included. There is no optimiser: `state.opt_state` is handed on (make
    the state with `optax.identity()`), and neither a schedule nor gradient clipping applies. Besides state and
    batch, five trees of the size of the parameters are held.

    Departures from the paper: F from all of the batch (the paper subsamples it); damping, which its authors'
    code has; the residual of the conjugate gradient is bounded relative to the gradient.

    Args:
      objective: a complete chain; the batch must come from its `prepare`. It may read the log-probs and entropy
        of the current policy.
      config, mesh, micro_batch_rows, remat, chunk, entropy, rules, donate: as in `make_update_step`.
      max_kl: δ, nats per trained token (0.01 is the usual value; the paper's experiments).
      damping: added to the diagonal of F (0.1, the usual value).
      cg_iterations: each costs about two forward and two backward passes (10, the paper's).
      cg_residual: see `conjugate_gradient`.
      backtracks: step lengths that are tried, each a forward pass of the old and of the new policy.
      policy: replaces the decoder, see `Features`. For tests and for models of one's own.

    Returns:
      step. Its metrics are those of `make_update_step` at the parameters before the step, without a learning
      rate, and
        trust_region_kl        mean KL(π_start ‖ π) of the step taken, exact; 0 when it was skipped
        trust_region_gain      loss before - loss after, likewise
        trust_region_scale     fraction of the full step that was taken: 1, 1/2, 1/4, …, or 0
        trust_region_residual  |residual| / |gradient| of the conjugate gradient

    Raises:
      ValueError: max_kl is not positive, damping is negative, or a count is below 1.
    """
    name = "make_trust_region_step"
    checks.number(name, "max_kl", max_kl, positive=True)
    checks.number(name, "damping", damping, low=0.0)
    checks.number(name, "cg_residual", cg_residual, low=0.0)
    for label, value in (("cg_iterations", cg_iterations), ("backtracks", backtracks)):
        if value < 1:
            raise ValueError(f"{name}: {label} must be at least 1, got {value}.")
    shards = batch_shards(mesh)
    check_micro_batch_rows(micro_batch_rows, shards)
    features = decoder_features(config, remat) if policy is None else policy
    spread: Entropy = True if "entropy" in needed_fields(objective) else ("detached" if entropy else False)
    dtype = config.logits_dtype

    def pinned(tree):
        if mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, param_shardings(config, mesh, rules))

    def surrogate(params, micro, objective_state):
        h, w = features(params, micro)
        logprob, extent = head_logprobs(
            h,
            w,
            micro.tokens,
            micro.temperature,
            micro.mask,
            dtype=dtype,
            entropy=spread,
            support=micro.support_ids,
            chunk=chunk,
            blocks=shards,
        )
        output = PolicyOutput(logprob=logprob, entropy=extent)
        result = evaluate(objective, output, micro, objective_state)
        return result.loss_sum, (result, ratio_extremes(output, micro))

    def divergence(start, end, micro):
        at = features(start, micro), features(end, micro)
        kl = head_kl(*at, micro.temperature, _valid(micro), dtype=dtype, chunk=chunk, blocks=shards)
        return jnp.sum(kl)

    def update(state: LearnerState, batch: TokenBatch) -> tuple[LearnerState, Metrics]:
        rows = micro_batch_rows or batch.shape[0]
        split, rebuild = micro_batches(pad_rows(batch, rows), rows, mesh)
        start = state.params
        tokens = jnp.sum(_valid(batch))

        def summed(zeros, function):
            """Σ of function(micro-batch) over the micro-batches."""

            def add(sums, slices):
                return jax.tree.map(jnp.add, sums, function(rebuild(slices))), None

            return jax.lax.scan(add, zeros, split)[0]

        def gradient(sums, slices):
            value = functools.partial(surrogate, objective_state=state.objective_state)
            grads, outputs = jax.grad(value, has_aux=True)(start, rebuild(slices))
            return pinned(jax.tree.map(jnp.add, sums, grads)), outputs

        zeros = pinned(jax.tree.map(jnp.zeros_like, start))
        grads, (results, extremes) = jax.lax.scan(gradient, zeros, split)
        total, denominator, metrics = jax.tree.map(
            lambda x: jnp.sum(x, axis=0), (results.loss_sum, results.denominator, results.metrics)
        )
        loss = quotient(total, denominator)
        grads = jax.tree.map(lambda g: g * quotient(jnp.ones_like(total), denominator).astype(g.dtype), grads)
        norm = jnp.sqrt(_dot(grads, grads))
        usable = (denominator > 0) & (tokens > 0) & jnp.isfinite(loss) & jnp.isfinite(norm) & (norm > 0)

        def curvature(vector):
            def one(micro):
                share = quotient(_valid(micro).astype(total.dtype), tokens.astype(total.dtype))
                return pinned(
                    fisher_product(
                        features, start, vector, micro, share, dtype=dtype, chunk=chunk, blocks=shards
                    )
                )

            return _along(summed(zeros, one), jnp.asarray(damping, total.dtype), vector)

        descent = jax.tree.map(lambda g: jnp.where(usable, -g, 0.0), grads)
        x, residual = conjugate_gradient(curvature, descent, iterations=cg_iterations, residual=cg_residual)
        # xᵀ (F + damping) x without another product: (F + damping) x = descent - residual.
        square = _dot(x, _along(descent, jnp.asarray(-1.0), residual))
        usable &= (square > 0) & jnp.isfinite(square)
        length = jnp.sqrt(quotient(2.0 * max_kl * usable, jnp.where(usable, square, 0.0)))
        full = jax.tree.map(lambda v: jnp.where(usable, length.astype(v.dtype) * v, 0.0), x)

        def attempt(scale):
            end = pinned(_along(start, scale, full))

            def one(micro):
                return surrogate(end, micro, state.objective_state)[0], divergence(start, end, micro)

            zero = jnp.zeros((), total.dtype)
            after, kl = summed((zero, zero), one)
            return quotient(after, denominator), quotient(kl, tokens.astype(kl.dtype))

        def search(carry):
            tried, _, _, _ = carry
            after, kl = attempt(0.5 ** tried.astype(total.dtype))
            return tried + 1, (after < loss) & (kl <= max_kl), after, kl  # NaN compares False

        def searching(carry):
            tried, found, _, _ = carry
            return usable & ~found & (tried < backtracks)

        begin = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), loss, jnp.zeros_like(loss))
        tried, found, after, kl = jax.lax.while_loop(searching, search, begin)
        scale = jnp.where(found, 0.5 ** (tried - 1).astype(total.dtype), 0.0)
        advanced = objective.update(state.objective_state, metrics)
        new = dataclasses.replace(
            state,
            params=pinned(_along(start, scale, full)),
            objective_state=jax.tree.map(
                lambda later, before: jnp.where(found, later, before), advanced, state.objective_state
            ),
            skipped=state.skipped + jnp.where(found, 0, 1).astype(jnp.int32),
        )
        metrics = metrics | {
            "loss": Mean(total, denominator),
            "grad_norm": figure(norm),
            "skipped": figure(~found),
            "trained_tokens": figure(jnp.sum(batch.mask)),
            "trust_region_kl": figure(jnp.where(found, kl, 0.0)),
            "trust_region_gain": figure(jnp.where(found, loss - after, 0.0)),
            "trust_region_scale": figure(scale),
            "trust_region_residual": figure(quotient(jnp.sqrt(_dot(residual, residual)), norm)),
            **merge_extremes(extremes),
        }
        return new, metrics

    return UpdateStep(jax.jit(update, donate_argnums=0 if donate else ()), mesh)


def _valid(batch: TokenBatch) -> Array:
    """bool[B, T]: the tokens over which the KL is averaged."""
    return batch.mask if batch.counted is None else batch.mask & batch.counted
