"""The training loop: sample, score, update, measure, snapshot.

One train step, in the order in which it happens:

 0. With a schedule, 1 to 3 are a stream that outlives train steps (`rollout.stream`): samples under way go on under
    the next weights, which come every schedule.sync_every train steps, and no group older than schedule.max_age is
    trained on.
 1. `PromptSource` gives the next prompts; their text became token ids in `rollout.task`.
 2. `Sampler.generate` draws a group of completions for each; every token carries its behavior log-prob and
    the version of the policy that drew it (and, where the objective reads them, the likeliest tokens in its place;
    a greedy completion of each prompt is a baseline).
 3. `rollout.collect` scores the completions: trajectories.
 4. `rollout.pack` lays them out as a `TokenBatch`.
 5. `learner.score` fills the log-probs that `needed_fields(objective)` lists, and no others; those of a teacher too,
    and its hidden states, from which updates take divergences over the whole vocabulary.
 6. `objective.prepare` writes advantage, weight, norm and count from the whole batch.
 7. `learner.update` takes one optimiser step per minibatch (`learner.critic` one before it, where the objective
    reads values; trpo's is that of `learner.trust_region`).
 8. Metrics are written; every so often the policy is evaluated and a snapshot is saved.

The parameters that the sampler reads are the learner's own tree: nothing is copied by name.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np
import optax

from jaxrl_llm import __version__
from jaxrl_llm.assembly import (
    REMAT,
    Policy,
    build_mesh,
    build_sampler,
    build_task,
    certify_policy,
    check_snapshot_model,
    configured_model,
    configured_teacher,
    held_out_items,
    in_sampler_order,
    prompt_room,
    sampler_devices,
    sampling_params,
    schedule_of,
    teacher_config,
)
from jaxrl_llm.config import Config, as_data, flatten
from jaxrl_llm.data.source import PromptSource
from jaxrl_llm.diagnostics.display import make_display
from jaxrl_llm.diagnostics.environment import write_run_info
from jaxrl_llm.diagnostics.metrics import LedgerWriter, MetricsWriter, SamplesWriter, memory_metrics
from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.diagnostics.report import write_report
from jaxrl_llm.diagnostics.trackers import make_trackers
from jaxrl_llm.errors import InputError, MisfitError
from jaxrl_llm.fleet.stream import FleetStream
from jaxrl_llm.fleet.workers import Workers, check_fleet, fleet_stream, open_transport
from jaxrl_llm.learner.critic import fill_values, init_critic, make_critic_step, make_values
from jaxrl_llm.learner.exact import make_exact_score
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.reductions import CHECK_EVERY, check_sums, make_reduction_check
from jaxrl_llm.learner.rows import head_chunk, minibatches
from jaxrl_llm.learner.score import (
    Score,
    fill_logprobs,
    make_score,
    make_score_lists,
    make_score_teacher,
    teacher_needs,
    topk_size,
)
from jaxrl_llm.learner.share import trajectory_shares
from jaxrl_llm.learner.staleness import make_ratios_by_age
from jaxrl_llm.learner.state import finish_train_step, init_state, move_reference, reset_reference
from jaxrl_llm.learner.trust_region import make_trust_region_step
from jaxrl_llm.learner.update import Policy as LearnerPolicy
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.memory import check_memory
from jaxrl_llm.models.formats.progress import reporting
from jaxrl_llm.models.load import Model
from jaxrl_llm.objectives import (
    build_objective,
    check_group_size,
    check_sampled_precision,
    check_teacher,
    check_trainable,
    is_trust_region,
)
from jaxrl_llm.parallel.agree import any_process, check_same, do_on_first, is_first, on_first, several
from jaxrl_llm.parallel.host import place, read
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.processes import check_covers
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.checks import reward_parts
from jaxrl_llm.rollout.collect import collect, refilled, rollout_metrics, staleness_metrics
from jaxrl_llm.rollout.evaluate import evaluate
from jaxrl_llm.rollout.pack import ON_REQUEST, pack
from jaxrl_llm.rollout.stream import Stream, StreamState
from jaxrl_llm.run_folder import (
    abandon_folder,
    check_complete,
    look_at,
    prepare_folder,
    resumed_config,
    sole_writer,
    write_config,
)
from jaxrl_llm.sampler import SamplingParams
from jaxrl_llm.sampler.base import Completion, SamplerStats
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.sampler.replicas import Replicas
from jaxrl_llm.sampler.rescore import ExactScorer
from jaxrl_llm.snapshots.store import SnapshotStore, fingerprint
from jaxrl_llm.stopping import EXIT_STOPPED, StoppedError, StopRequest
from jaxrl_llm.transforms import LossTransform, needed_fields, needs, takes_pairs
from jaxrl_llm.types import LearnerState, Mean, TokenBatch, Trajectory
from jaxrl_llm.unused import unused_settings

__all__ = ["BaseRun", "Position", "Run", "Source", "merge_updates", "session", "train"]


# ------------------------------------------------------------------------------------- metrics

# What the learner calls a figure -> its key in metrics.jsonl, for names that belong to another group.
_LEARNER_KEYS = {
    "loss": "policy/loss",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "skipped": "optimizer/skipped",
    "trained_tokens": "optimizer/trained_tokens",
}


def merge_updates(updates: list[dict[str, Mean]]) -> dict[str, float]:
    """The metrics of all optimiser steps of one train step: means merge, maxima and minima are taken.

    The sampler-learner gap is that of the first update, where the weights are still those that sampled.
    """
    out: dict[str, float] = {}
    for name in updates[0]:
        parts = [(float(u[name].total), float(u[name].count)) for u in updates]
        values = [total / count if count else 0.0 for total, count in parts]
        if name.startswith("logprob_gap"):
            value = values[0]
        elif name.endswith("_max"):
            value = max(values)
        elif name.endswith("_min"):
            value = min(values)
        elif name == "skipped":
            value = sum(values)
        else:
            count = sum(count for _, count in parts)
            value = sum(total for total, _ in parts) / count if count else 0.0
        out[_LEARNER_KEYS.get(name, f"policy/{name}")] = value
    return out


# ------------------------------------------------------------------------------------- the run


def _named(digest: str | None) -> str:
    return "no teacher" if digest is None else f"a teacher with the digest {digest[:12]}…"


class Position(NamedTuple):
    """Where the data of a run is: what a snapshot holds besides the state of the learner."""

    cursor: dict[str, Any]  # of the source
    stream: StreamState | None = None  # what is sampled over several train steps


class Source(Protocol):
    """Where the data of a run comes from; resumable at any step."""

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a saved state. Raises InputError when it belongs to other data."""


