"""Trajectories -> TokenBatch: laid out in NumPy, put on the device once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.types import TokenBatch, Trajectory

__all__ = ["first_fit", "pack"]


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each length into the first row that has room for it, in the given order.

    Returns:
      The indices in each row.

    Raises:
      ValueError: a length is more than the capacity.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(
                f"pack: trajectory {index} has {length} tokens, a row holds row_tokens={capacity}. Raise row_tokens, "
                "or sample fewer tokens."
            )
        row = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


def _check(trajectories: Sequence[Trajectory]) -> None:
    for index, t in enumerate(trajectories):
        where = f"pack: trajectory {index} (prompt {t.prompt.uid})"
        length = len(t.tokens)
        if not length:
            raise ValueError(f"{where} has no tokens.")
        for name in ("mask", "logprob", "version", "kv_version"):
            if len(getattr(t, name)) != length:
                raise ValueError(f"{where}: {name} has {len(getattr(t, name))} entries for {length} tokens.")
        if not t.temperature > 0:
            raise ValueError(
                f"{where} was drawn at temperature {t.temperature}: greedy completions have no distribution to train "
                "on. Sample with a positive temperature."
            )
        if not np.all(np.isfinite(t.logprob[t.mask])):
            raise ValueError(f"{where}: a sampled token has a log-prob that is not finite.")


def pack(
    trajectories: Sequence[Trajectory],
    *,
    learner_version: int,
    pad_to_multiple: int = 16,
    rows_multiple: int = 1,
    pad_id: int = 0,
    row_tokens: int | None = None,
    parts: Sequence[str] = (),
) -> TokenBatch:
    """Lays trajectories out as rows.

    Lengths and masks come from the trajectories, never from token values, so a pad id that is also the
    end-of-sequence id, or a word, changes nothing.

    Args:
      trajectories: at least one. Groups are renumbered 0, 1, … in order of appearance, trajectories likewise.
      learner_version: train steps done when the train step on this batch starts.
      pad_to_multiple: tokens; T is rounded up to a multiple, so that few shapes are compiled.
      rows_multiple: B is rounded up to a multiple with rows of padding, which count nowhere.
      pad_id: written where there is no token.
      row_tokens: None = one trajectory a row. Otherwise several trajectories share a row of at most so many
        tokens (first fit, longest first), each a segment of its own with positions from 0.
      parts: names of reward parts that the batch carries as streams in `rewards`.

    The reward sits on the last trained token of its trajectory. It is not valid, and 0, when it is None or
    when nothing of the trajectory is trained. The first token of a sequence has no prediction and is never
    trained. Padding has segment 0, temperature 1 and version -1; ids of padding belong to no trajectory.

    Raises:
      ValueError: no trajectory; fields of different lengths; a greedy trajectory; a log-prob that is not
        finite; a part that a scored trajectory lacks; a trajectory longer than `row_tokens`.
    """
    if not trajectories:
        raise ValueError("pack: no trajectories. Skip the train step when nothing was kept.")
    if pad_to_multiple < 1 or rows_multiple < 1:
        raise ValueError(
            f"pack: pad_to_multiple and rows_multiple must be at least 1, got {pad_to_multiple}, {rows_multiple}."
        )
    _check(trajectories)
    lengths = [len(t.tokens) for t in trajectories]
    if row_tokens is None:
        rows = [[i] for i in range(len(trajectories))]
    else:
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # stable: ties in the given order
        rows = [[order[i] for i in row] for row in first_fit([lengths[i] for i in order], row_tokens)]
    width = max(sum(lengths[i] for i in row) for row in rows)
    T = -(-width // pad_to_multiple) * pad_to_multiple
    B = -(-len(rows) // rows_multiple) * rows_multiple

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full((B, T), value, dtype)

    tokens, positions, segments = full(pad_id, np.int32), full(0, np.int32), full(0, np.int32)
    version, kv_version = full(-1, np.int32), full(-1, np.int32)
    mask, valid, truncated = full(False, bool), full(False, bool), full(False, bool)
    reward, logprob, temperature = full(0, np.float32), full(0, np.float32), full(1, np.float32)
    streams = {name: full(0, np.float32) for name in parts}
    # Padding gets ids that no trajectory has: one of its own for each row.
    padding_ids = len(trajectories) + np.arange(B, dtype=np.int32)[:, None]
    trajectory = np.broadcast_to(padding_ids, (B, T)).copy()
    group = trajectory.copy()
    groups: dict[int, int] = {}
    for t in trajectories:
        groups.setdefault(t.group, len(groups))

    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            t = trajectories[index]
            at = (row, slice(start, start + lengths[index]))
            trained = np.array(t.mask, bool)
            trained[0] = False
            last = start + int(np.flatnonzero(trained)[-1]) if trained.any() else None
            tokens[at] = t.tokens
            positions[at] = np.arange(lengths[index])
            segments[at] = segment
            trajectory[at] = index
            group[at] = groups[t.group]
            mask[at] = trained
            version[at] = np.where(t.mask, t.version, -1)
            kv_version[at] = np.where(t.mask, t.kv_version, -1)
            logprob[at] = np.where(trained, t.logprob, 0.0)
            temperature[at] = t.temperature
            truncated[at] = t.truncated
            if t.reward is not None and last is not None:
                valid[at] = True
                reward[row, last] = t.reward
                for name, stream in streams.items():
                    if name not in t.rewards:
                        raise ValueError(
                            f"pack: trajectory {index} (prompt {t.prompt.uid}) has no reward part {name!r}; it has "
                            f"{', '.join(t.rewards) or 'none'}."
                        )
                    stream[row, last] = t.rewards[name]
            start += lengths[index]

    arrays: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "segments": segments,
        "sequence": trajectory.copy(),
        "trajectory": trajectory,
        "group": group,
        "version": version,
        "kv_version": kv_version,
        "mask": mask,
        "reward": reward,
        "reward_valid": valid,
        "truncated": truncated,
        "temperature": temperature,
        "learner_version": np.asarray(learner_version, np.int32),
        "logprob_behavior": logprob,
        "rewards": streams or None,
    }
    return TokenBatch(**jax.device_put(arrays))
