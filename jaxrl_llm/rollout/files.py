"""Tasks from a JSONL file: one object a line, {"prompt": … | "messages": […], "answer": …}.

An optional "agent" (0, 1, …) says in which role the policy answers, for objectives that keep roles apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.registry import Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.json_lines import check_messages, read_objects
from jaxrl_llm.rollout.task import (
    HELD_OUT,
    Item,
    PromptFormat,
    Split,
    SplitName,
    _check_split,
    check_integer,
    find_grader,
)

__all__ = ["FileTask", "jsonl_task", "read_jsonl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask:
    """A finite task. Row order is the file's; a data source shuffles it by its seed."""

    name: str
    rows: Mapping[str, tuple[Item, ...]]  # by split
    grader: Grader
    max_tokens: int
    stop: tuple[str, ...]
    overlap: int = 0  # training rows left out because the evaluation file has the same content
    exact: bool = True
    form: PromptFormat = PromptFormat()

    def split(self, name: SplitName, seed: int) -> Split:
        """See `Task.split`. Raises InputError when the split has no rows."""
        _check_split(name)
        rows = self.rows[name]
        if not rows:
            raise InputError(
                f"task {self.name}: no rows for {name}: the file has too few different prompts to hold some out. "
                "Add rows, or give eval_path a file of its own."
            )
        return Split(name=name, seed=seed, size=len(rows), item=lambda index: rows[index % len(rows)])

    def messages(self, item: Item) -> list[dict[str, str]]:
        """See `Task.messages`."""
        return [dict(m) for m in item.messages]

    def score(self, item: Item, completion: str) -> Score:
        """See `Task.score`."""
        return self.grader.score(completion, item.answer or "", item.question)

    def write(self, answer: str) -> str:
        """See `Task.write`."""
        return self.grader.write(answer)


def read_jsonl(
    path: str | pathlib.Path,
    *,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    answer_after: str = "",
) -> list[Item]:
    """Reads the rows of a file: UTF-8 with or without a byte-order mark, any line ends, blank lines ignored.

    Args:
      path: the file.
      prompt_field: name of the text of the question; a row may have "messages" instead.
      answer_field: name of the gold answer, a text or a number.
      answer_after: keep only what follows the last occurrence of this marker in the answer ("####").

    Raises:
      InputError: the file cannot be read or has no rows; a line is no JSON object, or a field is missing or
        wrong (with the line number).
    """
    items = [_item(row, where, prompt_field, answer_field, answer_after) for where, row in read_objects(path)]
    if not items:
        raise InputError(f'data file {path} has no rows; expected one {{"prompt": …, "answer": …}} a line.')
    return items


def _item(
    row: Mapping[str, Any], where: str, prompt_field: str, answer_field: str, answer_after: str
) -> Item:
    given = [f for f in dict.fromkeys((prompt_field, "messages")) if f in row]
    if len(given) != 1:
        found = "both" if given else f"neither; found: {', '.join(map(str, row)) or 'nothing'}"
        raise InputError(f"{where}: needs either {prompt_field!r} or 'messages', got {found}.")
    if given == ["messages"] and prompt_field != "messages":
        messages = check_messages(row["messages"], where, "messages")
        if not any(m["role"] == "user" for m in messages):
            raise InputError(f"{where}: 'messages' has no turn of the user.")
    else:
        prompt = row[prompt_field]
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"{where}: {prompt_field!r} must be a text that is not empty, got {prompt!r}.")
        messages = ({"role": "user", "content": prompt},)
    if answer_field not in row:
        raise InputError(f"{where}: field {answer_field!r} is missing; found: {', '.join(map(str, row))}.")
    answer = row[answer_field]
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise InputError(f"{where}: {answer_field!r} must be a text or a number, got {answer!r}.")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise InputError(f"{where}: {answer_field!r} must be a finite number, got {answer!r}.")
        answer = str(int(answer)) if answer.is_integer() and abs(answer) < 2**53 else repr(answer)
    answer = str(answer)
    if answer_after:
        before, marker, answer = answer.rpartition(answer_after)
        if not marker:
            raise InputError(f"{where}: {answer_field!r} does not contain the marker {answer_after!r}.")
    if not answer.strip():
        raise InputError(f"{where}: {answer_field!r} is empty.")
    agent = row.get("agent", 0)
    if isinstance(agent, bool) or not isinstance(agent, int) or not 0 <= agent < 2**31:
        raise InputError(f"{where}: 'agent' must be the number of a role, 0, 1, …, got {agent!r}.")
    prefix = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    if prefix:
        messages = messages[:-1]
    return Item(
        agent=agent,
        messages=messages,
        answer=answer.strip(),
        prefix=prefix,
        key=json.dumps([*messages, prefix], ensure_ascii=False, sort_keys=True),
    )


