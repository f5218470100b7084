"""The stream of prompts of a run: shuffled, repeated, resumable at any step.

A `PromptSource` is a Grain `MapDataset` of positions plus one integer, the cursor. Everything else (order
within an epoch, the item at a position, its rendering, its uid) is a pure function of the cursor and the
arguments, so a saved cursor continues identically, also exactly at the end of an epoch.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import grain
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.task import SplitName, Task, prompt_of
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt

__all__ = ["PromptSource"]

_ENDLESS = 2**31 - 1  # positions of an endless task before Grain starts again; their index goes on growing
_DIGESTED = 10_000  # rows of a file that its digest covers; its size is compared as well
_SEARCH = 1_000  # positions of an endless task that are tried for a prompt that fits


class PromptSource:
    """Prompts of one split of a task, in batches.

    Args:
      task, tokenizer: what `prompt_of` needs.
      seed: of the split and of the shuffling.
      split: "train" or "eval".
      max_prompt_tokens: longer prompts are skipped and counted in `skipped`; None = no limit.
      epochs: passes over a finite task; None = for ever. An endless task has no epochs.
      shuffle: another order in each epoch; False = the order of the file.
      shard: (number, of how many): this process' share of the positions. The loop needs none, since every
        process holds the same decisions; independent fleets of samplers do.

    Raises:
      InputError: from `next_batch`, when no prompt fits.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        split: SplitName = "train",
        max_prompt_tokens: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        shard: tuple[int, int] = (0, 1),
    ):
        number, shards = shard
        if not 0 <= number < shards:
            raise ValueError(
                f"PromptSource: shard must be (number, of how many) with number below it, got {shard}."
            )
        self._task, self._tokenizer = task, tokenizer
        self._items = task.split(split, seed)
        self.max_prompt_tokens = max_prompt_tokens
        size = self._items.size
        if epochs is not None and (epochs < 1 or size is None):
            raise ValueError(
                "PromptSource: epochs must be at least 1 and needs a finite task; an endless one has no epochs."
            )
        positions = grain.MapDataset.range(_ENDLESS if size is None else size)
        if size is not None and shuffle:
            positions = positions.seed(int(seed) % 2**32).shuffle()
        if shards > 1:
            positions = positions[number::shards]
        self._epoch_length = len(positions)
        if not self._epoch_length:
            raise InputError(
                f"task {task.name}: {size} items cannot be shared by {shards} processes; use fewer."
            )
        self._end = None if epochs is None else epochs * self._epoch_length
        self._positions = positions.repeat(None if epochs is None else epochs)
        self._search = _SEARCH if size is None else 2 * self._epoch_length
        self._cursor = 0
        self._skipped = 0
        self._identity = {
            "task": task.name,
            "split": split,
            "seed": int(seed),
            "size": size,
            "shuffle": bool(shuffle),
            "shard": [number, shards],
            "epochs": epochs,
            "digest": self._digest(),
        }

    def _digest(self) -> str:
        """Recognises the data: a hash of the rows of a file, or of the first few items of an endless task."""
        size = self._items.size
        some = [self._items.item(i).payload() for i in range(8 if size is None else min(_DIGESTED, size))]
        return hashlib.blake2b(json.dumps(some, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def skipped(self) -> int:
        """Prompts skipped so far because they were too long."""
        return self._skipped

    @property
    def cursor(self) -> int:
        """Positions consumed so far, skipped ones included."""
        return self._cursor

    @property
    def epoch(self) -> int:
        """Epochs completed so far; always 0 for an endless task."""
        return self._cursor // self._epoch_length

    def next_batch(self, n: int) -> list[Prompt]:
        """The next n prompts. Fewer, and finally none, only when `epochs` passes are over.

        Raises:
          InputError: a whole pass (or 1,000 items of an endless task) held no prompt that fits.
        """
        batch: list[Prompt] = []
        too_long = 0
        shortest: int | None = None
        while len(batch) < n and (self._end is None or self._cursor < self._end):
            prompt = self._prompt(self._cursor)
            self._cursor += 1
            length = len(prompt.tokens)
            if self.max_prompt_tokens is None or length <= self.max_prompt_tokens:
                batch.append(prompt)
                too_long = 0
                continue
            self._skipped += 1
            too_long += 1
            shortest = length if shortest is None else min(shortest, length)
            if too_long >= self._search or (self._end == self._cursor == self._skipped):
                raise InputError(
                    f"task {self._task.name}: none of {too_long} prompts fits into {self.max_prompt_tokens} tokens; the shortest "
                    f"has {shortest}. Raise the limit (model.max_context, task.max_prompt_tokens) or shorten the "
                    "prompts."
                )
        return batch

    def _prompt(self, cursor: int) -> Prompt:
        index = int(np.asarray(self._positions[cursor % _ENDLESS]))
        visit = cursor // self._epoch_length
        uid = f"{self._task.name}/{self._items.name}/{self._items.seed}/{index}#{visit}"
        return prompt_of(self._task, self._items.item(index), self._tokenizer, uid=uid)

    def state(self) -> dict[str, Any]:
        """Where the stream is, as JSON values."""
        return {"cursor": self._cursor, "skipped": self._skipped, "identity": dict(self._identity)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a saved state.

        Raises:
          InputError: the state belongs to other data, another seed or another division among processes.
        """
        saved = dict(state["identity"])
        changed = [
            f"{k}: saved {saved.get(k)!r}, now {v!r}" for k, v in self._identity.items() if saved.get(k) != v
        ]
        if changed:
            raise InputError(
                f"the data of the snapshot is not the data of this run ({'; '.join(changed)}). Use the same task, "
                "seed and file, or start a new run."
            )
        self._cursor = int(state["cursor"])
        self._skipped = int(state["skipped"])
