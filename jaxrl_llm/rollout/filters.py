"""Choosing what to train on. Pure functions of trajectories; whoever drops something counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxrl_llm.types import Trajectory

__all__ = ["Filled", "Kept", "by_group", "fill_groups", "informative_groups", "is_informative", "scored_only"]


class Kept(NamedTuple):
    """A division of trajectories."""

    kept: list[Trajectory]
    dropped: list[Trajectory]


def by_group(trajectories: Iterable[Trajectory]) -> dict[int, list[Trajectory]]:
    """Trajectories by group, groups in the order of their first member."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups


def is_informative(group: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group differ, so that it says which answer was better.

    Rewards of None are left out; a group with fewer than two others says nothing. Compared by max > min and
    not by a standard deviation, whose rounding makes equal rewards differ.
    """
    rewards = [t.reward for t in group if t.reward is not None]
    return len(rewards) > 1 and max(rewards) > min(rewards)


def _divide(trajectories: Sequence[Trajectory], keep: Callable[[list[Trajectory]], bool]) -> Kept:
    kept = {name for name, group in by_group(trajectories).items() if keep(group)}
    return Kept(
        [t for t in trajectories if t.group in kept],
        [t for t in trajectories if t.group not in kept],
    )


def informative_groups(trajectories: Sequence[Trajectory]) -> Kept:
    """Drops whole groups whose rewards do not differ (DAPO's dynamic sampling, its filtering half)."""
    return _divide(trajectories, is_informative)


def scored_only(trajectories: Sequence[Trajectory]) -> Kept:
    """Drops single trajectories whose reward could not be computed."""
    return Kept(
        [t for t in trajectories if t.reward is not None], [t for t in trajectories if t.reward is None]
    )


class Filled(NamedTuple):
    """A batch put together from several rounds of sampling."""

    trajectories: list[Trajectory]  # at most `groups` groups, renumbered from 0
    groups: int  # in `trajectories`: the real count, which a divisor must use
    rounds: int  # of sampling
    sampled_groups: int
    dropped_groups: int  # not informative
    surplus_groups: int  # informative, but the batch was full
    uids: tuple[str, ...]  # every prompt visit that was consumed, in order

    @property
    def metrics(self) -> dict[str, float]:
        """The counts, for metrics.jsonl."""
        return {
            "rollout/rounds": float(self.rounds),
            "rollout/groups_sampled": float(self.sampled_groups),
            "rollout/groups_dropped": float(self.dropped_groups),
            "rollout/groups_surplus": float(self.surplus_groups),
        }


def fill_groups(sample: Callable[[int], Sequence[Trajectory]], *, groups: int, max_rounds: int) -> Filled:
    """Samples until there are `groups` informative groups, at most `max_rounds` times.

    When the rounds are used up the batch is smaller, possibly empty: the caller trains on what there is (all
    denominators are counted from the batch, so a smaller batch is weighted rightly) and skips the step with a
    warning when there is nothing. It never waits for ever and never ends the run.

    Args:
      sample: given the number of groups still missing, samples that many (or more) groups. Groups are told
        apart by prompt uid across rounds, so their numbers may start from 0 in each.
      groups: wanted.
      max_rounds: calls of `sample`, at least 1.
    """
    if groups < 1 or max_rounds < 1:
        raise ValueError(
            f"fill_groups: groups and max_rounds must be at least 1, got {groups} and {max_rounds}."
        )
    chosen: list[list[Trajectory]] = []
    uids: dict[str, None] = {}
    rounds = sampled = dropped = surplus = 0
    while len(chosen) < groups and rounds < max_rounds:
        rounds += 1
        for group in by_group(sample(groups - len(chosen))).values():
            sampled += 1
            uids.update((t.prompt.uid, None) for t in group)
            if not is_informative(group):
                dropped += 1
            elif len(chosen) < groups:
                chosen.append(group)
            else:
                surplus += 1
    numbered = [dataclasses.replace(t, group=i) for i, group in enumerate(chosen) for t in group]
    return Filled(numbered, len(chosen), rounds, sampled, dropped, surplus, tuple(uids))
