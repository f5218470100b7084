"""Tasks: where questions come from and how answers are judged.

A `Task` turns (split, seed, index) into an `Item` and a completion into a `Score`. Items are pure functions
of those three, so a position in the data is an integer. Two splits exist:

* "train" and "eval" never share content, whatever their seeds: an item belongs to "eval" when the hash of its
  content falls below the held-out share, and to "train" otherwise. Two-digit addition has only 8,100 questions,
  so a second seed alone would hold nothing out. The content key ignores the order of the operands (12 + 34 is
  34 + 12) and does not contain the name of the task, so tasks that share questions share the division.
* Different seeds of one split give different orders of the same kind of items.

`make_task(name, args)` finds a task by name; `prompt_of` renders an item with a tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.rewards.registry import GRADERS, Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt

__all__ = [
    "GeneratedTask",
    "HashStream",
    "Item",
    "PromptFormat",
    "Question",
    "Split",
    "SplitName",
    "TASKS",
    "Task",
    "find_grader",
    "is_held_out",
    "item_of",
    "make_task",
    "prompt_of",
    "register_task",
    "render",
]

SplitName = Literal["train", "eval"]
HELD_OUT = 0.1  # share of the contents that only "eval" sees
MAX_DRAWS = 2_000  # draws until an item of the wanted split is found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One question. JSON-able through `payload`."""

    messages: tuple[Mapping[str, str], ...]  # the conversation that asks it
    answer: str | None  # the gold answer; None when answers are judged by simulation
    prefix: str = ""  # the begun assistant turn, part of the prompt
    key: str = ""  # what makes the content the same content
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what only the task understands
    agent: int = 0  # the role that answers, 0, 1, …, for tasks that a policy plays in several

    def __post_init__(self):
        if isinstance(self.agent, bool) or not isinstance(self.agent, int) or not 0 <= self.agent < 2**31:
            raise ValueError(f"Item: agent must be the number of a role, 0, 1, …, got {self.agent!r}.")

    @property
    def question(self) -> str:
        """The last thing the user said."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    def payload(self) -> dict[str, Any]:
        """The fields as plain JSON values, for `Prompt.payload`."""
        return {
            "messages": [dict(m) for m in self.messages],
            "answer": self.answer,
            "prefix": self.prefix,
            "key": self.key,
            "extra": dict(self.extra),
        } | ({"agent": self.agent} if self.agent else {})


def item_of(prompt: Prompt) -> Item:
    """The item that a prompt was made from by `prompt_of`."""
    fields = dict(prompt.payload)
    return Item(**{**fields, "messages": tuple(fields["messages"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The items of one split in the order of one seed."""

    name: SplitName
    seed: int
    size: int | None  # None = endless
    item: Callable[[int], Item]  # index -> item, pure


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How an item becomes token ids."""

    system: str | None = None  # text of the system turn; None = no system turn, not even the template's own
    template_system: bool = False  # with system None: leave the system turn to the chat template
    begin_assistant: bool = True  # put the task's prefix in front of the answer
    chat: bool = True  # False: plain text "question, newline, prefix", for base models


class Task(Protocol):
    """What the loop needs to know about a task."""

    @property
    def name(self) -> str:
        """As given to `make_task`; appears in metric names."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that suit the way answers are read."""

    @property
    def max_tokens(self) -> int:
        """Sampled tokens that are enough for an answer."""

    @property
    def exact(self) -> bool:
        """True when an answer is right only if it equals the gold answer."""

    @property
    def form(self) -> PromptFormat:
        """How its items are rendered."""

    def split(self, name: SplitName, seed: int) -> Split:
        """Items to train on ("train") or to measure with ("eval")."""

    def messages(self, item: Item) -> list[dict[str, str]]:
        """The conversation that puts the question."""

    def score(self, item: Item, completion: str) -> Score:
        """Judges the sampled text (`collect.graded_text`). Pure; never raises for anything that a policy may have
        written."""

    def write(self, answer: str) -> str:
        """The completion of a model that gives this answer in the right form."""


# ------------------------------------------------------------------------------- generated tasks


class HashStream:
    """Integers that depend on a key and on nothing else: not on the library, its version or the platform."""

    def __init__(self, *key: object):
        self._key = "/".join(map(str, key)).encode()
        self._drawn = 0

    def below(self, bound: int) -> int:
        """The next integer in [0, bound), uniform up to a bias of bound / 2^64."""
        digest = hashlib.blake2b(self._key + self._drawn.to_bytes(8, "little"), digest_size=8).digest()
        self._drawn += 1
        return int.from_bytes(digest, "little") * bound >> 64

    def between(self, low: int, high: int) -> int:
        """The next integer in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        return options[self.below(len(options))]


def is_held_out(key: str, share: float = HELD_OUT) -> bool:
    """Whether a content belongs to "eval". A pure function of the content, so no seed can leak it."""
    digest = hashlib.blake2b(b"held-out/" + key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What the generator of a task draws."""

    text: str
    answer: str
    prefix: str = ""
    key: str = ""  # default: the text


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedTask:
    """An endless task made by a function of a `HashStream`."""

    name: str
    draw: Callable[[HashStream], Question]
    grader: Grader
    max_tokens: int
    stop: tuple[str, ...] = ("\n",)
    held_out: float = HELD_OUT
    exact: bool = True
    form: PromptFormat = PromptFormat()

    def split(self, name: SplitName, seed: int) -> Split:
        """See `Task.split`."""
        _check_split(name)
        return Split(name=name, seed=seed, size=None, item=lambda index: self._item(name, seed, index))

    def _item(self, name: SplitName, seed: int, index: int) -> Item:
        for attempt in range(MAX_DRAWS):
            question = self.draw(HashStream(self.name, name, seed, index, attempt))
            key = question.key or question.text
            if is_held_out(key, self.held_out) == (name == "eval"):
                return Item(
                    messages=({"role": "user", "content": question.text},),
                    answer=question.answer,
                    prefix=question.prefix,
                    key=key,
                )
        raise InputError(
            f"task {self.name}: no {name} item among {MAX_DRAWS} draws; it has too few different questions "
            "to hold some out. Use a larger setting (more digits, longer strings)."
        )

    def messages(self, item: Item) -> list[dict[str, str]]:
        """See `Task.messages`."""
        return [dict(m) for m in item.messages]

    def score(self, item: Item, completion: str) -> Score:
        """See `Task.score`."""
        return self.grader.score(completion, item.answer or "", item.question)

    def write(self, answer: str) -> str:
        """See `Task.write`."""
        return self.grader.write(answer)


