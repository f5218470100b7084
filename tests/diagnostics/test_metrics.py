"""metrics.jsonl and samples.jsonl: valid, exact, reproducible, cut back on resume, free of secrets."""

from __future__ import annotations

import json
import math
import re
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.diagnostics import catalog, metrics
from jaxrl_llm.diagnostics.metrics import (
    METRICS,
    MetricsWriter,
    SamplesWriter,
    Timers,
    describe_metric,
    memory_metrics,
    read_jsonl,
    read_metrics,
)
from jaxrl_llm.diagnostics.trackers import make_trackers
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Mean, Prompt, StopReason, Trajectory


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_valid_json_and_numbers_read_back_exactly(tmp_path):
    with MetricsWriter(tmp_path) as out:
        out.write(
            {
                "version": jnp.asarray(3),
                "reward/mean": jnp.float32(0.1),
                "reward/std": np.float32("nan"),
                "policy/ratio_max": math.inf,
                "policy/ratio_min": -math.inf,
                "policy/entropy": Mean(jnp.asarray(3.0), jnp.asarray(2.0)),
                "policy/clip_fraction": Mean(jnp.asarray(0.0), jnp.asarray(0.0)),
                "rollout/tokens": np.int64(2**53 + 1),
                "optimizer/learning_rate": 1e-6,
                "policy/low": jnp.asarray(0.1, jnp.bfloat16),
                "reward/none": None,
            }
        )
        text = out.path.read_text()  # flushed before the file is closed
    assert text.endswith("}\n") and text.count("\n") == 1
    row = strict(text)
    assert list(row)[0] == "version" and list(row)[1:] == sorted(list(row)[1:])
    assert np.float32(row["reward/mean"]) == np.float32(0.1) and row["reward/mean"] == float(np.float32(0.1))
    assert (row["reward/std"], row["policy/ratio_max"], row["policy/ratio_min"]) == (
        "NaN",
        "Infinity",
        "-Infinity",
    )
    assert row["policy/entropy"] == 1.5 and row["policy/clip_fraction"] == 0.0
    assert row["rollout/tokens"] == 2**53 + 1 and row["optimizer/learning_rate"] == 1e-6
    assert row["policy/low"] == float(jnp.asarray(0.1, jnp.bfloat16)) and row["reward/none"] is None
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["reward/std"]) and back["policy/ratio_min"] == -math.inf


def test_equal_runs_write_equal_bytes_whatever_the_order_of_keys(tmp_path):
    rows = [{"version": v, "b/x": 0.1 * v, "a/y": jnp.float32(v) / 3} for v in range(5)]
    for name, order in (("one", 1), ("two", -1)):
        with MetricsWriter(tmp_path / name) as out:
            for row in rows:
                out.write(dict(list(row.items())[::order]))
    assert (tmp_path / "one/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    "key",
    ["rollout/seconds", "tokens_per_second", "rollout/latency_ms", "peak_bytes", "update/wall", "perf/mfu"],
)
def test_figures_of_clock_and_memory_must_say_so(tmp_path, key):
    with MetricsWriter(tmp_path) as out:
        with pytest.raises(ValueError, match="Start it with 'time/' or 'memory/'"):
            out.write({"version": 1, key: 1.0})
        out.write({"version": 1, f"time/{key}": 1.0})


def test_names_of_tasks_and_rewards_are_free(tmp_path):
    keys = [
        "eval/clock seconds/greedy_accuracy",
        "reward/part_latency_ms",
        "policy/penalty_bytes",
        "eval/é (x=1)/items",
    ]
    with MetricsWriter(tmp_path) as out:
        out.write({"version": 1, **dict.fromkeys(keys, 1.0)})
        with pytest.raises(ValueError, match="Start it with"):
            out.write({"version": 1, "eval/add/seconds": 1.0})


def test_malformed_rows_are_refused(tmp_path):
    with MetricsWriter(tmp_path) as out:
        with pytest.raises(ValueError, match="needs its 'version'"):
            out.write({"reward/mean": 1.0})
        with pytest.raises(ValueError, match="malformed"):
            out.write({"version": 1, "a//b": 1.0})
        with pytest.raises(ValueError, match="malformed"):
            out.write({"version": 1, "a\nb": 1.0})
        with pytest.raises(ValueError, match=r"one number, got an array of shape \(2,\)"):
            out.write({"version": 1, "a": np.ones(2)})
        with pytest.raises(ValueError, match="must be a number, got object"):
            out.write({"version": 1, "a": object()})
    assert read_metrics(tmp_path) == []


def test_every_documented_metric_passes_the_rules(tmp_path):
    with MetricsWriter(tmp_path) as out:
        out.write({key: 1 for key in METRICS})
    assert all(text and not text.endswith(".") for text in METRICS.values())


