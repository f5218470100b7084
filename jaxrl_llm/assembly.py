"""From a config to the parts that it names: task, model, sampler, mesh. Used by training and by inference."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import Config, ScheduleSettings
from jaxrl_llm.diagnostics.parity import SEED, ParityCertificate, ParityLimits, certify, probe_prompts
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import KeyBlocks, ModelConfig
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.load import Model, config_of, load_model, with_router_bias
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.objectives import build_objective
from jaxrl_llm.parallel.mesh import learner_and_sampler, make_mesh
from jaxrl_llm.rollout.checks import self_test
from jaxrl_llm.rollout.stream import Schedule
from jaxrl_llm.rollout.task import Task, make_task
from jaxrl_llm.sampler import Completion, Engine, Sampler, SamplingParams
from jaxrl_llm.sampler.paged_cache import pages_for
from jaxrl_llm.sampler.replicas import Replicas
from jaxrl_llm.snapshots.digest import named_leaves
from jaxrl_llm.snapshots.store import SnapshotStore, locate
from jaxrl_llm.transforms.adaptive import expert_capacity, moves_router_bias
from jaxrl_llm.types import TokenBatch

__all__ = [
    "REMAT",
    "Policy",
    "Teacher",
    "as_saved",
    "build_engine",
    "build_mesh",
    "build_sampler",
    "build_task",
    "certify_policy",
    "check_snapshot_model",
    "check_teacher_source",
    "check_experts",
    "configured_model",
    "for_objective",
    "held_out_items",
    "inference_mesh",
    "in_sampler_order",
    "configured_teacher",
    "prompt_room",
    "replica_devices",
    "sampler_devices",
    "sampling_params",
    "schedule_of",
    "teacher_config",
]


@dataclasses.dataclass(frozen=True)
class Policy:
    """What can be sampled from: a model, its sampler and the task that it answers."""

    model: Model
    sampler: Sampler
    task: Task


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that the policy is trained towards."""

    config: ModelConfig
    params: Any  # in its compute dtype, sharded as the policy's are
    digest: str  # of the weight files, or of the parameters of a snapshot


REMAT: dict[str, Remat] = {"none": False, "dots": "dots", "full": True}


def configured_model(config: Config, mesh: jax.sharding.Mesh | None) -> Model:
    """Loads the model of a config, with its tokenizer and compute dtypes, spread over a mesh if one is given.

    It has what the objective asks of its experts, see `for_objective`.

    Raises:
      InputError: see `load_model` and `check_experts`; or the model brings no tokenizer.
    """
    if config.mesh.expert > 1:  # before the weights, which may take minutes
        check_experts(config, config_of(config.model.source, config.model.dtype))
    model = load_model(config.model.source, dtype=config.model.dtype, mesh=mesh)
    if model.tokenizer is None:
        raise InputError(
            f"{config.model.source} has no tokenizer, so it cannot answer a task; add tokenizer.json."
        )
    changed = dataclasses.replace(model.config, head_dtype=config.model.head_dtype)
    wanted = for_objective(config, changed)
    model = dataclasses.replace(model, config=dataclasses.replace(wanted, router_bias=False))
    return with_router_bias(model, wanted.router_bias)


def for_objective(config: Config, model: ModelConfig) -> ModelConfig:
    """The config of the model with what the objective of a run asks of its experts: biases of routers, a capacity."""
    if not model.num_experts:
        return model
    try:
        objective = build_objective(config.objective)
    except InputError:
        return model  # one's own that is not at hand: where it is needed, that is an error
    return dataclasses.replace(
        model, router_bias=moves_router_bias(objective), expert_capacity=expert_capacity(objective)
    )


def as_saved(model: Model, store: SnapshotStore, version: int) -> Model:
    """The model with biases of routers if a snapshot has some, and without if not."""
    return with_router_bias(model, "params/layers/router_bias" in store.shapes(version))


