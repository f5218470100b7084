"""What an interrupt or a SIGTERM leaves behind at each phase, and what the command says."""

import os
import pathlib
import signal
import threading
import time

import pytest

import jaxrl_llm.train as loop
from jaxrl_llm import cli
from jaxrl_llm.stopping import StopRequest, TerminatedError, terminable

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml")
SETS = ("steps=2", "evaluation.items=0", "snapshots.every=1")


@pytest.fixture
def train(capsys, tmp_path):
    """train(*arguments) -> (exit code, standard error); the run folder is tmp_path / "run"."""

    def run(*arguments):
        sets = [part for item in SETS for part in ("--set", item)]
        with pytest.raises(SystemExit) as end:
            cli.main(["train", TINY, "--run", str(tmp_path / "run"), *sets, *arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return end.value.code, captured.err

    return run


def ask(*numbers):
    """Sends signals to this process, as Ctrl-C or a batch system would."""
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # the kernel may tell another thread first; the handler runs in this one


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_while_the_model_loads_nothing_is_left_and_the_folder_can_be_used(
    train, monkeypatch, tmp_path, number, code, word
):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop, "configured_model", lambda *_: ask(number))
    assert train() == (code, f"jaxrl: {word}.\n")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_before_the_first_figures_leaves_the_folder_free(monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(loop, "configured_model", broken)
    with pytest.raises(SystemExit):
        cli.main(["train", TINY, "--run", str(tmp_path / "run")])
    assert "RuntimeError: out of luck" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_twice_within_a_step_says_how_to_go_on(train, monkeypatch, tmp_path):
    learn = loop.Run.learn

    def learning(self, batch):
        if self.version == 1:
            ask(signal.SIGINT, signal.SIGINT)
        return learn(self, batch)

    monkeypatch.setattr(loop.Run, "learn", learning)
    code, error = train()
    assert code == 130 and "Stopping: a snapshot will be saved." in error
    assert f"jaxrl: interrupted. Go on from the newest snapshot with: jaxrl train {TINY} --run" in error
    monkeypatch.setattr(loop.Run, "learn", learn)
    assert train("--resume")[0] == 0
    assert sorted(p.name for p in (tmp_path / "run" / "snapshots").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_while_the_report_is_written(train, monkeypatch, tmp_path, number):
    monkeypatch.setattr(loop, "write_report", lambda folder: ask(number))
    code, error = train()
    assert code in (130, 143)
    assert error.endswith(f"The run is saved; its report is written by: jaxrl report {tmp_path / 'run'}.\n")


def test_sigterm_elsewhere_and_in_other_threads():
    with pytest.raises(TerminatedError), terminable():
        ask(signal.SIGTERM)
    with terminable():
        with StopRequest() as stop:  # a run: it stops where a snapshot can be saved
            ask(signal.SIGTERM, signal.SIGTERM)
        assert stop.asked
        with pytest.raises(TerminatedError):
            ask(signal.SIGTERM)
    done = []

    def elsewhere():
        with terminable():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done
