"""The result of judging one completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["Score"]


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
