"""The sampler end to end on the tiny model, against the dense forward pass of the learner."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.sampler import Sampler, SamplingParams, decode, prepare_for_sampling
from jaxrl_llm.types import Prompt, StopReason

LENGTHS = (1, 5, 16, 17, 33, 40, 70)


@functools.cache
def model(seed=0):
    """TINY with embeddings large enough for distributions that are neither flat nor greedy."""
    params = init_params(TINY, jax.random.key(seed))
    return {**params, "embed": params["embed"] * 6}


def prompts(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Prompt(uid=f"visit {i}", tokens=rng.integers(3, 128, n).astype(np.int32))
        for i, n in enumerate(lengths)
    ]


@functools.partial(jax.jit, static_argnames=("config",))
def _dense_logits(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h = forward(params, config, tokens, positions, jnp.ones_like(tokens))
    return jnp.einsum("btd,dv->btv", h, head_weight(params, config), preferred_element_type=jnp.float32)


def dense_logprobs(completion, temperature=1.0, params=None, config=TINY):
    """f32[N] by one forward pass over prompt and completion, padded to a common length."""
    P, N = len(completion.prompt.tokens), len(completion.tokens)
    row = np.zeros((1, 128), np.int32)
    row[0, : P + N] = np.concatenate([completion.prompt.tokens, completion.tokens])
    logp = jax.nn.log_softmax(_dense_logits(params or model(), config, jnp.array(row))[0] / temperature)
    return np.asarray(logp)[np.arange(P - 1, P + N - 1), completion.tokens]


def same(a, b):
    """Bit equality of two lists of completions, order by (uid, index)."""
    key = lambda c: (c.prompt.uid, c.index)  # noqa: E731
    a, b = sorted(a, key=key), sorted(b, key=key)
    return len(a) == len(b) and all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) and x.stop == y.stop
        for x, y in zip(a, b, strict=True)
    )


@functools.cache
def shared():
    """Most tests use this one, so that they share its compiled programs; it keeps nothing of a call."""
    return Sampler(TINY, slots=4, page_size=8, pages=64)


MIXED = SamplingParams(max_tokens=30, n=3, seed=11)


@pytest.fixture(scope="module")
def mixed():
    """What the other tests compare with: ample pages, eight steps a dispatch."""
    sampler = shared()
    return sampler.generate(model(), prompts(), MIXED, version=5)


def test_logprobs_equal_the_dense_forward_pass(mixed):
    assert [(c.prompt.uid, c.index) for c in mixed] == [(p.uid, j) for p in prompts() for j in range(3)]
    assert {c.stop for c in mixed} == {StopReason.EOS, StopReason.LENGTH}
    for c in mixed:
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c), atol=1e-4)
        assert (c.versions == 5).all() and (c.kv_versions == 5).all() and len(c.versions) == len(c.tokens)
        assert (c.tokens[:-1] != 2).all()
        assert (c.stop is StopReason.EOS) == (c.tokens[-1] == 2)
        assert c.stop is StopReason.EOS or len(c.tokens) == 30


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_s01_training_and_sampling_use_the_same_temperature(temperature):
    sampler = shared()
    for c in sampler.generate(
        model(), prompts((3, 20)), SamplingParams(max_tokens=8, n=2, temperature=temperature)
    ):
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c, temperature), atol=1e-4)


def test_greedy_takes_the_best_token_and_returns_raw_logprobs():
    sampler = shared()
    for c in sampler.generate(
        model(), prompts((3, 20)), SamplingParams(max_tokens=8, temperature=0.0, stop_ids=())
    ):
        P = len(c.prompt.tokens)
        row = np.zeros((1, 128), np.int32)
        row[0, : P + 8] = np.concatenate([c.prompt.tokens, c.tokens])
        best = np.asarray(_dense_logits(model(), TINY, jnp.array(row)))[0].argmax(-1)
        assert np.array_equal(c.tokens, best[P - 1 : P + 7])
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c), atol=1e-4)


def test_queue_order_and_neighbours_change_nothing(mixed):
    sampler = shared()
    shuffled = [prompts()[i] for i in (4, 0, 6, 2, 5, 1, 3)]
    assert same(mixed, sampler.generate(model(), shuffled, MIXED))
    alone = [c for p in prompts() for c in sampler.generate(model(), [p], MIXED)]
    assert same(mixed, alone)


def test_preempted_and_resumed_rows_lose_no_token_and_no_logprob(mixed):
    sampler = Sampler(TINY, slots=4, page_size=8, pages=18, steps_per_dispatch=5)
    assert same(mixed, sampler.generate(model(), prompts(), MIXED))
    assert sampler.stats.preemptions > 0 and sampler.stats.resumptions == sampler.stats.preemptions
    assert sampler.stats.peak_pages <= 17


def test_recomputed_pages_give_the_same_logprobs_to_rounding():
    sampler = Sampler(TINY, slots=4, page_size=8, pages=18, steps_per_dispatch=5, preemption="recompute")
    for c in sampler.generate(model(), prompts(), MIXED):
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c), atol=1e-4)
    assert sampler.stats.resumptions > 0


def test_the_shape_of_the_prefill_calls_and_of_pages_may_vary(mixed):
    sampler = Sampler(TINY, slots=4, page_size=16, prefill_chunk=32, prefill_rows=2)
    for a, b in zip(mixed, sampler.generate(model(), prompts(), MIXED), strict=True):
        # Another order of additions: equal to rounding, as long as no near-tie flips.
        agree = int(np.argmin(np.append(a.tokens[: len(b.tokens)] == b.tokens[: len(a.tokens)], False)))
        np.testing.assert_allclose(a.logprobs[:agree], b.logprobs[:agree], atol=1e-4)
        assert agree > 0


def test_a_prompt_is_prefilled_once_for_its_group(mixed):
    sampler = Sampler(TINY, slots=8, page_size=8)
    sampler.generate(model(), prompts((20,)), dataclasses.replace(MIXED, n=8))
    assert sampler.stats.prefilled_tokens == 19 and sampler.stats.prefix_hits == 7
    assert sampler.stats.completions == 8 and 0 < sampler.stats.occupancy <= 1


def test_equal_token_lists_are_different_visits():
    sampler = shared()
    a, b = sampler.generate(model(), [[5, 6, 7], [5, 6, 7]], SamplingParams(max_tokens=20))
    assert a.prompt.uid != b.prompt.uid and not np.array_equal(a.tokens, b.tokens)


def test_bf16_logprobs_follow_the_dense_bf16_forward_pass():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    sampler = Sampler(config, slots=4, page_size=8)
    outs = sampler.generate(model(), prompts((3, 30)), SamplingParams(max_tokens=20, n=2))
    gaps = np.concatenate([np.abs(c.logprobs - dense_logprobs(c, config=config)) for c in outs])
    assert gaps.mean() < 0.02 and gaps.max() < 0.2


def test_raw_logprobs_and_truncated_support():
    sampler = shared()
    params = SamplingParams(max_tokens=12, n=2, temperature=0.8, top_p=0.7, top_k=20, raw_logprobs=True)
    for c in sampler.generate(model(), prompts((4, 18)), params):
        np.testing.assert_allclose(c.raw_logprobs, dense_logprobs(c), atol=1e-4)
        assert (c.logprobs > dense_logprobs(c, 0.8) - 1e-4).all()  # renormalised over a smaller support


def dense_lists(completion, temperature=1.0):
    """f32[N, V]: log-probs of the whole vocabulary in the place of each sampled token."""
    P, N = len(completion.prompt.tokens), len(completion.tokens)
    row = np.zeros((1, 128), np.int32)
    row[0, : P + N] = np.concatenate([completion.prompt.tokens, completion.tokens])
    logp = jax.nn.log_softmax(_dense_logits(model(), TINY, jnp.array(row))[0] / temperature)
    return np.asarray(logp)[P - 1 : P + N - 1]


@pytest.mark.parametrize("truncated", [{}, {"top_p": 0.6, "top_k": 9}])
def test_lists_are_those_of_the_dense_forward_pass(truncated):
    sampling = SamplingParams(max_tokens=12, n=2, temperature=0.8, top_logprobs=5, **truncated)
    plain = dataclasses.replace(sampling, top_logprobs=0)
    outs = shared().generate(model(), prompts((4, 18)), sampling)
    without = shared().generate(model(), prompts((4, 18)), plain)
    assert same(outs, without) and without[0].top_ids is None  # asking for lists changes no draw
    for c in outs:
        dense = dense_lists(c, 0.8)
        assert c.top_ids.shape == c.top_logprobs.shape == (len(c.tokens), 5)
        assert c.top_ids.dtype == np.int32 and c.top_logprobs.dtype == np.float32
        np.testing.assert_allclose(c.top_logprobs, -np.sort(-dense, axis=1)[:, :5], atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(dense, c.top_ids, 1), c.top_logprobs, atol=1e-4)


def test_lists_survive_preemption():
    sampling = dataclasses.replace(MIXED, top_logprobs=5)
    sampler = Sampler(TINY, slots=4, page_size=8, pages=18, steps_per_dispatch=5)
    squeezed = sampler.generate(model(), prompts(), sampling)
    assert sampler.stats.preemptions > 0
    for a, b in zip(squeezed, shared().generate(model(), prompts(), sampling), strict=True):
        assert np.array_equal(a.top_ids, b.top_ids) and np.array_equal(a.top_logprobs, b.top_logprobs)
        assert a.top_ids.shape == (len(a.tokens), 5)


def test_a_listed_token_that_cannot_be_drawn_has_probability_0():
    sampling = SamplingParams(max_tokens=3, top_logprobs=128, suppress_ids=tuple(range(8, 128)), stop_ids=())
    (c,) = shared().generate(model(), prompts((4,)), sampling)
    assert set(c.top_ids[0, :8]) == set(range(8)) and np.all(np.isfinite(c.top_logprobs))
    np.testing.assert_allclose(np.exp(c.top_logprobs).sum(axis=1), 1.0, rtol=1e-5)
    assert not np.exp(c.top_logprobs[:, 8:]).any()
    with pytest.raises(InputError, match="top_logprobs=129 is more than the 128 tokens"):
        shared().generate(model(), prompts((4,)), dataclasses.replace(sampling, top_logprobs=129))


def test_a_greedy_completion_beside_the_samples(mixed):
    outs = shared().generate(model(), prompts(), dataclasses.replace(MIXED, greedy_too=True), version=5)
    assert [(c.prompt.uid, c.index) for c in outs] == [(p.uid, j) for p in prompts() for j in range(4)]
    assert same(mixed, [c for c in outs if c.index < 3])
    greedy = dataclasses.replace(MIXED, temperature=0.0, n=1)
    alone = shared().generate(model(), prompts(), greedy)
    for a, b in zip([c for c in outs if c.index == 3], alone, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
    squeezed = Sampler(TINY, slots=4, page_size=8, pages=18, steps_per_dispatch=5)
    again = squeezed.generate(model(), prompts(), dataclasses.replace(MIXED, greedy_too=True))
    assert squeezed.stats.preemptions > 0 and same(outs, again)


def test_context_limit_truncates_and_long_prompts_are_refused_by_name():
    sampler = Sampler(TINY, slots=4, page_size=8, max_context=24)
    outs = sampler.generate(model(), prompts((20, 23)), SamplingParams(max_tokens=50, stop_ids=()))
    assert [len(c.tokens) for c in outs] == [4, 1]
    assert all(c.stop is StopReason.LENGTH for c in outs)
    with pytest.raises(
        InputError, match=r"context of 24 tokens: 1 \(visit 1: 24 tokens\), 2 \(visit 2: 90 tokens\)"
    ):
        sampler.generate(model(), prompts((5, 24, 90)), SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(slots=1), "slots must be at least 2"),
        (dict(max_context=9999), r"max_context must be in \[2, 256\]"),
        (dict(preemption="swap"), "preemption must be"),
        (dict(pages=1), "pages must be at least 2"),
    ],
)
def test_bad_construction_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Sampler(TINY, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_tokens=0), r"max_tokens must be at least 1 .*, got 0"),
        (dict(max_tokens=4, temperature=-1.0), "temperature must be 0"),
        (dict(max_tokens=4, top_p=0.0), "top_p must be in"),
        (dict(max_tokens=4, min_tokens=5), "min_tokens must be in"),
        (dict(max_tokens=4, stop=("",)), "stop must be non-empty"),
        (dict(max_tokens=4, top_logprobs=-1), "top_logprobs must be 0"),
    ],
)
def test_bad_sampling_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


@pytest.mark.parametrize(
    "bad, message",
    [
        ([[], [1]], r"prompts without a token: 0 "),
        ([[1], [5, 128]], r"outside the vocabulary \[0, 128\): 1 .*id 128"),
    ],
)
def test_bad_prompts_are_refused(bad, message):
    with pytest.raises(InputError, match=message):
        Sampler(TINY, slots=2).generate(model(), bad, SamplingParams(max_tokens=2))


def test_a_request_larger_than_the_cache_is_refused():
    sampler = Sampler(TINY, slots=2, page_size=8, pages=5)
    with pytest.raises(InputError, match="4 usable pages of 8 tokens, too few .* .visit 1: 9 pages"):
        sampler.generate(model(), prompts((5, 40)), SamplingParams(max_tokens=20))


# --------------------------------------------------------------------------------------- stopping


class Hex:
    """A tokenizer whose token i is two hexadecimal digits, over 120 of the model's 128 ids."""

    vocab_size = 120

    def token_bytes(self, i):
        return f"{i:02x}".encode()

    def decode(self, ids, skip_special=True):
        return "".join(f"{i:02x}" for i in ids)


