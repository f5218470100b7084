"""The long-lived engine: arrivals, cancellations, preemption, swaps; always as if each request were alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import config
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.mesh import data_devices, make_mesh
from jaxrl_llm.sampler import Sampler, SamplingParams, prepare_for_sampling
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.sampler.replicas import Replicas
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.types import Prompt, StopReason

# With 4 query heads for a key head and pages of 8, rows may read common pages together (`sharing.same_bits`).
TINY = dataclasses.replace(config.TINY, num_heads=8)
OPTIONS = dict(slots=4, pages=40, page_size=8, max_context=96, prefill_chunk=16, prefill_rows=2)


@functools.cache
def params(seed=0):
    """TINY with embeddings large enough for distributions that are neither flat nor greedy."""
    tree = init_params(TINY, jax.random.key(seed))
    return {**tree, "embed": tree["embed"] * 6}


@functools.cache
def weights(seed=0):
    return prepare_for_sampling(params(seed), TINY)


def prompt(uid, length, seed=0):
    return Prompt(uid=uid, tokens=np.random.default_rng(seed).integers(3, 128, length).astype(np.int32))


def engine(seed=0, **options):
    made = Engine(TINY, **{**OPTIONS, **options})
    made.swap(weights(seed), version=seed)
    return made


def run(made, limit=1000):
    """Steps until nothing is left: {id: Completion}."""
    done = {}
    for _ in range(limit):
        if not made.busy:
            break
        done |= {event.id: event.completion for event in made.step() if event.completion is not None}
    assert not made.busy
    return done


def alone(prompt, sampling, index=0, history=((0, 0),), pages="keep"):
    """One completion sampled by itself; history: (tokens before which to swap, weights)."""
    made = engine(history[0][1], steps_per_dispatch=1)
    (target, *others) = made.submit(prompt, dataclasses.replace(sampling, n=index + 1))[::-1]
    for id in others:
        made.cancel(id)
    sampled, todo = 0, list(history[1:])
    while True:
        while todo and sampled >= todo[0][0]:
            made.swap(weights(todo[0][1]), version=todo[0][1], pages=pages)
            todo.pop(0)
        (event,) = made.step()
        sampled += len(event.tokens)
        if event.completion is not None:
            return event.completion


def equal(a, b):
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.versions, b.versions)
        and np.array_equal(a.kv_versions, b.kv_versions)
        and a.stop == b.stop
    )


# ------------------------------------------------------------------------------ anything may happen

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.just("submit alike"), st.integers(17, 40), st.integers(1, 2), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("swap"), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    min_size=4,
    max_size=14,
)


def drive(actions, pages, options):
    """Carries out actions; every completion equals the one of the same request by itself, under the same swaps."""
    made = engine(**options)
    requests, done, sampled, told = {}, {}, {}, {}
    swaps = []  # (tokens of each live request before the swap, weights)

    def step():
        for event in made.step():
            told.setdefault(event.id, []).extend(event.tokens)
            sampled[event.id] += len(event.tokens)
            if event.completion is not None:
                done[event.id] = event.completion

    for number, (name, *arguments) in enumerate(actions):
        if name.startswith("submit"):
            length, n, priority = arguments
            tokens = prompt("", length, seed=7 if name == "submit alike" else number).tokens
            sampling = SamplingParams(max_tokens=3 + (7 * number) % 29, n=n, seed=number)
            visit = Prompt(uid=f"visit {number}", tokens=tokens)
            for index, id in enumerate(made.submit(visit, sampling, priority=priority)):
                requests[id], sampled[id] = (visit, sampling, index, len(swaps)), 0
        elif name == "cancel" and requests:
            id = sorted(requests)[arguments[0] % len(requests)]
            completion = made.cancel(id)
            assert (completion is None) == (id in done)
            if completion is not None:
                assert completion.stop is StopReason.CANCELLED and completion.tokens.tolist() == told.get(
                    id, []
                )
                done[id] = completion
        elif name == "swap":
            made.swap(weights(arguments[0]), version=arguments[0], pages=pages)
            swaps.append((dict(sampled), arguments[0]))
        elif name == "step":
            for _ in range(arguments[0]):
                step()
    for _ in range(2000):
        if not made.busy:
            break
        step()
    assert done.keys() == requests.keys()
    assert made.lost_pages == 0
    made.release()  # raises if a page has leaked
    assert made.free_pages == made.pages

    for id, (visit, sampling, index, before) in requests.items():
        completion = done[id]
        assert completion.tokens.tolist() == told.get(id, [])
        start = swaps[before - 1][1] if before else 0
        history = [(0, start)]
        for counts, seed in swaps[before:]:
            if counts[id] == 0:
                history = [(0, seed)]
            elif counts[id] < len(completion.tokens):
                history.append((counts[id], seed))
        if not len(completion.tokens):
            continue
        expected = alone(visit, sampling, index, tuple(history), pages)
        n = len(completion.tokens)
        assert np.array_equal(completion.tokens, expected.tokens[:n])
        assert np.array_equal(completion.logprobs, expected.logprobs[:n])
        assert np.array_equal(completion.versions, expected.versions[:n])
        assert np.array_equal(completion.kv_versions, expected.kv_versions[:n])
        assert completion.stop in (expected.stop, StopReason.CANCELLED)
    return made.stats


TIGHT = dict(pages=14, steps_per_dispatch=3, prefill_calls=1)


@pytest.mark.parametrize("pages", ["keep", "recompute"])
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS)
def test_every_request_is_served_as_if_it_were_alone(pages, actions):
    drive(actions, pages, TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["keep", "recompute"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, tight=st.booleans())
def test_every_request_is_served_as_if_it_were_alone_many_times(pages, actions, tight):
    drive(actions, pages, TIGHT if tight else dict(steps_per_dispatch=5))


def test_a_busy_afternoon_preempts_reuses_and_swaps():
    """One fixed course of events in which everything happens."""
    actions = [
        ("submit alike", 33, 2, 0),
        ("step", 1),
        ("submit alike", 40, 2, 0),
        ("submit", 30, 3, 1),
        ("step", 2),
        ("swap", 1),
        ("submit alike", 38, 1, 2),
        ("step", 3),
        ("cancel", 3),
        ("swap", 2),
        ("step", 2),
    ]
    stats = drive(actions, "keep", {**TIGHT, "pages": 16})
    assert stats.preemptions > 0 and stats.reused_tokens > 0 and stats.swaps == 2 and stats.cancelled == 1
    assert 0 < stats.shared_reads < stats.dispatches


@pytest.mark.parametrize("calls", [None, 1])
def test_a_row_that_loses_its_pages_twice_gets_them_back(calls):
    """The second time others hold the beginning of its prompt, so that it could do with fewer pages than it had."""
    made = engine(pages=22, prefill_calls=calls)
    beginning, requests = prompt("", 32, seed=7).tokens, {}
    for number, (rest, most) in enumerate(((20, 30), (15, 38), (33, 32))):
        tokens = np.concatenate([beginning, prompt("", rest, seed=number).tokens])
        visit = Prompt(uid=f"visit {number}", tokens=tokens)
        sampling = SamplingParams(max_tokens=most, stop_ids=())
        (id,) = made.submit(visit, sampling)
        requests[id] = visit, sampling
    done = run(made)
    assert made.stats.preemptions == made.stats.resumptions == 2
    assert [equal(done[id], alone(*asked)) for id, asked in requests.items()] == [True] * 3


# -------------------------------------------------------------------------------------------- weights


def test_a_swap_returns_the_fingerprint_and_refuses_other_weights():
    made = Engine(TINY, **OPTIONS)
    with pytest.raises(InputError, match="no weights are served yet"):
        made.step()
    served = made.swap(params(0), version=3)
    assert served == fingerprint(params(0)) == made.fingerprint and made.version == 3
    with pytest.raises(InputError, match="damaged or mixed up"):
        made.swap(params(1), version=4, expect=served)
    assert made.version == 3 and made.fingerprint == served
    assert made.swap(params(1), version=4, expect=fingerprint(params(1))) == made.fingerprint
    with pytest.raises(InputError, match="params do not fit"):
        made.swap({"embed": params(0)["embed"]})
    with pytest.raises(InputError, match='pages must be "keep" or "recompute"'):
        made.swap(params(0), pages="drop")


def without(tree, path):
    """The tree less one leaf."""
    name, *rest = path
    return {k: without(v, rest) if k == name and rest else v for k, v in tree.items() if rest or k != name}


def test_d05_weights_that_lack_a_tensor_are_refused_and_the_version_stays():
    """Each of them, missing or half sent: nothing of the rest is taken over, and what was served goes on."""
    made = engine(0)
    served = jax.tree.map(np.asarray, made._weights)
    leaves = [
        ([entry.key for entry in path], leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params(1))[0]
    ]
    assert len(leaves) > 8
    for path, _ in leaves:
        lacking = without(params(1), path)
        assert len(jax.tree.leaves(lacking)) == len(leaves) - 1
        half = jax.tree_util.tree_map_with_path(
            lambda p, x, path=path: x[: len(x) // 2] if [e.key for e in p] == path else x, params(1)
        )
        for wrong in (lacking, half):
            with pytest.raises(InputError, match=f"params do not fit .*{path[-1]}.* is"):
                made.swap(wrong, version=1)
    assert made.version == 0 and made.stats.swaps == 0
    jax.tree.map(np.testing.assert_array_equal, made._weights, served)


def test_s07_found_prefixes_are_of_the_weights_that_are_served():
    sampling = SamplingParams(max_tokens=12)
    made = engine(0)
    made.submit(prompt("a", 40), sampling)
    run(made)
    made.submit(prompt("b", 40), sampling)
    run(made)
    assert made.stats.reused_tokens == 32  # whole chunks of the prefix, computed for the first visit
    made.swap(weights(1), version=1)
    (id,) = made.submit(prompt("b", 40), sampling)
    warm = run(made)[id]
    assert made.stats.reused_tokens == 32
    fresh = engine(1)
    (id,) = fresh.submit(prompt("b", 40), sampling)
    assert equal(warm, run(fresh)[id]) and (warm.kv_versions == 1).all()


def test_versions_of_tokens_and_of_their_keys():
    made = engine(0, steps_per_dispatch=4)
    (id,) = made.submit(prompt("a", 20), SamplingParams(max_tokens=12, stop_ids=()))
    made.step()
    made.swap(weights(1), version=1, pages="keep")
    made.step()
    made.swap(weights(2), version=2, pages="recompute")
    completion = run(made)[id]
    assert completion.versions.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert completion.kv_versions.tolist() == [0] * 8 + [2] * 4
    # After a recomputation the log-probs are those of the new weights over the whole history.
    sequence = np.concatenate([completion.prompt.tokens, completion.tokens])
    dense = np.asarray(token_logprobs(params(2), TINY, sequence[None]))[0, 20:]
    np.testing.assert_allclose(completion.logprobs[8:], dense[8:], atol=1e-4)
    assert np.abs(completion.logprobs[:8] - dense[:8]).max() > 1e-2


# ------------------------------------------------------------------------------------ per-request rules


class Letters:
    """A tokenizer whose token i is one letter, over 120 of the model's 128 ids."""

    vocab_size = 120

    def token_bytes(self, i):
        return bytes([97 + i % 26])

    def decode(self, ids, skip_special=True):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.slow
