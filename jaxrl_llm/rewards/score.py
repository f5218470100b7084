"""The result of judging one completion."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

__all__ = ["Score", "computed"]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a reward says about one completion.

    `value` is the reward, or None when it could not be computed; `reason` then says why. A failure of the
    verifier is never a 0: a 0 would teach the policy that a right answer was wrong.

    `parts` are named side figures in [0, 1] that never enter the reward by themselves (an objective over several
    rewards, gdpo, reads them); None is a part that could not be computed. Graders here fill
    `format` (the answer has the form that was asked for) and `lenient` (the right answer is somewhere in
    the text), so that a gain in accuracy can be split into format and skill.
    """

    value: float | None
    parts: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def __post_init__(self):
        if self.value is None and not self.reason:
            raise ValueError("Score: a value of None needs a reason that says why it could not be computed.")


def _finite(value: Any) -> float | None:
    """A real number as a float; None for anything else, NaN and what is too large for a float."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def computed(given: Any, who: str) -> Score:
    """What the `score` of a task gave, with finite floats; None with the reason where it gave no such number.

    Args:
      given: a `Score`, if the task does what it should.
      who: the name of the task, for the reason.
    """
    if not isinstance(given, Score):
        return Score(None, reason=f"the verifier of {who} gave {given!r:.80}, which is no Score")
    parts = {str(name): _finite(part) for name, part in given.parts.items()}
    if given.value is None:
        return Score(None, parts, given.reason)
    value = _finite(given.value)
    if value is None:
        return Score(
            None, parts, f"the verifier of {who} gave {given.value!r:.80}, which is no finite number"
        )
    return Score(value, parts, given.reason)
