"""Exact log-probs on the learner's side: those that the sampler would record, as fields of a batch.

The computation itself is handed in (`sampler.rescore`): learner and sampler do not know each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.learner.score import Score
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = ["Rescore", "SampledRun", "make_exact_score", "sampled_runs", "with_exact_value"]

Array = jax.Array

# rescore(params, [(prompt i32[P], sampled tokens i32[N])], [temperature]) -> [f32[N]]
Rescore = Callable[[Any, Sequence[tuple[np.ndarray, np.ndarray]], Sequence[float]], Sequence[np.ndarray]]


class SampledRun(NamedTuple):
    """The trained tokens of one trajectory, and where they are in a batch."""

    prompt: np.ndarray  # i32[P]
    tokens: np.ndarray  # i32[N]
    temperature: float
    row: int
    columns: np.ndarray  # i64[N]


def sampled_runs(batch: TokenBatch) -> list[SampledRun]:
    """The sequences of a batch that train something, padded or packed, each with its prompt.

    Raises:
      ValueError: a sequence has tokens after its first sampled one that were not sampled (a tool's output, the
        turn of a user): the sampler computed their keys and values in other shapes than those of a sampled token.
    """
    tokens, positions, segments, mask, temperature = (
        np.asarray(x)
        for x in jax.device_get(
            (batch.tokens, batch.positions, batch.segments, batch.mask, batch.temperature)
        )
    )
    out = []
    for row in np.flatnonzero(mask.any(axis=1)):
        # Where a segment begins, and its end at the last; padding at the end of the row is left out.
        edges = np.flatnonzero(np.diff(segments[row], prepend=segments[row, 0] - 1, append=0))
        prefix = np.zeros(0, np.int32)
        for first, end in zip(edges[:-1], edges[1:], strict=True):
            segment = segments[row, first]
            if segment < 0:
                prefix = tokens[row, first:end]
            trained = first + np.flatnonzero(mask[row, first:end])
            if segment <= 0 or not trained.size:
                continue
            if trained[-1] - trained[0] + 1 != trained.size:
                raise ValueError(
                    f"exact log-probs: row {row} has tokens between its sampled ones that were not sampled (an "
                    "environment's turn); exact scoring covers a prompt and one completion. Set learner.exact to off."
                )
            shared = prefix[: positions[row, first]]
            out.append(
                SampledRun(
                    prompt=np.concatenate([shared, tokens[row, first : trained[0]]]),
                    tokens=tokens[row, trained],
                    temperature=float(temperature[row, trained[0]]),
                    row=int(row),
                    columns=trained,
                )
            )
    return out


def make_exact_score(rescore: Rescore) -> Score:
    """score(params, batch) -> f32[B, T] like that of `make_score`, with the log-probs that a sampler records."""

    def score(params: Any, batch: TokenBatch) -> Array:
        runs = sampled_runs(batch)
        values = rescore(
            params, [(run.prompt, run.tokens) for run in runs], [run.temperature for run in runs]
        )
        out = np.zeros(batch.shape, np.float32)
        for run, value in zip(runs, values, strict=True):
            out[run.row, run.columns] = value
        return jax.device_put(out)

    return score


def with_exact_value(output: PolicyOutput, batch: TokenBatch) -> PolicyOutput:
    """The output with the value of `batch.logprob_exact`, where the batch has it, and its own gradient."""
    if batch.logprob_exact is None:
        return output
    own = output.logprob
    value = jnp.where(batch.mask, batch.logprob_exact.astype(own.dtype), own)
    # value + (own - own), and not own + (value - own): the latter is not always value in floating point.
    logprob = jax.lax.stop_gradient(value) + (own - jax.lax.stop_gradient(own))
    return dataclasses.replace(output, logprob=logprob)
