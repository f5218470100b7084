"""Preference data: rows of a JSONL file as pairs of trajectories, chosen answer first.

One object a line:

    {"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"}
    {"messages": [… the conversation so far …], "chosen": "4", "rejected": "5"}
    {"chosen": [… whole conversation …], "rejected": [… the same, with another last turn …]}

and optional numbers "chosen_reward" and "rejected_reward" (a margin for reward models).

Answers that have no partner, for KTO, have a label each (the format of TRL):

    {"prompt": "2 + 2 =", "completion": "4", "label": true}
    {"prompt": [… messages …], "completion": [one turn of the assistant], "label": false}
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.sft import (
    answered,
    check_turns,
    only_one,
    reward_of,
    supervised_batch,
    text_of,
    trajectory_of,
)
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.json_lines import Message, check_messages, read_objects
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import TokenBatch, Trajectory

__all__ = [
    "Labelled",
    "Pair",
    "has_labels",
    "labelled_batch",
    "labelled_trajectory",
    "mismatched",
    "mismatched_labelled",
    "pair_batch",
    "pair_trajectories",
    "read_labelled",
    "read_preferences",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two answers to one conversation."""

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    chosen_reward: float | None = None
    rejected_reward: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
    """One answer, and whether it is a good one."""

    messages: tuple[Message, ...]  # the answer is the last turn
    good: bool


def has_labels(path: str | pathlib.Path) -> bool:
    """Whether the first row of a file is an answer with a label (which may be missing), and not a pair."""
    first = next(iter(read_objects(path)), None)
    return first is not None and "chosen" not in first[1] and not {"label", "completion"}.isdisjoint(first[1])


def read_labelled(path: str | pathlib.Path) -> list[Labelled]:
    """The answers of a file, each with its label.

    Raises:
      InputError: names the file, the line and what to change: a key is missing, an answer is empty, a label is neither
        true nor false.
    """
    rows = [_labelled(row, where) for where, row in read_objects(path)]
    if not rows:
        raise InputError(
            f'data file {path} has no rows; expected one {{"prompt": …, "completion": …, "label": true}} a line.'
        )
    return rows


def _labelled(row: Mapping[str, Any], where: str) -> Labelled:
    for key in ("prompt", "completion", "label"):
        if key not in row:
            hint = " A file holds answers with a label, or pairs, not both." if "chosen" in row else ""
            raise InputError(f"{where}: {key!r} is missing; found: {', '.join(map(repr, row))}.{hint}")
    if not isinstance(row["label"], bool):
        raise InputError(f"{where}: 'label' must be true or false, got {row['label']!r}.")
    prompt: tuple[Message, ...]
    if isinstance(row["prompt"], list):
        prompt = check_messages(row["prompt"], where, "prompt")
    else:
        prompt = ({"role": "user", "content": text_of(row, "prompt", where)},)
    if isinstance(row["completion"], list):
        answer = check_messages(row["completion"], where, "completion")
        if len(answer) != 1:
            raise InputError(
                f"{where}: 'completion' must be one turn of the assistant, got {len(answer)} messages; put the others into "
                "'prompt'."
            )
    else:
        answer = ({"role": "assistant", "content": text_of(row, "completion", where)},)
    messages = prompt + answer
    check_turns(messages, where, "completion")
    return Labelled(messages=messages, good=row["label"])


def read_preferences(path: str | pathlib.Path) -> list[Pair]:
    """The pairs of a file.

    Raises:
      InputError: names the file, the line and what to change: a key is missing, an answer is empty, both answers
        are the same, the two conversations have different prompts.
    """
    pairs = [_pair(row, where) for where, row in read_objects(path)]
    if not pairs:
        raise InputError(
            f'data file {path} has no rows; expected one {{"prompt": …, "chosen": …, "rejected": …}} a line.'
        )
    return pairs


def _pair(row: Mapping[str, Any], where: str) -> Pair:
    for key in ("chosen", "rejected"):
        if key not in row:
            hint = " For supervised data, set objective to sft." if "answer" in row or len(row) == 1 else ""
            hint = " Answers with a label each train kto." if "label" in row else hint
            raise InputError(f"{where}: {key!r} is missing; found: {', '.join(map(repr, row))}.{hint}")
    whole = [isinstance(row[key], list) for key in ("chosen", "rejected")]
    if whole[0] != whole[1]:
        raise InputError(f"{where}: 'chosen' and 'rejected' must both be texts or both lists of messages.")
    if whole[0]:
        messages, answers = _conversations(row, where)
    else:
        key = only_one(row, ("messages", "prompt"), where, "'prompt' or 'messages' beside the two answers")
        if key == "prompt" and isinstance(row["prompt"], str):
            messages = ({"role": "user", "content": text_of(row, "prompt", where)},)
        else:
            messages = check_messages(row[key], where, key)
        answers = (text_of(row, "chosen", where), text_of(row, "rejected", where))
    if messages[-1]["role"] == "assistant":
        raise InputError(
            f"{where}: the conversation before the two answers ends with a turn of the assistant; end it with the "
            "user's."
        )
    if answers[0] == answers[1]:
        raise InputError(
            f"{where}: 'chosen' and 'rejected' are the same answer, which says nothing. Remove the row."
        )
    return Pair(
        messages=messages,
        chosen=answers[0],
        rejected=answers[1],
        chosen_reward=reward_of(row, "chosen_reward", where),
        rejected_reward=reward_of(row, "rejected_reward", where),
    )


