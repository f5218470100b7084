"""The charts of a report, as data for plotly.js: one idea a chart, none without data."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.diagnostics.catalog import describe_metric

__all__ = [
    "PHASES",
    "Chart",
    "evaluation_charts",
    "evaluation_tasks",
    "form_charts",
    "held_out_files",
    "learning_charts",
    "other_charts",
    "series",
    "training_charts",
]

Rows = Sequence[Mapping[str, Any]]

_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#2563eb", "#ea580c", "#059669", "#7c3aed", "#94a3b8"
PHASES = (
    ("rollout", _BLUE),
    ("data", _BLUE),  # of fine-tuning, which samples nothing
    ("score", "#f59e0b"),
    ("update", _PURPLE),
    ("eval", _GREEN),
    ("snapshot", _GREY),
)
_MOST_OTHER_CHARTS = 40


@dataclasses.dataclass(frozen=True)
class Chart:
    """One figure of the page: traces and layout are plotly.js objects."""

    title: str
    text: str  # what it means and what to look for
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    wide: bool = False


def series(rows: Rows, key: str) -> tuple[list[int], list[float | None]]:
    """Versions and values of a key; None where a value is not finite. Empty when there is no finite value."""
    x, y = [], []
    for row in rows:
        if key in row:
            value = row[key]
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            x.append(row["version"])
            y.append(float(f"{value:.7g}") + 0.0 if number else None)  # + 0.0: no -0
    return (x, y) if any(value is not None for value in y) else ([], [])


def _first_key(rows: Rows, *keys: str) -> str | None:
    return next((key for key in keys if series(rows, key)[0]), None)


# --------------------------------------------------------------------------------------- charts


def _line(rows: Rows, key: str, name: str, color: str, **changes: Any) -> list[dict[str, Any]]:
    """One curve, or nothing when the run has no such figure."""
    x, y = series(rows, key)
    if not x:
        return []
    few = sum(value is not None for value in y) <= 40
    return [
        {
            "x": x,
            "y": y,
            "name": html.escape(name),
            "mode": "lines+markers" if few else "lines",
            "line": {"color": color, "width": 2},
            "marker": {"size": 5},
            **changes,
        }
    ]


def _band(rows: Rows, low: str, high: str, color: str, name: str) -> list[dict[str, Any]]:
    """The area between two curves."""
    (x, below), (x_high, above) = series(rows, low), series(rows, high)
    if not x or x != x_high:
        return []
    edge = {"x": x, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({r},{g},{b},0.15)", "name": html.escape(name)}
    return [{**edge, "y": below}, {**edge, "y": above, **fill}]


def evaluation_tasks(rows: Rows) -> list[str]:
    """Names of the tasks that the run was evaluated on, sorted."""
    keys = {key for row in rows for key in row}
    matches = (re.fullmatch(r"eval/(.+)/(?:greedy|sampled)_accuracy", key) for key in keys)
    return sorted({match[1] for match in matches if match and series(rows, match[0])[0]})


def evaluation_charts(rows: Rows) -> list[Chart]:
    """Held-out accuracy, one chart a task, with intervals and the constant-answer baseline."""
    charts = []
    for task in evaluation_tasks(rows):
        traces: list[dict[str, Any]] = []
        for measure, color in (("greedy", _BLUE), ("sampled", _ORANGE)):
            key = f"eval/{task}/{measure}_accuracy"
            traces += _band(rows, f"{key}_low", f"{key}_high", color, f"{measure}, 95% interval")
            traces += _line(rows, key, measure, color, mode="lines+markers")
        baseline = f"eval/{task}/constant_baseline"
        if x := series(rows, baseline)[0]:
            value = next(v for v in series(rows, baseline)[1] if v is not None)
            traces.append(
                {
                    "x": [x[0], rows[-1]["version"]]
                    if rows[-1]["version"] > x[0]
                    else [x[0] - 0.5, x[0] + 0.5],
                    "y": [value, value],
                    "name": "always the most frequent answer",
                    "mode": "lines",
                    "line": {"color": _GREY, "dash": "dash", "width": 2},
                }
            )
        charts.append(
            Chart(
                f"Accuracy on held-out items: {task}",
                "Items that training never sees. Shaded: 95% confidence interval. Dashed: what a policy would get that "
                "always gives the most frequent answer.",
                traces,
                {"yaxis": _axis_of_share(traces), "legend": {"y": 1.12}},
                wide=True,
            )
        )
    return charts


_FORM = (  # figure of an evaluation, its curve
    ("greedy_accuracy", "right", _BLUE),
    ("greedy_lenient_accuracy", "right answer anywhere in the text", _GREEN),
    ("greedy_format_rate", "in the right form", _ORANGE),
    ("greedy_accuracy_given_format", "right, of those in the right form", _PURPLE),
)


def form_charts(rows: Rows) -> list[Chart]:
    """How much of the accuracy is form and how much is skill, one chart a task."""
    names = "|".join(name for name, _, _ in _FORM[1:]) + "|format_rate"
    found = (re.fullmatch(rf"eval/(.+)/(?:{names})", key) for row in rows for key in row)
    tasks = sorted({match[1] for match in found if match and series(rows, match[0])[0]})
    charts = []
    for task in tasks:
        traces = []
        for name, label, color in _FORM:
            keys = [f"eval/{task}/{name}"]
            if name == "greedy_format_rate":
                keys.append(f"eval/{task}/format_rate")
            traces += _line(rows, _first_key(rows, *keys) or "", label, color, mode="lines+markers")
        text = (
            "Greedy completions of held-out items. What rises in form but not in skill is the policy learning how to "
            f"write an answer. {_form_and_skill(rows, task)}"
        )
        layout = {"yaxis": _axis_of_share(traces), "legend": {"y": 1.12}}
        charts.append(Chart(f"Form and skill: {task}", text.strip(), traces, layout, wide=True))
    return charts


def _form_and_skill(rows: Rows, task: str) -> str:
    """The gain of greedy accuracy in a sentence, split in two; "" where there are not two evaluations."""
    keys = [f"eval/{task}/{name}" for name, _, _ in _FORM[:2]]
    both = [row for row in rows if all(series([row], key)[0] for key in keys)]
    if len(both) < 2:
        return ""
    (right, anywhere), (right_last, anywhere_last) = (
        [row[key] for key in keys] for row in (both[0], both[-1])
    )
    gain, skill = round(100 * (right_last - right)), round(100 * (anywhere_last - anywhere))
    return (
        f"From step {both[0]['version']} to step {both[-1]['version']} accuracy went from {right:.0%} to "
        f"{right_last:.0%} ({gain:+d} points): {skill:+d} from skill (the right answer anywhere in the text: "
        f"{anywhere:.0%} to {anywhere_last:.0%}), {gain - skill:+d} from form."
    )


_TEACHER = "distance from the teacher"
_MEASURED = (
    "loss",
    "nll",
    "divergence_teacher",
    "pair_accuracy",
    "pair_margin",
    "reward_chosen",
    "reward_rejected",
)
_MEASURED_PATTERN = "|".join(_MEASURED)


def held_out_files(rows: Rows) -> list[str]:
    """Names of the data files on whose held-out rows an objective was measured, sorted."""
    found = (re.fullmatch(rf"eval/(.+)/(?:{_MEASURED_PATTERN})", key) for row in rows for key in row)
    return sorted({match[1] for match in found if match and series(rows, match[0])[0]})


def learning_charts(rows: Rows) -> list[Chart]:
    """What the objective says of itself in training and on held-out rows; charts without data have no traces.

    The loss of a run with rewards is left to `training_charts`: its height says little there.
    """
    from_zero = {"yaxis": {"rangemode": "tozero"}}
    loss = [] if _has_rewards(rows) else _measured(rows, "loss")
    nll, teacher = _measured(rows, "nll"), _measured(rows, "divergence_teacher")
    title = "Loss"
    for curves, what in ((nll, "negative log-prob"), (teacher, _TEACHER)):
        if loss and [trace["y"] for trace in curves] == [trace["y"] for trace in loss]:
            title = f"Loss: {what}"  # the objective is that figure: one chart says it
            curves.clear()
    pairs = _measured(rows, "pair_accuracy")
    return [
        Chart(
            title,
            "Value of the objective. When the held-out curve turns up while the other falls, the policy learns the "
            "file by heart.",
            loss,
            {"yaxis": {"exponentformat": "e"}},
        ),
        Chart(
            "Pairs in the right order",
            "Pairs whose chosen answer has the higher implicit reward, or score. Half is chance.",
            pairs,
            {"yaxis": _axis_of_share(pairs)},
        ),
        Chart("Negative log-prob", "Nats per token of the answers that are imitated.", nll, from_zero),
        Chart(
            _TEACHER.capitalize(),
            "Mean divergence between teacher and policy at a trained token, in nats.",
            teacher,
            from_zero,
        ),
        Chart(
            "KL taken off the advantage",
            "Per token, in nats: the KL to the teacher (opd), or to the reference of a penalty, that lowers the advantage.",
            _line(rows, "policy/kl_in_advantage", "KL off the advantage", _PURPLE),
            {"yaxis": {"exponentformat": "e"}},
        ),
        Chart(
            "Margin of the pairs",
            "Implicit reward, or score, of the chosen answer minus that of the rejected one.",
            _measured(rows, "pair_margin"),
            from_zero,
        ),
        Chart(
            "Implicit reward",
            "Of the chosen (or good) answers and of the rejected (or bad) ones. When both fall, only their distance is "
            "learned.",
            _measured(rows, "reward_chosen", "chosen, ")
            + _measured(rows, "reward_rejected", "rejected, ", 2),
        ),
    ]


def _measured(rows: Rows, name: str, prefix: str = "", first: int = 0) -> list[dict[str, Any]]:
    """The curve of training and one for each file of held-out rows."""
    colors = (_BLUE, _GREEN, _ORANGE, _PURPLE, _GREY)
    files = held_out_files(rows)
    curves = _line(rows, f"policy/{name}", f"{prefix}training", colors[first])
    for index, file in enumerate(files, start=first + 1):
        label = f"{prefix}held out" + (f": {file}" if len(files) > 1 else "")
        curves += _line(rows, f"eval/{file}/{name}", label, colors[index % len(colors)], mode="lines+markers")
    return curves


def _has_rewards(rows: Rows) -> bool:
    return bool(series(rows, "reward/mean")[0] or series(rows, "rollout/tokens")[0])


def training_charts(rows: Rows) -> list[Chart]:
    """What training did, in the order in which one looks for a fault; charts without data have no traces."""
    from_zero = {"yaxis": {"rangemode": "tozero"}}
    reward = _line(rows, "reward/mean", "reward", _BLUE)
    accuracy = _line(rows, "reward/accuracy", "accuracy", _GREEN)
    if reward and accuracy and reward[0]["y"] == accuracy[0]["y"]:
        accuracy = []  # a right-or-wrong reward: one curve says it
    truncated = _line(rows, "completion/truncated_fraction", "truncated", _ORANGE)
    clipped = _line(rows, "policy/clip_fraction", "clipped", _ORANGE)
    sampled = _has_rewards(rows)
    length_max = _line(rows, "completion/length_max", "longest", _GREY)
    ratio = _band(rows, "policy/ratio_min", "policy/ratio_max", _GREY, "smallest to largest")
    ratio += _band(rows, "policy/ratio_low", "policy/ratio_high", _BLUE, "range of a sequence")
    ratio += _line(rows, "policy/ratio", "mean", _BLUE)
    gap = _line(rows, "policy/logprob_gap_max", "largest", _ORANGE)
    gap += _line(rows, "policy/logprob_gap_mean", "mean", _BLUE)
    split = [
        {"x": x, "y": y, "name": phase, "type": "bar", "marker": {"color": color}}
        for phase, color in PHASES
        for x, y in [series(rows, f"time/{phase}")]
        if x and max(value or 0 for value in y) > 0
    ]
    return [
        Chart("Reward", "Mean over the completions sampled for the step.", reward + accuracy, from_zero),
        Chart(
            "Groups without a signal",
            "Groups whose completions all earn the same reward; they teach nothing.",
            _line(rows, "rollout/no_signal_groups", "groups", _PURPLE),
            from_zero,
        ),
        Chart(
            "Loss",
            "Value of the objective. With a surrogate it need not fall: reward and accuracy tell whether the policy learns.",
            _line(rows, "policy/loss", "loss", _GREY) if sampled else [],
            {"yaxis": {"exponentformat": "e"}},
        ),
        Chart(
            "Completion length",
            "Tokens per completion.",
            _line(rows, "completion/length_mean", "mean", _BLUE) + length_max,
            from_zero,
        ),
        Chart(
            "Truncated completions",
            "Cut by the length limit. When this rises the reward measures the limit, not the policy.",
            truncated,
            {"yaxis": _axis_of_share(truncated)},
        ),
        Chart(
            "Entropy",
            "Nats per sampled token. A fall to 0 means that the policy stopped exploring.",
            _line(rows, "policy/entropy", "entropy", _GREEN),
            from_zero,
        ),
        Chart(
            "Distance from the sampling policy",
            "KL per token within the train step, in nats"
            + ("; and from the frozen reference." if _first_key(rows, "policy/kl_reference") else "."),
            _line(
                rows,
                _first_key(rows, "policy/kl_behavior_k3", "policy/kl_behavior") or "",
                "from the sampler",
                _BLUE,
            )
            + _line(rows, "policy/kl_reference", "from the reference", _PURPLE),
            {"yaxis": {"exponentformat": "e"}},
        ),
        Chart(
            "Clipped tokens",
            "Trained tokens whose ratio the surrogate clipped.",
            clipped,
            {"yaxis": _axis_of_share(clipped)},
        ),
        Chart(
            "Probability ratio",
            "Current over anchor policy, per trained token.",
            ratio,
            {"yaxis": _axis_of_ratio(ratio)},
        ),
        Chart(
            "Sampler against learner",
            "|Δ log-prob| of the same tokens under the same weights. Should be rounding error.",
            gap,
            {"yaxis": _axis_of_gap(gap)},
        ),
        Chart(
            "Gradient norm",
            "Global norm before clipping.",
            _line(rows, "optimizer/grad_norm", "norm", _PURPLE),
            from_zero,
        ),
        Chart(
            "Learning rate",
            "As the schedule set it.",
            _line(rows, "optimizer/learning_rate", "learning rate", _GREY),
            from_zero,
        ),
        Chart(
            "Speed",
            "Sampled tokens per second." if sampled else "Trained tokens per second of the update.",
            _line(rows, "time/tokens_per_second", "tokens/s", _BLUE),
            from_zero,
        ),
        Chart(
            "Where the time goes",
            "Seconds of a train step by phase. The first step of a process compiles.",
            split,
            {"barmode": "stack", "bargap": 0.15, "yaxis": {"title": {"text": "seconds"}}},
            wide=True,
        ),
    ]


_SHOWN = re.compile(
    r"version|reward/(mean|accuracy)|completion/(length_mean|length_max|truncated_fraction)|policy/(entropy|kl_behavior"
    r"|kl_behavior_k3|kl_reference|clip_fraction|ratio|ratio_low|ratio_high|ratio_min|ratio_max|logprob_gap_mean|logprob_gap_max"
    rf"|kl_in_advantage|{_MEASURED_PATTERN})"
    r"|optimizer/(grad_norm|learning_rate)|rollout/no_signal_groups|eval/.+/((greedy|sampled)_accuracy(_low|_high)?"
    rf"|constant_baseline|format_rate|greedy_format_rate|greedy_lenient_accuracy|greedy_accuracy_given_format|{_MEASURED_PATTERN})"
    r"|time/(rollout|data|score|update|eval|snapshot|tokens_per_second)"
)


def other_charts(rows: Rows) -> list[Chart]:
    """Every figure that no other chart shows, by key; the first 40."""
    keys = sorted({key for row in rows for key in row if not _SHOWN.fullmatch(key)})
    charts = [Chart(key, _meaning(key), _line(rows, key, key, _BLUE)) for key in keys]
    return [chart for chart in charts if chart.traces][:_MOST_OTHER_CHARTS]


def _meaning(key: str) -> str:
    text = describe_metric(key)
    return text[:1].upper() + text[1:] + ("." if text else "")


def _drawn_values(traces: Sequence[Mapping[str, Any]]) -> list[float]:
    return [value for trace in traces for value in trace["y"] if value is not None]


def _axis_of_gap(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Logarithmic when the values span decades, else from zero."""
    values = _drawn_values(traces)
    low, high = min((v for v in values if v > 0), default=1.0), max(values, default=0.0)
    if min(values, default=0.0) >= 0 and high > 100 * low:
        return {"type": "log", "tickformat": ".0e", "dtick": 1}
    return {"rangemode": "tozero", "exponentformat": "e"}


def _axis_of_ratio(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rounding errors around 1 are not blown up."""
    values = _drawn_values(traces)
    near = values and max(abs(value - 1) for value in values) < 0.01
    return {"range": [0.99, 1.01]} if near else {}


def _axis_of_share(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percent from 0 up, with as many digits as the span asks for."""
    top = max([0.0, *_drawn_values(traces)])
    top = max(0.01, 1.05 * top)
    return {"tickformat": ".0%" if top > 0.1 else ".1%", "range": [0, float(f"{top:.4g}")]}