def test_requests_with_different_parameters_run_side_by_side():
    kinds = [
        SamplingParams(max_tokens=20, temperature=0.7, seed=1),
        SamplingParams(max_tokens=9, temperature=0.0, stop_ids=()),
        SamplingParams(max_tokens=20, top_k=5, top_p=0.9, seed=2),
        SamplingParams(max_tokens=20, stop=("e",), seed=3),
        SamplingParams(max_tokens=20, stop=("ab", "z"), min_tokens=6, seed=4),
        SamplingParams(max_tokens=20, suppress_ids=tuple(range(3, 64)), stop_ids=(70, 71), seed=5),
        SamplingParams(max_tokens=20, logit_bias=((9, 4.0), (10, -100.0)), seed=6),
        SamplingParams(max_tokens=20, top_logprobs=3, raw_logprobs=True, seed=7),
    ]
    made = engine(tokenizer=Letters(), pages=60)
    ids = [made.submit(prompt(f"{i}", 10 + i, seed=i), kind)[0] for i, kind in enumerate(kinds)]
    done = run(made)
    for i, (id, kind) in enumerate(zip(ids, kinds, strict=True)):
        by_itself = engine(tokenizer=Letters())
        (only,) = by_itself.submit(prompt(f"{i}", 10 + i, seed=i), kind)
        expected = run(by_itself)[only]
        assert equal(done[id], expected), kind
        assert done[id].text == expected.text
    assert "e" not in done[ids[3]].text
    assert not set(done[ids[5]].tokens.tolist()) & set(range(3, 64))
    assert done[ids[7]].top_ids.shape == (len(done[ids[7]].tokens), 3)