def test_metrics_are_described():
    assert describe_metric("reward/mean") == METRICS["reward/mean"]
    assert (
        describe_metric("eval/a/b/sampled_accuracy")
        == "accuracy of sampled completions on held-out items of a/b"
    )
    assert describe_metric("reward/part_format") == "mean of the part format of the reward"
    assert describe_metric("completion/stop_eos") == "fraction of completions that ended for the reason eos"
    assert describe_metric("custom/figure") == ""
    for (
        key,
        text,
    ) in METRICS.items():  # every placeholder of a text is one of its key; no text leans on its neighbour
        assert set(re.findall("TASK|KIND|NAME", text)) <= set(re.findall("TASK|KIND|NAME", key)), key
        assert not re.match("(the same|its|those)\\b", text), key


def test_resume_cuts_both_files_back_to_the_snapshot(tmp_path):
    with MetricsWriter(tmp_path) as out, SamplesWriter(tmp_path) as samples:
        for version in range(6):
            out.write({"version": version, "reward/mean": version / 3})
            samples.write_records(version, [{"prompt": "p", "completion": f"c{version}"}] * 2)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"version": 6, "reward/me')  # killed while writing
    with MetricsWriter(tmp_path, resume_version=3) as out, SamplesWriter(tmp_path, resume_version=3):
        out.write({"version": 4, "reward/mean": 4 / 3})
        out.write({"version": 5, "reward/mean": 5 / 3})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [s["version"] for s in read_jsonl(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2, 3, 3]
    with MetricsWriter(tmp_path, resume_version=-1):
        pass
    assert read_metrics(tmp_path) == []


def test_lines_that_are_missing_or_there_twice_are_named_on_resume(tmp_path):
    def resumed(versions, at):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(f'{{"version": {version}}}\n' for version in versions))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MetricsWriter(tmp_path, resume_version=at).close()
        return [str(warning.message) for warning in caught]

    assert resumed([0, 1, 2, 3, 4], 3) == resumed([1, 2], 2) == resumed([0], -1) == resumed([], 0) == []
    (missing,) = resumed([0, 1, 4, 5], 4)
    assert "has no line for 2 of the train steps before the snapshot: 2, 3." in missing
    (repeated,) = resumed([1, 2, 2, 3, 3, 3], 3)
    assert "has several lines for 2 of the train steps before the snapshot: 2, 3." in repeated
    (gone,) = resumed([], 20)
    assert "no line for 20 of" in gone and "1, 2, 3, 4, 5, 6, 7, 8, …." in gone


