"""TensorBoard event files (extra `tensorboard`)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from jaxrl_llm.errors import InputError

__all__ = ["TensorboardTracker"]


class TensorboardTracker:
    """Writes event files to `tensorboard/` in the run folder.

    Raises:
      InputError: the package is not installed.
    """

    def __init__(self, run_dir: str | pathlib.Path) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise InputError(
                "The tracker 'tensorboard' needs its package: pip install 'jaxrl-llm[tensorboard]', or leave it out "
                "of `trackers`."
            ) from error
        self._writer = tensorboardX.SummaryWriter(str(pathlib.Path(run_dir) / "tensorboard"))

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Records the figures of one update at step `version`."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, version)

    def close(self) -> None:
        """Flushes the file."""
        self._writer.close()
