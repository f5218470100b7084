"""How fast completions are sampled, beside the floor of the machine.

The floor counts the work that no sampler can avoid: every prompt computed once for its group, one pass
of every sampled token through the layers and the head, and for each decode step one read of the weights
and of the keys and values that the live rows attend to. Its rates are measured in the same process.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.bench.floors import floor_seconds, measure_floors
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplerStats, SamplingParams, prepare_for_sampling
from jaxrl_llm.types import Prompt

__all__ = ["bench_rollout", "check_work", "ragged_lengths", "rollout_work", "synthetic_prompts"]


_MOST_TOKENS = 10**9  # of a benchmark


def synthetic_prompts(vocab_size: int, prompts: int, prompt_tokens: int) -> np.ndarray:
    """Random token ids, the same at each call: i32[prompts, prompt_tokens]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (prompts, prompt_tokens)).astype(np.int32)


def check_work(prompts: int, group: int, tokens: int) -> None:
    """Raises InputError where the tokens of all rows are more than any machine measures."""
    if prompts * group * tokens > _MOST_TOKENS:
        raise InputError(
            f"--prompts {prompts} x --group {group} rows of {tokens} tokens are more than the {_MOST_TOKENS:,} tokens that are "
            "measured at most. Take fewer."
        )


def ragged_lengths(rows: int, shortest: int, longest: int) -> list[int]:
    """How many tokens each of `rows` completions has: evenly spread, in a random order that is always the same.

    Raises:
      InputError: the shortest is not in [1, longest].
    """
    if not 1 <= shortest <= longest:
        raise InputError(
            f"the shortest completion must have between 1 and {longest} new tokens (as many as the longest), "
            f"got {shortest}."
        )
    spread = np.linspace(shortest, longest, rows).round().astype(int)
    return np.random.default_rng(0).permutation(spread).tolist()


