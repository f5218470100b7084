"""The sampler of this package. See the docstring of `jaxrl_llm.bench.peers` for what goes in and out."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from jaxrl_llm import runtime
from jaxrl_llm.bench.rollout import bench_rollout
from jaxrl_llm.models.load import load_model
from jaxrl_llm.sampler import Sampler, SamplingParams


def main(work: dict[str, Any]) -> dict[str, Any]:
    """Does the work and returns the result."""
    runtime.configure()
    model = load_model(work["model"], dtype=work["dtype"])
    sampler = Sampler(model.config, slots=2)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
    (completion,) = sampler.generate(model.params, [work["probe"]], sampling)
    assert completion.prompt_logprobs is not None  # they were asked for
    figures = {}
    for name, lengths in work["lengths"].items():
        figures[name] = bench_rollout(  # makes the same prompts as those of the work
            model,
            prompts=len(work["prompts"]),
            group=len(lengths) // len(work["prompts"]),
            prompt_tokens=len(work["prompts"][0]),
            new_tokens=max(lengths),
            dtype=work["dtype"],
            repeats=1,
            lengths=None if len(set(lengths)) == 1 else lengths,
        )
    return {
        "logprobs": completion.prompt_logprobs[1:].tolist(),
        "seconds": {name: found["seconds"] for name, found in figures.items()},
        "tokens": {name: found["tokens"] for name, found in figures.items()},
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(pathlib.Path(sys.argv[1]).read_text("utf-8")))))
