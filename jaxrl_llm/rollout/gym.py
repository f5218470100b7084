"""Tasks from the package `reasoning_gym` (extra [demo]): procedural families with known answers.

Only the extracted answer is judged, and only full credit counts (score >= 1): the package's default scorer
pays len(gold) / len(answer) for any text that contains the gold answer, and many families pay a little for
nothing. What else is guarded against, found by running all its families:

* Some scorers evaluate the answer as Python or sympy code (n_queens, spiral_matrix, countdown, integrals …).
  They are never called. countdown and puzzle24 are judged by our own evaluator of + - * /, families with one
  right text by comparing texts, and the rest is refused.
* A scorer that pays in full for nonsense (game_of_life_halting) is not used; texts are compared instead.
* A scorer that raises an error yields None with the reason, not a 0.
* Families without a gold answer are judged by the package's simulation, and never by a comparison.
* Families that are not reproducible (codeio), or are made of others (composite), are refused, and so is a
  configuration that never produces an item.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.exact import contains, normalise
from jaxrl_llm.rewards.expression import evaluate_expression
from jaxrl_llm.rewards.registry import Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.task import (
    HELD_OUT,
    MAX_DRAWS,
    Item,
    PromptFormat,
    Split,
    SplitName,
    _check_split,
    find_grader,
    is_held_out,
    nearest,
)

__all__ = ["GymTask", "reasoning_gym_task"]

CHUNK = 512  # items of one package data set; some families generate all of them, or depend on the number
FIRST_ITEM_SECONDS = 60.0  # the slowest family takes about one
_REFUSED = {
    "codeio": "its items are not reproducible and its scorer runs code",
    "composite": "it is made of other families; use one of them",
}
_SEVERAL_RIGHT = (
    "n_queens",
    "simple_integration",
    "intermediate_integration",
)  # and the scorer evaluates code
_OWN_GOLD_ONLY = ("number_sorting",)  # its scorer evaluates the gold answer, never the policy's
_SLOW = {  # tenths of a second an item: a larger held-out share, so that few draws are thrown away
    name: 0.5
    for name in (
        *(
            "futoshiki",
            "knight_swap",
            "zebra_puzzles",
            "figlet_font",
            "arc_agi",
            "advanced_geometry",
            "rearc",
        ),
        *("intermediate_integration", "puzzle24", "countdown"),
    )
}
_NONSENSE = ("banana", "[", "no idea, sorry", "((((", "-")

Judge = Literal["package", "text", "expression"]


def _package() -> Any:
    """The package, imported when first needed: it takes seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings of its dependencies
            import reasoning_gym
            import reasoning_gym.factory
    except ImportError as error:
        raise InputError(
            f"reasoning_gym tasks need the extra [demo]: pip install 'jaxrl-llm[demo]' ({error})."
        ) from None
    return reasoning_gym


