"""Versioned snapshots on disk: the one module that knows Orbax.

A snapshot is a folder named by its version (train steps done) with four items:

    params    the arrays of `state.params`, so that they can be read alone
    rest      every other array of the state: optimiser, objective state, keys, counters
    meta      the caller's JSON: resolved config, data cursor, logical clock, model description, …
    manifest  ours: path, dtype, shape and digest of every leaf, digest of meta, the metric; sealed

Why a manifest of our own: Orbax 0.12 reads an array with one flipped bit without a complaint, drops
zero-size arrays and needs the exact tree to read a part of it. Arrays are stored by path in a flat
dict, so any pytree (NamedTuples, None, empty dicts, typed PRNG keys, Python scalars) round-trips: its
structure comes from the `like` that it is restored onto, and every leaf must be there.

Saving is asynchronous and atomic: a folder gets its name when everything in it is on disk. A process
killed while saving leaves only a temporary folder, which is never read. Deleting is the other way round: a folder
loses its name at once, and a thread removes what was in it, since that takes a disk longer than a short train step.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.errors import DamagedError, InputError, MisfitError, SnapshotError
from jaxrl_llm.parallel.agree import do_on_first, is_first, on_first, several, together
from jaxrl_llm.snapshots.digest import dtype_of, fingerprint, is_key, leaf_records, named_leaves
from jaxrl_llm.snapshots.leaves import (
    as_key,
    castable,
    finish,
    nest,
    restore_target,
    storable,
    stored_bytes,
    stored_dtype,
)
from jaxrl_llm.snapshots.quiet import quiet_threads, reported

__all__ = ["SnapshotError", "SnapshotStore", "fingerprint", "locate"]

_FORMAT = 1
_PARAMS = "params/"
_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETED = ".deleted-"
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class SnapshotStore:
    """The snapshots of one run.

    Args:
      directory: the folder; made if missing (unless read_only).
      keep_last: how many of the newest versions stay, at least 1.
      keep_every: versions that are multiples of it stay for good; None = no such rule.
      keep_best: how many versions with the highest `metric` stay; None = no such rule.
      read_only: open an existing folder to read from; nothing in it is changed.

    `pinned` is a set of versions that must stay whatever the rules say (for example those that
    sampled trajectories still in the buffer). A version that is known to be damaged counts for no rule.

    Raises:
      InputError: the folder cannot be made or written to, does not exist (read_only), or a number is
        out of range.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        keep_best: int | None = None,
        read_only: bool = False,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every), ("keep_best", keep_best)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}; leave it out for its default.")
        self.directory = pathlib.Path(directory).expanduser().absolute()
        self.keep_last, self.keep_every, self.keep_best = keep_last, keep_every, keep_best
        self.read_only = read_only
        self.pinned: set[int] = set()
        self._metrics: dict[int, float | None] = {}
        self._damaged: set[int] = set()
        self._restored: int | None = None
        self._saving: int | None = None
        self._removing: threading.Thread | None = None  # files of snapshots that are deleted
        if read_only:
            if not self.directory.is_dir():
                raise InputError(
                    f"There is no snapshot folder at {self.directory}. Give the `snapshots` folder of a run, "
                    "or the run folder itself."
                )
        else:
            together(lambda: _probe(self.directory))
            _check_shared(self.directory)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None, create=not read_only, read_only=read_only, save_root_metadata=False
            ),
            item_handlers=_handlers(),
        )
        # Orbax's processes wait for each other after reading, also for one that failed. Ours read each alone, and agree.
        self._reader = _reader(self.directory) if several() else self._manager

    # ------------------------------------------------------------------------------------- saving

    def save(self, version: int, state: Any, meta: Mapping[str, Any], *, metric: float | None = None) -> None:
        """Starts to save a snapshot; returns when `state` may be donated or changed.

        Waits for an earlier save that is still running, and raises its error if it failed.

        Args:
          version: train steps done. A version that exists is refused, unless it is damaged or newer than
            the version that this store restored (a run that went back writes its own future).
          state: any pytree of arrays, NumPy arrays, scalars and typed PRNG keys.
          meta: a JSON object; "version" is added to it. Secrets in its "config" are replaced by "***".
          metric: what `keep_best` ranks by; higher is better.

        Raises:
          InputError: meta is not JSON, or the version exists.
          SnapshotError: the disk has no room, or a write failed; the snapshots before are intact.
        """
        self.wait()
        if self.read_only:
            raise InputError(f"The snapshot store at {self.directory} was opened read-only; save elsewhere.")
        version = int(version)
        body = {**_json_copy(meta), "version": version}
        if isinstance(body.get("config"), dict):
            body["config"] = redact(body["config"])
        leaves = named_leaves(state)
        there = on_first((self.directory / str(version)).exists)  # much sooner known than all versions
        if there and version in self.versions():
            newer = self._restored is not None and version > self._restored
            if version not in self._damaged and not newer:
                raise InputError(
                    f"Snapshot {version} exists in {self.directory}. Save another version, use another run "
                    "folder, or resume from the newest snapshot."
                )
            self._delete(version)
            self._manager.reload()
        do_on_first(lambda: self._check_room(leaves))
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "version": version,
            "metric": None if metric is None else float(metric),
            "meta": _digest_json(body),
            "leaves": leaf_records(leaves),
        }
        for name, leaf in leaves.items():
            if is_key(leaf):
                manifest["leaves"][name]["key"] = str(jax.random.key_impl(leaf))
        stored = {name: storable(leaf) for name, leaf in leaves.items() if np.size(leaf)}
        params = {name: leaf for name, leaf in stored.items() if name.startswith(_PARAMS)}
        rest = {name: leaf for name, leaf in stored.items() if name not in params}
        items: dict[str, Any] = {
            "meta": ocp.args.JsonSave(body),
            "manifest": ocp.args.JsonSave({"seal": _digest_json(manifest), "body": manifest}),
        }
        for item, arrays in (("params", params), ("rest", rest)):
            if arrays:
                items[item] = ocp.args.PyTreeSave(arrays)
        self._saving = version
        quiet_threads()
        with reported(), jax.transfer_guard("allow"):
            try:
                self._manager.save(version, args=ocp.args.Composite(**items), force=True)
            # Orbax and TensorStore raise many types here (OSError, ValueError, RuntimeError, bare
            # Exception); each means that this version was not written.
            except Exception as error:
                raise self._failed(version, error) from error
        self._metrics[version] = manifest["metric"]

    def wait(self) -> None:
        """Blocks until the running save is on disk, then applies the retention rules.

        Raises:
          SnapshotError: the save failed; the snapshots before are intact.
        """
        if self._saving is None:
            return
        version = self._saving
        with reported():
            try:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
            except Exception as error:  # as in `save`
                raise self._failed(version, error) from error
        self._saving = None
        self._damaged.discard(version)
        self._retain()

    def close(self) -> None:
        """Waits, and frees the threads of the store."""
        try:
            self.wait()
        finally:
            self._removed()
            self._manager.close()
            if self._reader is not self._manager:
                self._reader.close()

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def discard_after(self, version: int) -> list[int]:
        """Deletes every snapshot newer than `version` and returns which: what a run that goes back does.

        A resumed run writes its later versions again; old ones must not be found by the next resume.
        """
        self.wait()
        newer = [found for found in self.versions() if found > version]
        for found in newer:
            self._delete(found)
        do_on_first(self._remove)
        return newer

    # ------------------------------------------------------------------------------------ reading

    def versions(self) -> list[int]:
        """Versions that are completely on disk, ascending. Their contents are checked when restored.

        Of several processes all get what the first one sees, and all must ask.
        """
        found = self._versions_here()  # each looks before the first can go on and change what is there
        return on_first(lambda: found)

    def _versions_here(self) -> list[int]:
        if self._saving is None:
            self._manager.reload()
            if self._reader is not self._manager:
                self._reader.reload()
        return sorted({int(step) for step in self._manager.all_steps()} - {self._unfinished()})

    def latest(self) -> int | None:
        """The newest version that is completely on disk, None if there is none."""
        return max(self.versions(), default=None)

    def meta(self, version: int | None = None) -> dict[str, Any]:
        """The JSON of one snapshot (default: the newest that can be read)."""
        return self._first_usable(version, lambda v: together(lambda: self._read_texts(v)))[1]

    def shapes(self, version: int) -> dict[str, tuple[int, ...]]:
        """The shape of every leaf of one snapshot, by path; reads no array.

        Raises:
          InputError: no such snapshot, or it is damaged.
        """
        manifest = self._first_usable(version, lambda v: (together(lambda: self._read_manifest(v)), None))[0]
        return {name: tuple(record["shape"]) for name, record in manifest["leaves"].items()}

    def restore(self, version: int | None = None, *, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a snapshot onto the structure, shardings, dtypes and host types of `like`.

        Args:
          version: which; default the newest. With the default, a snapshot that is damaged is named in a
            warning and the one before is taken; a version that was asked for is never replaced.
          like: a tree of arrays or of `jax.ShapeDtypeStruct`s (with `sharding`, else the first local
            device). Floating-point leaves are cast to its dtypes after their digest was verified.

        Returns:
          (state, meta).

        Raises:
          InputError: no snapshot, none that is usable, or its tree does not fit `like`.
        """
        wanted = named_leaves(like)
        structure = jax.tree.structure(like)

        def read(found: int) -> tuple[Any, dict[str, Any]]:
            manifest, meta = together(lambda: self._read_texts(found))
            try:
                self._check_fit(found, manifest, wanted)
            except MisfitError as error:
                error.config = meta.get("config")
                raise
            leaves = self._read_leaves(found, manifest, wanted)
            return jax.tree.unflatten(structure, [leaves[name] for name in wanted]), meta

        return self._first_usable(version, read, remember=True)

    def restore_params(self, version: int | None = None, *, like: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reads only the parameters: (params, meta).

        Args:
          version: as for `restore`.
          like: a tree like `state.params`, or None: then nested dicts of arrays with the dtypes that were
            saved, on the first local device.
        """

        def read(found: int) -> tuple[Any, dict[str, Any]]:
            manifest, meta = together(lambda: self._read_texts(found))
            saved = {k: v for k, v in manifest["leaves"].items() if k.startswith(_PARAMS)}
            if not saved:
                raise InputError(
                    f"Snapshot {found} in {self.directory} holds no parameters (`state.params`)."
                )
            part = {**manifest, "leaves": saved}
            if like is None:
                wanted = {k: jax.ShapeDtypeStruct(v["shape"], stored_dtype(v)) for k, v in saved.items()}
                return nest(self._read_leaves(found, part, wanted), _PARAMS), meta
            wanted = {_PARAMS + name: leaf for name, leaf in named_leaves(like).items()}
            self._check_fit(found, part, wanted)
            leaves = self._read_leaves(found, part, wanted)
            return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted]), meta

        return self._first_usable(version, read)

    # ------------------------------------------------------------------------------------ details

    def _unfinished(self) -> int | None:
        return self._saving if self._saving is not None and self._manager.is_saving_in_progress() else None

    def _first_usable(
        self, version: int | None, read: Callable[[int], tuple[Any, Any]], *, remember: bool = False
    ) -> tuple[Any, Any]:
        self.wait()
        found = self.versions()
        if version is not None and version not in found:
            raise InputError(
                f"There is no snapshot {version} in {self.directory}. There: "
                f"{', '.join(map(str, found)) or 'none'}."
            )
        if version is None and is_first():
            self._name_unfinished(max(found, default=-1))
        reasons = []
        for candidate in [version] if version is not None else reversed(found):
            with reported():
                try:
                    result = read(candidate)
                except DamagedError as error:
                    reasons.append(f"{self.directory / str(candidate)}: {error}")
                else:
                    self._restored = candidate if remember else self._restored
                    return result
                gc.collect()  # what the failed read left behind complains when it is freed: free it here
            self._damaged.add(candidate)
            if version is None and is_first():
                earlier = [other for other in found if other < candidate]
                then = f"using {max(earlier)} instead" if earlier else "and none is older"
                warnings.warn(
                    f"Snapshot {candidate} is damaged ({reasons[-1]}); {then}.", RuntimeWarning, stacklevel=3
                )
        if not reasons:
            raise InputError(
                f"There is no snapshot in {self.directory}. Run without --resume to start, or give another "
                "run folder."
            )
        raise InputError(
            "No usable snapshot:\n  "
            + "\n  ".join(reasons)
            + "\nGive another version or run folder, or start again."
        )

    def _name_unfinished(self, newest: int) -> None:
        for path in sorted(self.directory.glob(f"*{_TEMPORARY}*")):
            step = path.name.split(".", 1)[0]
            if step.isdigit() and int(step) > newest:
                warnings.warn(
                    f"Snapshot {step} was not finished when the run stopped ({path}); it is ignored.",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _read_texts(self, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(manifest, meta)."""
        manifest = self._read_manifest(version)
        return manifest, self._read_meta(version, manifest)

    def _read_json(self, version: int, item: str) -> Any:
        try:
            return self._reader.restore(version, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[
                item
            ]
        # Whatever is wrong with the files (missing, empty, not JSON, not UTF-8) means one thing.
        except Exception as error:
            raise DamagedError(f"{item} cannot be read: {_short(error)}") from error

    def _read_manifest(self, version: int) -> dict[str, Any]:
        sealed = self._read_json(version, "manifest")
        if not isinstance(sealed, dict) or set(sealed) != {"seal", "body"}:
            raise DamagedError("the manifest is incomplete")
        if _digest_json(sealed["body"]) != sealed["seal"]:
            raise DamagedError("the manifest is not what was saved")
        manifest = sealed["body"]
        if manifest["format"] > _FORMAT:
            raise InputError(
                f"Snapshot {version} in {self.directory} has format {manifest['format']}; this version of "
                f"jaxrl-llm reads up to {_FORMAT}. Update jaxrl-llm."
            )
        if (
            manifest["version"] != version
        ):  # going on from it would take its neighbours for the future, and delete them
            raise InputError(
                f"{self.directory / str(version)} holds snapshot {manifest['version']}: it was renamed, copied or linked there. "
                f"Rename it to {manifest['version']} again, or move it elsewhere."
            )
        return manifest

    def _read_meta(self, version: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
        meta = self._read_json(version, "meta")
        if _digest_json(meta) != manifest["meta"]:
            raise DamagedError("meta is not what was saved")
        return meta

    def _check_fit(self, version: int, manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        saved = manifest["leaves"]
        problems = [f"{name}: not in the snapshot" for name in wanted if name not in saved]
        problems += [f"{name}: only in the snapshot" for name in saved if name not in wanted]
        for name in wanted:
            if name not in saved:
                continue
            record, leaf = saved[name], wanted[name]
            if list(np.shape(leaf)) != record["shape"]:
                problems.append(
                    f"{name}: shape {record['shape']} in the snapshot, {list(np.shape(leaf))} here"
                )
            elif not castable(record, leaf):
                problems.append(f"{name}: dtype {record['dtype']} in the snapshot, {dtype_of(leaf)} here")
        if problems:
            more = f"\n  … and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise MisfitError(
                f"Snapshot {version} in {self.directory} does not fit this run ({len(problems)} leaves differ):\n  "
                + "\n  ".join(problems[:8])
                + more
                + "\nUse the model, optimiser and objective that it was saved with, or restore only its params."
            )

    def _read_leaves(
        self, version: int, manifest: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Leaves of `wanted` by path, verified, cast and put where `wanted` says."""
        records = {name: manifest["leaves"][name] for name in wanted}
        targets = {name: restore_target(records[name], leaf) for name, leaf in wanted.items()}
        full = {name: target for name, target in targets.items() if np.prod(target.shape, dtype=np.int64)}
        split: dict[str, dict[str, Any]] = {
            "params": {name: target for name, target in full.items() if name.startswith(_PARAMS)},
            "rest": {name: target for name, target in full.items() if not name.startswith(_PARAMS)},
        }
        items = {
            name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            for name, tree in split.items()
            if tree
        }
        found: dict[str, Any] = {}
        if items:
            restored = together(lambda: self._read_arrays(version, items))
            for name in items:
                found.update(restored[name])
        for name, target in targets.items():
            if name not in full:
                found[name] = np.zeros(target.shape, target.dtype)
        keyed = {name: as_key(records[name], found[name]) for name in wanted}
        actual = leaf_records(keyed)
        wrong = [name for name in wanted if actual[name]["digest"] != records[name]["digest"]]
        if wrong:
            raise DamagedError(
                f"the digest of {len(wrong)} of {len(wanted)} leaves is not the saved one: {', '.join(wrong[:3])}"
            )
        return {name: finish(keyed[name], leaf) for name, leaf in wanted.items()}

    def _read_arrays(self, version: int, items: Mapping[str, Any]) -> Any:
        try:
            with jax.transfer_guard("allow"):
                return self._reader.restore(version, args=ocp.args.Composite(**items))
        except MemoryError:
            raise
        # Orbax and TensorStore raise many types for damaged files, bare Exception among them.
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error) and "lloc" in str(error):  # device memory, not damage
                raise
            raise DamagedError(f"an array cannot be read: {_short(error)}") from error

    def _check_room(self, leaves: Mapping[str, Any]) -> None:
        need = sum(stored_bytes(leaf) for leaf in leaves.values())
        free = shutil.disk_usage(self.directory).free
        if need > free:
            self._removed()
            free = shutil.disk_usage(self.directory).free
        if need > free:
            raise SnapshotError(
                f"No room for a snapshot in {self.directory}: it needs about {need / 1e6:.0f} MB and "
                f"{free / 1e6:.0f} MB are free. {self._good()} Free some space or set a smaller keep_last."
            )

    def _failed(self, version: int, error: Exception) -> SnapshotError:
        self._saving = None
        # TensorStore says it at the end of a long message that begins with the names of files.
        full = next((words for words in _FULL if words in str(error)), None)
        reason, remedy = (
            (full, " Free some space or set a smaller keep_last.") if full else (_short(error), "")
        )
        return SnapshotError(
            f"Snapshot {version} could not be written to {self.directory}: {reason}. {self._good()}{remedy}"
        )

    def _good(self) -> str:
        newest = max(
            self._versions_here(), default=None
        )  # the other processes may have nothing to complain about
        return "No snapshot was saved before." if newest is None else f"Snapshot {newest} is intact."

    def _metric(self, version: int) -> float | None:
        if version not in self._metrics:
            try:
                self._metrics[version] = self._read_manifest(version)["metric"]
            except DamagedError:
                self._damaged.add(version)
                self._metrics[version] = None
            except InputError:  # of a newer format, or of another version: nothing to rank by
                self._metrics[version] = None
        return self._metrics[version]

    def _retain(self) -> None:
        for path in self.directory.glob(f"*{_TEMPORARY}*"):  # nothing is being saved now: left by a crash
            if is_first():
                shutil.rmtree(path, ignore_errors=True)
        versions = self.versions()
        good = [version for version in versions if version not in self._damaged]
        keep = set(good[-self.keep_last :]) | self.pinned
        if self.keep_every:
            keep |= {version for version in good if version % self.keep_every == 0}
        if self.keep_best:
            ranked = [
                (metric, v) for v in good if (metric := self._metric(v)) is not None and metric == metric
            ]
            keep |= {version for _, version in sorted(ranked)[-self.keep_best :]}
        for version in versions:
            if version not in keep:
                self._delete(version)
        do_on_first(self._remove)

    def _delete(self, version: int) -> None:
        path = self.directory / str(version)
        if on_first(path.is_symlink):  # what lies elsewhere was put there by the user, and stays
            do_on_first(path.unlink)
        elif not on_first(lambda: _renamed(path, path.with_name(f"{_DELETED}{version}"))):
            self._manager.delete(version)
        self._damaged.discard(version)
        self._metrics.pop(version, None)

    def _remove(self) -> None:
        """Removes, in a thread, the files of deleted snapshots, also of those that a process left that was killed.

        What cannot be removed is tried again after the next snapshot.
        """
        if self._removing is not None and self._removing.is_alive():
            return  # what it does not find is removed the next time
        if left := sorted(self.directory.glob(f"{_DELETED}*")):
            self._removing = threading.Thread(target=_remove_all, args=(left,), daemon=True)
            self._removing.start()

    def _removed(self) -> None:
        """Waits until the files of all deleted snapshots are removed."""
        for _ in range(2):  # the thread that runs may have begun before the last one was deleted
            if self._removing is not None:
                self._removing.join()
                self._remove()


def _remove_all(folders: Sequence[pathlib.Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _renamed(path: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether a folder could be given another name; mounted buckets may not know how."""
    try:
        path.rename(other)
    except OSError:  # or the other one is there and has files
        return False
    return True


def locate(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Folder of snapshots and version for what a user gives: a run, its `snapshots`, or one snapshot.

    Returns:
      (directory, version); version is None when the newest is meant.

    Raises:
      InputError: there is nothing like that.
    """
    path = pathlib.Path(path).expanduser().absolute()
    if path.name.isdigit() and (path / "manifest").exists():
        return path.parent, int(path.name)
    for directory in (path / "snapshots", path):
        if directory.is_dir() and any(
            child.name.isdigit() and child.is_dir() for child in directory.iterdir()
        ):
            return directory, None
    raise InputError(
        f"No snapshot at {path}. Give a run folder, its `snapshots` folder, or one version in it "
        "(run/snapshots/20)."
    )


def _probe(directory: pathlib.Path) -> None:
    """Makes the folder and writes one file, so that a folder that cannot be used fails before the run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        raise InputError(
            f"Snapshots cannot be written to {directory}: {error.strerror or error}. Give another run folder "
            "with --run, or make this one writable."
        ) from error


def _check_shared(directory: pathlib.Path) -> None:
    """Raises InputError unless every process of the run sees the same folder."""
    if not several():
        return
    written = on_first(lambda: tempfile.mkstemp(dir=directory, prefix=".shared-")[1])

    def look() -> None:
        if not os.path.exists(written):
            raise InputError(
                f"Process {jax.process_index()} does not see in {directory} what process 0 wrote there. Several processes need a "
                "run folder that all of them share: a network file system, or a mounted bucket."
            )

    try:
        together(look)
    finally:
        if is_first():
            os.unlink(written)


def _handlers(**options: Any) -> dict[str, Any]:
    # Compression saves a tenth of the space of float arrays and doubles the processor time.
    return {
        "params": ocp.PyTreeCheckpointHandler(use_compression=False, **options),
        "rest": ocp.PyTreeCheckpointHandler(use_compression=False, **options),
        "meta": ocp.JsonCheckpointHandler(**options),
        "manifest": ocp.JsonCheckpointHandler(**options),
    }


def _reader(directory: pathlib.Path) -> ocp.CheckpointManager:
    """Reads a folder without waiting for other processes."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader-{index}"
    )
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=None,
            create=False,
            read_only=True,
            save_root_metadata=False,
            multiprocessing_options=alone,
        ),
        item_handlers=_handlers(multiprocessing_options=alone),
    )


def _json_copy(meta: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The meta of a snapshot must be a JSON object: {error}. Convert arrays to lists, paths to text."
        ) from error


def _digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split("See full TensorStore details")[0].split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
