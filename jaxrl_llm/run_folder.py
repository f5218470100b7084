"""The folder of a run: making it, and what a resumed run takes from it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxrl_llm.config import Config, as_data, flatten, load_config, to_yaml
from jaxrl_llm.errors import InputError

__all__ = ["prepare_folder", "resumed_config"]


def prepare_folder(folder: pathlib.Path, config: Config, *, resume: bool) -> None:
    """Makes the run folder and writes config.yaml into it.

    Raises:
      InputError: the folder holds a run and `resume` is False, or holds none and it is True, or cannot be written.
    """
    exists = (folder / "config.yaml").is_file()
    if exists and not resume:
        raise InputError(
            f"{folder} already holds a run. Go on with it by adding --resume, or choose another folder with --run."
        )
    if resume and not exists:
        raise InputError(
            f"--resume: {folder} holds no run (no config.yaml). Leave out --resume to start one there."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
    except OSError as error:
        raise InputError(
            f"run folder {folder} cannot be written: {error}. Choose another with --run."
        ) from None


def resumed_config(folder: pathlib.Path, given: Config, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The config that a resumed run goes on with: its own, with the overrides of this call.

    Returns:
      (config, notes): a note names each setting of the given file that differs and is not used.
    """
    if not (folder / "config.yaml").is_file():
        return given, []
    own = load_config(folder / "config.yaml", overrides)
    before, now = flatten(as_data(own)), flatten(as_data(given))
    unused = [
        f"{key}: the run has {before.get(key)!r}, the file says {now.get(key)!r}; the run's value is kept."
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    return own, unused
