"""The parts of the Ray entry point that need no Ray."""

import pytest

from launch.ray_workers import LOST, Host, coordinator, first_failure


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, LOST, 75], LOST),
        ([75, 1, 143], 1),  # those that were told to end do not hide the fault
        ([LOST, 3], 3),
        ([1, 3], 1),
    ],
)
def test_what_a_run_ended_with(results, code):
    assert first_failure(results) == code


def test_the_coordinator_is_the_first_worker_of_the_slice_wherever_ray_put_it():
    assert coordinator([("10.0.0.3", "2"), ("10.0.0.1", "0"), ("10.0.0.2", "1")]) == "10.0.0.1"
    assert coordinator([("10.0.0.3", ""), ("10.0.0.1", "")]) == "10.0.0.3"


def test_a_host_runs_the_copied_code_with_its_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    script = "import mine, os; raise SystemExit(int(os.environ['CODE']))"
    assert Host().run(["-c", script], {"CODE": "7"}) == 7


def test_a_host_that_was_stopped_before_it_began_does_not_begin():
    host = Host()
    host.stop()
    assert host.run(["-c", ""], {}) == 143
