"""Log-probs of tokens under the policy, without ever holding the logits of a whole batch.

This is the one place that reads the hidden state at t - 1 for token t. The output head, its log-sum-exp
and their derivatives run over chunks of positions; the logits of a chunk are recomputed in the backward
pass, so memory grows with the chunk and not with B * T * V. Positions that nobody asked for are moved to
the end first, and chunks that hold none but those are skipped.

A divergence between the policy and a teacher over the whole vocabulary is taken in the same pass: the logits
of one chunk of both are in memory together, and are computed again in the backward pass, which knows the
derivative of the divergence in closed form. Of the teacher it needs the hidden states that tokens are predicted
from, `hidden_states`: they are small ([B, T, E]), so they are computed once a train step and serve every update.

**Truncated sampling.** A token that top-k, top-p or min-p chose out of a few has its log-prob over these few, its
*support* S, in every policy: log p(y) = z_y - log Σ_{v in S} exp z_v, with d log p(y) / dz_v = [v = y] - p(v) in S and 0
outside. With the weights that sampled it this is the sampler's log-prob, so the ratio is 1; under any other weights it
is finite, since y is in S. A token that was drawn from all but a few tokens (min_tokens, suppressed ids) has its log-prob
over the others in the same way. The entropy is that of the same distribution. What compares whole distributions (lists,
divergences to a teacher) stays over the vocabulary: it does not depend on how the token was drawn, and S, which is
the sampler's, is not the set that another policy would draw from.

Local names: R row blocks (one per shard of the rows, 1 on a single device), M positions of a block, C
positions of a chunk, D residual, E residual of the teacher, V vocabulary, K listed tokens of a position, S tokens of
a support.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.losses.divergences import Divergence
from jaxrl_llm.models.blockwise import goes_in_blocks, seen, sight_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat, forward, forward_routed, head_matrix, pinned
from jaxrl_llm.ops.chunks import Chunks
from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.support import first_left_out, left_out_ids
from jaxrl_llm.parallel.rules import Layout
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = [
    "Entropy",
    "HeadOutput",
    "TeacherHead",
    "default_chunk",
    "head_logprobs",
    "head_output",
    "hidden_states",
    "likeliest_tokens",
    "policy_output",
    "segment_positions",
    "token_logprobs",
]

Array = jax.Array

# Entropy: not computed, on the gradient tape, or computed for reporting only (no gradient flows through it).
Entropy = bool | Literal["detached"]

# The logit of a token that is left out: its probability is 0, and 0 times it is 0 and not NaN.
_LEFT_OUT = -1e30

_CHUNK_ELEMENTS = 2**25  # logits of one chunk: 128 MB in f32


def default_chunk(vocab_size: int) -> int:
    """Positions of a chunk of the head, a power of two, so that its f32 logits take about 128 MB."""
    return min(4096, max(16, 2 ** int(math.log2(_CHUNK_ELEMENTS / vocab_size))))


class _HeadPlan(NamedTuple):
    """The static part of a head pass."""

    dtype: str  # of the operands of the products
    chunk: int  # C
    entropy: Entropy
    find: int = 0  # K of the likeliest tokens to look up; not differentiable
    divergence: Divergence | None = None
    teacher_dtype: str = "float32"  # of the operands of the teacher's product
    layout: Layout | None = None  # on a mesh

    def weight(self, w_DV: Array) -> Array:
        """The head as it is multiplied with, the same in every chunk."""
        return pinned(w_DV.astype(self.dtype), None if self.layout is None else self.layout.head)


class TeacherHead(NamedTuple):
    """What a divergence needs of a teacher."""

    params: Any  # its tree, or the part of it that `head_matrix` reads
    dtype: str  # of the operands of its product
    divergence: Divergence


class HeadOutput(NamedTuple):
    """What a head pass gives at each position; None where it was not asked for, 0 where not active."""

    logprob: Array  # of the target
    entropy: Array | None
    topk_logprob: Array | None  # [..., K], of the listed tokens, or of those that were found
    topk_ids: Array | None  # i32[..., K], likeliest first; only when they were to be found
    divergence: Array | None = None


def _logits(x_RCD: Array, w_DV: Array, temperature_RC: Array) -> Array:
    """[R, C, V] in f32 (f64 stays f64), divided by the temperature."""
    wide = jnp.promote_types(x_RCD.dtype, jnp.float32)
    logits = jnp.einsum("rcd,dv->rcv", x_RCD, w_DV, preferred_element_type=wide)
    return logits / temperature_RC[..., None]


def _lse_and_entropy(logits_RCV: Array) -> tuple[Array, Array]:
    """(log Σ exp z, entropy of softmax z), [R, C] each, from one pass that exponentiates each logit once.

    With d = z - max z, s = Σ exp d and u = Σ d exp d: lse = max z + log s, entropy = log s - u / s.
    """
    top = jnp.max(logits_RCV, axis=-1, keepdims=True)
    shifted = logits_RCV - top
    # The pass adds one after the other; parts of the vocabulary keep the rounding error of long sums small.
    parts = math.gcd(logits_RCV.shape[-1], 128)
    shifted = shifted.reshape(*shifted.shape[:-1], parts, -1)
    exponential = jnp.exp(shifted)
    zero = jnp.zeros((), logits_RCV.dtype)
    s, u = jax.lax.reduce(
        (exponential, exponential * shifted),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (shifted.ndim - 1,),
    )
    s, u = jnp.sum(s, axis=-1), jnp.sum(u, axis=-1)
    return top[..., 0] + jnp.log(s), jnp.log(s) - u / s


def _without_left_out(logits_RCV: Array, support_RCS: Array) -> Array:
    """The logits, with `_LEFT_OUT` at the tokens that the support of a position leaves out."""
    V = logits_RCV.shape[-1]

    def leave_out(logits):
        r, c = (jnp.arange(n)[:, None] for n in logits.shape[:2])
        ids = left_out_ids(support_RCS, V)
        logits = logits.at[r[..., None], c[None], ids].set(_LEFT_OUT, mode="drop")
        return jnp.where(jnp.arange(V) < first_left_out(support_RCS, V)[..., None], logits, _LEFT_OUT)

    return jax.lax.cond(jnp.any(support_RCS <= -2), leave_out, lambda logits: logits, logits_RCV)


def _on_support(logits_RCV: Array, support_RCS: Array) -> Array:
    """[R, C, S]: the logits of the tokens of each support, -inf where it has ended."""
    logits = jnp.take_along_axis(logits_RCV, jnp.maximum(support_RCS, 0), axis=-1)
    return jnp.where(support_RCS >= 0, logits, -jnp.inf)


def _support_lse_and_entropy(logits_RCS: Array) -> tuple[Array, Array]:
    """`_lse_and_entropy` of `_on_support`; (0, 0) where there is no support."""
    there = logits_RCS > -jnp.inf
    some = jnp.any(there, axis=-1)
    top = jnp.where(some, jnp.max(logits_RCS, axis=-1), 0.0)
    shifted = jnp.where(there, logits_RCS - top[..., None], 0.0)
    exponential = jnp.where(there, jnp.exp(shifted), 0.0)
    s = jnp.where(some, jnp.sum(exponential, axis=-1), 1.0)
    return top + jnp.log(s), jnp.log(s) - jnp.sum(exponential * shifted, axis=-1) / s


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(
    plan: _HeadPlan, h_RMD, w_DV, targets_RM, temperature_RM, active_RM, listed_RMK, y_RME, v_EV, support_RMS
) -> HeadOutput:
    """`HeadOutput` of [R, M]; `entropy` and `divergence` are always there.

    listed_RMK and support_RMS may be None; y_RME and v_EV, the teacher's, are None without a divergence. No gradient
    reaches them.
    """
    return _head_forward(
        plan, h_RMD, w_DV, targets_RM, temperature_RM, active_RM, listed_RMK, y_RME, v_EV, support_RMS
    )[0]


def _teacher_logprobs(plan: _HeadPlan, y_RCE: Array, v_EV: Array, temperature_RC: Array) -> Array:
    logits = _logits(y_RCE.astype(plan.teacher_dtype), v_EV.astype(plan.teacher_dtype), temperature_RC)
    return jax.nn.log_softmax(logits, axis=-1)


def _head_forward(
    plan, h_RMD, w_DV, targets_RM, temperature_RM, active_RM, listed_RMK, y_RME, v_EV, support_RMS
):
    chunks = Chunks.of(active_RM, plan.chunk)
    w = plan.weight(w_DV)
    wide = jnp.promote_types(plan.dtype, jnp.float32)

    def compute(_, chunk):
        x_RCD, target_RC, temperature_RC, listed, y_RCE, support = chunk
        logits = _logits(x_RCD.astype(plan.dtype), w, temperature_RC)
        allowed = logits if support is None else _without_left_out(logits, support)
        chosen = jnp.take_along_axis(logits, target_RC[..., None], axis=-1)[..., 0]
        if plan.entropy:
            lse, entropy = _lse_and_entropy(allowed)
        else:
            lse = jax.nn.logsumexp(allowed, axis=-1)
            entropy = jnp.zeros_like(lse)
        whole = lse  # of the whole vocabulary
        if support is not None and (plan.divergence is not None or listed is not None or plan.find):
            whole = jax.nn.logsumexp(logits, axis=-1)
        divergence = jnp.zeros_like(lse)
        if plan.divergence is not None:
            teacher = _teacher_logprobs(plan, y_RCE, v_EV, temperature_RC)
            divergence = plan.divergence.value(logits - whole[..., None], teacher).astype(wide)
        lists: tuple[Array, ...] = ()
        if listed is not None:
            lists = (jnp.take_along_axis(logits, listed, axis=-1) - whole[..., None],)
        elif plan.find:
            values, ids = jax.lax.top_k(logits, plan.find)
            lists = values - whole[..., None], ids
        if support is None:
            return None, (chosen - lse, (lse, None, None), entropy, divergence, *lists)
        some = jnp.any(support >= 0, axis=-1)
        own, entropy_of_own = _support_lse_and_entropy(_on_support(logits, support))
        own, entropy = jnp.where(some, own, lse), jnp.where(some, entropy_of_own, entropy)
        return None, (chosen - own, (lse, own, whole), entropy, divergence, *lists)

    _, outputs = chunks.fold(
        compute, None, chunks.cut((h_RMD, targets_RM, temperature_RM, listed_RMK, y_RME, support_RMS))
    )
    logprob, lses, entropy, divergence, *lists = chunks.join(outputs)
    logprob, entropy, divergence = (jnp.where(active_RM, x, 0.0) for x in (logprob, entropy, divergence))
    lists = [jnp.where(active_RM[..., None], x, jnp.zeros((), x.dtype)) for x in lists]
    topk_logprob, topk_ids = [*lists, None, None][:2]
    output = HeadOutput(logprob, entropy, topk_logprob, topk_ids, divergence)
    given = (h_RMD, w_DV, targets_RM, temperature_RM, active_RM, listed_RMK, y_RME, v_EV, support_RMS)
    return output, (*given, *lses, entropy)


def _add_at(x_RCV: Array, ids_RCK: Array, values_RCK: Array) -> Array:
    """x[r, c, ids[r, c, k]] += values[r, c, k]; an id of V is left out."""
    r, c = (jnp.arange(n)[:, None] for n in ids_RCK.shape[:2])
    return x_RCV.at[r[..., None], c[None], ids_RCK].add(values_RCK, mode="drop")


def _head_backward(plan, residuals, cotangents):
    h_RMD, w_DV, targets_RM, temperature_RM, active_RM, listed_RMK, y_RME, v_EV, *kept = residuals
    support_RMS, lse, own, whole, entropy = kept
    d_logprob, d_entropy = (jnp.where(active_RM, d, 0.0) for d in cotangents[:2])
    d_listed = d_divergence = None
    if listed_RMK is not None:
        d_listed = jnp.where(active_RM[..., None], cotangents.topk_logprob, 0.0)
    if plan.divergence is not None:
        d_divergence = jnp.where(active_RM, cotangents.divergence, 0.0)
    chunks = Chunks.of(active_RM, plan.chunk)
    w = plan.weight(w_DV)
    wide = jnp.promote_types(plan.dtype, jnp.float32)
    V = w_DV.shape[1]

    def compute(dw_RDV, chunk):
        x_RCD, target_RC, temperature_RC, lse_RC, entropy_RC, dp_RC, de_RC, ids, dk_RCK, *rest = chunk
        y_RCE, dd_RC, support, own_RC, whole_RC = rest
        x = x_RCD.astype(plan.dtype)
        logits = _logits(x, w, temperature_RC)
        allowed = logits if support is None else _without_left_out(logits, support)
        logp = allowed - lse_RC[..., None]
        probs = jnp.exp(logp)
        one_hot = target_RC[..., None] == jnp.arange(V, dtype=target_RC.dtype)
        # d log p_y / dz_j = [j = y] - p_j        dH / dz_j = -p_j (log p_j + H)
        total, total_entropy = dp_RC, de_RC  # of what is not taken over a short list
        if support is not None:
            some = jnp.any(support >= 0, axis=-1)
            total, total_entropy = jnp.where(some, 0.0, dp_RC), jnp.where(some, 0.0, de_RC)
        if support is None:
            logp_whole, probs_whole = logp, probs
        elif ids is not None or plan.divergence is not None:
            logp_whole = logits - whole_RC[..., None]
            probs_whole = jnp.exp(logp_whole)
        if ids is None and support is None:
            dz = dp_RC[..., None] * (one_hot - probs)
        else:
            dz = dp_RC[..., None] * one_hot - total[..., None] * probs
        if ids is not None:
            dz = _add_at(dz - jnp.sum(dk_RCK, axis=-1)[..., None] * probs_whole, ids, dk_RCK)
        if plan.entropy is True:
            dz = dz - total_entropy[..., None] * probs * (logp + entropy_RC[..., None])
        if support is not None:
            logp_RCS = _on_support(logits, support) - own_RC[..., None]
            there = support >= 0
            slope = dp_RC[..., None]
            if plan.entropy is True:
                slope = slope + de_RC[..., None] * (jnp.where(there, logp_RCS, 0.0) + entropy_RC[..., None])
            dz = _add_at(dz, jnp.where(there, support, V), jnp.where(there, -slope * jnp.exp(logp_RCS), 0.0))
        if plan.divergence is not None:
            teacher = _teacher_logprobs(plan, y_RCE, v_EV, temperature_RC)
            dz = dz + dd_RC[..., None] * plan.divergence.slope(logp_whole, teacher)
        dz = (dz / temperature_RC[..., None]).astype(plan.dtype)
        dx_RCD = jnp.einsum("rcv,dv->rcd", dz, w, preferred_element_type=wide)
        return dw_RDV + jnp.einsum("rcd,rcv->rdv", x, dz, preferred_element_type=wide), dx_RCD

    fields = (h_RMD, targets_RM, temperature_RM, lse, entropy, d_logprob, d_entropy, listed_RMK, d_listed)
    # Each row block sums its own: the shards of a mesh add theirs once, and not in every chunk.
    zeros = jnp.zeros((h_RMD.shape[0], *w_DV.shape), wide)
    dw_RDV, dx = chunks.fold(
        compute, zeros, chunks.cut((*fields, y_RME, d_divergence, support_RMS, own, whole))
    )
    dw_DV = _sum_of_blocks(dw_RDV, plan.layout).astype(w_DV.dtype)
    return chunks.join(dx).astype(h_RMD.dtype), dw_DV, None, None, None, None, None, None, None


_head.defvjp(_head_forward, _head_backward)


_PIECES, _COLUMNS = 8, 1024  # of the gradient of the head: at most so many, of a multiple of so many columns


def _sum_of_blocks(dw_RDV: Array, layout: Layout | None) -> Array:
    """[D, V], laid out as the gradient of the head."""
    if layout is None:
        return jnp.sum(dw_RDV, axis=0)
    (blocks,), (kept, vocab) = layout.blocks.spec, layout.head_gradient.spec
    kept, split = ((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in (kept, vocab))
    if not set(kept) <= set(blocks) or set(split) & set(blocks):  # rules of one's own
        return pinned(jnp.sum(dw_RDV, axis=0), layout.head_gradient)
    others = tuple(axis for axis in blocks if axis not in kept)

    def scattered(dw_DV: Array) -> Array:
        for axis in kept:
            dw_DV = jax.lax.psum_scatter(dw_DV, axis, scatter_dimension=0, tiled=True)
        return jax.lax.psum(dw_DV, others) if others else dw_DV

    def of_a_device(dw_RDV: Array) -> Array:
        # Each device receives the shard that it keeps. Left to itself, XLA gives it the whole sum to cut that from, which is
        # twice the bytes; on TPUs also where it is asked for the shard, but for one axis and some columns at a time.
        dw_DV = jnp.sum(dw_RDV, axis=0)
        columns = -(-dw_DV.shape[1] // (_PIECES * _COLUMNS)) * _COLUMNS
        pieces = [dw_DV[:, at : at + columns] for at in range(0, dw_DV.shape[1], columns)]
        return jnp.concatenate([scattered(piece) for piece in pieces], axis=1)

    return jax.shard_map(
        of_a_device,
        mesh=layout.blocks.mesh,
        in_specs=PartitionSpec(blocks, None, vocab),
        out_specs=layout.head_gradient.spec,
        check_vma=False,
    )(dw_RDV)


def head_logprobs(
    h_BTD: Array, w_DV: Array, targets: Array, temperature: Array, active: Array, **options: Any
) -> tuple[Array, Array | None]:
    """Log-prob and entropy (or None) of `head_output`, which has the arguments."""
    return head_output(h_BTD, w_DV, targets, temperature, active, **options)[:2]


def head_output(
    h_BTD: Array,
    w_DV: Array,
    targets: Array,
    temperature: Array,
    active: Array,
    *,
    dtype: str,
    entropy: Entropy = False,
    listed: Array | None = None,
    find: int = 0,
    teacher: TeacherHead | None = None,
    hidden_teacher: Array | None = None,
    support: Array | None = None,
    chunk: int | None = None,
    blocks: int = 1,
    layout: Layout | None = None,
) -> HeadOutput:
    """Log-prob of a target (and entropy, divergence, and log-probs of a list) at each position, f32[B, T].

    Unlike the rest of the package, entry t here describes `targets[t]` given hidden state t: the caller
    shifts. Differentiable in `h_BTD` and `w_DV`. The gradient of the weight is accumulated in f32.

    Args:
      h_BTD: hidden states after the last norm.
      w_DV: head in x @ W orientation; may be wider than `dtype` (f32 master weights).
      targets: i32[B, T].
      temperature: f32[B, T], positive where active.
      active: bool[B, T], the positions to compute.
      dtype: of the operands of the products; accumulation and log-sum-exp are f32.
      entropy: also the entropy of the distribution.
      listed: i32[B, T, K], tokens whose log-probs are wanted too; differentiable.
      find: K; look up the K likeliest tokens instead. Not differentiable.
      teacher: also its divergence from the distribution, over the whole vocabulary and under the same temperature.
      hidden_teacher: [B, T, E], the hidden states of the teacher after its last norm; no gradient reaches them.
      support: i32[B, T, S], what the log-prob and the entropy are taken over, in the form of `ops.support`: different ids,
        the target among them, or what is left out of the vocabulary; all -1 = the vocabulary. Lists and divergence are always over the vocabulary.
      chunk: positions of a chunk; need not divide anything. Default: `default_chunk(V)`.
      blocks: the number of shards of the rows; active positions are moved together within a block only. Where tokens
        of a row are split over devices, each has a block of its own, and the one with the most active positions is
        waited for: that with the end of a long completion, while others hold prompts.
      layout: on a mesh.
    """
    B, T, D = h_BTD.shape
    if B % blocks:
        raise ValueError(f"head_logprobs: {B} rows do not divide into {blocks} blocks; pad the rows.")
    # A block of each device: its rows, and of them its tokens.
    across = 1 if layout is None else layout.context
    if T % across:
        raise ValueError(
            f"head_logprobs: rows of {T} tokens do not divide into {across} shards; pad the rows."
        )
    R, M = blocks * across, B // blocks * T // across
    C = max(1, min((default_chunk(w_DV.shape[1]) if chunk is None else chunk) // R, M))
    padding = -M % C

    def block(x, fill):
        if layout is None or across == 1:
            x = x.reshape(blocks, M, *x.shape[2:])
        else:  # each device its own; of a reshape over both axes the compiler makes copies of everything everywhere
            x = _on_devices(layout, lambda x: x.reshape(1, M, *x.shape[2:]), x, layout.tokens, layout.blocks)
        widths = [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=fill) if padding else x

    if support is not None and (
        support.ndim != 3 or support.shape[:2] != (B, T) or not jnp.issubdtype(support.dtype, jnp.integer)
    ):
        raise ValueError(
            f"head_output: support must be integers [{B}, {T}, S], got {support.dtype}{list(support.shape)}."
        )
    if support is not None and not support.shape[2]:  # lists without a place name nothing: the vocabulary
        support = None
    wide = jnp.promote_types(dtype, jnp.float32)
    if listed is not None and find:
        raise ValueError("head_output: give the listed tokens, or ask for the likeliest ones, not both.")
    plan, teacher_weight = _HeadPlan(dtype, C, entropy, find, layout=layout), None
    if teacher is None:
        hidden_teacher = None
    else:
        if hidden_teacher is None:
            raise ValueError("head_output: a teacher without its hidden states; give hidden_teacher too.")
        teacher_weight = head_matrix(teacher.params)
        if teacher_weight.shape[1] != w_DV.shape[1]:
            raise ValueError(
                f"head_output: the teacher has a vocabulary of {teacher_weight.shape[1]} tokens, the policy one of "
                f"{w_DV.shape[1]}; a divergence needs the same vocabulary."
            )
        plan = plan._replace(divergence=teacher.divergence, teacher_dtype=teacher.dtype)
    out = _head(
        plan,
        pinned(block(h_BTD, 0), None if layout is None else layout.blocks),
        w_DV,
        block(targets, 0),
        block(jnp.where(active, temperature, 1.0).astype(wide), 1.0),
        block(active, False),
        None if listed is None else block(listed, 0),
        # 0 and not what is there: a NaN times a cotangent of 0 would reach the weight.
        None if hidden_teacher is None else block(keep(active[..., None], hidden_teacher), 0),
        teacher_weight,
        None if support is None else block(support, -1),
    )
    if not entropy:
        out = out._replace(entropy=None)
    if teacher is None:
        out = out._replace(divergence=None)

    def unblock(x):
        x = x[:, :M]
        if layout is None or across == 1:
            return x.reshape(B, T, *x.shape[2:])
        local = (B // blocks, T // across)
        return _on_devices(layout, lambda x: x.reshape(*local, *x.shape[2:]), x, layout.blocks, layout.tokens)

    return jax.tree.map(unblock, out)


def _on_devices(
    layout: Layout, f: Callable[[Array], Array], x: Array, given: NamedSharding, wanted: NamedSharding
) -> Array:
    """f of what each device has of x."""
    return jax.shard_map(
        f, mesh=layout.tokens.mesh, in_specs=given.spec, out_specs=wanted.spec, check_vma=False
    )(x)


def segment_positions(segments: Array) -> Array:
    """i32[B, T]: the index of each token in its own sequence, shared prefix included; 0 at padding."""
    T = segments.shape[1]
    sight, columns = sight_of(segments), jnp.arange(T)

    def count(at):  # one column of queries after the other: T² booleans would not fit for a long row
        here = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1), sight)
        return jnp.sum(seen(here, sight, at[None], columns), axis=(1, 2), dtype=jnp.int32)

    if goes_in_blocks(T):
        found = jax.lax.map(count, columns).T
    else:
        found = jnp.sum(seen(sight, sight, columns, columns), axis=-1, dtype=jnp.int32)
    return jnp.where(segments == 0, 0, found - 1)


def _continues(segments: Array) -> Array:
    """bool[B, T]: the token before belongs to the same segment, and neither is padding."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return jnp.pad(same, ((0, 0), (1, 0)))


