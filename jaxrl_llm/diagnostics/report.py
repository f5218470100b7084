"""report.html: one self-contained page that tells what a run did. Opens without a network.

Everything that comes from a model, a task or a config is untrusted: text is escaped, data is JSON that
cannot end its script element, and the page forbids itself to load anything.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from jaxrl_llm.diagnostics.charts import (
    PHASES,
    Chart,
    evaluation_charts,
    evaluation_tasks,
    form_charts,
    held_out_files,
    learning_charts,
    other_charts,
    series,
    training_charts,
)
from jaxrl_llm.diagnostics.display import format_duration
from jaxrl_llm.diagnostics.environment import describe_environment
from jaxrl_llm.diagnostics.metrics import read_jsonl, read_metrics
from jaxrl_llm.diagnostics.redact import hide_environment_secrets, redact_text
from jaxrl_llm.errors import InputError

__all__ = ["write_report"]

Rows = Sequence[Mapping[str, Any]]

_SAMPLES_PER_STEP = 12
_LONGEST_TEXT = 4000  # characters of a prompt or completion that are shown


def write_report(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Writes report.html into a run folder and returns its path.

    Reads what is there of metrics.jsonl, samples.jsonl, config.yaml and run.json; anything may be missing,
    short, or cut by a crash.

    Raises:
      InputError: the folder does not exist or cannot be written, or a file in it is damaged.
    """
    run = pathlib.Path(run_dir)
    if not run.is_dir():
        raise InputError(f"There is no run folder at {run}. Give the folder that `jaxrl train --run` wrote.")
    rows = _last_of_each_version(read_metrics(run))
    samples = read_jsonl(run / "samples.jsonl")
    config = _read_text(run / "config.yaml")
    page = _page(run.resolve().name, rows, samples, config, _environment(run))
    target, temporary = run / "report.html", run / "report.html.tmp"
    try:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"The report cannot be written: {error.strerror or error} ({target}).") from error
    return target


# -------------------------------------------------------------------------------------- reading


def _last_of_each_version(rows: Rows) -> list[Mapping[str, Any]]:
    merged: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if isinstance(version := row.get("version"), int):
            merged[version] = row
    return [merged[version] for version in sorted(merged)]


def _read_text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _environment(run: pathlib.Path) -> dict[str, Any]:
    path = run / "run.json"
    if not path.exists():
        return describe_environment()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}). Remove it and write the report again.") from error
    return found if isinstance(found, dict) else {}


# ----------------------------------------------------------------------------------------- page


def _page(name: str, rows: Rows, samples: Rows, config: str, environment: Mapping[str, Any]) -> str:
    other = other_charts(rows)
    told = [*evaluation_charts(rows), *form_charts(rows), *learning_charts(rows), *training_charts(rows)]
    told = [chart for chart in told if chart.traces]
    charts = [*told, *other]
    figures = [{"data": chart.traces, "layout": chart.layout} for chart in charts]
    places = [_chart_place(index, chart) for index, chart in enumerate(charts)]
    first_other = len(told)
    body = [
        f"<header><p class='brand'>jaxrl_llm · run report</p><h1>{_text(name)}</h1>{_headline(rows, config)}</header>",
        _cards(rows),
        f"<section class='grid'>{''.join(places[:first_other])}</section>"
        if charts
        else "<p class='empty'>No train step has been written yet.</p>",
        _samples_section(samples),
        _details("Config, as resolved", f"<pre>{_text(redact_text(config))}</pre>" if config else ""),
        _details("Machine and versions", _environment_table(environment)),
        _details(
            "All other figures",
            f"<section class='grid'>{''.join(places[first_other:])}</section>" if other else "",
        ),
    ]
    script = (
        importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_text("utf-8")
        if charts
        else ""
    )
    return _TEMPLATE.format(
        title=_text(name),
        style=_STYLE,
        body="\n".join(part for part in body if part),
        plotly=script,
        figures=_json(figures),
        draw=_DRAW if charts else "",
    )


def _chart_place(index: int, chart: Chart) -> str:
    label = f"{chart.title}. {chart.text}"
    return (
        f"<figure class='{'wide' if chart.wide else ''}'><h3>{_text(chart.title)}</h3><p>{_text(chart.text)}</p>"
        f"<div class='chart' data-chart='{index}' role='img' aria-label='{_text(label)}'></div></figure>"
    )


