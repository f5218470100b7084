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

import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import __version__
from jaxrl_llm.assembly import (
    Policy,
    build_mesh,
    build_sampler,
    build_task,
    certify_policy,
    check_snapshot_model,
    configured_model,
    held_out_items,
    in_sampler_order,
    prompt_room,
    sampler_devices,
    sampling_params,
    schedule_of,
    teacher_config,
)
from jaxrl_llm.base_run import BaseRun, Position
from jaxrl_llm.config import Config, as_data, flatten
from jaxrl_llm.data.source import PromptSource
from jaxrl_llm.diagnostics.display import make_display
from jaxrl_llm.diagnostics.environment import write_run_info
from jaxrl_llm.diagnostics.metrics import LedgerWriter, MetricsWriter, SamplesWriter, memory_metrics
from jaxrl_llm.diagnostics.redact import redact
from jaxrl_llm.diagnostics.report import write_report
from jaxrl_llm.diagnostics.trackers import make_trackers
from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.stream import FleetStream
from jaxrl_llm.fleet.workers import Workers, check_fleet, fleet_stream, open_transport
from jaxrl_llm.learner.exact import make_exact_score
from jaxrl_llm.learner.score import (
    topk_size,
)
from jaxrl_llm.learner.staleness import make_ratios_by_age
from jaxrl_llm.memory import check_memory
from jaxrl_llm.models.formats.progress import reporting
from jaxrl_llm.objectives import (
    build_objective,
    check_group_size,
    check_sampled_precision,
    check_teacher,
    check_trainable,
    is_trust_region,
)
from jaxrl_llm.parallel.agree import any_process, check_same, do_on_first, is_first, on_first, several
from jaxrl_llm.parallel.processes import check_covers
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
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.stopping import EXIT_STOPPED, StoppedError, StopRequest
from jaxrl_llm.transforms import LossTransform, needed_fields, takes_pairs
from jaxrl_llm.types import TokenBatch, Trajectory

__all__ = ["Run", "session", "train"]


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
            config, configured_model(config, build_mesh(config)), packed=config.learner.row_tokens is not None
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
            state, schedule = StreamState.of(data), self.stream.schedule
            least = state.least_max_age(self.version, schedule.groups)
            if least > schedule.max_age:
                raise InputError(
                    f"schedule.max_age: the snapshot holds {len(state.open) + len(state.ready)} groups that are sampled ahead; at "
                    f"{schedule.groups} a train step (rollout.prompts) one of them is trained on when it is {least} train steps "
                    f"old, and max_age is {schedule.max_age}. Resume with max_age of at least {least}."
                )
            self.stream.restore(state)
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