def rollout_work(
    config: ModelConfig,
    *,
    prompts: int,
    group: int,
    prompt_tokens: int,
    new_tokens: int,
    slots: int,
    lengths: Sequence[int] | None = None,
) -> tuple[float, float]:
    """(floating-point operations, bytes) of a rollout in which every completion has `new_tokens` tokens.

    With `lengths` (prompts x group numbers) each has its own number, and `new_tokens` is not read.
    """
    layers = config.num_parameters - config.vocab_size * config.hidden_size * (
        1 if config.tie_embeddings else 2
    )
    head = config.vocab_size * config.hidden_size
    rows = np.asarray([new_tokens] * (prompts * group) if lengths is None else lengths)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim  # FLOPs of a query-key pair
    new = int(rows.sum())
    pairs = float((rows * (prompt_tokens + rows / 2)).sum())  # a decoded token and one that it attends to
    flops = (
        2.0 * layers * (prompts * prompt_tokens + new)
        + 2.0 * head * new
        + attention * (prompts * prompt_tokens**2 / 2 + pairs)
    )
    size = jnp.dtype(config.dtype).itemsize
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size  # bytes of a token
    steps = max(int(rows.max()), -(-new // slots))  # a row takes a step per token, a step has `slots` rows
    weights = layers * size + head * jnp.dtype(config.logits_dtype).itemsize
    return flops, float(steps * weights + pairs * cache)


def bench_rollout(
    model: Any,
    params: Any = None,
    *,
    prompts: int = 8,
    group: int = 8,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 2,
    slots: int = 64,
    lengths: Sequence[int] | None = None,
    **sampler_options: Any,
) -> dict[str, Any]:
    """Samples prompts x group completions of exactly `new_tokens` tokens at temperature 1.

    Args:
      model: a `Model` (config and params), or a `ModelConfig` with `params` beside it (None: random).
      prompts, group: sequences; prompt_tokens, new_tokens: tokens of each.
      dtype: compute dtype.
      repeats: timed runs after the first one; the fastest counts, the median is reported too.
      slots, sampler_options: of `Sampler`.
      lengths: tokens of each completion, those of a prompt consecutive, at most `new_tokens`: rows then end at
        different times. None: all have `new_tokens`.

    Returns:
      A JSON-able dict. `seconds` is one whole call: preparing the weights, prefill, decoding.
      `compile_seconds` is what the first call took longer than the fastest.

    Raises:
      InputError: `lengths` are not prompts x group numbers in [1, new_tokens].
    """
    if lengths is not None and (
        len(lengths) != prompts * group or not 1 <= min(lengths) <= max(lengths) <= new_tokens
    ):
        raise InputError(
            f"bench_rollout: lengths must be {prompts} x {group} numbers in [1, {new_tokens}], got {list(lengths)}."
        )
    config: ModelConfig = model if isinstance(model, ModelConfig) else model.config
    config = dataclasses.replace(config, dtype=dtype)
    if params is None:
        params = init_params(config, jax.random.key(0)) if isinstance(model, ModelConfig) else model.params
    floors = measure_floors(dtype)
    tokens = synthetic_prompts(config.vocab_size, prompts, prompt_tokens)
    batch = [Prompt(uid=f"bench-{i}", tokens=row) for i, row in enumerate(tokens)]
    if lengths is not None:
        sampler_options = {"max_context": prompt_tokens + new_tokens, **sampler_options}
    sampler = Sampler(config, slots=slots, **sampler_options)
    sampling = SamplingParams(max_tokens=new_tokens, n=group, stop_ids=())

    seconds, loads, stats = [], [], sampler.stats
    for _ in range(repeats + 1):
        start = time.perf_counter()
        if lengths is None:
            sampler.generate(params, batch, sampling)
            latest = sampler.stats
        else:
            latest = _generate_ragged(sampler, params, batch, lengths)
        seconds.append(time.perf_counter() - start)
        loads.append(os.getloadavg()[0])
        stats = stats if len(seconds) > 1 and seconds[-1] > min(seconds[1:]) else latest
    first, timed = seconds[0], sorted(seconds[1:])
    best = timed[0] if timed else first

    work = dict(prompts=prompts, group=group, prompt_tokens=prompt_tokens, new_tokens=new_tokens, slots=slots)
    flops, moved = rollout_work(config, **work, lengths=lengths)
    floor = floor_seconds(flops, moved, floors)
    made = stats.tokens
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return {
        **work,
        "dtype": dtype,
        "shortest_tokens": new_tokens if lengths is None else min(lengths),
        "tokens": made,
        "seconds": best,
        "seconds_median": float(np.median(timed)) if timed else first,
        "tokens_per_second": made / best,
        "floor_seconds": floor,
        "floor_tokens_per_second": made / floor,
        "ratio_to_floor": best / floor,
        "flops": flops,
        "bytes": moved,
        "flops_per_second_measured": floors.flops_per_second,
        "bytes_per_second_measured": floors.bytes_per_second,
        "prepare_seconds": stats.prepare_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "decode_step_seconds": stats.decode_seconds / max(1, stats.decode_steps),
        "occupancy": stats.occupancy,
        "compile_seconds": max(0.0, first - best),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "load_average": max(loads),
    }


def _generate_ragged(
    sampler: Sampler, params: Any, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> SamplerStats:
    """What `Sampler.generate` does, with a limit for each completion; rows of equal prompts share their pages."""
    began = time.perf_counter()
    group = len(lengths) // len(prompts)
    engine = sampler.engine(len(lengths))
    engine.swap(prepare_for_sampling(params, sampler.config, sampler.options["weights"]))
    engine.stats.prepare_seconds = time.perf_counter() - began
    for row, length in enumerate(lengths):
        prompt = prompts[row // group]
        engine.submit(
            dataclasses.replace(prompt, uid=f"{prompt.uid}/{row % group}"),
            SamplingParams(max_tokens=length, stop_ids=()),
        )
    while engine.busy:
        engine.step()
    engine.release()
    return engine.stats
