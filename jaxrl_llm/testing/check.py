"""Which laws hold for a transform, and the check of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl_llm.testing.declarations import check_declarations
from jaxrl_llm.testing.gradients import check_detached, check_gradient, check_on_policy
from jaxrl_llm.testing.invariance import (
    check_mesh,
    check_order,
    check_packing,
    check_padding,
    check_split,
    check_trees,
)
from jaxrl_llm.testing.setting import Setting, measure_prepared, usable
from jaxrl_llm.testing.tiny import float64, tiny_policy
from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    clip_surrogate,
    group_advantage,
    normalize_by_sequence,
    stages,
    takes_pairs,
    token_ratio,
)
from jaxrl_llm.transforms.begin import clean
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.transforms.evaluate import start_loss
from jaxrl_llm.types import LossState, TokenBatch

__all__ = [
    "LAWS",
    "check_transform",
    "laws",
]

Array = jax.Array

STANDARD: dict[str, Callable[..., LossTransform]] = {
    "batch.advantage": group_advantage,
    "batch.norm": normalize_by_sequence,
    "loss.log_ratio": token_ratio,
    "loss.policy": clip_surrogate,
}


def _signal(at: Setting) -> None:
    """No stage takes the whole gradient away from a loss that has a value (a mask may take the value, too)."""
    if np.any(np.asarray(at.measured[1]) != 0):
        return
    members, batch = stages(at.objective), clean(at.prepared)
    loss = at.objective.apply(start_loss(tiny_policy(at.params, batch), batch), batch, at.state)
    terms = [value for value, _ in loss.penalties.values()]
    terms += [] if loss.policy is None else [loss.weight * loss.policy]
    norm = require("signal", batch, "norm")
    if not any(np.any(np.where(batch.mask, norm * term, 0.0) != 0) for term in terms):
        return
    for member in members:
        name = member.info.name  # type: ignore[union-attr]  # of a stage
        if name not in at.checked:
            continue
        writes = member.info.writes  # type: ignore[union-attr]  # of a stage
        instead = [make(name="_instead") for field, make in STANDARD.items() if field in writes][:1]
        rest = [new for other in members for new in (instead if other is member else [other])]
        try:
            without = usable(chain(*rest))
        except ValueError:  # it writes what others read, and no standard stage does
            continue
        prepared, _ = without.prepare(at.batch, without.init())
        if np.any(np.asarray(measure_prepared(without, at.params, prepared)[1]) != 0):
            raise AssertionError(
                f"signal: with {member!r} the loss has a value and its gradient is 0 for every parameter; without the stage it is not. Look for "
                f"stop_gradient and for a log-prob that is rounded or compared."
            )


def _jit(at: Setting) -> None:
    """`prepare` and `apply` can be traced: no value of an array decides what Python does."""
    objective = at.objective
    jax.eval_shape(lambda b: objective.prepare(b, objective.init())[0], at.batch)

    def apply(params: Array, batch: TokenBatch) -> LossState:
        return objective.apply(start_loss(tiny_policy(params, batch), batch), batch, objective.init())

    jax.eval_shape(apply, at.params, clean(at.prepared))


LAWS = {
    "declarations": check_declarations,
    "signal": _signal,
    "jit": _jit,
    "order": check_order,
    "padding": check_padding,
    "packing": check_packing,
    "trees": check_trees,
    "detached": check_detached,
    "gradient": check_gradient,
    "on_policy": check_on_policy,
}
"""The laws besides those of splits and meshes, which take arguments: what `check_transform` runs, in this order."""


def laws(transform: LossTransform) -> tuple[str, ...]:
    """The laws that hold for this kind of transform.

    Declarations, signal, jit, splits, order, padding and meshes, the detached weight and the gradient hold for all; packing for all but stages
    over pairs, which have their answers on rows 2i and 2i + 1; the on-policy identity for ratios and surrogates:
    where nothing but the ratio or the policy term is written.
    """
    writes = {write for info in transform.info for write in info.writes}
    pairs = takes_pairs(transform)
    ratio = writes <= {"loss.log_ratio", "loss.policy"} and not pairs
    left_out = ({"packing", "trees"} if pairs else set()) | (set() if ratio else {"on_policy"})
    return ("split", "mesh", *(law for law in LAWS if law not in left_out))


def check_transform(
    transform: LossTransform,
    batch: TokenBatch | None = None,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    mesh: bool | None = None,
    on_policy: bool | None = None,
    only: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Runs every law that holds for this kind of transform (`laws`): a stage, or a whole objective.

    The mesh law needs several devices. On a machine with one, ask for eight of its CPU before JAX is used:

        jax.config.update("jax_num_cpu_devices", 8)

    Args:
      splits: rows of the micro-batches, see `assert_split_invariant`.
      mesh: whether to check mesh invariance, which compiles a program; default: where there are several devices.
      on_policy: whether to check the on-policy identity; default: what `laws` says. A surrogate that is no policy
        gradient on-policy, by design, says False.
      only: the laws to run, of `laws`; default: all of them.

    Returns:
      The names of the laws that were checked, in order: "mesh" is not among them where there is one device.
        finite        loss, gradient and metrics are
        declarations  each stage reads the on-demand fields that it declares, and writes what it declares
        signal        no stage takes the whole gradient away         jit        prepare and apply can be traced
        split         any micro-batches                              order      any order of trajectories, or pairs
        padding       NaN under the mask                             packing    several sequences a row
        trees         rows with shared prompts                       mesh       one device, or many
        detached      no gradient through the weight                 gradient   that of central differences
        on_policy     REINFORCE's gradient where behavior = proximal = current

    Raises:
      AssertionError: a law does not hold, or a stage fails; the text names the law, or the part, the stage or the
        objective, and both numbers or what to do.
    """
    with float64():
        # A whole check meets six shapes. To compile a program for each takes a third of the time of its operations
        # one by one, but for few laws, on many stages, these are there already.
        at = Setting(transform, batch, compiled=only is None)
        holding = set(laws(transform if takes_pairs(transform) else at.objective)) - {"on_policy"}
        holding |= {"on_policy"} & set(laws(transform)) if on_policy is None else set()
        if only is not None:
            holding &= set(only)
        if on_policy:
            holding.add("on_policy")
        if len(jax.devices()) < 2 if mesh is None else not mesh:
            holding.discard("mesh")
        at.steps  # noqa: B018  # a part that fails is named before anything is compiled
        if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(at.measured)):
            raise AssertionError(
                f"finite: {at.objective!r} gives the loss, gradient and metrics {at.measured}."
            )
        checks: dict[str, Callable[[Setting], None]] = {
            **LAWS,
            "split": functools.partial(check_split, splits=splits),
            "mesh": check_mesh,
        }
        checked = [law for law in checks if law in holding]
        for law in checked:
            checks[law](at)
        return ("finite", *checked)
