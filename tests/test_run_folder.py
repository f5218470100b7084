"""What a run that does not start leaves behind: what was there before, and nothing else."""

from __future__ import annotations

import pytest

from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.run_folder import abandon_folder, look_at, prepare_folder
from jaxrl_llm.train import train


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {source: 'nosuch://x'}\n")
    return load_config(path)


def begin(folder, config, rows=""):
    """Makes what a run has made before its first step."""
    prepare_folder(folder, config, resume=False)
    for name in ("run.json", "samples.jsonl"):
        (folder / name).write_text("x")
    (folder / "metrics.jsonl").write_text(rows)
    for name in ("snapshots", "tensorboard"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "tensorboard" / "events.out.tfevents.1").write_text("x")


def test_a_refused_run_leaves_no_folder(config, tmp_path):
    with pytest.raises(InputError, match="nosuch"):
        train(config, tmp_path / "a" / "b" / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def test_a_run_without_figures_leaves_nothing(config, tmp_path):
    folder = tmp_path / "a" / "run"
    before = look_at(folder)
    begin(folder, config)
    abandon_folder(folder, before)
    assert not (tmp_path / "a").exists()


def test_what_was_there_stays(config, tmp_path):
    folder = tmp_path / "run"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events.out.tfevents.0").write_text("other")
    (folder / "notes.txt").write_text("mine")
    (folder / "report.html").write_text("old")
    before = look_at(folder)
    begin(folder, config)
    abandon_folder(folder, before)
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "report.html", "tensorboard"]
    assert (folder / "tensorboard" / "events.out.tfevents.0").read_text() == "other"


def test_an_empty_folder_stays_and_foreign_files_keep_theirs(config, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        train(config, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    folder = tmp_path / "new"
    before = look_at(folder)
    begin(folder, config)
    (folder / "foreign").write_text("x")
    (folder / "snapshots" / "5").mkdir()
    abandon_folder(folder, before)
    assert sorted(p.name for p in folder.iterdir()) == ["foreign", "snapshots"]


def test_a_run_with_figures_stays(config, tmp_path):
    before = look_at(tmp_path / "run")
    begin(tmp_path / "run", config, rows="{}")
    abandon_folder(tmp_path / "run", before)
    assert (tmp_path / "run" / "config.yaml").exists() and (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_figures_of_another_are_no_sign_of_this_run(config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}")
    before = look_at(folder)
    prepare_folder(folder, config, resume=False)
    abandon_folder(folder, before)
    assert [p.name for p in folder.iterdir()] == ["metrics.jsonl"]
