"""What is to be run, decided before anything is started."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence

from launch.supervise import load_redact
from launch.topology import Slice

__all__ = [
    "MOUNT",
    "Bucket",
    "LaunchError",
    "Plan",
    "Rendered",
    "check_no_secrets",
    "default_name",
    "secret_like",
]

MOUNT = "/mnt/jaxrl"  # where a bucket is mounted on every host
SHORTEST_SECRET = 6  # characters; shorter values are in every text
LEAST_GRACE = 120  # seconds: a snapshot of a large model takes a minute
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUCKET = re.compile(r"gs://(?P<name>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9._/=-]*))?")
_EXTRAS = re.compile(r"[A-Za-z0-9._-]+(?:,[A-Za-z0-9._-]+)*")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+")
_KUBERNETES_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_MOST_SLICES = 1000
_MOST_GRACE = 86_400  # seconds
_MOST_RESTARTS = 1_000_000
_CAPACITIES = ("on-demand", "spot", "reserved")


class LaunchError(ValueError):
    """Something is wrong with what was asked for; nothing was started."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of Google Cloud Storage, or a folder in one; runs lie in it."""

    name: str
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """From gs://NAME or gs://NAME/FOLDER. Raises LaunchError."""
        found = _BUCKET.fullmatch(text)
        if found is None:
            raise LaunchError(f"--bucket {text}: write gs://NAME or gs://NAME/FOLDER.")
        if ".." in (found["prefix"] or "").split("/"):
            raise LaunchError(f"--bucket {text}: a folder of a bucket is written without '..'.")
        return cls(found["name"], (found["prefix"] or "").strip("/"))

    def __str__(self) -> str:
        return f"gs://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run on TPU slices: all that a backend needs to write its files.

    Attributes:
      name: of the job, as Kubernetes names things.
      slice: kind of slice.
      slices: how many of them.
      command: what runs on every host, in a copy of the code.
      run: run folder on the hosts, on storage that outlives them; None when the command is not of `jaxrl`.
      env: variables of the command, as they are.
      secrets: names of variables whose values are taken from the environment of whoever launches.
      bucket: mounted at MOUNT on every host.
      image: container with Python and the code (Kubernetes).
      build: the image is built from the code and pushed first.
      grace: seconds from SIGTERM to SIGKILL.
      max_restarts: after preemptions and failures of machines.
      out: folder on this machine for the files and logs of the launch, relative to the code.
      keep: leave machines or jobs as they are at the end.
    """

    name: str
    slice: Slice
    command: tuple[str, ...]
    slices: int = 1
    run: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    bucket: Bucket | None = None
    image: str | None = None
    build: bool = False
    grace: int = LEAST_GRACE
    max_restarts: int = 10
    out: str = "runs/launch"
    keep: bool = False
    capacity: str = "on-demand"
    reservation: str | None = None
    project: str | None = None
    zone: str | None = None
    runtime: str | None = None
    service_account: str | None = None
    network: str | None = None
    cluster: str | None = None
    namespace: str = "default"
    queue: str | None = None
    storage: tuple[str, ...] = ()
    address: str | None = None
    extras: str = "tpu"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--name {self.name}: at most 40 lower-case letters, digits and hyphens, beginning with a letter."
            )
        if not 1 <= self.slices <= _MOST_SLICES:
            raise LaunchError(f"--slices {self.slices}: at least 1, at most {_MOST_SLICES}.")
        if self.slices > 1 and self.slice.hosts == 1:
            raise LaunchError(
                f"--slices {self.slices} of {self.slice}: several slices work together only where each has several hosts. "
                "Take a larger slice, or one."
            )
        if self.grace < LEAST_GRACE:
            raise LaunchError(
                f"--grace {self.grace}: at least {LEAST_GRACE} seconds on a slice, for the snapshot that is saved at the end."
            )
        if self.grace > _MOST_GRACE:
            raise LaunchError(f"--grace {self.grace}: at most {_MOST_GRACE} seconds, a day.")
        if not 0 <= self.max_restarts <= _MOST_RESTARTS:
            raise LaunchError(f"--max-restarts {self.max_restarts}: at least 0, at most {_MOST_RESTARTS}.")
        if self.zone is not None and not _ZONE.fullmatch(self.zone):
            raise LaunchError(f"--zone {self.zone}: write a zone of Google Cloud, such as us-east5-b.")
        if not _EXTRAS.fullmatch(self.extras):
            raise LaunchError(f"--extras {self.extras}: names with commas between them, such as tpu,serve.")
        for option, value in (("--namespace", self.namespace), ("--queue", self.queue)):
            if value is not None and not _KUBERNETES_NAME.fullmatch(value):
                raise LaunchError(
                    f"{option} {value}: at most 63 lower-case letters, digits and hyphens, as Kubernetes names things."
                )
        if self.capacity not in _CAPACITIES:
            raise LaunchError(f"capacity {self.capacity}: one of {', '.join(_CAPACITIES)}.")
        check_variables(self.env, self.secrets)
        if self.run is not None and not self.run.startswith("/"):
            raise LaunchError(
                f"--run {self.run}: the machines of a slice, and their disks, go away with a preemption. Give --bucket "
                "gs://NAME, in which the run folder then lies, or an absolute path on storage that all hosts mount."
            )

    @property
    def hosts(self) -> int:
        """Of all slices."""
        return self.slices * self.slice.hosts

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """All variables of the command that are no secrets."""
        own = {"PYTHONUNBUFFERED": "1"}
        if self.hosts > 1:
            own["JAXRL_DISTRIBUTED"] = "auto"  # read by jaxrl_llm.parallel.processes
        return tuple({**own, **dict(self.env)}.items())

    def supervised(
        self, python: str = "python3", *, restarts: int = 0, logs: str | None = None
    ) -> tuple[str, ...]:
        """The command line that each host runs: the command, looked after by `supervise.py`."""
        out = [python, "launch/supervise.py", "--grace", str(self.grace)]
        if restarts:
            out += ["--max-restarts", str(restarts)]
        if logs is not None:
            out += ["--logs", logs]
        if self.run is not None:
            out += ["--resume-folder", self.run]
        for name in self.secrets:
            out += ["--secret", name]
        return (*out, "--", *self.command)

    def summary(self) -> str:
        """One line for people."""
        many = f"{self.slices} slices of {self.slice}" if self.slices > 1 else f"one slice, {self.slice}"
        chips = self.slices * self.slice.chips
        return f"{self.name}: {many} ({self.slice.shape}), {self.hosts} hosts with {self.slice.chips_per_host} chips each, {chips} chips"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """What a backend makes of a plan.

    Attributes:
      files: path, relative to the code -> text. A file that ends in .sh is a bash script.
      start: command line that starts it, run in the folder of the code.
      notes: for whoever launches.
    """

    files: Mapping[str, str]
    start: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_variables(env: Sequence[tuple[str, str]], secrets: Sequence[str]) -> None:
    """Raises LaunchError for names that no variable has, and for secrets given as plain values."""
    for option, name in (*(("--env", name) for name, _ in env), *(("--secret", name) for name in secrets)):
        if not _VARIABLE.fullmatch(name) or secret_like("", name):
            # Not shown: a value may have been written where its name is wanted.
            raise LaunchError(
                f"{option}: what was given is not the name of an environment variable: letters, digits and _, not beginning "
                "with a digit" + (", and no value after it." if option == "--secret" else ".")
            )
    for name, value in env:
        if secret_like(name, value):
            raise LaunchError(
                f"--env {name}=…: this looks like a secret, which would be written into files and command lines. Set {name} in "
                f"your environment and give --secret {name}."
            )
    both = sorted({name for name, _ in env} & set(secrets))
    if both:
        raise LaunchError(f"{', '.join(both)}: given with --env and with --secret; choose one.")


def secret_like(name: str, value: str) -> bool:
    """Whether a setting or variable of this name and value holds a secret."""
    redact = load_redact()
    return (redact.secret_key(name) and bool(value)) or redact.redact_text(value, {}) != value


def secret_values(environment: Mapping[str, str], secrets: Sequence[str]) -> list[tuple[str, str]]:
    """(variable, text that must not be shown), longest first: values of secret variables, and the lines of long ones."""
    redact = load_redact()
    found = [
        (name, text)
        for name, value in environment.items()
        if name in secrets or redact.secret_key(name)
        for text in {value, *value.splitlines()}
        if len(text) >= SHORTEST_SECRET
    ]
    return sorted(found, key=lambda pair: len(pair[1]), reverse=True)


def check_texts(
    texts: Sequence[tuple[str, str]], secrets: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Raises LaunchError when a text, (where it stands, text), holds the value of a secret variable."""
    for name, value in secret_values(environment, secrets):
        for where, text in texts:
            if value in text:
                raise LaunchError(
                    f"{where} would hold the value of ${name}, which is a secret. Give it by name only, with --secret {name}; "
                    "nothing was written."
                )


def check_no_secrets(plan: Plan, rendered: Rendered, environment: Mapping[str, str]) -> None:
    """Raises LaunchError when a file or the command line would hold the value of a secret variable."""
    # The plan as well as what was made of it, where quotes and line ends may be written in another way.
    given = [("the command", word) for word in plan.command]
    given += [(f"--env {name}", value) for name, value in plan.env]
    made = (*rendered.files.items(), ("the command line", "\n".join(rendered.start)))
    check_texts((*given, *made), plan.secrets, environment)


def default_name(text: str) -> str:
    """A name for a job from the name of a folder or file."""
    name = re.sub(r"[^a-z0-9]+", "-", pathlib.PurePath(text).stem.lower()).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:40].rstrip("-")
