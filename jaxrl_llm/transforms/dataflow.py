"""Which fields a stage may read and write, and the checks on a chain of them.

Three rules cover every case:

1. a field that stages produce is written before it is read;
2. a field is not written after somebody who only reads it has read it, so that reward shaping after the
   advantage is an error and not a silent no-op (a stage that reads *and* writes a field rewrites it);
3. norm, count, log_ratio and policy have one writer, advantage and returns one creator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import did_you_mean
from jaxrl_llm.types import LossState, TokenBatch

__all__ = ["ON_DEMAND", "Need", "check_chain", "check_complete", "check_fields", "require"]

FIELDS = frozenset(
    [f"batch.{f.name}" for f in dataclasses.fields(TokenBatch)]
    + [f"loss.{f.name}" for f in dataclasses.fields(LossState)]
)

# Filled by the learner or the rollout when an objective reads them.
ON_DEMAND = frozenset(
    """batch.logprob_proximal batch.logprob_reference batch.logprob_teacher batch.value
    batch.bootstrap_value batch.rewards batch.baseline_reward batch.agent batch.reference_point
    batch.support_ids batch.topk_ids batch.topk_logprob_behavior batch.topk_logprob_proximal
    batch.topk_logprob_teacher batch.routing_ids loss.entropy loss.value loss.topk_logprob loss.divergence
    loss.router_probs loss.router_choice""".split()
)

PRODUCED = ("batch.advantage", "batch.returns", "batch.norm", "batch.count", "loss.log_ratio", "loss.policy")
ONE_WRITER = ("batch.norm", "batch.count", "loss.log_ratio", "loss.policy")

HOW_TO_FILL = {
    "logprob_behavior": "Record it while sampling, or pass logprob_behavior= to TokenBatch.from_rows.",
    "logprob_proximal": "Score the batch with the learner before `prepare` (learner.score; the train loop does "
    "so when `needs` lists it), or set batch.replace(logprob_proximal=...).",
    "logprob_reference": "Score the batch with the reference policy before `prepare` (learner.score; the train "
    "loop does so when `needs` lists it), or set batch.replace(logprob_reference=...).",
    "reference_point": "Score each prompt with the answer to another under both policies (`jaxrl sft` does so when "
    "`needs` lists it), or set batch.replace(reference_point=...).",
    "entropy": "Ask the forward pass for it: ops.logprobs.policy_output(..., entropy=True), or evaluate with "
    "PolicyOutput(logprob=..., entropy=...).",
    "rewards": "Pass rewards={name: f32[B, T]} to TokenBatch.from_rows, or parts=(names, …) to rollout.pack (the "
    "train loop does so, with the parts of the task's score).",
    "baseline_reward": "Set it to the reward of the greedy answer to the prompt of each trajectory: "
    "batch.replace(baseline_reward=...), f32[B, T] (the train loop samples and scores one).",
    "agent": "Set it to the role of each trajectory: batch.replace(agent=...), i32[B, T] from 0 (the train loop takes it "
    "from the item's `agent`).",
    "value": "Score the batch with the critic before `prepare`, or pass value= to TokenBatch.from_rows.",
    "advantage": "Pass advantage= to TokenBatch.from_rows, or set batch.replace(advantage=...).",
    "topk_logprob": "Ask the forward pass for it: ops.logprobs.policy_output(..., topk=True), or evaluate with "
    "PolicyOutput(logprob=..., topk_logprob=...).",
    "topk_logprob_proximal": "Score the batch with the learner before `prepare` (learner.score.make_score_lists; the "
    "train loop does so when `needs` lists it), or set batch.replace(topk_logprob_proximal=...).",
    "logprob_teacher": "Score the batch with the teacher before `prepare` (learner.score.make_score_teacher; the train "
    "loop does so with a teacher in the config), or set batch.replace(logprob_teacher=...).",
    "topk_logprob_teacher": "Score the batch with the teacher before `prepare` (learner.score.make_score_teacher; the "
    "train loop does so with a teacher in the config), or set batch.replace(topk_ids=..., topk_logprob_teacher=...).",
    "divergence": "Ask the forward pass for it: ops.logprobs.policy_output(..., teacher=TeacherHead(...)), or evaluate "
    "with PolicyOutput(logprob=..., divergence=...).",
    "router_probs": "Ask the forward pass of a model with experts for it: ops.logprobs.policy_output(..., "
    "router_probs=True), or evaluate with PolicyOutput(logprob=..., router_probs=..., router_choice=...).",
    "router_choice": "It comes with router_probs.",
    "topk_logprob_behavior": "Record it while sampling (SamplingParams(top_logprobs=K); the train loop does so) and set "
    'batch.replace(topk_ids=..., topk_logprob_behavior=...), or take the lists of the proximal policy: anchor="proximal".',
}


class Need(str):
    """A field that an objective reads on demand: "batch.logprob_reference".

    Arguments of the field are part of the text: "loss.divergence(kind=jsd, k=64)".
    """

    __slots__ = ()

    @property
    def key(self) -> str:
        """The field without its arguments: "loss.divergence"."""
        return self.partition("(")[0]

    @property
    def record(self) -> str:
        """ "batch" or "loss"."""
        return self.key.partition(".")[0]

    @property
    def field(self) -> str:
        """The field's name: "divergence"."""
        return self.key.partition(".")[2]

    @property
    def arguments(self) -> dict[str, str]:
        """{"kind": "jsd", "k": "64"}."""
        inner = self.partition("(")[2].removesuffix(")")
        return dict(item.strip().split("=", 1) for item in inner.split(",")) if inner else {}


