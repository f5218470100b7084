"""Snapshots: exact round trips, damage that is noticed, retention, and resume bit for bit."""

from __future__ import annotations

import gc
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.runtime import collectives_need_compiling
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.snapshots.store import SnapshotError, SnapshotStore, locate
from jaxrl_llm.types import LearnerState

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adam(
        optax.join_schedules([optax.linear_schedule(0.0, 1e-3, 4), optax.constant_schedule(1e-3)], [4])
    ),
)


def make_params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "embed": jax.random.normal(keys[0], (32, 8)),
        "layers": {"wq": jax.random.normal(keys[1], (2, 8, 8)), "norm": jnp.ones((2, 8), jnp.bfloat16)},
    }


def make_state(seed=0, version=0):
    params = make_params(seed)
    return LearnerState(
        version=jnp.asarray(version, jnp.int32),
        params=params,
        opt_state=OPTIMIZER.init(params),
        objective_state={"adaptive_kl": {"coef": jnp.asarray(0.1)}, "nothing": {}},
        key=jax.random.key(seed + 7),
        skipped=jnp.asarray(0, jnp.int32),
    )


def bits(tree):
    """Every leaf as bytes, with its type, so that equality means equality of bits."""
    out = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        out.append((str(np.asarray(leaf).dtype), np.shape(leaf), np.asarray(leaf).tobytes()))
    return out


def flip_bit(folder: pathlib.Path, leaf, at: float) -> None:
    """Flips one bit inside the stored bytes of an array."""
    data = np.asarray(leaf).tobytes()
    found = 0
    for path in folder.rglob("d/*"):
        stored = bytearray(path.read_bytes())
        if (start := stored.find(data)) >= 0:
            stored[start + int(len(data) * at)] ^= 1
            path.write_bytes(bytes(stored))
            found += 1
    assert found, "the bytes of the array are not in the files"


def biggest_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


# --------------------------------------------------------------------------------- round trips


def test_round_trip_keeps_structure_types_and_bits(tmp_path):
    state = {
        "params": make_params(),
        "opt_state": OPTIMIZER.init(make_params()),
        "none": None,
        "empty": {},
        "zero_size": jnp.zeros((0, 3), jnp.int8),
        "key": jax.random.split(jax.random.key(3), 2),
        "rbg": jax.random.key(3, impl="rbg"),
        "raw_key": jax.random.PRNGKey(1),
        "count": 7,
        "rate": 0.1,
        "flag": True,
        "host": np.arange(3, dtype=np.int64),
        "host_scalar": np.float64(0.3),
        "zero_d": jnp.asarray(5, jnp.int32),
        "nan": jnp.asarray([jnp.nan, -0.0, jnp.inf]),
        "tuple": (jnp.ones(2), [jnp.zeros(1, jnp.bool_)]),
        "a/b%": {1: jnp.ones(1)},
    }
    meta = {"config": {"seed": 1}, "cursor": [1, 2, {"x": 0.1}], "text": "é"}
    with SnapshotStore(tmp_path / "s") as store:
        store.save(3, state, meta)
        store.wait()
        restored, found = store.restore(like=state)
    assert found == {**meta, "version": 3}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert isinstance(new, jax.Array) if isinstance(old, jax.Array) else type(new) is type(old)
    assert jax.random.key_impl(restored["rbg"]) == jax.random.key_impl(state["rbg"])


def test_restore_onto_an_abstract_tree_another_mesh_and_dtype(tmp_path):
    collectives_need_compiling(jax.devices())
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    source = NamedSharding(mesh, PartitionSpec("a", "b"))
    other = NamedSharding(jax.make_mesh((8,), ("c",)), PartitionSpec(None, "c"))
    wide = jax.device_put(jnp.arange(64.0).reshape(8, 8) / 3, source)
    state = {"params": {"w": wide, "h": wide.astype(jnp.bfloat16)}, "n": jnp.asarray(1)}
    like = {
        "params": {
            "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other),
            "h": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other),
        },
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with SnapshotStore(tmp_path) as store:
        store.save(1, state, {})
        restored, _ = store.restore(like=like)
        params, _ = store.restore_params(like=like["params"])
    assert restored["params"]["w"].sharding == other
    assert params["w"].sharding == other
    np.testing.assert_array_equal(np.asarray(restored["params"]["w"]), np.asarray(wide))
    np.testing.assert_array_equal(
        np.asarray(restored["params"]["h"]), np.asarray(wide.astype(jnp.bfloat16).astype(jnp.float32))
    )