def test_logit_bias_is_added_before_the_temperature():
    sampling = SamplingParams(max_tokens=1, temperature=0.5, logit_bias={5: 1000.0})
    made = engine()
    (id,) = made.submit(prompt("a", 6), sampling)
    (event,) = made.step()
    assert event.tokens == [5] and event.logprobs == [0.0]
    sampler = Sampler(TINY, slots=4, page_size=8)
    biased = SamplingParams(max_tokens=1, temperature=0.5, n=4, logit_bias=((7, 1.5),), top_logprobs=128)
    plain = dataclasses.replace(biased, logit_bias=())
    a, b = (sampler.generate(params(), [prompt("a", 6)], s)[0] for s in (biased, plain))
    z = np.full(128, -np.inf)
    z[b.top_ids[0]] = b.top_logprobs[0]
    z[7] += 1.5 / 0.5
    z -= np.log(np.exp(z).sum())
    np.testing.assert_allclose(z[a.top_ids[0]], a.top_logprobs[0], atol=1e-4)


@pytest.mark.parametrize("bias", [((200, 1.0),), ((5, 2000.0),), ((5, float("nan")),), ((5,),), "abc"])
def test_bad_biases_are_refused(bias):
    with pytest.raises(InputError, match="logit_bias"):
        engine().submit(prompt("a", 3), SamplingParams(max_tokens=1, logit_bias=bias))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 50])
