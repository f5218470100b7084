"""The sums of an update against the same sums on the host: a fault of a reduction is an error, not a learning rate.

Over a mesh every sum of an update is one of parts that lie on different devices. A sum that is taken twice, or not at
all, a count of one shard instead of all, or a gradient that each shard clips by itself still trains, only at another
learning rate. Two things are compared with NumPy:

- what an update reports of its batch: the denominator, the trained tokens, the rewards and lengths;
- a *probe*: `make_update_step` itself, on the mesh of the run and the rows of its batch, with a policy so simple that its
  loss, its gradient and the step that a clipped gradient takes are known. log π of a token is the sum of a row of a
  table, so d loss / d row v = -Σ over the tokens of row v of norm · weight · A, divided by Σ count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import Metrics, make_update_step
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import parameter_specs
from jaxrl_llm.parallel.host import read
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.transforms import chain, given_advantage, normalize_by_token, reinforce_surrogate
from jaxrl_llm.types import PolicyOutput, TokenBatch

__all__ = ["CHECK_EVERY", "ReductionError", "check_sums", "make_reduction_check"]

CHECK_EVERY = 50  # train steps

_TOLERANCE = 1e-3  # of the sum of magnitudes; sums are f32, and every fault is a factor
_NORM = 4.0  # of the probe's gradient, which is then clipped to 1


class ReductionError(RuntimeError):
    """A sum over the mesh is not the sum of its parts. The run must not go on: its gradients are wrong."""


def check_sums(metrics: Metrics, batch: TokenBatch, shards: int) -> None:
    """Compares what an update reports of its batch with the same sums on the host.

    Args:
      metrics: of an update step.
      batch: the prepared batch that the step was given.
      shards: into which its rows are split.

    Raises:
      ReductionError: a sum is off; says by which factor and what that means.
    """
    expected = {"trained_tokens": ("tokens (mask)", np.sum(_host(batch.mask)), 0.0)}
    for name, mean in batch.logged.items():
        total, count = _host(mean.total), _host(mean.count)
        expected[name] = (f"{name} (total)", _sum(total), float(np.sum(np.abs(total))))
        expected[f"{name} "] = (f"{name} (count)", _sum(count), 0.0)
    if batch.count is not None:
        expected["loss "] = ("count (the denominator of the loss)", _sum(_host(batch.count)), 0.0)
    for key, (what, here, scale) in expected.items():
        given = metrics.get(key.strip())
        if given is not None:
            there = float(_host(given.count if key.endswith(" ") else given.total))
            _compare(what, there, float(here), shards, scale)


def make_reduction_check(
    mesh: Mesh | None,
    *,
    micro_batch_rows: int | None = None,
    build: Callable[..., Any] = make_update_step,
) -> Callable[[TokenBatch], None]:
    """check(batch): takes the probe's step on a prepared batch and compares it with its formula.

    A batch with nothing to train on, or that has no norm (pairs have none), is not probed.

    Args:
      mesh, micro_batch_rows: of the updates of the run.
      build: what makes its step; tests put faults here.

    Raises:
      ReductionError: by `check`; says what is off, by which factor, and what that means.
    """
    config = _probe_config(mesh)
    shards = batch_shards(mesh)
    objective = chain(given_advantage(), reinforce_surrogate(), normalize_by_token())
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    step = build(
        objective,
        config,
        optimizer,
        mesh,
        micro_batch_rows=micro_batch_rows,
        entropy=False,
        policy=_table_policy,
        donate=False,
    )
    width = config.hidden_size
    # log π = 1 for every token, so that the loss is -Σ norm · weight · A.
    params = jax.tree.map(
        lambda spec: np.full(spec.shape, 1 / width, np.float32),
        parameter_specs(config),
        is_leaf=lambda x: hasattr(x, "axes"),
    )
    key = jax.random.key(0)

    def check(batch: TokenBatch) -> None:
        if batch.norm is None or batch.count is None:
            return
        mask, norm, tokens = _host(batch.mask), _host(batch.norm), _host(batch.tokens)
        weight = 1.0 if batch.weight is None else _host(batch.weight)
        denominator = _sum(_host(batch.count))
        rows, columns = np.indices(mask.shape)
        advantage = 1.0 + (7 * rows + 3 * columns) % 5
        pull = np.where(mask, norm * weight * advantage, 0.0).astype(np.float64)
        by_row = np.zeros(config.vocab_size)
        np.add.at(by_row, tokens % config.vocab_size, pull)
        length = np.sqrt(width * np.sum(by_row**2))
        if not denominator > 0 or not length > 0:
            return
        scale = _NORM * denominator / length
        probe = batch.replace(
            advantage=jnp.asarray(advantage * scale, jnp.float32),
            logprob_exact=None,
            norms={},
            logged={},
            picked={},
        )
        state = init_state(params, optimizer, objective, key=key, config=config, mesh=mesh)
        after, metrics = step(state, probe)
        check_sums(metrics, probe, shards)
        total = -scale * float(np.sum(pull))
        _compare("norm (the sum that is the loss)", float(_host(metrics["loss"].total)), total, shards)
        _compare(
            "the norm of a probe gradient",
            float(_host(metrics["grad_norm"].total)),
            _NORM,
            shards,
            hint="the sums that it is divided by are right, so the gradient itself is summed or divided wrongly",
        )
        moved = _host(after.params["embed"]).astype(np.float64) - 1 / width
        _compare(
            "the length of a clipped step",
            float(np.sqrt(np.sum(moved**2))),
            1.0,
            shards,
            hint="its gradient has the right norm, so it is clipped by something else than that: by the norm of each "
            "shard, for example, instead of the norm over all of them",
        )
        wanted = np.broadcast_to((scale / denominator / _NORM * by_row)[:, None], moved.shape)
        worst = float(np.max(np.abs(moved - wanted)))
        if worst > _TOLERANCE:
            raise ReductionError(
                f"self-check: a probe gradient has the right norm and a wrong direction (off by {worst:.3g} of 1): the "
                f"{shards} shards of the rows do not all reach every parameter. {_STOP}"
            )

    return check


_STOP = "Training would go on at a wrong learning rate, so it stops here."


def _probe_config(mesh: Mesh | None) -> ModelConfig:
    """A model that every mesh divides; only its embedding is used."""
    fsdp, tensor = (1 if mesh is None else mesh.shape[axis] for axis in ("fsdp", "tensor"))
    return ModelConfig(
        vocab_size=16 * tensor,
        hidden_size=2 * fsdp,
        intermediate_size=tensor,
        num_layers=1,
        num_heads=tensor,
        num_kv_heads=tensor,
        head_dim=2,
    )


def _table_policy(params: Any, batch: TokenBatch) -> PolicyOutput:
    """log π of a token = the sum of a row of the table."""
    table = params["embed"]
    return PolicyOutput(logprob=jnp.sum(table[batch.tokens % table.shape[0]], axis=-1))


def _host(x: Any) -> np.ndarray:
    return np.asarray(read(x))


def _sum(x: np.ndarray) -> float:
    return float(np.sum(x, dtype=np.float64))


def _compare(what: str, there: float, here: float, shards: int, scale: float = 0.0, hint: str = "") -> None:
    if np.isfinite(there) and abs(there - here) <= _TOLERANCE * max(abs(here), scale):
        return
    factor = there / here if here else float("inf")
    raise ReductionError(
        f"self-check: {what} is {there:.6g} on the devices and {here:.6g} on the host, {factor:.4g} times as much. "
        f"{_meaning(factor, shards)}{f' Here {hint}.' if hint else ''} {_STOP}"
    )


def _meaning(factor: float, shards: int) -> str:
    """What a factor usually means."""
    if shards > 1 and np.isclose(factor, shards, rtol=0.01):
        return (
            f"That is the number of shards of the rows, {shards}: usually a sum over the mesh that is taken twice (a psum "
            "of what was summed already), or a mean that is not one."
        )
    if shards > 1 and np.isclose(factor, 1 / shards, rtol=0.01):
        return (
            f"That is 1 / {shards}, the number of shards of the rows: usually a mean over the mesh where a sum belongs, or a "
            "denominator that is summed once too often."
        )
    if factor < 1:
        return "Usually a sum over the mesh that is missing (a shard keeps its own part), or another denominator."
    return "Usually another denominator than that of the whole batch: of a micro-batch, or of one shard."
