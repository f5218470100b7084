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


def test_the_gain_is_split_into_form_and_skill(tmp_path):
    names = (
        "greedy_accuracy",
        "greedy_lenient_accuracy",
        "greedy_format_rate",
        "greedy_accuracy_given_format",
    )
    before, after = (0.19, 0.29, 0.63, 0.3), (0.75, 0.75, 1.0, 0.75)
    rows = [
        {"version": version, **{f"eval/add/{name}": v for name, v in zip(names, values, strict=True)}}
        for version, values in ((0, before), (20, after))
    ]
    page = read(write(tmp_path / "two", rows))
    assert "From step 0 to step 20 accuracy went from 19% to 75% (+56 points): +46 from skill" in page.text
    assert "29% to 75%), +10 from form." in page.text
    curves = {trace["name"]: trace["y"] for trace in page.figures[1]["data"]}
    assert curves["right"] == [0.19, 0.75] and curves["in the right form"] == [0.63, 1.0]
    assert len(curves) == 4 and len(page.figures) == 2
    once = read(write(tmp_path / "one", rows[:1]))
    assert "Form and skill: add" in once.text and "points" not in once.text


PAIRS = {"loss": 0.6, "pair_accuracy": 0.5, "pair_margin": 0.1, "reward_chosen": 0.2, "reward_rejected": 0.1}


@pytest.mark.parametrize(
    ("figures", "titles"),
    [
        ({"loss": 3.0, "nll": 3.0}, ["Loss: negative log-prob"]),
        ({"loss": 3.0, "nll": 2.0}, ["Loss", "Negative log-prob"]),
        ({"loss": 0.5, "divergence_teacher": 0.5}, ["Loss: distance from the teacher"]),
        (PAIRS, ["Loss", "Pairs in the right order", "Margin of the pairs", "Implicit reward"]),
    ],
    ids=["sft", "sft_and_more", "gkd", "dpo"],
)
def test_given_answers_show_what_is_learned_at_the_top(tmp_path, figures, titles):
    common = {"optimizer/trained_tokens": 37.0, "time/tokens_per_second": 600.0, "time/data": 0.2}
    rows = [
        {"version": v, **common}
        | {f"policy/{name}": value / v for name, value in figures.items()}
        | {f"eval/</b>file/{name}": value / (v + 1) for name, value in figures.items()}
        for v in (1, 2)
    ]
    page = read(write(tmp_path, rows))
    charts = page.text[page.text.index("tokens trained") :]
    order = [charts.index(title) for title in [*titles, "Speed", "Where the time goes", "All other figures"]]
    assert order == sorted(order)
    first = {trace["name"]: trace["y"] for trace in page.figures[0]["data"]}
    assert (
        first["training"] == [figures["loss"], figures["loss"] / 2]
        and first["held out"][1] < first["held out"][0]
    )
    assert "Trained tokens per second" in page.text and "74tokens trained" in page.text
    assert "sampled" not in page.text.lower() and "Completion" not in page.text
    held_out = "25.0% → 16.7%" if "pair_accuracy" in figures else f"{figures['loss'] / 2:.3f} →"
    assert f"held out of </b>file: {held_out}" in page.text
    shown = page.text[: page.text.index("All other figures")]
    assert all(title in shown for title in titles)
    assert not [key for key in page.text.split() if key.startswith(("policy/", "eval/"))]


def test_distillation_shows_the_distance_and_shares_start_at_zero(tmp_path):
    rows = [row(v, **{"policy/kl_in_advantage": 2.0 / v, "policy/loss": 2.0}) for v in (1, 2)]
    rows += [
        row(3, **{"policy/clip_fraction": -0.0, "completion/stop_eos": 0.5, "policy/clip_fraction_high": 0.1})
    ]
    page = read(write(tmp_path, rows))
    assert page.figures[0]["data"][0]["y"] == [2.0, 1.0]
    assert page.text.index("KL taken off the advantage") < page.text.index("Reward")
    shares = [
        axis
        for axis in (figure["layout"].get("yaxis", {}) for figure in page.figures)
        if "%" in axis.get("tickformat", "")
    ]
    assert len(shares) == 2 and all(axis["range"][0] == 0 < axis["range"][1] for axis in shares)
    assert "-0.0" not in page.scripts[-1].replace("0.01em", "")
    other = page.text[page.text.index("All other figures") :]
    assert "ended for the reason eos." in other and "clipped at the upper bound" in other


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
