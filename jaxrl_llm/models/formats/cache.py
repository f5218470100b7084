"""The folder of converted models, and folders that know the digest of their own content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrl_llm.errors import InputError

__all__ = ["build_sealed", "cache_root", "combined_digest", "file_digest", "sealed_digests"]

_SEAL = "digests.json"


def cache_root(cache_dir: str | os.PathLike | None = None) -> Path:
    """`cache_dir`, else $JAXRL_CACHE_DIR, else $XDG_CACHE_HOME/jaxrl_llm, else ~/.cache/jaxrl_llm.

    It is created when something is put into it, so that a full one may be read-only.
    """
    chosen = cache_dir or os.environ.get("JAXRL_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxrl_llm"
    try:
        return base.expanduser()
    except RuntimeError:
        raise InputError(
            f"the cache folder {base} cannot be found: the home directory is unknown. Set HOME, or name a folder in "
            "the environment variable JAXRL_CACHE_DIR."
        ) from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest of {file name: digest}; the order of the names does not matter."""
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    ).hexdigest()


def sealed_digests(folder: Path) -> dict[str, str] | None:
    """{file name: SHA-256} when the folder is sealed and every file is as it was; else None."""
    try:
        recorded = json.loads((folder / _SEAL).read_text("utf-8"))
    except (OSError, ValueError):  # absent or damaged: to be built again
        return None
    if not isinstance(recorded, dict) or not recorded:
        return None
    intact = all(
        (folder / name).is_file() and file_digest(folder / name) == digest
        for name, digest in recorded.items()
    )
    return recorded if intact else None


def build_sealed(folder: Path, build: Callable[[Path], Mapping[str, str]]) -> dict[str, str]:
    """Builds a folder elsewhere, seals it, moves it into place in one step; an older one is replaced.

    Args:
      build: fills the folder it is given; returns the digests of files that it knows already.

    Raises:
      InputError: the folder cannot be written.
    """
    try:
        return _build(folder, build)
    except OSError as error:
        raise InputError(
            f"cache folder {folder} cannot be written ({error}). Make room or give the right to write, or name "
            "another cache folder in the environment variable JAXRL_CACHE_DIR."
        ) from error


def _build(folder: Path, build: Callable[[Path], Mapping[str, str]]) -> dict[str, str]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        known = dict(build(made))
        names = sorted(p.name for p in made.iterdir())
        digests = {name: known.get(name) or file_digest(made / name) for name in names}
        (made / _SEAL).write_text(json.dumps(digests, indent=1), "utf-8")
        if folder.exists():  # a damaged one, or one that another process has just made: ours is as good
            os.replace(folder, Path(scratch) / "old")
        try:
            os.replace(made, folder)
        except OSError:
            # Another process moved its own into place between the two lines above.
            winner = sealed_digests(folder)
            if winner is None:
                raise
            shutil.rmtree(made, ignore_errors=True)
            return winner
    return digests
