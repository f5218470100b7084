"""Completions -> trajectories: scoring what was sampled, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_llm.parallel.agree import on_first
from jaxrl_llm.rewards.extract import after_thinking, is_thinking_tag, opens_thinking
from jaxrl_llm.rewards.score import Score, computed
from jaxrl_llm.rollout.filters import by_group, fill_groups, is_informative
from jaxrl_llm.rollout.task import Task, item_of
from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import StopReason, Trajectory

__all__ = [
    "collect",
    "completion_text",
    "graded_text",
    "refilled",
    "rollout_metrics",
    "sampled_text",
    "score_completion",
    "staleness_metrics",
    "trajectory_of",
]


def sampled_text(tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text that the policy wrote, special tokens left out: what a reward may see.

    Args:
      tokens: i32[L], prompt, sampled and foreign tokens (tool output, templates).
      mask: bool[L], sampled by the policy.

    Returns:
      Each unbroken run of sampled tokens decoded by itself, joined with newlines: joined directly, "4" and
      "2" around a tool's output would read as 42.
    """
    edges = np.flatnonzero(
        np.diff(np.concatenate([[False], np.asarray(mask, bool), [False]]).astype(np.int8))
    )
    runs = edges.reshape(-1, 2)
    return "\n".join(tokenizer.decode(tokens[start:end].tolist()) for start, end in runs)


def completion_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """What a policy wrote for people to read: the text before the stop string, special tokens left out."""
    return tokenizer.decode(completion.tokens.tolist()) if completion.text is None else completion.text


def graded_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """What a reward sees of a completion: `completion_text`, and every tag that says where thinking begins and ends.

    Two kinds of tags are not in that text, and without them an answer inside a thought that was cut off would be
    paid for: one that the prompt ends with (templates of reasoning models open the thinking themselves), which is put
    in front, and tags that are control tokens, which stay in their places.
    """
    text = completion_text(completion, tokenizer)
    ids = completion.tokens.tolist()
    tags = [
        (at, tag)
        for at, token in enumerate(ids)
        if tokenizer.is_special(token)
        and is_thinking_tag(tag := tokenizer.token_bytes(token).decode(errors="replace"))
    ]
    if tags:
        cut = len(tokenizer.decode(ids)) - len(text)  # the stop string and what follows it
        pieces, start = [], 0
        for at, tag in tags:
            pieces += [tokenizer.decode(ids[start:at]), tag]
            start = at + 1
        text = "".join([*pieces, tokenizer.decode(ids[start:])])
        text = text[: len(text) - cut]
    return _opened_by_prompt(completion, tokenizer) + text


_TAIL = 64  # tokens; no tag, with the white space after it, is longer


def _opened_by_prompt(completion: Completion, tokenizer: Tokenizer) -> str:
    """The opening tag of thinking that the prompt leaves open, "" if it does not.

    Tags elsewhere in a prompt are talked about, not opened: only its end counts, and the begun answer of the task.
    """
    tokens = completion.prompt.tokens.tolist()
    opened = opens_thinking(tokenizer.decode(tokens[-_TAIL:], skip_special=False))
    begun = str(completion.prompt.payload.get("prefix") or "")
    if opened or after_thinking(begun) is not None:
        return opened
    return "<think>" if tokenizer.decode(tokens, skip_special=False).endswith(begun) else ""


def score_completion(task: Task, completion: Completion, text: str) -> Score:
    """The task's score of a text; None with the reason when the sampler or the verifier failed."""
    if completion.stop is StopReason.ERROR:
        return Score(None, reason="the completion ended in an error")
    if completion.stop is StopReason.CANCELLED:
        return Score(None, reason="the completion was cancelled")
    try:
        return computed(task.score(item_of(completion.prompt), text), task.name)
    except Exception as error:  # one broken verifier call must not end a run; it is counted
        return Score(None, reason=f"the verifier of {task.name} raised {type(error).__name__}: {error}")


