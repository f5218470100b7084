"""Replays recorded train steps and compares them with the record, bit for bit.

A run is a function of its config, of the snapshot that a span starts from and of the versions at which groups under
way were taken up again (`rollout/barrier` in metrics.jsonl). So a span can be executed once more, in a folder of its
own, and every figure that no clock or memory decides must come out equal. What several processes computed is executed
by several: sums over processes are taken in another order than those over the devices of one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.config import Config, as_data, load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.workers import Workers
from jaxrl_llm.parallel.agree import do_on_first, is_first, on_first, several, together
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.train import Run, session

__all__ = ["Difference", "Replay", "last_version", "replay"]

_FILES = ("metrics.jsonl", "samples.jsonl", "ledger.jsonl")
_CLOCKED = ("time/", "memory/")


class Difference(NamedTuple):
    """The first place where a replay is not the record."""

    version: int
    file: str
    key: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"version {self.version}, {self.file}, {self.key}: recorded {self.recorded!r}, replayed {self.replayed!r}"


class Replay(NamedTuple):
    """What a replay found."""

    start: int
    end: int
    steps: int  # compared
    weights: bool  # the weights of `end` were compared, too: both runs have a snapshot of it
    difference: Difference | None


def last_version(folder: pathlib.Path) -> int:
    """The last train step in the record of a run; 0 when there is none."""
    path = folder / "metrics.jsonl"
    return max((row["version"] for row in read_jsonl(path)), default=0) if path.is_file() else 0


def replay(
    folder: pathlib.Path, start: int, end: int, *, note: Callable[[str], None] | None = None
) -> Replay:
    """Executes the train steps start + 1 … end of a run once more and compares them with its record.

    Args:
      folder: the run folder; nothing in it is changed.
      start: version of one of its snapshots, or 0: from the beginning.
      end: version in its metrics.
      note: is told where the replay is made.

    Several processes all call it, and the folder in which the run folder lies is one that they share.

    Raises:
      InputError: no such run, snapshot or span, or one that several processes made and this is one, or the reverse.
    """
    if not (folder / "config.yaml").is_file():
        raise InputError(f"replay: {folder} holds no run (no config.yaml). Give a run folder.")
    config = load_config(folder / "config.yaml")
    if "***" in json.dumps(as_data(config)):
        raise InputError(
            f"replay: {folder / 'config.yaml'} holds *** in place of secrets; put them back in a copy of the folder."
        )
    recorded = last_version(folder)
    rows = {row["version"]: row for row in read_jsonl(folder / "metrics.jsonl")} if recorded else {}
    if not 0 <= start < end <= recorded:
        raise InputError(
            f"replay: the span must lie in the record, 0 <= from < to <= {recorded}, got {start} to {end}."
        )
    _check_processes(folder, config, rows, start, end)
    with _scratch(folder) as scratch:
        copy = scratch / folder.name
        if note is not None:
            note(f"Replaying {start + 1} to {end} in {copy}")
        do_on_first(lambda: _copy_start(folder, copy, start))
        barriers = {version - 1 for version, row in rows.items() if row.get("rollout/barrier")}
        # A fleet of any size samples the same as one worker in this process.
        fleet = any("time/fleet/workers" in row for row in rows.values())
        make_run = functools.partial(Run, workers=Workers.in_process()) if fleet else Run
        code = session(make_run, config, copy, resume=bool(start), until=end, barriers=barriers)
        if code:
            raise InputError("replay: it was stopped before its end; start it again.")
        found = on_first(lambda: _compare(folder, copy, start, end))  # reaches the others as a list
        difference = None if found is None else Difference(*found)
        weights = False
        if difference is None:
            weights, difference = _compare_weights(folder, copy, end)
    return Replay(start, end, end - start, weights, difference)


def _check_processes(
    folder: pathlib.Path, config: Config, rows: Mapping[int, Mapping[str, Any]], start: int, end: int
) -> None:
    """Raises InputError where the processes of now cannot give the bits of those that made the span."""
    made = {v: int(row.get("time/processes", 1)) for v, row in rows.items() if start < v <= end}
    alone = [version for version, processes in made.items() if processes == 1]
    if alone and len(alone) < len(made):
        raise InputError(
            f"replay: steps {start + 1} to {end} were made by one process and by several (step {alone[0]} by one), which "
            "add up in different orders. Give a span that was made by one number of them; time/processes in metrics.jsonl says it."
        )
    if several() != bool(alone):  # as it was made
        return
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    command = f"jaxrl replay {folder} --from {start} --to {end}"
    if alone:
        raise InputError(
            f"replay: steps {start + 1} to {end} were made by one process with {devices} devices, which adds up in "
            f"another order than several do. Replay them in one: {command}"
        )
    processes = made[end]
    raise InputError(
        f"replay: steps {start + 1} to {end} were made by {processes} processes, which add up in another order than one "
        f"does. Replay them as they were made, on a machine or on as many hosts: python launch/tpu_run.py "
        f"--num-processes {processes} --devices-per-process {devices // processes} -- {command}"
    )


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder, of several processes one that all see: beside the run."""
    beside = folder.absolute().parent if several() else None
    place = pathlib.Path(on_first(lambda: tempfile.mkdtemp(prefix="jaxrl-replay-", dir=beside)))
    try:
        yield place
        together(lambda: None)  # none of them reads in it any more
    finally:
        if is_first():
            shutil.rmtree(place, ignore_errors=True)


