"""Evaluating, sampling and exporting a model or a snapshot from Python."""

import pathlib
import shutil
import string

import jax
import numpy as np
import pytest

from jaxrl_llm.assembly import inference_mesh
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.inference import evaluate_config, export, load_policy, sample_config
from jaxrl_llm.models.load import load_model
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.rules import param_shardings

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"


def tiny(*overrides):
    return load_config(TINY_YAML, overrides)


def equal(tree, other):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), tree, other)))


def test_load_policy_gives_the_model_or_a_snapshot_of_it(tiny_run):
    model, version = load_policy(tiny())
    assert version == 0 and equal(model.params, load_model("tiny").params)
    newest, version = load_policy(tiny(), str(tiny_run))
    assert version == 30 and not equal(newest.params, model.params)
    older, version = load_policy(tiny(), str(tiny_run), 25)
    assert version == 25 and not equal(older.params, newest.params)
    for place in (tiny_run / "snapshots", tiny_run / "snapshots" / "30"):
        same, version = load_policy(tiny(), str(place))
        assert version == 30 and equal(same.params, newest.params)


def test_a_policy_is_spread_over_the_mesh_of_its_config_where_that_many_devices_are_here(tiny_run):
    """Whole on no device, straight from the files; and what it answers is what it answers on one."""
    spread = tiny("mesh.fsdp=2", "mesh.tensor=2", "evaluation.items=16")
    model, _ = load_policy(spread, str(tiny_run), mesh=inference_mesh(spread))
    here = load_policy(tiny(), str(tiny_run))[0]
    assert equal(jax.device_get(model.params), jax.device_get(here.params))
    wanted = param_shardings(model.config, inference_mesh(spread))
    assert jax.tree.map(lambda x: x.sharding, model.params) == wanted
    sizes = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(model.params)]
    assert sum(sizes) < 0.3 * sum(x.nbytes for x in jax.tree.leaves(here.params))
    figures = evaluate_config(spread, snapshot=str(tiny_run))
    alone = evaluate_config(tiny("evaluation.items=16"), snapshot=str(tiny_run))
    # Sums over shards end in other bits, and a sampled token may be another one.
    greedy = [key for key in alone if "greedy" in key]
    assert greedy and {k: figures[k] for k in greedy} == pytest.approx({k: alone[k] for k in greedy})
    many = tiny("mesh.fsdp=64")
    assert inference_mesh(many) is None and load_policy(many, str(tiny_run), mesh=None)[1] == 30


def test_load_policy_uses_the_snapshot_before_a_damaged_one(tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    files = [p for p in (folder / "snapshots" / "30" / "params").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="Snapshot 30 is damaged"):
        model, version = load_policy(tiny(), str(folder))
    assert version == 25 and equal(model.params, load_policy(tiny(), str(tiny_run), 25)[0].params)
    with pytest.raises(InputError, match=r"No usable snapshot:\s+.*30"):
        load_policy(tiny(), str(folder), 30)


def test_evaluate_config_measures_what_the_run_measured(tiny_run):
    last = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    figures = evaluate_config(tiny(), snapshot=str(tiny_run))
    assert figures == {k: v for k, v in last.items() if k.startswith("eval/") or k == "version"}
    fewer = evaluate_config(tiny("evaluation.items=16", "evaluation.sampled=false"), snapshot=str(tiny_run))
    assert fewer["eval/vowel/items"] == 16 and not any("sampled" in key for key in fewer)
    other = evaluate_config(tiny("evaluation.seed=5"), snapshot=str(tiny_run))
    assert other["eval/vowel/sampled_accuracy"] != pytest.approx(0.0)
    assert other != figures


@pytest.mark.slow
def test_sample_config_answers_items_and_prompts(tiny_run):
    config = tiny()
    rows = sample_config(config, snapshot=str(tiny_run), n=2, items=3)
    assert [row["prompt"] for row in rows[::2]] == [row["prompt"] for row in rows[1::2]]
    assert len({row["prompt"] for row in rows}) == 3
    assert all("and a vowel" in row["prompt"] and row["version"] == 30 for row in rows)
    assert all(row["reward"] == float(row["completion"][:1] in tuple("aeiou")) for row in rows)
    assert {row["stop"] for row in rows} <= {"eos", "length"}

    (row,) = sample_config(config, ["abc and a vowel"], greedy=True)
    model = load_model("tiny")
    assert row["reward"] is None and row["version"] == 0
    assert "abc and a vowel" in row["prompt"]
    tokens = model.tokenizer.chat(
        [{"role": "user", "content": "abc and a vowel"}], add_generation_prompt=True
    )
    tokens += model.tokenizer.encode(row["completion"])
    logprobs = token_logprobs(model.params, model.config, np.array([tokens]))[0]
    assert row["logprob"] == pytest.approx(float(logprobs[-len(row["completion"]) :].sum()), abs=1e-4)


def test_sample_config_uses_the_system_turn_and_the_stop_strings_of_the_config():
    (row,) = sample_config(tiny("task.system=be brief"), ["hi"])
    assert "be brief" in row["prompt"] and row["prompt"].index("be brief") < row["prompt"].index("hi")
    stop = ", ".join(string.ascii_letters)
    rows = sample_config(tiny("rollout.max_tokens=16", f"rollout.stop=[{stop}]"), ["hi"], n=4)
    assert "stop_string" in {row["stop"] for row in rows}


def test_an_answer_can_be_begun():
    (plain,) = sample_config(tiny(), ["hi"], greedy=True)
    (row,) = sample_config(tiny(), ["hi"], greedy=True, begin="so")
    assert row["prompt"] == plain["prompt"] + "so"
    with pytest.raises(InputError, match="--begin begins the answer"):
        sample_config(tiny(), begin="so")


def test_control_tokens_in_a_prompt_are_text():
    (row,) = sample_config(tiny(), ["<eos><bos>hi"])
    assert row["prompt"].count("<bos>") == 1  # the user's, as text; the template's own is not shown


@pytest.mark.parametrize("wrong", [{"n": 0}, {"items": 0}])
def test_sample_config_refuses_nothing_to_do(wrong):
    with pytest.raises(InputError, match="--n and --items"):
        sample_config(tiny(), **wrong)


def test_export_writes_what_load_model_reads(tiny_run, tmp_path):
    export(str(tiny_run), str(tmp_path / "a"), version=25)
    assert equal(load_model(tmp_path / "a").params, load_policy(tiny(), str(tiny_run), 25)[0].params)
    export(str(tmp_path / "a"), str(tmp_path / "b"))  # a model folder is a source as well
    assert equal(load_model(tmp_path / "b").params, load_model(tmp_path / "a").params)
    again = load_model(tmp_path / "b").tokenizer
    assert again.encode("a b c") == load_model("tiny").tokenizer.encode("a b c")
    for target in ("a", "a/config.json"):
        with pytest.raises(InputError, match="exists and is not an empty folder"):
            export("tiny", str(tmp_path / target))