def _divide(items: list[Item], held_out: float) -> dict[str, tuple[Item, ...]]:
    """Holds out the contents with the smallest hashes: a share of the different prompts, at least one of two."""
    keys = sorted({i.key for i in items}, key=lambda k: hashlib.blake2b(b"held-out/" + k.encode()).digest())
    number = min(math.ceil(held_out * len(keys)), len(keys) - 1)
    chosen = set(keys[:number])
    return {
        "train": tuple(i for i in items if i.key not in chosen),
        "eval": tuple(i for i in items if i.key in chosen),
    }


def jsonl_task(
    path: str,
    *,
    eval_path: str | None = None,
    grader: str = "line",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    answer_after: str = "",
    instruction: str = "",
    max_tokens: int = 256,
    stop: tuple[str, ...] | list[str] | None = None,
    held_out: float = HELD_OUT,
) -> FileTask:
    """Questions and answers from a file.

    Args:
      path: the training rows. See `read_jsonl` for the format.
      eval_path: rows to evaluate on. Training rows with the same content are left out and counted. Default:
        a share `held_out` of the different prompts of `path`, chosen by the hash of their content.
      grader: how an answer is read and compared, one of `rewards.GRADERS`.
      instruction: a sentence put after each question.
      max_tokens, stop: suggestions to the sampler; stop defaults to a newline for graders of the first line.
    """
    where = f"task jsonl:{path}"
    texts = {"grader": grader, "prompt_field": prompt_field, "answer_field": answer_field}
    texts |= {"answer_after": answer_after, "instruction": instruction}
    texts |= {} if eval_path is None else {"eval_path": eval_path}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InputError(f"{where}: {name} must be a text, got {value!r}.")
    if prompt_field == "messages":
        raise InputError(f"{where}: prompt_field names a text; rows with 'messages' are read without it.")
    check_integer(where.removeprefix("task "), "max_tokens", max_tokens, 1, 2**31 - 1)
    if stop is not None and (
        isinstance(stop, str)
        or not isinstance(stop, (list, tuple))
        or not all(isinstance(t, str) and t for t in stop)
    ):
        raise InputError(f"{where}: stop must be a list of texts that are not empty, got {stop!r}.")
    chosen = find_grader(grader, where)
    if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) or not 0 <= held_out < 1:
        raise InputError(f"task jsonl:{path}: held_out must be a share in [0, 1), got {held_out!r}.")
    names = {"prompt_field": prompt_field, "answer_field": answer_field, "answer_after": answer_after}
    items = read_jsonl(path, **names)
    overlap = 0
    if eval_path is None:
        rows = _divide(items, held_out)
    else:
        measured = read_jsonl(eval_path, **names)
        keys = {i.key for i in measured}
        train = tuple(i for i in items if i.key not in keys)
        overlap = len(items) - len(train)
        if not train:
            raise InputError(f"task jsonl:{path}: every row is also in the evaluation file {eval_path}.")
        rows = {"train": train, "eval": tuple(measured)}
    if instruction:
        rows = {name: tuple(_instruct(i, instruction) for i in part) for name, part in rows.items()}
    if stop is None:
        stop = ("\n",) if grader in ("line", "number") else ()
    return FileTask(
        name="jsonl:" + re.sub(r"[^A-Za-z0-9_.-]", "_", pathlib.Path(path).name),  # appears in metric names
        rows=rows,
        grader=chosen,
        max_tokens=max_tokens,
        stop=tuple(stop),
        overlap=overlap,
    )


def _instruct(item: Item, instruction: str) -> Item:
    messages = [dict(m) for m in item.messages]
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    messages[last]["content"] += f"\n{instruction}"
    return dataclasses.replace(item, messages=tuple(messages))
