"""Rollouts as a stream that outlives train steps: synchronous, one step off and asynchronous are settings of it.

A *tick* is one dispatch of the engine. The clock of a run is (train steps done, ticks); nothing here reads another
one, so the same data gives the same decisions, in every process and in every replay:

- Prompts are submitted, in the order of the source, while fewer than `in_flight` groups are outstanding.
- After every tick the batch is looked at. It is ready when there are `groups` complete groups and the train steps that
  follow can consume every other group in time (late="wait"), or groups that are too late for that are dropped
  (late="drop").
- The oldest complete groups are trained on. What is left, complete or not, goes on under the next weights.

The age of a group is the learner's version at the train step that consumes it less the version of its oldest sampled
token. No group is trained on beyond `max_age`. With late="wait" none is ever dropped for its age: groups are consumed
earliest deadline first, at most (1 + max_age) x groups are outstanding, and a batch waits where more groups than the
next k train steps can consume would be due by then (`in_time`).

With `sync_every` of more than 1 an iteration is that many train steps, and each of them a minibatch: weights are
delivered at its beginning only, and with them so many prompts as can be consumed in time; a minibatch is trained on as
soon as it is complete, while the rest of the iteration is sampled. With max_age = sync_every - 1 all of it is consumed
before the next weights, so that no sample is of other weights than those that the iteration began with. A barrier (see
`Stream.restore`) is a delivery, too: the weights of the last one are in no snapshot. An iteration begins with it.

With `ahead`, for a sampler on devices of its own, the batch of a train step is sampled under the weights that the step
before it starts from, while that step learns (`advance`); it is taken when its turn comes. The sampler goes on exactly until the
batch is complete, so that the number of its ticks is no matter of speed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.carry import answer_to, completion_of, from_data, to_data, trajectory_of_data
from jaxrl_llm.rollout.filters import is_informative
from jaxrl_llm.rollout.ledger import TRAINED, Ledger
from jaxrl_llm.sampler.base import Completion, SamplingParams
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.sampler.replicas import Replicas
from jaxrl_llm.sampler.requests import Carried
from jaxrl_llm.types import Prompt, Trajectory

__all__ = ["Schedule", "Stream", "StreamState", "batch_of", "in_time"]

Late = Literal["wait", "drop"]
Swap = Literal["keep", "recompute", "drain"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When what is sampled, and how old it may be."""

    groups: int  # of a train step
    samples: int  # of a group that are trained on
    max_age: int = 0  # versions
    sync_every: int = 1  # train steps between two deliveries of weights to the sampler
    in_flight: int | None = None  # groups that are sampled or wait, at most; None: see `room`
    ticks: int = 0  # least dispatches of a train step, so that sampling goes on while the batch is full
    late: Late = "wait"
    # What becomes of rows under way when the weights change: "keep" their keys and values, "recompute" them, or "drain":
    # finish all of them first, so that no sample spans versions.
    swap: Swap = "keep"
    max_drops: int = 0  # uninformative groups that are replaced in a train step; 0: every group is trained on
    ahead: bool = False  # the batch of a train step is sampled while the one before it learns

    def __post_init__(self):
        for name, least in (
            ("groups", 1),
            ("samples", 1),
            ("max_age", 0),
            ("sync_every", 1),
            ("ticks", 0),
            ("max_drops", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"Schedule: {name} must be at least {least}, got {getattr(self, name)}.")
        oldest = self.sync_every - 1 + self.ahead  # that samples of a run get at least
        if self.max_age < oldest:
            raise ValueError(
                f"Schedule: sync_every={self.sync_every}{' and ahead' * self.ahead} needs max_age of at least {oldest}, since "
                f"samples get as old, got {self.max_age}."
            )
        most = self._most(0)
        if self.in_flight is not None and not self.groups <= self.in_flight <= most:
            raise ValueError(
                f"Schedule: in_flight must be in [{self.groups}, {most}], the groups of a train step and "
                f"{'max_age' if self.ahead else '(1 + max_age)'} times them, got {self.in_flight}."
            )

    def _most(self, lag: int) -> int:
        return (self.max_age + (not self.ahead) - lag) * self.groups

    def room(self, lag: int) -> int:
        """Most groups that are outstanding (submitted, and neither trained on nor dropped) when one more is submitted.

        All of them can then be consumed in time, though they are sampled from weights that are `lag` versions behind the
        learner's: in the 1 + max_age - lag train steps from now on, and with `ahead` in the max_age - lag next ones.
        """
        return self._most(lag) if self.in_flight is None else min(self.in_flight, self._most(lag))

    @property
    def outstanding(self) -> int:
        """Most groups that are ever outstanding."""
        return self.room(0)


def in_time(oldest: Iterable[int], version: int, schedule: Schedule) -> bool:
    """Whether the train steps after that from `version` can consume groups of these oldest versions, none too old.

    A group is due `max_age` versions after its oldest token. The next k train steps consume k x groups, so that no more
    than those may be due by then; k = 0: nothing that is left may be due now.
    """
    due = collections.Counter(max(0, group + schedule.max_age - version) for group in oldest)
    total = 0
    for k in range(max(1, schedule.max_age)):
        total += due[k]
        if total > k * schedule.groups:
            return False
    return True


def check_carried(prompt: Prompt) -> None:
    """Refuses a prompt that no snapshot could hold while it is under way, before it is sampled.

    Raises:
      InputError: something in its payload is neither a JSON value nor an array.
    """
    for name, value in prompt.payload.items():
        try:
            to_data(value)
        except TypeError as error:
            raise InputError(
                f"task {prompt.task}: {name!r} in the payload of prompt {prompt.uid} cannot be written into a snapshot: {error} "
                "With a schedule, snapshots hold the prompts under way: give texts, numbers, lists, mappings or NumPy arrays."
            ) from None


def batch_of(
    groups: Sequence[tuple[list[Trajectory], bool]], replaced: Sequence[list[Trajectory]]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(what is trained on, what was sampled for it): groups numbered from 0, those that were replaced after the others.

    Args:
      groups: with whether they are trained on; of the others nothing is left in the masks that train.
      replaced: groups that others took the place of.
    """
    numbered = [
        dataclasses.replace(t, group=number)
        for number, group in enumerate([*(group for group, _ in groups), *replaced])
        for t in group
    ]
    trained = [kept for group, kept in groups for _ in group]
    batch = [
        t if kept else dataclasses.replace(t, mask=np.zeros_like(t.mask))
        for t, kept in zip(numbered, trained, strict=False)
    ]
    return batch, numbered


class _Prompts(Protocol):
    def next_batch(self, n: int) -> list[Prompt]: ...


Judge = Callable[[Sequence[Completion], int], list[Trajectory]]


@dataclasses.dataclass
class _Group:
    """A prompt whose samples are not all there."""

    number: int  # of its submission
    prompt: Prompt
    ids: dict[int, int]  # of the engine -> index of the sample, those that have not ended
    done: list[Completion] = dataclasses.field(default_factory=list)  # in the order in which they ended


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A group that can be trained on."""

    number: int
    oldest: int  # version of its oldest sampled token
    trajectories: list[Trajectory]
    trained: bool = True  # False: it says nothing, and only fills the batch


class Stream:
    """Groups of trajectories, batch by batch, from an engine that goes on between batches."""

    def __init__(
        self,
        make_engine: Callable[[], Engine | Replicas],
        source: _Prompts,
        judge: Judge,
        sampling: SamplingParams,
        schedule: Schedule,
    ):
        """
        Args:
          make_engine: a new engine, without weights.
          source: prompts, each with a uid of its own.
          judge: (the completions of a group, its number) -> its trajectories.
          sampling: of every prompt; with `n` > schedule.samples (over-generation), the samples of a prompt that end
            last are cancelled as soon as enough have ended.
        """
        if sampling.n < schedule.samples:
            raise ValueError(
                f"Stream: n={sampling.n} samples of a prompt, schedule.samples={schedule.samples}."
            )
        self._make_engine, self._source, self._judge = make_engine, source, judge
        self.sampling, self.schedule = sampling, schedule
        self.ledger = Ledger()
        self._engine: Engine | Replicas | None = None
        self._open: dict[int, _Group] = {}  # by number, ascending
        self._ready: list[_Ready] = []
        self._submitted = 0
        self._served: int | None = (
            None  # version of the weights that were delivered last; None: before the first ones
        )
        self._advanced: int | None = None  # the train step that `advance` was last asked for
        self._recompute = False  # the next swap follows a barrier
        self._drops = 0  # uninformative groups in this train step
        self._replaced: list[list[Trajectory]] = []  # those that were dropped since a batch was taken
        self.sampled: list[Trajectory] = []  # see `next_batch`
        self._restored = False  # groups were taken up from a state, and no batch has been taken since
        self._taken_at = 0  # ticks when the last batch was taken
        self.ticks = 0  # since the run began

    # ------------------------------------------------------------------------------------- a batch

    def next_batch(
        self, params: Any, version: int, on_progress: Callable[[int], None] | None = None
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """The trajectories of the train step that starts from `params`; groups are numbered from 0.

        Args:
          version: of `params`, train steps done.
          on_progress: called after every tick with the samples that the batch has.

        Returns:
          (trajectories, figures of what was sampled and of how old it is). `sampled` has then what figures of rewards
          and lengths are taken of: these, all with their masks, and after them the groups that were replaced because
          they said nothing. A mean over what was kept would be drawn towards one half.
        """
        if self.schedule.ahead:
            if not self._complete(version):
                self.sync(params, version)
                self.advance(version, on_progress)
        elif self.is_due(version) or self._advanced != version:
            self.sync(params, version)
            self.advance(version, on_progress)
        return self._take(version)

    def is_due(self, version: int) -> bool:
        """Whether the sampler gets the weights of `version`, if it has not got them."""
        return self._served is None or version - self._served >= self.schedule.sync_every

    def sync(self, params: Any, version: int) -> None:
        """`serve`, when it is time for it; and where the engine was given up since these weights were delivered."""
        if self.is_due(version) or version == self._served:
            self.serve(params, version)

    def serve(self, params: Any, version: int) -> None:
        """Samples from these weights from now on; `version`: train steps done by them."""
        new = self._engine is None
        if self._engine is None:
            self._engine = self._make_engine()
        if new or self._served != version or self._recompute:
            recompute = self._recompute or self.schedule.swap == "recompute"
            self._engine.swap(
                params,
                version=version,
                pages="recompute" if recompute else "keep",
                own=self.schedule.sync_every > 1,  # the learner consumes its own before the next delivery
            )
        self._served, self._recompute = version, False

    def advance(self, version: int, on_progress: Callable[[int], None] | None = None) -> None:
        """Samples, from the weights that are served, until the train step from `version` can have its batch.

        The weights are of one of the `sync_every` versions up to `version`, or, with `Schedule.ahead`, up to the one
        before it.
        """
        schedule, begun = self.schedule, self.ticks
        if self._served is None:
            raise RuntimeError("stream: nothing is sampled before weights are served.")
        self._drops, self._advanced = 0, version
        self._submit()
        while True:
            if self.ticks - begun >= schedule.ticks or not self._busy:
                self._drop_late(version)
                if self._complete(version):
                    break
            self._tick()
            if on_progress is not None:
                done = sum(len(g.trajectories) for g in self._ready) + sum(
                    len(g.done) for g in self._open.values()
                )
                on_progress(min(done, schedule.groups * schedule.samples))
        while schedule.swap == "drain" and self._busy:
            self._tick()

    @property
    def _busy(self) -> bool:
        return self._engine is not None and self._engine.busy

    def _submit(self) -> None:
        if self._served is None or self._advanced is None:
            raise RuntimeError("stream: prompts are submitted to an engine with weights.")
        # With `ahead` the batch of the step after the one that learns is waited for.
        lag = max(0, self._advanced - self.schedule.ahead - self._served)
        missing = self.schedule.room(lag) - len(self._open) - len(self._ready)
        for prompt in self._source.next_batch(missing) if missing > 0 else []:
            if self._engine is None:
                raise RuntimeError("stream: prompts are submitted to an engine with weights.")
            check_carried(prompt)
            ids = self._engine.submit(prompt, self.sampling)
            members = {id: index for index, id in enumerate(ids)}
            self._open[self._submitted] = _Group(self._submitted, prompt, members)
            self._submitted += 1

    def _tick(self) -> None:
        """One dispatch, and what follows from it."""
        if self._engine is None or not self._busy:
            raise RuntimeError("stream: there is nothing to wait for, and the batch is not complete.")
        ended: dict[int, Completion] = {}
        for event in self._engine.step():
            if event.completion is not None:
                ended[event.id] = event.completion
        self.ticks += 1
        for group in list(self._open.values()):
            for id in [id for id in group.ids if id in ended]:
                del group.ids[id]
                group.done.append(ended[id])
            self._settle(group)
        self._submit()

    def _settle(self, group: _Group) -> None:
        """Makes a group ready when enough of its samples have ended; cancels the rest."""
        n, wanted = self.sampling.n, self.schedule.samples
        samples = [c for c in group.done if c.index < n]
        greedy = [c for c in group.done if c.index == n]
        if len(samples) < wanted or (self.sampling.greedy_too and not greedy):
            return
        extra = [c for id in group.ids if (c := self._cancel(id)) is not None] + samples[wanted:]
        self.ledger.count("over_generated", group.prompt.task, [len(c.tokens) for c in extra])
        del self._open[group.number]
        kept = sorted(samples[:wanted], key=lambda c: c.index)
        trajectories = self._judge([*kept, *greedy], group.number)
        oldest = min((int(c.versions.min()) for c in kept if len(c.versions)), default=self._served or 0)
        if self.schedule.max_drops and not is_informative(trajectories):
            if self._drops < self.schedule.max_drops:
                self._drops += 1
                self.ledger.count_trajectories("uninformative", trajectories)
                self._replaced.append(trajectories)
                return
            # The limit is reached: the group fills the batch and trains nothing.
            self._ready.append(_Ready(group.number, oldest, trajectories, trained=False))
            return
        self._ready.append(_Ready(group.number, oldest, trajectories))

    def _cancel(self, id: int) -> Completion | None:
        return None if self._engine is None else self._engine.cancel(id)

    def _due(self, oldest: int, version: int) -> bool:
        """Whether the train step that starts from `version` is the last that may consume it."""
        return version - oldest >= self.schedule.max_age

    def _oldest(self, version: int) -> dict[int, int]:
        """Version of the oldest token of each open group, by number."""
        begun = {} if self._engine is None else self._engine.begun_at()
        oldest = {}
        for group in self._open.values():
            versions = [int(c.versions.min()) for c in group.done if len(c.versions)]
            versions += [begun[id] for id in group.ids if id in begun]
            # A prompt that has no token yet is as old as the weights that will sample its first.
            oldest[group.number] = min(versions, default=version if self._served is None else self._served)
        return oldest

    def _drop_late(self, version: int) -> None:
        if (
            self.schedule.late != "drop"
            or len(self._ready) < self.schedule.groups
            or not self.schedule.max_age
        ):
            return
        for number, oldest in self._oldest(version).items():
            if self._due(oldest, version):
                group = self._open.pop(number)
                cut = [c for id in group.ids if (c := self._cancel(id)) is not None]
                self.ledger.count("stale", group.prompt.task, [len(c.tokens) for c in [*group.done, *cut]])

    def _complete(self, version: int) -> bool:
        """Whether the next train step can have its batch."""
        schedule, ready = self.schedule, sorted(group.oldest for group in self._ready)
        if len(ready) < schedule.groups:
            return False
        oldest = self._oldest(version).values()
        if schedule.late == "drop":  # what is due has been dropped, unless max_age is 0
            return not any(self._due(group, version) for group in oldest)
        return in_time([*ready[schedule.groups :], *oldest], version, schedule)

    def _take(self, version: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Takes the oldest complete groups; drops those that are left and too old for the next train step."""
        schedule = self.schedule
        queue = sorted(self._ready, key=lambda group: (group.oldest, group.number))
        chosen, left = queue[: schedule.groups], queue[schedule.groups :]
        for group in left:
            if self._due(group.oldest, version):
                self.ledger.count_trajectories("stale", group.trajectories)
        self._ready = [group for group in left if not self._due(group.oldest, version)]
        too_old = [group for group in chosen if version - group.oldest > schedule.max_age]
        if too_old:
            raise RuntimeError(
                f"stream: a group sampled from version {too_old[0].oldest} reached the train step from {version}, beyond "
                f"max_age={schedule.max_age}."
            )
        chosen = sorted(chosen, key=lambda group: group.number)
        trajectories, self.sampled = batch_of(
            [(group.trajectories, group.trained) for group in chosen], self._replaced
        )
        self._replaced = []
        self.ledger.count_trajectories(TRAINED, self.sampled[: len(trajectories)])
        self.ledger.count_trajectories("no_signal", [t for t in trajectories if t.reward is None])
        figures = {
            "rollout/ticks": float(self.ticks - self._taken_at),
            "rollout/in_flight_groups": float(len(self._open)),
            "rollout/ready_groups": float(len(self._ready)),
            "rollout/barrier": float(self._restored),
        }
        self._taken_at, self._restored = self.ticks, False
        if (
            self._engine is not None
            and not self._open
            and (schedule.in_flight is None or schedule.sync_every == 1)
        ):
            # Nothing is under way, and nothing is submitted before the next weights: the memory of its pages and weights
            # is the learner's until then.
            self._engine.release()
            self._engine = None
        return trajectories, figures

    # ------------------------------------------------------------------------------------- barriers

    def state(self) -> StreamState:
        """Everything that the next batch depends on besides weights and source; cheap. Call it between batches."""
        carried = [] if self._engine is None else self._engine.unfinished()
        owner = {
            id: (group.number, index) for group in self._open.values() for id, index in group.ids.items()
        }
        return StreamState(
            submitted=self._submitted,
            ticks=self.ticks,
            taken_at=self._taken_at,
            open=[(g.number, g.prompt, list(g.done)) for g in self._open.values()],
            rows=[(*owner[id], carry) for id, carry in carried],
            ready=list(self._ready),
            ledger=self.ledger.state(),
            replaced=list(self._replaced),
        )

    def restore(self, state: StreamState) -> None:
        """Goes on from a state: a barrier, since the rows under way are computed again under the next weights.

        These are those of the next train step, whenever the last ones were delivered. The run that saved the state does the same, so that it and one that resumes from it stay equal.
        """
        self._submitted, self.ticks, self._taken_at = state.submitted, state.ticks, state.taken_at
        self._restored = bool(state.open or state.ready) or self.schedule.sync_every > 1
        self._ready, self._replaced = list(state.ready), list(state.replaced)
        self.ledger.restore(state.ledger)
        self._open = {number: _Group(number, prompt, {}, list(done)) for number, prompt, done in state.open}
        self._engine, self._served, self._advanced, self._recompute = None, None, None, True
        if state.rows:
            self._engine = self._make_engine()
        for number, index, carried in state.rows:
            if self._engine is None:
                raise RuntimeError("stream: rows without an engine.")
            self._open[number].ids[self._engine.resume(carried, self.sampling)] = index


@dataclasses.dataclass(frozen=True)
class StreamState:
    """Of a stream, between two batches."""

    submitted: int
    ticks: int
    taken_at: int  # ticks when the last batch was taken
    open: list[tuple[int, Prompt, list[Completion]]]
    rows: list[tuple[int, int, Carried]]  # number of the group, index of the sample; first served first
    ready: list[_Ready]
    ledger: dict[str, Any]
    replaced: list[list[Trajectory]] = dataclasses.field(
        default_factory=list
    )  # uninformative groups of the next batch

    def least_max_age(self, version: int, groups: int) -> int:
        """The smallest `Schedule.max_age` with which the train steps from `version` on, of so many groups, consume it in time.

        The oldest groups come first; one that has no token yet gets its first under the weights of `version`.
        """
        begun: dict[int, list[int]] = {number: [version] for number, _, _ in self.open}
        for number, _, done in self.open:
            begun[number] += [int(c.versions.min()) for c in done if len(c.versions)]
        for number, _, row in self.rows:
            begun[number] += row.so_far.versions.tolist()
        oldest = sorted([*map(min, begun.values()), *(group.oldest for group in self.ready)])
        return max((version + i // groups - age for i, age in enumerate(oldest)), default=0)

    def as_data(self) -> dict[str, Any]:
        """JSON values; the prompt of a group is in them once."""
        prompts = {number: prompt for number, prompt, _ in self.open}
        return {
            "submitted": self.submitted,
            "ticks": self.ticks,
            "taken_at": self.taken_at,
            "open": [
                [number, to_data(prompt), [answer_to(prompt, c) for c in done]]
                for number, prompt, done in self.open
            ],
            "rows": [
                [number, index, answer_to(prompts[number], row.so_far), row.begun, row.priority]
                for number, index, row in self.rows
            ],
            "ready": [[g.number, g.oldest, to_data(g.trajectories), g.trained] for g in self.ready],
            "ledger": to_data(self.ledger),
            "replaced": to_data(self.replaced),
        }

    @classmethod
    def of(cls, data: Any) -> StreamState:
        """The state of which `as_data` gave these values."""
        prompts = {number: Prompt(**from_data(prompt)) for number, prompt, _ in data["open"]}
        return cls(
            submitted=data["submitted"],
            ticks=data["ticks"],
            taken_at=data.get("taken_at", data["ticks"]),
            open=[
                (number, prompts[number], [completion_of(c, prompts[number]) for c in done])
                for number, _, done in data["open"]
            ],
            rows=[
                (number, index, Carried(completion_of(row, prompts[number]), begun, priority))
                for number, index, row, begun, priority in data["rows"]
            ],
            ready=[
                _Ready(number, oldest, [trajectory_of_data(t) for t in trajectories], *trained)
                for number, oldest, trajectories, *trained in data["ready"]
            ],
            ledger=from_data(data["ledger"]),
            replaced=[[trajectory_of_data(t) for t in group] for group in data.get("replaced", [])],
        )
