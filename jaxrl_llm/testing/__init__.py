"""Checks of the laws that every objective obeys, for the package's stages and for yours.

    @jrl.stage(reads=("loss.log_ratio",), writes=("loss.weight",))
    def temper(tau=1.5): ...

    jrl.testing.check_transform(temper())        # every law that holds for this kind of stage

Each `assert_...` takes a complete objective, or a single stage that `complete` makes one of, and an optional
batch with one sequence a row. They run in float64, on a bigram policy small enough for a laptop, and raise
AssertionError with both numbers.
"""

from __future__ import annotations

from jaxrl_llm.testing.check import LAWS, check_transform, laws
from jaxrl_llm.testing.gradients import assert_gradient, assert_on_policy_identity, assert_weight_detached
from jaxrl_llm.testing.invariance import (
    assert_mesh_invariant,
    assert_order_invariant,
    assert_packing_invariant,
    assert_padding_inert,
    assert_split_invariant,
)
from jaxrl_llm.testing.layouts import pack, rows
from jaxrl_llm.testing.setting import complete
from jaxrl_llm.testing.tiny import VOCABULARY, float64, sample_batch, tiny_policy, tiny_policy_params

__all__ = [
    "LAWS",
    "VOCABULARY",
    "assert_gradient",
    "assert_mesh_invariant",
    "assert_on_policy_identity",
    "assert_order_invariant",
    "assert_packing_invariant",
    "assert_padding_inert",
    "assert_split_invariant",
    "assert_weight_detached",
    "check_transform",
    "complete",
    "float64",
    "laws",
    "pack",
    "rows",
    "sample_batch",
    "tiny_policy",
    "tiny_policy_params",
]
