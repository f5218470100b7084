"""The figures of /metrics: what is counted as requests come and go, and the page that shows it."""

from __future__ import annotations

import asyncio
import os
import pathlib

from jaxrl_llm.serve import metrics
from jaxrl_llm.serve.worker import View

__all__ = ["Counts", "page"]


class Counts:
    """What is added up since the server began."""

    def __init__(self) -> None:
        counter, histogram = metrics.Counter, metrics.Histogram
        self.requests = counter(
            "jaxrl_requests_total", "Requests by endpoint and status.", ("endpoint", "status")
        )
        self.refused = counter(
            "jaxrl_overload_total", "Requests refused with 429 because the queue was full."
        )
        self.cancelled = counter(
            "jaxrl_cancelled_total", "Completions that were cancelled, by reason.", ("reason",)
        )
        self.ended = counter(
            "jaxrl_completions_total", "Completions given, by finish reason.", ("finish_reason",)
        )
        self.prompt_tokens = counter("jaxrl_prompt_tokens_total", "Tokens of prompts, once a request.")
        self.tokens = counter("jaxrl_completion_tokens_total", "Sampled tokens given.")
        self.rate = metrics.Rate()  # of sampled tokens given
        self.updates = counter("jaxrl_weight_updates_total", "Weight swaps.")
        self.first_token = histogram(
            "jaxrl_time_to_first_token_seconds", "From the request to its first token."
        )
        self.queue_delay = histogram("jaxrl_queue_delay_seconds", "From the request to its first slot.")
        self.latency = histogram("jaxrl_request_seconds", "From the request to its last token.")

    @property
    def shown(self) -> tuple[metrics.Counter | metrics.Histogram, ...]:
        """Those that the page lists, in its order."""
        return (
            self.requests,
            self.refused,
            self.cancelled,
            self.ended,
            self.prompt_tokens,
            self.tokens,
            self.updates,
            self.first_token,
            self.queue_delay,
            self.latency,
        )


def page(counts: Counts, view: View, *, in_flight: int, open_completions: int) -> str:
    """The page in Prometheus' text format.

    Args:
      in_flight: requests that are not answered yet.
      open_completions: completions that clients wait for.
    """
    stats = view.stats
    used = 1 - view.free_pages / view.pages if view.pages else 0.0
    unfilled = 1 - view.filled_share if view.filled_share else 0.0
    prompts = stats.reused_tokens + stats.prefilled_tokens
    now: dict[str, tuple[str, str, float]] = {
        "jaxrl_requests_in_flight": ("gauge", "Requests that are not answered yet.", in_flight),
        "jaxrl_completions_open": ("gauge", "Completions that clients wait for.", open_completions),
        "jaxrl_rows_queued": ("gauge", "Completions that wait for a slot.", view.queued),
        "jaxrl_rows_running": ("gauge", "Completions that are being sampled.", view.running),
        "jaxrl_pages": ("gauge", "Pages of the K/V cache.", view.pages),
        "jaxrl_pages_free": ("gauge", "Pages that hold nothing.", view.free_pages),
        "jaxrl_pages_lost": (
            "gauge",
            "Pages held though no row is left, and of no kept prompt; told when idle.",
            view.lost_pages,
        ),
        "jaxrl_tasks": (
            "gauge",
            "Tasks of the event loop, that of this answer too.",
            len(asyncio.all_tasks()),
        ),
        "jaxrl_pages_used_ratio": ("gauge", "Share of the pages in use.", used),
        "jaxrl_pages_fragmentation_ratio": (
            "gauge",
            "Share of the room in the pages of running rows that holds no token yet.",
            unfilled,
        ),
        "jaxrl_tokens_per_second": (
            "gauge",
            "Sampled tokens of completions given in the last minute, a second.",
            counts.rate.per_second(),
        ),
        "jaxrl_batch_occupancy_ratio": (
            "gauge",
            "Live rows over slots, mean over all decode steps.",
            stats.occupancy,
        ),
        "jaxrl_prefix_hit_ratio": (
            "gauge",
            "Share of the tokens of prompts that was found in pages instead of computed.",
            stats.reused_tokens / prompts if prompts else 0.0,
        ),
        "jaxrl_slots": ("gauge", "Rows that are decoded together.", stats.slots),
        "jaxrl_policy_version": ("gauge", "Train steps done by the policy that is served.", view.version),
        "jaxrl_paused": ("gauge", "1 between /pause and /resume.", view.paused),
        "jaxrl_prefix_hits_total": (
            "counter",
            "Completions whose prompt was already in the pages.",
            stats.prefix_hits,
        ),
        "jaxrl_prefilled_tokens_total": (
            "counter",
            "Tokens computed by prefill.",
            stats.prefilled_tokens,
        ),
        "jaxrl_reused_tokens_total": (
            "counter",
            "Tokens of prompts found in pages that other prompts had filled.",
            stats.reused_tokens,
        ),
        "jaxrl_page_evictions_total": (
            "counter",
            "Pages of prompts given up for others.",
            stats.evictions,
        ),
        "jaxrl_resumptions_total": ("counter", "Preempted rows that came back.", stats.resumptions),
        "jaxrl_preemptions_total": (
            "counter",
            "Rows that lost their slot for a while.",
            stats.preemptions,
        ),
        "jaxrl_dispatches_total": ("counter", "Calls of the decode program.", stats.dispatches),
        "jaxrl_decode_steps_total": ("counter", "Decode steps.", stats.decode_steps),
        "jaxrl_decoded_tokens_total": (
            "counter",
            "Tokens sampled by live rows, cancelled ones too.",
            stats.decoded_tokens,
        ),
    }
    resident = _resident_bytes()
    if resident is not None:
        now["process_resident_memory_bytes"] = ("gauge", "Memory of this process.", resident)
    return metrics.render(counts.shown, now)


def _resident_bytes() -> int | None:
    """Memory of this process; None where the system does not say."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