def check_snapshot_model(config: Config, store: SnapshotStore, version: int | None = None) -> Any:
    """Refuses a model of other shapes than that of a snapshot, before its weights are loaded.

    Args:
      version: None: the newest that can be read; what is damaged is reported where it is restored.

    Returns:
      The config that the snapshot was saved with; None where no snapshot can be read.

    Raises:
      InputError: parameters are missing or have other shapes; the message names model.source.
    """
    for candidate in list(reversed(store.versions())) if version is None else [version]:
        try:
            saved, began = store.shapes(candidate), store.meta(candidate).get("config")
        except InputError:
            continue
        here = named_leaves(abstract_params(config_of(config.model.source, config.model.dtype)))
        for name, leaf in here.items():
            there = saved.get(f"params/{name}")
            if there != leaf.shape:
                found = "has none" if there is None else f"has {list(there)}"
                source = began["model"]["source"] if began else "the model that the run began with"
                raise InputError(
                    f"model.source: {config.model.source} is not the model of snapshot {candidate} in {store.directory}: its "
                    f"{name} has the shape {list(leaf.shape)}, the snapshot {found}. Set model.source={source}, or use "
                    "another run."
                )
        return began
    return None


def check_experts(config: Config, model: ModelConfig) -> None:
    """Refuses shards of experts (`mesh.expert`) of a model that has none, or whose experts do not divide into them.

    Raises:
      InputError: says which numbers there may be.
    """
    shards, experts, source = config.mesh.expert, model.num_experts, config.model.source
    if shards == 1 or (experts and experts % shards == 0):
        return
    if not experts:
        raise InputError(
            f"mesh.expert: {shards} shards of experts, but {source} has none: it is a dense model. Set mesh.expert to 1 and "
            f"give its devices to another axis, for example mesh.fsdp={config.mesh.fsdp * shards}."
        )
    divisors = [str(n) for n in range(1, experts + 1) if experts % n == 0]
    raise InputError(
        f"mesh.expert: {shards} shards, but {source} has {experts} experts, which do not divide into so many. Choose one of "
        f"{', '.join(divisors)}."
    )


_ENOUGH_FOR_A_PRODUCT = 16  # tokens of a page, from which on a sum over them comes about as over a whole row
_BLOCKS = {True: 4, False: 32}  # most that are worth their time, in packed rows and where a row is a sequence


def in_sampler_order(config: Config, model: Model, *, packed: bool) -> Model:
    """The model whose learner adds up keys in the order of the sampler, where that gives the sampler's log-probs.

    That is in bfloat16 on a CPU, whose products of weights give a token the same bits in any batch. In float32 they
    do not, and last bits of float32 are far below anything that training sees.

    Args:
      packed: the learner's rows may hold several sequences.
    """
    s = config.sampler
    blocks = pages_for(config.model.max_context, s.page_size)
    if (
        jax.default_backend() != "cpu"
        or config.model.dtype != "bfloat16"
        or (s.weights, s.kv) != ("compute", "compute")
        or s.page_size < _ENOUGH_FOR_A_PRODUCT
        or blocks > _BLOCKS[packed]
        or config.mesh.context > 1  # tokens that are split are computed block by block
    ):
        return model
    order = KeyBlocks(s.page_size, blocks if packed else None)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, key_blocks=order))


def configured_teacher(config: Config, model: Model, mesh: jax.sharding.Mesh | None) -> Teacher | None:
    """The teacher of a config, beside the model that it teaches; None when it has none.

    Raises:
      InputError: see `load_model`; no such snapshot; another vocabulary than the model's, too few positions, or shapes
        that the mesh does not divide.
    """
    given = config.teacher
    dtype = given.dtype or config.model.dtype
    if given.snapshot is not None:
        where = f"teacher.snapshot: {given.snapshot}"
        teacher = _of_snapshot(given.snapshot, where, dtype, mesh)
    elif given.source is not None:
        where = f"teacher.source: {given.source}"
        check_teacher_source(config)
        teacher = _load_teacher(given.source, where, dtype, mesh)
    else:
        return None
    _check_vocabulary(where, teacher, model)
    if config.model.max_context > teacher.config.max_positions:
        raise InputError(
            f"{where} has positions for {teacher.config.max_positions} tokens, fewer than model.max_context "
            f"{config.model.max_context}; lower that, or choose another teacher."
        )
    # Every product and norm reads its weight in the compute dtype, so that a frozen tree need not be wider.
    params = jax.tree.map(lambda x: x.astype(dtype), teacher.params)
    return Teacher(teacher.config, params, teacher.digest)


