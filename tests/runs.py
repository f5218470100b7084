"""What tests of whole runs share: reading and comparing them, and killing them."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np

from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.train import train

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"
SHORT = ("steps=6", "evaluation.items=8", "evaluation.every=3", "snapshots.every=2")


def figures(folder):
    """The rows of metrics.jsonl without what depends on the clock or on memory, as written."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def same_run(folder, other):
    """Asserts that two runs computed the same: figures, samples and weights, bit for bit."""
    assert figures(folder) == figures(other)
    assert (folder / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for mine, theirs in zip(jax.tree.leaves(params(folder)), jax.tree.leaves(params(other)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def params(folder, version=None):
    with SnapshotStore(folder / "snapshots", read_only=True) as store:
        return store.restore_params(version)[0]


def learned_something(folder):
    """Whether most train steps had a gradient: otherwise equal runs prove nothing."""
    norms = [row["optimizer/grad_norm"] for row in figures(folder)[1:]]
    return sum(n > 0 for n in norms) > len(norms) / 2


def run_to_the_end(config, folder):
    assert train(config, folder) == 0
    return folder


# Starts or resumes a run and kills its own process: before or while a snapshot is saved, or at a random
# moment of the steps after the row of `version` (which must not be the first: that one compiles).
DRIVER = """
import json, os, random, signal, sys, threading, time
import jaxrl_llm.train as loop
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import MetricsWriter

a = json.loads(sys.argv[1])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
write, save, chance = MetricsWriter.write, loop.Run.save, random.Random(a["seed"])

def writing(self, row):
    out = write(self, row)
    if a["where"] == "anywhere" and row["version"] == a["version"]:
        threading.Timer(chance.uniform(0, a["steps"] * row["time/total"]), die).start()
    return out

def saving(self, *args):
    if self.version == a["version"] and a["where"] == "before saving":
        die()
    save(self, *args)
    if self.version == a["version"] and a["where"] == "while saving":
        die()

MetricsWriter.write, loop.Run.save = writing, saving
config = load_config(a["config"], a["overrides"])
sys.exit(loop.train(config, loop.pathlib.Path(a["folder"]), resume=a["resume"]))
"""


def in_a_process(args, **more):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def killed(folder, where, version, *, resume, seed=0, steps=1.5, config=SHORT, file=TINY_YAML):
    """Runs a config until it kills itself, at most so many `steps` after `version`."""
    settings = {
        "where": where,
        "version": version,
        "seed": seed,
        "steps": steps,
        "resume": resume,
        "folder": str(folder),
        "config": str(file),
        "overrides": config,
    }
    process = in_a_process(["-c", DRIVER, json.dumps(settings)])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