@functools.cache
def unstopped():
    sampler = Sampler(TINY, slots=4, page_size=8, pages=64, tokenizer=Hex())
    return sampler.generate(model(), prompts((4, 9)), SamplingParams(max_tokens=24, n=2, stop_ids=()))


def test_padding_of_the_vocabulary_is_never_sampled():
    assert max(c.tokens.max() for c in unstopped()) < 120
    free = shared().generate(model(), prompts((4, 9)), SamplingParams(max_tokens=24, n=8, stop_ids=()))
    assert max(c.tokens.max() for c in free) >= 120


@pytest.mark.parametrize("start, stop", [(8, 12), (9, 11), (7, 12), (13, 14)])
def test_stop_strings_end_a_row_across_token_boundaries(start, stop):
    sampler = Sampler(TINY, slots=4, page_size=8, pages=64, tokenizer=Hex())
    for i, whole in enumerate(unstopped()):
        needle = whole.text[start:stop]
        outs = sampler.generate(
            model(), prompts((4, 9)), SamplingParams(max_tokens=24, n=2, stop=(needle,), stop_ids=())
        )
        for free, cut in zip(unstopped(), outs, strict=True):
            place = free.text.find(needle)
            if place < 0:
                assert cut.stop is StopReason.LENGTH and cut.text == free.text
                continue
            count = -(-(place + len(needle)) // 2)
            assert cut.stop is StopReason.STOP_STRING
            assert np.array_equal(cut.tokens, free.tokens[:count])
            assert np.array_equal(cut.logprobs, free.logprobs[:count])
            assert cut.text == free.text[:place]
        assert outs[i].stop is StopReason.STOP_STRING


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        Sampler(TINY).generate(model(), [[1]], SamplingParams(max_tokens=1, stop="\n"))


def constant_model(config, logits):
    """Weights whose logits are the same after every token."""
    params = jax.tree.map(jnp.zeros_like, init_params(config, jax.random.key(0)))
    D = config.hidden_size
    params["embed"] = jnp.ones_like(params["embed"])
    params["final_norm"] = jnp.ones((D,))
    params["head"] = jnp.broadcast_to(jnp.asarray(logits, jnp.float32) / D, (D, config.vocab_size))
    return params


@pytest.mark.parametrize("stop_ids", [None, (1, 106), (106,)])
def test_s05_min_tokens_suppresses_every_stop_id_and_is_not_off_by_one(stop_ids):
    config = dataclasses.replace(TINY, tie_embeddings=False, eos_ids=(1, 106))
    for eos in (1, 106):
        if stop_ids == (106,) and eos == 1:
            continue
        logits = np.zeros(128)
        logits[eos] = 100.0
        params = constant_model(config, logits)
        sampler = Sampler(config, slots=4, page_size=8)
        for least in range(6):
            sampling = SamplingParams(max_tokens=32, min_tokens=least, stop_ids=stop_ids)
            for c in sampler.generate(params, prompts((1, 10)), sampling):
                assert len(c.tokens) == least + 1 and c.tokens[-1] == eos and c.stop is StopReason.EOS
                assert not set(c.tokens[:-1]) & set(stop_ids or (1, 106))
                allowed = 128 - len(stop_ids or (1, 106))
                # Suppressed steps: log-probs of the distribution without the stop ids.
                want = -np.log(allowed) if eos in (stop_ids or (1, 106)) else 0.0
                np.testing.assert_allclose(c.logprobs[:-1], want, atol=1e-5)
                np.testing.assert_allclose(c.logprobs[-1], 0.0, atol=1e-5)


def test_stop_strings_do_not_count_before_min_tokens():
    whole = unstopped()[0]
    sampler = Sampler(TINY, slots=4, page_size=8, pages=64, tokenizer=Hex())
    sampling = SamplingParams(max_tokens=24, n=2, stop=tuple("0123456789abcdef"), stop_ids=(), min_tokens=6)
    cut = sampler.generate(model(), prompts((4, 9)), sampling)[0]
    assert cut.stop is StopReason.STOP_STRING and np.array_equal(cut.tokens, whole.tokens[:7])
    assert cut.text == whole.text[:12]


# ------------------------------------------------------------------------------- weights and seeds


def test_s07_new_weights_leave_nothing_stale():
    sampler = shared()
    system = np.arange(3, 27, dtype=np.int32)  # three full pages
    visits = [Prompt(uid=f"{i}", tokens=np.append(system, 30 + i).astype(np.int32)) for i in range(3)]
    sampling = SamplingParams(max_tokens=16, n=4)
    for seed in (0, 1, 0, 2):
        warm = sampler.generate(model(seed), visits, sampling)
        assert sampler.stats.prefilled_tokens == 24  # computed anew with these weights, once
        fresh = Sampler(TINY, slots=4, page_size=8, pages=64).generate(model(seed), visits, sampling)
        assert same(warm, fresh)
    assert not same(warm, sampler.generate(model(1), visits, sampling))


def test_n29_weights_are_arguments_of_the_compiled_programs():
    sampler = shared()
    sampling = SamplingParams(max_tokens=10, temperature=0.0, stop_ids=())
    before = sampler.generate(model(0), prompts((5, 20)), sampling)
    programs = decode._generate._cache_size(), decode.prefill._cache_size()
    after = sampler.generate(model(1), prompts((5, 20)), sampling)
    assert programs == (decode._generate._cache_size(), decode.prefill._cache_size())
    assert not same(before, after)
    for c in after:
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c, params=model(1)), atol=1e-4)


