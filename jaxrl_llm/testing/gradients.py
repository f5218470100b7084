"""Laws of the gradient: detached weights, the on-policy identity, central differences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.testing.setting import Setting, measure_prepared
from jaxrl_llm.testing.tiny import float64, tiny_policy
from jaxrl_llm.transforms import LossTransform, evaluate
from jaxrl_llm.transforms.evaluate import start_loss
from jaxrl_llm.types import TokenBatch

__all__ = [
    "assert_gradient",
    "assert_on_policy_identity",
    "assert_weight_detached",
    "check_detached",
    "check_gradient",
    "check_on_policy",
]

Array = jax.Array


def assert_weight_detached(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """No gradient reaches the parameters through the weight of the policy term."""
    with float64():
        check_detached(Setting(objective, batch))


def check_detached(at: Setting) -> None:
    def weight(p: Array) -> Array:
        start = start_loss(tiny_policy(p, at.prepared), at.prepared)
        return jnp.sum(at.objective.apply(start, at.prepared, at.state).weight)

    gradient = np.asarray(jax.grad(weight)(at.params))
    if np.any(gradient != 0):
        raise AssertionError(f"weight: the gradient of Σ weight of {at.objective!r} is {gradient}, not 0.")


def assert_on_policy_identity(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """With behavior = proximal = current the gradient is REINFORCE's, clip fractions and KL are 0.

    A law of ratios and surrogates, for a batch whose advantage is constant over each sequence.
    """
    with float64():
        check_on_policy(Setting(objective, batch))


def check_on_policy(at: Setting) -> None:
    output = tiny_policy(at.params, at.batch)
    current, lists = output.logprob, output.topk_logprob
    batch = at.batch.replace(
        logprob_behavior=current,
        logprob_proximal=current,
        topk_logprob_behavior=lists,
        topk_logprob_proximal=lists,
    )
    prepared, _ = at.objective.prepare(batch, at.objective.init())
    _, gradient, metrics = measure_prepared(at.objective, at.params, prepared)

    def reinforce(p: Array) -> Array:
        logprob = jnp.where(prepared.mask, tiny_policy(p, prepared).logprob, 0.0)
        return quotient(-jnp.sum(prepared.norm * prepared.advantage * logprob), jnp.sum(prepared.count))

    np.testing.assert_allclose(
        np.asarray(gradient),
        np.asarray(jax.grad(reinforce)(at.params)),
        atol=1e-12,
        err_msg=f"on-policy: gradient of {at.objective!r}",
    )
    for name, value in metrics.items():
        if name.startswith(("clip_fraction", "kl_behavior", "kl_proximal")) and abs(float(value)) > 1e-12:
            raise AssertionError(f"on-policy: {name} of {at.objective!r} is {float(value)}, not 0.")


def assert_gradient(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """The gradient is that of central differences, what the objective detaches (`stop_gradient`) held.

    Finds a derivative that is written by hand and wrong, and values that change without one: a rounded log-prob, a
    comparison in the place of a gate, a log-prob that went through NumPy.
    """
    with float64():
        check_gradient(Setting(objective, batch))


def check_gradient(at: Setting, step: float = 1e-6, tolerance: float = 1e-6) -> None:
    def loss(params: Array) -> Array:
        result = evaluate(at.objective, tiny_policy(params, at.prepared), at.prepared, at.objective.init())
        return quotient(result.loss_sum, result.denominator)

    held: list[Array] = []
    with _holding(held, None):
        loss(at.params)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=at.params.shape))
    moved = []
    for sign in (1, -1):
        with _holding([], iter(held)):
            moved.append(float(loss(at.params + sign * step * direction)))
    expected = (moved[0] - moved[1]) / (2 * step)
    found = float(jnp.sum(at.measured[1] * direction))
    if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):  # NaN is a violation, too
        raise AssertionError(
            f"gradient: along a random direction {at.objective!r} has the derivative {found}, its loss changes by "
            f"{expected}. Detach what is meant to be held with jax.lax.stop_gradient."
        )


@contextlib.contextmanager
def _holding(record: list[Array], replay: Iterator[Array] | None) -> Iterator[None]:
    """Within it, `jax.lax.stop_gradient` records what it is given, or gives what was recorded instead."""

    def one(x: Array) -> Array:
        if isinstance(x, jax.core.Tracer):  # inside jit or vmap there is no value to hold
            return x
        record.append(x)
        return x if replay is None else next(replay)

    with mock.patch.object(jax.lax, "stop_gradient", lambda tree: jax.tree.map(one, tree)):
        yield
