"""Names, folders and disks that the command cannot use: one message and no traceback."""

import errno
import io
import pathlib
import sys

import pytest

from jaxrl_llm import cli
from jaxrl_llm.diagnostics.metrics import MetricsWriter
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.load import load_model

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml")


@pytest.fixture
def jaxrl(capsys, tmp_path, monkeypatch):
    """jaxrl(*arguments) -> (exit code, standard error), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return end.value.code, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", TINY, "--run", ""), "the name of the run folder is empty"),
        (("train", TINY, "--run", "a\0b"), "cannot hold the character NUL"),
        (("train", TINY, "--run", "a\udc80b"), "the name is not UTF-8"),
        (("train", TINY, "--run", "x" * 300), "File name too long"),
        (("train", TINY, "--run", "loop"), "run folder loop cannot be written"),
        (("report", "loop"), "is not a run folder"),
        (("report", "x" * 300), "is not a run folder"),
        (("eval", "--snapshot", "a\0b"), "is not a run folder"),
        (("train", "a\0b"), "cannot be read"),
        (("convert", "tiny", "a\0b"), "cannot hold the character NUL"),
        (("convert", "tiny", "file/below"), "cannot be written: Not a directory"),
        (("sample", TINY, "--prompt", "a\udc80b"), "half of a surrogate pair"),
        (("sample", TINY, "--prompt", "a", "--begin", "\udc80"), "half of a surrogate pair"),
    ],
)
def test_odd_names(jaxrl, tmp_path, arguments, message):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    code, error = jaxrl(*arguments)
    assert code == 2 and error.count("jaxrl: ") == 1 and message in error


def test_a_folder_in_place_of_run_json(jaxrl, tmp_path):
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    code, error = jaxrl("train", TINY, "--run", "run")
    assert code == 2 and "run.json cannot be written" in error
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_in_a_step_is_no_fault_of_the_program(jaxrl, monkeypatch, number):
    def write(self, record):
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(MetricsWriter, "write", write)
    code, error = jaxrl("train", TINY, "--run", "run", "--set", "evaluation.items=8")
    assert code == 1
    assert "jaxrl: No space left on device. Make room; a run goes on from its newest snapshot" in error


def test_errors_that_name_no_file_stay_faults(monkeypatch, capsys):
    monkeypatch.setattr(
        cli, "_run", lambda command: (_ for _ in ()).throw(OSError(errno.ECONNRESET, "reset"))
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["objectives"])
    assert end.value.code == 1 and "Traceback" in capsys.readouterr().err


def test_a_terminal_that_knows_ascii_alone(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli, "_run", lambda command: print("0.5 – [0.1, 0.9] …") or 0)
    with pytest.raises(SystemExit) as end:
        cli.main(["objectives"])
    assert end.value.code == 0 and out.buffer.getvalue() == b"0.5 ? [0.1, 0.9] ?\n"


def test_text_that_is_no_text_is_not_encoded():
    tokenizer = load_model("tiny").tokenizer
    for encode in (tokenizer.encode, lambda text: tokenizer.chat([{"role": "user", "content": text}])):
        with pytest.raises(InputError, match="surrogate pair"):
            encode("a\ud800")