def teacher_config(config: Config) -> ModelConfig | None:
    """The config of the teacher, before its weights are loaded; None without one.

    Raises:
      InputError: see `config_of`; no such snapshot, or it does not say of which model it is.
    """
    given = config.teacher
    dtype = given.dtype or config.model.dtype
    if given.snapshot is not None:
        directory, version = locate(given.snapshot)
        meta = SnapshotStore(directory, read_only=True).meta(version)
        return config_of(_began_from(meta, f"teacher.snapshot: {given.snapshot}"), dtype)
    if given.source is None:
        return None
    check_teacher_source(config)
    return config_of(given.source, dtype)


def check_teacher_source(config: Config) -> None:
    """Refuses a run folder where a model is asked for. Looks at names only, so that it may come before any loading.

    Raises:
      InputError: says where a run folder is given.
    """
    source = config.teacher.source
    if source is None or not os.path.isdir(os.path.expanduser(source)):
        return
    if os.path.exists(os.path.join(os.path.expanduser(source), "config.json")):
        return
    try:
        locate(source)
    except (InputError, OSError):
        return  # not a run; whether it is a model, `load_model` says
    raise InputError(
        f"teacher.source: {source} holds snapshots of a run, not a model. Give it as teacher.snapshot: "
        f"--set teacher.snapshot={source}, and leave teacher.source out."
    )


def _load_teacher(source: str, where: str, dtype: str, mesh: jax.sharding.Mesh | None) -> Model:
    try:
        return load_model(source, dtype=dtype, mesh=mesh)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _of_snapshot(path: str, where: str, dtype: str, mesh: jax.sharding.Mesh | None) -> Model:
    """A snapshot as a model of its own: the model that its run began with, with its parameters and their digest."""
    directory, version = locate(path)
    store = SnapshotStore(directory, read_only=True)
    meta = store.meta(version)
    model = _load_teacher(_began_from(meta, where), where, dtype, mesh)
    model = as_saved(model, store, int(meta["version"]))
    params, meta = store.restore_params(int(meta["version"]), like=model.params)
    return dataclasses.replace(model, params=params, digest=str(meta["fingerprint"]))


def _began_from(meta: Mapping[str, Any], where: str) -> str:
    """The source of the model that the run of a snapshot began with."""
    source = meta.get("config", {}).get("model", {}).get("source")
    if not isinstance(source, str):
        raise InputError(
            f"{where}: the snapshot does not say which model it is of; give a model as teacher.source."
        )
    return source


def _check_vocabulary(where: str, teacher: Model, model: Model) -> None:
    if teacher.tokenizer is None:
        raise InputError(
            f"{where} has no tokenizer, so nobody knows whether it reads the policy's tokens; add tokenizer.json."
        )
    mine, its = model.config.vocab_size, teacher.config.vocab_size
    if mine != its:
        raise InputError(
            f"{where} has a vocabulary of {its} tokens, the policy ({model.source}) one of {mine}. A teacher must have the "
            "tokenizer of the policy: choose one of the same family."
        )
    ours, theirs = model.tokenizer.vocabulary, teacher.tokenizer.vocabulary
    if ours != theirs:
        other = min(text for text, i in {*ours.items()} ^ {*theirs.items()})
        raise InputError(
            f"{where} has another tokenizer than the policy ({model.source}): token {other!r} is {theirs.get(other)} there and "
            f"{ours.get(other)} here. Choose a teacher of the same family."
        )


def build_task(config: Config) -> Task:
    """The task of a config, checked: its verifier must know right from wrong.

    Raises:
      InputError: no such task, arguments that it does not take, or a verifier that fails its self-test.
    """
    task = make_task(config.task.name, config.task.args, system=config.task.system)
    self_test(task)
    return task


