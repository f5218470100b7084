"""What every run is made of, wherever its data comes from: the learner, one train step of it, its state, its snapshots.

`train.Run` gives it samples, `fine_tune` given answers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import optax

from jaxrl_llm import __version__
from jaxrl_llm.assembly import (
    REMAT,
    build_mesh,
    configured_teacher,
)
from jaxrl_llm.config import Config, as_data, flatten
from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.errors import InputError, MisfitError
from jaxrl_llm.learner.critic import fill_values, init_critic, make_critic_step, make_values
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
from jaxrl_llm.learner.state import finish_train_step, init_state, move_reference, reset_reference
from jaxrl_llm.learner.trust_region import make_trust_region_step
from jaxrl_llm.learner.update import Policy as LearnerPolicy
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.load import Model
from jaxrl_llm.objectives import (
    is_trust_region,
)
from jaxrl_llm.parallel.agree import several
from jaxrl_llm.parallel.host import place, read
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.stream import StreamState
from jaxrl_llm.snapshots.store import SnapshotStore, fingerprint
from jaxrl_llm.transforms import LossTransform, needs
from jaxrl_llm.types import LearnerState, Mean, TokenBatch
from jaxrl_llm.unused import unused_settings

__all__ = ["BaseRun", "Position", "Source", "merge_updates"]


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