def test_a_cut_last_line_is_ignored_and_one_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\n{"version": 2}\n{"versi')
    assert [row["version"] for row in read_metrics(tmp_path)] == [1, 2]
    path.write_bytes(b'{"version": 1}\ngarbage\n{"version": 2}\n')
    with pytest.raises(InputError, match="line 2 is not a JSON object"):
        read_metrics(tmp_path)
    with pytest.warns(UserWarning, match="removed 1 line"), MetricsWriter(tmp_path, resume_version=2):
        pass
    assert [row["version"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_new_run_does_not_touch_the_figures_of_another(tmp_path):
    with MetricsWriter(tmp_path) as out:
        out.write({"version": 0})
    with pytest.raises(InputError, match="--resume"):
        MetricsWriter(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        MetricsWriter(tmp_path / "file" / "run")


def test_only_process_zero_writes(tmp_path):
    with MetricsWriter(tmp_path / "run", process_index=1) as out:
        assert out.write({"version": 1, "a": jnp.asarray(2.0)}) == {"version": 1, "a": 2.0}
    assert not (tmp_path / "run").exists()


class Letters:
    def decode(self, ids, skip_special=True):
        return "".join(chr(97 + i) for i in ids if i or not skip_special)


def trajectory(i, **changes):
    fields = dict(
        prompt=Prompt(uid=f"u{i}", tokens=np.asarray([0, 1, 2], np.int32), task="toy"),
        group=i // 2,
        tokens=np.asarray([0, 1, 2, 3, 0], np.int32),
        mask=np.asarray([False, False, False, True, True]),
        logprob=np.zeros(5, np.float32),
        version=np.zeros(5, np.int32),
        kv_version=np.zeros(5, np.int32),
        reward=np.float32(0.5),
        reason="ok",
        stop=StopReason.LENGTH,
    )
    return Trajectory(**{**fields, **changes})


def test_samples_are_text_with_reward_and_reason(tmp_path):
    with SamplesWriter(tmp_path) as out:
        out.write(1, [trajectory(i) for i in range(40)], Letters(), limit=4)
        out.write(2, [trajectory(0, reward=None, reason="verifier timed out")], Letters())
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert [r["uid"] for r in records] == ["u0", "u13", "u26", "u39", "u0"]
    assert records[0] | {"rewards": {}} == {
        "version": 1,
        "prompt": "abc",
        "completion": "d",
        "uid": "u0",
        "task": "toy",
        "group": 0,
        "tokens": 2,
        "reward": 0.5,
        "rewards": {},
        "reason": "ok",
        "stop": "length",
    }
    assert records[-1]["reward"] is None and records[-1]["reason"] == "verifier timed out"


def test_hostile_text_stays_one_line(tmp_path):
    text = 'a\u2028b\u2029c\x85d\ne\rf\x00g\ud800 "quoted" \\ NaN 😀'
    with SamplesWriter(tmp_path) as out:
        out.write_records(1, [{"completion": text}, {"completion": "NaN"}, {"completion": "é"}])
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert len(raw.decode().splitlines()) == 3
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert [r["completion"] for r in records] == [text, "NaN", "é"]
    assert "é".encode() in raw


def test_x04_environment_secrets_do_not_reach_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    monkeypatch.setenv("WANDB_API_KEY", "fakekey456")
    with SamplesWriter(tmp_path) as samples, MetricsWriter(tmp_path) as out:
        samples.write_records(
            1, [{"reason": "Traceback: KeyError hf_FAKE123", "parts": {"x": ["fakekey456"]}}]
        )
        out.write({"version": 1, "note": "fakekey456"})
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "hf_FAKE123" not in text and "fakekey456" not in text


def test_timers_add_up_by_phase_and_start_anew():
    timers = Timers()
    for _ in range(2):
        with timers("rollout"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timers("update"):
        raise KeyError
    assert timers.seconds("rollout") >= 0.02 and timers.seconds("eval") == 0.0
    figures = timers.metrics(tokens=100)
    assert set(figures) == {
        "time/rollout",
        "time/update",
        "time/total",
        "time/tokens_per_second",
    }
    assert figures["time/total"] >= figures["time/rollout"] >= 0.02
    assert figures["time/tokens_per_second"] == pytest.approx(100 / figures["time/rollout"])
    assert set(timers.metrics()) == {"time/total"}


def test_memory_is_positive():
    figures = memory_metrics()
    assert set(figures) == {"memory/peak_bytes", "memory/host_peak_bytes"}
    assert all(value > 10_000_000 for value in figures.values())


class Recorder:
    def __init__(self):
        self.rows, self.closed = [], False

    def log(self, version, metrics):
        self.rows.append((version, dict(metrics)))

    def close(self):
        self.closed = True


def test_trackers_get_finite_numbers_on_process_zero_only(tmp_path):
    one, other = Recorder(), Recorder()
    with MetricsWriter(tmp_path, trackers=[one]) as out:
        out.write({"version": 2, "a": jnp.float32(0.5), "b": math.nan, "c": "text", "d": None, "e": 3})
    with MetricsWriter(tmp_path, process_index=1, trackers=[other]) as out:
        out.write({"version": 2, "a": 1.0})
    assert one.rows == [(2, {"a": 0.5, "e": 3.0})] and one.closed
    assert other.rows == []


@pytest.mark.parametrize("name, module", [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_tracker_names_its_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(InputError, match=rf"jaxrl-llm\[{name}\]"):
        make_trackers([name], tmp_path, {})


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(InputError, match="Unknown tracker 'aim'. Allowed: wandb, tensorboard"):
        make_trackers(["aim"], tmp_path)


def test_wandb_gets_a_redacted_config_and_the_version_as_step(tmp_path, monkeypatch):
    """Case X04: against a stand-in with the calls of the package that are used."""
    seen = {}

    class Run:
        def log(self, metrics, step):
            seen["row"] = (step, metrics)

        def finish(self):
            seen["finished"] = True

    class Wandb:
        @staticmethod
        def Settings(**settings):
            return settings

        @staticmethod
        def init(**arguments):
            seen.update(arguments)
            return Run()

    monkeypatch.setitem(__import__("sys").modules, "wandb", Wandb)
    (tracker,) = make_trackers(
        ["wandb"], tmp_path / "my run", {"logger": {"api_key": "k"}, "url": "http://u:p@h"}
    )
    tracker.log(3, {"a": 1.0})
    tracker.close()
    assert seen["config"] == {"logger": {"api_key": "***"}, "url": "http://***@h"}
    assert seen["id"].startswith("my-run-") and len(seen["id"]) == len("my-run-") + 8
    assert (seen["row"], seen["finished"]) == ((3, {"a": 1.0}), True)


def test_metrics_do_not_break_a_transfer_guard(tmp_path):
    value = jax.jit(lambda: jnp.float32(2))()
    with jax.transfer_guard("disallow"), MetricsWriter(tmp_path) as out:
        out.write({"version": 1, "a": value})
    assert read_metrics(tmp_path)[0]["a"] == 2.0


def test_every_figure_of_the_catalog_can_be_written():
    """A stage's figure whose name looks like a duration would end a run after its first update."""
    assert len(catalog.METRICS) > 100
    for key in catalog.METRICS:
        metrics._check_key(key)