def check_fields(stage: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name that is not a field of TokenBatch or LossState."""
    for name in names:
        key = Need(name).key
        if key not in FIELDS:
            raise ValueError(
                f"stage {stage}: {name!r} is not a field of TokenBatch or LossState.{did_you_mean(key, FIELDS)}"
            )


def require(stage: str, record: Any, field: str) -> Any:
    """The value of an optional field of a batch or loss.

    Raises:
      ValueError: it is None; the text names the stage, the field and how to fill it.
    """
    value = getattr(record, field)
    if value is None:
        where = "batch" if isinstance(record, TokenBatch) else "loss"
        how = HOW_TO_FILL.get(field, f"Set batch.replace({field}=...) before `prepare`.")
        raise ValueError(f"{stage} needs {where}.{field}, which is None. {how}")
    return value


# ----------------------------------------------------------------------------------------- checks


def _writers(field: str, registry: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Stages of the registry that create a field."""
    found = []
    for name, factory in registry.items():
        writes = factory.writes  # type: ignore[attr-defined]  # set by `stage`
        if not callable(writes) and field in writes:
            found.append(name)
    return sorted(found)


def _one_of(field: str, registry: Mapping[str, Callable[..., Any]]) -> str:
    creators = [n for n in _writers(field, registry) if n not in _rewriters(field, registry)]
    return f"Add one of: {', '.join(creators)}." if creators else f"No stage writes {field}."


def _rewriters(field: str, registry: Mapping[str, Callable[..., Any]]) -> set[str]:
    return {
        name
        for name in _writers(field, registry)
        if not callable(reads := getattr(registry[name], "reads", ())) and field in reads
    }


def check_chain(infos: Sequence[Any], registry: Mapping[str, Callable[..., Any]]) -> None:
    """Raises ValueError when the stages do not fit together in this order."""
    names: dict[str, int] = {}
    for j, info in enumerate(infos):
        if info.name in names:
            raise ValueError(
                f"chain(): stages {names[info.name]} and {j} are both called {info.name}. Names key state and "
                f'overrides: give one of them another, {info.stage}(..., name="{info.name}_2").'
            )
        names[info.name] = j

    reads = [{Need(r).key for r in info.reads} for info in infos]
    writes = [set(info.writes) for info in infos]

    for i, info in enumerate(infos):
        for field in (f for f in PRODUCED if f in reads[i]):
            if any(field in writes[j] for j in range(i)):
                continue
            later = [j for j in range(i + 1, len(infos)) if field in writes[j] and field not in reads[j]]
            fix = (
                f"Stage {later[0]} {infos[later[0]]} writes it but comes later: move it before stage {i}."
                if later
                else _one_of(field, registry)
            )
            raise ValueError(f"chain(): stage {i} {info} reads {field}, which no earlier stage writes. {fix}")

    for j, info in enumerate(infos):
        for field in info.writes:
            earlier = [i for i in range(j) if field in writes[i]]
            creates = field not in reads[j]
            if earlier and (field in ONE_WRITER or (creates and field in PRODUCED)):
                kind = "writer" if field in ONE_WRITER else "creator"
                raise ValueError(
                    f"chain(): stage {j} {info} writes {field}, already written by stage {earlier[0]} "
                    f"{infos[earlier[0]]}. A chain has exactly one {kind} of {field}."
                )
            read = [i for i in range(j) if field in reads[i] and field not in writes[i]]
            if read:
                raise ValueError(
                    f"chain(): stage {j} {info} changes {field} after stage {read[0]} {infos[read[0]]} has "
                    f"read it. Move stage {j} before stage {read[0]}."
                )


def check_complete(infos: Sequence[Any], registry: Mapping[str, Callable[..., Any]]) -> None:
    """Raises ValueError when the stages, in whatever order, cannot be evaluated."""
    written = {field for info in infos for field in info.writes}
    if "batch.norm" not in written:
        raise ValueError(
            f"objective is incomplete: nothing writes batch.norm. {_one_of('batch.norm', registry)}"
        )
    if "loss.policy" not in written and "loss.penalties" not in written:
        raise ValueError(
            f"objective is incomplete: nothing writes loss.policy or loss.penalties, so there is nothing to "
            f"minimise. {_one_of('loss.policy', registry)}"
        )