def _check_split(name: str) -> None:
    if name not in ("train", "eval"):
        raise InputError(f"split {name!r} does not exist; a task has the splits train and eval.")


# ------------------------------------------------------------------------------------- registry

TASKS: dict[str, Callable[..., Task]] = {}  # built-in tasks; their keyword arguments are the task's args


def register_task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Decorator: makes a function that builds a task available to `make_task` under a name.

    The task must be a frozen dataclass with a field `form`, so that `make_task` can set its prompt format.
    """

    def add(build: Callable[..., Task]) -> Callable[..., Task]:
        if name in TASKS:
            raise ValueError(f"register_task: {name!r} is already registered.")
        TASKS[name] = build
        return build

    return add


def nearest(word: str, known: Sequence[str]) -> str:
    """ " Did you mean X?" for the nearest known word, or ""."""
    return did_you_mean(word, known, cutoff=0.5)


def find_grader(name: str, where: str) -> Grader:
    """A grader by name. Raises InputError with the list."""
    if name not in GRADERS:
        raise InputError(
            f"{where}: grader {name!r} does not exist.{nearest(str(name), list(GRADERS))} "
            f"Graders: {', '.join(GRADERS)}."
        )
    return GRADERS[name]


def make_task(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    form: PromptFormat | None = None,
    **more: Any,
) -> Task:
    """Finds a task by name.

    Args:
      name: a built-in task, `reasoning_gym:FAMILY` (extra [demo]) or `jsonl:FILE`.
      args, more: arguments of the task, such as `digits` of `addition`.
      system: text of the system turn of its prompts; None = no system turn.
      form: everything about the rendering of its prompts; default `PromptFormat(system=system)`.

    Raises:
      InputError: no such task or argument, a bad value, an unreadable file.
    """
    from jaxrl_llm.rollout import files, gym  # they build on this module

    args = {**(args or {}), **more}
    kind, colon, rest = name.partition(":")
    if kind == "reasoning_gym" and colon:
        build: Callable[..., Task] = gym.reasoning_gym_task
        first: tuple[str, ...] = (rest,)
    elif kind == "jsonl" and (rest or "path" in args):
        build, first = files.jsonl_task, (rest or str(args.pop("path")),)
    elif name in TASKS:
        build, first = TASKS[name], ()
    else:
        known = [*TASKS, "jsonl:FILE", "reasoning_gym:FAMILY"]
        raise InputError(
            f"task {name!r} does not exist.{nearest(name, known)} Tasks: {', '.join(sorted(known))}."
        )
    known = [p for p in inspect.signature(build).parameters][len(first) :]
    for key in args:
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise InputError(f"task {name}: no argument {key!r}.{nearest(key, known)} Arguments: {allowed}.")
    task = build(*first, **args)
    form = PromptFormat(system=system) if form is None else form
    return dataclasses.replace(task, form=form)  # type: ignore[type-var]  # tasks are dataclasses, see register_task


def check_integer(task: str, name: str, value: Any, low: int, high: int) -> int:
    """`value` if it is an integer in [low, high]. Raises InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"task {task}: {name} must be an integer from {low} to {high}, got {value!r}.")
    return value


# ------------------------------------------------------------------------------------ rendering


def render(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Tokenizer,
    form: PromptFormat = PromptFormat(),
    *,
    prefix: str = "",
) -> list[int]:
    """Token ids of a conversation that the model is to go on with.

    Args:
      messages: [{"role": …, "content": …}, …], up to the answer; a last turn of the assistant is continued.
      prefix: the begun assistant turn; ignored when `form.begin_assistant` is False.
    """
    turns = [dict(m) for m in messages]
    prefix = prefix if form.begin_assistant else ""
    if not form.chat:
        return tokenizer.encode("\n".join([*(m["content"] for m in turns), prefix]), add_bos=True)
    if form.system is not None and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": form.system}, *turns]
    if prefix:
        turns = [*turns, {"role": "assistant", "content": prefix}]
    begun = turns[-1]["role"] == "assistant"
    return tokenizer.chat(
        turns,
        add_generation_prompt=not begun,
        continue_final_message=begun,
        default_system=form.template_system,
    )


def prompt_of(task: Task, item: Item, tokenizer: Tokenizer, *, uid: str) -> Prompt:
    """Renders an item in the task's format; `uid` identifies this visit of it."""
    tokens = render(task.messages(item), tokenizer, task.form, prefix=item.prefix)
    return Prompt(uid=uid, tokens=np.asarray(tokens, np.int32), task=task.name, payload=item.payload())
