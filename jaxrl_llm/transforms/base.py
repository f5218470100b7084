"""The objective algebra: what a stage is, how stages chain, what a chain says about itself.

A `LossTransform` is a NamedTuple of pure functions, one for each clock; a chain of them is again one.

    init()                       once           -> state
    prepare(batch, state)        rollout batch  whole batch, all groups; no parameters
    apply(loss, batch, state)    each gradient  one token, sequence or row; differentiable
    update(state, metrics)       optimiser step exact global metrics

A stage is written as a function of hyper-parameters that returns its `apply` or its `prepare`:

    @stage(reads=("loss.log_ratio",), writes=("loss.weight",))
    def temper(tau: float = 1.5):
        def apply(loss, batch):
            return loss.scale_weight(1.0 / (1.0 + tau * absolute(loss.log_ratio)))
        return apply

The state of a chain is {stage name: state}, with an entry for stateful stages only, so that adding a stage
does not break a checkpoint: a state that is not there is made by `init`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import did_you_mean
from jaxrl_llm.transforms import dataflow
from jaxrl_llm.transforms.begin import begin
from jaxrl_llm.transforms.dataflow import Need

__all__ = [
    "STAGES",
    "ChainInfo",
    "LossTransform",
    "Parts",
    "StageInfo",
    "chain",
    "check_complete",
    "describe",
    "needed_fields",
    "needs",
    "rebuild",
    "stage",
    "stages",
]

STAGES: dict[str, Callable[..., LossTransform]] = {}
"""Every stage that exists: {name: factory}. Filled by `stage`; error texts and configs read it."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageInfo:
    """What a stage says about itself."""

    name: str  # unique in a chain; keys its state and its overrides
    stage: str  # name of the factory
    arguments: Mapping[str, Any]  # hyper-parameters, defaults filled in
    reads: tuple[str, ...]  # "batch.advantage", "loss.log_ratio", …
    writes: tuple[str, ...]
    clock: str  # "prepare", "apply" or "prepare, apply"
    remake: Callable[[Mapping[str, Any]], LossTransform]  # the same stage with other arguments

    def __iter__(self) -> Iterator[StageInfo]:
        return iter((self,))

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={_show(v)}" for k, v in self.arguments.items() if v is not None)
        alias = "" if self.name == self.stage else f"{self.name}: "
        return f"{alias}{self.stage}({shown})"


@dataclasses.dataclass(frozen=True, eq=False)
class ChainInfo:
    """The stages of a chain, in order. Iterating gives their `StageInfo`."""

    stages: tuple[LossTransform, ...]

    def __iter__(self) -> Iterator[StageInfo]:
        return iter(tuple(member.info for member in self.stages))  # type: ignore[misc]  # chains are flat

    def __str__(self) -> str:
        return f"chain({', '.join(map(str, self))})"


class LossTransform(NamedTuple):
    """A bundle of pure functions; see the module's docstring for what each may see."""

    init: Callable[[], Any]
    prepare: Callable[[Any, Any], tuple[Any, Any]]
    apply: Callable[[Any, Any, Any], Any]
    update: Callable[[Any, Any], Any]
    info: StageInfo | ChainInfo

    def __repr__(self) -> str:
        return str(self.info)


class Parts(NamedTuple):
    """What the factory of a stage with state, or with more than one part, returns.

    With `init` (a stateful stage) the parts have the signatures of `LossTransform`; without it they are
    `prepare(batch) -> batch` and `apply(loss, batch) -> loss`.
    """

    prepare: Callable[..., Any] | None = None
    apply: Callable[..., Any] | None = None
    init: Callable[[], Any] | None = None
    update: Callable[[Any, Any], Any] | None = None


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    if callable(value) and not isinstance(value, LossTransform):
        return getattr(value, "__name__", type(value).__name__)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------ stage


