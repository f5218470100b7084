"""The objective algebra: stages, how they chain, and what a chain says and does.

Read `base` first. One module a kind of stage; each stage's docstring has its equation and its source.
"""

from jaxrl_llm.transforms.advantage import (
    given_advantage,
    group_advantage,
    leave_one_out_advantage,
    returns_to_go,
    whiten_advantage,
)
from jaxrl_llm.transforms.base import (
    STAGES,
    LossTransform,
    Parts,
    StageInfo,
    chain,
    check_complete,
    describe,
    needed_fields,
    needs,
    rebuild,
    stage,
    stages,
)
from jaxrl_llm.transforms.correction import drop_stale, drop_truncated, mask_importance, truncate_importance
from jaxrl_llm.transforms.dataflow import Need
from jaxrl_llm.transforms.evaluate import evaluate, loss
from jaxrl_llm.transforms.normalize import (
    normalize_by_constant,
    normalize_by_group,
    normalize_by_length_limit,
    normalize_by_sequence,
    normalize_by_sequence_sum,
    normalize_by_token,
)
from jaxrl_llm.transforms.penalty import penalize_kl, reward_entropy
from jaxrl_llm.transforms.ratio import sequence_ratio, sequence_ratio_per_token, token_ratio
from jaxrl_llm.transforms.reward import penalize_kl_in_reward, shape_overlong
from jaxrl_llm.transforms.surrogate import clip_surrogate, reinforce_surrogate
from jaxrl_llm.transforms.wrappers import masked, scheduled

__all__ = [
    "STAGES",
    "LossTransform",
    "Need",
    "Parts",
    "StageInfo",
    "chain",
    "check_complete",
    "clip_surrogate",
    "describe",
    "drop_stale",
    "drop_truncated",
    "evaluate",
    "given_advantage",
    "group_advantage",
    "leave_one_out_advantage",
    "loss",
    "mask_importance",
    "masked",
    "needed_fields",
    "needs",
    "normalize_by_constant",
    "normalize_by_group",
    "normalize_by_length_limit",
    "normalize_by_sequence",
    "normalize_by_sequence_sum",
    "normalize_by_token",
    "penalize_kl",
    "penalize_kl_in_reward",
    "rebuild",
    "reinforce_surrogate",
    "returns_to_go",
    "reward_entropy",
    "scheduled",
    "sequence_ratio",
    "sequence_ratio_per_token",
    "shape_overlong",
    "stage",
    "stages",
    "token_ratio",
    "truncate_importance",
    "whiten_advantage",
]
