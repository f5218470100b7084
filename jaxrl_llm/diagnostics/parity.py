"""The parity certificate: whether the sampler samples from the learner's policy, measured on pinned probes.

The prompts of the probes, their uids and the seed are fixed, so that two certificates of the same weights, settings
and versions are the same. A probe is sampled as training samples; then the learner computes the log-probs of
the sampled tokens, and the two are compared: in nats, and in ulp (units in the last place of the f32 that the
sampler recorded), which shows whether a difference is rounding, and where in a completion it begins.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.diagnostics.environment import describe_environment
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel.host import read
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.types import Prompt, TokenBatch

__all__ = [
    "ParityCertificate",
    "ParityLimits",
    "certify",
    "probe_prompts",
    "show_certificate",
    "ulp_distance",
    "ulp_histogram",
]

SEED = 20_260_131  # of the probes

_TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of 100 degrees, and it freezes at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "To add 27 and 48, first add the tens: 20 + 40 = 60. Then add the ones:",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
    "List three reasons why a program that worked yesterday may fail today:\n1.",
    "Dear editor, I read your article on tides with great interest, and I would like to add that",
    "Q: If all roses are flowers and some flowers fade quickly, do all roses fade quickly?\nA:",
)
_LENGTHS = (5, 9, 17, 24, 33, 40, 57, 64)  # tokens; some end within a page and some at its end
_EDGES = (0, 1, 2, 4, 16, 64, 256, 1024, 4096, 16384)  # ulp; a bucket begins at each


class _Sampled(Protocol):
    """What is read of a completion."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def tokens(self) -> np.ndarray: ...  # i32[N]

    @property
    def logprobs(self) -> np.ndarray: ...  # f32[N]

    @property
    def support_ids(self) -> np.ndarray | None: ...  # i32[N, K], what each token was drawn from

    @property
    def routing_ids(self) -> np.ndarray | None: ...  # i16[P + N - 1, layers, K], the experts of each token


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityLimits:
    """The largest differences that pass, in nats; None = not limited."""

    max_gap: float | None = None
    mean_gap: float | None = None

    @classmethod
    def of(cls, dtype: str) -> ParityLimits:
        """What is asked of a compute dtype: of bfloat16 the mean only, since single improbable tokens differ a lot."""
        return cls(mean_gap=5e-3) if dtype == "bfloat16" else cls(max_gap=2e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityCertificate:
    """The result of `certify`. Differences are |log-prob of the sampler - log-prob of the learner|, in nats."""

    passed: bool
    reasons: tuple[str, ...]  # why it did not pass
    version: int  # of the policy, train steps done
    tokens: int  # compared
    max_gap: float
    mean_gap: float
    histogram: dict[str, dict[str, int]]  # {positions in the completion: {ulp: tokens}}
    exact_max_gap: float | None  # of exact scoring; None = it is off
    exact_mean_gap: float | None
    exact_histogram: dict[str, dict[str, int]] | None
    fingerprint: str  # of the weights that the learner scored with
    served_fingerprint: str  # of the weights that the sampler was given
    limits: dict[str, float | None]
    dtype: str
    head_dtype: str
    temperature: float
    sampler: dict[str, Any]  # settings that decide in which order sums are added up
    versions: dict[str, str]  # of Python and packages
    backend: str
    device: str
    mesh: dict[str, int] | None  # None = one device
    # Of a model with experts: had each token gone through the experts that the learner's router chooses
    unreplayed_max_gap: float | None = None
    unreplayed_mean_gap: float | None = None

    def as_data(self) -> dict[str, Any]:
        """JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def probe_prompts(tokenizer: Any, *, count: int, longest: int) -> list[Prompt]:
    """The first `count` pinned prompts, each of a fixed number of tokens, at most `longest`.

    Args:
      tokenizer: of the model.
      count: between 1 and 8.
      longest: tokens, at least 1.
    """
    if not 1 <= count <= len(_TEXTS) or longest < 1:
        raise ValueError(
            f"parity: between 1 and {len(_TEXTS)} probes of at least a token, got {count}, {longest}."
        )
    out = []
    for index, (text, length) in enumerate(zip(_TEXTS[:count], _LENGTHS, strict=False)):
        tokens = tokenizer.encode(text)
        length = min(length, longest)
        repeated = tokens * -(-length // len(tokens))
        out.append(Prompt(uid=f"parity/{index}", tokens=np.asarray(repeated[:length], np.int32)))
    return out


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """i64[N]: how many f32 numbers lie between, 0 for equal bits; -0 and 0 are equal."""

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(ordered(a) - ordered(b))


def ulp_histogram(ulp: Sequence[np.ndarray]) -> dict[str, dict[str, int]]:
    """{positions: {ulp: tokens}} of distances i64[N] of several completions; buckets without a token are left out."""
    distances = np.concatenate(ulp)
    places = np.concatenate([np.arange(len(one)) for one in ulp])
    out: dict[str, dict[str, int]] = {}
    first, last = 0, 15
    while first <= places.max(initial=-1):
        here = distances[(places >= first) & (places <= last)]
        counts = {}
        for low, high in zip(_EDGES, (*_EDGES[1:], None), strict=True):
            inside = (here >= low) & ((here < high) if high is not None else True)
            if inside.any():
                counts[_bucket(low, high)] = int(inside.sum())
        if counts:
            out[f"{first}-{last}"] = counts
        first, last = last + 1, 2 * last + 1
    return out


def _bucket(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return str(low) if high == low + 1 else f"{low}-{high - 1}"


def certify(
    sample: Callable[[Sequence[Prompt]], Sequence[_Sampled]],
    score: Callable[[Any, TokenBatch], Any],
    probes: Sequence[Prompt],
    *,
    params: Any,
    config: ModelConfig,
    temperature: float,
    served: Any = None,
    exact: Callable[[Any, Sequence[Any]], Sequence[np.ndarray]] | None = None,
    limits: ParityLimits | None = None,
    sampler: dict[str, Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rows_multiple: int = 1,
    pad_id: int = 0,
    version: int = 0,
) -> ParityCertificate:
    """Samples probes, scores them with the learner, and compares.

    Args:
      sample: completions of prompts, with the weights that the sampler serves.
      score: `learner.score.make_score` of the learner.
      probes: `probe_prompts`.
      params: the learner's weights.
      config: of the model.
      temperature: that `sample` samples at.
      served: the weights that `sample` uses; None: `params`. Other weights than the learner's do not pass.
      exact: exact(params, completions) -> f32[N] of each; a difference then does not pass. None = off.
      limits: None: `ParityLimits.of` the compute dtype.
      sampler: settings to record.
      mesh: of the learner, to record.
      rows_multiple: the rows of the learner's batch are a multiple of it.
      version: of the policy.
    """
    limits = ParityLimits.of(config.dtype) if limits is None else limits
    completions = sample(probes)
    behavior = [np.asarray(c.logprobs, np.float32) for c in completions]
    batch, places = _batch(completions, temperature, rows_multiple, pad_id)
    scored = np.asarray(read(score(params, batch)), np.float32)
    learner = [scored[place] for place in places]
    gap = _gaps(behavior, learner)
    own_gap = None
    if batch.routing_ids is not None:
        own = np.asarray(read(score(params, batch.replace(routing_ids=None))), np.float32)
        own_gap = _gaps(behavior, [own[place] for place in places])
    exact_gap = exact_histogram = None
    if exact is not None:
        values = exact(params, completions)
        exact_gap = _gaps(behavior, values)
        exact_histogram = ulp_histogram([ulp_distance(a, b) for a, b in zip(behavior, values, strict=True)])
    mine = fingerprint(params)
    its = mine if served is None else fingerprint(served)
    reasons = _reasons(gap, exact_gap, limits, mine, its)
    facts = describe_environment()
    return ParityCertificate(
        passed=not reasons,
        reasons=reasons,
        version=version,
        tokens=gap.size,
        max_gap=float(gap.max(initial=0)),
        mean_gap=float(gap.mean()),
        histogram=ulp_histogram([ulp_distance(a, b) for a, b in zip(behavior, learner, strict=True)]),
        exact_max_gap=None if exact_gap is None else float(exact_gap.max(initial=0)),
        exact_mean_gap=None if exact_gap is None else float(exact_gap.mean()),
        exact_histogram=exact_histogram,
        fingerprint=mine,
        served_fingerprint=its,
        limits=dataclasses.asdict(limits),
        dtype=config.dtype,
        head_dtype=config.logits_dtype,
        temperature=temperature,
        sampler=dict(sampler or {}),
        versions={"python": platform.python_version(), **facts["packages"]},
        backend=jax.default_backend(),
        device=facts["devices"],
        mesh=None if mesh is None else {str(name): int(size) for name, size in mesh.shape.items()},
        unreplayed_max_gap=None if own_gap is None else float(own_gap.max(initial=0)),
        unreplayed_mean_gap=None if own_gap is None else float(own_gap.mean()),
    )


def _gaps(behavior: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> np.ndarray:
    """f64[tokens], nats; infinite where one of the two is not a number."""
    gap = np.abs(np.concatenate(behavior).astype(np.float64) - np.concatenate(learner).astype(np.float64))
    return np.where(np.isnan(gap), np.inf, gap)


def _reasons(
    gap: np.ndarray, exact_gap: np.ndarray | None, limits: ParityLimits, mine: str, its: str
) -> tuple[str, ...]:
    out = []
    if mine != its:
        out.append(f"the sampler serves other weights ({its}) than the learner's ({mine})")
    for name, value, limit in (
        ("largest", float(gap.max(initial=0)), limits.max_gap),
        ("mean", float(gap.mean()), limits.mean_gap),
    ):
        if limit is not None and not value <= limit:
            out.append(f"the {name} difference is {value:.3g} nats, more than {limit:g}")
    if exact_gap is not None and exact_gap.any():
        out.append(
            f"exact scoring differs on {np.count_nonzero(exact_gap)} of {exact_gap.size} tokens, by up to "
            f"{exact_gap.max():.3g} nats"
        )
    return tuple(out)


def _batch(
    completions: Sequence[_Sampled], temperature: float, rows_multiple: int, pad_id: int
) -> tuple[TokenBatch, list[tuple[int, slice]]]:
    """One completion a row, and where the sampled tokens of each are."""
    lengths = [len(c.prompt.tokens) + len(c.tokens) for c in completions]
    T = -(-max(lengths) // 16) * 16
    B = -(-len(completions) // rows_multiple) * rows_multiple
    tokens, mask = np.full((B, T), pad_id, np.int32), np.zeros((B, T), bool)
    places = []
    widths = [c.support_ids.shape[1] for c in completions if c.support_ids is not None]
    support = np.full((B, T, max(widths)), -1, np.int32) if widths else None
    known = [c.routing_ids for c in completions if c.routing_ids is not None]
    routing = np.full((B, T, *known[0].shape[1:]), -1, np.int16) if known else None
    for row, (c, length) in enumerate(zip(completions, lengths, strict=True)):
        if routing is not None and c.routing_ids is not None:
            routing[row, : len(c.routing_ids)] = c.routing_ids
        place = slice(len(c.prompt.tokens), length)
        if support is not None and c.support_ids is not None:
            support[row, place, : c.support_ids.shape[1]] = c.support_ids
        tokens[row, :length] = np.concatenate([c.prompt.tokens, c.tokens])
        mask[row, place] = True
        places.append((row, place))
    lengths += [0] * (B - len(lengths))
    batch = TokenBatch.from_rows(
        tokens,
        mask,
        temperature=temperature,
        lengths=np.asarray(lengths),
        support_ids=support,
        routing_ids=routing,
    )
    return batch, places


def show_certificate(certificate: ParityCertificate) -> str:
    """The certificate in words and a table."""
    c = certificate
    lines = [
        f"parity {'passed' if c.passed else 'FAILED'}: {c.tokens} tokens of pinned probes, policy version {c.version}",
        *(f"  {reason}" for reason in c.reasons),
        f"  learner       max {c.max_gap:.3g}  mean {c.mean_gap:.3g} nats"
        + "".join(
            f"  ({name.removesuffix('_gap')} at most {limit:g})"
            for name, limit in c.limits.items()
            if limit is not None
        ),
    ]
    if c.unreplayed_max_gap is not None:
        lines.append(
            f"  own experts   max {c.unreplayed_max_gap:.3g}  mean {c.unreplayed_mean_gap:.3g} nats  (those of the sampler "
            "are replayed above)"
        )
    if c.exact_max_gap is not None:
        lines.append(
            f"  exact scoring max {c.exact_max_gap:.3g}  mean {c.exact_mean_gap:.3g} nats  (must be 0)"
        )
    lines += [
        f"  weights       {c.fingerprint}",
        f"  precision     {c.dtype}, head {c.head_dtype}, temperature {c.temperature:g}",
        f"  where         {c.backend}, {c.device}, mesh {c.mesh or 'none'}, sampler {c.sampler}",
        f"  versions      {', '.join(f'{name} {value}' for name, value in c.versions.items())}",
        "",
        *_table("learner, tokens by distance in ulp", c.histogram),
    ]
    if c.exact_histogram is not None:
        lines += ["", *_table("exact scoring, tokens by distance in ulp", c.exact_histogram)]
    return "\n".join(lines)


def _table(title: str, histogram: dict[str, dict[str, int]]) -> list[str]:
    known = [_bucket(low, high) for low, high in zip(_EDGES, (*_EDGES[1:], None), strict=True)]
    columns = [name for name in known if any(name in counts for counts in histogram.values())]
    widths = [max(len(name), 5) for name in columns]
    lines = [
        title,
        f"  {'position':>10}  " + "  ".join(f"{n:>{w}}" for n, w in zip(columns, widths, strict=True)),
    ]
    for positions, counts in histogram.items():
        cells = "  ".join(f"{counts.get(n, 0):>{w}}" for n, w in zip(columns, widths, strict=True))
        lines.append(f"  {positions:>10}  {cells}")
    return lines
