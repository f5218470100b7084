"""What happens to every batch before the first stage: masked values become 0, and the data is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.ops.numerics import keep
from jaxrl_llm.ops.segments import trajectories
from jaxrl_llm.types import TokenBatch

__all__ = ["begin", "clean"]

# Floats that are only meaningful at trained tokens. (Values and teacher supports keep theirs: returns cross
# masked spans.)
MASKED = (
    "reward",
    "advantage",
    "weight",
    "logprob_behavior",
    "logprob_proximal",
    "logprob_reference",
    "logprob_teacher",
    "baseline_reward",
)


def clean(batch: TokenBatch) -> TokenBatch:
    """The batch with every float of a token outside the mask set to 0.

    Done before anything is computed from it: a `where` after an exp would not stop a NaN gradient.
    """
    changed: dict[str, Any] = {
        name: keep(batch.mask, x) for name in MASKED if (x := getattr(batch, name)) is not None
    }
    for name in ("topk_logprob_behavior", "topk_logprob_proximal"):
        if (x := getattr(batch, name)) is not None:
            changed[name] = keep(batch.mask[..., None], x)
    if batch.rewards is not None:
        changed["rewards"] = {name: keep(batch.mask, x) for name, x in batch.rewards.items()}
    return batch.replace(**changed)


def begin(batch: TokenBatch, writes: Sequence[str]) -> TokenBatch:
    """Cleans the batch and logs what it holds: length, reward, reward_missing, truncated, by trajectory.

    Raises:
      ValueError: the batch carries a norm and the chain would write it: it was prepared before.
    """
    if batch.norm is not None and "batch.norm" in writes:
        raise ValueError(
            "prepare(): this batch was prepared before (batch.norm is set), and a second pass would shape "
            "rewards and scale weights twice. Prepare the raw batch once, then `evaluate` as often as needed."
        )
    batch = clean(batch)
    each = trajectories(batch.trajectory, batch.mask)
    reward = each.spread(each.sum(batch.reward, batch.mask))
    return (
        batch.log("length", each.spread(each.length), each.last)
        .log("reward", reward, each.last & batch.reward_valid)
        .log("reward_missing", 1.0 - batch.reward_valid.astype(reward.dtype), each.last)
        .log("truncated", batch.truncated.astype(reward.dtype), each.last)
    )
