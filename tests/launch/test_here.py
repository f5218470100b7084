"""`--backend here` with small scripts in place of training: real processes, real signals."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch.supervise import Settings, command_of, environment_of

TPU_RUN = pathlib.Path(__file__).parents[2] / "launch" / "tpu_run.py"
LIMIT = 60  # seconds after which a test is stuck

# A worker that says when it is ready and saves when it is told to stop, like `jaxrl train`.
TRAIN = """
import pathlib, signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """start(script, *options, **variables) -> the launcher, running the script; killed at the end of the test."""
    started = []

    def begin(script: str, *options: str, **variables: str) -> subprocess.Popen:
        path = tmp_path / "train script.py"
        path.write_text(script)
        command = [sys.executable, str(TPU_RUN), "--logs", str(tmp_path / "logs"), *options, "--"]
        process = subprocess.Popen(
            [*command, sys.executable, str(path), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        limit = threading.Timer(LIMIT, process.kill)  # ends also whoever waits for a line that never comes
        limit.start()
        started.append((process, limit))
        return process

    yield begin
    for process, limit in started:
        limit.cancel()
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()


def until(process: subprocess.Popen, text: str, times: int = 1) -> list[str]:
    """Reads output up to the line with this text for the n-th time."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        times -= text in line
        if times == 0:
            return lines
    raise AssertionError(f"{text!r} was not printed: {lines}")


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def test_sigterm_reaches_all_workers_once_and_the_code_is_that_of_a_saved_stop(start, tmp_path):
    process = start(TRAIN, "--num-processes", "2")
    until(process, "ready", times=2)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75
    assert output.count("saved") == 2
    assert "[worker-0] saved" in output and "[worker-1] saved" in output
    for index in (0, 1):
        assert (tmp_path / "logs" / f"worker-{index}.log").read_text().split() == ["ready", "saved"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_that_end_a_run(start, number):
    script = TRAIN.replace(
        "signal.SIGTERM, stop", f"signal.{'SIGINT' if number == signal.SIGINT else 'SIGTERM'}, stop"
    )
    process = start(script)
    until(process, "ready")
    process.send_signal(number)
    code, output = finish(process)
    assert (code, output.count("saved")) == (75, 1)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_with_what_it_started(start):
    script = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", child.pid, flush=True)
time.sleep(600)
"""
    process = start(script, "--grace", "1")
    child = int(until(process, "ready")[-1].split()[-1])
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL
    assert "worker-0 did not end within 1 s and is killed" in output
    for _ in range(100):  # whoever adopts it still has to notice
        state = pathlib.Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("what the worker had started still runs")


def test_a_second_ctrl_c_does_not_wait_for_the_grace(start):
    script = TRAIN.replace("signal.SIGTERM, stop", "signal.SIGINT, signal.SIG_IGN")
    process = start(script, "--grace", "500")
    until(process, "ready")
    process.send_signal(signal.SIGINT)
    until(process, "SIGINT: passed on")
    process.send_signal(signal.SIGINT)
    code, _ = finish(process)
    assert code == 128 + signal.SIGKILL


def test_one_worker_crashes_and_the_others_are_ended_in_an_orderly_way(start):
    script = f"""
import os, sys, time, pathlib
if os.environ["JAX_PROCESS_ID"] == "1":
    while not (pathlib.Path(sys.argv[1]) / "up").exists():
        time.sleep(0.02)
    sys.exit("broken")
{TRAIN.replace('print("ready", flush=True)', '(pathlib.Path(sys.argv[1]) / "up").touch()')}"""
    code, output = finish(start(script, "--num-processes", "2", "--max-restarts", "3"))
    assert code == 1  # not 75: a fault is not a preemption, and is not repeated
    assert "[worker-1] broken" in output and "[worker-0] saved" in output
    assert output.index("worker-1 ended with exit code 1") < output.index("saved")
    assert "restart" not in output


def test_preempted_workers_start_again_all_of_them_and_then_succeed(start, tmp_path):
    # Worker 0 is preempted twice by itself; worker 1 then saves, because the others of a run that lost one are ended.
    script = f"""
import os, sys, pathlib
here = pathlib.Path(sys.argv[1])
first = os.environ["JAX_PROCESS_ID"] == "0"
lives = here / ("lives-" + os.environ["JAX_PROCESS_ID"])
count = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (count + 1))
if count == 2:
    print("done", flush=True)
    sys.exit(0)
if first:
    import time
    while not (here / "lives-1").exists() or len((here / "lives-1").read_text()) <= count:
        time.sleep(0.02)
    sys.exit(75)
{TRAIN}"""
    code, output = finish(start(script, "--num-processes", "2", "--max-restarts", "2"))
    assert code == 0
    assert [(tmp_path / f"lives-{i}").read_text() for i in (0, 1)] == ["xxx", "xxx"]
    assert output.count("done") == 2
    assert "preempted (exit code 75); restart 2 of 2" in output


def test_restarts_end(start):
    code, output = finish(start("raise SystemExit(75)", "--max-restarts", "2"))
    assert code == 75
    assert output.count("restart") == 2


def test_no_restart_after_a_stop_that_was_asked_for(start):
    process = start(TRAIN, "--max-restarts", "5")
    until(process, "ready")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75 and "restart" not in output


def test_the_code_of_a_worker_killed_by_a_signal(start):
    code, _ = finish(start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert code == 128 + signal.SIGSEGV


def test_secrets_reach_the_worker_but_neither_terminal_nor_log(start, tmp_path):
    script = """
import os, pathlib, sys
for name in ("HF_TOKEN", "MY_THING"):
    print(name, os.environ[name], flush=True)
    (pathlib.Path(sys.argv[1]) / name).write_text(os.environ[name])
"""
    process = start(script, "--secret", "MY_THING", HF_TOKEN="hf_zzzzzzzzzz", MY_THING="open sesame")
    code, output = finish(process)
    assert code == 0
    assert (tmp_path / "HF_TOKEN").read_text() == "hf_zzzzzzzzzz"
    assert (tmp_path / "MY_THING").read_text() == "open sesame"
    log = (tmp_path / "logs" / "worker-0.log").read_text()
    for text in (output, log):
        assert "hf_zzzzzzzzzz" not in text and "open sesame" not in text
        assert "HF_TOKEN ***" in text and "MY_THING ***" in text


def test_a_secret_of_several_lines_is_hidden_line_by_line(start):
    script = "import os; print(os.environ['PEM'])"
    _, output = finish(start(script, "--secret", "PEM", PEM="-----BEGIN-----\nabcdefghijk\n-----END-----"))
    assert "abcdefghijk" not in output and output.count("***") == 3


def test_a_full_disk_stops_the_log_and_not_the_run(start, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    code, output = finish(start("for i in range(20_000): print('line', i)"))
    assert code == 0
    assert output.count("the log of worker-0 ends here: No space left on device") == 1
    assert "line 19999" in output


def test_a_terminal_that_knows_ascii_only(start):
    script = "import sys; sys.stdout.buffer.write('reward \u2192 1\\n'.encode())"
    code, output = finish(start(script, PYTHONIOENCODING="ascii:strict"))
    assert code == 0 and "[worker-0] reward ? 1" in output


def test_logs_that_cannot_be_written_are_bad_input_and_nothing_runs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "logs" / "worker-0.log").mkdir(parents=True)
    for logs in (tmp_path / "file", tmp_path / "file" / "logs", tmp_path / "logs"):
        result = subprocess.run(
            [sys.executable, TPU_RUN, "--logs", logs, "--", "touch", str(tmp_path / "ran")],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert result.returncode == 2
        assert "the logs of the workers cannot be written there" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_a_dry_run_on_a_terminal_that_knows_ascii_only():
    result = subprocess.run(
        [sys.executable, TPU_RUN, "--dry-run", "--env", "NOTE=é", "--", "true"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    assert result.returncode == 0 and "NOTE='?'" in result.stdout


def test_a_command_that_is_not_there_is_bad_input(tmp_path):
    result = subprocess.run(
        [sys.executable, TPU_RUN, "--logs", tmp_path, "--", str(tmp_path / "no such program")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert result.returncode == 2
    assert "no such program cannot be started: No such file or directory" in result.stderr


def test_jaxrl_is_looked_for_beside_this_python_and_else_said_to_be_missing(tmp_path):
    import sysconfig

    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    root = TPU_RUN.parents[1]
    command = [python, TPU_RUN, "--config", root / "configs/tiny.yaml", "--run", tmp_path / "run"]
    environment["PYTHONPATH"] = sysconfig.get_paths()["stdlib"]

    def started():
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)

    missing = started()
    assert missing.returncode == 2 and not (tmp_path / "run").exists()
    assert "no program jaxrl on PATH" in missing.stderr and "pip install -e" in missing.stderr
    (python.parent / "jaxrl").write_text('#!/bin/sh\necho found with "$@"\n')
    (python.parent / "jaxrl").chmod(0o755)
    found = started()
    assert found.returncode == 0 and "found with train" in found.stdout


@pytest.mark.slow
def test_a_real_run_stops_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "jaxrl").write_text(
        f'#!/bin/bash\nexec "{sys.executable}" -c "from jaxrl_llm.cli import main; main()" "$@"\n'
    )
    (tmp_path / "jaxrl").chmod(0o755)
    root, run = TPU_RUN.parents[1], tmp_path / "the run"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    command = [
        sys.executable,
        TPU_RUN,
        "--config",
        root / "configs/tiny.yaml",
        "--run",
        run,
        "--set",
        "steps=12",
    ]
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with first:
        until(first, "step  3/12")
        first.send_signal(signal.SIGTERM)
        assert "Stopped after step" in first.communicate(timeout=300)[0]
    assert first.returncode == 75
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0 and "going on after step" in second.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(13))
    log = (run / "logs" / "worker-0.log").read_text()
    assert "Stopped after step" in log and "step 12/12" in log


def test_jaxrl_goes_on_in_a_folder_that_holds_a_run(tmp_path):
    settings = Settings(("jaxrl", "train", "c.yaml", "--run", str(tmp_path)), resume=tmp_path)
    assert command_of(settings) == settings.command
    (tmp_path / "config.yaml").touch()
    assert command_of(settings) == (*settings.command, "--resume")


def test_environment_of_processes_that_find_each_other():
    settings = Settings(("x",), processes=2, devices=4)
    base = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8", "HOME": "/h"}
    assert environment_of(settings, 1, "127.0.0.1:99", base) == {
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:99",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    # One process, as on a host of a slice: the platform is whatever is there.
    assert environment_of(Settings(("x",)), 0, "", base) == {"PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"processes": 0}, "processes: 0 was given; at least 1"),
        ({"devices": 0}, "devices per process: 0 was given; at least 1"),
        ({"grace": -1}, "seconds of grace: -1"),
        ({"max_restarts": -1}, "restarts: -1"),
        ({"command": ()}, "no command"),
        ({"host": "a", "processes": 2}, "one worker only"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"command": ("x",), **fields})