def test_prepared_weights_are_accepted_and_the_source_is_untouched():
    digest = [np.asarray(x).tobytes() for x in jax.tree.leaves(model())]
    sampler = shared()
    sampling = SamplingParams(max_tokens=10)
    a = sampler.generate(prepare_for_sampling(model(), TINY), prompts((5, 20)), sampling)
    assert same(a, sampler.generate(model(), prompts((5, 20)), sampling))
    assert digest == [np.asarray(x).tobytes() for x in jax.tree.leaves(model())]


def test_s09_samples_of_a_group_differ_and_runs_repeat():
    config = dataclasses.replace(TINY, vocab_size=1000, tie_embeddings=False, eos_ids=())
    params = constant_model(config, np.zeros(1000))
    sampler = Sampler(config, slots=8, page_size=8)
    sampling = SamplingParams(max_tokens=20, n=8, seed=0)
    step0 = sampler.generate(params, [Prompt(uid="step 0", tokens=np.array([1], np.int32))], sampling)
    again = sampler.generate(params, [Prompt(uid="step 0", tokens=np.array([1], np.int32))], sampling)
    step1 = sampler.generate(params, [Prompt(uid="step 1", tokens=np.array([1], np.int32))], sampling)
    assert len({tuple(c.tokens) for c in step0}) == 8
    assert same(step0, again)
    assert not {tuple(c.tokens) for c in step0} & {tuple(c.tokens) for c in step1}
    other = sampler.generate(params, [[1]], dataclasses.replace(sampling, seed=1))
    assert not {tuple(c.tokens) for c in sampler.generate(params, [[1]], sampling)} & {
        tuple(c.tokens) for c in other
    }


def test_broken_weights_end_rows_as_errors():
    params = {**model(), "final_norm": model()["final_norm"] * jnp.nan}
    outs = shared().generate(params, prompts((3, 9)), SamplingParams(max_tokens=4))
    assert [c.stop for c in outs] == [StopReason.ERROR] * 2 and all(len(c.tokens) == 0 for c in outs)


def test_weights_sharded_over_a_mesh_give_the_same_logprobs():
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    def shard(x):
        axes = [None] * (x.ndim - 2) + ["fsdp", "tensor"] if x.ndim >= 2 else [None]
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))

    sampler = Sampler(TINY, slots=4, page_size=8, pages=24, mesh=mesh)
    outs = sampler.generate(
        jax.tree.map(shard, model()), prompts((3, 20)), SamplingParams(max_tokens=12, n=2)
    )
    for c in outs:
        np.testing.assert_allclose(c.logprobs, dense_logprobs(c), atol=1e-4)


def test_nothing_is_transferred_implicitly():
    sampler = shared()
    sampling = SamplingParams(max_tokens=12, n=2)
    want = sampler.generate(model(), prompts((3, 20)), sampling)
    with jax.transfer_guard("disallow"):
        assert same(want, sampler.generate(model(), prompts((3, 20)), sampling))
