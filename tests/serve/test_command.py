"""`jaxrl serve`: what is refused before anything is loaded, and a whole life in a process of its own."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from jaxrl_llm import cli, inference

TINY_YAML = pathlib.Path(__file__).parents[2] / "configs" / "tiny.yaml"


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(*arguments): the message of exit code 2, given before a model is loaded."""

    def forbidden(*arguments, **more):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(inference, "load_policy", forbidden)
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", *map(str, arguments)])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("jaxrl: ") and "Traceback" not in error, error
        return error

    return run


def test_bad_input_is_told_before_anything_is_loaded(refused, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "is in use" in refused(TINY_YAML, "--port", taken.getsockname()[1])
    assert "Set JAXRL_API_KEY or --api-key, or serve" in refused(TINY_YAML, "--host", "0.0.0.0")
    assert "the API key is empty; give a secret" in refused(TINY_YAML, "--api-key", "")
    for key in ("a-secret-key\n", " a-secret-key", "a-secret-\udcff"):
        message = refused(TINY_YAML, "--api-key", key)
        assert "no client could send it" in message and "a-secret" not in message
    for name in ("", " ", "a\nb", "a\udcff"):
        assert "give a name of printed characters" in refused(TINY_YAML, f"--name={name}")
    assert "not an address of this machine" in refused(TINY_YAML, "--host", "no such host", "--api-key", "k")
    assert "--port must be in [0, 65535]" in refused(TINY_YAML, "--port", "70000")
    assert "must not be negative" in refused(TINY_YAML, "--queue", "-1")
    for replicas in (0, 9):
        message = refused(TINY_YAML, "--port", "0", "--replicas", replicas)
        assert f"--replicas must be in [1, 8], got {replicas}" in message
    assert "No snapshot at" in refused(TINY_YAML, "--snapshot", tmp_path)
    assert "give a config file" in refused()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'jaxrl-llm[serve]'" in refused(TINY_YAML)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(number):
    command = [
        sys.executable,
        "-m",
        "jaxrl_llm.cli",
        "serve",
        str(TINY_YAML),
        "--port",
        "0",
        "--name",
        "small",
    ]
    environment = {**os.environ, "JAXRL_API_KEY": "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            line = server.stdout.readline()
            assert line.startswith("jaxrl: serving small (version 0, weights "), line + server.stderr.read()
            url = line.split(" at ")[1].strip()
            request = urllib.request.Request(
                url + "/completions",
                json.dumps({"model": "small", "prompt": "hi", "max_tokens": 5}).encode(),
                {"Authorization": "Bearer secret"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.loads(answer.read())["usage"]["completion_tokens"] <= 5
            server.send_signal(number)
            assert server.wait(60) == 0, server.stderr.read()
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