def test_params_only_without_a_like(tmp_path):
    state = make_state()
    with SnapshotStore(tmp_path / "run" / "snapshots") as store:
        store.save(2, state, {"config": {"model": "tiny"}})
    directory, version = locate(tmp_path / "run")
    assert (directory, version) == (tmp_path / "run" / "snapshots", None)
    assert locate(directory / "2") == (directory, 2)
    with SnapshotStore(directory, read_only=True) as store:
        params, meta = store.restore_params()
        assert store.meta() == meta == {"config": {"model": "tiny"}, "version": 2}
        with pytest.raises(InputError, match="read-only"):
            store.save(3, state, {})
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    assert bits(params) == bits(state.params)
    assert params["layers"]["norm"].dtype == jnp.bfloat16
    assert fingerprint(params) == fingerprint(state.params)


def test_save_is_safe_against_donation_right_after_it_returns(tmp_path):
    state = {"params": {"w": jnp.arange(4_000_000.0), "b": jnp.arange(5.0)}, "n": jnp.asarray(3)}
    expected = bits(state)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    with SnapshotStore(tmp_path, keep_last=5) as store:
        for version in range(3):
            current = jax.tree.map(lambda x: x + 0, state)
            store.save(version, current, {})
            for _ in range(3):
                current = step(current)
            jax.block_until_ready(current)
            del current
        for version in range(3):
            assert bits(store.restore(version, like=state)[0]) == expected


def test_works_under_a_transfer_guard(tmp_path):
    state = make_state()
    with jax.transfer_guard("disallow"), SnapshotStore(tmp_path) as store:
        store.save(1, state, {})
        restored, _ = store.restore(like=state)
    assert bits(restored) == bits(state)


# -------------------------------------------------------------------------------------- damage


def saved_twice(path):
    with SnapshotStore(path) as store:
        store.save(1, make_state(1, 1), {"n": 1})
        store.save(2, make_state(2, 2), {"n": 2})


@pytest.mark.parametrize("item", ["params", "rest"])
@pytest.mark.parametrize("at", [0.0, 0.37, 0.999])
def test_one_flipped_bit_is_noticed_and_the_one_before_is_used(tmp_path, item, at):
    noise = jax.random.normal(jax.random.key(5), (64, 16))
    states = [{"params": {"w": noise + n}, "moments": {"w": noise - n}, "n": n} for n in (0, 1, 2)]
    with SnapshotStore(tmp_path) as store:
        store.save(1, states[1], {"n": 1})
        store.save(2, states[2], {"n": 2})
    flip_bit(tmp_path / "2" / item, states[2]["params" if item == "params" else "moments"]["w"], at)
    with SnapshotStore(tmp_path) as store:
        with pytest.warns(RuntimeWarning, match=r"Snapshot 2 is damaged .*digest .*/w.*using 1 instead"):
            state, meta = store.restore(like=states[0])
        assert meta == {"n": 1, "version": 1}
        assert bits(state) == bits(states[1])
        with pytest.raises(InputError, match="No usable snapshot"):
            store.restore(2, like=states[0])
        if item == "rest":  # the parameters of the damaged one are whole
            assert bits(store.restore_params()[0]) == bits(states[2]["params"])
        store.save(2, states[0], {"n": 3})  # the run goes on and replaces it
        assert store.restore(like=states[0])[1] == {"n": 3, "version": 2}


@pytest.mark.parametrize(
    "what", ["truncate", "delete_arrays", "empty_folder", "manifest", "meta", "no_manifest"]
)
def test_other_damage_falls_back(tmp_path, what):
    saved_twice(tmp_path)
    broken = tmp_path / "2"
    if what == "truncate":
        file = biggest_file(broken / "params")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif what == "delete_arrays":
        for file in (broken / "rest" / "d").iterdir():
            file.unlink()
    elif what == "empty_folder":
        (tmp_path / "3").mkdir()
    elif what in ("manifest", "meta"):
        file = broken / what / "metadata"
        file.write_text(file.read_text().replace("2", "3", 1))
    else:
        (broken / "manifest" / "metadata").write_bytes(b"")
    with SnapshotStore(tmp_path) as store:
        with pytest.warns(RuntimeWarning, match="is damaged"):
            _, meta = store.restore(like=make_state())
        assert meta == ({"n": 2, "version": 2} if what == "empty_folder" else {"n": 1, "version": 1})


