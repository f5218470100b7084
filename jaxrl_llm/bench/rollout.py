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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.bench.floors import floor_seconds, measure_floors
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.types import Prompt

__all__ = ["bench_rollout", "rollout_work"]


def rollout_work(
    config: ModelConfig, *, prompts: int, group: int, prompt_tokens: int, new_tokens: int, slots: int
) -> tuple[float, float]:
    """(floating-point operations, bytes) of a rollout in which every completion has `new_tokens` tokens."""
    layers = config.num_parameters - config.vocab_size * config.hidden_size * (
        1 if config.tie_embeddings else 2
    )
    head = config.vocab_size * config.hidden_size
    rows = prompts * group
    attention = 4 * config.num_layers * config.num_heads * config.head_dim  # FLOPs of a query-key pair
    context = prompt_tokens + new_tokens / 2  # tokens that a decoded token attends to, on average
    flops = (
        2.0 * layers * (prompts * prompt_tokens + rows * new_tokens)
        + 2.0 * head * rows * new_tokens
        + attention * (prompts * prompt_tokens**2 / 2 + rows * new_tokens * context)
    )
    size = jnp.dtype(config.dtype).itemsize
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size  # bytes of a token
    steps = new_tokens * -(-rows // slots)
    weights = layers * size + head * jnp.dtype(config.logits_dtype).itemsize
    return flops, float(steps * weights + rows * new_tokens * context * cache)


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
    **sampler_options: Any,
) -> dict[str, Any]:
    """Samples prompts x group completions of exactly `new_tokens` tokens at temperature 1.

    Args:
      model: a `Model` (config and params), or a `ModelConfig` with `params` beside it (None: random).
      prompts, group: sequences; prompt_tokens, new_tokens: tokens of each.
      dtype: compute dtype.
      repeats: timed runs after the first one; the fastest counts, the median is reported too.
      slots, sampler_options: of `Sampler`.

    Returns:
      A JSON-able dict. `seconds` is one whole call: preparing the weights, prefill, decoding.
      `compile_seconds` is what the first call took longer than the fastest.
    """
    config: ModelConfig = model if isinstance(model, ModelConfig) else model.config
    config = dataclasses.replace(config, dtype=dtype)
    if params is None:
        params = init_params(config, jax.random.key(0)) if isinstance(model, ModelConfig) else model.params
    floors = measure_floors(dtype)
    rng = np.random.default_rng(0)
    batch = [
        Prompt(uid=f"bench-{i}", tokens=rng.integers(0, config.vocab_size, prompt_tokens).astype(np.int32))
        for i in range(prompts)
    ]
    sampler = Sampler(config, slots=slots, **sampler_options)
    sampling = SamplingParams(max_tokens=new_tokens, n=group, stop_ids=())

    seconds, loads, stats = [], [], sampler.stats
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sampler.generate(params, batch, sampling)
        seconds.append(time.perf_counter() - start)
        loads.append(os.getloadavg()[0])
        stats = stats if len(seconds) > 1 and seconds[-1] > min(seconds[1:]) else sampler.stats
    first, timed = seconds[0], sorted(seconds[1:])
    best = timed[0] if timed else first

    work = dict(prompts=prompts, group=group, prompt_tokens=prompt_tokens, new_tokens=new_tokens, slots=slots)
    flops, moved = rollout_work(config, **work)
    floor = floor_seconds(flops, moved, floors)
    tokens = prompts * group * new_tokens
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return {
        **work,
        "dtype": dtype,
        "tokens": tokens,
        "seconds": best,
        "seconds_median": float(np.median(timed)) if timed else first,
        "tokens_per_second": tokens / best,
        "floor_seconds": floor,
        "floor_tokens_per_second": tokens / floor,
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
