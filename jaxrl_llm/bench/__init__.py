"""Benchmarks: measured figures beside the floors of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

__all__ = ["run_bench"]


def run_bench(
    what: str,
    *,
    model: str,
    dtype: str,
    prompts: int,
    group: int,
    prompt_tokens: int,
    new_tokens: int,
    micro_batch_rows: int,
    repeats: int,
    recipes: Sequence[str] = (),
    shortest_tokens: int | None = None,
) -> dict[str, Any]:
    """Measures a rollout, an update, an iteration (one after the other), or recipes beside GRPO, on a real model.

    Returns:
      The figures of `bench_rollout`, `bench_update` or `bench_objectives`; for an iteration the first two, prefixed,
      with their sum, and under loop/ those of `bench_loop`. The one-minute load average is in it, since a busy machine measures itself.

    Raises:
      InputError: sizes or recipes that are not possible; told before a model is loaded.
    """
    from jaxrl_llm.bench.loop import bench_loop
    from jaxrl_llm.bench.objectives import bench_objectives, check_recipes
    from jaxrl_llm.bench.rollout import bench_rollout, check_work, ragged_lengths
    from jaxrl_llm.bench.update import bench_update
    from jaxrl_llm.errors import InputError
    from jaxrl_llm.models.load import load_model

    sizes = {"prompts": prompts, "group": group, "new-tokens": new_tokens, "prompt-tokens": prompt_tokens}
    sizes |= {"micro-batch-rows": micro_batch_rows, "repeats": repeats}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}.")
    if shortest_tokens is not None and what != "rollout":
        raise InputError(
            f"--shortest-tokens goes with `jaxrl bench rollout` and `jaxrl bench compare`, not with {what}."
        )
    if recipes and what != "objectives":
        raise InputError(f"--recipes goes with `jaxrl bench objectives`, not with {what}.")
    check_recipes(recipes)
    check_work(prompts, group, prompt_tokens + new_tokens)
    lengths = None
    if shortest_tokens is not None:
        lengths = ragged_lengths(prompts * group, shortest_tokens, new_tokens)
    loaded = load_model(model, dtype=dtype)
    results: dict[str, dict[str, Any]] = {}
    if what in ("rollout", "iteration"):
        results["rollout"] = bench_rollout(
            loaded.config,
            loaded.params,
            prompts=prompts,
            group=group,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            dtype=dtype,
            repeats=repeats,
            lengths=lengths,
        )
    if what in ("update", "iteration"):
        config, params = loaded.config, loaded.params
        del loaded  # the update consumes the parameters
        results["update"] = bench_update(
            config,
            params,
            rows=prompts * group,
            tokens=prompt_tokens + new_tokens,
            prompt_tokens=prompt_tokens,
            dtype=dtype,
            micro_batch_rows=micro_batch_rows,
            repeats=repeats,
        )
    if what == "objectives":
        config, params = loaded.config, loaded.params
        del loaded
        results["objectives"] = bench_objectives(
            config,
            params,
            names=recipes,
            rows=prompts * group,
            tokens=prompt_tokens + new_tokens,
            prompt_tokens=prompt_tokens,
            dtype=dtype,
            micro_batch_rows=micro_batch_rows,
            repeats=repeats,
        )
    if what == "iteration":
        around = bench_loop(
            model,
            dtype=dtype,
            prompts=prompts,
            group=group,
            new_tokens=new_tokens,
            context=min(config.max_positions, new_tokens + 64),
            micro_batch_rows=micro_batch_rows,
            repeats=repeats,
        )
    load = {"load_average": os.getloadavg()[0]}
    if what != "iteration":
        return {**results[what], **load}
    seconds = {key: sum(r[key] for r in results.values()) for key in ("seconds", "floor_seconds")}
    out: dict[str, Any] = {
        **seconds,
        "ratio_to_floor": seconds["seconds"] / seconds["floor_seconds"],
        "dtype": dtype,
    }
    out["peak_memory_bytes"] = max(r["peak_memory_bytes"] for r in results.values())
    for name, figures in results.items():
        out |= {f"{name}/{key}": value for key, value in figures.items()}
    out |= {f"loop/{key}": value for key, value in around.items()}
    return {**out, **load}