_NOISY = """
import pathlib, sys
import jax
from jaxrl_llm.snapshots.store import SnapshotStore
folder = pathlib.Path(sys.argv[1])
state = {"params": {f"w{i}": jax.random.normal(jax.random.key(i), (100, 100)) for i in range(5)}}
with SnapshotStore(folder) as store:
    store.save(1, state, {})
    store.save(2, state, {})
for file in (folder / "2" / "params").rglob("d/*"):
    file.write_bytes(file.read_bytes()[:1000])
with SnapshotStore(folder) as store:
    store.restore(like=state)
"""


@pytest.mark.parametrize("keep_the_original", [False, True])
def test_a_snapshot_under_the_name_of_another_is_refused_and_nothing_is_deleted(tmp_path, keep_the_original):
    with SnapshotStore(tmp_path, keep_best=1) as store:
        for version in (1, 2):
            store.save(version, make_state(version, version), {})
    moved = tmp_path / "5"
    (shutil.copytree if keep_the_original else shutil.move)(tmp_path / "2", moved)
    with SnapshotStore(tmp_path, keep_best=1) as store:
        for read in (
            lambda: store.restore(like=make_state()),
            lambda: store.restore_params(5),
            store.meta,
        ):
            with pytest.raises(InputError, match=r"/5 holds snapshot 2: .*Rename it to 2 again"):
                read()
        store.save(7, make_state(7, 7), {}, metric=1.0)
    assert (moved / "manifest").is_dir()


def test_a_snapshot_that_was_moved_and_linked_is_used_and_retention_takes_the_link_only(tmp_path):
    with SnapshotStore(tmp_path / "store") as store:
        store.save(1, make_state(1, 1), {})
        store.wait()
        (tmp_path / "store" / "1").rename(tmp_path / "elsewhere")
        (tmp_path / "store" / "1").symlink_to(tmp_path / "elsewhere")
        state, _ = store.restore(like=make_state())
        assert bits(state) == bits(make_state(1, 1))
        for version in (2, 3):
            store.save(version, make_state(), {})
        store.wait()
        assert store.versions() == [2, 3] and not (tmp_path / "store" / "1").is_symlink()
    assert (tmp_path / "elsewhere" / "manifest").is_dir()


def test_damage_is_told_in_one_warning(tmp_path):
    """Python may also report, at its own time, that tasks which Orbax abandoned were freed."""
    done = subprocess.run(
        [sys.executable, "-c", _NOISY, str(tmp_path)], capture_output=True, timeout=120, text=True
    )
    assert done.returncode == 0 and done.stdout == ""
    told = [line for line in done.stderr.splitlines() if "RuntimeWarning: Snapshot 2 is damaged" in line]
    assert len(told) == 1 and "using 1 instead" in told[0]


