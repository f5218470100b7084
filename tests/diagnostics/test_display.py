"""The live table fits 80 columns and survives missing figures; elsewhere there is one plain line a step."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from jaxrl_llm.diagnostics.display import (
    LiveDisplay,
    PlainDisplay,
    format_duration,
    make_display,
    sparkline,
)

ROW = {
    "reward/mean": 0.25,
    "reward/accuracy": 0.2,
    "completion/length_mean": 23.44,
    "completion/length_max": 1234567,
    "completion/truncated_fraction": 0.013,
    "policy/entropy": 0.81,
    "policy/kl_behavior": 3e-5,
    "policy/clip_fraction": 0.002,
    "policy/ratio_min": 0.8123,
    "policy/ratio_max": 1.2123,
    "policy/logprob_gap_mean": 2e-6,
    "policy/logprob_gap_max": 3.2e-5,
    "optimizer/grad_norm": 1.234,
    "rollout/no_signal_groups": 3,
    "time/rollout": 5.3,
    "time/score": 0.4,
    "time/update": 6.1,
    "time/eval": 1.2,
    "time/total": 13.0,
    "time/tokens_per_second": 4021.0,
}
EVAL = {
    "eval/add/greedy_accuracy": 0.5,
    "eval/add/greedy_accuracy_low": 0.4,
    "eval/add/greedy_accuracy_high": 0.6,
    "eval/add/sampled_accuracy": 0.3,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_live_table_and_everything_else_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(make_display(3, stream=Terminal()), LiveDisplay)
    assert isinstance(make_display(3, stream=io.StringIO()), PlainDisplay)
    monkeypatch.setenv("NO_COLOR", "1")
    assert isinstance(make_display(3, stream=Terminal()), PlainDisplay)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(3, stream=Terminal()), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(3, stream=Terminal(), process_index=1), PlainDisplay)


def test_plain_lines():
    out = io.StringIO()
    with make_display(12, stream=out) as display:
        display.phase("loading", 0, 0)
        display.note("Run folder: x")
        display.step({"version": 0, **EVAL})
        display.phase("rollout", 0, 64)
        display.step({"version": 1, **ROW})
        display.phase("rollout", 0, 64)  # quick phases after the first step say nothing
        display.step(
            {"version": 2, **ROW, **EVAL, "eval/mul/greedy_accuracy": 0.125, "policy/entropy": math.nan}
        )
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["  loading", "Run folder: x"]
    assert lines[2] == "step  0/12 | eval greedy 0.500 [0.400, 0.600] | eval sampled 0.300"
    assert lines[3] == "  rollout 0/64"
    assert lines[4] == (
        "step  1/12 | reward 0.250 | acc 20% | len 23.4 | trunc 1.3% | entropy 0.810 | kl 3.0e-05 | clip 0.2% | "
        "gap 3.2e-05 | grad 1.234 | tok/s 4,021 | s: rollout 5.3 score 0.4 update 6.1 eval 1.2"
    )
    assert "add greedy 0.500 [0.400, 0.600] | add sampled 0.300 | mul greedy 0.125" in lines[5]
    assert "entropy nan" in lines[5] and lines[5].endswith(
        "left 2m10s"
    )  # not told from the step that compiles
    assert len(lines) == 6


def test_long_phases_show_that_they_are_alive(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with make_display(5, stream=out) as display:
        display.step({"version": 1, **ROW})
        for done in range(30):
            clock[0] += 1.0
            display.phase("rollout", done, 64)
    progress = out.getvalue().splitlines()[1:]
    assert progress == ["  rollout 9/64, 9s", "  rollout 19/64, 19s", "  rollout 29/64, 29s"]


def test_other_processes_are_silent():
    out = io.StringIO()
    with make_display(5, stream=out, process_index=1) as display:
        display.step({"version": 1, **ROW})
        display.note("x")
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", [80, 60, 200])
@pytest.mark.parametrize("rows", [0, 1, 400])
def test_the_live_table_fits(width, rows):
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    display = LiveDisplay(400, title="t" * 300, stream=io.StringIO(), console=console)
    for version in range(rows):
        display.step({"version": version, **ROW, **(EVAL if version % 10 == 0 else {})})
    for name, done, total in (
        ("", 0, 0),
        ("rollout", 12, 64),
        ("compiling " * 9, 0, None),
        ("download", 5e9, None),
    ):
        display.phase(name, done, total)
        console.print(display._render())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "12/64" in text
    if rows and width >= 80:
        for word in (
            "reward",
            "truncated",
            "KL to sampler",
            "log-prob gap",
            "ratio",
            "4,021",
            "rollout 5.3s",
        ):
            assert word in text
        assert "0.812 … 1.212" in text and "2.0e-06 (max 3.2e-05)" in text


def test_the_live_table_survives_missing_and_odd_figures():
    out = Terminal()
    console = Console(width=80, force_terminal=True, file=out)
    with LiveDisplay(2, stream=out, console=console) as display:
        display.step({})
        display.step(
            {"version": 1, "reward/mean": None, "policy/entropy": "NaN", "time/rollout": 0.0, "odd": [1]}
        )
        display.step(
            {"version": 2, "reward/mean": math.inf, "eval/x/greedy_accuracy": None, "policy/kl_behavior": []}
        )
        display.note("done [not markup]")
    assert "done [not markup]" in out.getvalue()


def test_secrets_do_not_reach_the_screen(monkeypatch):
    """Case X04."""
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    out = io.StringIO()
    make_display(1, stream=out).note("failed with hf_FAKE123")
    assert out.getvalue() == "failed with ***\n"


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0.0, math.nan, 1.0], 5) == "▁ █"
    assert sparkline([], 5) == ""
    assert sparkline([math.nan], 5) == " "
    long = sparkline([float(i) for i in range(1000)], 8)
    assert long == "▁▂▃▄▅▆▇█"


def test_durations():
    assert [format_duration(s) for s in (0.4, 59.4, 185, 7450)] == ["0s", "59s", "3m05s", "2h04m"]
