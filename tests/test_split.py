"""Devices that only sample: what is computed does not depend on where, and stopping changes nothing."""

import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TINY_YAML, figures, killed, learned_something, params, run_to_the_end, same_run

import jaxrl_llm.train as loop
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.replay import replay
from jaxrl_llm.rollout.stream import Stream
from jaxrl_llm.sampler import decode
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.train import train

ASYNC_YAML = TINY_YAML.with_name("tiny_async.yaml")
SHORT = ("steps=6", "evaluation.items=8", "evaluation.every=3", "snapshots.every=2", "snapshots.keep_last=9")


def config(*overrides, file=ASYNC_YAML):
    return load_config(file, [*SHORT, *overrides])


@pytest.fixture
def served(monkeypatch):
    """Versions that the sampler was given; each time every tensor of it is compared with the learner's."""
    versions, serve = [], Stream.serve

    def serving(self, params, version):
        serve(self, params, version)
        theirs, mine = self._engine._weights, decode.prepare_for_sampling(params, TINY)
        jax.tree.map(np.testing.assert_array_equal, theirs, mine)
        assert all(leaf.devices() == {jax.devices()[1]} for leaf in jax.tree.leaves(theirs))
        assert self._engine.version == version
        assert self._engine.fingerprint == fingerprint(params)
        versions.append(version)

    monkeypatch.setattr(Stream, "serve", serving)
    return versions


@pytest.mark.slow
def test_d05_the_sampler_has_the_weights_of_every_train_step(tmp_path, served):
    # min_tokens is more than the probes of the parity certificate have
    short = (
        "steps=2",
        "evaluation.items=0",
        "snapshots.every=0",
        "mesh.sampler=1",
        "rollout={max_tokens: 20, min_tokens: 18}",
    )
    run_to_the_end(config(*short, file=TINY_YAML), tmp_path / "run")
    assert served == [0, 1]


@pytest.mark.slow
def test_a_synchronous_run_is_the_same_on_devices_of_its_own(tmp_path):
    """Not a bit of any figure, sample or weight differs from the run that samples where it learns."""
    here = run_to_the_end(config(file=TINY_YAML), tmp_path / "here")
    there = run_to_the_end(config("mesh.sampler=1", file=TINY_YAML), tmp_path / "there")
    rows = [
        {key: row[key] for key in other} for row, other in zip(figures(there), figures(here), strict=True)
    ]
    assert rows == figures(here)
    assert (there / "samples.jsonl").read_bytes() == (here / "samples.jsonl").read_bytes()
    jax.tree.map(np.testing.assert_array_equal, params(there), params(here))
    assert learned_something(there)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.sampler=8"], "8 devices beside the 1 of the learner .* are 9, and there are 8"),
        (["mesh={data: 4, fsdp: 2, sampler: 1}"], "beside the 8 of the learner .* are 9"),
        (["mesh.sampler=-1"], "mesh.sampler"),
    ],
)
def test_devices_that_there_are_not(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        train(config(*overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An asynchronous run that samples on a second device while it learns."""
    return run_to_the_end(config("mesh.sampler=1"), tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.slow
def test_d05_every_version_but_the_last_is_sampled_from(tmp_path, served):
    run_to_the_end(
        config("mesh.sampler=1", "steps=4", "evaluation.items=0", "snapshots.every=0"), tmp_path / "run"
    )
    assert served == [0, 0, 1, 2]  # the first batch, and then the next ones, under the weights before


@pytest.mark.slow
def test_the_batch_of_a_step_is_sampled_under_the_weights_before(whole):
    rows = figures(whole)[1:]
    assert rows[0]["staleness/age_max"] == 0
    assert all(row["staleness/age_0"] == 0 for row in rows[1:])
    assert all(1 <= row["staleness/age_max"] <= 4 for row in rows[1:])
    assert [row["rollout/barrier"] for row in rows] == [0, 0, 1, 0, 1, 0]


@pytest.mark.slow
def test_where_it_samples_changes_no_bit(whole, tmp_path, monkeypatch):
    """The same schedule on the device of the learner; it then samples from a copy, since updates consume the weights."""
    prepare = decode.prepare_for_sampling
    monkeypatch.setattr(loop, "sampler_devices", lambda config: jax.devices()[: config.mesh.sampler])
    monkeypatch.setattr(
        decode, "prepare_for_sampling", lambda params, *a: prepare(jax.tree.map(jnp.copy, params), *a)
    )
    same_run(run_to_the_end(config("mesh.sampler=1"), tmp_path / "run"), whole)


@pytest.mark.slow
def test_a_mesh_that_learns_and_one_that_samples(tmp_path, whole):
    """Two devices each: the samples of the first step are those of one device, whatever engine has them."""
    sets = ("mesh={data: 2, sampler: 2}", "steps=2", "evaluation.items=0", "snapshots.every=0")
    folder = run_to_the_end(config(*sets), tmp_path / "run")

    def first(run):
        samples = [s for s in read_jsonl(run / "samples.jsonl") if s["version"] == 1]
        return {(s["uid"], s["completion"], s["reward"]) for s in samples}

    assert len(first(whole)) == 16  # those that are written of a step
    assert first(folder) == first(whole)
    assert figures(folder)[-1]["staleness/age_max"] == 1


@pytest.mark.slow
def test_killed_it_goes_on_as_if_it_had_not_been(whole, tmp_path):
    chance, folder = random.Random(3), tmp_path / "run"
    settings = (*SHORT, "mesh.sampler=1")
    seed = chance.randrange(99)
    killed(folder, "anywhere", 3, resume=False, seed=seed, config=settings, file=ASYNC_YAML)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Snapshot .* was not finished", RuntimeWarning)
        assert train(config("mesh.sampler=1"), folder, resume=True) == 0
    same_run(folder, whole)
    assert (folder / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    assert replay(copy, 4, 6).difference is None