def _headline(rows: Rows, config: str) -> str:
    parts = []
    for task in evaluation_tasks(rows):
        measure = "greedy" if series(rows, f"eval/{task}/greedy_accuracy")[0] else "sampled"
        values = [v for v in series(rows, f"eval/{task}/{measure}_accuracy")[1] if v is not None]
        baseline = [v for v in series(rows, f"eval/{task}/constant_baseline")[1] if v is not None]
        change = (
            f"<b>{values[0]:.1%}</b> → <b>{values[-1]:.1%}</b>"
            if len(values) > 1
            else f"<b>{values[0]:.1%}</b>"
        )
        compared = f" (most frequent answer: {baseline[0]:.1%})" if baseline else ""
        parts.append(f"Held-out accuracy on <b>{_text(task)}</b>, {measure}: {change}{compared}")
    for file in held_out_files(rows):
        pairs = [v for v in series(rows, f"eval/{file}/pair_accuracy")[1] if v is not None]
        values = pairs or [v for v in series(rows, f"eval/{file}/loss")[1] if v is not None]
        if values:
            shown = [f"<b>{v:.1%}</b>" if pairs else f"<b>{v:.3f}</b>" for v in (values[0], values[-1])]
            what = "Pairs in the right order among those held out of" if pairs else "Loss on rows held out of"
            parts.append(
                f"{what} <b>{_text(file)}</b>: {' → '.join(shown if len(values) > 1 else shown[:1])}"
            )
    if not parts:
        rewards = [v for v in series(rows, "reward/mean")[1] if v is not None]
        if rewards:
            parts.append(f"Mean reward: <b>{rewards[0]:.3f}</b> → <b>{rewards[-1]:.3f}</b>")
    facts = _config_facts(config)
    lines = "".join(f"<p class='headline'>{part}</p>" for part in parts)
    return lines + (f"<p class='facts'>{_text(facts)}</p>" if facts else "")


def _config_facts(config: str) -> str:
    """Model, task and objective in one line, as far as the config tells."""
    try:
        data = yaml.safe_load(config)
    except yaml.YAMLError:
        return ""  # the text itself is shown below
    if not isinstance(data, dict):
        return ""
    facts = []
    for section, names in (
        ("model", ("source", "name")),
        ("task", ("name", "source")),
        ("objective", ("recipe", "name")),
    ):
        value = data.get(section)
        if isinstance(value, dict):
            value = next((value[name] for name in names if value.get(name)), None)
        if isinstance(value, str):
            facts.append(f"{section}: {redact_text(value)}")
    return " · ".join(facts)


def _cards(rows: Rows) -> str:
    if not rows:
        return ""

    def total(key: str) -> float:
        return sum(value or 0 for value in series(rows, key)[1])

    def last(key: str) -> float | None:
        return next((v for v in reversed(series(rows, key)[1]) if v is not None), None)

    seconds = total("time/total") or sum(total(f"time/{phase}") for phase, _ in PHASES)
    peak = max((v for v in series(rows, "memory/peak_bytes")[1] if v is not None), default=None)
    cards: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("train steps", float(rows[-1]["version"]), lambda v: f"{v:,.0f}"),
        ("time", seconds or None, format_duration),
        ("tokens sampled", total("rollout/tokens") or None, lambda v: f"{v:,.0f}"),
        (
            "tokens trained",
            None if total("rollout/tokens") else total("optimizer/trained_tokens") or None,
            lambda v: f"{v:,.0f}",
        ),
        ("tokens/s", last("time/tokens_per_second"), lambda v: f"{v:,.0f}"),
        ("peak memory", peak, lambda v: f"{v / 1e9:.2f} GB"),
        ("skipped updates", total("optimizer/skipped") or None, lambda v: f"{v:,.0f}"),
    ]
    shown = "".join(
        f"<div><b>{style(value)}</b><span>{label}</span></div>"
        for label, value, style in cards
        if value is not None
    )
    return f"<section class='cards'>{shown}</section>"


def _samples_section(samples: Rows) -> str:
    samples = [sample for sample in samples if isinstance(sample.get("version"), int)]
    if not samples:
        return ""
    versions = sorted({sample["version"] for sample in samples})
    parts = []
    for label, version in (("last", versions[-1]), ("first", versions[0])):
        if label == "first" and version == versions[-1]:
            continue
        found = [sample for sample in samples if sample["version"] == version]
        step = max(1, math.ceil(len(found) / _SAMPLES_PER_STEP))
        body = "".join(_sample_row(sample) for sample in found[::step])
        parts.append(
            f"<h3>Train step {version} ({label} of the run)</h3><table class='samples'><thead><tr><th>prompt</th>"
            f"<th>completion</th><th>reward</th><th>why</th></tr></thead><tbody>{body}</tbody></table>"
        )
    return f"<section><h2>Samples</h2>{''.join(parts)}</section>"


