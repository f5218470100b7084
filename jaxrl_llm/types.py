"""The records that flow through the system. Read this file first.

Shape alphabet, used everywhere in the package:

    B  rows of a batch            T  tokens in a row        L  tokens of one trajectory
    P  tokens of a prompt         G  samples of one prompt  V  vocabulary
    K  entries of a per-token list (top-k ids, support ids)

Alignment, stated once: **entry t of any per-token array describes token t given the tokens before
it.** Entry 0 of a sequence has nothing before it and is never trained. No array is shifted anywhere
else; the one place that reads logits[t - 1] for token t is `ops.logprobs`.

Four policies, four words: *behavior* sampled the token, *proximal* is the learner at the start of a
train step, *current* (plain `logprob`) is on the gradient tape, *reference* is a frozen anchor.

A *row* holds one padded or several packed sequences. A *sequence* is a contiguous span of one row; it
is the unit of importance ratios and of sequence normalisers. A *trajectory* is what earns a reward:
one sequence, or several when a chat template forces a split. A *group* is the set of trajectories
sampled from the same prompt.

Host records are frozen dataclasses over NumPy arrays; device records are frozen, keyword-only
`flax.struct` dataclasses, so they are pytrees. Log-probs are natural logarithms (nats), f32.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.support import support_fault

__all__ = [
    "LearnerState",
    "LossOutput",
    "LossState",
    "Mean",
    "PolicyOutput",
    "PolicySnapshot",
    "Prompt",
    "StopReason",
    "TokenBatch",
    "Trajectory",
]

Array = jax.Array


# ---------------------------------------------------------------------------------- host records


class StopReason(enum.StrEnum):
    """Why a completion ended. The value is what appears in samples.jsonl and metrics."""

    EOS = "eos"  # the policy sampled one of the stop ids; that id is part of the tokens and trained
    STOP_STRING = "stop_string"  # the decoded text reached a stop string
    LENGTH = "length"  # max_tokens or the context ran out: the trajectory is truncated
    ENV = "env"  # the environment ended the episode
    CANCELLED = "cancelled"  # whoever asked for it took it back; the tokens so far are whole
    ERROR = "error"  # the sampler, the environment or the verifier failed; carries no signal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One thing to be answered.

    `uid` identifies one *visit*: a prompt that is drawn again in a later epoch gets another uid,
    because sampling is a pure function of (seed, uid, sample index, position).
    """

    uid: str
    tokens: np.ndarray  # i32[P]
    task: str = ""
    payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # answer, tests, …


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sampled answer with the provenance of every token."""

    prompt: Prompt
    group: int
    tokens: np.ndarray  # i32[L], prompt and completion
    mask: np.ndarray  # bool[L], sampled by the policy
    logprob: np.ndarray  # f32[L], behavior log-prob (nats), 0 where mask is False
    version: np.ndarray  # i32[L], snapshot that sampled the token, -1 where not sampled
    kv_version: np.ndarray  # i32[L], oldest snapshot whose K/V the token attended to, -1 likewise
    reward: float | None  # None = no signal could be computed; never a silent 0
    # The parts, by name; None = this part could not be computed.
    rewards: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why the reward is what it is, or why it is None
    stop: StopReason = StopReason.EOS
    temperature: float = 1.0
    agent: int = 0  # the role that it was played in
    baseline: float | None = None  # reward of the greedy answer to the same prompt; None = unknown
    top_ids: np.ndarray | None = None  # i32[L, K], the sampler's likeliest tokens in the place of each
    top_logprob: np.ndarray | None = None  # f32[L, K], their behavior log-probs
    # i32[L, K], the tokens that top-k, top-p or min-p left each one to be drawn from, itself among them, then -1; or codes
    # of the tokens that it could not be (`ops.support`); all -1 where it was drawn from the whole vocabulary, or not sampled
    support_ids: np.ndarray | None = None
    support_cut: np.ndarray | None = None  # bool[L], more were left, and the K best of them were drawn from
    # i16[at most L, layers, K], the experts that the sampler sent the first tokens through, prompt included; -1 = not known
    routing_ids: np.ndarray | None = None
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds

    @property
    def truncated(self) -> bool:
        """True when the answer was cut by a length limit."""
        return self.stop is StopReason.LENGTH

    @property
    def completion(self) -> np.ndarray:
        """i32[N]: the sampled tokens only."""
        return self.tokens[self.mask]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """A policy that can be sampled from: the learner's tree, as it was after train step `version`."""

    version: int  # train steps done
    params: Any  # pytree, the same structure as the learner's
    fingerprint: str = ""  # digest of the parameter values


