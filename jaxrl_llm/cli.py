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
from typing import Any

import tyro

from jaxrl_llm.arguments import (
    Bench,
    Command,
    Compare,
    Convert,
    Eval,
    Jetstream,
    Objectives,
    Parity,
    Plan,
    ReplaySpan,
    Report,
    Sample,
    Schedule,
    Serve,
    ServerLoad,
    Sft,
    Simulate,
    Speed,
    Train,
)
from jaxrl_llm.diagnostics.redact import redact_text
from jaxrl_llm.errors import InputError, SnapshotError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the exit code of the command."""
    command = tyro.cli(Command, args=argv, prog="jaxrl", description=_DESCRIPTION)
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


def _bench(args: Speed | Compare | Schedule | ServerLoad) -> int:
    if isinstance(args, Schedule):
        return _bench_schedule(args)
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


def _bench_schedule(args: Schedule) -> int:
    from jaxrl_llm.config import load_config

    config = load_config(args.config, args.overrides)
    from jaxrl_llm.bench.schedule import bench_schedule, describe

    with _stdout_to_stderr(args.json):
        result = bench_schedule(config, args.lengths, updates=args.updates)
    print(json.dumps(result) if args.json else describe(result))
    return 0


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