def _sample_row(sample: Mapping[str, Any]) -> str:
    reward = sample.get("reward")
    kind, shown = "", "none" if reward is None else str(reward)
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        kind, shown = "good" if reward > 0.5 else "bad" if reward <= 0 else "", f"{reward:.3g}"
    stop = sample.get("stop")
    why = " · ".join(str(part) for part in (sample.get("reason"), f"stop: {stop}" if stop else "") if part)
    texts = (f"<td><div class='text'>{_clip(sample.get(key))}</div></td>" for key in ("prompt", "completion"))
    return f"<tr>{''.join(texts)}<td class='reward {kind}'>{_text(shown)}</td><td class='why'>{_clip(why)}</td></tr>"


def _environment_table(environment: Mapping[str, Any]) -> str:
    rows = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        if value not in (None, ""):
            rows.append(
                f"<tr><th>{_text(key.replace('_', ' '))}</th><td>{_text(redact_text(str(value)))}</td></tr>"
            )
    return f"<table class='facts'>{''.join(rows)}</table>" if rows else ""


def _details(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{content}</details>" if content else ""


def _clip(value: Any) -> str:
    text = hide_environment_secrets("" if value is None else str(value))
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
    return _text(text)


# Controls (but tab and newline) and marks that reorder what follows them are shown, not obeyed.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def _text(value: Any) -> str:
    """Text for HTML content and attributes."""
    return _INVISIBLE.sub(lambda match: f"[U+{ord(match[0]):04X}]", html.escape(str(value), quote=True))


def _json(value: Any) -> str:
    """JSON inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_STYLE = """
:root { color: #0f172a; background: #f8fafc; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
* { box-sizing: border-box; }
body { max-width: 1160px; margin: 0 auto; padding: 32px 20px 80px; }
h1 { margin: 0; font-size: 28px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 40px 0 8px; font-size: 20px; }
h3 { margin: 0; font-size: 15px; font-weight: 600; overflow-wrap: anywhere; }
.brand { margin: 0 0 4px; color: #64748b; font-size: 13px; }
.headline { margin: 10px 0 0; font-size: 18px; }
.facts { margin: 6px 0 0; color: #475569; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0; }
.cards div { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 10px 18px; min-width: 120px; }
.cards b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.cards span { color: #64748b; font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 14px 16px 6px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure p { margin: 0; color: #64748b; font-size: 13px; }
.chart { height: 230px; }
figure.wide .chart { height: 320px; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #64748b; font-weight: 600; font-size: 13px; }
td, th { padding: 8px 10px; vertical-align: top; border-bottom: 1px solid #e2e8f0; }
section > h3 { margin: 18px 0 6px; }
.samples { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; table-layout: fixed; }
.samples th:nth-child(3) { width: 80px; } .samples th:nth-child(4) { width: 190px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 180px; overflow-y: auto;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.reward { font-weight: 600; font-variant-numeric: tabular-nums; } .good { color: #059669; } .bad { color: #dc2626; }
.why { color: #64748b; font-size: 13px; overflow-wrap: anywhere; unicode-bidi: isolate; }
details { margin-top: 20px; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
pre { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 14px; overflow-x: auto; font-size: 13px; }
table.facts th { width: 160px; } .empty { color: #64748b; }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; } }
"""

_DRAW = """
const base = {
  margin: {l: 56, r: 12, t: 8, b: 36}, height: null, autosize: true, hovermode: "x unified",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {family: "system-ui, sans-serif", size: 12, color: "#475569"},
  xaxis: {title: {text: "train step", standoff: 6}, gridcolor: "#f1f5f9", zeroline: false, rangemode: "tozero"},
  yaxis: {gridcolor: "#e2e8f0", zeroline: false, automargin: true, exponentformat: "power"},
  legend: {orientation: "h", x: 1, xanchor: "right", y: 1.18, bgcolor: "rgba(0,0,0,0)"},
};
const merge = (a, b) => {
  const out = {...a};
  for (const key in b) out[key] = b[key] && typeof b[key] === "object" && !Array.isArray(b[key]) ? merge(a[key] || {}, b[key]) : b[key];
  return out;
};
const draw = (place) => {
  if (place.dataset.drawn) return;
  place.dataset.drawn = "1";
  const figure = figures[Number(place.dataset.chart)];
  const layout = merge(base, figure.layout);
  layout.showlegend = figure.data.filter((trace) => trace.showlegend !== false).length > 1;
  Plotly.newPlot(place, figure.data, layout, {responsive: true, displayModeBar: false});
};
document.querySelectorAll(".chart").forEach((place) => { if (!place.closest("details:not([open])")) draw(place); });
document.querySelectorAll("details").forEach((box) => box.addEventListener("toggle", () => {
  if (box.open) box.querySelectorAll(".chart").forEach(draw);
}));
"""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · jaxrl_llm</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{plotly}</script>
<script>
const figures = {figures};
{draw}
</script>
</body>
</html>
"""
