"""Arguments from Python: each odd one is refused by name before anything is compiled."""

import math

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.sampler import Sampler, SamplingParams, decode
from jaxrl_llm.sampler.base import as_prompts
from jaxrl_llm.types import Prompt


@pytest.mark.parametrize(
    "argument",
    [
        {"slots": 1}, {"slots": 2.5}, {"slots": "4"}, {"slots": None}, {"slots": True}, {"slots": 2**31},
        {"pages": 1}, {"pages": 2.0}, {"page_size": 0}, {"page_size": 1.5},
        {"max_context": 1}, {"max_context": 10**9}, {"max_context": 64.0}, {"max_context": "64"},
        {"steps_per_dispatch": 0}, {"steps_per_dispatch": 1.5}, {"prefill_rows": 0}, {"prefill_chunk": 2.5},
        {"preemption": "never"}, {"preemption": None},
    ],
)  # fmt: skip
def test_sampler(argument):
    (name,) = argument
    with pytest.raises(InputError, match=rf"sampler: {name} must be .*got"):
        Sampler(TINY, **argument)


def test_integers_of_numpy_are_integers():
    assert Sampler(TINY, slots=np.int64(4), max_context=np.int32(64)).stats.slots == 4
    assert (
        SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_ids=np.array([1, 2])).n == 1
    )


@pytest.mark.parametrize(
    "argument",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": "3"}, {"max_tokens": None}, {"max_tokens": True},
        {"max_tokens": 2**31}, {"n": 0}, {"n": -1}, {"n": 1.5}, {"n": "2"},
        {"stop": ""}, {"stop": ("",)}, {"stop": None}, {"stop": 3}, {"stop": (1,)}, {"stop": b"x"}, {"stop": "\ud800"},
        {"seed": 1.5}, {"seed": "x"}, {"seed": None},
        {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": -1}, {"temperature": 1e-9},
        {"temperature": "1"}, {"temperature": None}, {"temperature": True}, {"temperature": 10**400},
        {"top_p": 0}, {"top_p": 1.5}, {"top_p": math.nan}, {"top_p": "x"}, {"top_p": None},
        {"top_k": -1}, {"top_k": 1.5}, {"top_k": None}, {"top_k": 2**40},
        {"min_p": 2}, {"min_p": math.nan}, {"min_p": None},
        {"min_tokens": 9}, {"min_tokens": -1}, {"min_tokens": 1.5},
        {"stop_ids": 3}, {"stop_ids": ("a",)}, {"stop_ids": (1.5,)},
        {"suppress_ids": 3}, {"suppress_ids": (1.5,)}, {"suppress_ids": ("a",)},
    ],
)  # fmt: skip
def test_sampling_params(argument):
    (name,) = argument
    with pytest.raises(InputError, match=f"SamplingParams: {name} must be .*got"):
        SamplingParams(**{"max_tokens": 4, **argument})


@pytest.mark.parametrize("seed", [-1, 0, 2**64, 2**200])
def test_any_integer_is_a_seed(seed):
    assert SamplingParams(max_tokens=1, seed=seed).seed == seed


@pytest.mark.parametrize("prompts", [None, 3, "text", Prompt(uid="a", tokens=np.array([1], np.int32))])
def test_prompts_that_are_no_list(prompts):
    with pytest.raises(InputError, match="prompts must be a list of token lists or Prompts"):
        as_prompts(prompts)


@pytest.mark.parametrize(
    "prompt",
    [5, "abc", [1.5, 2], [1.0], [True], ["a"], [None], [[1, 2]], None, np.array([1.5]), np.ones((2, 2), int)],
)
def test_prompts_that_are_no_tokens(prompt):
    for given in (prompt, Prompt(uid="a", tokens=prompt)):
        with pytest.raises(InputError, match="prompt 1 must be a list of token ids .integers. or a Prompt"):
            as_prompts([[1, 2], given])


def test_odd_ids_and_uids():
    with pytest.raises(InputError, match="prompt 0 has a token id beyond 32 bits"):
        as_prompts([[2**40]])
    for uid in (None, 3, "", "\ud800"):
        with pytest.raises(InputError, match="the uid of prompt 0 must be a text"):
            as_prompts([Prompt(uid=uid, tokens=np.array([1], np.int32))])


def test_prompts_in_other_clothes():
    same = as_prompts([[1, 2], (1, 2), np.array([1, 2]), jax.numpy.array([1, 2])])
    assert len({p.uid for p in same}) == 4 and len({p.uid.rsplit("-", 1)[0] for p in same}) == 1
    assert len(as_prompts([i] for i in range(3))) == 3
    assert as_prompts([[]])[0].tokens.size == 0


def test_generate(tiny_params):
    sampler, sampling = Sampler(TINY, slots=2, max_context=16), SamplingParams(max_tokens=4)
    assert sampler.generate(tiny_params, [], sampling) == []
    for other in (None, {"max_tokens": 3}):
        with pytest.raises(InputError, match="sampling must be SamplingParams"):
            sampler.generate(tiny_params, [[1]], other)
    for prompts, message in (
        ([[]], "prompts without a token: 0"),
        ([[1] * 16], "no room in the context of 16 tokens: 0"),
        ([[1], [TINY.vocab_size]], "outside the vocabulary .*: 1 .*id 128"),
        ([[-1]], "outside the vocabulary .*: 0 .*id -1"),
    ):
        with pytest.raises(InputError, match=message):
            sampler.generate(tiny_params, prompts, sampling)
    with pytest.raises(InputError, match="the cache has 1 usable pages of 4 tokens, too few"):
        Sampler(TINY, slots=2, pages=2, page_size=4, max_context=16).generate(
            tiny_params, [[1] * 8], sampling
        )


def test_params_of_another_model(tiny_params):
    sampler, sampling = Sampler(TINY, slots=2, max_context=16), SamplingParams(max_tokens=4)
    fewer = {**tiny_params, "embed": tiny_params["embed"][:100]}
    with pytest.raises(
        InputError, match=r"params do not fit.*\['embed'\] is \(100, 64\), expected \(128, 64\)"
    ):
        sampler.generate(fewer, [[1]], sampling)
    for nothing in (None, {}, {"layers": None}):
        with pytest.raises(
            InputError, match=r"\['embed'\] is missing, .* more. Pass the params of that model"
        ):
            sampler.generate(nothing, [[1]], sampling)
    prepared = decode.prepare_for_sampling(tiny_params, TINY)
    assert sampler.generate(prepared, [], sampling) == []