class BaseRun(abc.ABC):
    """What every run is made of, wherever its data comes from: the learner, its state and its snapshots.

    A subclass gives the data and the evaluation.
    """

    command = "train"  # of `jaxrl`
    phase = "rollout"  # what getting the data is called, in the display and under time/
    notes: tuple[str, ...] = ()  # for whoever started it, shown once
    masses: Sequence[Any] = ()  # of the updates of the last train step, see `learner.share.trajectory_shares`
    source: Source
    ratios_by_age: Callable[[TokenBatch], Callable[[], dict[str, float]]] | None = (
        None  # where batches hold tokens of several ages
    )
    exact: Score | None = None  # log-probs that are the sampler's bit for bit, where the config wants them
    ledger_lines: Sequence[dict[str, Any]] = ()  # of the last train step, for ledger.jsonl
    parity: dict[str, Any] | None = None  # the parity certificate of the policy that this process began with
    laying_out = 0.0  # seconds of `gather` that were neither sampling nor rewards

    def __init__(
        self,
        config: Config,
        folder: pathlib.Path,
        objective: LossTransform,
        model: Model,
        *,
        policy: LearnerPolicy | None = None,
        entropy: bool = True,
    ):
        if config.learner.exact != "off" and self.command != "train":
            raise InputError(
                f"learner.exact: {config.learner.exact} computes the log-probs that a sampler recorded, and jaxrl "
                f"{self.command} samples nothing; use off."
            )
        self.config, self.folder, self.objective = config, folder, objective
        self.warnings: list[str] = []  # for the display, as they come up
        self.needed = frozenset(need.field for need in needs(objective) if need.record == "batch")
        self.mesh = build_mesh(config)
        wanted = teacher_needs(objective)
        teacher = configured_teacher(config, model, self.mesh)
        learner = config.learner
        rows, remat, chunk = learner.micro_batch_rows, REMAT[learner.remat], head_chunk(self.mesh)
        o = config.optimizer
        self.optimizer = self.optimizer_of("optimizer", o.learning_rate, o.warmup_updates)
        try:
            if is_trust_region(config.objective):
                self.optimizer = optax.identity()
                self.update = make_trust_region_step(
                    self.objective,
                    model.config,
                    self.mesh,
                    **dataclasses.asdict(cast(Any, config.trust_region)),
                    micro_batch_rows=rows,
                    remat=remat,
                    chunk=chunk,
                    entropy=entropy,
                )
            else:
                self.update = make_update_step(
                    self.objective,
                    model.config,
                    self.optimizer,
                    self.mesh,
                    micro_batch_rows=rows,
                    remat=remat,
                    chunk=chunk,
                    entropy=entropy,
                    policy=policy,
                    masses=self.command == "train",
                    teacher=None if teacher is None else teacher.config,
                )
        except ValueError as error:
            raise InputError(f"learner: {error}") from None
        critic_optimizer = None
        if self.has_critic:
            c = config.critic
            critic_optimizer = self.optimizer_of("critic", c.learning_rate, c.warmup_updates)
            self.score_values = make_values(model.config, self.mesh, micro_batch_rows=rows)
            self.critic_step = make_critic_step(
                model.config,
                critic_optimizer,
                self.mesh,
                clip=c.clip,
                whiten=c.whiten,
                micro_batch_rows=rows,
                remat=remat,
            )
        self.prepare = make_prepare(self.objective, self.mesh)
        self.score = make_score(
            model.config, self.mesh, micro_batch_rows=learner.micro_batch_rows, chunk=chunk
        )
        self.teacher_config = None if teacher is None else teacher.config
        self.teacher_digest = None if teacher is None else teacher.digest
        self.teach: Callable[[TokenBatch], TokenBatch] | None = None
        self.taught: tuple[Any, ...] = ()  # what an update takes besides: the teacher's parameters
        if teacher is not None:
            try:
                score_teacher = make_score_teacher(
                    teacher.config,
                    wanted,
                    self.mesh,
                    micro_batch_rows=learner.micro_batch_rows,
                    chunk=chunk,
                )
            except ValueError as error:
                raise InputError(f"objective: {error}") from None
            self.teach = functools.partial(score_teacher, teacher.params)
            self.taught = () if wanted.divergence is None else (teacher.params,)
        self.score_lists = None
        if listed := topk_size(self.objective):
            try:
                self.score_lists = make_score_lists(
                    model.config,
                    listed,
                    self.mesh,
                    micro_batch_rows=learner.micro_batch_rows,
                    chunk=chunk,
                )
            except ValueError as error:
                raise InputError(f"objective: {error}") from None
        try:
            self.state = init_state(
                model.params,
                self.optimizer,
                self.objective,
                key=jax.random.key(config.seed),
                reference="logprob_reference" in self.needed,
                critic=init_critic(model.params, model.config) if self.has_critic else None,
                critic_optimizer=critic_optimizer,
                config=model.config,
                mesh=self.mesh,
                offload=learner.offload,
            )
        except ValueError as error:  # shapes that the mesh does not divide
            raise InputError(f"mesh: {error}") from None
        if self.state.reference is None and (config.reference.reset_every or config.reference.move_every):
            raise InputError(
                "reference: the objective compares with no reference, so that there is none to reset or move. Give "
                "it a KL penalty (objective.kl_coef of a recipe, or penalize_kl), or leave reset_every and "
                "move_every at 0."
            )
        self.snapshots = SnapshotStore(
            folder / "snapshots", keep_last=config.snapshots.keep_last, keep_every=config.snapshots.keep_every
        )
        self.notes = (*self.notes, *unused_settings(config, objective, self.command))
        self.model_config, self.tokenizer = model.config, model.tokenizer
        self.digest = model.digest

    @property
    def has_critic(self) -> bool:
        """Whether the objective reads values, so that a critic is trained beside the policy."""
        return bool(self.needed & {"value", "bootstrap_value"})

    def optimizer_of(self, where: str, rate: float, warmup: int) -> optax.GradientTransformation:
        """The optimiser of the config with a learning rate and a warm-up of its own; `where` names it in errors."""
        config, o = self.config, self.config.optimizer
        try:
            return make_optimizer(
                rate,
                warmup_steps=warmup,
                total_steps=config.steps * config.learner.minibatches * config.learner.epochs,
                schedule=o.schedule,
                b1=o.b1,
                b2=o.b2,
                eps=o.eps,
                weight_decay=o.weight_decay,
                clip_norm=o.clip_norm,
            )
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None

    @property
    def version(self) -> int:
        """Train steps done."""
        return int(self.state.version)

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Samples, examples or pairs of a train step, for the display."""

    @abc.abstractmethod
    def gather(self, on_progress: Any) -> tuple[TokenBatch, list[Any], dict[str, float]]:
        """The data of one train step: a batch, its trajectories (for samples.jsonl) and their metrics."""

    @abc.abstractmethod
    def evaluate(self, on_progress: Any = None) -> dict[str, float]:
        """Figures of the current policy on held-out data."""

    @abc.abstractmethod
    def speed(self, row: dict[str, float]) -> float:
        """Tokens per second of a train step, from its row of metrics."""

    @property
    def evaluates(self) -> bool:
        """Whether there is held-out data."""
        return bool(self.config.evaluation.items)

    def learn(self, batch: TokenBatch) -> tuple[dict[str, float], dict[str, float]]:
        """One train step on a rollout batch. Returns (metrics, seconds by phase)."""
        config, version = self.config, self.version
        begin = time.perf_counter()
        self.hand_over(version)
        if self.mesh is not None and several():  # what is made of it is then an array of all processes, too
            batch = place(batch, replicated(self.mesh))
        if self.has_critic:
            batch = fill_values(batch, self.state, self.score_values, self.needed)
        if self.exact is not None and "logprob_proximal" in self.needed:
            batch = batch.replace(logprob_proximal=self.exact(self.state.params, batch))
        batch = fill_logprobs(batch, self.state, self.score, self.needed, self.score_lists, self.teach)
        moved: Callable[[], dict[str, float]] = dict
        if self.ratios_by_age is not None and batch.logprob_proximal is not None:
            moved = self.ratios_by_age(
                batch
            )  # read at the end: nothing is waited for before the updates are on their way
        batch, objective_state = self.prepare(batch, self.state.objective_state)
        if not self.overlaps:
            jax.block_until_ready(batch)
        scored = time.perf_counter()
        self.state = self.state.replace(objective_state=objective_state)
        updates: list[Any] = []
        masses: list[Any] = []
        for epoch in range(config.learner.epochs):
            # One minibatch needs no order; several are drawn from shuffled rows.
            key = jax.random.fold_in(jax.random.fold_in(self.state.key, version), epoch)
            shuffle = key if config.learner.minibatches > 1 else None
            for minibatch in minibatches(batch, config.learner.minibatches, shuffle):
                of_critic: dict[str, Mean] = {}
                if self.has_critic:
                    self.state, of_critic = self.critic_step(self.state, minibatch)
                if self.exact is not None and config.learner.exact == "train":
                    # Before the first update the weights are the proximal ones.
                    exact = None if updates else minibatch.logprob_proximal
                    exact = self.exact(self.state.params, minibatch) if exact is None else exact
                    minibatch = minibatch.replace(logprob_exact=exact)
                self.state, metrics = self.update(self.state, minibatch, *self.taught)
                if not updates and version % CHECK_EVERY == 0:
                    self.check_reductions(minibatch, metrics)
                if "gradient_mass" in metrics:
                    mass = metrics.pop("gradient_mass").total
                    masses.append((mass, minibatch.trajectory, minibatch.mask))
                updates.append(metrics | of_critic)
        self.state = self.renew_reference(finish_train_step(self.state))
        apart = self.meanwhile(version + 1, begin)
        jax.block_until_ready(self.state.params)
        done = time.perf_counter()
        self.masses = masses
        sampling = apart.get("time/rollout", 0.0)
        return merge_updates(read(updates)) | moved(), apart | {
            "time/score": scored - begin,
            "time/update": done - scored - sampling,
        }

    @property
    def overlaps(self) -> bool:
        """Whether something is sampled on other devices while updates are computed."""
        return False

    def hand_over(self, version: int) -> None:
        """Gives the weights of `version` away before the updates of its train step consume them."""
        return

    def meanwhile(self, version: int, begin: float) -> dict[str, float]:
        """What is done while the updates that make `version` are computed, which began at `begin`. Returns seconds."""
        return {}

    def check_reductions(self, batch: TokenBatch, metrics: dict[str, Mean]) -> None:
        """Compares the sums of an update with the host's, and over a mesh the gradient of a probe with its formula.

        Raises:
          ReductionError: they differ.
        """
        check_sums(metrics, batch, batch_shards(self.mesh))
        if self.mesh is not None:
            self.probe(batch)

    @functools.cached_property
    def probe(self) -> Callable[[TokenBatch], None]:
        """See `learner.reductions`."""
        return make_reduction_check(self.mesh, micro_batch_rows=self.config.learner.micro_batch_rows)

    def shares(self, number: int) -> list[float] | None:
        """The part that each trajectory had in the gradients of the last train step, where it is measured."""
        if not self.masses:
            return None
        return trajectory_shares(read(self.masses), number).tolist()

    def renew_reference(self, state: LearnerState) -> LearnerState:
        """The state with the reference that the config wants after this train step."""
        settings = self.config.reference
        if not (settings.reset_every or settings.move_every):
            return state  # without looking at the version, which may not be computed yet
        version = int(state.version)
        if settings.reset_every and version % settings.reset_every == 0:
            return reset_reference(state, self.optimizer if settings.reset_optimizer else None)
        if settings.move_every and version % settings.move_every == 0:
            return move_reference(state, settings.tau)
        return state

    def position(self) -> Position:
        """Where the data of the run is, between two train steps."""
        return Position(self.source.state())

    def barrier(self, position: Position) -> None:
        """What a run does after a snapshot, so that it stays equal to one that resumes from there."""
        return  # what is not sampled over several train steps needs nothing

    def save(self, position: Position, metric: float | None = None) -> None:
        """Starts saving a snapshot of the state and of everything that the next train step depends on."""
        meta = {
            "cursor": position.cursor,
            "stream": None if position.stream is None else position.stream.as_data(),
            "config": as_data(self.config),
            "model": self.digest,
            "teacher": self.teacher_digest,  # frozen, so that a snapshot names it and does not hold it
            "jaxrl_llm": __version__,
            "jax": jax.__version__,
            "fingerprint": fingerprint(self.state.params),
            "parity": self.parity,
        }
        self.snapshots.save(self.version, self.state, meta, metric=metric)

    def restore(self) -> None:
        """Goes back to the newest usable snapshot, or stays at the beginning when the run has none yet."""
        if self.snapshots.latest() is None:
            return
        try:
            self.state, meta = self.snapshots.restore(like=self.state)
        except MisfitError as error:
            raise InputError(f"{error}{_changed(self.config, error.config)}") from None
        if meta["model"] != self.digest:
            raise InputError(
                f"model.source: {self.config.model.source} is not the model that this run started from (its weight "
                f"files have SHA-256 {self.digest[:12]}…, the run began with {meta['model'][:12]}…). Give the path of "
                "the original, or start another run."
            )
        began = meta.get("teacher")
        if began != self.teacher_digest:
            raise InputError(
                f"teacher: this run began with {_named(began)} and now has {_named(self.teacher_digest)}. Give the "
                "original, or start another run."
            )
        self.source.restore(meta["cursor"])
        self.restore_stream(meta.get("stream"))
        self.snapshots.discard_after(self.version)

    def restore_stream(self, data: dict[str, Any] | None) -> None:
        """Goes on with what was under way when a snapshot was saved; None: nothing was."""
        return

    def close(self) -> None:
        """Ends what would outlive the run."""
        return


_OF_THE_STATE = ("objective", "optimizer", "critic", "model", "teacher", "reference", "trust_region")


def _changed(config: Config, began: Any) -> str:
    """What says which settings that shape the learner's state differ from those of a snapshot; "" where none does."""
    before = flatten(began) if isinstance(began, dict) else {}
    now = flatten(redact(as_data(config)))
    shown = [
        f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} here"
        for key in sorted({*before, *now} if before else ())
        if key.split(".")[0] in _OF_THE_STATE and before.get(key) != now.get(key)
    ]
    return "\nSettings that differ from those it was saved with:\n  " + "\n  ".join(shown) if shown else ""


