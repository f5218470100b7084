"""What an update costs with each recipe, as a ratio to plain GRPO in the same process.

The model's passes are the same for all of them, so a ratio above 1 is the objective itself: its arithmetic over
[B, T], the gradient share, the gradient of an entropy bonus, lists of likeliest tokens. Recipes are measured in
turn, each beside an update of GRPO, because a machine's speed drifts by more than a recipe costs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.bench.update import synthetic_batch
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.score import topk_size
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.transforms import needs, takes_pairs
from jaxrl_llm.types import TokenBatch

__all__ = ["bench_objectives", "check_recipes", "comparable_recipes"]

_ARGUMENTS: dict[str, dict[str, Any]] = {"dr_grpo": {"limit": 128}}  # those that have no default
_OTHER_STEPS = {"trpo"}  # the learner step is not an update with an optimiser


def check_recipes(names: Sequence[str]) -> None:
    """Raises InputError for recipes that are not known or cannot be compared."""
    known = comparable_recipes()
    if wrong := [name for name in names if name not in known]:
        raise InputError(
            f"bench objectives: {', '.join(wrong)} cannot be compared. Comparable: {', '.join(known)}."
        )


def comparable_recipes() -> list[str]:
    """The recipes that train a policy by `make_update_step` on rollouts, without a pass of their own inside it."""
    out = []
    for name, recipe in RECIPES.items():
        objective = recipe(**_ARGUMENTS.get(name, {}))
        fields = {need.field for need in needs(objective) if need.record != "batch"}
        if (
            name not in _OTHER_STEPS
            and not takes_pairs(objective)
            and fields <= {"logprob", "entropy", "topk_logprob"}
        ):
            out.append(name)
    return out


def bench_objectives(
    config: ModelConfig,
    params: Any,
    *,
    names: Sequence[str] = (),
    rows: int = 8,
    tokens: int = 192,
    prompt_tokens: int = 64,
    dtype: str = "float32",
    micro_batch_rows: int = 8,
    repeats: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Times an update with each recipe beside one with GRPO, on random tokens of a fixed shape.

    Args:
      config, params: of the model; `params` are consumed.
      names: recipes; () = `comparable_recipes()`.
      rows, tokens, prompt_tokens: B, T, and the tokens of a row that are not trained.
      dtype: compute dtype.
      micro_batch_rows: see `make_update_step`.
      repeats: pairs of updates of each recipe; the first call of each, which is not counted, comes before.
      on_progress: called with (recipes done, recipes).

    Returns:
      {"seconds": of the GRPO update (CPU time of all threads, median), shape figures, and for each recipe
      "NAME/ratio": median over the pairs of its CPU time divided by GRPO's}. CPU time, because other processes
      disturb it less than they disturb the clock.

    Raises:
      InputError: an unknown recipe, or one whose update is of another kind.
    """
    check_recipes(names)
    chosen = list(names or comparable_recipes())
    config = dataclasses.replace(config, dtype=dtype)
    optimizer = make_optimizer(1e-6)
    bare = synthetic_batch(config, rows, tokens, prompt_tokens, group=min(8, rows))
    state = init_state(params, optimizer, RECIPES["grpo"](), key=jax.random.key(0))
    del params

    def build(name: str) -> Callable[[Any], tuple[Any, float]]:
        objective = RECIPES[name](**_ARGUMENTS.get(name, {}))
        start = objective.init()
        batch, of_objective = make_prepare(objective)(_filled(bare, objective, config.vocab_size), start)
        step = make_update_step(objective, config, optimizer, micro_batch_rows=micro_batch_rows)

        def run(state: Any) -> tuple[Any, float]:
            state = state.replace(objective_state=jax.tree.map(jnp.copy, of_objective))
            begin = time.process_time()
            state, metrics = jax.block_until_ready(step(state, batch))
            seconds = time.process_time() - begin
            if not math.isfinite(float(metrics["loss"].value)):
                raise RuntimeError(f"bench objectives: the loss of {name} is not finite.")
            return state, seconds

        return run

    plain = build("grpo")
    state, _ = plain(state)
    base: list[float] = []
    ratios: dict[str, float] = {}
    for i, name in enumerate(chosen):
        recipe = build(name)
        state, _ = recipe(state)
        pairs = []
        for _ in range(repeats):
            state, one = plain(state)
            state, other = recipe(state)
            base.append(one)
            pairs.append(other / one)
        ratios[f"{name}/ratio"] = statistics.median(pairs)
        if on_progress is not None:
            on_progress(i + 1, len(chosen))
    return {
        "seconds": statistics.median(base),
        "dtype": dtype,
        "rows": rows,
        "tokens": tokens,
        "repeats": repeats,
        **ratios,
        "largest_ratio": max(ratios.values()),
    }


def _filled(batch: TokenBatch, objective: Any, vocab_size: int) -> TokenBatch:
    """The batch with every on-demand field that an objective reads, at plausible values."""
    rng = np.random.default_rng(1)
    behavior = np.asarray(batch.logprob_behavior)

    def near() -> np.ndarray:
        return (behavior + rng.normal(0, 0.05, behavior.shape)).astype(np.float32)

    k = topk_size(objective) or 1
    listed = np.full((*behavior.shape, k), behavior.mean(), np.float32)
    values: dict[str, Any] = {
        "logprob_proximal": near,
        "logprob_reference": near,
        "logprob_teacher": near,
        "value": lambda: np.zeros(behavior.shape, np.float32),
        "bootstrap_value": lambda: np.zeros(behavior.shape, np.float32),
        "baseline_reward": lambda: np.full(behavior.shape, 0.5, np.float32),
        "agent": lambda: np.zeros(behavior.shape, np.int32),
        "rewards": lambda: {name: np.asarray(batch.reward) for name in ("right", "format")},
        "topk_ids": lambda: rng.integers(0, vocab_size, (*behavior.shape, k), dtype=np.int32),
        "topk_logprob_behavior": lambda: listed,
        "topk_logprob_proximal": lambda: listed,
        "topk_logprob_teacher": lambda: listed,
    }
    fields = {need.field for need in needs(objective) if need.record == "batch"}
    made = {name: make() for name, make in values.items() if name in fields}
    return batch.replace(**{name: jax.tree.map(jnp.asarray, value) for name, value in made.items()})