def _ahead(x: Array) -> Array:
    """What describes token t moves to t - 1, where the hidden state is that it is predicted from."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)))


def _behind(x: Array) -> Array:
    """What is found at t - 1 moves to token t, which it describes."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))


def _shifted(
    hidden,
    params,
    config,
    tokens,
    segments,
    temperature,
    wanted,
    *,
    entropy,
    chunk,
    blocks,
    listed=None,
    find=0,
    teacher=None,
    hidden_teacher=None,
    support=None,
    layout=None,
) -> HeadOutput:
    """What the head says of token t at entry t, 0 where it is not wanted or has nothing before it.

    `hidden` [B, T, D] is the result of the forward pass.
    """
    wanted = wanted & _continues(segments)
    out = head_output(
        hidden,
        head_matrix(params),
        _ahead(tokens),
        _ahead(temperature),
        _ahead(wanted),
        dtype=config.logits_dtype,
        entropy=entropy,
        listed=None if listed is None else _ahead(listed),
        find=find,
        teacher=teacher,
        hidden_teacher=None if hidden_teacher is None else _ahead(hidden_teacher),
        support=None if support is None else _ahead(support),
        chunk=chunk,
        blocks=blocks,
        layout=layout,
    )
    return jax.tree.map(_behind, out)


def policy_output(
    params: Any,
    config: ModelConfig,
    batch: TokenBatch,
    *,
    entropy: Entropy = False,
    topk: bool = False,
    remat: Remat = False,
    chunk: int | None = None,
    blocks: int = 1,
    gradient_sums: Any = None,
    teacher: TeacherHead | None = None,
    router_probs: bool = False,
    router_choice: bool = False,
    layout: Layout | None = None,
) -> PolicyOutput:
    """One forward pass of the policy over a batch, on the gradient tape.

    Args:
      params: the tree of `parameter_specs`; f32 master weights are cast to the compute dtype as they are used.
      config: `dtype` and `head_dtype` set the precision.
      batch: reads tokens, positions, segments, mask, temperature and, for truncated sampling, support_ids, and for
        experts routing_ids.
      entropy: also give the entropy of the distribution that each trained token was predicted from (nats);
        "detached" gives it for reporting, off the gradient tape, which makes the backward pass cheaper.
      topk: also give the log-probs of the tokens batch.topk_ids i32[B, T, K]; entry t of the list is a set of
        alternatives to token t.
      remat: what the backward pass recomputes, see `models.decoder.forward`.
      chunk: positions of a chunk of the head; default: about 128 MB of logits.
      blocks: shards of the rows on the mesh.
      gradient_sums: see `models.decoder.forward`.
      teacher: also give its divergence from the policy at each trained token, over the whole vocabulary; reads
        batch.hidden_teacher.
      router_probs: also give the probabilities and the choices of the routers, of a model with experts.
      router_choice: also give their choices, which takes less memory.
      layout: see `models.decoder.forward`.

    Returns:
      `PolicyOutput` with `logprob` (and `entropy`, `divergence`) f32[B, T] (and `topk_logprob` f32[B, T, K]), exactly
      0 outside `batch.mask`.

    Raises:
      ValueError: topk is asked for and the batch has no lists, or a teacher's divergence and it has no hidden states
        of the teacher.
    """
    if topk and batch.topk_ids is None:
        raise ValueError(
            "policy_output: the objective reads log-probs of the tokens batch.topk_ids, which is None. Fill it with "
            "fill_logprobs(..., topk=K) before `prepare`, or when the batch is made."
        )
    if teacher is not None and batch.hidden_teacher is None:
        raise ValueError(
            "policy_output: the objective reads the divergence from a teacher and batch.hidden_teacher is None. Fill it "
            "with fill_logprobs(..., teach=...) before `prepare`."
        )
    hidden, routed = forward_routed(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segments,
        remat=remat,
        gradient_sums=gradient_sums,
        routing_ids=batch.routing_ids,
        router_probs=router_probs,
        layout=layout,
    )
    out = _shifted(
        hidden,
        params,
        config,
        batch.tokens,
        batch.segments,
        batch.temperature,
        batch.mask,
        entropy=entropy,
        chunk=chunk,
        blocks=blocks,
        listed=batch.topk_ids if topk else None,
        teacher=teacher,
        hidden_teacher=None if teacher is None else batch.hidden_teacher,
        support=batch.support_ids,
        layout=layout,
    )
    probs = choice = None
    if routed is not None:
        routed = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), routed)
        if routed.probs is not None:
            probs = _behind(routed.probs)
        if router_probs or router_choice:
            chosen = jax.nn.one_hot(routed.ids, config.num_experts, dtype=routed.entropy.dtype)
            choice = _behind(jnp.mean(chosen, axis=-2))
        routed = routed._replace(probs=None)
    return PolicyOutput(
        logprob=out.logprob,
        entropy=out.entropy,
        topk_logprob=out.topk_logprob,
        divergence=out.divergence,
        router_probs=probs,
        router_choice=choice,
        routed=routed,
    )