def _conversations(row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[str, str]]:
    """The common prompt and the last turns of two conversations."""
    chosen = check_messages(row["chosen"], where, "chosen")
    rejected = check_messages(row["rejected"], where, "rejected")
    given: tuple[Message, ...] = ()
    if isinstance(row.get("prompt"), list):
        given = check_messages(row["prompt"], where, "prompt")
    elif "messages" in row:
        given = check_messages(row["messages"], where, "messages")
    if len(chosen) == 1 and not given and isinstance(row.get("prompt"), str):
        given = ({"role": "user", "content": text_of(row, "prompt", where)},)
    whole = [given + turns if len(turns) == 1 else turns for turns in (chosen, rejected)]
    for key, turns in zip(("chosen", "rejected"), whole, strict=True):
        check_turns(turns, where, key)
    first, second = (turns[:-1] for turns in whole)
    if first != second:
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        differs = f"message {at} differs" if at is not None else f"{len(first)} and {len(second)} messages"
        raise InputError(
            f"{where}: 'chosen' and 'rejected' answer different prompts ({differs}), and a preference compares two "
            "answers to one. Give both the same messages before the last."
        )
    return first, (whole[0][-1]["content"], whole[1][-1]["content"])


def pair_trajectories(
    pair: Pair, tokenizer: Tokenizer, uid: str, group: int
) -> tuple[Trajectory, Trajectory]:
    """(chosen, rejected): the answer tokens, end token included, are trained."""

    def one(answer: str, reward: float | None, side: str) -> Trajectory:
        turns = [*pair.messages, {"role": "assistant", "content": answer}]
        return trajectory_of(answered(turns, tokenizer, last_only=True), f"{uid}/{side}", group, reward)

    return one(pair.chosen, pair.chosen_reward, "chosen"), one(
        pair.rejected, pair.rejected_reward, "rejected"
    )


def pair_batch(pairs: Sequence[tuple[Trajectory, Trajectory]], **layout: Any) -> TokenBatch:
    """Pair i on rows 2i and 2i + 1.

    Args:
      pairs: at least one, from `pair_trajectories`.
      layout: arguments of `rollout.pack`; `rows_multiple` must be even and rows are never shared.
    """
    if layout.get("rows_multiple", 2) % 2 or layout.get("row_tokens") is not None:
        raise ValueError(
            f"pair_batch: pairs sit on rows 2i and 2i + 1, which needs an even rows_multiple and row_tokens=None, got "
            f"{layout.get('rows_multiple')} and {layout.get('row_tokens')}."
        )
    return supervised_batch([answer for pair in pairs for answer in pair], **{"rows_multiple": 2, **layout})


def labelled_trajectory(row: Labelled, tokenizer: Tokenizer, uid: str, group: int) -> Trajectory:
    """The answer tokens, end token included, are trained. The reward is 1 for a good answer and 0 for a bad one."""
    conversation = answered(row.messages, tokenizer, last_only=True)
    return trajectory_of(conversation, uid, group, float(row.good))


def labelled_batch(answers: Sequence[Trajectory], **layout: Any) -> TokenBatch:
    """Answers from `labelled_trajectory`, one a row, with batch.desirable; `layout` are arguments of `rollout.pack`."""
    if layout.get("row_tokens") is not None:
        raise ValueError(
            f"labelled_batch: answers are laid out one a row, so row_tokens must be None, got {layout['row_tokens']}."
        )
    batch = supervised_batch(answers, **layout)
    good = np.zeros(batch.shape, bool)
    good[: len(answers)] = np.array([t.reward == 1.0 for t in answers])[:, None]
    return dataclasses.replace(batch, desirable=jax.device_put(good))


def mismatched(pairs: Sequence[tuple[Trajectory, Trajectory]], longest: int) -> list[Trajectory]:
    """Each prompt with the answers to the next one, in the rows of `pair_batch`: what KTO estimates its z from.

    Args:
      longest: tokens of a row; answers are cut to what their new prompt leaves.

    Raises:
      ValueError: one pair only, which has no other answer.
    """
    if len(pairs) < 2:
        raise ValueError("mismatched: a batch of one pair has no answers to other prompts; use at least 2.")
    return [
        _crossed(own, foreign, longest)
        for pair, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True)
        for own, foreign in zip(pair, other, strict=True)
    ]


def mismatched_labelled(answers: Sequence[Trajectory], longest: int) -> list[Trajectory]:
    """`mismatched` of answers with a label: each prompt with the next answer to another prompt (the next one, if all
    prompts are the same).

    Raises:
      ValueError: one answer only.
    """
    if len(answers) < 2:
        raise ValueError("mismatched_labelled: a batch of one answer has no other one; use at least 2.")
    crossed = []
    for place, own in enumerate(answers):
        following = [*answers[place + 1 :], *answers[:place]]
        others = (t for t in following if not np.array_equal(t.prompt.tokens, own.prompt.tokens))
        crossed.append(_crossed(own, next(others, following[0]), longest))
    return crossed


def _crossed(own: Trajectory, foreign: Trajectory, longest: int) -> Trajectory:
    """The prompt of one with the answer of the other."""
    answer = foreign.completion[: max(1, longest - len(own.prompt.tokens))]
    conversation = (own.prompt.tokens, answer)
    mask = np.repeat([False, True], [len(part) for part in conversation])
    unsampled = np.full(len(mask), -1, np.int32)
    return dataclasses.replace(
        own,
        tokens=np.concatenate(conversation).astype(np.int32),
        mask=mask,
        logprob=np.zeros(len(mask), np.float32),
        version=unsampled,
        kv_version=unsampled,
        reward=None,
    )
