"""vLLM on the CPU. See the docstring of this package for what goes in and out.

Every completion is a request with its own limit. Requests of one prompt share whole blocks of its keys and values (128 tokens);
these are forgotten before the measurement, as they are in training whenever the weights have changed.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any


def _settings(threads: int) -> dict[str, str]:
    """Environment variables of vLLM, where the user has not set them."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    # With Intel's OpenMP library one process is the fastest, as none competes for the cores. Without it vLLM needs a process of
    # its own to choose a library for.
    alone = "libiomp" in os.environ.get("LD_PRELOAD", "")
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default it leaves cores unused
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def main(work: dict[str, Any]) -> dict[str, Any]:
    """Does the work and returns the result."""
    for name, value in _settings(work["threads"]).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams  # reads the environment

    longest = max(map(max, work["lengths"].values()))
    llm = LLM(
        model=work["model"],
        dtype=work["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=1 + max(len(work["probe"]), len(work["prompts"][0]) + longest),
        max_num_seqs=max(map(len, work["lengths"].values())),
        seed=0,
    )
    answer = llm.generate(
        [{"prompt_token_ids": work["probe"]}],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )[0]
    found = list(zip(work["probe"], answer.prompt_logprobs, strict=True))[1:]
    logprobs = [entry[token].logprob for token, entry in found]

    def generate(lengths: list[int]) -> int:
        group = len(lengths) // len(work["prompts"])
        requests = [{"prompt_token_ids": work["prompts"][row // group]} for row in range(len(lengths))]
        limits = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        llm.reset_prefix_cache()
        answers = llm.generate(requests, limits, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    seconds, tokens = {}, {}
    for name, lengths in work["lengths"].items():
        generate([min(8, length) for length in lengths])  # warm-up
        start = time.perf_counter()
        tokens[name] = generate(lengths)
        seconds[name] = time.perf_counter() - start
    return {"logprobs": logprobs, "seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(pathlib.Path(sys.argv[1]).read_text("utf-8")))))
