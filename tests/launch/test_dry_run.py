"""What `--dry-run` prints, backend by backend: compared with files, which are read by people when they change."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from launch import tpu_run

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / "golden"
# Set this to write the files anew; then read what has changed.
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"

# What is hard to quote, in each place where something can be chosen.
ODD = 'it\'s "odd" $HOME `x` \\ é'
TASK = ["--config", "configs/tiny.yaml", "--set", f"task.name={ODD}", "--set", "steps=10"]
RUN = [*TASK, "--run", "my runs/tiny one", "--bucket", "gs://my-runs/team-a"]
SECRET = ["--secret", "HF_TOKEN", "--secret", "WANDB_API_KEY"]
CASES = {
    "here": [*TASK, "--run", "runs/tiny one", "--num-processes", "2", "--devices-per-process", "4"],
    "queued-resources": [
        *(*RUN, *SECRET, "--tpu", "v6e-16", "--slices", "2", "--zone", "us-east5-b", "--project", "my-project", "--spot"),
        *("--env", f"NOTE={ODD}", "--service-account", "sa@my-project.iam.gserviceaccount.com", "--network", "net"),
    ],
    "gke-jobset": [
        *(*RUN, *SECRET, "--tpu", "v5p:4x4x12", "--slices", "2", "--image", "registry/me/jaxrl:1", "--build"),
        *("--env", f"NOTE={ODD}", "--service-account", "runner", "--namespace", "team", "--queue", "queue", "--spot"),
    ],
    "xpk": [
        *(*TASK, "--run", "/mnt/my runs/tiny", "--storage", "my-runs", "--tpu", "v6e-8", "--image", "registry/me/jaxrl:1"),
        *("--cluster", "my-cluster", "--zone", "us-east5-b", "--env", "NOTE=it's $HOME", "--reservation", "ours"),
    ],
    "skypilot": [*RUN, *SECRET, "--tpu", "v5litepod-16", "--zone", "us-west4-a", "--env", f"NOTE={ODD}", "--spot"],
    "ray": [
        *(*TASK, *SECRET, "--run", "/mnt/my runs/tiny", "--tpu", "v4-16", "--slices", "2", "--env", f"NOTE={ODD}"),
        *("--address", "http://127.0.0.1:8265"),
    ],
}  # fmt: skip
SECRETS = {"HF_TOKEN": "hf_0123456789abc", "WANDB_API_KEY": "0123456789abcdef0123"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def dry_run(capsys, backend: str, arguments: list[str]) -> str:
    assert tpu_run.main(["--backend", backend, "--dry-run", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def files_of(text: str) -> dict[str, str]:
    """The files that a dry run shows: path -> text."""
    parts = re.split(r"^# ---- (?:file (.*)|run, in .*)$\n", text, flags=re.MULTILINE)
    return {
        path: body.removesuffix("\n") for path, body in zip(parts[1::2], parts[2::2], strict=True) if path
    }


@pytest.mark.parametrize("backend", CASES)
def test_it_prints_what_it_printed(capsys, backend):
    text = dry_run(capsys, backend, CASES[backend]).replace(f"run, in {ROOT.name}/", "run, in REPOSITORY/")
    path = GOLDEN / f"{backend}.txt"
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("backend", CASES)
def test_secrets_are_not_in_it(capsys, backend):
    text = dry_run(capsys, backend, CASES[backend])
    assert not any(value in text for value in SECRETS.values())
    if "HF_TOKEN" in CASES[backend]:
        assert "HF_TOKEN" in text


@pytest.mark.parametrize("backend", [name for name in CASES if name != "here"])
def test_scripts_are_bash_and_data_is_yaml(capsys, backend, tmp_path):
    files = files_of(dry_run(capsys, backend, CASES[backend]))
    assert any(path.endswith("launch.sh") for path in files)
    for path, text in files.items():
        if path.endswith(".sh"):
            (tmp_path / "script.sh").write_text(text)
            subprocess.run(["bash", "-n", tmp_path / "script.sh"], check=True)
        else:
            assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("backend", CASES)
def test_the_words_of_the_command_reach_the_host_as_they_were_given(capsys, backend, tmp_path):
    """The command is taken from where each tool takes it, and read by bash where that tool has bash read it."""
    text = dry_run(capsys, backend, CASES[backend])
    files = {pathlib.PurePath(path).name: body for path, body in files_of(text).items()}
    print_words = 'printf "%s\\0" '
    if backend == "here":
        line = next(line for line in text.splitlines() if "JAX_PROCESS_ID=0" in line)
        script = line.replace(" jaxrl ", f" ; {print_words} jaxrl ", 1)
    elif backend == "queued-resources":
        head = files["worker.sh"].partition("# Runs on every host")[0]
        script = head + print_words + '"${command[@]}"'
    elif backend == "gke-jobset":
        job = yaml.safe_load(files["jobset.yaml"])["spec"]["replicatedJobs"][0]["template"]["spec"]
        words = job["template"]["spec"]["containers"][0]["command"]
        script = None
    elif backend == "xpk":
        (tmp_path / "xpk").write_text('#!/bin/bash\nprintf "%s" "${@: -1}"\n')  # its last argument
        (tmp_path / "xpk").chmod(0o755)
        head = files["launch.sh"].partition("delete_job()")[0]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = subprocess.run(
            ["bash", "-c", head + "create_job"], env=environment, capture_output=True, text=True
        )
        script = command.stdout.replace("cd /app && exec ", print_words)
    elif backend == "skypilot":
        script = yaml.safe_load(files["task.yaml"])["run"].replace("exec ", print_words, 1)
    else:
        script = next(line for line in files["launch.sh"].splitlines() if "ray job submit" in line)
        script = script.replace("ray job submit", print_words)
    if script is not None:
        out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        words = out.split("\0")[:-1]
    run = {
        "here": "runs/tiny one",
        "xpk": "/mnt/my runs/tiny",
        "ray": "/mnt/my runs/tiny",
    }.get(backend, "/mnt/jaxrl/my runs/tiny one")
    wanted = [
        "jaxrl",
        "train",
        "configs/tiny.yaml",
        "--run",
        run,
        "--set",
        f"task.name={ODD}",
        "--set",
        "steps=10",
    ]
    assert words[-len(wanted) :] == wanted
    if backend != "here":
        assert words[words.index("--grace") + 1] == "120"
        assert words[words.index("--resume-folder") + 1] == run


def test_it_needs_the_standard_library_only(tmp_path):
    """A laptop: nothing is installed, and the repository is where it is."""
    for backend, arguments in CASES.items():
        result = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                ROOT / "launch" / "tpu_run.py",
                "--backend",
                backend,
                "--dry-run",
                *arguments,
            ],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr


BASE = ["--config", "configs/tiny.yaml", "--run", "t"]
POD = [*BASE, "--bucket", "gs://my-runs", "--tpu", "v6e-16"]
QUEUED = ["--backend", "queued-resources", "--zone", "us-east5-b", *POD]
GKE = ["--backend", "gke-jobset", "--image", "i", *POD]
XPK = [
    "--backend",
    "xpk",
    "--image",
    "i",
    "--cluster",
    "c",
    "--zone",
    "us-east5-b",
    *BASE[:2],
    "--run",
    "/r",
    "--tpu",
    "v6e-16",
]
SKY = ["--backend", "skypilot", *POD]
RAY = ["--backend", "ray", *BASE[:2], "--run", "/r", "--tpu", "v6e-16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "t"], "give the run's config with --config FILE"),
        (BASE[:2], "give the run folder with --run DIR"),
        (["--config", "no such.yaml", "--run", "t"], "no such.yaml: there is no such file"),
        ([*BASE, "--set", "steps"], "--set steps: write KEY=VALUE"),
        ([*BASE, "--", "python", "x.py"], "write them there"),
        ([*BASE, "--num-processes", "0"], "at least 1 is needed"),
        ([*BASE, "--tpu", "v6e-16"], "choose one with --backend"),
        ([*BASE, "--env", "A"], "--env A: write NAME=VALUE"),
        ([*BASE, "--env", "A-B=1"], "--env: what was given is not the name of an environment variable"),
        ([*BASE, "--env", "A=1", "--secret", "A"], "given with --env and with --secret"),
        ([*QUEUED, "--tpu", "v6e-12"], "--tpu: there is no v6e-12"),
        ([*QUEUED, "--tpu", "v6e-4", "--slices", "2"], "only where each has several hosts"),
        ([*QUEUED, "--slices", "0"], "--slices 0: at least 1"),
        ([*QUEUED, "--grace", "30"], "--grace 30: at least 120 seconds"),
        ([*QUEUED, "--max-restarts", "-1"], "--max-restarts -1"),
        ([*QUEUED, "--name", "My_Run"], "--name My_Run: at most 40 lower-case letters"),
        ([*QUEUED, "--out", "/somewhere"], "--out /somewhere: it must lie in"),
        ([*QUEUED, "--bucket", "my-runs"], "--bucket my-runs: write gs://NAME"),
        ([*QUEUED, "--run", "/absolute"], "give a folder in the bucket"),
        ([*QUEUED, "--num-processes", "2"], "a slice has one process a host"),
        ([*QUEUED, "--spot", "--reserved"], "choose one"),
        ([*QUEUED, "--reservation", "ours"], "give --reserved instead"),
        ([*QUEUED, "--image", "i"], "for Kubernetes"),
        (["--backend", "queued-resources", *POD], "say where, with --zone"),
        (["--backend", "queued-resources", *BASE], "say which slice, with --tpu"),
        (["--backend", "skypilot", *BASE, "--tpu", "v6e-16"], "Give --bucket gs://NAME"),
        (["--backend", "gke-jobset", *POD], "give --image"),
        ([*GKE, "--reserved"], "name the reservation"),
        ([*XPK, "--secret", "HF_TOKEN"], "Use --backend gke-jobset"),
        ([*XPK, "--env", 'A="'], "breaks its JobSet"),
        ([*XPK, "--set", "a=1\n2"], "holds a line end"),
        ([*XPK, "--run", "r", "--bucket", "gs://my-runs"], "Attach the bucket once"),
        ([*SKY, "--slices", "2"], "SkyPilot starts one slice"),
        ([*SKY, "--tpu", "v5p:4x4x12"], "SkyPilot knows accelerator types only"),
        (["--config", "c" * 5000, "--run", "t"], "there is no such file"),
        ([*BASE, "--run", ""], "--run: the text is empty"),
        ([*BASE, "--run", "a\nb"], "holds a line end"),
        ([*BASE, "--run", "a\udcffb"], "not UTF-8"),
        ([*BASE, "--slices", "2"], "--slices: --backend here has no use for it"),
        ([*BASE, "--num-processes", "100000000"], "at most 256"),
        (
            [*QUEUED, "--cluster", "c"],
            "--cluster: --backend queued-resources has no use for it; it is for xpk",
        ),
        ([*QUEUED, "--tpu", "v6e-８"], "is not a TPU slice"),
        ([*QUEUED, "--tpu", f"v5p-{'9' * 5000}"], "is not a TPU slice"),
        ([*QUEUED, "--chips-per-host", "0"], "0 chips per host were given"),
        ([*QUEUED, "--slices", "100000000000"], "at most 1000"),
        ([*QUEUED, "--grace", "99999999999999999999"], "at most 86400 seconds"),
        ([*QUEUED, "--max-restarts", "99999999999"], "at most 1000000"),
        ([*QUEUED, "--zone", "east"], "write a zone of Google Cloud"),
        ([*QUEUED, "--extras", "tpu]'; x; '["], "names with commas between them"),
        ([*QUEUED, "--run", "../../etc"], "leave out '..'"),
        ([*QUEUED, "--bucket", "gs://my-runs/../x"], "without '..'"),
        ([*QUEUED, "--out", "README.md"], "README.md is a file"),
        ([*GKE, "--namespace", "My NS"], "--namespace My NS: at most 63 lower-case letters"),
        ([*GKE, "--queue=--all"], "--queue --all: at most 63 lower-case letters"),
        (["--tpu", "v6e-8", "--backend", "ray", "--", ""], "begins with an empty word"),
        ([*RAY, "--zone", "us-east5-b"], "--zone: this is decided where the Ray cluster is made"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(capsys, arguments, message):
    assert tpu_run.main(["--dry-run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


@pytest.mark.parametrize(
    "arguments",
    [
        [*QUEUED, "--env", "HF_TOKEN=hf_0123456789abc"],
        [*GKE, "--env", "NOTE=Bearer abcdefghijklmnop"],
        [*GKE, "--set", "trackers.api_key=0123456789"],
        ["--tpu", "v6e-16", "--backend", "skypilot", "--", "train", "--api-key", "sk-abcdefghijklmnopqrst"],
        ["--tpu", "v6e-16", "--backend", "skypilot", "--", "train", f"--note={SECRETS['WANDB_API_KEY']}"],
        [*GKE, "--env", f"NOTE=x{SECRETS['WANDB_API_KEY']}x"],
        [*BASE, "--env", f"NOTE={SECRETS['WANDB_API_KEY']}"],
        [*BASE, "--set", f"note={SECRETS['WANDB_API_KEY']}", "--secret", "WANDB_API_KEY"],
        ["--tpu", "v6e-16", "--backend", "skypilot", "--", "train", "--api-key", "abcdefghijklmnop"],
        [*GKE, "--env", "sk-abcdefghijklmnop", "--secret", "HF_TOKEN"],
        [*GKE, "--secret", "sk-abcdefghijklmnop"],
        [*GKE, "--secret", "HF_TOKEN=abcdefghijklmnop"],
        [*GKE, "--set", "sk-abcdefghijklmnop", "--secret", "HF_TOKEN"],
        [*RAY, "--address", "http://me:abcdefghijklmnop@head:8265", "--secret", "HF_TOKEN"],
    ],
)
def test_a_secret_that_is_given_as_a_value_is_refused_and_not_repeated(capsys, arguments):
    assert tpu_run.main(["--dry-run", *arguments]) == 2
    out, err = capsys.readouterr()
    if "--secret" not in arguments:
        assert "secret" in err and "--secret" in err
    for value in (*SECRETS.values(), "abcdefghijklmnop", "0123456789"):
        assert value not in out + err


@pytest.mark.parametrize("value", ['it\'s a "secret" $x \\ é', "first line of it\nsecond line of it\n"])
@pytest.mark.parametrize("backend", ["here", "queued-resources", "gke-jobset", "skypilot", "ray"])
def test_a_secret_is_found_however_it_would_be_quoted(capsys, monkeypatch, backend, value):
    monkeypatch.setenv("HF_TOKEN", value)
    given = {"here": BASE, "queued-resources": QUEUED, "gke-jobset": GKE, "skypilot": SKY, "ray": RAY}[
        backend
    ]
    for leak in (value, *value.splitlines()):
        for arguments in (["--env", f"NOTE={leak}"], ["--set", f"note=x{leak}"]):
            assert tpu_run.main(["--dry-run", *given, *arguments]) == 2
            out, err = capsys.readouterr()
            assert out == "" and "the value of $HF_TOKEN" in err


def test_a_folder_with_signs_of_the_shell_is_text_in_the_scripts(capsys, tmp_path):
    odd = "runs/a'b\"c $(touch pwned) `touch pwned`"
    for backend, given in (("skypilot", SKY), ("ray", RAY)):
        files = files_of(dry_run(capsys, backend, [*given[2:], "--out", odd]))
        (tmp_path / "launch.sh").write_text(files[f"{odd}/launch.sh"])
        result = subprocess.run(
            ["bash", "launch.sh", "unknown"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 2 and f"bash {odd}/launch.sh" in result.stderr
        assert not (tmp_path / "pwned").exists()


def test_a_slice_is_the_same_however_it_is_written(capsys):
    for usual, other in (("v5p:4x4x8", " V5P:04x04x008"), ("v6e-8", "V6E-8 ")):
        xpk = ["--cluster", "c", "--image", "i", "--zone", "us-east5-b", "--name", "n", "--tpu"]
        shown = [dry_run(capsys, "xpk", [*xpk, tpu, "--", "python", "x.py"]) for tpu in (usual, other)]
        assert shown[0] == shown[1]


def test_a_secret_must_be_set_where_it_is_used(capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    for backend in (["--config", "configs/tiny.yaml", "--run", "runs/x"], [*QUEUED, "--tpu", "v6e-8"]):
        assert tpu_run.main([*backend, "--secret", "HF_TOKEN"]) == 2
        assert "--secret HF_TOKEN: the variable is not set" in capsys.readouterr().err


def test_a_config_outside_of_the_repository_is_not_copied(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("{}")
    assert tpu_run.main(["--dry-run", *QUEUED, "--config", str(path)]) == 2
    assert "it must lie in" in capsys.readouterr().err


def test_the_environment_of_several_hosts_says_so(capsys):
    for tpu, several in (("v6e-16", True), ("v6e-8", False)):
        files = files_of(dry_run(capsys, "gke-jobset", [*GKE[2:], "--tpu", tpu]))
        (jobset,) = (yaml.safe_load(text) for path, text in files.items() if path.endswith("jobset.yaml"))
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert ({"name": "JAXRL_DISTRIBUTED", "value": "auto"} in pod["containers"][0]["env"]) is several


def test_the_examples_of_the_readme(capsys):
    section = (ROOT / "README.md").read_text().split("## Launch on TPU pods")[1]
    lines = section.split("```bash\n")[1].split("```")[0].splitlines()
    run, seen = "", set()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0].startswith("run="):
            run = words[0].removeprefix("run=")
            continue
        words = [word for word in words[1:] if word != "$run"]
        program, *arguments = [*run.split(), *words]
        assert program == "launch/tpu_run.py"
        assert tpu_run.main(["--dry-run", *arguments]) == 0, line
        out = capsys.readouterr().out
        assert "my_script.py" in out if "--" in arguments else "configs/tiny.yaml" in out
        seen.add(arguments[arguments.index("--backend") + 1] if "--backend" in arguments else "here")
    assert seen == set(CASES)
