"""The folder of a run: making it, and what a resumed run takes from it."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from jaxrl_llm.config import Config, apply_overrides, as_data, flatten, load_config, parse_config
from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.errors import InputError

__all__ = [
    "Before",
    "abandon_folder",
    "check_path",
    "look_at",
    "prepare_folder",
    "resumed_config",
    "sole_writer",
    "write_config",
]

_NOTE = "# Secrets were replaced by ***: go on with this run by giving its original config file.\n"
# What a run makes in its folder.
_FILES = (
    "config.yaml",
    "config.yaml.tmp",
    "run.json",
    "metrics.jsonl",
    "samples.jsonl",
    "ledger.jsonl",
    "report.html",
)
_FOLDERS = ("snapshots", "tensorboard")


def check_path(path: str | pathlib.Path, what: str) -> None:
    """Raises InputError for a name that no file can have, or that not every library here can handle."""
    text = str(path)
    if "\0" in text:
        raise InputError(f"{what} {text!a}: a name cannot hold the character NUL. Give another.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{what} {text!a}: the name is not UTF-8 (or the locale is not: set PYTHONUTF8=1). Give another."
        ) from None


def prepare_folder(folder: pathlib.Path, config: Config, *, resume: bool) -> None:
    """Makes the folder of a new run with its config.yaml, or checks that of a run to resume, which stays as it is.

    A resumed run's config.yaml is written by `write_config`, once nothing can be refused any more.

    Raises:
      InputError: the folder holds a run and `resume` is False, or holds none and it is True, or cannot be written.
    """
    check_path(folder, "run folder")
    target = folder / "config.yaml"
    try:
        exists = target.is_file()
        if not exists and not resume:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    if exists and not resume:
        raise InputError(
            f"{folder} already holds a run. Go on with it by adding --resume, or choose another folder with --run."
        )
    if resume and not exists:
        raise InputError(
            f"--resume: {folder} holds no run (no config.yaml). Leave out --resume to start one there."
        )
    if resume and not (os.access(folder, os.W_OK) and os.access(target, os.R_OK)):
        raise _unwritable(folder, PermissionError("permission denied"))
    if not resume:
        write_config(folder, config)


def write_config(folder: pathlib.Path, config: Config) -> None:
    """Writes config.yaml into a run folder, secrets replaced by "***".

    Raises:
      InputError: the folder cannot be written.
    """
    target = folder / "config.yaml"
    data = as_data(config)
    shown = redact(data)
    text = ("" if shown == data else _NOTE) + yaml.safe_dump(shown, sort_keys=False)
    temporary = target.with_name("config.yaml.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, target)  # a run that is killed here leaves the old file or the new one
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: pathlib.Path, error: OSError) -> InputError:
    return InputError(f"run folder {folder} cannot be written: {error}. Choose another with --run.")


@contextlib.contextmanager
def sole_writer(folder: pathlib.Path, *, make: bool) -> Iterator[None]:
    """Holds a lock on a run folder, so that no other process of this host (or of its file system) writes there.

    The lock is on the folder itself: no file is left, and it ends with the process, however that ends. A file system
    that knows no such locks has none.

    Args:
      make: make the folder if it is not there.

    Raises:
      InputError: another process holds it, or the folder cannot be made.
    """
    check_path(folder, "run folder")
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{folder}: another process is writing this run, and two would spoil each other's files. Wait until it has "
                    "ended (a run that was told to stop first saves), or choose another folder with --run."
                ) from None
            except OSError:  # not every network file system can
                pass
        yield


class Before(NamedTuple):
    """What was at the place of a run folder before the run."""

    paths: frozenset[pathlib.Path]  # of what a run makes and of the folders that it is in
    figures: bool  # metrics.jsonl had rows already


def look_at(folder: pathlib.Path) -> Before:
    """What is there before a new run touches its folder, for `abandon_folder`."""
    made = [folder / name for name in (*_FILES, *_FOLDERS)]
    there = frozenset(path for path in (*made, folder, *folder.parents) if os.path.lexists(path))
    return Before(there, _has_rows(folder))


def abandon_folder(folder: pathlib.Path, before: Before) -> None:
    """Takes away what a new run that did not start has made, so that the folder can be used again.

    Nothing is done when the run has written figures; whatever was there before, or is not a run's, stays.
    """
    if _has_rows(folder) and not before.figures:
        return
    mine = [folder / name for name in _FILES]
    with contextlib.suppress(OSError, ValueError):
        mine += (folder / "tensorboard").glob("events.out.tfevents.*")
    if folder / "tensorboard" in before.paths:
        mine = mine[: len(_FILES)]
    # The error that stopped the run is reported, not one of these.
    for path in mine:
        if path not in before.paths:
            with contextlib.suppress(OSError, ValueError):
                path.unlink(missing_ok=True)
    for path in (*(folder / name for name in _FOLDERS), folder, *folder.parents):
        if path not in before.paths:
            with contextlib.suppress(OSError, ValueError):  # not made, or not empty
                path.rmdir()


def _has_rows(folder: pathlib.Path) -> bool:
    try:
        return os.path.getsize(folder / "metrics.jsonl") > 0
    except (OSError, ValueError):
        return False


def resumed_config(folder: pathlib.Path, given: Config, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The config that a resumed run goes on with: its own, with the overrides of this call.

    Secrets, which its config.yaml does not hold, are taken from the given config.

    Returns:
      (config, notes): a note names each setting of the given file that differs and is not used.

    Raises:
      InputError: the run had secrets and the given config does not.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return given, []
    stored, now = as_data(load_config(path)), as_data(given)
    whole = _with_secrets(stored, now)
    if whole == stored and path.read_text().startswith(_NOTE):
        raise InputError(
            f"{path} holds *** in place of secrets, and the config that was given does not have them: "
            "give the file that the run was started with."
        )
    own = parse_config(apply_overrides(whole, overrides), str(path))
    before, after = flatten(redact(as_data(own))), flatten(redact(now))
    unused = [
        f"{key}: the run has {before.get(key)!r}, the file says {after.get(key)!r}; the run's value is kept."
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    return own, unused


def _with_secrets(own: Any, given: Any) -> Any:
    """`own` with every value that is the redacted form of the one in `given` replaced by that one."""
    if isinstance(own, dict) and isinstance(given, dict):
        # Whether a value is a secret depends on its key, so each is redacted together with it.
        return {
            key: given[key]
            if key in given and value != given[key] and {key: value} == redact({key: given[key]})
            else _with_secrets(value, given.get(key))
            for key, value in own.items()
        }
    return own
