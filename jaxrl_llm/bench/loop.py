"""What the training loop itself costs, and how long a snapshot holds it up: a short real run."""

from __future__ import annotations

import contextlib
import io
import pathlib
import tempfile
from typing import Any

import numpy as np

from jaxrl_llm.config import apply_overrides, parse_config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.train import train

__all__ = ["bench_loop"]

_EVERY = 10  # train steps between snapshots, as a config has it by default


def bench_loop(
    model: str,
    *,
    dtype: str,
    prompts: int,
    group: int,
    new_tokens: int,
    context: int,
    micro_batch_rows: int,
    repeats: int,
) -> dict[str, Any]:
    """Trains on two-digit addition for `repeats` + 3 steps; the first compiles, after the second a snapshot is saved.

    Args:
      context: tokens of a question and its answer, which has at most new_tokens.

    Returns:
      loop_seconds and loop_share, of a train step: what is neither sampling, rewards, learner nor snapshot; median
      snapshot_seconds that the loop waited for one, and snapshot_share of the time with one in ten train steps
      step_seconds of a train step, median
    """
    steps = repeats + 3
    settings = [
        f"model={{source: '{model}', dtype: {dtype}, max_context: {context}}}",
        f"rollout={{prompts: {prompts}, group_size: {group}, max_tokens: {new_tokens}}}",
        f"objective={'grpo' if group > 1 else 'reinforce'}",
        f"learner.micro_batch_rows={micro_batch_rows}",
        f"steps={steps}",
        "evaluation.items=0",
        "snapshots.every=2",
    ]
    with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as name:
        folder = pathlib.Path(name) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(parse_config(apply_overrides({}, settings)), folder)
        rows = read_metrics(folder)[1:]  # without the first, which compiles
    step = float(np.median([row["time/total"] for row in rows]))
    loop = float(np.median([row["time/loop"] for row in rows]))
    snapshot = float(rows[1]["time/snapshot"])
    return {
        "loop_seconds": loop,
        "loop_share": loop / step,
        "snapshot_seconds": snapshot,
        "snapshot_share": snapshot / (_EVERY * step + snapshot),
        "step_seconds": step,
    }
