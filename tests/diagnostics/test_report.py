"""The report: self-contained, safe against hostile text, robust against short and damaged runs."""

from __future__ import annotations

import html.parser
import json
import math

import pytest

from jaxrl_llm.diagnostics.environment import describe_environment, write_run_info
from jaxrl_llm.diagnostics.metrics import METRICS, MetricsWriter, SamplesWriter
from jaxrl_llm.diagnostics.report import write_report
from jaxrl_llm.errors import InputError

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)></td></table></pre>'\"&\u202e\x00\x1b[31m"
)


class Page(html.parser.HTMLParser):
    """The elements, the visible text and the figures of a report."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.scripts = [], [], "", []
        self._script = False
        self.feed(text)
        self.close()
        last = self.scripts[-1]
        start = last.index("const figures = ") + len("const figures = ")
        self.figures, _ = json.JSONDecoder().raw_decode(last[start:])

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data


def row(version, **changes):
    figures = {
        "version": version,
        "reward/mean": 0.1 * version,
        "reward/accuracy": 0.05 * version,
        "completion/length_mean": 20.0,
        "completion/length_max": 64,
        "completion/truncated_fraction": 0.1,
        "policy/entropy": 0.7,
        "policy/kl_behavior": 1e-4,
        "policy/clip_fraction": 0.01,
        "policy/ratio_min": 0.9,
        "policy/ratio_max": 1.1,
        "policy/logprob_gap_mean": 1e-6,
        "policy/logprob_gap_max": 1e-5,
        "optimizer/grad_norm": 1.0,
        "optimizer/learning_rate": 1e-6,
        "rollout/tokens": 100,
        "rollout/no_signal_groups": 2,
        "time/rollout": 3.0,
        "time/update": 2.0,
        "time/total": 5.0,
        "time/tokens_per_second": 20.0,
        "memory/peak_bytes": 2e9,
    }
    return figures | changes


def evaluation(value):
    return {
        "eval/add/greedy_accuracy": value,
        "eval/add/greedy_accuracy_low": value - 0.05,
        "eval/add/greedy_accuracy_high": value + 0.05,
        "eval/add/sampled_accuracy": value / 2,
        "eval/add/constant_baseline": 0.03,
    }


def write(folder, rows, samples=()):
    with MetricsWriter(folder) as out, SamplesWriter(folder) as kept:
        for figures in rows:
            out.write(figures)
        kept.write_records(1, samples)
    return folder


def read(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_a_run_tells_its_story(tmp_path):
    rows = [{"version": 0, **evaluation(0.19)}] + [row(v) for v in range(1, 5)] + [row(5, **evaluation(0.7))]
    write(
        tmp_path,
        rows,
        [{"prompt": "1+1?", "completion": "2", "reward": 1.0, "reason": "exact", "stop": "eos"}],
    )
    (tmp_path / "config.yaml").write_text(
        "model: {source: tiny}\ntask: {name: add}\nobjective: grpo\nsteps: 5\n"
    )
    write_run_info(tmp_path, ["jaxrl", "train", "--set", "logger.api_key=abc"])
    page = read(tmp_path)
    for text in (
        "Held-out accuracy on add, greedy: 19.0% → 70.0% (most frequent answer: 3.0%)",
        "model: tiny · task: add · objective: grpo",
        "steps: 5",
        "1+1?",
        "exact · stop: eos",
        "logger.api_key=***",
        "2.00 GB",
    ):
        assert text in page.text, text
    titles = "Reward|Completion length|Truncated completions|Entropy|Clipped tokens|Gradient norm|Speed|Where the time goes"
    for title in titles.split("|"):
        assert title in page.text
    first = {trace.get("name"): trace for trace in page.figures[0]["data"]}
    assert first["greedy"]["x"] == [0, 5] and first["greedy"]["y"] == [0.19, 0.7]
    assert first["greedy, 95% interval"]["fill"] == "tonexty"
    assert first["always the most frequent answer"]["y"] == [0.03, 0.03]
    assert page.tags.count("figure") == len(page.figures)


def test_the_page_is_self_contained(tmp_path):
    page = read(write(tmp_path, [row(1), row(2)]))
    assert not [tag for tag in page.tags if tag in ("link", "iframe", "img", "object", "embed", "base")]
    assert not [value for name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    policy = next(value for name, value in page.attributes if value and "default-src" in value)
    assert "default-src 'none'" in policy and "http" not in policy
    assert sum("Plotly" in script and len(script) > 1_000_000 for script in page.scripts) == 1
    assert (tmp_path / "report.html").stat().st_size < 8_000_000


def test_hostile_text_is_shown_and_never_obeyed(tmp_path):
    run = tmp_path / "<b>run"
    task = HOSTILE.replace("\x00", "").replace("\x1b", "")
    fields = ("prompt", "completion", "reason", "stop", "reward", "task")
    samples = [
        {field: HOSTILE for field in fields},
        {},
        {"reward": True},
        {"prompt": [1], "completion": {"a": 2}},
    ]
    plain = read(write(tmp_path / "plain", [row(1, **evaluation(0.5))], [{"prompt": "x"}] * 4))
    write(run, [row(1, **{key.replace("add", "t"): v for key, v in evaluation(0.5).items()})], samples)
    metrics = (run / "metrics.jsonl").read_text().replace("eval/t/", json.dumps(f"eval/{task}/")[1:-1])
    (run / "metrics.jsonl").write_text(metrics)
    for name in ("config.yaml", "run.json"):
        (run / name).write_text(json.dumps({"model": HOSTILE, "task": {"name": HOSTILE}, HOSTILE: HOSTILE}))
    page = read(run)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "p",
        "h1",
        "h2",
        "h3",
        "b",
        "span",
        "div",
        "pre",
    }
    allowed |= {
        "section",
        "figure",
        "script",
        "details",
        "summary",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert set(page.tags) <= allowed
    assert len(page.scripts) == len(plain.scripts) == 2
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text and "[U+202E]" in page.text and "[U+0000]" in page.text
    assert "\x00" not in page.text and "\u202e" not in page.text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"version": 0}],
        [row(1)],
        [{"version": 0, **evaluation(0.5)}],
        [{"version": 1, "reward/mean": math.nan, "policy/entropy": math.inf, "time/rollout": None}],
        [row(v, **{"policy/logprob_gap_mean": 0.0, "policy/logprob_gap_max": 0.0}) for v in range(3)],
        [row(v, **{f"custom/{i}": i for i in range(100)}) for v in range(2)],
        [{"version": 3, "eval/a/b/greedy_accuracy": 0.1, "reward/mean": "text", "reward/accuracy": True}],
        [row(v) for v in (1, 2, 3, 2, 3, 4)],
    ],
    ids=["none", "bare", "one", "only_eval", "not_finite", "zero_gap", "many", "odd", "repeated"],
)
def test_short_and_odd_runs(tmp_path, rows):
    page = read(write(tmp_path, rows))
    assert page.tags.count("figure") == len(page.figures) <= 60
    for figure in page.figures:
        for trace in figure["data"]:
            assert len(trace["x"]) == len(trace["y"]) > 0
            if "showlegend" not in trace:
                assert any(value is not None for value in trace["y"])
            assert trace["x"] == sorted(trace["x"])
    if not rows:
        assert "No train step has been written yet" in page.text


def test_a_cut_last_line_and_a_missing_folder(tmp_path):
    write(tmp_path / "run", [row(1), row(2)])
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"version": 3, "rew')
    assert read(tmp_path / "run").figures[0]["data"][0]["x"] == [1, 2]
    with pytest.raises(InputError, match="no run folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is not JSON"):
        write_report(tmp_path / "run")


def test_a_long_prompt_is_clipped_in_the_middle(tmp_path):
    page = read(
        write(tmp_path, [row(1)], [{"prompt": "start" + "x" * 50_000 + "end", "completion": "\ud800"}])
    )
    assert "startxxx" in page.text and "xxxend" in page.text and "characters …" in page.text
    assert len(page.text) < 30_000


def test_x04_secrets_do_not_reach_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    write(tmp_path, [row(1)])
    (tmp_path / "samples.jsonl").write_text('{"version": 1, "completion": "hf_FAKE123"}\n')
    (tmp_path / "config.yaml").write_text("logger:\n  api_key: fakekey456\n  url: http://user:pw@host\n")
    text = write_report(tmp_path).read_text()
    assert not [secret for secret in ("hf_FAKE123", "fakekey456", ":pw@") if secret in text]


def test_every_known_metric_finds_a_place(tmp_path):
    figures = {
        key.replace("TASK", "add").replace("KIND", "greedy"): 0.5 for key in METRICS if key != "version"
    }
    page = read(write(tmp_path, [{"version": v, **figures} for v in (1, 2)]))
    assert "NaN" not in page.scripts[-1]
    assert len(page.figures) >= 14


def test_environment_says_what_ran_where():
    facts = describe_environment()
    assert facts["devices"] == "8 × cpu" and facts["packages"]["jax"] and facts["memory_gb"] > 0
    assert "cores" in facts["cpu"]