def hidden_states(params: Any, config: ModelConfig, batch: TokenBatch, layout: Layout | None = None) -> Array:
    """[B, T, D] in the compute dtype: the last hidden state that token t is predicted from, at entry t.

    0 outside `batch.mask`. Not meant to be differentiated; the arguments are those of `policy_output`.
    """
    hidden = forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segments,
        routing_ids=batch.routing_ids,
        layout=layout,
    )
    wanted = batch.mask & _continues(batch.segments)
    return keep(wanted[..., None], _behind(hidden))


def likeliest_tokens(
    params: Any,
    config: ModelConfig,
    batch: TokenBatch,
    k: int,
    *,
    chunk: int | None = None,
    blocks: int = 1,
    layout: Layout | None = None,
) -> tuple[Array, Array, Array]:
    """(logprob [B, T], ids i32[B, T, K], their log-probs [B, T, K]) of the k likeliest tokens, likeliest first.

    The arguments are those of `policy_output`; not differentiable. 0 outside `batch.mask`. The lists are over the whole
    vocabulary, also where the token itself was drawn from a part of it.
    """
    hidden = forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segments,
        routing_ids=batch.routing_ids,
        layout=layout,
    )
    out = _shifted(
        hidden,
        params,
        config,
        batch.tokens,
        batch.segments,
        batch.temperature,
        batch.mask,
        entropy=False,
        chunk=chunk,
        blocks=blocks,
        find=k,
        support=batch.support_ids,
        layout=layout,
    )
    assert out.topk_ids is not None and out.topk_logprob is not None
    return out.logprob, out.topk_ids, out.topk_logprob


