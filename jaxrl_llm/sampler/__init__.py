"""Sampling completions from a policy: paged cache, continuous batching, exact log-probs.

Read `base` first (what goes in and out), then `decode` (the programs), `scheduler` (who runs on which pages), `engine`
(the loop, requests and weights come and go), `sampler` (one call of it).
"""

from jaxrl_llm.sampler.base import Completion, SamplerStats, SamplingParams, TokenSampler
from jaxrl_llm.sampler.decode import prepare_for_sampling
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.sampler.requests import Event
from jaxrl_llm.sampler.sampler import Sampler

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "Sampler",
    "SamplerStats",
    "SamplingParams",
    "TokenSampler",
    "prepare_for_sampling",
]