def _evaluates_code(scorer: Callable[..., Any]) -> bool:
    """Whether a scorer calls eval, exec or sympy's parser (which is eval) by name."""
    names = set(scorer.__code__.co_names)
    if names & {"eval", "exec", "sympify"}:
        return True
    if "parse_expr" not in names:
        return False
    function = scorer.__globals__.get("parse_expr")  # a family has a harmless parser of this name
    return function is None or not function.__module__.startswith("reasoning_gym")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymTask:
    """One family with a fixed configuration. `config` and the package version pin the items."""

    name: str
    family: str
    config: Mapping[str, Any]
    grader: Grader
    judge: Judge
    instruction: str
    prefix: str
    max_tokens: int
    stop: tuple[str, ...]
    held_out: float
    form: PromptFormat = PromptFormat()
    dataset: Callable[[int], Any]  # seed -> package data set of CHUNK items, cached
    entry: Callable[[int, int], Mapping[str, Any]]  # (seed, place) -> its item, cached: some take a second

    @property
    def exact(self) -> bool:
        """True when texts are compared with the gold answer."""
        return self.judge == "text"

    def split(self, name: SplitName, seed: int) -> Split:
        """See `Task.split`."""
        _check_split(name)
        return Split(name=name, seed=seed, size=None, item=lambda index: self._item(name, seed, index))

    def _item(self, name: SplitName, seed: int, index: int) -> Item:
        chunk, place = divmod(index, CHUNK)
        for attempt in range(MAX_DRAWS):
            # The package's item i of seed s is item i - 1 of seed s + 1, so seeds are hashed far apart.
            digest = hashlib.blake2b(f"{self.family}/{name}/{seed}/{chunk}/{attempt}".encode(), digest_size=4)
            dataset_seed = int.from_bytes(digest.digest(), "little") >> 1
            entry = self.entry(dataset_seed, place)
            key = f"{self.family} {entry['question']}"
            if is_held_out(key, self.held_out) != (name == "eval"):
                continue
            question = entry["question"] + (f"\n{self.instruction}" if self.instruction else "")
            return Item(
                messages=({"role": "user", "content": question},),
                answer=None if entry["answer"] is None else str(entry["answer"]),
                prefix=self.prefix,
                key=key,
                extra={"dataset_seed": dataset_seed, "place": place},
            )
        raise InputError(
            f"task {self.name}: no {name} item among {MAX_DRAWS} draws; this configuration has too few different "
            "questions to hold some out. Widen it."
        )

    def messages(self, item: Item) -> list[dict[str, str]]:
        """See `Task.messages`."""
        return [dict(m) for m in item.messages]

    def write(self, answer: str) -> str:
        """See `Task.write`."""
        return self.grader.write(answer)

    def score(self, item: Item, completion: str) -> Score:
        """See `Task.score`."""
        found = self.grader.find(completion)
        anywhere = item.answer is not None and contains(completion, item.answer)
        parts = {"format": float(bool(found)), "lenient": float(anywhere)}
        if not found:
            return Score(0.0, parts, "no answer in the form that was asked for")
        if self.judge == "text":
            right = normalise(found) == normalise(item.answer or "")
        else:
            try:
                entry = copy.deepcopy(self.entry(item.extra["dataset_seed"], item.extra["place"]))
                if self.judge == "expression":
                    right = _solves(self.family, found, entry)
                else:
                    right = float(self.dataset(item.extra["dataset_seed"]).score_answer(found, entry)) >= 1.0
            except Exception as error:  # a fault of somebody else's scorer is no wrong answer
                return Score(
                    None, parts, f"the scorer of {self.family} failed: {type(error).__name__}: {error}"
                )
        parts["lenient"] = max(parts["lenient"], float(right))
        return Score(float(right), parts, "" if right else f"answer {found[:80]!r} is not right")


def _solves(family: str, text: str, entry: Mapping[str, Any]) -> bool:
    """Whether an expression uses exactly the given numbers and reaches the target."""
    evaluated = evaluate_expression(text)
    if evaluated is None:
        return False
    value, used = evaluated
    target = 24 if family == "puzzle24" else entry["metadata"]["target"]
    return value == Fraction(target) and sorted(used) == sorted(map(int, entry["metadata"]["numbers"]))


