"""What the training loop sees of a fleet: batch by batch, groups in the order in which they were submitted.

At every train step (every `sync_every`-th one) prompts are submitted, to be answered under its weights, until
(1 + max_age) x groups are outstanding; the first `groups` of them are trained on. So a group that is submitted at version v is trained on at
version v + max_age (the first ones sooner), and while the learner trains, workers sample what comes after. This is
the schedule of `rollout.stream` with swap="drain", without its wait: the same prompts under the same versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet.dispatcher import Fleet
from jaxrl_llm.rollout.filters import is_informative
from jaxrl_llm.rollout.ledger import TRAINED, Ledger
from jaxrl_llm.rollout.stream import Judge, Schedule, StreamState, _Ready, batch_of, check_carried
from jaxrl_llm.types import Prompt, Trajectory

__all__ = ["FleetState", "FleetStream"]

_POLL = 0.1  # seconds between two looks at whether a stop was asked for


class _Prompts(Protocol):
    def next_batch(self, n: int) -> list[Prompt]: ...


@dataclasses.dataclass(eq=False)
class _Group:
    """A prompt that is outstanding."""

    number: int
    version: int  # of the weights that answer it
    trajectories: list[Trajectory] | None = None  # once it is answered and judged


@dataclasses.dataclass(frozen=True)
class FleetState(StreamState):
    """Of a fleet's stream, between two batches. Its data are complete only when every group in it is answered."""

    groups: list[_Group] = dataclasses.field(default_factory=list)
    finish: Callable[[_Group], list[Trajectory]] | None = None

    def as_data(self) -> dict[str, Any]:
        """JSON values, those of a `StreamState` without groups under way: waits until all are answered."""
        if self.finish is None:
            raise RuntimeError("fleet: a state without its stream.")
        ready = [_Ready(g.number, g.version, self.finish(g)) for g in self.groups]
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(StreamState)}
        return StreamState(**plain | {"ready": ready}).as_data()


class FleetStream:
    """As `rollout.stream.Stream`, with the groups of a fleet."""

    def __init__(self, fleet: Fleet, source: _Prompts, judge: Judge, schedule: Schedule):
        """
        Args:
          fleet: for `schedule.samples` samples of a prompt, and the greedy one where the objective reads it.
          source: prompts, each with a uid of its own.
          judge: (the completions of a group, its number) -> its trajectories.
          schedule: groups, samples, max_age, sync_every and max_drops of it count.
        """
        self._fleet, self._source, self._judge = fleet, source, judge
        self.schedule = schedule
        self.ledger = Ledger()
        self._queue: list[_Group] = []  # outstanding, in the order of their numbers
        self._submitted = 0
        self._served: int | None = (
            None  # version of the weights that were published last; None: before the first ones
        )
        self._restored = False  # a barrier, and no batch has been taken since
        self.sampled: list[Trajectory] = []  # see `rollout.stream.Stream.next_batch`

    def next_batch(
        self, params: Any, version: int, on_progress: Callable[[int], None] | None = None
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """The trajectories of the train step that starts from `params`; groups are numbered from 0.

        Args:
          version: of `params`, train steps done.
          on_progress: called while it waits, with the samples that the batch has.

        Returns:
          (trajectories, figures of the fleet).

        Raises:
          FleetError: see `Fleet.pump`.
        """
        schedule = self.schedule
        chosen: list[tuple[list[Trajectory], bool]] = []
        replaced: list[list[Trajectory]] = []
        self._submit(params, version)
        self._fleet.pump()
        while len(chosen) < schedule.groups:
            group = self._queue[0]
            trajectories = self._finish(
                group, lambda: on_progress and on_progress(len(chosen) * schedule.samples)
            )
            age = version - min(
                (int(t.version[t.mask].min()) for t in trajectories if t.mask.any()), default=version
            )
            if not 0 <= age <= schedule.max_age:
                raise RuntimeError(
                    f"fleet: a group of age {age} reached a train step, beyond max_age={schedule.max_age}."
                )
            self._queue.pop(0)
            trained = not schedule.max_drops or is_informative(trajectories)
            if not trained and len(replaced) < schedule.max_drops:
                replaced.append(trajectories)
                self.ledger.count_trajectories("uninformative", trajectories)
                self._submit(params, version)
                continue
            chosen.append((trajectories, trained))
        batch, self.sampled = batch_of(chosen, replaced)
        self.ledger.count_trajectories(TRAINED, self.sampled[: len(batch)])
        self.ledger.count_trajectories("no_signal", [t for t in batch if t.reward is None])
        self._fleet.pump()
        figures = self._fleet.figures()
        if schedule.sync_every > 1:  # it decides which weights are published, so that a replay must know it
            figures["rollout/barrier"] = float(self._restored)
        self._restored = False
        return batch, figures

    def _submit(self, params: Any, version: int) -> None:
        if self._served is None or version - self._served >= self.schedule.sync_every:
            self._served = version
        missing = self.schedule.room(version - self._served) - len(self._queue)
        if missing <= 0:
            return
        if version == self._served:
            self._fleet.publish(params, version)
        for prompt in self._source.next_batch(missing):
            check_carried(prompt)
            self._fleet.submit(self._submitted, prompt, self._served)
            self._queue.append(_Group(self._submitted, self._served))
            self._submitted += 1

    def _finish(self, group: _Group, waiting: Callable[[], Any] | None = None) -> list[Trajectory]:
        """The trajectories of a group; waits for them."""
        while group.trajectories is None:
            completions = self._fleet.answer(group.number)
            if completions is not None:
                group.trajectories = self._judge(completions, group.number)
                self._fleet.forget(group.number)
                break
            if waiting is not None:
                waiting()
            self._fleet.pump(_POLL)
        return group.trajectories

    def state(self) -> FleetState:
        """Everything that the next batch depends on besides weights and source; cheap. Call it between batches."""
        return FleetState(
            submitted=self._submitted,
            ticks=0,
            taken_at=0,
            open=[],
            rows=[],
            ready=[],
            ledger=self.ledger.state(),
            groups=list(self._queue),
            finish=self._finish,
        )

    def restore(self, state: StreamState) -> None:
        """Goes on from a state. What is under way goes on; the next prompts are of the next train step's weights.

        Raises:
          InputError: it holds samples that were under way in the learner's process.
        """
        self._served, self._restored = None, True
        if isinstance(state, FleetState):
            return  # of this stream, which has all of it
        if state.open:
            raise InputError(
                f"--workers: the snapshot holds {len(state.open)} groups whose samples were under way in the process of the "
                "learner, which a fleet cannot go on with. Resume without --workers, or begin with schedule.swap=drain."
            )
        self._submitted = state.submitted
        self._queue = [_Group(g.number, g.oldest, g.trajectories) for g in state.ready]
        self.ledger.restore(state.ledger)

    def close(self) -> None:
        """Ends the workers."""
        self._fleet.close()
