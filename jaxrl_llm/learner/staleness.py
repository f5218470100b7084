"""How far the policy has moved away from what it trains on, by the age of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import safe_exp
from jaxrl_llm.parallel.host import read
from jaxrl_llm.types import TokenBatch

__all__ = ["make_ratios_by_age"]


def make_ratios_by_age(ages: int) -> Callable[[TokenBatch], Callable[[], dict[str, float]]]:
    """A function from a batch with proximal log-probs to one that gives figures of w = proximal / behavior, by age.

    The first only starts what is computed on the devices, and the second waits for it: updates and samples of other
    devices can be started in between.

    age = learner_version - version, in train steps. For each age a that trained tokens have, up to `ages` (older ones
    count as that):

        staleness/ratio_mean_age_a   mean of w
        staleness/ratio_max_age_a    largest w
        staleness/ess_age_a          (Σ w)² / (n Σ w²): the part of the n tokens that they are worth as samples of the
                                     proximal policy (Kong, 1992); 1 when nothing has moved
    """

    @jax.jit
    def sums(batch: TokenBatch) -> tuple[jax.Array, ...]:
        if batch.logprob_proximal is None or batch.logprob_behavior is None:
            raise ValueError("ratios by age need proximal and behavior log-probs.")
        ratio = safe_exp(batch.logprob_proximal - batch.logprob_behavior)
        age = jnp.clip(batch.learner_version - batch.version, 0, ages)
        of_age = (age == jnp.arange(ages + 1)[:, None, None]) & batch.mask & (batch.version >= 0)

        def total(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(of_age, x, 0.0), axis=(1, 2))

        largest = jnp.max(jnp.where(of_age, ratio, 0.0), axis=(1, 2))
        return total(jnp.ones_like(ratio)), total(ratio), total(ratio**2), largest

    def figures(computed: tuple[jax.Array, ...]) -> dict[str, float]:
        out: dict[str, float] = {}
        for age, (count, first, second, largest) in enumerate(zip(*read(computed), strict=True)):
            if count:
                out |= {
                    f"staleness/ratio_mean_age_{age}": float(first / count),
                    f"staleness/ratio_max_age_{age}": float(largest),
                    f"staleness/ess_age_{age}": float(first**2 / (count * second)) if second else 0.0,
                }
        return out

    return lambda batch: functools.partial(figures, sums(batch))
