"""What a person sees while a run works: a live table on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl_llm.diagnostics.redact import hide_environment_secrets

__all__ = [
    "Display",
    "LiveDisplay",
    "PlainDisplay",
    "evaluation_table",
    "format_duration",
    "make_display",
    "show_phases",
    "sparkline",
]

_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASES = (
    ("rollout", "cyan"),
    ("data", "cyan"),  # of fine-tuning, which samples nothing
    ("score", "yellow"),
    ("update", "magenta"),
    ("eval", "green"),
    ("snapshot", "blue"),
)
_PLAIN_EVERY = 10.0  # seconds between two lines about one phase of a train step
_FIRST_EVERY = 5.0  # before the first step: of a download, a conversion, the first evaluation
_REPORT_SECONDS = 1.0  # what report.html takes at the end, the import of the plotting library included


class Display(Protocol):
    """What the loop talks to. Use as a context manager."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A train step is done: its row of metrics, `version` included."""

    def phase(self, name: str, done: float = 0, total: float | None = None) -> None:
        """Progress of what is running now, for example ("rollout", 12, 64). total 0 or None: not known."""

    def note(self, text: str) -> None:
        """One line that stays."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exception: object) -> None: ...


def make_display(
    total_steps: int,
    *,
    evaluation_every: int = 0,
    snapshot_every: int = 0,
    title: str = "",
    stream: IO[str] | None = None,
    live: bool | None = None,
    process_index: int = 0,
) -> LiveDisplay | PlainDisplay:
    """The display that fits where the output goes.

    Args:
      total_steps: train steps of the whole run.
      evaluation_every, snapshot_every: train steps between two of them, besides those at the end; for the time
        that is left.
      title: shown above the table.
      stream: where to write; default standard output.
      live: forces the live table or the plain lines; default: live on a UTF-8 terminal, unless NO_COLOR is
        set or TERM is dumb.
      process_index: of this process; others than 0 are silent.
    """
    stream = sys.stdout if stream is None else stream
    if live is None:
        live = process_index == 0 and _is_terminal(stream)
    progress = _Progress(total_steps, evaluation_every, snapshot_every)
    if live:
        return LiveDisplay(total_steps, title=title, stream=stream, progress=progress)
    return PlainDisplay(total_steps, title=title, stream=stream, silent=process_index != 0, progress=progress)


def _is_terminal(stream: IO[str]) -> bool:
    """Whether a line can be redrawn there."""
    return (
        stream.isatty()
        and (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


class _Progress:
    """What both displays remember: the curve so far, how long things take, the running phase."""

    def __init__(self, total_steps: int, evaluation_every: int = 0, snapshot_every: int = 0) -> None:
        self.total_steps = total_steps
        self.evaluation_every, self.snapshot_every = evaluation_every, snapshot_every
        self.evaluation_seconds = self.snapshot_seconds = 0.0  # of the last one
        self.stepped = time.monotonic()  # when the last step was done
        self.row: dict[str, Any] = {}
        self.training: dict[str, list[float]] = {}  # curves of the train steps by label
        self.evaluations: dict[str, list[float]] = {}
        self.seconds: list[float] = []
        self.started = time.monotonic()
        self.name, self.done, self.since = "", 0.0, time.monotonic()
        self.total: float | None = None

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        self.row = dict(metrics)
        figures = {label: value for label, value, _ in _measures(metrics, "policy/")}
        if (reward := _value(metrics, "reward/mean")) is not None:
            figures.pop("loss", None)  # of a surrogate: its height tells nothing
            figures["reward"] = reward
        for label in _CURVES:
            if label in figures:
                self.training.setdefault(label, []).append(figures[label])
        evaluation = _value(metrics, "time/eval") or 0.0
        if evaluation:
            self.evaluation_seconds = evaluation
        self.snapshot_seconds = _value(metrics, "time/snapshot") or self.snapshot_seconds
        if (seconds := _value(metrics, "time/total")) is not None:
            self.seconds.append(max(0.0, seconds - evaluation))
        self.stepped = time.monotonic()
        for key in _evaluation_keys(metrics):
            if (value := _value(metrics, key)) is not None:
                self.evaluations.setdefault(key, []).append(value)

    def set_phase(self, name: str, done: float, total: float | None) -> bool:
        """Returns True when another phase has begun."""
        new = name != self.name or done < self.done
        if new:
            self.since = time.monotonic()
        self.name, self.done, self.total = name, done, total or None
        return new

    @property
    def version(self) -> int:
        return int(self.row.get("version", 0))

    @property
    def eta(self) -> float | None:
        """Seconds that are left: steps as the median of the last ones, evaluations and snapshots as the last one
        of each, the report; less what has passed of the running step, at most what a step takes."""
        recent = sorted(self.seconds[1:][-9:])  # the first step compiles
        if not recent:
            return None
        step = recent[len(recent) // 2]
        ahead = self.total_steps - self.version
        left = ahead * step + _REPORT_SECONDS
        left += self._ahead(self.evaluation_every) * self.evaluation_seconds
        left += self._ahead(self.snapshot_every) * self.snapshot_seconds
        running = step if ahead > 0 else _REPORT_SECONDS
        next_is = self.version + 1
        if ahead > 0 and (
            next_is == self.total_steps or (self.evaluation_every and next_is % self.evaluation_every == 0)
        ):
            running += self.evaluation_seconds
        return left - min(time.monotonic() - self.stepped, running)

    def _ahead(self, every: int) -> int:
        """How many of the steps that are left are multiples of `every`, or the last."""
        last, now = self.total_steps, self.version
        if last <= now:
            return 0
        return last // every - now // every + bool(last % every) if every else 1


class PlainDisplay:
    """One line per step, for logs, pipes and notebooks; a line now and then during long phases."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        stream: IO[str],
        silent: bool = False,
        progress: _Progress | None = None,
    ) -> None:
        self._progress = progress or _Progress(total_steps)
        self._stream, self._silent, self._title = stream, silent, title
        self._told = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def note(self, text: str) -> None:
        """Prints one line."""
        self._print(text)

    def phase(self, name: str, done: float = 0, total: float | None = None) -> None:
        """Prints where a phase stands when the last line is more than some seconds ago."""
        progress = self._progress
        new = progress.set_phase(name, done, total)
        now = time.monotonic()
        first = new and not progress.seconds  # before the first step even the start of a phase is news
        if first or now - self._told >= (_PLAIN_EVERY if progress.seconds else _FIRST_EVERY):
            of = (
                f" {_count(done)}/{_count(progress.total)}"
                if progress.total
                else f" {_count(done)}"
                if done
                else ""
            )
            elapsed = "" if new else f", {format_duration(now - progress.since)}"
            self._print(f"  {name}{of}{elapsed}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Prints the line of one step."""
        progress = self._progress
        progress.add_step(metrics)
        width = len(str(progress.total_steps))
        parts = [f"step {progress.version:>{width}}/{progress.total_steps}"]
        measures = [f"{label} {style(value)}" for label, value, style in _measures(metrics, "policy/")]
        for label, key, style in _PLAIN_FIGURES:
            if key == "completion/length_mean":  # rewards come first, then what the objective says
                parts += measures
            if (value := _value(metrics, key)) is not None:
                parts.append(f"{label} {style(value)}")
        keys = _evaluation_keys(metrics)
        parts += [f"{_evaluation_label(key, keys)} {_evaluation(metrics, key)}" for key in keys]
        split = [
            f"{phase} {seconds:.1f}"
            for phase, _ in _PHASES
            if (seconds := _value(metrics, f"time/{phase}")) is not None and seconds >= 0.05
        ]
        if split:
            parts.append("s: " + " ".join(split))
        if progress.version < progress.total_steps and progress.eta is not None:
            parts.append(f"left {format_duration(progress.eta)}")
        self._print(" | ".join(parts))

    def _print(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._silent:
            print(hide_environment_secrets(text), file=self._stream, flush=True)


class LiveDisplay:
    """A table that is redrawn in place; fits 80 columns."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        stream: IO[str],
        console: Console | None = None,
        progress: _Progress | None = None,
    ) -> None:
        self._progress = progress or _Progress(total_steps)
        self._title = title
        self._console = console or Console(file=stream)
        self._lock = threading.RLock()
        # Redrawn by its own thread, so that clocks move while the loop waits for the device.
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._progress.set_phase("", 0, None)
        self._live.stop()

    def note(self, text: str) -> None:
        """Prints one line above the table."""
        self._console.print(Text(hide_environment_secrets(text)), soft_wrap=True)

    def phase(self, name: str, done: float = 0, total: float | None = None) -> None:
        """Updates the progress bar of the running phase."""
        with self._lock:
            self._progress.set_phase(name, done, total)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Updates the table."""
        with self._lock:
            self._progress.add_step(metrics)
            self._progress.set_phase("", 0, None)

    def _render(self) -> RenderableType:
        with self._lock:
            width = min(self._console.width, 100)
            parts: list[RenderableType] = [self._head(width)]
            if self._progress.row:
                parts += [_figures(self._progress.row, width), *self._curves(width), *self._split(width)]
            parts.append(self._phase_line(width))
            return Group(*parts)

    def _head(self, width: int) -> RenderableType:
        progress = self._progress
        line = Table.grid(padding=(0, 1))
        line.add_column(ratio=0)
        line.add_column(ratio=1)
        line.add_column(justify="right")
        elapsed = format_duration(time.monotonic() - progress.started)
        left = "" if progress.eta is None else f"  left {format_duration(progress.eta)}"
        line.add_row(
            Text(f"step {progress.version}/{progress.total_steps}", style="bold"),
            ProgressBar(
                total=max(1, progress.total_steps), completed=progress.version, width=max(10, width - 46)
            ),
            Text(f"{elapsed}{left}", style="dim"),
        )
        if not self._title:
            return line
        return Group(Text(self._title, style="bold", overflow="ellipsis", no_wrap=True), line)

    def _curves(self, width: int) -> list[RenderableType]:
        progress = self._progress
        lines: list[RenderableType] = []
        room = max(8, width - 48)
        curves = [(label, values, "cyan") for label, values in progress.training.items()]
        for key, values in progress.evaluations.items():
            curves.append((_evaluation_label(key, progress.evaluations), values, "green"))
        for label, values, style in curves:
            if values:
                change = f" {values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f" {values[-1]:.3f}"
                text = Text(no_wrap=True, overflow="ellipsis")
                text.append(f"{label:<18.18} ", style="dim").append(f"{change:<16}")
                text.append(sparkline(values, room), style=style)
                lines.append(text)
        return lines

    def _split(self, width: int) -> list[RenderableType]:
        row = self._progress.row
        seconds = {phase: _value(row, f"time/{phase}") or 0.0 for phase, _ in _PHASES}
        total = sum(seconds.values())
        if total <= 0:
            return []
        bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
        room = width - 2
        for phase, style in _PHASES:
            if seconds[phase] > 0.005 * total:
                bar.append("█" * max(1, round(room * seconds[phase] / total)), style=style)
                legend.append("■ ", style=style).append(f"{phase} {seconds[phase]:.1f}s  ")
        bar.truncate(width)
        return [bar, legend]

    def _phase_line(self, width: int) -> RenderableType:
        return _phase_line(self._progress, width)


def _phase_line(progress: _Progress, width: int) -> RenderableType:
    """The running phase as a bar; one that swings to and fro where the end is not known."""
    if not progress.name:
        return Text("")
    running = format_duration(time.monotonic() - progress.since)
    line = Table.grid(padding=(0, 1))
    label = Text(f"{progress.name:<12.30}", style="bold cyan")
    if progress.total:
        bar = ProgressBar(
            total=progress.total, completed=min(progress.done, progress.total), width=max(10, width - 52)
        )
        line.add_row(
            label, bar, Text(f"{_count(progress.done)}/{_count(progress.total)}  {running}", style="dim")
        )
    else:
        bar = ProgressBar(pulse=True, width=max(10, width - 52), animation_time=time.monotonic())
        done = f"{_count(progress.done)}  " if progress.done else ""
        line.add_row(label, bar, Text(f"{done}{running}", style="dim"))
    return line


@contextlib.contextmanager
def show_phases(stream: IO[str] | None = None) -> Iterator[Callable[[str, float, float | None], None]]:
    """Gives phase(name, done, total) for commands that are not runs: a bar on a terminal that is gone afterwards;
    elsewhere a line when a phase begins and every few seconds.

    Args:
      stream: default standard error, so that standard output holds the result alone.
    """
    stream = sys.stderr if stream is None else stream
    if not _is_terminal(stream):
        yield PlainDisplay(0, stream=stream).phase
        return
    progress, lock, console = _Progress(0), threading.RLock(), Console(file=stream)

    def render() -> RenderableType:
        with lock:
            return _phase_line(progress, min(console.width, 100))

    def phase(name: str, done: float = 0, total: float | None = None) -> None:
        with lock:
            progress.set_phase(name, done, total)

    with Live(console=console, get_renderable=render, refresh_per_second=4, transient=True):
        yield phase


def sparkline(values: list[float], width: int) -> str:
    """The curve of `values` in `width` characters at most; gaps where a value is not finite."""
    if not values:
        return ""
    if len(values) > width:  # means of equal stretches
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def format_duration(seconds: float) -> str:
    """Seconds as 7s, 3m05s or 2h04m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%" if value == 0 or value >= 0.095 else f"{100 * value:.1f}%"


def _small(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


# What an objective says of itself, under policy/ in training and under eval/NAME/ for held-out rows.
_MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", _small),
    ("nll", "nll", _small),
    ("divergence_teacher", "to teacher", _small),
    ("kl_in_advantage", "KL to anchor", _small),  # the teacher of opd, or the reference of a penalty
    ("pair_accuracy", "pairs right", _percent),
    ("pair_margin", "margin", _small),
    ("reward_chosen", "chosen", _small),
    ("reward_rejected", "rejected", _small),
)
_WORDS = {name: (label, style) for name, label, style in _MEASURES}
_CURVES = ("reward", *(label for name, label, _ in _MEASURES if name != "pair_margin"))


def _measures(row: Mapping[str, Any], prefix: str) -> list[tuple[str, float, Callable[[float], str]]]:
    """(label, value, style) of each figure of the objective that the row has."""
    return [
        (label, value, style)
        for name, label, style in _MEASURES
        if (value := _value(row, prefix + name)) is not None
        # The margin of pairs is the difference of these two.
        and not (name in ("reward_chosen", "reward_rejected") and prefix + "pair_margin" in row)
    ]


_PLAIN_FIGURES = (
    ("reward", "reward/mean", _small),
    ("acc", "reward/accuracy", _percent),
    ("len", "completion/length_mean", _tenths),
    ("trunc", "completion/truncated_fraction", _percent),
    ("dropped", "rollout/groups_dropped", _whole),
    ("rounds", "rollout/rounds", _whole),
    ("entropy", "policy/entropy", _small),
    ("kl", "policy/kl_behavior", _small),
    ("age", "staleness/age_mean", _small),
    ("clip", "policy/clip_fraction", _percent),
    ("gap", "policy/logprob_gap_max", _small),
    ("grad", "optimizer/grad_norm", _small),
    ("tok/s", "time/tokens_per_second", _whole),
)


def _figures(row: Mapping[str, Any], width: int) -> Table:
    """The figures of a step in two columns of name and value."""

    def value(key: str, style: Any) -> str:
        number = _value(row, key)
        return "–" if number is None else style(number) if math.isfinite(number) else str(number)

    def pair(*ranges: tuple[str, str]) -> str:
        low, high = next((pair for pair in ranges if pair[0] in row), ranges[0])
        return f"{value(low, _small)} … {value(high, _small)}"

    refilled = " groups"
    if "rollout/groups_dropped" in row:
        refilled = (
            f", {value('rollout/groups_dropped', _whole)} dropped, {value('rollout/rounds', _whole)} rounds"
        )
    measures = [(label, style(number)) for label, number, style in _measures(row, "policy/")]
    cells = [
        ("reward", value("reward/mean", _small)),
        ("entropy", value("policy/entropy", _small)),
        ("accuracy", value("reward/accuracy", _percent)),
        ("KL to sampler", value("policy/kl_behavior", _small)),
        (
            "length",
            f"{value('completion/length_mean', _tenths)} (max {value('completion/length_max', _whole)})",
        ),
        ("clipped", value("policy/clip_fraction", _percent)),
        ("truncated", value("completion/truncated_fraction", _percent)),
        ("ratio", pair(("policy/ratio_min", "policy/ratio_max"), ("policy/ratio_low", "policy/ratio_high"))),
        ("no signal", value("rollout/no_signal_groups", _whole) + refilled),
        (
            "log-prob gap",
            f"{value('policy/logprob_gap_mean', _small)} (max {value('policy/logprob_gap_max', _small)})",
        ),
        ("tokens/s", value("time/tokens_per_second", _whole)),
        ("grad norm", value("optimizer/grad_norm", _small)),
    ]
    if any(key.startswith(("reward/", "completion/")) for key in row):
        cells += measures
    else:  # given answers: nothing was sampled
        last = [cell for cell in cells if cell[0] in ("tokens/s", "grad norm")]
        cells = [*measures, ("learning rate", value("optimizer/learning_rate", _small)), *last]
    cells += [("", "")] * (len(cells) % 2)
    table = Table.grid(padding=(0, 1), expand=False)
    names = [max(9, *(len(name) for name, _ in cells[::2])), 13]
    for name_width in names:
        table.add_column(style="dim", width=name_width, no_wrap=True)
        table.add_column(width=max(20, (width - sum(names) - 6) // 2), no_wrap=True, overflow="ellipsis")
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        table.add_row(*left, *right)
    return table


def _evaluation_keys(row: Mapping[str, Any]) -> list[str]:
    """The figures of an evaluation that are shown: accuracies, else what the objective says of held-out rows."""
    keys = []
    for task in _evaluated(row):
        prefix = f"eval/{task}/"
        names = [f"{kind}_accuracy" for kind in ("greedy", "sampled")]
        shown = {label for label, _, _ in _measures(row, prefix)}
        names += [name for name, label, _ in _MEASURES if label in shown]
        keys += [prefix + name for name in names if _value(row, prefix + name) is not None]
    return keys


def _evaluated(row: Mapping[str, Any]) -> list[str]:
    """Names of the tasks or data files that the row evaluates."""
    return list(dict.fromkeys(key[5:].rpartition("/")[0] for key in row if key.startswith("eval/")))


def _evaluation_label(key: str, keys: Iterable[str]) -> str:
    """eval/NAME/greedy_accuracy -> "eval greedy", or "NAME greedy" where several tasks are evaluated."""
    task, measure = key.removeprefix("eval/").rsplit("/", 1)
    several = len({other.rsplit("/", 1)[0] for other in keys}) > 1
    label = _WORDS[measure][0] if measure in _WORDS else measure.removesuffix("_accuracy")
    return f"{task if several else 'eval'} {label}"


def evaluation_table(figures: Mapping[str, Any]) -> str:
    """The `eval/NAME/…` figures for people: a line a task, and what else is worth knowing about it; the same for
    data files, whose held-out rows an objective measures."""
    files = [name for name in _evaluated(figures) if _value(figures, f"eval/{name}/loss") is not None]
    tasks = [name for name in _evaluated(figures) if name not in files]
    tables = [_task_table(figures, tasks)] if tasks else []
    return "\n".join([*tables, _file_table(figures, files)] if files else tables)


def _file_table(figures: Mapping[str, Any], files: list[str]) -> str:
    """A line a data file."""
    rows = {name: {label: (v, s) for label, v, s in _measures(figures, f"eval/{name}/")} for name in files}
    labels = [label for _, label, _ in _MEASURES if any(label in row for row in rows.values())]
    lines: list[tuple[str, ...]] = [("held out of", "n", *labels)]
    notes = []
    for name, row in rows.items():
        items = _value(figures, f"eval/{name}/items")
        shown = (row[label][1](row[label][0]) if label in row else "–" for label in labels)
        lines.append((name, _count(items), *shown))
        several = f"{name}: " if len(files) > 1 else ""
        if skipped := _value(figures, f"eval/{name}/skipped"):
            notes.append(f"{several}{_whole(skipped)} rows were left out because they are too long.")
        if missing := _value(figures, f"eval/{name}/pair_missing"):
            notes.append(f"{several}{_percent(missing)} of the pairs have an empty side.")
    return "\n".join([*_aligned(lines, (True, *[False] * (len(labels) + 1))), *notes])


def _task_table(figures: Mapping[str, Any], tasks: list[str]) -> str:
    """A line a task, whose completions were scored."""
    lines: list[tuple[str, ...]] = [("task", "n", "greedy", "sampled", "format", "length")]
    notes = []
    for task in tasks:
        key = f"eval/{task}/"

        def text(name: str, style: Any, key: str = key) -> str:
            value = _value(figures, key + name)
            return "–" if value is None else style(value)

        accuracy = [_evaluation(figures, f"{key}{kind}_accuracy") for kind in ("greedy", "sampled")]
        shown = text("items", _whole), *accuracy, text("format_rate", _percent)
        lines.append((task, *shown, text("greedy_length_mean", _tenths)))
        several = f"{task}: " if len(tasks) > 1 else ""
        if (baseline := _value(figures, f"{key}constant_baseline")) is not None:
            notes.append(f"{several}always giving the same answer would score {baseline:.3f}.")
        if cut := _value(figures, f"{key}greedy_truncated_fraction"):
            notes.append(f"{several}{_percent(cut)} of the greedy answers were cut off at the most tokens.")
        if skipped := _value(figures, f"{key}prompts_skipped"):
            notes.append(
                f"{several}{_whole(skipped)} items were left out because their prompts are too long."
            )
        errors = sum(_value(figures, f"{key}{kind}_reward_errors") or 0.0 for kind in ("greedy", "sampled"))
        if errors:
            notes.append(f"{several}{_whole(errors)} answers could not be scored; they count neither way.")
    table = _aligned(lines, (True, False, True, True, False, False))
    return "\n".join([*table, *(note if len(tasks) > 1 else note[0].upper() + note[1:] for note in notes)])


def _aligned(lines: list[tuple[str, ...]], left: tuple[bool, ...]) -> list[str]:
    """The lines with their columns one below the other, to the left or to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    ]


def _evaluation(row: Mapping[str, Any], key: str) -> str:
    value, low, high = (_value(row, key + end) for end in ("", "_low", "_high"))
    name = key.rpartition("/")[2]
    if value is not None and name in _WORDS:
        return _WORDS[name][1](value)
    text = "–" if value is None else f"{value:.3f}"
    return text if low is None or high is None else f"{text} [{low:.3f}, {high:.3f}]"


def _value(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    try:
        return None if value is None else float(value)
    except TypeError:  # a figure that is not one number is not shown
        return None


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
