"""What a run with a fleet refuses, before anything is loaded, and how workers are described."""

import socket

import pytest
from runs import TINY_YAML

from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.ray_actors import check_address, parse_resources
from jaxrl_llm.fleet.workers import Workers, check_fleet


@pytest.mark.parametrize(
    "overrides, workers, message",
    [
        (["schedule.max_age=2"], 2, r"schedule.swap is keep.* Set schedule.swap=drain"),
        (
            ["schedule.over_generation=1"],
            2,
            r"schedule.over_generation is 1.* Set schedule.over_generation=0",
        ),
        (
            ["schedule.max_age=2", "schedule.over_generation=1", "mesh.sampler=1"],
            2,
            r"schedule.swap is keep.*mesh.sampler is 1.*over_generation is 1.*Set schedule.swap=drain and mesh.sampler=0 and "
            r"schedule.over_generation=0",
        ),
        ([], -1, r"must be at least 1, got -1"),
    ],
)
def test_settings_that_a_fleet_cannot_follow(overrides, workers, message):
    with pytest.raises(InputError, match=message):
        check_fleet(load_config(TINY_YAML, overrides), Workers(workers))


@pytest.mark.parametrize("text", ["", "CPU", "CPU=x", "=2", "CPU=1,CPU=2", "GPU=-1", "TPU=inf", "CPU=nan"])
def test_resources_that_are_none(text):
    with pytest.raises(InputError, match=r"--worker-resources: .* is not NAME=NUMBER"):
        parse_resources(text)


def test_resources():
    assert parse_resources("CPU=1") == {"CPU": 1.0}
    assert parse_resources("TPU=4, CPU=8,GPU=0.5") == {"TPU": 4.0, "CPU": 8.0, "GPU": 0.5}


def test_the_command_line_refuses_before_it_makes_a_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(TINY_YAML), "--run", str(tmp_path / "run"), "--workers", "-3"])
    assert ended.value.code == 2
    assert "--workers must be at least 1, got -3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_there_is_refused_at_once():
    with socket.socket() as taken:  # bound and not listening, so that nobody answers
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for address, message in (
            (f"127.0.0.1:{port}", "nobody answers at RAY_ADDRESS=127.0.0.1:"),
            ("127.0.0.1:99999", "nobody answers at RAY_ADDRESS=127.0.0.1:99999"),
            ("ray://head:10001", "RAY_ADDRESS=ray://head:10001 is not HOST:PORT"),
            ("head", "RAY_ADDRESS=head is not HOST:PORT"),
        ):
            with pytest.raises(InputError, match=message):
                check_address(address)
    for address in (None, "", "auto", "local"):
        check_address(address)