def test_nothing_usable_is_an_input_error(tmp_path):
    with (
        SnapshotStore(tmp_path / "empty") as store,
        pytest.raises(InputError, match="There is no snapshot in"),
    ):
        store.restore(like=make_state())
    saved_twice(tmp_path / "bad")
    for version in ("1", "2"):
        (tmp_path / "bad" / version / "manifest" / "metadata").write_text("{")
    with SnapshotStore(tmp_path / "bad") as store, pytest.warns(RuntimeWarning, match="damaged"):
        with pytest.raises(InputError, match="No usable snapshot"):
            store.restore(like=make_state())
    with SnapshotStore(tmp_path / "bad") as store, pytest.raises(InputError, match=r"no snapshot 9 .*1, 2"):
        store.restore(9, like=make_state())
    with pytest.raises(InputError, match="No snapshot at"):
        locate(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no snapshot folder"):
        SnapshotStore(tmp_path / "nowhere", read_only=True)


def test_a_tree_that_does_not_fit_is_an_input_error_and_not_damage(tmp_path):
    saved_twice(tmp_path)
    state = make_state()
    wrong_shape = state.replace(params={**state.params, "embed": jnp.zeros((33, 8))})
    with_reference = state.replace(reference=state.params)
    wrong_kind = state.replace(skipped=jnp.asarray(0.0))
    with SnapshotStore(tmp_path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            InputError, match=r"params/embed: shape \[32, 8\] in the snapshot, \[33, 8\] here"
        ):
            store.restore(like=wrong_shape)
        with pytest.raises(InputError, match="reference/embed: not in the snapshot"):
            store.restore(like=with_reference)
        with pytest.raises(InputError, match="skipped: dtype int32 in the snapshot, float32 here"):
            store.restore(like=wrong_kind)
        with pytest.raises(InputError, match="only in the snapshot"):
            store.restore(like=state.replace(opt_state=()))


_KILLED = """
import os, signal, sys
import jax.numpy as jnp
from jaxrl_llm.snapshots.store import SnapshotStore
store = SnapshotStore(sys.argv[1])
state = {"params": {"w": jnp.arange(3_000_000.0)}, "n": 1}
store.save(1, state, {"n": 1})
store.wait()
store.save(2, {"params": {"w": state["params"]["w"] + 1}, "n": 2}, {"n": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_while_saving_leaves_the_snapshot_before(tmp_path):
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    like = {"params": {"w": jnp.zeros(3_000_000)}, "n": 0}
    with SnapshotStore(tmp_path) as store:
        assert store.versions() == [1]
        with pytest.warns(RuntimeWarning, match="Snapshot 2 was not finished"):
            state, meta = store.restore(like=like)
        assert meta == {"n": 1, "version": 1}
        np.testing.assert_array_equal(
            np.asarray(state["params"]["w"]), np.arange(3_000_000, dtype=np.float32)
        )
        store.save(2, {**state, "n": 2}, {"n": 2})
        store.wait()
        assert store.versions() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


_FULL = """
import gc, resource, sys, time
import jax, jax.numpy as jnp
from jaxrl_llm.snapshots.store import SnapshotError, SnapshotStore
store = SnapshotStore(sys.argv[1])
noise = {"params": {"w": jax.random.bits(jax.random.key(0), (500_000,), jnp.uint32)}}
store.save(1, noise, {"n": 1})
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    store.save(2, noise, {"n": 2})
    time.sleep(1)  # as a train step: the threads fail before anybody waits for them
    gc.collect()
    store.wait()
except SnapshotError as error:
    print("CAUGHT", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("META", store.restore(like=noise)[1])
store.save(2, noise, {"n": 3})
store.wait()
print("META", store.restore(like=noise)[1])
"""


def test_a_write_that_fails_is_reported_and_the_snapshot_before_is_intact(tmp_path):
    """A limit on the size of files stands in for a disk that fills up while a snapshot is written."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FULL, str(tmp_path)],
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # our message alone: no tracebacks of the threads that write
    assert "CAUGHT Snapshot 2 could not be written" in done.stdout
    assert "File too large. Snapshot 1 is intact. Free some space" in done.stdout
    assert "META {'n': 1, 'version': 1}" in done.stdout and "META {'n': 3, 'version': 2}" in done.stdout


def test_errors_of_others_are_still_shown_after_a_save(tmp_path, monkeypatch):
    """Only what Orbax leaves behind is silenced: a failing destructor of the user is not."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    with SnapshotStore(tmp_path) as store:
        store.save(1, make_state(), {})

    class Broken:
        def __init__(self, words):
            self.words = words

        def __del__(self):
            raise RuntimeError(self.words)

    for words in ("mine", "Event loop is closed"):
        Broken(words)
        gc.collect()
    assert seen == ["mine"]


def test_no_room_is_said_before_writing(tmp_path, monkeypatch):
    with SnapshotStore(tmp_path) as store:
        store.save(1, make_state(), {})
        store.wait()
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1))
        with pytest.raises(SnapshotError, match=r"No room for a snapshot .*Snapshot 1 is intact"):
            store.save(2, make_state(), {})
        assert store.versions() == [1]


def test_an_unusable_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written to"):
        SnapshotStore(tmp_path / "file" / "snapshots")
    with pytest.raises(InputError, match="keep_last must be at least 1, got 0"):
        SnapshotStore(tmp_path, keep_last=0)


# ----------------------------------------------------------------------------------- retention


def test_retention(tmp_path):
    state = {"params": {"w": jnp.ones(3)}}
    metrics = {1: 0.1, 2: 0.9, 3: 0.5, 4: float("nan"), 5: 0.2, 6: None, 7: 0.3, 8: 0.1, 9: 0.1}
    with SnapshotStore(tmp_path, keep_last=2, keep_every=4, keep_best=1) as store:
        for version, metric in metrics.items():
            if version == 6:
                store.pinned = {5}
            store.save(version, state, {}, metric=metric)
        store.wait()
        assert store.versions() == [2, 4, 5, 8, 9]
        store.pinned = set()
        store.save(10, state, {})
        store.wait()
        assert store.versions() == [2, 4, 8, 9, 10]
        assert store.latest() == 10
    with SnapshotStore(tmp_path, keep_last=1, keep_best=1) as store:  # metrics are read back
        store.save(11, state, {}, metric=0.2)
        store.wait()
        assert store.versions() == [2, 11]


def test_files_of_deleted_snapshots_are_removed_without_waiting(tmp_path, monkeypatch):
    state, go, removed, remove = {"params": {"w": jnp.ones(3)}}, threading.Event(), [], shutil.rmtree

    def slowly(path, **more):
        if pathlib.Path(path).name.startswith(".deleted-"):
            go.wait(60)
            removed.append(pathlib.Path(path).name)
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    (tmp_path / ".deleted-7" / "params").mkdir(parents=True)  # left by a process that was killed
    with SnapshotStore(tmp_path, keep_last=1) as store:
        for version in (1, 2):
            store.save(version, state, {})
        store.wait()
        assert store.versions() == [2] and not removed
        assert (tmp_path / ".deleted-1" / "manifest").is_dir()
        restored, _ = store.restore(like=state)
        assert bits(restored) == bits(state)
        free = iter([1, 10**9])  # bytes; the room that the removed ones give back counts
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=next(free)))
        go.set()
        store.save(3, state, {})
        assert sorted(removed) == [".deleted-1", ".deleted-7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]


def test_a_folder_that_cannot_be_renamed_is_deleted_where_it_is(tmp_path, monkeypatch):
    def refused(self, target):
        raise OSError("this bucket renames no folders")

    state = {"params": {"w": jnp.ones(3)}}
    monkeypatch.setattr(pathlib.Path, "rename", refused)
    with SnapshotStore(tmp_path, keep_last=1) as store:
        for version in (1, 2):
            store.save(version, state, {})
        store.wait()
        assert store.versions() == [2] and [path.name for path in tmp_path.iterdir()] == ["2"]


def test_versions_are_never_overwritten_except_by_a_run_that_went_back(tmp_path):
    state = {"params": {"w": jnp.ones(3)}}
    with SnapshotStore(tmp_path, keep_last=9) as store:
        for version in (1, 2, 3):
            store.save(version, state, {"n": version})
        with pytest.raises(InputError, match="Snapshot 2 exists"):
            store.save(2, state, {})
    with SnapshotStore(tmp_path, keep_last=9) as store:
        store.restore(1, like=state)
        store.save(2, state, {"n": "again"})
        store.wait()
        assert store.meta(2) == {"n": "again", "version": 2}
        with pytest.raises(InputError, match="Snapshot 1 exists"):
            store.save(1, state, {})
        assert store.discard_after(2) == [3]
        assert store.versions() == [1, 2]


def test_meta_must_be_json_and_secrets_do_not_reach_it(tmp_path, monkeypatch):
    """Case X04."""
    monkeypatch.setenv("WANDB_API_KEY", "fakekey456")
    state = {"params": {"w": jnp.ones(3)}}
    with SnapshotStore(tmp_path) as store:
        with pytest.raises(InputError, match="must be a JSON object"):
            store.save(1, state, {"x": np.ones(2)})
        with pytest.raises(InputError, match="must be a JSON object"):
            store.save(1, state, {"x": float("nan")})
        config = {"logger": {"api_key": "fakekey789", "url": "http://user:pw@host"}, "note": "fakekey456"}
        store.save(1, state, {"config": config})
    text = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())
    assert "fakekey" not in text and ":pw@" not in text
    assert (
        json.loads((tmp_path / "1" / "meta" / "metadata").read_text())["config"]["logger"]["api_key"] == "***"
    )


# -------------------------------------------------------------------------- resume, bit for bit


@jax.jit
def train_step(state: LearnerState) -> LearnerState:
    """A step whose gradient depends on the state's own key: resume must restore the stream of noise."""
    key, draw = jax.random.split(state.key)
    noise = jax.random.normal(draw, (32, 8))

    def loss(params):
        h = jnp.tanh((params["embed"] - noise) @ params["layers"]["wq"][0] @ params["layers"]["wq"][1])
        return jnp.mean(h * params["layers"]["norm"][0])

    grads = jax.grad(loss)(state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    return state.replace(
        version=state.version + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        key=key,
    )


def test_k03_k05_resume_at_every_step_equals_the_uninterrupted_run(tmp_path):
    """Cases K03 and K05: key, moments, counts and schedule position come back bit for bit."""
    states = [make_state()]
    for _ in range(6):
        states.append(train_step(states[-1]))
    with SnapshotStore(tmp_path, keep_last=9) as store:
        for version in range(1, 6):
            store.save(version, states[version], {})
    for version in range(1, 6):
        with SnapshotStore(tmp_path, read_only=True) as store:
            state, _ = store.restore(version, like=jax.eval_shape(make_state))
        for expected in states[version + 1 :]:
            state = train_step(state)
            assert bits(state) == bits(expected)
    assert bits(states[1].key) != bits(states[4].key)
    count = optax.tree_utils.tree_get(states[3].opt_state, "mu")
    assert any(np.any(np.asarray(leaf, np.float32) != 0) for leaf in jax.tree.leaves(count))


def test_k01_the_cursor_in_meta_survives_a_save_at_any_step(tmp_path):
    """Case K01 at the level of the store: 8 samples, batch 2, 2 epochs, saved at each step 1..8."""

    def run(start, stop, store=None):
        order = []
        for step in range(start, stop):
            epoch, offset = divmod(step * 2, 8)
            order.append(np.random.default_rng(epoch).permutation(8)[offset : offset + 2].tolist())
            if store is not None:
                store.save(step + 1, {"params": {"w": jnp.ones(1)}}, {"cursor": {"step": step + 1}})
        return order

    with SnapshotStore(tmp_path, keep_last=9) as store:
        whole = run(0, 8, store)
        store.wait()
        for saved in range(1, 9):
            cursor = store.meta(saved)["cursor"]["step"]
            assert whole[:saved] + run(cursor, 8) == whole


def test_n17_the_f32_master_survives_and_equals_the_uninterrupted_run(tmp_path):
    """Case N17: 1000 updates of 1e-5; saved at 500. bf16 alone would not move at all."""

    @jax.jit
    def advance(state):
        def body(_, s):
            return {"params": {"w": s["params"]["w"] - jnp.float32(1e-5)}, "n": s["n"] + 1}

        return jax.lax.fori_loop(0, 500, body, state)

    start = {"params": {"w": jnp.asarray(1.0)}, "n": jnp.asarray(0)}
    half = advance(start)
    whole = advance(half)
    with SnapshotStore(tmp_path) as store:
        store.save(500, half, {})
        restored, _ = store.restore(like=jax.eval_shape(lambda: start))
    assert restored["params"]["w"].dtype == jnp.float32
    assert float(restored["params"]["w"]) != float(restored["params"]["w"].astype(jnp.bfloat16))
    resumed = advance(restored)
    assert bits(resumed) == bits(whole)
    assert abs(float(resumed["params"]["w"]) - 0.98999) < 2e-5
    assert float(resumed["params"]["w"].astype(jnp.bfloat16)) == 0.98828125
    low = jnp.asarray(1.0, jnp.bfloat16)
    assert float(low - jnp.bfloat16(1e-5)) == 1.0


def test_no_pickle_in_the_package():
    """Case X01: nothing in the package can run code from a file that it loads."""
    package = pathlib.Path(__file__).parents[2] / "jaxrl_llm"
    banned = ("pickle", "dill", "marshal", "joblib", "shelve", "allow_pickle=True", "trust_remote_code=True")
    files = sorted(package.rglob("*.py"))
    assert len(files) > 10
    found = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            code = line.split("#", 1)[0]
            if any(f"import {word}" in code or f"{word}." in code for word in banned[:5]) or any(
                word in code for word in banned[5:]
            ):
                found.append(f"{file.relative_to(package)}:{number}: {line.strip()}")
    assert not found, "\n".join(found) + "\n" + textwrap.dedent("Use safetensors, JSON or Orbax instead.")