class Run(BaseRun):
    """A run of reinforcement learning, built and checked before anything is compiled."""

    def __init__(self, config: Config, folder: pathlib.Path, *, resume: bool, workers: Workers | None = None):
        objective = build_objective(config.objective)
        if takes_pairs(objective):
            raise InputError(
                "objective: it compares pairs of given answers, which a rollout does not have. Train it with "
                "`jaxrl sft` on a preference file (data.path)."
            )
        check_teacher(objective, config.teacher.given)
        task = build_task(config)
        self.parts = reward_parts(task) if "rewards" in needed_fields(objective) else ()
        check_trainable(objective, self.parts)
        check_group_size(objective, config.rollout.group_size)
        check_sampled_precision(objective, config.sampler.weights, config.sampler.kv)
        _check_exact(config, objective)
        rows = config.rollout.prompts * config.rollout.group_size
        if rows % config.learner.minibatches:
            raise InputError(
                f"learner.minibatches: {config.learner.minibatches} does not divide the {rows} rows of a train step "
                f"(rollout.prompts {config.rollout.prompts} x rollout.group_size {config.rollout.group_size})."
            )
        schedule, self.devices = schedule_of(config), sampler_devices(config)
        sampling_params(config, task)  # refuses what contradicts itself
        if workers is not None:
            check_fleet(config, workers)
        do_on_first(lambda: prepare_folder(folder, config, resume=resume))
        transport = None if workers is None else open_transport(config, workers)
        model = in_sampler_order(
            config, configured_model(config), packed=config.learner.row_tokens is not None
        )
        check_memory(
            config,
            model.config,
            rows=rows,
            settings=("rollout.prompts", "rollout.group_size"),
            max_tokens=config.rollout.max_tokens or task.max_tokens,
            evaluated=held_out_items(config, task),
            adam=not is_trust_region(config.objective),
            teacher=teacher_config(config),
        )
        self.policy = Policy(model, build_sampler(config, model), task)
        self.source: PromptSource = PromptSource(
            task,
            model.tokenizer,
            seed=config.task.seed,
            max_prompt_tokens=prompt_room(config, task),
        )
        super().__init__(config, folder, objective, model)
        self.stream = None
        if workers is not None and transport is not None:
            self.stream = fleet_stream(
                config,
                workers,
                transport,
                folder,
                self.policy.sampler,
                self.sampling,
                self.source,
                self.judge,
                self.warnings,
            )
        elif schedule is not None:
            self.stream = Stream(self.make_engine, self.source, self.judge, self.sampling, schedule)
        if schedule is not None:
            self.ratios_by_age = make_ratios_by_age(min(schedule.max_age, 8))
        self.scorer = ExactScorer.of(self.policy.sampler) if config.learner.exact != "off" else None
        if self.scorer is not None:
            self.exact = make_exact_score(self.scorer.of_sampling(self.sampling))
        # The learner consumes its parameters; nothing else may hold the ones that were loaded.
        self.policy = dataclasses.replace(self.policy, model=dataclasses.replace(model, params=None))

    @property
    def rows(self) -> int:
        """Samples of a train step, greedy ones included."""
        return self.config.rollout.prompts * self.sampling.per_prompt

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """How a train step samples: with lists and a greedy answer where the objective reads them."""
        return sampling_params(
            self.config,
            self.policy.task,
            n=self.config.rollout.group_size + self.config.schedule.over_generation,
            top_logprobs=topk_size(self.objective) if "topk_logprob_behavior" in self.needed else 0,
            greedy_too="baseline_reward" in self.needed,
        )

    stream: Stream | FleetStream | None = None  # of an asynchronous run, or of one with a fleet
    comparable = True  # whether the sampler's log-probs of this train step are to be those of the learner

    def close(self) -> None:
        """Ends the workers of a fleet."""
        if isinstance(self.stream, FleetStream):
            self.stream.close()

    def sample(self, prompts: int, on_progress: Any) -> tuple[list[Trajectory], dict[str, float]]:
        """One round: completions of the next prompts and their rewards, with `rollout_metrics`."""
        completions = self.policy.sampler.generate(
            self.sampled_from,
            self.source.next_batch(prompts),
            self.sampling,
            version=self.version,
            on_progress=on_progress,
        )
        return self.collect(completions)

    def collect(self, completions: Sequence[Completion]) -> tuple[list[Trajectory], dict[str, float]]:
        """The trajectories of completions, greedy ones as their baselines, with `rollout_metrics`."""
        n = self.sampling.n
        return collect(
            [c for c in completions if c.index < n],
            self.policy.task,
            self.tokenizer,
            temperature=self.config.rollout.temperature,
            parts=[name for name in self.parts if name != "reward"],
            baselines=[c for c in completions if c.index == n] if self.sampling.greedy_too else None,
        )

    def judge(self, completions: Sequence[Completion], group: int) -> list[Trajectory]:
        """The trajectories of one group of the stream."""
        return [dataclasses.replace(t, group=group) for t in self.collect(completions)[0]]

    def make_engine(self) -> Engine | Replicas:
        """An engine for the stream."""
        outstanding = self.stream.schedule.outstanding if self.stream is not None else 1
        return self.policy.sampler.engine(outstanding * self.sampling.per_prompt, self.devices)

    @property
    def sampled_from(self) -> Any:
        """The current weights where they are sampled from: the learner's, or a copy on a device that only samples."""
        params = self.state.params
        return jax.device_put(params, self.devices[0]) if self.devices else params

    @property
    def overlaps(self) -> bool:
        """Whether the next batch is sampled while this one is learned from."""
        return self.streams or (isinstance(self.stream, Stream) and self.stream.schedule.ahead)

    @property
    def streams(self) -> bool:
        """Whether that is so within an iteration only, whose minibatches all are of the weights that it began with."""
        schedule = self.stream.schedule if isinstance(self.stream, Stream) else None
        return schedule is not None and bool(self.devices) and schedule.sync_every > 1 and not schedule.ahead

    def hand_over(self, version: int) -> None:
        """Weights for the samples of `meanwhile`; copied to the sampler's devices, since the learner consumes its own."""
        if isinstance(self.stream, Stream) and self.stream.schedule.ahead and version + 1 < self.config.steps:
            self.stream.sync(self.state.params, version)

    def meanwhile(self, version: int, begin: float) -> dict[str, float]:
        """Samples the batch of the train step from `version`, while the learner's devices still compute `version`.

        A request to stop is heeded afterwards: the weights that are sampled from exist nowhere else any more, so that
        half a batch could not be gone on with.
        """
        if not (isinstance(self.stream, Stream) and self.overlaps) or version >= self.config.steps:
            return {}
        if self.streams and self.stream.is_due(version):
            return {}  # its batch is of the weights that are being computed
        began, learned = time.perf_counter(), 0.0
        last = jax.tree.leaves(self.state.params)[-1]

        def progress(_: int) -> None:
            nonlocal learned
            if not learned and last.is_ready():
                learned = time.perf_counter()

        self.stream.advance(version, progress)
        ended = time.perf_counter()
        if not learned:
            jax.block_until_ready(self.state.params)
            learned = time.perf_counter()
        return {"time/rollout": ended - began, "time/learner": learned - begin}

    def position(self) -> Position:
        """Where the data of the run is, with the groups under way."""
        return Position(self.source.state(), None if self.stream is None else self.stream.state())

    def barrier(self, position: Position) -> None:
        """Takes up the groups under way as a resumed run would: computed again under the next weights."""
        if self.stream is not None and position.stream is not None:
            self.stream.restore(position.stream)

    def restore_stream(self, data: dict[str, Any] | None) -> None:
        """The groups that were under way when the snapshot was saved."""
        if data is None:
            return
        if self.stream is not None:
            self.stream.restore(StreamState.of(data))
        elif data["open"] or data["ready"]:
            raise InputError(
                f"schedule.max_age: the snapshot holds {len(data['open'])} groups under way and {len(data['ready'])} complete "
                "ones, which a synchronous run would lose. Resume with max_age of at least 1."
            )

    def streamed(
        self, stream: Stream | FleetStream, on_progress: Any
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """The next batch of an asynchronous run, with its figures."""

        def progress(done: int) -> None:
            if on_progress is not None:
                on_progress(SamplerStats(completions=done))

        trajectories, figures = stream.next_batch(self.state.params, self.version, progress)
        metrics = rollout_metrics(stream.sampled)
        if self.sampling.greedy_too:
            known = [t.baseline for t in stream.sampled if t.baseline is not None]
            metrics["reward/baseline"] = float(np.mean(known)) if known else 0.0
        of_ledger, self.ledger_lines = stream.ledger.step()
        warning = stream.ledger.warning()
        if warning is not None:
            self.warnings.append(warning)
        ages = staleness_metrics(trajectories, self.version)
        self.comparable = stream.schedule.sync_every == 1 or not ages.get("staleness/age_max")
        return trajectories, metrics | figures | of_ledger | ages

    def learn(self, batch: TokenBatch) -> tuple[dict[str, float], dict[str, float]]:
        """`BaseRun.learn`. No gap of sampler and learner where the weights differ by what the iteration has learned."""
        learned, seconds = super().learn(batch)
        if not self.comparable:
            learned = {name: value for name, value in learned.items() if "logprob_gap" not in name}
        return learned, seconds

    def gather(self, on_progress: Any) -> tuple[TokenBatch, list[Any], dict[str, float]]:
        """Prompts, completions, rewards: one packed batch, its trajectories and the metrics of all that was sampled."""
        config, blocks = self.config, self.model_config.key_blocks
        wanted, refills = config.rollout.prompts, config.rollout.refill_rounds
        if self.stream is not None:
            trajectories, metrics = self.streamed(self.stream, on_progress)
        elif refills:
            trajectories, metrics = refilled(
                lambda missing: self.sample(missing, on_progress), groups=wanted, max_rounds=1 + refills
            )
        else:
            trajectories, metrics = self.sample(wanted, on_progress)
        if self.parity is None:  # after sampling, whose compiled programs the probes then share
            self.parity = self.certificate()
        begin = time.perf_counter()
        batch = pack(
            trajectories,
            pad_to_multiple=config.row_multiple,
            row_tokens=config.learner.row_tokens,
            start_multiple=1 if blocks is None else 2,
            vocab_size=self.model_config.vocab_size,
            rows_multiple=config.learner.micro_batch_rows,
            learner_version=self.version,
            pad_id=self.model_config.pad_id or 0,
            parts=self.parts,
            fill=self.needed & ON_REQUEST,
        )
        self.laying_out = time.perf_counter() - begin
        metrics |= {"rollout/prompts_skipped": float(self.source.skipped)}
        return batch, trajectories, metrics

    def certificate(self) -> dict[str, Any]:
        """The parity certificate of the current policy, of a few probes.

        Raises:
          RuntimeError: exact log-probs are wanted, and they are not the sampler's.
        """
        most = min(self.sampling.max_tokens, 16)
        found = certify_policy(
            self.config,
            self.policy.sampler,
            self.tokenizer,
            self.state.params,
            self.score,
            dataclasses.replace(
                self.sampling, n=2, max_tokens=most, min_tokens=min(self.sampling.min_tokens, most)
            ),
            probes=4,
            exact=None if self.scorer is None else self.scorer.completions,
            sampled_from=self.sampled_from,
            mesh=self.mesh,
            version=self.version,
        )
        if found.exact_max_gap:
            raise RuntimeError(
                f"learner.exact: {'; '.join(found.reasons)}. This backend does not give scoring the bits of decoding; "
                "use learner.exact=off."
            )
        return found.as_data()

    def evaluate(self, on_progress: Any = None) -> dict[str, float]:
        """Accuracy on held-out items, greedy and (if configured) at the training temperature."""
        config = self.config
        return evaluate(
            self.policy.sampler,
            self.sampled_from,
            self.policy.task,
            self.tokenizer,
            sampling_params(config, self.policy.task, n=1, seed=config.evaluation.seed),
            n=config.evaluation.items,
            seed=config.evaluation.seed,
            sampled=config.evaluation.sampled,
            max_prompt_tokens=prompt_room(config, self.policy.task),
            on_progress=on_progress,
        )

    def speed(self, row: dict[str, float]) -> float:
        """Sampled tokens per second of the rollout; of the whole train step where others sample meanwhile."""
        meanwhile = isinstance(self.stream, FleetStream) or self.streams
        tokens = row["rollout/tokens"] + row.get("rollout/baseline_tokens", 0.0)
        return tokens / row["time/total" if meanwhile else "time/rollout"]


def _check_exact(config: Config, objective: LossTransform) -> None:
    """Raises InputError where learner.exact would change nothing, or cannot be applied."""
    mode = config.learner.exact
    if mode == "score" and "logprob_proximal" not in needed_fields(objective):
        raise InputError(
            "learner.exact: score fills the proximal log-probs, which this objective does not read; use train, or off."
        )
    if mode == "train" and is_trust_region(config.objective):
        raise InputError(
            "learner.exact: train gives the update of an optimiser its values, and trpo searches along a line instead; "
            "use score or off."
        )


def train(
    config: Config,
    folder: pathlib.Path,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    invocation: str = "",
    workers: Workers | None = None,
) -> int:
    """Runs or resumes a training run.

    Args:
      config: as loaded.
      folder: run folder; gets config.yaml, metrics.jsonl, samples.jsonl, snapshots/ and report.html.
      resume: go on from the newest usable snapshot of the folder, with the config that is stored there.
      overrides: the `--set` overrides of this call, which also apply to a resumed run.
      invocation: name of the config file, for the message that says how to resume.
      workers: that sample in processes of their own; None: this one samples.

    Returns:
      0 when all steps are done, 75 when it was stopped with a snapshot saved.

    Raises:
      InputError: something is wrong with the input; nothing expensive was started.
    """
    make_run = Run if workers is None else functools.partial(Run, workers=workers)
    return session(make_run, config, folder, resume=resume, overrides=overrides, invocation=invocation)


def session(
    make_run: Callable[..., BaseRun],
    config: Config,
    folder: pathlib.Path,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    invocation: str = "",
    until: int | None = None,
    barriers: Collection[int] = (),
) -> int:
    """`train`, for any kind of run: make_run(config, folder, resume=resume) builds it. The rest: see `loop`."""
    check_covers(config.mesh.learner)
    resume = on_first(lambda: resume)  # each host has looked at the folder at its own time
    before = look_at(folder)
    with contextlib.ExitStack() as held:
        do_on_first(lambda: held.enter_context(sole_writer(folder, make=not resume)))
        mine = not os.path.exists(folder / "config.yaml")
        try:
            return _session(
                make_run,
                config,
                folder,
                resume=resume,
                overrides=overrides,
                invocation=invocation,
                until=until,
                barriers=barriers,
            )
        except BaseException as error:
            if mine and is_first():
                abandon_folder(folder, before)
            begun = os.path.isfile(folder / "config.yaml")
            if isinstance(error, KeyboardInterrupt) and begun and not hasattr(error, "__notes__"):
                error.add_note(
                    f"Go on from the newest snapshot with: jaxrl {getattr(make_run, 'command', 'train')} "
                    f"{invocation or folder / 'config.yaml'} --run {folder} --resume"
                )
            raise


def _session(
    make_run: Callable[..., BaseRun],
    config: Config,
    folder: pathlib.Path,
    *,
    resume: bool,
    overrides: Sequence[str],
    invocation: str,
    until: int | None = None,
    barriers: Collection[int] = (),
) -> int:
    notes: list[str] = []
    if resume:
        config, notes = resumed_config(folder, config, overrides)
        if os.path.isdir(folder / "snapshots"):
            with SnapshotStore(folder / "snapshots", read_only=True) as store:
                began = check_snapshot_model(config, store)
            do_on_first(lambda: check_complete(folder, began))
    software = {"jaxrl_llm": __version__, "jax": jax.__version__}
    check_same("processes", flatten(redact(as_data(config))) | software)
    with make_display(
        config.steps,
        evaluation_every=config.evaluation.every,
        snapshot_every=config.snapshots.every,
        title=folder.name,
        process_index=0 if is_first() else 1,
    ) as display:
        for note in notes:
            display.note(note)
        display.phase("loading", 0, 0)
        with reporting(display.phase):
            run = make_run(config, folder, resume=resume)
        for note in run.notes:
            display.note(note)
        do_on_first(lambda: write_run_info(folder))
        with contextlib.closing(run), run.snapshots, StopRequest(any_process if several() else None) as stop:
            if resume:
                run.restore()
                # With the overrides of this call, now that nothing refused them.
                do_on_first(lambda: write_config(folder, config))
            start = run.version
            display.note(f"Run folder: {folder}" + (f", going on after step {start}" if resume else ""))
            # At step 0 the first evaluation is made again, so its row must go as well.
            resumed = (start or -1) if resume else None
            asynchronous = getattr(run, "stream", None) is not None
            trackers = make_trackers(config.trackers, folder, as_data(config)) if is_first() else ()
            with (
                MetricsWriter(folder, resumed, trackers=trackers) as metrics_out,
                SamplesWriter(folder, resumed) as samples_out,
                LedgerWriter(folder, resumed) if asynchronous else contextlib.nullcontext() as ledger_out,
            ):
                stopped = loop(
                    run, display, stop, metrics_out, samples_out, ledger_out, until=until, barriers=barriers
                )
            run.snapshots.wait()
        display.phase("report", 0, 0)
        try:
            report = write_report(folder) if is_first() else None
        except KeyboardInterrupt as error:
            error.add_note(f"The run is saved; its report is written by: jaxrl report {folder}.")
            raise
        if stopped:
            display.note(
                f"Stopped after step {run.version} of {config.steps}. Go on with: "
                f"jaxrl {run.command} {invocation or folder / 'config.yaml'} --run {folder} --resume"
            )
            return EXIT_STOPPED
        display.note(f"Report: {report}")
    return 0


def loop(
    run: BaseRun,
    display: Any,
    stop: StopRequest,
    metrics_out: MetricsWriter,
    samples_out: SamplesWriter,
    ledger_out: LedgerWriter | None = None,
    *,
    until: int | None = None,
    barriers: Collection[int] = (),
) -> bool:
    """The train steps that are left. Returns True when it was asked to stop.

    Args:
      until: train step after which it ends, with a snapshot; None: all.
      barriers: versions at which groups under way are taken up as after a resume, besides those of snapshots.
    """
    config = run.config
    saved = run.version if run.snapshots.latest() == run.version else None
    position = run.position()
    end = config.steps if until is None else until
    waited = written = (
        0.0  # seconds that the last snapshot blocked the loop, that the last row was written in
    )

    def save() -> None:
        nonlocal saved
        if saved != run.version:
            with _uncollected():
                run.save(position)
            saved = run.version

    try:
        if run.version == 0 and run.evaluates:
            row = {"version": 0, **measured(run, display, stop)}
            metrics_out.write(row)
            display.step(row)
        while run.version < end:
            stop.check()
            begin = time.perf_counter()
            display.phase(run.phase, 0, run.rows)

            def progress(stats: Any) -> None:
                stop.check(often=True)
                display.phase(run.phase, stats.completions, run.rows)

            known = run.parity
            batch, trajectories, row = run.gather(progress)
            if run.parity is not known and run.parity is not None and not run.parity["passed"]:
                display.note(f"Parity: {'; '.join(run.parity['reasons'])}. See it with: jaxrl parity")
            while run.warnings:
                display.note(run.warnings.pop(0))
            sampled = time.perf_counter()
            stop.check()
            display.phase("update", 0, 0)
            learned, seconds = run.learn(batch)
            position = run.position()
            row |= learned | seconds
            row[f"time/{run.phase}"] = sampled - begin + seconds.get(f"time/{run.phase}", 0.0)
            every = config.evaluation.every
            last = run.version == config.steps
            if run.evaluates and (last or (every and run.version % every == 0)):
                row |= measured(run, display, None)
            row["time/snapshot"], waited = waited, 0.0
            ended = time.perf_counter()
            row["time/total"] = ended - begin
            work = sum(row.get(f"time/{phase}", 0.0) for phase in (run.phase, "score", "update", "eval"))
            row["time/loop"] = ended - begin - work + run.laying_out + written
            row["time/tokens_per_second"] = run.speed(row)
            if several():
                row["time/processes"] = float(jax.process_count())  # a replay needs as many
            row = {"version": run.version, **row, **memory_metrics()}
            shares = run.shares(len(trajectories)) if trajectories else None
            samples_out.write(run.version, trajectories, run.tokenizer, shares=shares)
            if ledger_out is not None:
                ledger_out.write(run.version, run.ledger_lines)
            metrics_out.write(row)
            display.step(row)
            written = time.perf_counter() - ended
            # After the row is on disk: a snapshot without the metrics of its own step could not be resumed exactly.
            scheduled = config.snapshots.every and run.version % config.snapshots.every == 0
            if last or scheduled or run.version in barriers:
                saving = time.perf_counter()
                try:
                    if last or scheduled:
                        save()
                finally:
                    run.barrier(position)  # part of the run, whether or not the disk had room
                waited = time.perf_counter() - saving  # reported with the next step
    except StoppedError:
        save()
        return True
    if until is not None:
        save()
    return False


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No pass of the garbage collector: the many small values of a snapshot, which end with it, would bring about several.

    A pass looks at all that the process holds, which takes as long as a train step of a small model.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measured(run: BaseRun, display: Any, stop: StopRequest | None) -> dict[str, float]:
    """The evaluation of the current policy and how long it took."""
    begin = time.perf_counter()

    def progress(done: int, total: int) -> None:
        if stop is not None:
            stop.check(often=True)
        display.phase("evaluation", done, total)

    display.phase("evaluation", 0, run.config.evaluation.items)
    return run.evaluate(progress) | {"time/eval": time.perf_counter() - begin}
