"""Trajectories -> TokenBatch: laid out in NumPy, put on the device once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.ops.support import support_fault
from jaxrl_llm.types import TokenBatch, Trajectory

__all__ = ["ON_REQUEST", "first_fit", "pack"]

ON_REQUEST = frozenset({"agent", "baseline_reward", "topk_logprob_behavior"})  # what `fill` may name


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
                f"first_fit: entry {index} has length {length}, more than a row holds: {capacity}."
            )
        row = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


class _Family(NamedTuple):
    """Trajectories that follow each other in a row and share their first tokens."""

    prefix: int  # tokens that are laid out once; 0 = none
    members: list[int]
    tokens: int  # places that the family takes in a row

    def pairs(self, trajectories: Sequence[Trajectory]) -> float:
        """Pairs of a token and one that it sees: the work of its attention."""
        own = [len(trajectories[i].tokens) - self.prefix for i in self.members]
        return self.prefix**2 / 2 + sum(n * (self.prefix + n / 2) for n in own)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _common_prefix(trajectories: Sequence[Trajectory], multiple: int) -> int:
    """Tokens that can be laid out once for all of these: none is trained, and each keeps one before its first.

    The last token in common stays with every member, because the first token after it is predicted there. A multiple of
    `multiple`.
    """
    if len(trajectories) == 1:
        return 0
    first = trajectories[0].tokens
    longest = min(len(t.tokens) - 1 for t in trajectories)
    for t in trajectories:
        trained = np.flatnonzero(t.mask)
        longest = min(longest, int(trained[0]) - 1 if trained.size else longest)
        different = np.flatnonzero(t.tokens[: max(longest, 0)] != first[: max(longest, 0)])
        longest = min(longest, int(different[0]) - 1 if different.size else longest)
    return max(longest, 0) // multiple * multiple


def _families(trajectories: Sequence[Trajectory], row_tokens: int, start_multiple: int) -> list[_Family]:
    """The trajectories of each group as families that fit into a row, longest members first."""
    by_group: dict[int, list[int]] = {}
    for index, t in enumerate(trajectories):
        if len(t.tokens) > row_tokens:
            raise ValueError(
                f"pack: trajectory {index} has {len(t.tokens)} tokens, a row holds row_tokens={row_tokens}. Raise "
                "row_tokens, or sample fewer tokens."
            )
        by_group.setdefault(t.group, []).append(index)
    families = []
    for members in by_group.values():
        prefix = _common_prefix([trajectories[i] for i in members], start_multiple)
        members = sorted(members, key=lambda i: -len(trajectories[i].tokens))
        own = [_up(len(trajectories[i].tokens) - prefix, start_multiple) for i in members]
        for fit in first_fit(own, _up(row_tokens, start_multiple) - prefix):
            if prefix and len(fit) > 1:
                families.append(_Family(prefix, [members[i] for i in fit], prefix + sum(own[i] for i in fit)))
            else:
                families += [_Family(0, [members[i]], prefix + own[i]) for i in fit]
    return families


def _check(trajectories: Sequence[Trajectory]) -> None:
    for index, t in enumerate(trajectories):
        where = f"pack: trajectory {index} (prompt {t.prompt.uid})"
        length = len(t.tokens)
        if not length:
            raise ValueError(f"{where} has no tokens.")
        for name in ("mask", "logprob", "version", "kv_version"):
            if len(getattr(t, name)) != length:
                raise ValueError(f"{where}: {name} has {len(getattr(t, name))} entries for {length} tokens.")
        if not np.finfo(np.float32).tiny <= t.temperature <= np.finfo(np.float32).max:
            raise ValueError(
                f"{where} was drawn at temperature {t.temperature}: greedy completions have no distribution to train "
                "on. Sample with a positive temperature."
            )
        if not np.all(np.isfinite(t.logprob[t.mask])):
            raise ValueError(f"{where}: a sampled token has a log-prob that is not finite.")


def _listed(trajectories: Sequence[Trajectory]) -> int:
    """K of the lists that every trajectory must have."""
    sizes: set[int] = set()
    for index, t in enumerate(trajectories):
        shapes = {None if x is None else x.shape for x in (t.top_ids, t.top_logprob)}
        shape = shapes.pop()
        if shapes or shape is None or len(shape) != 2 or shape[0] != len(t.tokens):
            raise ValueError(
                f"pack: trajectory {index} (prompt {t.prompt.uid}) has no lists of the likeliest tokens, or not one for "
                "each token. Sample with SamplingParams(top_logprobs=K)."
            )
        sizes.add(shape[1])
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"pack: the lists of the trajectories hold {sorted(sizes)} tokens; all must hold as many."
        )
    return sizes.pop()


def _supported(trajectories: Sequence[Trajectory], vocab_size: int | None) -> int:
    """The longest list of tokens that one was drawn from; 0 when no trajectory has such lists."""
    sizes = [0]
    for index, t in enumerate(trajectories):
        if t.support_ids is None:
            continue
        where, ids = f"pack: trajectory {index} (prompt {t.prompt.uid})", np.asarray(t.support_ids)
        if ids.ndim != 2 or len(ids) != len(t.tokens):
            raise ValueError(
                f"{where}: support_ids has the shape {ids.shape} for {len(t.tokens)} tokens; it must be [L, K]."
            )
        if fault := support_fault(ids, t.tokens, t.mask, vocab_size):
            raise ValueError(f"{where}: {fault}. Record them with SamplingParams(record_support=K).")
        sizes.append(ids.shape[1])
    return max(sizes)


def _routed(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """(layers, K) of the experts that tokens were sent through; () when no trajectory has them."""
    shapes = set()
    for index, t in enumerate(trajectories):
        if t.routing_ids is not None:
            if t.routing_ids.ndim != 3 or len(t.routing_ids) > len(t.tokens):
                raise ValueError(
                    f"pack: trajectory {index} (prompt {t.prompt.uid}): routing_ids has the shape {t.routing_ids.shape} for "
                    f"{len(t.tokens)} tokens; it must be [at most {len(t.tokens)}, layers, experts of a token]."
                )
            shapes.add(t.routing_ids.shape[1:])
    if len(shapes) > 1:
        raise ValueError(f"pack: trajectories were routed by different models: {sorted(shapes)}.")
    return shapes.pop() if shapes else ()


def _put_routing(target: np.ndarray, at: tuple[int, slice], t: Trajectory, own: slice) -> None:
    if t.routing_ids is not None:
        known = t.routing_ids[own]
        target[at[0], at[1].start : at[1].start + len(known)] = known


def pack(
    trajectories: Sequence[Trajectory],
    *,
    learner_version: int,
    pad_to_multiple: int = 16,
    rows_multiple: int = 1,
    pad_id: int = 0,
    row_tokens: int | None = None,
    start_multiple: int = 1,
    vocab_size: int | None = None,
    parts: Sequence[str] = (),
    fill: Collection[str] = (),
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
      row_tokens: None = one trajectory a row. Otherwise rows of so many tokens hold several trajectories, each
        a segment of its own, and the prompt that members of a group have in common is laid out once, before
        them, as a shared prefix (see `TokenBatch.segments`). The gradient is the same. Rows with the most pairs of tokens that
        see each other come first, so that those of a micro-batch, which devices share, are alike.
      start_multiple: in rows of several trajectories, each begins at a multiple of so many columns, and so many tokens
        are shared: the tokens between are of the trajectory before, and nothing is computed from them. With 2, bfloat16
        products over a row add up the tokens of a sequence in the pairs in which the sampler did.
      vocab_size: of the model, which no id of a support may reach; None: not known, and not checked.
      parts: names of reward parts that the batch carries as streams in `rewards`; "reward" is the reward itself, where
        the task gives no part of this name. A part that is None is NaN in its stream: no signal, and not a 0.
      fill: on-demand fields that the batch carries: agent; baseline_reward (NaN where it is None);
        topk_logprob_behavior (with topk_ids), which needs trajectories with the lists of the sampler.

    The tokens that each one was drawn from under top-k, top-p or min-p come along whenever a trajectory has them: without
    them its log-probs mean nothing. Trajectories without go beside them, drawn from the whole vocabulary. So do the experts
    that each token was sent through, of a model that has them.

    The reward sits on the last trained token of its trajectory. It is not valid, and 0, when it is None or
    when nothing of the trajectory is trained. The first token of a sequence has no prediction and is never
    trained. Padding has segment 0, temperature 1 and version -1; ids of padding belong to no trajectory.

    Raises:
      ValueError: no trajectory; fields of different lengths; a greedy trajectory; a log-prob that is not
        finite; a part that a scored trajectory lacks, or lists that one lacks; a token outside its support, or a support outside the
        vocabulary; a trajectory longer than `row_tokens`; a
        name in `fill` that is not one of those.
    """
    if not trajectories:
        raise ValueError("pack: no trajectories. Skip the train step when nothing was kept.")
    if min(pad_to_multiple, rows_multiple, start_multiple) < 1:
        raise ValueError(
            f"pack: pad_to_multiple, rows_multiple and start_multiple must be at least 1, got {pad_to_multiple}, "
            f"{rows_multiple}, {start_multiple}."
        )
    _check(trajectories)
    unknown = sorted(set(fill) - ON_REQUEST)
    if unknown:
        raise ValueError(
            f"pack: cannot fill {', '.join(unknown)}; on request: {', '.join(sorted(ON_REQUEST))}."
        )
    listed = _listed(trajectories) if "topk_logprob_behavior" in fill else 0
    supported = _supported(trajectories, vocab_size)
    if row_tokens is None:
        rows = [[_Family(0, [i], len(t.tokens))] for i, t in enumerate(trajectories)]
        width = max(family.tokens for (family,) in rows)
    else:
        width = _up(row_tokens, start_multiple)
        families = _families(trajectories, row_tokens, start_multiple)
        families.sort(key=lambda family: -family.tokens)  # stable: ties in the given order
        fits = first_fit([family.tokens for family in families], width)
        # A sequence with a prompt of its own comes before the families of its row: it must not see their prefix.
        rows = [sorted((families[i] for i in row), key=lambda family: family.prefix > 0) for row in fits]
        # Devices wait for each other in every micro-batch, so that rows side by side should be as much work.
        rows.sort(key=lambda row: -sum(family.pairs(trajectories) for family in row))
    T, B = _up(width, pad_to_multiple), _up(len(rows), rows_multiple)

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full((B, T), value, dtype)

    tokens, positions, segments = full(pad_id, np.int32), full(0, np.int32), full(0, np.int32)
    version, kv_version = full(-1, np.int32), full(-1, np.int32)
    mask, valid, truncated = full(False, bool), full(False, bool), full(False, bool)
    reward, logprob, temperature = full(0, np.float32), full(0, np.float32), full(1, np.float32)
    streams = {name: full(0, np.float32) for name in parts}
    agent = full(0, np.int32) if "agent" in fill else None
    baseline = full(0, np.float32) if "baseline_reward" in fill else None
    top_ids = np.zeros((B, T, listed), np.int32) if listed else None
    top_logprob = np.zeros((B, T, listed), np.float32) if listed else None
    support_ids = np.full((B, T, supported), -1, np.int32) if supported else None
    routed = _routed(trajectories)
    routing_ids = np.full((B, T, *routed), -1, np.int16) if routed else None
    # Padding gets ids that no trajectory has: one of its own for each row.
    padding_ids = len(trajectories) + np.arange(B, dtype=np.int32)[:, None]
    trajectory = np.broadcast_to(padding_ids, (B, T)).copy()
    group = trajectory.copy()
    groups: dict[int, int] = {}
    for t in trajectories:
        groups.setdefault(t.group, len(groups))

    for row, row_families in enumerate(rows):
        start, segment = 0, 0
        for number, family in enumerate(row_families, start=1):
            first = family.members[0]
            if family.prefix:
                at = (row, slice(start, start + family.prefix))
                tokens[at] = trajectories[first].tokens[: family.prefix]
                positions[at] = np.arange(family.prefix)
                segments[at] = -number
                if routing_ids is not None:
                    _put_routing(routing_ids, at, trajectories[first], slice(0, family.prefix))
                start += family.prefix
            for index in family.members:
                t = trajectories[index]
                own = slice(family.prefix, None)  # the tokens that are not in the prefix
                length = len(t.tokens) - family.prefix
                segment += 1
                at = (row, slice(start, start + length))
                trained = np.array(t.mask[own], bool)
                trained[0] = False
                last = start + int(np.flatnonzero(trained)[-1]) if trained.any() else None
                tokens[at] = t.tokens[own]
                positions[at] = np.arange(family.prefix, len(t.tokens))
                segments[at] = segment
                trajectory[at] = index
                group[at] = groups[t.group]
                mask[at] = trained
                version[at] = np.where(t.mask, t.version, -1)[own]
                kv_version[at] = np.where(t.mask, t.kv_version, -1)[own]
                logprob[at] = np.where(trained, t.logprob[own], 0.0)
                temperature[at] = t.temperature
                truncated[at] = t.truncated
                if agent is not None:
                    agent[at] = t.agent
                if baseline is not None:
                    baseline[at] = np.nan if t.baseline is None else t.baseline
                if top_ids is not None and top_logprob is not None:  # `_listed` has checked those of t
                    top_ids[at] = np.where(trained[:, None], np.asarray(t.top_ids)[own], 0)
                    top_logprob[at] = np.where(trained[:, None], np.asarray(t.top_logprob)[own], 0.0)
                if support_ids is not None and t.support_ids is not None:
                    own_ids = np.asarray(t.support_ids)[own]
                    support_ids[*at, : own_ids.shape[1]] = np.where(trained[:, None], own_ids, -1)
                if routing_ids is not None:
                    _put_routing(routing_ids, at, t, own)
                if t.reward is not None and last is not None:
                    valid[at] = True
                    reward[row, last] = t.reward
                    given = {"reward": t.reward, **t.rewards}
                    for name, stream in streams.items():
                        if name not in given:
                            raise ValueError(
                                f"pack: trajectory {index} (prompt {t.prompt.uid}) has no reward part {name!r}; it has "
                                f"{', '.join(t.rewards) or 'none'}."
                            )
                        part = given[name]
                        stream[row, last] = np.nan if part is None else part
                if row_tokens is not None and (free := min(_up(length, start_multiple), T - start) - length):
                    gap = (row, slice(start + length, start + length + free))
                    positions[gap] = len(t.tokens) + np.arange(free)
                    segments[gap], trajectory[gap], group[gap] = segment, index, groups[t.group]
                    temperature[gap], truncated[gap] = t.temperature, t.truncated
                    if agent is not None:
                        agent[gap] = t.agent
                    if baseline is not None:
                        baseline[gap] = np.nan if t.baseline is None else t.baseline
                    length += free
                start += length

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
        "agent": agent,
        "baseline_reward": baseline,
        "support_ids": support_ids,
        "routing_ids": routing_ids,
        "topk_ids": top_ids,
        "topk_logprob_behavior": top_logprob,
    }
    return TokenBatch(**jax.device_put(arrays))
