"""Supervised data: rows of a JSONL file as trajectories whose answer tokens are trained.

One object a line:

    {"prompt": "2 + 2 =", "answer": "4"}
    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]}

and in either an optional number "reward", which rejection-sampling fine-tuning selects by. Ids come from the
model's own chat template, exactly as in a rollout; the answer ends with the token that ends a turn, which is
trained like the others. In "messages" every assistant turn is trained.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.json_lines import Message, check_messages, read_objects
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.tokens.conversation import Conversation
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt, StopReason, TokenBatch, Trajectory

__all__ = [
    "Example",
    "answered",
    "read_sft",
    "reward_of",
    "supervised_batch",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation that ends with an assistant turn."""

    messages: tuple[Message, ...]
    reward: float | None = None


# ------------------------------------------------------------------------------------------ reading


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """A text that is not empty. Raises InputError."""
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {key!r} must be a text that is not empty, got {value!r}. Remove the row.")
    return value


def reward_of(row: Mapping[str, Any], key: str, where: str) -> float | None:
    """An optional finite number. Raises InputError."""
    value = row.get(key)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise OverflowError
    except OverflowError:  # also an integer beyond every float
        shown = repr(value)[:80]
        raise InputError(
            f"{where}: {key!r} must be a finite number, got {shown}. Correct it or leave it out."
        ) from None
    return float(value)


def only_one(row: Mapping[str, Any], keys: Sequence[str], where: str, needs: str) -> str:
    """The one of `keys` that a row has. Raises InputError."""
    given = [key for key in keys if key in row]
    if len(given) != 1:
        found = " and ".join(map(repr, given)) if given else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise InputError(f"{where}: needs {needs}, found {found}.")
    return given[0]


def read_sft(path: str | pathlib.Path) -> list[Example]:
    """The examples of a file.

    Raises:
      InputError: names the file, the line and what to change: a key is missing, an answer is empty, the
        conversation does not end with the assistant.
    """
    examples = [_example(row, where) for where, row in read_objects(path)]
    if not examples:
        raise InputError(
            f'data file {path} has no rows; expected one {{"prompt": …, "answer": …}} or {{"messages": […]}} a line.'
        )
    return examples


def _example(row: Mapping[str, Any], where: str) -> Example:
    key = only_one(row, ("messages", "prompt"), where, "either 'messages' or 'prompt' and 'answer'")
    if key == "messages":
        messages = check_messages(row["messages"], where, "messages")
    else:
        if "answer" not in row:
            hint = " For pairs, set objective to a preference loss such as dpo." if "chosen" in row else ""
            raise InputError(f"{where}: 'answer' is missing; found: {', '.join(map(repr, row))}.{hint}")
        messages = (
            {"role": "user", "content": text_of(row, "prompt", where)},
            {"role": "assistant", "content": text_of(row, "answer", where)},
        )
    check_turns(messages, where, "messages")
    return Example(messages=messages, reward=reward_of(row, "reward", where))


def check_turns(messages: Sequence[Message], where: str, key: str) -> None:
    """Raises InputError unless a conversation ends with an assistant turn, and none of them is empty."""
    if messages[-1]["role"] != "assistant":
        raise InputError(
            f"{where}: {key!r} must end with a turn of the assistant, which is what is trained; it ends with "
            f"{messages[-1]['role']!r}."
        )
    for before, message in zip((None, *messages), messages, strict=False):
        if message["role"] == "assistant":
            if not message["content"].strip():
                raise InputError(f"{where}: {key!r} has an empty turn of the assistant. Remove the row.")
            if before is None or before["role"] == "assistant":
                what = "begins with a turn" if before is None else "has two turns in a row"
                raise InputError(f"{where}: {key!r} {what} of the assistant; put the user's turn before it.")


# --------------------------------------------------------------------------------------- token ids


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """The token that ends an assistant turn: the template's, if it is a control token, else the model's EOS."""
    following = tokenizer.next_turn([], False)
    if following and tokenizer.is_special(following[0]):
        return following[:1]
    return list(tokenizer.eos_ids[:1])


def answered(messages: Sequence[Message], tokenizer: Tokenizer, *, last_only: bool = False) -> Conversation:
    """The conversation as token ids; the mask is on the assistant's turns, each with its end token.

    Args:
      last_only: train the last turn alone (a preference is about one answer).
    """
    end = end_of_turn(tokenizer)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if last_only:
        turns = turns[-1:]
    conversation = Conversation.start(tokenizer.chat(messages[: turns[0]], default_system=False))
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        ids = [*tokenizer.encode(messages[turn]["content"]), *end]
        conversation = conversation.append_sampled(ids, np.zeros(len(ids)), 0)
        if after is not None:
            conversation = conversation.append_turns(tokenizer, messages[turn + 1 : after])
    return conversation


def trajectory_of(
    conversation: Conversation, uid: str, group: int, reward: float | None = None
) -> Trajectory:
    """A conversation as the trajectory that `pack` lays out."""
    first = int(np.argmax(conversation.mask))
    return conversation.trajectory(
        prompt=Prompt(uid=uid, tokens=conversation.tokens[:first]),
        group=group,
        reward=reward,
        stop=StopReason.EOS,
    )


def supervised_batch(trajectories: Sequence[Trajectory], **layout: Any) -> TokenBatch:
    """A batch of given answers: laid out by `rollout.pack`, without the log-probs that a sampler would have given."""
    batch = pack(trajectories, **layout)
    unknown = jax.numpy.full_like(batch.version, -1)
    return dataclasses.replace(batch, logprob_behavior=None, version=unknown, kv_version=unknown)