def trajectory_of(completion: Completion, score: Score, *, group: int, temperature: float) -> Trajectory:
    """Puts the prompt in front of a completion; prompt tokens are marked as not sampled."""
    prompt = np.asarray(completion.prompt.tokens, np.int32)
    sampled = np.asarray(completion.tokens, np.int32)

    def after_prompt(values: np.ndarray, fill: float, dtype: type) -> np.ndarray:
        return np.concatenate([np.full(len(prompt), fill, dtype), np.asarray(values, dtype)])

    def listed(values: np.ndarray, dtype: type, fill: int = 0) -> np.ndarray:
        return np.concatenate(
            [np.full((len(prompt), values.shape[1]), fill, dtype), np.asarray(values, dtype)]
        )

    return Trajectory(
        prompt=completion.prompt,
        group=group,
        tokens=np.concatenate([prompt, sampled]),
        mask=np.arange(len(prompt) + len(sampled)) >= len(prompt),
        logprob=after_prompt(completion.logprobs, 0.0, np.float32),
        version=after_prompt(completion.versions, -1, np.int32),
        kv_version=after_prompt(completion.kv_versions, -1, np.int32),
        reward=None if score.value is None else float(score.value),
        rewards={name: None if part is None else float(part) for name, part in score.parts.items()},
        reason=score.reason,
        stop=completion.stop,
        temperature=temperature,
        agent=int(completion.prompt.payload.get("agent", 0)),
        top_ids=None if completion.top_ids is None else listed(completion.top_ids, np.int32),
        top_logprob=None if completion.top_logprobs is None else listed(completion.top_logprobs, np.float32),
        support_ids=None if completion.support_ids is None else listed(completion.support_ids, np.int32, -1),
        support_cut=None
        if completion.support_cut is None
        else after_prompt(completion.support_cut, False, bool),
        routing_ids=completion.routing_ids,
        timings=dict(completion.timings),
    )


