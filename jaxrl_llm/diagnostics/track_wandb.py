"""Weights & Biases (extra `wandb`)."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.errors import InputError

__all__ = ["WandbTracker"]


class WandbTracker:
    """Sends figures to Weights & Biases; `WANDB_MODE=offline` keeps them in the run folder.

    Raises:
      InputError: the package is not installed.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        config: Mapping[str, Any] | None = None,
        *,
        project: str = "jaxrl-llm",
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError(
                "The tracker 'wandb' needs its package: pip install 'jaxrl-llm[wandb]', or leave it out of `trackers`."
            ) from error
        folder = pathlib.Path(run_dir)
        # An id made of the folder: a resumed run goes on in its own chart, and no other run joins it.
        slug = "".join(c if c.isalnum() else "-" for c in folder.name)[:80]
        digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=f"{slug}-{digest}",
            resume="allow",
            dir=str(folder),
            config=redact(dict(config or {})),
            settings=wandb.Settings(console="off", save_code=False, disable_git=True),
        )

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Records the figures of one update at step `version`."""
        self._run.log(dict(metrics), step=version)

    def close(self) -> None:
        """Sends what is pending."""
        self._run.finish()
