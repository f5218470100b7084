"""The live table fits 80 columns and survives missing figures; elsewhere there is one plain line a step."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from jaxrl_llm.diagnostics.display import (
    LiveDisplay,
    PlainDisplay,
    evaluation_table,
    format_duration,
    make_display,
    show_phases,
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

GIVEN = {
    "optimizer/grad_norm": 5.2,
    "optimizer/learning_rate": 3e-3,
    "time/update": 0.2,
    "time/tokens_per_second": 607.0,
}
PAIRS = {
    "loss": 0.6,
    "pair_accuracy": 0.875,
    "pair_margin": 0.2,
    "reward_chosen": -0.1,
    "reward_rejected": -0.3,
}
OBJECTIVES = {
    "sft": ({"loss": 3.25, "nll": 3.25}, "loss 3.250 | nll 3.250"),
    "dpo": (PAIRS, "loss 0.600 | pairs right 88% | margin 0.200"),
    "kto": (
        {"loss": 0.4, "reward_chosen": 0.1, "reward_rejected": -0.3},
        "loss 0.400 | chosen 0.100 | rejected -0.300",
    ),
    "gkd": ({"loss": 0.5, "divergence_teacher": 0.5}, "loss 0.500 | to teacher 0.500"),
    "opd": ({"loss": 2.5, "kl_in_advantage": 2.4}, "loss 2.500 | KL to anchor 2.400"),
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
        "left 2m00s"
    )  # not told from the step that compiles
    assert len(lines) == 6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_shows_its_loss_and_what_it_is_about(objective):
    figures, shown = OBJECTIVES[objective]
    training = {f"policy/{name}": value for name, value in figures.items()}
    held_out = {f"eval/ans/{name}": value for name, value in figures.items()} | {"eval/ans/items": 6.0}
    out = io.StringIO()
    with make_display(2, stream=out) as display:
        display.step({"version": 0, **held_out})
        display.step({"version": 1, **GIVEN, **training})
        display.step({"version": 2, **ROW, **training})
    evaluated, trained, sampled = out.getvalue().splitlines()
    assert evaluated == "step 0/2 | " + " | ".join(f"eval {part}" for part in shown.split(" | "))
    assert trained.startswith(f"step 1/2 | {shown} | grad 5.200 | tok/s 607 | s: update 0.2")
    assert f"| acc 20% | {shown} | len 23.4 |" in sampled
    both = held_out | {key.replace("/ans/", "/more/"): value for key, value in held_out.items()}
    with make_display(1, stream=out) as display:
        display.step({"version": 0, **both})
    assert "| ans loss" in out.getvalue() and "| more loss" in out.getvalue()

    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    live = LiveDisplay(2, stream=io.StringIO(), console=console)
    for version in (0, 1):
        live.step({"version": version, **GIVEN, **training, **held_out})
    console.print(live._render())
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "–" not in text and "learning rate" in text
    for part in shown.split(" | "):
        label, value = part.rsplit(" ", 1)
        assert any(label in line and value in line for line in text.splitlines()), part
    assert "eval loss" in text and "reward " not in text and "log-prob gap" not in text
    live.step({"version": 2, **ROW, **training})
    console.print(live._render())
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    assert list(live._progress.training)[-1] == "reward"


def test_a_refill_is_told():
    refill = {**ROW, "rollout/groups_dropped": 12.0, "rollout/rounds": 3.0}
    out = io.StringIO()
    make_display(2, stream=out).step({"version": 1, **refill})
    assert "| trunc 1.3% | dropped 12 | rounds 3 | entropy" in out.getvalue()
    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    live = LiveDisplay(2, stream=io.StringIO(), console=console)
    live.step({"version": 1, **refill})
    console.print(live._render())
    assert "3, 12 dropped, 3 rounds" in console.file.getvalue()


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


# ------------------------------------------------------------------------------------- time left


def steps(display, clock, versions, **times):
    for version in versions:
        evaluated = {"time/eval": times["evaluation"]} if version % times["every"] == 0 else {}
        step = times["step"] + sum(evaluated.values())
        clock[0] += step
        display.step(
            {"version": version, "time/total": step, "time/snapshot": times["snapshot"], **evaluated}
        )


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("every", [1, 3, 4, 7, 100])
def test_the_time_left_holds_evaluations_snapshots_and_the_report(clock, every):
    """A run whose every step, evaluation and snapshot takes as long as the last: the estimate is what follows."""
    display = make_display(20, evaluation_every=every, snapshot_every=5, stream=io.StringIO())
    display.step({"version": 0, "time/eval": 30.0})
    for version in range(1, 20):
        steps(display, clock, [version], step=10.0, evaluation=30.0, snapshot=2.0, every=every)
        if version < 2:
            assert display._progress.eta is None  # the step that compiles tells nothing
            continue
        ahead = range(version + 1, 21)
        evaluations = sum(v % every == 0 or v == 20 for v in ahead)
        snapshots = sum(v % 5 == 0 for v in ahead)
        assert display._progress.eta == pytest.approx(10 * len(ahead) + 30 * evaluations + 2 * snapshots + 1)


def test_the_time_left_runs_down_within_a_step_and_no_further_than_it(clock):
    display = make_display(4, evaluation_every=3, stream=io.StringIO())
    steps(display, clock, [1, 2], step=10.0, evaluation=30.0, snapshot=0.0, every=2)
    assert display._progress.eta == pytest.approx(2 * 10 + 2 * 30 + 1)
    clock[0] += 15.0
    assert display._progress.eta == pytest.approx(66)
    clock[0] += 1000.0
    assert display._progress.eta == pytest.approx(10 + 30 + 1)
    steps(display, clock, [3, 4], step=10.0, evaluation=30.0, snapshot=0.0, every=2)
    assert display._progress.eta == pytest.approx(1)


def test_without_held_out_items_no_evaluation_is_expected(clock):
    display = make_display(10, evaluation_every=2, stream=io.StringIO())
    for version in (1, 2, 3):
        display.step({"version": version, "time/total": 2.0})
    assert display._progress.eta == pytest.approx(7 * 2 + 1)


# ---------------------------------------------------------------------- evaluations, other phases


def test_evaluation_table():
    figures = {
        "version": 3,
        **{f"eval/add/{k}": v for k, v in {"items": 256.0, "prompts_skipped": 2.0, "constant_baseline": 0.0117,
        "greedy_accuracy": 0.5, "greedy_accuracy_low": 0.4, "greedy_accuracy_high": 0.6, "format_rate": 0.981,
        "greedy_length_mean": 5.43, "greedy_reward_errors": 1.0, "greedy_truncated_fraction": 0.5}.items()},
    }  # fmt: skip
    assert evaluation_table(figures).splitlines() == [
        "task    n  greedy                sampled  format  length",
        "add   256  0.500 [0.400, 0.600]  –           98%     5.4",
        "Always giving the same answer would score 0.012.",
        "50% of the greedy answers were cut off at the most tokens.",
        "2 items were left out because their prompts are too long.",
        "1 answers could not be scored; they count neither way.",
    ]
    both = figures | {"eval/mul/items": 8.0, "eval/mul/constant_baseline": 0.1}
    assert "mul: always giving the same answer would score 0.100." in evaluation_table(both)
    assert max(map(len, evaluation_table(both).splitlines())) <= 80


def test_held_out_rows_of_files_are_told_in_words():
    measured = PAIRS | {"items": 40.0, "pair_margin": 1.919, "pair_missing": 0.05, "skipped": 2.0}
    figures = {"version": 3, **{f"eval/pairs/{name}": value for name, value in measured.items()}}
    assert evaluation_table(figures).splitlines() == [
        "held out of   n   loss  pairs right  margin",
        "pairs        40  0.600          88%   1.919",
        "2 rows were left out because they are too long.",
        "5.0% of the pairs have an empty side.",
    ]
    both = evaluation_table(figures | {"eval/add/greedy_accuracy": 0.5, "eval/odd/loss": math.nan})
    assert "task" in both.splitlines()[0] and "odd" in both and "pairs: 2 rows were left out" in both


def test_phases_of_other_commands_are_lines_without_a_terminal(clock):
    out = io.StringIO()
    with show_phases(out) as phase:
        phase("download (MB)", 0, 90)
        for done in range(1, 13):
            clock[0] += 1.0
            phase("download (MB)", done * 7.5, 90)
        phase("converting", 0, None)
    assert out.getvalue().splitlines() == [
        "  download (MB) 0/90",
        "  download (MB) 38/90, 5s",
        "  download (MB) 75/90, 10s",
        "  converting",
    ]


def test_phases_of_other_commands_are_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    with show_phases(out) as phase:
        phase("download (MB)", 45, 90)
    assert "download (MB)" in out.getvalue() and "45/90" in out.getvalue()