def collect(
    completions: Sequence[Completion],
    task: Task | Mapping[str, Task],
    tokenizer: Tokenizer,
    *,
    temperature: float = 1.0,
    parts: Sequence[str] = (),
    baselines: Sequence[Completion] | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Scores completions.

    Args:
      completions: in any order; those of the same prompt visit (uid) form a group.
      task: the task that asked, or the tasks by name when prompts come from several.
      tokenizer: decodes the sampled tokens.
      temperature: that the completions were drawn at.
      parts: names of reward parts that every trajectory must have: one that a score lacks is None.
      baselines: greedy completions, one of each prompt; their rewards become `Trajectory.baseline` of its group. None:
        not asked for.

    Returns:
      (trajectories in the order of the completions, `rollout_metrics` of them).
    """

    def scored(completion: Completion) -> tuple[float | None, dict[str, float | None], str]:
        own = task[completion.prompt.task] if isinstance(task, Mapping) else task
        score = score_completion(own, completion, graded_text(completion, tokenizer))
        numbers = {name: None if part is None else float(part) for name, part in score.parts.items()}
        return None if score.value is None else float(score.value), numbers, score.reason

    # Of several processes one scores, for all: a verifier with a time limit need not say the same twice.
    judged = [*(baselines or ()), *completions]
    scores = [Score(*given) for given in on_first(lambda: [scored(completion) for completion in judged])]
    number = len(judged) - len(completions)
    greedy = {c.prompt.uid: score.value for c, score in zip(judged[:number], scores[:number], strict=True)}
    groups: dict[str, int] = {}
    trajectories = []
    for completion, score in zip(completions, scores[number:], strict=True):
        score = dataclasses.replace(score, parts={**dict.fromkeys(parts), **score.parts})
        group = groups.setdefault(completion.prompt.uid, len(groups))
        trajectory = trajectory_of(completion, score, group=group, temperature=temperature)
        baseline = greedy.get(completion.prompt.uid)
        baseline = None if baseline is None else float(baseline)
        trajectories.append(dataclasses.replace(trajectory, baseline=baseline))
    metrics = rollout_metrics(trajectories)
    if baselines is not None:
        known = [value for value in greedy.values() if value is not None]
        metrics |= {
            "reward/baseline": float(np.mean(known)) if known else 0.0,
            "reward/baseline_errors": float(len(greedy) - len(known)),
            "rollout/baseline_tokens": float(sum(len(c.tokens) for c in baselines)),
        }
    return trajectories, metrics


def refilled(
    sample: Callable[[int], tuple[list[Trajectory], dict[str, float]]], *, groups: int, max_rounds: int
) -> tuple[list[Trajectory], dict[str, float]]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11), bounded: groups whose rewards do not differ are replaced.

    verl and NeMo stop a run when the bound is reached (10 rounds), SkyRL goes on without (30); ours trains on the
    groups that there are, with denominators counted from them. Where no group says anything the last round comes
    back untrained (nothing in its masks), so that the update is skipped and counted.

    Args:
      sample: `collect`, of completions of so many new prompts.
      groups, max_rounds: see `fill_groups`.

    Returns:
      (the trajectories to train on, metrics). The metrics are those of **everything that was sampled**: a mean over
      what was kept would be drawn towards one half. Beside them rollout/rounds, rollout/groups_dropped and
      rollout/groups_surplus, and the reward and length of what was dropped, since dropping is a choice of data.
    """
    sampled: list[Trajectory] = []
    rounds: list[tuple[list[Trajectory], dict[str, float]]] = []

    def one_round(missing: int) -> list[Trajectory]:
        trajectories, metrics = sample(missing)
        first = 1 + max((t.group for t in sampled), default=-1)
        sampled.extend(dataclasses.replace(t, group=first + t.group) for t in trajectories)
        rounds.append((trajectories, metrics))
        return trajectories

    filled = fill_groups(one_round, groups=groups, max_rounds=max_rounds)
    metrics = rollout_metrics(sampled)
    for name in rounds[0][1].keys() - metrics.keys():  # of greedy baselines: counts, and a mean over prompts
        values = [of_round[name] for _, of_round in rounds]
        prompts = [len(by_group(ours)) for ours, _ in rounds]
        mean = name == "reward/baseline"
        metrics[name] = float(np.average(values, weights=prompts)) if mean else sum(values)
    dropped = [t for group in by_group(sampled).values() if not is_informative(group) for t in group]
    rewards = [t.reward for t in dropped if t.reward is not None]
    metrics |= filled.metrics | {
        "rollout/dropped_reward": float(np.mean(rewards)) if rewards else 0.0,
        "rollout/dropped_length": float(np.mean([t.mask.sum() for t in dropped])) if dropped else 0.0,
    }
    untrained = [dataclasses.replace(t, mask=np.zeros_like(t.mask)) for t in rounds[-1][0]]
    return filled.trajectories or untrained, metrics


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Figures of a rollout batch. A reward, or a part, that could not be computed is left out of the means."""
    rewards = np.array([t.reward for t in trajectories if t.reward is not None], np.float64)
    lengths = np.array([int(t.mask.sum()) for t in trajectories], np.float64)
    stops = collections.Counter(t.stop for t in trajectories)
    groups = by_group(trajectories)
    number = max(1, len(trajectories))
    errors = len(trajectories) - len(rewards)
    metrics = {
        "reward/mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward/std": float(rewards.std()) if len(rewards) else 0.0,
        "reward/accuracy": float((rewards >= 1.0).mean()) if len(rewards) else 0.0,
        "reward/errors": float(errors),
        "reward/no_signal": errors / number,
        "completion/length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "completion/length_max": float(lengths.max()) if len(lengths) else 0.0,
        "completion/truncated_fraction": stops[StopReason.LENGTH] / number,
        "rollout/tokens": float(lengths.sum()),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/groups": float(len(groups)),
        "rollout/no_signal_groups": float(sum(not is_informative(group) for group in groups.values())),
    }
    metrics |= {f"completion/stop_{stop.value}": stops[stop] / number for stop in StopReason}
    sizes = [(t.support_ids[t.mask] >= 0).sum(axis=1) for t in trajectories if t.support_ids is not None]
    if sizes:
        cut = [
            np.zeros(len(t.mask), bool)[t.mask] if t.support_cut is None else t.support_cut[t.mask]
            for t in trajectories
            if t.support_ids is not None
        ]
        size = np.concatenate(sizes)
        truncated = size > 0
        metrics |= {
            "completion/support_size": float(size[truncated].mean()) if truncated.any() else 0.0,
            "completion/support_cut": float(np.concatenate(cut)[truncated].mean())
            if truncated.any()
            else 0.0,
        }
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            parts.setdefault(name, []).extend([] if value is None else [value])
    return metrics | {
        f"reward/part_{name}": float(np.mean(values)) if values else 0.0
        for name, values in sorted(parts.items())
    }


_AGES = 8  # ages with a figure of their own


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How old the sampled tokens of a batch are at the train step that starts from `version`, in train steps.

    age = version - the version that sampled a token; kv_age = version - the oldest one whose keys and values the token
    attended to. `spans` is the part of the trajectories with tokens of several versions.
    """
    sampled = [t for t in trajectories if t.mask.any()]
    if not sampled:
        return {}
    age = np.concatenate([version - t.version[t.mask] for t in sampled])
    kv_age = np.concatenate([version - t.kv_version[t.mask] for t in sampled])
    spans = [t.version[t.mask].min() < t.version[t.mask].max() for t in sampled]
    return {
        "staleness/age_mean": float(age.mean()),
        "staleness/age_max": float(age.max()),
        "staleness/kv_age_mean": float(kv_age.mean()),
        "staleness/kv_age_max": float(kv_age.max()),
        "staleness/spans": float(np.mean(spans)),
    } | {f"staleness/age_{a}": float((age == a).mean()) for a in range(min(_AGES, int(age.max()) + 1))}
