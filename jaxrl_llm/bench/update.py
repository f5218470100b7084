"""How long one optimiser step takes, beside the time that its arithmetic alone would take."""

from __future__ import annotations

import dataclasses
import math
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.bench.floors import floor_seconds, measure_floors
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.recipes import grpo
from jaxrl_llm.types import TokenBatch

__all__ = ["bench_update", "synthetic_batch", "update_bytes", "update_flops"]


def update_flops(config: ModelConfig, rows: int, tokens: int, trained: int) -> float:
    """Multiplications and additions that one update cannot do without.

    Forward and backward (twice the forward) of every token through the layers, causal attention, and the head
    at the trained tokens. Nothing is counted twice: recomputation of layers or logits is a choice.

    Args:
      config: of the model.
      rows, tokens: B and T.
      trained: trained tokens of the whole batch.
    """
    D, K = config.hidden_size, config.head_dim
    weights = D * K * 2 * (config.num_heads + config.num_kv_heads) + config.active_mlp_parameters
    attention = 2 * config.num_heads * K * (tokens + 1) / 2  # scores and values, keys seen on average
    layers = rows * tokens * config.num_layers * 2 * (weights + attention)
    return 3 * (layers + trained * 2 * D * config.vocab_size)


def update_bytes(config: ModelConfig) -> float:
    """Bytes that one AdamW step moves at least: parameter and two moments read and written, gradient read."""
    return 7 * 4.0 * config.num_parameters


def synthetic_batch(
    config: ModelConfig, rows: int, tokens: int, prompt_tokens: int, *, group: int = 8, seed: int = 0
) -> TokenBatch:
    """Random tokens, rewards 0 and 1, behavior log-probs of a uniform policy."""
    rng = np.random.default_rng(seed)
    mask = np.broadcast_to(np.arange(tokens) >= prompt_tokens, (rows, tokens))
    return TokenBatch.from_rows(
        rng.integers(0, config.vocab_size, (rows, tokens), dtype=np.int32),
        mask,
        group=np.arange(rows) // group,
        reward=rng.integers(0, 2, rows).astype(np.float32),
        logprob_behavior=np.full((rows, tokens), -math.log(config.vocab_size), np.float32),
        version=0,
    )


def _peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def bench_update(
    config: ModelConfig,
    params: Any,
    *,
    rows: int = 64,
    tokens: int = 192,
    prompt_tokens: int = 64,
    dtype: str = "float32",
    micro_batch_rows: int = 8,
    remat: Remat = True,
    chunk: int | None = None,
    repeats: int = 2,
) -> dict[str, Any]:
    """Times a GRPO update with AdamW on random tokens of a fixed shape.

    Args:
      config, params: of the model; `params` are consumed.
      rows, tokens, prompt_tokens: B, T, and the tokens of a row that are not trained.
      dtype: compute dtype; master weights, gradients and moments are f32.
      micro_batch_rows, remat, chunk: see `make_update_step`.
      repeats: the fastest of this many updates counts; the first call is not timed.

    Returns:
      seconds, floor_seconds, ratio_to_floor, cpu_seconds (of all threads), tokens_per_second (rows x tokens),
      dtype, shape figures, compile_seconds, peak_memory_bytes (largest resident memory of the process),
      program_memory_bytes (arguments, results and temporaries of the compiled step).
    """
    config = dataclasses.replace(config, dtype=dtype)
    objective = grpo()
    optimizer = make_optimizer(1e-6)
    state = init_state(params, optimizer, objective, key=jax.random.key(0))
    del params
    batch = synthetic_batch(config, rows, tokens, prompt_tokens)
    batch, _ = make_prepare(objective)(batch, state.objective_state)
    step = make_update_step(
        objective, config, optimizer, micro_batch_rows=micro_batch_rows, remat=remat, chunk=chunk
    )
    start = time.perf_counter()
    compiled = step.jitted.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    program = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    seconds = cpu_seconds = math.inf
    for repeat in range(repeats + 1):
        start, cpu = time.perf_counter(), time.process_time()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        if repeat or not repeats:
            seconds = min(seconds, time.perf_counter() - start)
            cpu_seconds = min(cpu_seconds, time.process_time() - cpu)
    if not bool(jnp.isfinite(metrics["loss"].value)) or int(state.skipped):
        raise RuntimeError("bench update: the update was skipped or its loss is not finite.")
    trained = rows * (tokens - prompt_tokens)
    flops, moved = update_flops(config, rows, tokens, trained), update_bytes(config)
    floors = measure_floors(dtype)
    floor = floor_seconds(flops, moved, floors)
    return {
        "seconds": seconds,
        "floor_seconds": floor,
        "ratio_to_floor": seconds / floor,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": rows * tokens / seconds,
        "dtype": dtype,
        "rows": rows,
        "tokens": tokens,
        "trained_tokens": trained,
        "micro_batch_rows": micro_batch_rows,
        "flops": flops,
        "bytes": moved,
        "flops_per_second": floors.flops_per_second,
        "bytes_per_second": floors.bytes_per_second,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": _peak_rss_bytes(),
        "program_memory_bytes": program,
    }
