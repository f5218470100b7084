"""Reward by train step, on samples of the current policy and on old ones, corrected and not: draws stale_curves.svg.

    python colab/stale_curves.py [--seeds 3] [--out colab/stale_curves.svg]

The tiny model learns to write a vowel, two prompts of eight samples a train step. Three kinds of run:
  synchronous  every sample is of the current policy (max_age 0)
  decoupled    max_age 4, decoupled_ppo: clipped around the proximal policy, weighed by proximal / behavior
  plain        max_age 4, the same loss clipped around the policy that sampled, without another correction
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import tempfile

import numpy as np

from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.runtime import configure
from jaxrl_llm.train import train

HERE = pathlib.Path(__file__).parent
SETTINGS = (
    "optimizer.learning_rate=3e-3",
    "rollout={prompts: 2, group_size: 8, max_tokens: 6}",
    "sampler={slots: 80, steps_per_dispatch: 8}",
    "learner.micro_batch_rows=16",
    "evaluation.items=0",
    "snapshots.every=0",
)
PLAIN = "[group_advantage, normalize_by_token, {token_ratio: {anchor: behavior}}, {clip_surrogate: {low: 0.2, high: 0.2}}]"
RUNS = {  # name -> (settings, color)
    "synchronous": (("schedule={max_age: 0}",), "#2463eb"),
    "max_age 4, decoupled PPO": (("schedule={max_age: 4}",), "#16a34a"),
    "max_age 4, plain PPO": (("schedule={max_age: 4}", f"objective={PLAIN}"), "#dc2626"),
}
WINDOW = 5  # train steps of a moving mean


def rewards(settings: tuple[str, ...], seed: int, steps: int) -> np.ndarray:
    """Mean reward of the samples of each train step, f64[steps]."""
    seeded = (f"seed={seed}", f"task.seed={seed}", f"steps={steps}")
    config = load_config(HERE.parent / "configs" / "tiny_async.yaml", [*SETTINGS, *settings, *seeded])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, folder)
        return np.array([row["reward/mean"] for row in read_metrics(folder) if "reward/mean" in row])


def smooth(curve: np.ndarray) -> np.ndarray:
    """The moving mean over the last WINDOW train steps."""
    return np.convolve(curve, np.ones(WINDOW) / WINDOW)[: len(curve)]


def reached(curve: np.ndarray, level: float) -> int | None:
    """The first train step after which the moving mean is at `level`."""
    there = np.flatnonzero(smooth(curve) >= level)
    return int(there[0]) + 1 if there.size else None


def drawn(curves: dict[str, list[np.ndarray]]) -> str:
    """Thin lines: one seed; thick lines: the mean over seeds."""
    left, top, width, height = 46, 14, 560, 220
    steps = max(len(c) for found in curves.values() for c in found)

    def path(curve: np.ndarray) -> str:
        points = enumerate(smooth(curve), start=1)
        return "M" + "L".join(
            f"{left + width * t / steps:.1f},{top + height * (1 - y):.1f}" for t, y in points
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 46}" '
        f'width="{left + width + 20}" height="{top + height + 46}" font-family="system-ui, sans-serif" font-size="12" '
        'fill="#334155">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for level in (0.0, 0.5, 1.0):
        y = top + height * (1 - level)
        parts.append(f'<path d="M{left},{y:.1f}h{width}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
    for tick in range(0, steps + 1, 20):
        x = left + width * tick / steps
        parts.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{tick}</text>')
    for row, (name, found) in enumerate(curves.items()):
        color = RUNS[name][1]
        parts += [f'<path d="{path(c)}" fill="none" stroke="{color}" stroke-opacity="0.3"/>' for c in found]
        mean = path(np.mean(found, axis=0))
        parts.append(f'<path d="{mean}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        y = top + height - 62 + 18 * row
        parts.append(f'<path d="M{left + width - 200},{y}h24" stroke="{color}" stroke-width="2.5"/>')
        parts.append(f'<text x="{left + width - 168}" y="{y + 4}">{name}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">train step (mean reward of the last '
        f"{WINDOW})</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Trains, prints when each run was there, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "stale_curves.svg")
    args = parser.parse_args()
    configure()
    curves: dict[str, list[np.ndarray]] = {name: [] for name in RUNS}
    for seed in range(args.seeds):
        for name, (settings, _) in RUNS.items():
            curves[name].append(rewards(settings, seed, args.steps))
            there = ", ".join(
                f"{level:g} after {reached(curves[name][-1], level)}" for level in (0.5, 0.7, 0.9)
            )
            print(f"seed {seed}  {name:<26} reward {there} train steps", flush=True)
    args.out.write_text(drawn(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