def _copy_start(folder: pathlib.Path, copy: pathlib.Path, start: int) -> None:
    copy.mkdir()
    if not start:
        return
    snapshot = folder / "snapshots" / str(start)
    if not snapshot.is_dir():
        there = sorted(int(p.name) for p in (folder / "snapshots").glob("*") if p.name.isdigit())
        raise InputError(
            f"replay: the run has no snapshot of version {start}; it has {', '.join(map(str, there)) or 'none'}. Start from one "
            "of them, or from 0; snapshots.keep_every keeps more."
        )
    shutil.copytree(snapshot, copy / "snapshots" / str(start))
    shutil.copy(folder / "config.yaml", copy / "config.yaml")
    for name in _FILES:
        if os.path.isfile(folder / name):
            shutil.copy(folder / name, copy / name)  # cut back to the snapshot by the resume


def _lines(folder: pathlib.Path, name: str, start: int, end: int) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    if (folder / name).is_file():
        for line in read_jsonl(folder / name):
            if start < line["version"] <= end:
                found.setdefault(line["version"], []).append(line)
    return found


def _compare(folder: pathlib.Path, copy: pathlib.Path, start: int, end: int) -> Difference | None:
    files = {name: (_lines(folder, name, start, end), _lines(copy, name, start, end)) for name in _FILES}
    for version in range(start + 1, end + 1):
        for name, (recorded, replayed) in files.items():
            ours, theirs = recorded.get(version, []), replayed.get(version, [])
            if len(ours) != len(theirs):
                return Difference(version, name, "lines", len(ours), len(theirs))
            for mine, other in zip(ours, theirs, strict=True):
                for key in sorted({*mine, *other}):
                    if not key.startswith(_CLOCKED) and mine.get(key) != other.get(key):
                        return Difference(version, name, key, mine.get(key), other.get(key))
    return None


def _compare_weights(folder: pathlib.Path, copy: pathlib.Path, end: int) -> tuple[bool, Difference | None]:
    prints = []
    for run in (folder, copy):
        with SnapshotStore(run / "snapshots", read_only=True) as store:
            if end not in store.versions():
                return False, None
            prints.append(store.meta(end)["fingerprint"])
    same = prints[0] == prints[1]
    return True, None if same else Difference(end, "snapshots", "fingerprint", *prints)