def build_sampler(config: Config, model: Model) -> Sampler:
    """The sampler of a config; it computes where the weights that it is called with are.

    Raises:
      InputError: `model.max_context` is more than the model has positions for.
    """
    _check_context(config, model)
    return Sampler(
        model.config,
        slots=config.sampler.slots,
        page_size=config.sampler.page_size,
        pages=config.sampler.pages,
        max_context=config.model.max_context,
        tokenizer=model.tokenizer,
        steps_per_dispatch=config.sampler.steps_per_dispatch,
        weights=config.sampler.weights,
        kv=config.sampler.kv,
    )


def certify_policy(
    config: Config,
    sampler: Sampler,
    tokenizer: Any,
    params: Any,
    score: Callable[[Any, TokenBatch], Any],
    sampling: SamplingParams,
    *,
    probes: int,
    exact: Callable[[Any, Sequence[Completion], SamplingParams], Sequence[np.ndarray]] | None = None,
    sampled_from: Any = None,
    limits: ParityLimits | None = None,
    mesh: jax.sharding.Mesh | None = None,
    version: int = 0,
) -> ParityCertificate:
    """The parity certificate of a policy: pinned probes, sampled as `sampling` says but for what ends a completion.

    Args:
      sampler, tokenizer, params: of the policy.
      score: of the learner, see `learner.score.make_score`.
      sampling: max_tokens, n and temperature of a probe.
      probes: prompts, at most 8.
      exact: of `sampler.rescore.ExactScorer.completions`; None = exact scoring is not compared.
      sampled_from: the same params where the sampler computes; None: `params`.
      limits: None: those of the compute dtype.
      mesh: of the learner.
      version: of the policy.
    """
    new = min(sampling.max_tokens, config.model.max_context // 2)
    sampling = dataclasses.replace(
        sampling,
        max_tokens=new,
        min_tokens=min(sampling.min_tokens, new),
        seed=SEED,
        stop=(),
        stop_ids=(),  # every completion has the same length
        greedy_too=False,
    )
    model = sampler.config
    return certify(
        lambda prompts: sampler.generate(
            params if sampled_from is None else sampled_from, prompts, sampling, version=version
        ),
        score,
        probe_prompts(tokenizer, count=probes, longest=config.model.max_context - new),
        params=params,
        config=model,
        temperature=sampling.temperature,
        exact=None if exact is None else lambda params, completions: exact(params, completions, sampling),
        limits=limits,
        sampler={"slots": config.sampler.slots, "page_size": config.sampler.page_size},
        mesh=mesh,
        rows_multiple=config.learner.micro_batch_rows,
        pad_id=model.pad_id or 0,
        version=version,
    )


def _check_context(config: Config, model: Model) -> None:
    if config.model.max_context > model.config.max_positions:
        raise InputError(
            f"model.max_context: {config.model.max_context} tokens, but {config.model.source} has positions for "
            f"{model.config.max_positions}; use at most that."
        )


_PREFILL_CALLS = 4  # in one step while rows decode, so that a long prompt does not hold up the others


def build_engine(config: Config, model: Model, replicas: int = 1) -> Engine | Replicas:
    """The engine of a config, for serving; without `sampler.pages`, every slot has pages for the whole context.

    Args:
      replicas: engines, each with the slots of the config and a copy of the weights on a device of its own.

    Raises:
      InputError: `model.max_context` is more than the model has positions for, or there are fewer devices than replicas.
    """
    _check_context(config, model)
    s, context = config.sampler, config.model.max_context
    options: dict[str, Any] = dict(
        slots=s.slots,
        pages=s.pages or 1 + s.slots * pages_for(context, s.page_size),
        page_size=s.page_size,
        max_context=context,
        tokenizer=model.tokenizer,
        steps_per_dispatch=s.steps_per_dispatch,
        prefill_calls=_PREFILL_CALLS,
        weights=s.weights,
        kv=s.kv,
    )
    if replicas == 1:
        return Engine(model.config, **options)
    return Replicas(model.config, replica_devices(replicas), **options)


def replica_devices(replicas: int) -> list[jax.Device]:
    """The devices of so many replicas.

    Raises:
      InputError: there are fewer.
    """
    devices = jax.local_devices()
    if not 1 <= replicas <= len(devices):
        raise InputError(
            f"--replicas must be in [1, {len(devices)}], got {replicas}: each takes a device, and this machine has "
            f"{len(devices)}."
        )
    return devices[:replicas]


def held_out_items(config: Config, task: Task) -> int:
    """Items that are evaluated: those of the config, at most what the held-out split has."""
    items = config.evaluation.items
    size = task.split("eval", config.evaluation.seed).size if items else None
    return items if size is None else min(items, size)


def prompt_room(config: Config, task: Task) -> int:
    """Tokens that a prompt may have.

    Raises:
      InputError: the answers of the task leave no room for a prompt.
    """
    new = config.rollout.max_tokens or task.max_tokens
    room = config.model.max_context - new
    if room < 1:
        raise InputError(
            f"model.max_context: {config.model.max_context} tokens hold no prompt beside {new} new ones; raise it or "
            f"lower rollout.max_tokens."
        )
    return min(room, config.task.max_prompt_tokens or room)


def sampling_params(config: Config, task: Task, **changes: Any) -> SamplingParams:
    """The sampling distribution of the training rollouts, with `changes` for evaluation."""
    r = config.rollout
    most = r.max_tokens or task.max_tokens
    if r.min_tokens > most:
        raise InputError(
            f"rollout.min_tokens: {r.min_tokens} is more than the {most} tokens that an answer may have "
            "(rollout.max_tokens, or what the task suggests); lower it or raise rollout.max_tokens."
        )
    params = SamplingParams(
        max_tokens=most,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        record_support=r.max_support,
        min_tokens=r.min_tokens,
        n=r.group_size,
        stop=task.stop if r.stop is None else r.stop,
        seed=config.seed,
    )
    return dataclasses.replace(params, **changes)


def schedule_of(config: Config) -> Schedule | None:
    """The schedule of the stream of rollouts; None: every train step samples for itself.

    Raises:
      InputError: settings that exclude each other.
    """
    s, r = config.schedule, config.rollout
    if s == ScheduleSettings() and not config.mesh.sampler:
        return None
    if s.max_age == 0 and s.swap != "keep":
        raise InputError(
            f"schedule.swap: {s.swap} says what becomes of samples under way when the weights change, and with max_age=0 none "
            "are. Raise schedule.max_age, or leave swap out."
        )
    return Schedule(
        groups=r.prompts,
        samples=r.group_size,
        max_age=s.max_age,
        sync_every=s.sync_every,
        swap=s.swap,
        max_drops=r.refill_rounds * r.prompts,
        ahead=bool(config.mesh.sampler and s.max_age >= s.sync_every),
    )


def build_mesh(config: Config) -> jax.sharding.Mesh | None:
    """The device mesh of a config, None for one device."""
    m = config.mesh
    if m.learner == 1:
        return None
    try:
        return make_mesh(data=m.data, fsdp=m.fsdp, tensor=m.tensor, expert=m.expert, context=m.context)
    except ValueError as error:
        raise InputError(str(error)) from None


def inference_mesh(config: Config) -> jax.sharding.Mesh | None:
    """The mesh that a policy is spread over when it is not trained: that of the config where so many devices are here.

    None: they are not, or it is one; the policy is then on one device, so that a run on a pod can be looked at elsewhere.
    """
    return build_mesh(config) if config.mesh.learner <= len(jax.devices()) else None


def sampler_devices(config: Config) -> list[jax.Device]:
    """The devices that only sample, beside the learner's (`parallel.mesh.learner_and_sampler`); none: the learner's sample, too.

    Raises:
      InputError: there are not that many, or they belong to several processes.
    """
    m = config.mesh
    if not m.sampler:
        return []
    devices, learner = jax.devices(), m.learner
    if jax.process_count() > 1:
        raise InputError(
            f"mesh.sampler: {m.sampler} devices that only sample need a run of one process, and this one has "
            f"{jax.process_count()}. Leave mesh.sampler out."
        )
    if learner + m.sampler > len(devices):
        raise InputError(
            f"mesh.sampler: {m.sampler} devices beside the {learner} of the learner (the product of the other axes) are "
            f"{learner + m.sampler}, and there are {len(devices)}. Lower them or leave mesh.sampler out; on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={learner + m.sampler} makes as many."
        )
    return learner_and_sampler(devices, learner, m.sampler)[1]
