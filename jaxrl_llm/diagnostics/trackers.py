"""Outside services that receive the figures of metrics.jsonl, by name."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.diagnostics.metrics import Tracker
from jaxrl_llm.errors import InputError

__all__ = ["TRACKERS", "make_trackers"]

TRACKERS = ("wandb", "tensorboard")


def make_trackers(
    names: Sequence[str], run_dir: str | pathlib.Path, config: Mapping[str, Any] | None = None
) -> list[Tracker]:
    """The trackers of a run; each package is imported only when it is asked for.

    Args:
      names: of `TRACKERS`.
      run_dir: the run folder; its name becomes the name of the run.
      config: the config as resolved, for services that show it; secrets are removed first.

    Raises:
      InputError: an unknown name, or the package of a tracker is not installed (names the extra).
    """
    trackers: list[Tracker] = []
    for name in names:
        if name == "wandb":
            from jaxrl_llm.diagnostics.track_wandb import WandbTracker

            trackers.append(WandbTracker(run_dir, config))
        elif name == "tensorboard":
            from jaxrl_llm.diagnostics.track_tensorboard import TensorboardTracker

            trackers.append(TensorboardTracker(run_dir))
        else:
            raise InputError(f"Unknown tracker {name!r}. Allowed: {', '.join(TRACKERS)}.")
    return trackers
