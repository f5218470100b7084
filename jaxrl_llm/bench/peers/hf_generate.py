"""`generate` of Hugging Face transformers on CPU torch. See the docstring of this package for what goes in and out.

A batch is computed until its longest completion is done; of the shorter ones only the wanted tokens count.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main(work: dict[str, Any]) -> dict[str, Any]:
    """Does the work and returns the result."""
    torch.set_num_threads(work["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=getattr(torch, work["dtype"])).eval()
    prompts = torch.tensor(work["prompts"])

    def generate(completions: int, new_tokens: int) -> None:
        # The model's own settings are replaced, since `generate` takes from there what a call leaves unsaid.
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=completions // len(prompts),
            eos_token_id=None,
            pad_token_id=0,
        )
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts))
        found = tuple(made.shape)
        expected = (completions, prompts.shape[1] + new_tokens)
        if found != expected:
            raise RuntimeError(f"generate gave tokens of the shape {found}, expected {expected}")

    with torch.inference_mode():
        probe = torch.tensor([work["probe"]])
        logprobs = torch.log_softmax(model(probe).logits[0, :-1].float(), -1)
        logprobs = logprobs.gather(-1, probe[0, 1:, None])[:, 0]
        seconds, tokens = {}, {}
        for name, lengths in work["lengths"].items():
            generate(len(lengths), min(8, max(lengths)))  # warm-up
            start = time.perf_counter()
            generate(len(lengths), max(lengths))
            seconds[name], tokens[name] = time.perf_counter() - start, sum(lengths)
    return {"logprobs": logprobs.tolist(), "seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(pathlib.Path(sys.argv[1]).read_text("utf-8")))))