def _within(seconds: float, function: Callable[[], Any], what: str) -> Any:
    """Runs a function in a thread and gives up on it after a time: a family may search for ever."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise InputError(f"{what} did not produce an item within {seconds:g} s; change its configuration.")
    return result[0]


def _choose_judge(name: str, family: str, dataset: Any, entries: list[Mapping[str, Any]]) -> Judge:
    """How answers of a family can be judged safely. Raises InputError when they cannot."""
    has_gold = all(isinstance(e["answer"], str) for e in entries)
    if family in ("countdown", "puzzle24"):
        return "expression"
    if _evaluates_code(type(dataset).score_answer) and family not in _OWN_GOLD_ONLY:
        if not has_gold or family in _SEVERAL_RIGHT:
            raise InputError(
                f"task {name}: its scorer evaluates the answer as code and several answers are right, so it "
                "cannot be judged safely. Choose another family."
            )
        return "text"
    for entry in entries:
        for nonsense in _NONSENSE:
            try:
                paid = float(dataset.score_answer(nonsense, entry)) >= 1.0
            except Exception:  # a crash is no credit; `score` reports it as None
                paid = False
            if paid:
                if not has_gold:
                    raise InputError(
                        f"task {name}: its scorer pays in full for {nonsense!r}. Choose another family."
                    )
                return "text"
    return "package"


def reasoning_gym_task(
    family: str,
    *,
    config: Mapping[str, Any] | None = None,
    grader: str = "line",
    instruction: str | None = None,
    prefix: str | None = None,
    max_tokens: int = 32,
    held_out: float | None = None,
) -> GymTask:
    """A family of reasoning_gym.

    Args:
      family: its name, such as chain_sum.
      config: the family's own settings; the others keep the package's defaults. Not seed or size.
      grader: where the answer is read from, one of `rewards.GRADERS`; "number" reads like "line".
      instruction: a sentence put after each question; default: that of the grader.
      prefix: how the assistant's turn begins; default "Answer:" for graders of the first line.
      held_out: share of the questions that only "eval" sees; default 0.1, and 0.5 for slow families.

    Raises:
      InputError: the extra is missing; the family, a setting or its value does not exist; the family cannot
        be judged safely or does not produce items.
    """
    name = f"reasoning_gym:{family}"
    package = _package()
    known = sorted(set(package.factory.DATASETS) - set(_REFUSED))
    if family in _REFUSED:
        raise InputError(f"task {name}: not supported: {_REFUSED[family]}.")
    if family not in known:
        raise InputError(
            f"task {name}: reasoning_gym has no family {family!r}.{nearest(family, known)} Families: {', '.join(known)}."
        )
    chosen = find_grader(grader, f"task {name}")
    settings = dict(config or {})
    fields = [
        f.name
        for f in dataclasses.fields(package.factory.DATASETS[family][1])
        if f.name not in ("seed", "size")
    ]
    for key in settings:
        if key not in fields:
            raise InputError(
                f"task {name}: no setting {key!r} in config.{nearest(str(key), fields)} Settings: {', '.join(fields)}."
            )
    if family == "base_conversion" and settings.get("min_base", 2) == settings.get("max_base", 16):
        raise InputError(
            f"task {name}: min_base and max_base are both {settings.get('min_base', 2)}, so there is nothing to "
            "convert and the package searches for ever. Make max_base larger."
        )

    @functools.lru_cache(maxsize=64)
    def dataset(seed: int) -> Any:
        return package.create_dataset(family, seed=seed, size=CHUNK, **settings)

    @functools.lru_cache(maxsize=4096)
    def entry(seed: int, place: int) -> Mapping[str, Any]:
        return dataset(seed)[place]

    def probe() -> tuple[Any, list[Mapping[str, Any]]]:
        first = dataset(1)
        return first, [first[i] for i in range(3)]

    try:
        first, entries = _within(FIRST_ITEM_SECONDS, probe, f"task {name}")
    except InputError:
        raise
    except Exception as error:  # the package checks its settings with assert, and by failing
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InputError(
            f"task {name}: the package refuses config {settings!r} ({detail}). Settings: {', '.join(fields)}."
        ) from None
    lines = [e["answer"] for e in entries if isinstance(e["answer"], str) and "\n" in e["answer"].strip()]
    if lines and grader in ("line", "number"):
        raise InputError(
            f"task {name}: its answers have several lines, and the grader {grader!r} reads one. Use grader: tag or text."
        )
    reads_line = grader in ("line", "number")
    return GymTask(
        name=name,
        family=family,
        config=settings,
        grader=chosen,
        judge=_choose_judge(name, family, first, entries),
        instruction=chosen.instruction if instruction is None else instruction,
        prefix=("Answer:" if reads_line else "") if prefix is None else prefix,
        max_tokens=max_tokens,
        stop=("\n",) if reads_line else (),
        held_out=(_SLOW.get(family, HELD_OUT) if held_out is None else held_out),
        dataset=dataset,
        entry=entry,
    )
