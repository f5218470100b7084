"""What the recipes share: the form of a policy-gradient objective, the checks of arguments, and their list."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec

from jaxrl_llm.transforms import (
    LossTransform,
    chain,
    imitate_chosen,
    normalize_by_pair,
    penalize_kl,
    reward_entropy,
    truncate_importance,
)
from jaxrl_llm.transforms.checks import choice, number
from jaxrl_llm.transforms.penalty import ESTIMATORS, WEIGHTED

__all__ = ["RECIPES", "Needs", "over_pairs", "policy_gradient", "recipe"]

RECIPES: dict[str, Callable[..., LossTransform]] = {}
"""{name: recipe}; what a config names. Filled by `recipe`."""

P = ParamSpec("P")


class Needs(NamedTuple):
    """What an argument needs of another one to have an effect."""

    argument: str
    state: str = "set"  # in words
    holds: Callable[[Any], bool] = bool


# Arguments of one meaning in every recipe. They are checked here because a recipe leaves their stage out at 0 or
# None, and then no stage looks at them or at what goes with them.
_COEFFICIENT = dict(low=0.0, optional=True)
_NUMBERS: dict[str, dict[str, Any]] = {
    "kl_coef": _COEFFICIENT,
    "reward_kl_coef": _COEFFICIENT,
    "value_coef": _COEFFICIENT,
    "square_coef": _COEFFICIENT,
    "nll_coef": _COEFFICIENT,
    "center": _COEFFICIENT,
    "importance_cap": _COEFFICIENT,
    "entropy_coef": dict(optional=True),  # below 0 it lowers the entropy
    "value_clip": dict(positive=True, optional=True),
    "overlong_limit": _COEFFICIENT,
    "overlong_buffer": _COEFFICIENT,
    "overlong_penalty": dict(low=0.0),
    "threshold": {},
    "gamma": dict(low=0.0, high=1.0),
    "lam": dict(low=0.0, high=1.0, optional=True),
    "eps": dict(low=0.0),
}
# The same word with another meaning.
_OF_ONE_RECIPE: dict[tuple[str, str], dict[str, Any]] = {("simpo", "gamma"): {}}  # a margin in nats
_CHOICES: dict[str, Sequence[Any]] = {"kl_estimator": (*ESTIMATORS, *WEIGHTED)}


def _check(name: str, arguments: dict[str, Any], defaults: dict[str, Any], needs: dict[str, Needs]) -> None:
    for argument, value in arguments.items():
        limits = _OF_ONE_RECIPE.get((name, argument), _NUMBERS.get(argument))
        if limits is not None:
            number(name, argument, value, **limits)
        elif argument in _CHOICES:
            choice(name, argument, value, _CHOICES[argument])
        elif isinstance(defaults.get(argument), bool) and not isinstance(value, bool):
            raise ValueError(f"{name}: {argument} must be true or false, got {value!r}.")
        elif type(defaults.get(argument)) is int and type(value) is not int:
            raise ValueError(f"{name}: {argument} must be a whole number, got {value!r}.")
    for argument, need in needs.items():
        if arguments[argument] != defaults[argument] and not need.holds(arguments[need.argument]):
            raise ValueError(
                f"{name}: {argument}={arguments[argument]!r} has no effect unless {need.argument} is "
                f"{need.state}. Set {need.argument}, or leave {argument} out."
            )


def recipe(**needs: Needs) -> Callable[[Callable[P, LossTransform]], Callable[P, LossTransform]]:
    """Decorator: enters a recipe into RECIPES and checks its arguments.

    Args:
      needs: of an argument, what it needs to have an effect; set without it, the recipe refuses.
    """

    def decorate(function: Callable[P, LossTransform]) -> Callable[P, LossTransform]:
        name, signature = function.__name__, inspect.signature(function)
        defaults = {p.name: p.default for p in signature.parameters.values()}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> LossTransform:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}(): {error}. It takes: {', '.join(defaults)}.") from None
            bound.apply_defaults()
            _check(name, dict(bound.arguments), defaults, needs)
            return function(*args, **kwargs)

        RECIPES[name] = checked
        return checked

    return decorate


def policy_gradient(
    *head: LossTransform,
    normalize: LossTransform,
    surrogate: LossTransform,
    ratio: LossTransform | None = None,
    reject: Sequence[LossTransform] = (),
    penalties: Sequence[LossTransform] = (),
    anchor: str | None = None,
    importance_cap: float | None = None,
    kl_coef: float | None = None,
    kl_estimator: str = "k3",
    entropy_coef: float | None = None,
) -> LossTransform:
    """The form of every policy-gradient recipe.

    Args:
      head: the shaped reward, the advantage and the corrections of the recipe's own, in order.
      reject: stages that drop tokens before the normaliser counts them.
      penalties: those of the recipe's own, before the shared two.
      anchor: that of the ratio, which importance_cap must fit.
    """
    correction = []
    if importance_cap:
        if anchor == "behavior":
            raise ValueError(
                'importance_cap weighs by proximal / behavior, which a ratio anchored at "behavior" already '
                'contains. Set anchor="proximal", or leave importance_cap out.'
            )
        correction = [truncate_importance(importance_cap)]
    return chain(
        *head,
        *correction,
        *reject,
        normalize,
        *([] if ratio is None else [ratio]),
        surrogate,
        *penalties,
        *([penalize_kl(kl_coef, estimator=kl_estimator)] if kl_coef else []),
        *([reward_entropy(entropy_coef)] if entropy_coef else []),
    )


def over_pairs(
    surrogate: LossTransform, nll_coef: float | None = None, average: bool = True
) -> LossTransform:
    """The form of every preference recipe: a mean over pairs, and nll_coef times the NLL of the chosen answer."""
    extra = [imitate_chosen(nll_coef, average=average)] if nll_coef else []
    return chain(normalize_by_pair(), surrogate, *extra)
