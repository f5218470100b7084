"""A policy small enough for a laptop, and a batch with everything that goes wrong in practice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.losses.divergences import forward_kl
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = [
    "VOCABULARY",
    "float64",
    "sample_batch",
    "tiny_policy",
    "tiny_policy_params",
]

Array = jax.Array

VOCABULARY = 11


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Within it, JAX computes in float64."""
    with jax.enable_x64(True):
        yield


def tiny_policy_params(seed: int = 0) -> Array:
    """f[11, 11]: logits of the next token given the last one."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)))


def tiny_policy(params: Array, batch: TokenBatch) -> PolicyOutput:
    """A bigram policy: log-probs, entropies, values, routers and KL to a teacher at the batch's tokens. Differentiable.

    Depends on the token before only, hence right for padded and packed rows alike.
    """
    before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
    logprobs = jax.nn.log_softmax(params, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    teacher = jax.nn.log_softmax(tiny_policy_params(7), axis=-1)
    output = PolicyOutput(
        logprob=logprobs[before, batch.tokens],
        entropy=entropy[before],
        value=params[before, 0],
        divergence=forward_kl(logprobs, teacher)[before],
    )
    routers = jax.nn.softmax(params[:, :10].reshape(VOCABULARY, 2, 5), axis=-1)[
        before
    ]  # 2 layers of 5 experts
    chosen = jax.nn.one_hot(jax.lax.top_k(routers, 2)[1], 5, dtype=routers.dtype)
    output = output.replace(router_probs=routers, router_choice=jnp.mean(chosen, axis=-2))
    if batch.topk_ids is None:
        return output
    return output.replace(topk_logprob=logprobs[before[..., None], batch.topk_ids])


def sample_batch(seed: int = 0, width: int = 12) -> TokenBatch:
    """A batch of 8 rows with everything that goes wrong in practice.

    Groups of different sizes with arbitrary ids; one of equal rewards and one of a single trajectory; a
    trajectory of two sequences in two rows; a row that trains nothing; a gap in a mask; rewards of None; truncated
    answers; tokens of different versions; every on-demand field that the stages of the package read.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (8, width))
    lengths = np.array([width, width - 2, 7, 9, width - 1, width, 6, 8])
    columns = np.arange(width)
    mask = (columns >= 3) & (columns < lengths[:, None])
    mask[0, 6:8] = False  # tool output
    mask[3] = False
    reward = np.array([1.0, 0.0, 0.25, 1.0, 0.3, 0.3, np.nan, 0.75])
    batch = TokenBatch.from_rows(
        tokens,
        mask,
        lengths=lengths,
        group=np.array([70, 70, 70, 70, -5, -5, 12, 12]),
        reward=reward,
        truncated=np.array([True, False, False, False, False, True, False, False]),
        version=rng.integers(1, 5, (8, width)),
        learner_version=4,
        logprob_behavior=np.zeros((8, width)),
    )
    # Rows 1 and 2 are the two sequences of one trajectory, whose reward sits at its end.
    trajectory = np.asarray(batch.trajectory).copy() * 13 + 5
    trajectory[2] = trajectory[1]
    batch = batch.replace(trajectory=jnp.asarray(trajectory, jnp.int32))
    lists = np.random.default_rng([seed, 1])  # of its own, so that the numbers of the other fields stay
    ids = lists.permuted(np.tile(np.arange(VOCABULARY), (8, width, 1)), axis=-1)[..., :3]
    batch = batch.replace(topk_ids=jnp.asarray(ids, jnp.int32))
    output = tiny_policy(tiny_policy_params(), batch)
    current = output.logprob
    listed = require("sample_batch", output, "topk_logprob")

    def near(scale: float) -> Array:
        return current + scale * rng.normal(size=current.shape)

    def near_topk(scale: float) -> Array:
        return listed + scale * lists.normal(size=(*current.shape, 3))

    return batch.replace(
        topk_logprob_behavior=near_topk(0.2),
        topk_logprob_proximal=near_topk(0.1),
        logprob_behavior=near(0.3),
        logprob_proximal=near(0.2),
        logprob_reference=near(0.5),
        logprob_teacher=near(0.5),
        topk_logprob_teacher=tiny_policy(tiny_policy_params(7), batch).topk_logprob,
        advantage=jnp.asarray(rng.normal(size=current.shape)),
        value=jnp.asarray(rng.normal(size=current.shape)),
        reference_point=jnp.broadcast_to(jnp.asarray(rng.normal(size=(8, 1))) + 0.5, current.shape),
        bootstrap_value=jnp.asarray(rng.normal(size=current.shape)),
        # Rows 1 and 2 are one trajectory. A part of the reward of row 5 could not be computed.
        baseline_reward=jnp.broadcast_to(
            jnp.asarray(rng.normal(size=(8, 1))[[0, 1, 1, 3, 4, 5, 6, 7]]), current.shape
        ),
        rewards={
            "right": jnp.asarray(rng.integers(0, 3, current.shape) / 2),
            "format": jnp.asarray(rng.integers(0, 2, current.shape) / 4).at[5, 5].set(jnp.nan),
        },
        agent=jnp.broadcast_to(jnp.array([0, 1, 1, 0, 1, 0, 1, 0], jnp.int32)[:, None], current.shape),
    )
