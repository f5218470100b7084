"""The bias ledger: what was sampled and not trained on, why, and how that bends the data.

A sample that is dropped because it was slow was most likely a long one; a group that is dropped because its rewards
do not differ was too easy or too hard. Each such rule is a choice of data. The ledger counts both sides, by reason,
task and length, and says when the samples that were trained on differ in length from all that were sampled by more
than chance explains.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.types import Trajectory

__all__ = ["REASONS", "TRAINED", "Ledger", "length_bin"]

TRAINED = "trained"
REASONS = (
    "stale",  # older than max_age when it could have been trained on
    "over_generated",  # enough samples of its prompt had ended
    "uninformative",  # the rewards of its group do not differ (rollout.refill_rounds)
    "no_signal",  # trained on as context of its group only: its reward could not be computed
)
_LEAST = 64  # dropped samples before anything is said of them
_Z = 4.0  # standard errors
_RELATIVE = 0.05  # of the mean length


def length_bin(tokens: int) -> int:
    """The power of two that a length is counted under: the largest that is not above it; 0 for an empty sample."""
    return 1 << (tokens.bit_length() - 1) if tokens > 0 else 0


@dataclasses.dataclass
class _Sums:
    """Of the lengths of samples."""

    samples: int = 0
    tokens: int = 0
    squares: int = 0

    def add(self, length: int) -> None:
        self.samples += 1
        self.tokens += length
        self.squares += length * length

    @property
    def mean(self) -> float:
        return self.tokens / self.samples if self.samples else 0.0

    @property
    def error(self) -> float:
        """Squared standard error of the mean."""
        if self.samples < 2:
            return math.inf
        variance = max(0.0, self.squares / self.samples - self.mean**2)
        return variance / self.samples


class Ledger:
    """Counts over a whole run, and those since the last `step`."""

    def __init__(self) -> None:
        self._cells: dict[
            tuple[str, str, int], int
        ] = {}  # (reason, task, bin of lengths) -> samples, this step
        self._sums: dict[str, _Sums] = {}  # by reason, whole run
        self._step: dict[str, _Sums] = {}
        self._warned = False

    def count(self, reason: str, task: str, lengths: Iterable[int]) -> None:
        """Samples of a task, by the tokens that were sampled of each."""
        if reason not in (TRAINED, *REASONS):
            raise ValueError(
                f"ledger: reason must be one of {', '.join((TRAINED, *REASONS))}, got {reason!r}."
            )
        for length in lengths:
            length = int(length)
            cell = reason, task, length_bin(length)
            self._cells[cell] = self._cells.get(cell, 0) + 1
            for sums in (self._sums, self._step):
                sums.setdefault(reason, _Sums()).add(length)

    def count_trajectories(self, reason: str, trajectories: Iterable[Trajectory]) -> None:
        """`count`, of whole trajectories."""
        for trajectory in trajectories:
            self.count(reason, trajectory.prompt.task, [int(trajectory.mask.sum())])

    @property
    def length_bias(self) -> float:
        """Mean length of what was trained on over that of all that was sampled, less 1; over the run."""
        trained, dropped = self._sums.get(TRAINED, _Sums()), self._dropped()
        samples, tokens = trained.samples + dropped.samples, trained.tokens + dropped.tokens
        if not trained.samples or not tokens:
            return 0.0
        return trained.mean * samples / tokens - 1.0

    def _dropped(self) -> _Sums:
        # A sample without a reward stays in the batch: it is not missing from the data.
        parts = [sums for reason, sums in self._sums.items() if reason not in (TRAINED, "no_signal")]
        return _Sums(
            sum(p.samples for p in parts), sum(p.tokens for p in parts), sum(p.squares for p in parts)
        )

    def warning(self) -> str | None:
        """What to tell the user when dropping has become a bias of the data; once."""
        trained, dropped = self._sums.get(TRAINED, _Sums()), self._dropped()
        if self._warned or dropped.samples < _LEAST or trained.samples < _LEAST:
            return None
        apart, error = dropped.mean - trained.mean, math.sqrt(trained.error + dropped.error)
        if abs(apart) < _Z * error or abs(self.length_bias) < _RELATIVE:
            return None
        self._warned = True
        worst = max((r for r in self._sums if r in REASONS), key=lambda r: self._sums[r].samples)
        return (
            f"Dropping samples bends the data: the {dropped.samples:,} that were dropped (most of them: {worst}) had "
            f"{dropped.mean:.1f} tokens on average, the {trained.samples:,} that were trained on {trained.mean:.1f}, which is "
            f"{abs(self.length_bias):.0%} {'less' if self.length_bias < 0 else 'more'} than all that was sampled. Lower "
            "schedule.over_generation or rollout.refill_rounds, or say so where you report results."
        )

    def step(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(figures of this step, its lines for ledger.jsonl); begins the next step."""
        metrics = {}
        for reason in REASONS:
            sums = self._step.get(reason, _Sums())
            metrics[f"ledger/{reason}_samples"] = float(sums.samples)
            metrics[f"ledger/{reason}_tokens"] = float(sums.tokens)
        metrics["ledger/length_bias"] = self.length_bias
        lines = [
            {"reason": reason, "task": task, "length": bin_, "samples": samples}
            for (reason, task, bin_), samples in sorted(self._cells.items())
        ]
        self._cells, self._step = {}, {}
        return metrics, lines

    def state(self) -> dict[str, Any]:
        """The counts of the run, and of the step that has begun, as JSON values."""
        return {
            "sums": {reason: dataclasses.astuple(sums) for reason, sums in self._sums.items()},
            "step": {reason: dataclasses.astuple(sums) for reason, sums in self._step.items()},
            "cells": [[*cell, samples] for cell, samples in self._cells.items()],
            "warned": self._warned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._sums = {reason: _Sums(*sums) for reason, sums in state["sums"].items()}
        self._step = {reason: _Sums(*sums) for reason, sums in state.get("step", {}).items()}
        self._cells = {(reason, task, at): samples for reason, task, at, samples in state.get("cells", [])}
        self._warned = bool(state["warned"])