@functools.partial(jax.jit, static_argnums=1)
def _token_logprobs(params, config, tokens, segments, positions, temperature, routing_ids):
    return _shifted(
        forward(params, config, tokens, positions, segments, routing_ids=routing_ids),
        params,
        config,
        tokens,
        segments,
        temperature,
        jnp.ones(tokens.shape, bool),
        entropy=False,
        chunk=None,
        blocks=1,
    ).logprob


def token_logprobs(
    params: Any,
    config: ModelConfig,
    tokens: Any,
    segments: Any = None,
    temperature: Any = 1.0,
    *,
    positions: Any = None,
    routing_ids: Any = None,
) -> Array:
    """log p(token t | the tokens before it), f32[B, T], in nats.

    Args:
      params, config: of the model; `config.dtype` is the precision of the products.
      tokens: i32[B, T], NumPy or JAX.
      segments: i32[B, T]; tokens see earlier tokens of the same segment; 0 is padding; negative ids are shared
        prefixes, see `TokenBatch.segments`. Default: each row is one sequence.
      temperature: positive; a number, f32[B] or f32[B, T]. The logits are divided by it.
      positions: i32[B, T], for the rotary embedding. Default: counted from the start of each segment.
      routing_ids: i32[B, T, layers, K], the experts that tokens go through, see `models.experts.expert_mlp`.

    Returns:
      0 at the first token of a segment, which nothing predicts, and at padding.

    Raises:
      ValueError: a shape does not fit, a token id is outside the vocabulary, or a temperature is not positive.
    """
    if not isinstance(tokens, jax.core.Tracer):
        host = np.asarray(tokens)
        if host.size and (host.min() < 0 or host.max() >= config.vocab_size):
            raise ValueError(
                f"token_logprobs: token ids must lie in [0, {config.vocab_size}), the vocabulary of the model; "
                f"found {host.min()} to {host.max()}. Was the text encoded with the tokenizer of this model?"
            )
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 2:
        raise ValueError(f"token_logprobs: tokens must be [B, T], got shape {tokens.shape}.")
    shape = tokens.shape
    for name, value in (("segments", segments), ("positions", positions)):
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(f"token_logprobs: {name} must be {list(shape)}, got {list(jnp.shape(value))}.")
    if jnp.shape(temperature) not in ((), shape[:1], shape):
        raise ValueError(
            f"token_logprobs: temperature must be a number, [{shape[0]}] or {list(shape)}, "
            f"got {list(jnp.shape(temperature))}."
        )
    if not isinstance(temperature, jax.core.Tracer) and not np.all(np.asarray(temperature) > 0):
        raise ValueError("token_logprobs: temperature must be positive.")
    segments = jnp.ones(shape, jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32)
    positions = segment_positions(segments) if positions is None else jnp.asarray(positions, jnp.int32)
    temperature = jnp.asarray(temperature, jnp.promote_types(config.logits_dtype, jnp.float32))
    temperature = temperature[:, None] if temperature.ndim == 1 else temperature
    temperature = jnp.broadcast_to(temperature, shape)
    return _token_logprobs(params, config, tokens, segments, positions, temperature, routing_ids)
