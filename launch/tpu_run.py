#!/usr/bin/env python3
"""Starts `jaxrl train` (or another command) on this machine or on TPU slices.

    python launch/tpu_run.py --config configs/tiny.yaml --run runs/tiny
    python launch/tpu_run.py --config configs/tiny.yaml --run tiny --backend gke-jobset --tpu v6e-16 \\
        --image europe-docker.pkg.dev/me/jaxrl/jaxrl:1 --build --bucket gs://my-runs --secret WANDB_API_KEY --dry-run

The same command on the same run folder goes on where it stopped. Whatever follows -- replaces `jaxrl train`. With
--dry-run everything that would be written and run is printed, and nothing else happens. Needs Python 3.11 and its standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

CODE = pathlib.Path(__file__).resolve().parents[1]  # what is copied to the hosts
if str(CODE) not in sys.path:
    sys.path.insert(0, str(CODE))

from launch import gke_jobset, queued_resources, ray_job, skypilot, xpk  # noqa: E402
from launch.plan import (  # noqa: E402
    MOUNT,
    Bucket,
    LaunchError,
    Plan,
    Rendered,
    check_no_secrets,
    check_texts,
    check_variables,
    default_name,
    secret_like,
    secret_values,
)
from launch.supervise import Settings, command_of, environment_of, load_redact, supervise  # noqa: E402
from launch.topology import Slice, parse_slice  # noqa: E402

__all__ = ["BACKENDS", "main"]

BACKENDS: Mapping[str, Callable[[Plan], Rendered]] = {
    "queued-resources": queued_resources.render,
    "gke-jobset": gke_jobset.render,
    "xpk": xpk.render,
    "skypilot": skypilot.render,
    "ray": ray_job.render,
}
# Options that other backends have no use for.
_USED_BY: Mapping[str, tuple[str, ...]] = {
    "logs": ("here",),
    **dict.fromkeys(
        ("name", "out", "spot", "reserved", "reservation", "slices", "chips_per_host"), tuple(BACKENDS)
    ),
    "keep": ("queued-resources", "gke-jobset", "xpk"),
    "project": ("queued-resources", "xpk"),
    "zone": ("queued-resources", "xpk", "skypilot"),
    "extras": ("queued-resources", "skypilot"),
    "runtime_version": ("queued-resources", "skypilot"),
    "service_account": ("queued-resources", "gke-jobset"),
    "network": ("queued-resources",),
    "cluster": ("xpk",),
    "namespace": ("gke-jobset", "xpk"),
    "queue": ("gke-jobset",),
    "storage": ("xpk",),
    "build": ("gke-jobset", "xpk"),
    "address": ("ray",),
}
# These backends refuse the option themselves, and say what to do instead.
_SAY_MORE = (("build", "queued-resources"), ("build", "skypilot"), ("zone", "ray"))
_MOST_PROCESSES = 256  # of this machine
_HOSTS_OF_FOUR = ("xpk",)  # where eight chips are always two hosts


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: that of the run; 2 for bad input, before anything was started."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows ? for the rest
    options.secret = list(dict.fromkeys(options.secret))
    try:
        _check_options(options, arguments)
        command, run = _command(options, arguments[cut + 1 :])
        if options.backend == "here":
            return _here(options, command, run)
        plan = _plan(options, command, run)
        rendered = BACKENDS[options.backend](plan)
        check_no_secrets(plan, rendered, os.environ)
        if options.dry_run:
            print(_shown(plan, rendered), end="")
            return 0
        return _start(plan, rendered)
    except ValueError as error:
        text = load_redact().hide_credentials(str(error))
        for _, value in secret_values(os.environ, options.secret):
            text = text.replace(value, load_redact().REDACTED)
        print(f"tpu_run: {text}", file=sys.stderr)
        return 2


def _check_options(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Raises LaunchError for texts that no file or script can hold, and for options that would be ignored."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise LaunchError(f"{argument!a}: not UTF-8. Give it in UTF-8.") from None
        if "\0" in argument:
            raise LaunchError(
                f"{argument!a}: holds the character NUL, which no command line can. Leave it out."
            )
    defaults = _parser().parse_args([])
    for key, value in vars(options).items():
        option = f"--{key.replace('_', '-')}"
        texts = value if isinstance(value, list) else [value]
        if "" in texts:
            raise LaunchError(f"{option}: the text is empty. Give one, or leave the option out.")
        if key in ("config", "env", "set", "secret"):
            continue  # a line end may be part of a value
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            raise LaunchError(
                f"{option} {value!a}: holds a line end or another character that is not printed."
            )
        if isinstance(value, str) and secret_like("", value):
            raise LaunchError(
                f"{option}: this holds a secret, which would be written into files and command lines. Leave it out"
                + (", and set RAY_API_SERVER_ADDRESS instead." if key == "address" else ".")
            )
        if key in _USED_BY and options.backend not in _USED_BY[key] and value != getattr(defaults, key):
            if (key, options.backend) in _SAY_MORE:
                continue
            raise LaunchError(
                f"{option}: --backend {options.backend} has no use for it; it is for {', '.join(_USED_BY[key])}."
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpu_run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=["here", *BACKENDS], default="here")
    add("--config", metavar="FILE", help="YAML file of the run")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; may be repeated")
    add("--run", metavar="DIR", help="run folder; with --bucket, a folder in it")
    add("--verb", choices=["train", "sft"], default="train", help="of jaxrl")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the run; may be repeated",
    )
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="variable whose value is taken from your environment",
    )
    add("--grace", type=int, default=120, metavar="SECONDS", help="between SIGTERM and SIGKILL (default 120)")
    add("--max-restarts", type=int, metavar="N", help="after preemptions (default: 0 here, 10 elsewhere)")
    add("--dry-run", action="store_true", help="print what would be written and run")

    here = parser.add_argument_group("here")
    add = here.add_argument
    add(
        "--num-processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that find each other by jax.distributed, on CPU",
    )
    add("--devices-per-process", type=int, metavar="K", help="virtual CPU devices of each")
    add("--logs", metavar="DIR", help="folder of worker-N.log (default: logs in the run folder)")

    slices = parser.add_argument_group("slices")
    add = slices.add_argument
    add("--tpu", metavar="TYPE", help="v6e-16, v5litepod-8, v5p-32, or a shape: v5p:4x4x8")
    add("--slices", type=int, default=1, metavar="N")
    add("--chips-per-host", type=int, metavar="N", help="4: eight chips as two hosts")
    add("--name", help="of the job (default: that of the run folder)")
    add("--bucket", metavar="gs://NAME[/DIR]", help=f"mounted at {MOUNT} on every host")
    add("--spot", action="store_true")
    add("--reserved", action="store_true", help="queued-resources: use what the project has reserved")
    add("--reservation", metavar="NAME", help="gke-jobset, xpk: use this reservation")
    add(
        "--out",
        metavar="DIR",
        help="for files and logs of the launch, in the repository (default runs/launch/NAME)",
    )
    add("--keep", action="store_true", help="do not delete machines or jobs at the end")
    add("--project")
    add("--zone")
    add("--extras", default="tpu", help="of the package, installed on TPU VMs (default tpu)")
    add("--runtime-version", help="software of TPU VMs (default: that of the TPU)")
    add("--service-account", help="of Google Cloud for TPU VMs, of Kubernetes for pods")
    add("--network")
    add("--cluster", help="xpk: name of the cluster")
    add("--namespace", default="default", help="of Kubernetes")
    add("--queue", help="gke-jobset: name of the Kueue queue")
    add("--storage", action="append", default=[], help="xpk: name of an attached storage; may be repeated")
    add("--image", help="container image with Python and the code at /app")
    add("--build", action="store_true", help="build the image from this repository and push it first")
    add("--address", help="ray: address of the cluster's job server (default: RAY_API_SERVER_ADDRESS)")
    return parser


def _command(options: argparse.Namespace, given: list[str]) -> tuple[tuple[str, ...], str | None]:
    """The command of every worker, and its run folder; None for a command that is not of jaxrl."""
    folder = options.run
    if folder is not None and options.bucket is not None:
        if pathlib.PurePosixPath(folder).is_absolute():
            raise LaunchError(
                f"--run {folder}: with --bucket, give a folder in the bucket, such as --run {default_name(folder)}."
            )
        if ".." in pathlib.PurePosixPath(folder).parts:
            raise LaunchError(f"--run {folder}: with --bucket, the run folder lies in it; leave out '..'.")
        folder = f"{MOUNT}/{folder}"
    if given:
        if options.config or options.set or folder:
            raise LaunchError(
                "--config, --set and --run are for jaxrl; with a command of your own after --, write them there."
            )
        if not given[0]:
            raise LaunchError("the command after -- begins with an empty word. Give the program to run.")
        pairs = [f"{word} {then}" for word, then in itertools.pairwise(given) if word.startswith("--")]
        for argument in (*given, *pairs):  # --api-key=… and --api-key …
            if secret_like("", argument):
                raise LaunchError(
                    "the command after -- holds a secret. Pass it in a variable, with --secret NAME."
                )
        return tuple(given), None
    if not options.config:
        raise LaunchError("give the run's config with --config FILE, or a command of your own after --.")
    if not folder:
        raise LaunchError(
            "give the run folder with --run DIR. The same command on the same folder goes on where it stopped."
        )
    config = pathlib.Path(options.config)
    if not os.path.isfile(config):  # also False for a name that no file can have
        raise LaunchError(f"--config {config}: there is no such file.")
    if options.backend != "here":
        config = config.resolve()
        if not config.is_relative_to(CODE):
            raise LaunchError(
                f"--config {config}: it must lie in {CODE}, the folder that is copied to the hosts."
            )
        config = config.relative_to(CODE)
    overrides: list[str] = []
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals or not key:
            shown = "…" if secret_like("", item) else item
            raise LaunchError(f"--set {shown}: write KEY=VALUE.")
        if secret_like(key, value):
            raise LaunchError(
                f"--set {key}=…: this looks like a secret, which others could read in the command line. Pass it in a variable, with "
                "--secret NAME."
            )
        overrides += ["--set", item]
    return ("jaxrl", options.verb, str(config), "--run", folder, *overrides), folder


def _variables(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    out: dict[str, str] = {}
    for item in options.env:
        name, equals, value = item.partition("=")
        if not equals:
            check_variables(((name, ""),), ())  # before it is shown
            raise LaunchError(f"--env {name}: write NAME=VALUE; a secret goes by name, with --secret {name}.")
        out[name] = value
    check_variables(tuple(out.items()), options.secret)
    return tuple(out.items())


# ---------------------------------------------------------------------------------- on this machine


def _here(options: argparse.Namespace, command: tuple[str, ...], run: str | None) -> int:
    if options.tpu or options.bucket or options.image:
        raise LaunchError(
            "--tpu, --bucket and --image are for machines elsewhere; choose one with --backend."
        )
    if options.num_processes > _MOST_PROCESSES:
        raise LaunchError(
            f"--num-processes {options.num_processes}: at most {_MOST_PROCESSES} on one machine."
        )
    logs = options.logs or (f"{run}/logs" if run is not None else "runs/logs")
    settings = Settings(
        command=command,
        processes=options.num_processes,
        devices=options.devices_per_process,
        grace=options.grace,
        max_restarts=options.max_restarts or 0,
        logs=pathlib.Path(logs),
        resume=None if run is None else pathlib.Path(run),
        secrets=tuple(options.secret),
    )
    variables = dict(_variables(options))
    if not options.dry_run and run is not None:
        settings = dataclasses.replace(
            settings, command=(_program(command[0], {**os.environ, **variables}), *command[1:])
        )
    texts = [("the command", word) for word in command]
    texts += [(f"--env {name}", value) for name, value in variables.items()]
    check_texts(texts, settings.secrets, os.environ)
    if options.dry_run:
        for index, name in enumerate(settings.names):
            extra = {
                **variables,
                **environment_of(settings, index, "127.0.0.1:FREE_PORT", {**os.environ, **variables}),
            }
            inherited = "".join(f" # ${secret}: from your environment" for secret in settings.secrets)
            print(f"# {name}, log in {logs}/{name}.log{inherited}")
            assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in extra.items())
            print(f"{assigned} {shlex.join(command_of(settings))}")
        return 0
    _require(settings.secrets)
    return supervise(settings, {**os.environ, **variables})


def _program(name: str, environment: Mapping[str, str]) -> str:
    """Where `jaxrl` is: on PATH, or beside this Python, whose virtual environment need not be activated."""
    path = environment.get("PATH", os.defpath)
    beside = os.path.dirname(sys.executable)
    found = shutil.which(name, path=path)
    if found is not None:
        return name
    found = shutil.which(name, path=beside)
    if found is None:
        raise LaunchError(
            f"there is no program {name} on PATH, nor beside this Python ({sys.executable}). Install the project (python -m pip "
            f"install -e {shlex.quote(str(CODE))}) or activate the environment that it is in, and run this again."
        )
    return found


def _require(secrets: Sequence[str]) -> None:
    missing = [name for name in secrets if not os.environ.get(name)]
    if missing:
        raise LaunchError(f"--secret {missing[0]}: the variable is not set in your environment.")


# ---------------------------------------------------------------------------------- elsewhere


def _plan(options: argparse.Namespace, command: tuple[str, ...], run: str | None) -> Plan:
    if not options.tpu:
        raise LaunchError(
            f"--backend {options.backend}: say which slice, with --tpu TYPE, such as --tpu v6e-16."
        )
    if options.num_processes != 1 or options.devices_per_process is not None:
        raise LaunchError(
            "--num-processes and --devices-per-process are for --backend here; a slice has one process a host."
        )
    if options.spot + options.reserved + bool(options.reservation) > 1:
        raise LaunchError("--spot, --reserved and --reservation: choose one.")
    per_host = options.chips_per_host
    if per_host is None and options.backend in _HOSTS_OF_FOUR:
        asked = _slice(options.tpu, None)
        per_host = 4 if asked.chips == 8 and asked.chips_per_host == 8 else None
    name = options.name or default_name(options.run or command[0])
    return Plan(
        name=name,
        slice=_slice(options.tpu, per_host),
        slices=options.slices,
        command=command,
        run=run,
        env=_variables(options),
        secrets=tuple(options.secret),
        bucket=None if options.bucket is None else Bucket.parse(options.bucket),
        image=options.image,
        build=options.build,
        grace=options.grace,
        max_restarts=10 if options.max_restarts is None else options.max_restarts,
        out=_out(options.out or f"runs/launch/{name}"),
        keep=options.keep,
        capacity="spot"
        if options.spot
        else "reserved"
        if options.reserved or options.reservation
        else "on-demand",
        reservation=options.reservation,
        project=options.project,
        zone=options.zone,
        runtime=options.runtime_version,
        service_account=options.service_account,
        network=options.network,
        cluster=options.cluster,
        namespace=options.namespace,
        queue=options.queue,
        storage=tuple(options.storage),
        address=options.address,
        extras=options.extras,
    )


def _slice(text: str, per_host: int | None) -> Slice:
    try:
        return parse_slice(text, chips_per_host=per_host)
    except ValueError as error:
        raise LaunchError(f"--tpu: {error}") from None


def _out(text: str) -> str:
    """The folder of the launch, relative to the code, so that what is written does not depend on the machine."""
    path = (CODE / text).resolve()
    if not path.is_relative_to(CODE) or path == CODE:
        raise LaunchError(f"--out {text}: it must lie in {CODE}.")
    for folder in (path, *path.parents):
        if folder.exists() and not folder.is_dir():
            raise LaunchError(f"--out {text}: {folder} is a file. Choose a folder.")
    return path.relative_to(CODE).as_posix()


def _shown(plan: Plan, rendered: Rendered) -> str:
    """All that would be written and run."""
    parts = [f"# {plan.summary()}\n", *(f"# {note}\n" for note in rendered.notes)]
    for name in plan.secrets:
        parts.append(f"# ${name} is taken from your environment when it is run\n")
    for path, text in rendered.files.items():
        parts.append(f"\n# ---- file {path}\n{text}")
    parts.append(f"\n# ---- run, in {CODE.name}/\n{shlex.join(rendered.start)}\n")
    return "".join(parts)


def _start(plan: Plan, rendered: Rendered) -> int:
    """Writes the files, runs the command in the folder of the code and waits for it."""
    _require(plan.secrets)
    try:
        (CODE / plan.out / "logs").mkdir(parents=True, exist_ok=True)
        for path, text in rendered.files.items():
            (CODE / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"{error.filename} cannot be written: {error.strerror}. Choose another folder with --out."
        ) from None
    print(f"# {plan.summary()}\n# files and logs: {plan.out}", flush=True)
    for note in rendered.notes:
        print(f"# {note}", flush=True)
    process = subprocess.Popen(rendered.start, cwd=CODE)
    # Ctrl-C reaches the script from the terminal itself; it decides what to do.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM)),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