def _bind(parts: Parts, info: StageInfo) -> LossTransform:
    """The five functions, each a full one: identity where the stage has no part, state passed through."""
    if parts.init is None:
        prepare, apply = parts.prepare, parts.apply
        return LossTransform(
            init=lambda: None,
            prepare=(lambda b, s: (b, s)) if prepare is None else (lambda b, s: (prepare(b), s)),
            apply=(lambda l, b, s: l) if apply is None else (lambda l, b, s: apply(l, b)),
            update=lambda s, m: s,
            info=info,
        )
    return LossTransform(
        init=parts.init,
        prepare=parts.prepare or (lambda b, s: (b, s)),
        apply=parts.apply or (lambda l, b, s: l),
        update=parts.update or (lambda s, m: s),
        info=info,
    )


def _as_parts(returned: Any, where: str) -> Parts:
    if isinstance(returned, Parts):
        return returned
    name = getattr(returned, "__name__", None)
    if name in ("apply", "prepare") and callable(returned):
        return Parts(**{name: returned})
    raise ValueError(
        f"{where}: a stage must return a function called `apply` or `prepare`, or Parts(...); "
        f"it returned {returned!r}."
    )


Fields = Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]


def stage(
    *, reads: Fields = (), writes: Fields = ()
) -> Callable[[Callable[..., Any]], Callable[..., LossTransform]]:
    """Decorator that makes a factory of `LossTransform` from a function of hyper-parameters.

    Args:
      reads, writes: fields, as "batch.NAME" or "loss.NAME", or a function of the arguments that gives them
        (`token_ratio(anchor)` reads the anchor that it names). `chain` checks the dataflow they declare, and
        the on-demand ones are what `needs` lists.

    The factory gains the keyword `name`, for using one stage twice in a chain. A function that has a
    keyword-only parameter `name` of its own is given the name that the stage has in the end.

    Raises (when the stage is made):
      ValueError: an unknown field, or the function returned neither `apply` nor `prepare` nor `Parts`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., LossTransform]:
        full = inspect.signature(function)
        own = [p for p in full.parameters.values() if p.name != "name"]
        wants_name = len(own) < len(full.parameters)
        signature = full.replace(parameters=own)
        stage_name = function.__name__

        def fields(given: Fields, arguments: Mapping[str, Any]) -> tuple[str, ...]:
            found = given(arguments) if callable(given) else given
            dataflow.check_fields(stage_name, found)
            return tuple(found)

        @functools.wraps(function)
        def factory(*args: Any, name: str | None = None, **kwargs: Any) -> LossTransform:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            told = {"name": name or stage_name} if wants_name else {}
            parts = _as_parts(function(*bound.args, **bound.kwargs, **told), f"{stage_name}()")
            arguments = dict(bound.arguments)
            clocks = [clock for clock in ("prepare", "apply") if getattr(parts, clock) is not None]
            info = StageInfo(
                name=name or stage_name,
                stage=stage_name,
                arguments=arguments,
                reads=fields(reads, arguments),
                writes=fields(writes, arguments),
                clock=", ".join(clocks) or "update",
                remake=lambda changed: factory(**{**arguments, **changed}, name=name),
            )
            return _bind(parts, info)

        keyword = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None)
        factory.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what inspect reads
            parameters=[*own, keyword]
        )
        factory.reads = reads  # type: ignore[attr-defined]  # for error texts: who could write a field
        factory.writes = writes  # type: ignore[attr-defined]
        STAGES[stage_name] = factory
        return factory

    return decorate


# ------------------------------------------------------------------------------------------ chain


def stages(transform: LossTransform) -> tuple[LossTransform, ...]:
    """The stages of a chain, or the one stage that it is."""
    info = transform.info
    return info.stages if isinstance(info, ChainInfo) else (transform,)


def chain(*transforms: LossTransform) -> LossTransform:
    """Composes stages, and chains of stages, into one `LossTransform`.

        loss = Σ norm · weight · policy / Σ count  +  for each penalty:  Σ norm_p · penalty / Σ count_p

    Raises:
      ValueError: two stages of one name; a field read before it is written; a field changed after it was
        read; a second writer of a field that has one. The text names the stage, the field and the fix.
        (What is missing to train with is checked where an objective is used: `check_complete`.)
    """
    for index, item in enumerate(transforms):
        if not isinstance(item, LossTransform):
            hint = f" Did you forget to call it: {item.__name__}()?" if callable(item) else ""
            raise ValueError(
                f"chain(): argument {index} is {type(item).__name__}, not a LossTransform.{hint}"
            )
    members = tuple(member for item in transforms for member in stages(item))
    info = ChainInfo(members)
    dataflow.check_chain(tuple(info), STAGES)

    def named(state: Any) -> dict[str, Any]:
        return {} if state is None else dict(state)

    def of(member: LossTransform, state: Mapping[str, Any]) -> Any:
        name = member.info.name  # type: ignore[union-attr]  # members are stages, never chains
        return state[name] if name in state else member.init()

    def keep(state: dict[str, Any], member: LossTransform, new: Any) -> None:
        if new is not None:
            state[member.info.name] = new  # type: ignore[union-attr]

    def init() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for member in members:
            keep(state, member, member.init())
        return state

    def prepare(batch: Any, state: Any = None) -> tuple[Any, dict[str, Any]]:
        state = named(state)
        batch = begin(batch, [field for member in info for field in member.writes])
        for member in members:
            batch, new = member.prepare(batch, of(member, state))
            keep(state, member, new)
        return batch, state

    def apply(loss: Any, batch: Any, state: Any = None) -> Any:
        state = named(state)
        for member in members:
            loss = member.apply(loss, batch, of(member, state))
        return loss

    def update(state: Any, metrics: Any) -> dict[str, Any]:
        state = named(state)
        for member in members:
            keep(state, member, member.update(of(member, state), metrics))
        return state

    return LossTransform(init, prepare, apply, update, info)


def check_complete(objective: LossTransform) -> None:
    """Raises ValueError when an objective cannot be evaluated: no normaliser, or nothing to minimise."""
    dataflow.check_complete(tuple(objective.info), STAGES)


# -------------------------------------------------------------------------------- what a chain says


def needs(objective: LossTransform) -> frozenset[Need]:
    """The on-demand fields that an objective reads; the learner computes exactly these.

    A `Need` is a string, "batch.logprob_reference", with the attributes `record`, `field`, `arguments`.
    """
    return frozenset(
        Need(read) for info in objective.info for read in info.reads if Need(read).key in dataflow.ON_DEMAND
    )


def needed_fields(objective: LossTransform) -> frozenset[str]:
    """The names of the on-demand fields: {"logprob_proximal", "logprob_reference", "entropy", …}."""
    return frozenset(need.field for need in needs(objective))


def describe(objective: LossTransform) -> str:
    """A table of the stages: number, stage with its arguments, clock, what it reads and writes."""

    def fields(names: Sequence[str]) -> str:
        # The record is not repeated: "batch.logprob_proximal, .logprob_behavior".
        shown, last = [], ""
        for name in names:
            record, _, field = name.partition(".")
            shown.append(f".{field}" if record == last else name)
            last = record
        return ", ".join(shown)

    head = ("#", "stage", "clock", "reads", "writes")
    rows = [
        (str(i), str(info), info.clock, fields(info.reads), fields(info.writes))
        for i, info in enumerate(objective.info)
    ]
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)


def rebuild(objective: LossTransform, changes: Mapping[str, Any]) -> LossTransform:
    """The same chain with other hyper-parameters: {"clip_surrogate.high": 0.28}.

    Raises:
      ValueError: a key that is not STAGE.ARGUMENT of this chain (the known ones are listed), or a value
        that the stage refuses.
    """
    infos = tuple(objective.info)
    known = {f"{info.name}.{argument}": info for info in infos for argument in info.arguments}
    for key in changes:
        if key not in known:
            raise ValueError(
                f"rebuild(): no argument {key!r}.{did_you_mean(key, known)} Known: {', '.join(known) or 'none'}."
            )
    changed: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, argument = key.rpartition(".")
        changed.setdefault(name, {})[argument] = value
    members = [
        info.remake(changed[info.name]) if info.name in changed else member
        for info, member in zip(infos, stages(objective), strict=True)
    ]
    return chain(*members) if isinstance(objective.info, ChainInfo) else members[0]
