"""`jaxrl parity` and exact log-probs in a run, on the tiny model."""

import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm import cli
from jaxrl_llm.assembly import build_sampler, build_task, certify_policy, configured_model, sampling_params
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.score import make_score
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.train import train

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"
FEW = ("--n", "1", "--new-tokens", "8")


@pytest.fixture
def jaxrl(capsys):
    """jaxrl(*arguments) -> (exit code, standard output, standard error), in this process."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def test_the_certificate_as_json_and_in_words(jaxrl):
    code, out, _ = jaxrl("parity", TINY_YAML, *FEW, "--json")
    found = json.loads(out)
    assert code == 0 and found["passed"] and found["tokens"] == 64
    assert 0 < found["max_gap"] < 2e-4 and found["limits"] == {"max_gap": 2e-4, "mean_gap": None}
    assert sum(found["histogram"]["0-15"].values()) == 64
    assert found["sampler"] == {"slots": 16, "page_size": 64} and found["exact_max_gap"] is None
    code, out, _ = jaxrl("parity", TINY_YAML, *FEW, "--max-gap", "0")
    assert code == 1 and out.startswith("parity FAILED") and found["fingerprint"] in out


@pytest.mark.slow
def test_a_truncated_policy_is_compared_over_what_it_was_drawn_from(jaxrl):
    code, out, _ = jaxrl("parity", TINY_YAML, *FEW, "--set", "rollout.top_p=0.7", "--json")
    found = json.loads(out)
    assert code == 0 and found["passed"] and 0 < found["max_gap"] < 2e-4


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((TINY_YAML, "--set", "sampler.slots=1"), "sampler.slots"),
        ((TINY_YAML, "--set", "learner.exact=yes"), "learner.exact"),
        ((TINY_YAML, "--set", "learner.exact=score", "--set", "mesh.data=2"), "one device"),
        ((TINY_YAML, "--n", "0"), "--n"),
        ((TINY_YAML, "--new-tokens", "60"), "model.max_context 64"),
        ((TINY_YAML, "--max-gap", "-1"), "--max-gap"),
        ((), "--snapshot"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(jaxrl, monkeypatch, arguments, part):
    def forbidden(*args, **more):
        raise AssertionError("something was started")

    monkeypatch.setattr("jaxrl_llm.sampler.Sampler.generate", forbidden)
    code, out, err = jaxrl("parity", *arguments)
    assert code == 2 and part in err and "Traceback" not in err and not out


def test_exact_modes_that_would_do_nothing_are_refused(tmp_path):
    def refuse(*overrides):
        with pytest.raises(InputError, match="learner.exact"):
            train(load_config(TINY_YAML, overrides), tmp_path / "run")

    refuse("learner.exact=score", "objective=grpo")
    refuse("learner.exact=train", "objective=trpo")


def test_every_snapshot_holds_the_certificate_of_the_start(tiny_run):
    with SnapshotStore(tiny_run / "snapshots", read_only=True) as store:
        metas = [store.meta(version) for version in store.versions()]
    for meta in metas:
        found = meta["parity"]
        assert found["passed"] and found["version"] == 0 and 0 < found["max_gap"] < 2e-4
    assert metas[0]["fingerprint"] != metas[0]["parity"]["fingerprint"]  # trained since


@pytest.mark.slow
def test_a_run_with_exact_values_has_ratio_one_at_the_first_update(tmp_path):
    overrides = ("steps=2", "evaluation.items=0", "learner.exact=train", "objective=decoupled_ppo")
    assert train(load_config(TINY_YAML, overrides), tmp_path / "run") == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        assert row["policy/logprob_gap_max"] == 0 == row["policy/logprob_gap_mean"]
        assert row["policy/ratio_min"] == 1 == row["policy/ratio_max"]
    assert rows[-1]["optimizer/grad_norm"] > 0  # some of its answers earned a reward
    with SnapshotStore(tmp_path / "run" / "snapshots", read_only=True) as store:
        assert store.meta()["parity"]["exact_max_gap"] == 0


@pytest.mark.slow
def test_a_sampler_with_one_changed_leaf_fails(jaxrl):
    config = load_config(TINY_YAML)
    model, task = configured_model(config, None), build_task(config)
    layers = model.params["layers"]
    changed = {**model.params, "layers": {**layers, "down": layers["down"].at[1, 2, 3].add(0.5)}}
    sampler = build_sampler(config, model)
    score = make_score(model.config, micro_batch_rows=config.learner.micro_batch_rows)
    sampling = sampling_params(config, task, n=1, max_tokens=8)

    class Stale:
        """A sampler that was not given the new weights."""

        config = sampler.config

        def generate(self, params, prompts, sampling, *, version):
            return sampler.generate(model.params, prompts, sampling, version=version)

    good, bad = (
        certify_policy(config, it, model.tokenizer, changed, score, sampling, probes=4)
        for it in (sampler, Stale())
    )
    assert good.passed and not bad.passed
    assert good.fingerprint == bad.fingerprint and bad.max_gap > 10 * good.max_gap
    jax.block_until_ready(changed)
    code, out, _ = jaxrl("parity", TINY_YAML, *FEW, "--exact", "--json")
    found = json.loads(out)
    assert code == 0 and found["exact_max_gap"] == 0 and found["time/exact_to_dense"] > 0
    assert np.isfinite(found["time/exact_score"])
