"""Qwen decoders through every part that computes with a model: sampler, exact scoring, mesh, files."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.sampler.rescore import ExactScorer
from jaxrl_llm.types import Prompt

QWEN3 = dataclasses.replace(TINY, family="qwen3", qk_norm=True, head_dim=32, tie_embeddings=False)
QWEN2 = dataclasses.replace(TINY, family="qwen2", attention_bias=True)
CONFIGS = {"qwen2": QWEN2, "qwen3": QWEN3}
families = pytest.mark.parametrize("family", CONFIGS)

SAMPLING = SamplingParams(max_tokens=12, n=2, seed=3)


@functools.cache
def model(family):
    """Random parameters, those that begin as ones or zeros included, with logits that are not flat."""
    params = init_params(CONFIGS[family], jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    leaves = [x + 0.3 * rng.normal(size=x.shape).astype(np.float32) if x.ndim < 3 else x for x in leaves]
    return jax.tree.unflatten(tree, leaves)


@functools.cache
def sampled(family):
    """(completions, sampler) of prompts of several lengths."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid=f"p{n}", tokens=rng.integers(3, 128, n).astype(np.int32)) for n in (1, 5, 17, 30)]
    sampler = Sampler(CONFIGS[family], slots=8, page_size=8, pages=64)
    return sampler.generate(model(family), prompts, SAMPLING), sampler


def learner_logprobs(family, completions):
    """f32[N] of each completion by one forward pass."""
    rows = np.zeros((len(completions), 48), np.int32)
    for row, c in zip(rows, completions, strict=True):
        whole = np.concatenate([c.prompt.tokens, c.tokens])
        row[: len(whole)] = whole
    logprobs = np.asarray(token_logprobs(model(family), CONFIGS[family], rows))
    return [logprobs[i, len(c.prompt.tokens) :][: len(c.tokens)] for i, c in enumerate(completions)]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_sampler_and_learner_give_the_same_logprobs(family):
    completions, sampler = sampled(family)
    assert sum(len(c.tokens) for c in completions) > 40
    for c, expected in zip(completions, learner_logprobs(family, completions), strict=True):
        np.testing.assert_allclose(c.logprobs, expected, atol=1e-4)
    scorer = ExactScorer(sampler.config, slots=8, page_size=8, rows=8)
    for c, exact in zip(completions, scorer.completions(model(family), completions, SAMPLING), strict=True):
        np.testing.assert_array_equal(exact, c.logprobs)


@families
def test_a_saved_model_is_read_back_bit_for_bit(family, tmp_path):
    folder = save_hf(CONFIGS[family], model(family), None, tmp_path / family)
    loaded = load_model(folder)
    assert loaded.config == CONFIGS[family]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model(family))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    count = sum(x.size for x in jax.tree.leaves(loaded.params))
    assert loaded.config.num_parameters == count