# -------------------------------------------------------------------------------- device records


class Mean(NamedTuple):
    """A mean that has not been divided yet, so that it merges by addition over any split."""

    total: Array  # f32[]
    count: Array  # type: ignore[assignment]  # f32[]; hides tuple.count, which nobody needs

    def __add__(self, other: Mean) -> Mean:  # type: ignore[override]
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Array:
        """total / count, and 0 when nothing was counted."""
        empty = self.count == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.count))


@flax.struct.dataclass(kw_only=True)
class TokenBatch:
    """Everything that an objective may read about a batch of rows.

    Fields of the first block are always there. On-demand fields are None until somebody fills them
    (`learner.score` for log-probs, the rollout for `baseline_reward`, …). Fields of the last block are
    written by `prepare` of the stages of an objective.
    """

    if TYPE_CHECKING:  # flax.struct adds it

        def replace(self, **changes: Any) -> TokenBatch: ...

    tokens: Array  # i32[B, T]
    positions: Array  # i32[B, T], position of the token in its own sequence (for RoPE)
    # i32[B, T], which earlier tokens of its row a token attends to: those of the same segment. 0 = padding.
    # A segment < 0 is a shared prefix: the segments > 0 that follow it, up to the next prefix or padding, are
    # its family and attend to it too. So a row holds the prompt of a group once, before its completions; each
    # begins with the last prompt token, where its first token is predicted.
    segments: Array
    sequence: Array  # i32[B, T], id unique in the batch; a sequence is contiguous within one row
    trajectory: Array  # i32[B, T], id unique in the batch
    group: Array  # i32[B, T], trajectories of one prompt share it
    version: Array  # i32[B, T], train steps done by the sampling policy; -1 = unknown or not sampled
    kv_version: Array  # i32[B, T]
    mask: Array  # bool[B, T], trained tokens: sampled by the policy and not at the start of a segment
    reward: Array  # f32[B, T], a stream; an outcome sits on the last trained token of the trajectory
    reward_valid: Array  # bool[B, T], constant over a trajectory; False = the reward is None
    truncated: Array  # bool[B, T], constant over a trajectory
    temperature: Array  # f32[B, T], of the sampler; applied to every log-prob the learner computes
    learner_version: Array  # i32[], train steps done when this train step starts
    logprob_behavior: Array | None = None  # f32[B, T]; None only when `from_rows` was not given it

    logprob_proximal: Array | None = None  # f32[B, T]
    logprob_reference: Array | None = None  # f32[B, T]
    logprob_teacher: Array | None = None  # f32[B, T]
    # f32[B, T]: the current policy as the sampler computes it, bit for bit; an update takes its values from here and its
    # gradient from its own forward pass (`learner.exact`)
    logprob_exact: Array | None = None
    value: Array | None = None  # f32[B, T], critic's estimate before the token
    bootstrap_value: Array | None = None  # f32[B, T], value after the last token of a truncated row
    rewards: dict[str, Array] | None = None  # {name: f32[B, T]}, the parts of the reward
    baseline_reward: Array | None = None  # f32[B, T], constant over a trajectory (greedy decode)
    agent: Array | None = (
        None  # i32[B, T], constant over a trajectory: the role that it was played in, 0, 1, …
    )
    # bool[B, T], constant over a sequence: the answer was labelled a good one; None = pairs, the good one on even rows
    desirable: Array | None = None
    # f32[B, T], constant over a sequence: Σ_t log π/π_ref of its prompt with the answer to another; after `prepare` of
    # kto_preference: max(0, mean of these)
    reference_point: Array | None = None
    # i32[B, T, K], the tokens that top-k, top-p or min-p left each one to be drawn from: different ids, itself among
    # them, the rest -1; or codes of the tokens that it could not be (`ops.support`); all -1 = the whole vocabulary. Every policy's log-prob of the token, and its entropy, is that of
    # the softmax over them (so the ratio of unchanged weights is 1); lists (topk_…) and divergences to a teacher
    # compare whole distributions and stay over the vocabulary. None = no token has a support.
    support_ids: Array | None = None
    topk_ids: Array | None = None  # i32[B, T, K]
    topk_logprob_behavior: Array | None = None  # f32[B, T, K]
    topk_logprob_proximal: Array | None = None  # f32[B, T, K]
    topk_logprob_teacher: Array | None = (
        None  # f32[B, T, K], the teacher's at topk_ids, its own most likely tokens
    )
    # [B, T, E], the teacher's last hidden state that token t is predicted from; with its output head, this is its
    # distribution over the vocabulary, which is too large to keep
    hidden_teacher: Array | None = None
    # i16[B, T, layers, K], the experts that the sampler sent the token itself through on the way to the next one; current
    # and proximal log-probs are computed with these. -1 = not known, the router chooses. None = all are -1, or a dense model
    routing_ids: Array | None = None

    advantage: Array | None = None  # f32[B, T]
    returns: Array | None = None  # f32[B, T]
    signal: Array | None = None  # bool[B, T], tokens whose advantage is defined; None means `mask`
    weight: Array | None = None  # f32[B, T], detached multiplier of the policy term; None means 1
    counted: Array | None = None  # bool[B, T], what normalisers read; None means `mask`
    norm: Array | None = None  # f32[B, T]
    count: Array | None = None  # f32[B, T]
    # {stage name: f32[B, T]}: norm of a penalty that brings its own, already scaled by
    # Σ count / Σ count_p, so that the loss keeps one denominator
    norms: dict[str, Array] = flax.struct.field(default_factory=dict)
    # {stage name: bool[B, T]}: tokens that a stage picked by their rank in the batch
    picked: dict[str, Array] = flax.struct.field(default_factory=dict)
    # data-only metrics: Mean of f32[B, T] spread over tokens, so that rows can be split; `evaluate` sums them
    logged: dict[str, Mean] = flax.struct.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def scale_weight(self, factor: Array) -> TokenBatch:
        """Multiplies the weight of the policy term by `factor` f32[B, T]; 1 outside the mask."""
        factor = jnp.where(self.mask, factor, 1.0)
        return self.replace(weight=factor if self.weight is None else self.weight * factor)

    def log(self, name: str, value: Array, where: Array | None = None) -> TokenBatch:
        """Records the mean of `value` f32[B, T] over the trained tokens (and `where` bool[B, T])."""
        where = self.mask if where is None else where & self.mask
        mean = Mean(jnp.where(where, value, 0.0), where.astype(value.dtype))
        return self.replace(logged={**self.logged, name: mean})

    @classmethod
    def from_rows(
        cls,
        tokens,
        mask,
        *,
        group=None,
        reward=None,
        reward_valid=None,
        truncated=None,
        logprob_behavior=None,
        version=None,
        kv_version=None,
        learner_version=0,
        temperature=1.0,
        lengths=None,
        **on_demand,
    ) -> TokenBatch:
        """The padded case: one sequence a row, right-padded.

        Args:
          tokens: i32[B, T].
          mask: bool[B, T], the trained tokens. Column 0 must be False where it matters: a first token
            has no prediction, so it is cleared here.
          group: int[B]; default: every row is a group of its own.
          reward: f32[B] outcomes, put on the last trained token of each row, or an f32[B, T] stream.
            NaN or infinite entries mean "no signal" and clear `reward_valid`. Default: no signal.
          reward_valid, truncated: bool[B].
          logprob_behavior: f32[B, T].
          version, kv_version: int[] or int[B] or int[B, T]; default -1 = unknown.
          learner_version: int.
          temperature: float or f32[B] or f32[B, T], must be positive.
          lengths: int[B], tokens in each row including the prompt; default: up to the last trained
            token (later tokens cannot influence it).
          **on_demand: any further field of the class, already in its final shape.

        Raises:
          ValueError: a shape does not fit, or a name is not a field.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2:
            raise ValueError(f"from_rows: tokens must be [B, T], got shape {tokens.shape}.")
        B, T = tokens.shape
        mask = jnp.asarray(mask)
        if mask.shape != (B, T):
            raise ValueError(f"from_rows: mask must have the shape of tokens {(B, T)}, got {mask.shape}.")
        mask = mask.astype(bool) & (jnp.arange(T) > 0)
        floating = jnp.result_type(float)

        def rows(name, value, dtype, shapes=((), (B,), (B, T))):
            value = jnp.asarray(value)
            if value.shape not in shapes:
                raise ValueError(
                    f"from_rows: {name} must have one of the shapes {list(shapes)}, got {value.shape}."
                )
            value = value.astype(dtype)
            if value.ndim == 1:
                value = value[:, None]
            return jnp.broadcast_to(value, (B, T))

        columns = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        last = jnp.max(jnp.where(mask, columns, -1), axis=1)  # [B], -1: nothing is trained
        lengths = last + 1 if lengths is None else jnp.asarray(lengths)
        if lengths.shape != (B,):
            raise ValueError(f"from_rows: lengths must be [{B}], got {lengths.shape}.")
        row_ids = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))

        if reward is None:
            reward, valid = jnp.zeros((B, T), floating), jnp.zeros((B, T), bool)
        else:
            reward = jnp.asarray(reward, floating)
            if reward.shape not in ((B,), (B, T)):
                raise ValueError(f"from_rows: reward must be [{B}] or [{B}, {T}], got {reward.shape}.")
            finite = jnp.isfinite(reward)
            finite = finite if reward.ndim == 1 else jnp.all(finite | ~mask, axis=1)
            valid = jnp.broadcast_to(finite[:, None], (B, T))
            if reward.ndim == 1:
                reward = jnp.where(columns == last[:, None], reward[:, None], 0.0)
            reward = jnp.where(valid & mask, reward, 0.0).astype(floating)
        if reward_valid is not None:
            valid = valid & rows("reward_valid", reward_valid, bool)
            reward = jnp.where(valid, reward, 0.0)

        _check_rows(group=group, temperature=temperature, lengths=lengths, width=T)
        filled = {"positions", "segments", "sequence", "trajectory"}
        known = {f.name for f in dataclasses.fields(cls)} - filled
        unknown = sorted(set(on_demand) - known)
        if unknown:
            raise ValueError(
                f"from_rows: unknown field(s) {', '.join(unknown)}. Known: {', '.join(sorted(known))}."
            )
        support = on_demand.get("support_ids")
        if support is not None and (jnp.ndim(support) != 3 or jnp.shape(support)[:2] != (B, T)):
            raise ValueError(
                f"from_rows: support_ids must be [{B}, {T}, K], the tokens that each one was drawn from, filled up with "
                f"-1; got shape {jnp.shape(support)}."
            )
        if support is not None:
            if not any(isinstance(x, jax.core.Tracer) for x in (support, tokens, mask)):
                fault = support_fault(np.asarray(support), np.asarray(tokens), np.asarray(mask))
                if fault is not None:
                    raise ValueError(f"from_rows: {fault}.")
            on_demand["support_ids"] = jnp.asarray(support, jnp.int32) if jnp.shape(support)[2] else None
        for name in ("logprob_proximal", "logprob_reference", "logprob_teacher", "advantage", "value"):
            if on_demand.get(name) is not None:
                on_demand[name] = rows(name, on_demand[name], floating, ((B,), (B, T)))
        return cls(
            tokens=tokens.astype(jnp.int32),
            positions=columns,
            segments=(columns < lengths[:, None]).astype(jnp.int32),
            sequence=row_ids,
            trajectory=row_ids,
            group=row_ids if group is None else rows("group", group, jnp.int32, ((B,), (B, T))),
            version=rows("version", -1 if version is None else version, jnp.int32),
            kv_version=rows(
                "kv_version",
                (-1 if version is None else version) if kv_version is None else kv_version,
                jnp.int32,
            ),
            mask=mask,
            reward=reward,
            reward_valid=valid,
            truncated=rows("truncated", False if truncated is None else truncated, bool),
            temperature=rows("temperature", temperature, floating),
            learner_version=jnp.asarray(learner_version, jnp.int32),
            logprob_behavior=None
            if logprob_behavior is None
            else rows("logprob_behavior", logprob_behavior, floating, ((B, T),)),
            **on_demand,
        )


def _check_rows(*, group: Any, temperature: Any, lengths: Array, width: int) -> None:
    """Raises ValueError for values of `TokenBatch.from_rows` that mean nothing; traced ones pass."""
    if not isinstance(temperature, jax.core.Tracer):
        with np.errstate(over="ignore"):  # what overflows f32 is refused below
            given = np.asarray(temperature, np.float32)
        if not np.all((given > 0) & np.isfinite(given)):
            raise ValueError("from_rows: temperature must be positive and finite.")
    if not isinstance(lengths, jax.core.Tracer):
        given = np.asarray(lengths)
        if given.size and (given.min() < 0 or given.max() > width):
            raise ValueError(
                f"from_rows: lengths must be in [0, {width}], the width of tokens; got {given.min()} to {given.max()}."
            )
    if group is not None and not isinstance(group, jax.core.Tracer):
        given = np.asarray(group)
        if not np.issubdtype(given.dtype, np.integer) and not np.all(given == np.floor(given)):
            raise ValueError("from_rows: group must hold integers: rows of one prompt share one.")


@flax.struct.dataclass(kw_only=True)
class PolicyOutput:
    """What one forward pass of the policy gives an objective; on the gradient tape."""

    if TYPE_CHECKING:  # flax.struct adds it

        def replace(self, **changes: Any) -> PolicyOutput: ...

    logprob: Array  # f32[B, T], current policy
    entropy: Array | None = None  # f32[B, T], of the distribution that the token is drawn from
    value: Array | None = None  # f32[B, T]
    topk_logprob: Array | None = None  # f32[B, T, K], at batch.topk_ids
    divergence: Array | None = None  # f32[B, T], full-vocabulary divergence to a teacher
    # f32[B, T, layers, experts]: the routers' probabilities for the token before, which this one is predicted from, and 1 / K
    # at each of the K experts that it went through
    router_probs: Array | None = None
    router_choice: Array | None = None
    # `models.experts.Routed` of [B, T, layers], without probs: what the routers did with each token itself, prompts
    # included; None of a dense model
    routed: Any = None


@flax.struct.dataclass(kw_only=True)
class LossState:
    """What the `apply` functions of a chain hand on; on the gradient tape unless said otherwise."""

    if TYPE_CHECKING:  # flax.struct adds it

        def replace(self, **changes: Any) -> LossState: ...

    logprob: Array  # f32[B, T]
    entropy: Array | None = None
    value: Array | None = None
    topk_logprob: Array | None = None
    divergence: Array | None = None
    router_probs: Array | None = None
    router_choice: Array | None = None
    log_ratio: Array | None = None  # f32[B, T]
    policy: Array | None = None  # f32[B, T], the negated objective of each token
    weight: Array  # f32[B, T], detached
    mask: Array  # bool[B, T], the trained tokens, for `log`
    # {stage name: (value f32[B, T], norm f32[B, T] or None)}; None means batch.norm. A norm of its own is
    # batch.norms[name], scaled to the common denominator
    penalties: dict[str, tuple[Array, Array | None]] = flax.struct.field(default_factory=dict)
    metrics: dict[str, Mean] = flax.struct.field(default_factory=dict)

    def scale_weight(self, factor: Array) -> LossState:
        """Multiplies the detached weight of the policy term; `factor` f32[B, T] is detached here."""
        return self.replace(weight=self.weight * jax.lax.stop_gradient(factor))

    def penalize(self, name: str, value: Array, norm: Array | None = None) -> LossState:
        """Adds the penalty `value` f32[B, T] (its coefficient included) under the name of its stage."""
        return self.replace(penalties={**self.penalties, name: (value, norm)})

    def log(self, name: str, value: Array, where: Array | None = None) -> LossState:
        """Records the mean of `value` f32[B, T] over the trained tokens (and `where`); detached."""
        where = self.mask if where is None else where & self.mask
        value = jax.lax.stop_gradient(jnp.where(where, value, 0.0))
        mean = Mean(jnp.sum(value), jnp.sum(where).astype(value.dtype))
        return self.replace(metrics={**self.metrics, name: mean})


@flax.struct.dataclass(kw_only=True)
class LossOutput:
    """loss = loss_sum / denominator; both add over any split of a batch."""

    if TYPE_CHECKING:  # flax.struct adds it

        def replace(self, **changes: Any) -> LossOutput: ...

    loss_sum: Array  # f32[]
    denominator: Array  # f32[]
    metrics: dict[str, Mean] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass(kw_only=True)
class LearnerState:
    """Everything that a train step changes. A pytree; a snapshot stores exactly this."""

    if TYPE_CHECKING:  # flax.struct adds it

        def replace(self, **changes: Any) -> LearnerState: ...

    version: Array  # i32[], train steps done
    params: Any  # f32 master weights
    opt_state: Any
    objective_state: dict[str, Any] = flax.struct.field(default_factory=dict)  # by stage name
    reference: Any = None  # frozen or moving anchor, same structure as params; None = not needed
    critic: Any = None
    critic_opt_state: Any = None
    key: Array  # PRNG key
    skipped: Array  # i32[], updates skipped because a gradient was not finite