def test_logprobs_of_the_prompt(length):
    made = engine()
    sampling = SamplingParams(max_tokens=3, n=2, prompt_logprobs=True)
    made.submit(prompt("warm", length), dataclasses.replace(sampling, prompt_logprobs=False))
    ids = made.submit(prompt("a", length), sampling)
    done = run(made)
    dense = np.asarray(token_logprobs(params(), TINY, prompt("a", length).tokens[None]))[0]
    for id in ids:
        np.testing.assert_allclose(done[id].prompt_logprobs, dense, atol=1e-4)
        plain = alone(
            prompt("a", length), dataclasses.replace(sampling, prompt_logprobs=False), done[id].index
        )
        assert equal(done[id], plain)  # asking for them changes no draw


def dense_distribution(tokens):
    """Log-probs [P, V] of what comes in the place of each token after the first, by the learner's forward pass."""
    tokens = jnp.asarray(tokens)[None]
    x = forward(params(), TINY, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    logits = np.asarray(x[0, :-1] @ head_weight(params(), TINY), np.float64)
    return np.concatenate([np.zeros((1, 128)), logits - np.log(np.exp(logits).sum(-1, keepdims=True))])


def test_ranks_and_likeliest_tokens_of_the_prompt():
    made = engine()
    visit = prompt("a", 41)
    plain = SamplingParams(max_tokens=2, prompt_logprobs=True)
    ids = [made.submit(visit, dataclasses.replace(plain, prompt_top_logprobs=k))[0] for k in (0, 3, 128)]
    events = [event for _ in range(9) for event in made.step()]
    dense = dense_distribution(visit.tokens)
    own = dense[np.arange(41), visit.tokens]
    for id, K in zip(ids, (0, 3, 128), strict=True):
        first, *later = (event for event in events if event.id == id)
        scores = first.prompt_scores
        assert all(event.prompt_scores is None for event in later) or not later
        assert scores.logprobs[0] == scores.ranks[0] == 0
        np.testing.assert_allclose(scores.logprobs[1:], own[1:], atol=1e-4)
        np.testing.assert_array_equal(scores.ranks[1:], 1 + (dense > own[:, None] + 1e-6).sum(1)[1:])
        (done,) = (event.completion for event in events if event.id == id and event.completion is not None)
        np.testing.assert_array_equal(done.prompt_scores.logprobs, scores.logprobs)
        if not K:
            assert scores.top_ids is None and done.prompt_scores.top_logprobs is None
            continue
        assert done.prompt_top_ids.shape == (41, K)
        np.testing.assert_allclose(
            scores.top_logprobs[1:], np.sort(dense[1:], axis=1)[:, ::-1][:, :K], atol=1e-4
        )
        np.testing.assert_allclose(
            np.take_along_axis(dense, scores.top_ids, 1)[1:], scores.top_logprobs[1:], atol=1e-4
        )
    for bad in (dict(prompt_top_logprobs=2), dict(prompt_logprobs=True, prompt_top_logprobs=-1)):
        with pytest.raises(InputError, match="prompt_top_logprobs must be"):
            SamplingParams(max_tokens=2, **bad)
    with pytest.raises(InputError, match="more than the 128 tokens"):
        made.submit(visit, dataclasses.replace(plain, prompt_top_logprobs=129))


def test_scores_of_a_prompt_are_those_of_the_weights_that_began_the_row():
    made = engine(slots=2)
    sampling = SamplingParams(max_tokens=30, n=3, prompt_logprobs=True, stop_ids=())
    ids = made.submit(prompt("a", 20), sampling)  # one of them waits for a slot
    made.step()
    made.swap(weights(1), version=1, pages="keep")
    done = run(made)
    assert [done[id].versions[0] for id in ids] == [0, 0, 1]
    for id in ids:
        tree = params(int(done[id].versions[0]))
        dense = np.asarray(token_logprobs(tree, TINY, prompt("a", 20).tokens[None]))[0]
        np.testing.assert_allclose(done[id].prompt_logprobs, dense, atol=1e-4)


def test_prompts_that_differ_in_their_last_token_have_their_own_logprobs():
    made = engine()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
    ids = [made.submit([5, 6, 7, last], sampling)[0] for last in (8, 9)]
    done = run(made)
    for id, last in zip(ids, (8, 9), strict=True):
        dense = np.asarray(token_logprobs(params(), TINY, np.array([[5, 6, 7, last]])))[0]
        np.testing.assert_allclose(done[id].prompt_logprobs, dense, atol=1e-4)


# --------------------------------------------------------------------------------- scheduling, reuse


def test_a_long_prompt_does_not_hold_up_rows_that_decode():
    made = engine(prefill_calls=1, steps_per_dispatch=2)
    (first,) = made.submit(prompt("a", 5), SamplingParams(max_tokens=40, stop_ids=()))
    made.step()
    (long,) = made.submit(prompt("long", 80, seed=1), SamplingParams(max_tokens=4, stop_ids=()))
    events = [made.step() for _ in range(4)]
    # 79 tokens are five chunks of 16: the first row gets its tokens all the while.
    assert [[event.id for event in step] for step in events] == [[first]] * 4
    assert all(len(step[0].tokens) == 2 for step in events)
    assert {first, long} == {event.id for event in made.step()}
    assert equal(
        run(made)[long], alone(prompt("long", 80, seed=1), SamplingParams(max_tokens=4, stop_ids=()))
    )


def test_a_row_that_waits_for_anothers_prompt_does_not_hold_up_the_next():
    made = engine(prefill_calls=1, steps_per_dispatch=2)
    sampling = SamplingParams(max_tokens=30, stop_ids=())
    (first,) = made.submit(prompt("first", 5), sampling)
    made.step()
    long = prompt("long", 80, seed=1)
    twin = Prompt(uid="twin", tokens=np.append(long.tokens[:70], [5, 6]).astype(np.int32))
    other = prompt("other", 9, seed=2)
    ids = [made.submit(p, dataclasses.replace(sampling, max_tokens=6))[0] for p in (long, twin, other)]
    steps = []
    done = {}
    while made.busy:
        events = made.step()
        steps.append({event.id for event in events})
        done |= {event.id: event.completion for event in events if event.completion is not None}
    # The prompt of `long` takes five calls; `other` has its first tokens, and its last, before that.
    begins = {id: next(t for t, step in enumerate(steps) if id in step) for id in ids}
    assert begins[ids[2]] < begins[ids[0]] <= begins[ids[1]]
    for id, p in zip(ids, (long, twin, other), strict=True):
        assert equal(done[id], alone(p, dataclasses.replace(sampling, max_tokens=6)))
    assert equal(done[first], alone(prompt("first", 5), sampling)) and made.stats.reused_tokens == 64


def test_the_next_turn_of_a_conversation_finds_its_pages():
    sampling = SamplingParams(max_tokens=30, stop_ids=())
    for reuse in (False, True):
        made = engine(reuse_generated=reuse)
        (id,) = made.submit(prompt("turn 1", 20), sampling)
        first = run(made)[id]
        follow = np.concatenate([first.prompt.tokens, first.tokens, [5, 6, 7]]).astype(np.int32)
        (id,) = made.submit(Prompt(uid="turn 2", tokens=follow), SamplingParams(max_tokens=8, stop_ids=()))
        second = run(made)[id]
        assert made.stats.reused_tokens == (48 if reuse else 16)
        by_itself = alone(Prompt(uid="turn 2", tokens=follow), SamplingParams(max_tokens=8, stop_ids=()))
        if not reuse:
            assert equal(second, by_itself)
        sequence = np.concatenate([follow, second.tokens])
        dense = np.asarray(token_logprobs(params(), TINY, sequence[None]))[0, len(follow) :]
        np.testing.assert_allclose(second.logprobs, dense, atol=1e-4)


def test_a_page_that_nobody_gives_back_is_told():
    made = engine(pages=14)
    made.submit(prompt("a", 70), SamplingParams(max_tokens=4, stop_ids=()))
    made._allocator.allocate(2)
    assert made.lost_pages == 0  # not asked while rows run
    while made.busy:
        made.step()
    assert made.free_pages == made.pages and made.lost_pages == 2


def test_cancelling_frees_slots_and_pages_at_once():
    made = engine(pages=14)
    ids = made.submit(prompt("a", 30), SamplingParams(max_tokens=40, n=6, stop_ids=()))
    made.step()
    assert made.running > 0 and made.queued > 0 and made.free_pages < made.pages
    for id in ids:
        assert made.cancel(id).stop is StopReason.CANCELLED
    assert not made.busy and made.free_pages == made.pages and made.cancel(ids[0]) is None
    assert made.lost_pages == 0
    made.release()
    assert made.stats.cancelled == 6 and made.step() == []


def test_what_is_unfinished_is_told_as_it_was_however_late_it_is_read():
    made = engine(steps_per_dispatch=2)
    made.submit(prompt("a", 20), SamplingParams(max_tokens=9, n=3, stop_ids=()))
    made.submit(prompt("b", 20, seed=1), SamplingParams(max_tokens=9, n=3, stop_ids=(), raw_logprobs=True))
    made.step()
    at_once = {id: carried.so_far for id, carried in made.unfinished()}
    later = made.unfinished()
    made.step()
    made.swap(weights(1), version=1, pages="recompute")
    run(made)
    assert len(later) == 6 and sorted(len(c.tokens) for c in at_once.values()) == [0, 0, 2, 2, 2, 2]
    for id, carried in later:
        known, told = at_once[id], carried.so_far
        assert equal(told, known) and told.text is None and carried.begun == bool(len(known.tokens))
        assert (told.raw_logprobs is None) == (known.raw_logprobs is None)
        if known.raw_logprobs is not None:
            np.testing.assert_array_equal(told.raw_logprobs, known.raw_logprobs)
        assert carried.so_far is told  # made once


def test_what_can_never_run_is_refused_and_nothing_is_queued():
    made = engine(pages=6)
    for bad, message in (
        ([], "without a token"),
        ([1, 200], "outside the vocabulary"),
        (list(range(3, 100)), "context of 96 tokens"),
        (list(range(3, 43)), "5 usable pages of 8 tokens"),
        ("text", "list of token ids"),
    ):
        with pytest.raises(InputError, match=message):
            made.submit(bad, SamplingParams(max_tokens=30))
    with pytest.raises(InputError, match="sampling must be SamplingParams"):
        made.submit([5], {"max_tokens": 3})
    assert not made.busy


def test_broken_weights_end_rows_as_errors():
    made = Engine(TINY, **OPTIONS)
    made.swap({**params(), "final_norm": params()["final_norm"] * jnp.nan})
    ids = made.submit(prompt("a", 9), SamplingParams(max_tokens=4, n=2))
    done = run(made)
    assert [done[id].stop for id in ids] == [StopReason.ERROR] * 2
    made.release()


def test_times_of_a_request_are_in_order():
    made = engine()
    (id,) = made.submit(prompt("a", 9), SamplingParams(max_tokens=20, stop_ids=()))
    timings = run(made)[id].timings
    assert 0 <= timings["queued"] <= timings["first_token"] <= timings["queued"] + timings["sampled"]


# ----------------------------------------------------------------- replicas, and prompts computed apart


def visits(count=6):
    return [prompt(f"{i}", 5 + 7 * i, seed=i) for i in range(count)]


SAMPLING = SamplingParams(max_tokens=14, n=2, seed=3)


def one_engine():
    made = engine(pages=60)
    ids = [id for p in visits() for id in made.submit(p, SAMPLING)]
    done = run(made)
    return [done[id] for id in ids]


@pytest.mark.slow
def test_replicas_sample_what_one_engine_samples():
    expected = one_engine()
    made = Replicas(TINY, data_devices(make_mesh(data=3)), **OPTIONS)
    made.swap(params(), version=0)
    ids = [id for p in visits() for id in made.submit(p, SAMPLING)]
    done = run(made)
    assert all(equal(done[id], c) for id, c in zip(ids, expected, strict=True))
    assert all(e.stats.completions == 4 for e in made.engines) and made.stats.completions == 12
    places = {e._state.cache.k.sharding.device_set.pop() for e in made.engines}
    assert places == set(jax.devices()[:3])
    made.release()


def test_conversations_and_beginnings_stay_where_their_pages_are():
    made = Replicas(TINY, jax.devices()[:2], imbalance=6, **OPTIONS)
    made.swap(weights(), version=0)
    sampling = SamplingParams(max_tokens=4, stop_ids=())
    system = prompt("", 40).tokens

    def place(id):
        return made._ids[id][0]

    (a,) = made.submit(Prompt(uid="a", tokens=system), sampling, session="one")
    (b,) = made.submit(prompt("b", 20, seed=5), sampling, session="two")
    assert place(a) == 0 and place(b) == 1
    # Another prompt that begins like the first, and the next turn of a conversation that does not.
    (c,) = made.submit(Prompt(uid="c", tokens=np.append(system, [5, 6])), sampling)
    (d,) = made.submit(prompt("d", 9, seed=9), sampling, session="two")
    assert place(c) == 0 and place(d) == 1
    # Too much for one of them: the rest goes elsewhere.
    many = made.submit(Prompt(uid="e", tokens=system), dataclasses.replace(sampling, n=9))
    (f,) = made.submit(Prompt(uid="f", tokens=system), sampling)
    assert {place(id) for id in many} == {0} and place(f) == 1
    done = run(made)
    assert len(done) == 14 and made.engines[0].stats.reused_tokens >= 32
    assert made._load == [0, 0] and not made._ids


def test_replicas_cancel_swap_and_refuse_together():
    made = Replicas(TINY, jax.devices()[:2], **OPTIONS)
    with pytest.raises(InputError, match="no weights"):
        made.submit([5], SAMPLING)
        made.step()
    (first, *_) = made.submit(visits()[5], SAMPLING)
    made.swap(weights(0), version=0)
    made.step()
    assert made.cancel(first).stop is StopReason.CANCELLED and made.cancel(first) is None
    made.swap(weights(1), version=1)
    assert made.version == 1 and {e.version for e in made.engines} == {1}
    run(made)
    with pytest.raises(InputError, match="damaged or mixed up"):
        made.swap(params(0), version=2, expect="0" * 32)
    assert made.version == 1
    with pytest.raises(InputError, match="at least one device"):
        Replicas(TINY, [])


def test_replicas_swap_all_or_none(monkeypatch):
    made = Replicas(TINY, jax.devices()[:2], **OPTIONS)
    made.swap(weights(0), version=0)
    ids = [
        id
        for p in visits(2)
        for id in made.submit(p, dataclasses.replace(SAMPLING, stop_ids=(), max_tokens=40))
    ]
    made.step()
    served = [e._weights for e in made.engines]

    def unchanged():
        assert [e.version for e in made.engines] == [0, 0] and made.version == 0
        assert all(e._weights is w for e, w in zip(made.engines, served, strict=True))
        assert all(e.stats.swaps == 0 and e.running == 2 for e in made.engines)

    with pytest.raises(InputError, match="damaged or mixed up"):
        made.swap(params(1), version=1, expect="0" * 32)
    unchanged()
    with pytest.raises(InputError, match="do not fit the config"):
        made.swap({**params(1), "final_norm": np.ones(3)}, version=1)
    unchanged()
    with pytest.raises(InputError, match="pages must be"):
        made.swap(params(1), version=1, pages="drop")
    unchanged()
    # The second replica alone cannot take them.
    made.engines[1].begin()
    with pytest.raises(RuntimeError, match="between steps"):
        made.swap(params(1), version=1, pages="recompute")
    unchanged()
    made.engines[1].finish()

    def no_memory(*arguments, **more):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as changed, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        changed.setattr(made.engines[1], "stage", no_memory)
        made.swap(params(1), version=1)
    unchanged()
    print_ = made.swap(params(1), version=1, expect=fingerprint(params(1)))
    assert print_ == made.fingerprint and {e.version for e in made.engines} == {1}
    done = run(made)
    assert {int(done[id].versions[-1]) for id in ids} == {1}


def test_occupancy_of_replicas_is_that_of_their_slots():
    made = Replicas(TINY, jax.devices()[:2], **OPTIONS)
    made.swap(weights(0), version=0)
    sampling = SamplingParams(max_tokens=8, n=2, stop_ids=())
    for p in visits(2):
        made.submit(p, sampling)
    run(made)
    assert made.stats.occupancy == made.engines[0].stats.occupancy == 0.5


def test_prompts_may_be_computed_on_another_device():
    expected = one_engine()
    here, there = jax.devices()[:2]
    made = Engine(TINY, **{**OPTIONS, "pages": 60}, device=here, prefill_on=there)
    made.swap(params(), version=0)
    ids = [id for p in visits() for id in made.submit(p, SAMPLING)]
    done = run(made)
    assert all(equal(done[id], c) for id, c in zip(ids, expected, strict=True))
    assert made._state.cache.k.sharding.device_set == {here}
    assert made._prefill_cache.k.sharding.device_set == {there}
    made.release()


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["move", "recompute"])
def test_apart_or_not_with_few_pages_swaps_and_found_prefixes(preemption):
    outcomes = []
    here, there = jax.devices()[:2]
    for options in ({}, dict(device=here, prefill_on=there)):
        made = engine(pages=16, steps_per_dispatch=3, preemption=preemption, **options)
        sampling = SamplingParams(max_tokens=30, n=2, stop_ids=())
        alike = prompt("", 40).tokens
        ids = [id for i in (20, 33, 38) for id in made.submit(Prompt(uid=f"{i}", tokens=alike[:i]), sampling)]
        done = run(made)
        assert made.stats.preemptions > 0
        made.release()
        outcomes.append([done[id] for id in ids])
    for a, b in zip(*outcomes, strict=True):
        if preemption == "move":
            assert equal(a, b)
        else:
            assert len(a.tokens) == len(b.tokens) == 30


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InputError, match="reuse_generated"):
        Engine(TINY, **OPTIONS, reuse_generated=True, prefill_on=jax.devices()[1])
    with pytest.raises(InputError, match="device or mesh"):
        Engine(TINY, **OPTIONS, device=jax.devices()[0], mesh=make_mesh(data=2))
    with pytest.raises(ValueError, match="data axis only"):
        data_devices(make_mesh(data=2, tensor=2))


def test_over_generation_keeps_the_first_to_end():
    sampler = Sampler(TINY, slots=8, page_size=8, pages=64)
    sampling = SamplingParams(max_tokens=40, n=6, seed=1)
    whole = sampler.generate(params(), visits(3), sampling)
    kept = sampler.generate(params(), visits(3), sampling, keep=2)
    assert [c.prompt.uid for c in kept] == ["0", "0", "1", "1", "2", "2"]
    assert sampler.stats.cancelled > 0
    by_name = {(c.prompt.uid, c.index): c for c in whole}
    assert all(equal(c, by_name[c.prompt.uid, c.index]) for c in kept)
    for uid in "012":
        lengths = sorted(len(c.tokens) for c in whole if c.prompt.uid == uid)
        assert max(len(c.tokens) for c in kept if c.prompt.uid == uid) < lengths[-1]
    with pytest.raises(InputError, match=r"keep must be in \[1, n=6\]"):
        sampler.generate(params(), visits(1), sampling, keep=7)
