"""Completions become trajectories: what the reward sees, what is counted, what is dropped."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_llm.recipes import remax
from jaxrl_llm.rewards.registry import GRADERS
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.checks import reward_parts
from jaxrl_llm.rollout.collect import collect, graded_text, refilled, rollout_metrics, sampled_text
from jaxrl_llm.rollout.filters import fill_groups, informative_groups, is_informative, scored_only
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.rollout.task import Item, item_of, make_task, prompt_of
from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt, StopReason, Trajectory

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_ids[0]
ADDITION = make_task("addition")


def plain_tokenizer(*special):
    """Bytes, and these control tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    return Tokenizer(backend.to_str())


def prompt(index=0, visit=0):
    item = ADDITION.split("train", 0).item(index)
    return prompt_of(ADDITION, item, TOKENIZER, uid=f"addition/train/0/{index}#{visit}")


def completion(text, prompt, index=0, stop=StopReason.EOS, version=3):
    tokens = TOKENIZER.encode(text) + ([EOS] if stop is StopReason.EOS else [])
    n = len(tokens)
    return Completion(
        prompt=prompt,
        index=index,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, n + 1, dtype=np.float32),
        stop=stop,
        versions=np.full(n, version, np.int32),
        kv_versions=np.full(n, version - 1, np.int32),
        timings={"decode": 0.5},
    )


def trajectory(group=0, reward: float | None = 0.0, uid=None, tokens=(1, 5, 6), sampled=2, **more):
    n = len(tokens)
    mask = np.arange(n) >= n - sampled
    fields = {
        "prompt": Prompt(uid=uid or f"p{group}", tokens=np.array(tokens[: n - sampled], np.int32)),
        "group": group,
        "tokens": np.array(tokens, np.int32),
        "mask": mask,
        "logprob": np.where(mask, -0.5, 0).astype(np.float32),
        "version": np.where(mask, 0, -1).astype(np.int32),
        "kv_version": np.where(mask, 0, -1).astype(np.int32),
        "reward": reward,
    }
    return Trajectory(**{**fields, **more})


def test_trajectories_carry_the_provenance_of_every_token():
    first = prompt(0)
    answer = item_of(first).answer
    right, wrong = completion(f" {answer}", first), completion(" 7\n", first, 1, StopReason.STOP_STRING)
    (a, b), metrics = collect([right, wrong], ADDITION, TOKENIZER, temperature=0.7)
    P = len(first.tokens)
    assert a.tokens.tolist() == first.tokens.tolist() + right.tokens.tolist()
    assert a.mask.tolist() == [False] * P + [True] * len(right.tokens)
    assert a.completion.tolist() == right.tokens.tolist()
    assert a.logprob.tolist() == [0.0] * P + right.logprobs.tolist() and a.logprob.dtype == np.float32
    assert a.version.tolist() == [-1] * P + [3] * len(right.tokens)
    assert a.kv_version.tolist() == [-1] * P + [2] * len(right.tokens)
    assert (a.reward, b.reward) == (1.0, 0.0) and a.rewards == {"format": 1.0, "lenient": 1.0}
    assert b.reason and a.reason == "" and a.temperature == 0.7 and a.timings == {"decode": 0.5}
    assert a.group == b.group == 0 and b.stop is StopReason.STOP_STRING
    assert metrics["reward/accuracy"] == 0.5


def test_groups_are_visits_of_prompts():
    visits = [prompt(0), prompt(1), prompt(0, visit=1)]
    completions = [completion(" 1", p, i) for i in range(2) for p in visits]  # not in order of prompts
    trajectories, metrics = collect(completions, ADDITION, TOKENIZER)
    assert [t.group for t in trajectories] == [0, 1, 2, 0, 1, 2]
    assert metrics["rollout/groups"] == 3


def test_the_reward_sees_only_sampled_text_without_special_tokens():
    seen = []

    def spy(text, gold, question):
        seen.append(text)
        return Score(0.0)

    task = dataclasses.replace(ADDITION, grader=ADDITION.grader._replace(score=spy))
    collect([completion(" 5", prompt())], task, TOKENIZER)
    cut = dataclasses.replace(completion(" 5###", prompt()), text=" 5", stop=StopReason.STOP_STRING)
    collect([cut], task, TOKENIZER)  # a stop string is not part of the answer
    assert seen == [" 5", " 5"]


BOXED = dataclasses.replace(ADDITION, grader=GRADERS["boxed"])


@pytest.mark.parametrize(
    "ending,prefix,text,expected",
    [
        ("<think>\n", "", r"so \boxed{4}", 0.0),  # cut off inside the thought
        ("<think>", "", r"so \boxed{5}</think> \boxed{4}", 1.0),
        ("<think>\n\n</think>\n\n", "", r"\boxed{4}", 1.0),  # opened and closed: no thinking asked for
        ("[THINK] ", "", r"\boxed{4}", 0.0),
        ("<think>Let me", "<think>Let me", r" see: \boxed{4}", 0.0),  # begun by the task
        ("<think>Let me", "", r" see: \boxed{4}", 1.0),  # text of a question
        ("Use <think> tags. answer:", "", r"\boxed{4}", 1.0),  # talked about, not opened
        ("<think>\n", "other", r"\boxed{4}", 0.0),
        ("x", "", r"<think>\boxed{4}", 0.0),
        ("", "", r"\boxed{4}", 1.0),
    ],
)
def test_r04_an_answer_inside_thinking_that_the_prompt_opened_earns_nothing(ending, prefix, text, expected):
    tokenizer = plain_tokenizer()
    payload = Item(messages=({"role": "user", "content": "2 + 2"},), answer="4", prefix=prefix).payload()
    ids = np.asarray(tokenizer.encode(f"Some <thinking> question. {ending}"), np.int32)
    asked = Prompt(uid="p", tokens=ids, task="addition", payload=payload)
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    n = len(tokens)
    answer = Completion(
        prompt=asked,
        index=0,
        tokens=tokens,
        logprobs=np.zeros(n, np.float32),
        stop=StopReason.LENGTH,
        versions=np.zeros(n, np.int32),
        kv_versions=np.zeros(n, np.int32),
    )
    (t,), _ = collect([answer], BOXED, tokenizer)
    assert t.reward == expected


def test_r04_thinking_tags_that_are_control_tokens_are_seen_by_the_reward():
    """They are not in the text for people, which ends before the stop string."""
    tokenizer = plain_tokenizer("[THINK]", "[/THINK]", "<eot>")

    def graded(text, shown=None):
        ids = tokenizer.encode(text, allow_special=True)
        n = len(ids)
        answer = Completion(
            prompt=prompt(),
            index=0,
            tokens=np.asarray(ids, np.int32),
            logprobs=np.zeros(n, np.float32),
            stop=StopReason.LENGTH if shown is None else StopReason.STOP_STRING,
            versions=np.zeros(n, np.int32),
            kv_versions=np.zeros(n, np.int32),
            text=shown,
        )
        return graded_text(answer, tokenizer)

    assert tokenizer.decode(tokenizer.encode("[THINK]a<eot>", allow_special=True)) == "a"
    assert graded("[THINK]a<eot>") == "[THINK]a"
    assert graded("[THINK]a[/THINK]b<eot>") == "[THINK]a[/THINK]b"
    assert graded("[THINK]a[/THINK]b###c", shown="ab") == "[THINK]a[/THINK]b"
    assert graded("b###c<eot>", shown="b") == "b"


def test_several_tasks():
    copy = make_task("copy")
    other = prompt_of(copy, copy.split("train", 0).item(0), TOKENIZER, uid="c")
    completions = [completion(f" {item_of(p).answer}", p) for p in (prompt(), other)]
    trajectories, _ = collect(completions, {"addition": ADDITION, "copy": copy}, TOKENIZER)
    assert [t.reward for t in trajectories] == [1.0, 1.0]


def test_r12_errors_are_none_with_a_reason_and_counted():
    def flaky(text, gold, question):
        if "1" in text:
            raise RuntimeError("verifier crashed")
        return Score(None, reason="timeout") if "2" in text else Score(1.0)

    task = dataclasses.replace(ADDITION, grader=ADDITION.grader._replace(score=flaky))
    failed = [
        dataclasses.replace(completion(" 3", prompt()), stop=stop)
        for stop in (StopReason.ERROR, StopReason.CANCELLED)
    ]
    trajectories, metrics = collect(
        [*(completion(f" {i}", prompt()) for i in (1, 2, 3)), *failed], task, TOKENIZER
    )
    assert [t.reward for t in trajectories] == [None, None, 1.0, None, None]
    assert "RuntimeError: verifier crashed" in trajectories[0].reason and trajectories[1].reason == "timeout"
    assert metrics["reward/errors"] == 4 and metrics["reward/no_signal"] == 0.8
    assert metrics["reward/mean"] == metrics["reward/accuracy"] == 1.0  # a failure of the verifier is no 0


@pytest.mark.parametrize(
    "given,reward,part",
    [
        (Score(0.5, {"form": 0.5}), 0.5, 0.5),
        (Score(True, {"form": np.float32(1)}), 1.0, 1.0),
        (Score(np.float64(0.25), {"form": None}), 0.25, None),
        (Score(float("nan"), {"form": float("nan")}), None, None),
        (Score(float("-inf"), {"form": float("inf")}), None, None),
        (Score(10**400, {"form": "1"}), None, None),
        (Score("1"), None, None),
        (1.0, None, None),
        (None, None, None),
    ],
)
def test_r12_what_is_no_finite_number_is_no_reward(given, reward, part):
    task = dataclasses.replace(ADDITION, grader=ADDITION.grader._replace(score=lambda *_: given))
    (t,), metrics = collect([completion(" 3", prompt())], task, TOKENIZER, parts=("form",))
    assert t.reward == reward and t.rewards["form"] == part
    assert metrics["reward/errors"] == float(reward is None) and np.isfinite(list(metrics.values())).all()
    assert bool(t.reason) == (reward is None)


def test_r16_tool_output_is_not_the_models_answer():
    """assistant, assistant, TOOL('42'), pad: the reward sees two tokens and sits on the second."""
    ids = np.array([*TOKENIZER.encode("qab42"), 0], np.int32)
    mask = np.array([False, True, True, False, False, False])
    assert sampled_text(ids, mask, TOKENIZER) == "ab"
    split = np.array([False, True, False, True, False, False])
    assert sampled_text(TOKENIZER.encode("q4x2yz") * np.ones(6, int), split, TOKENIZER) == "4\n2"  # never 42
    t = trajectory(reward=1.0, tokens=ids[:5], mask=mask[:5], logprob=np.zeros(5, np.float32))
    t = dataclasses.replace(t, version=np.where(t.mask, 0, -1), kv_version=np.where(t.mask, 0, -1))
    batch = pack([t], learner_version=0, pad_to_multiple=8)
    assert np.asarray(batch.reward)[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert np.asarray(batch.mask)[0].tolist() == [False, True, True] + [False] * 5


def test_metrics_of_a_batch():
    batch = [
        trajectory(0, 1.0),
        trajectory(0, 0.0, stop=StopReason.LENGTH, rewards={"format": 1.0}),
        trajectory(1, 0.0, tokens=(1, 5, 6, 7), sampled=3, rewards={"format": 0.0}),
        trajectory(1, None, reason="timeout", stop=StopReason.ERROR),
    ]
    metrics = rollout_metrics(batch)
    expected = {
        "reward/mean": 1 / 3,
        "reward/accuracy": 1 / 3,
        "reward/std": np.std([1, 0, 0]),
        "reward/errors": 1,
        "reward/no_signal": 0.25,
        "reward/part_format": 0.5,
        "completion/length_mean": 2.25,
        "completion/length_max": 3,
        "completion/truncated_fraction": 0.25,
        "completion/stop_eos": 0.5,
        "completion/stop_length": 0.25,
        "completion/stop_error": 0.25,
        "completion/stop_stop_string": 0,
        "completion/stop_env": 0,
        "completion/stop_cancelled": 0,
        "rollout/tokens": 9,
        "rollout/trajectories": 4,
        "rollout/groups": 2,
        "rollout/no_signal_groups": 1,
    }
    assert metrics == pytest.approx(expected)
    assert rollout_metrics([])["reward/mean"] == 0.0


def test_informative_groups():
    groups = {
        0: [1.0, 0.0],
        1: [1.0, 1.0],
        2: [None, 1.0],
        3: [0.3] * 8,
        4: [None, 0.0, 1.0],
        5: [0.0],
        6: [None],
    }
    batch = [trajectory(g, r) for g, rewards in groups.items() for r in rewards]
    kept, dropped = informative_groups(batch)
    assert {t.group for t in kept} == {0, 4} and {t.group for t in dropped} == {1, 2, 3, 5, 6}
    assert len(kept) + len(dropped) == len(batch) and len([t for t in kept if t.group == 4]) == 3
    assert not is_informative([])
    kept, dropped = scored_only(batch)
    assert all(t.reward is not None for t in kept) and len(dropped) == 3


def rounds_of(rewards_of_round):
    """A sampler whose n-th round gives groups with the rewards of `rewards_of_round(n)`."""
    asked = []

    def sample(missing):
        n = len(asked)
        asked.append(missing)
        return [
            trajectory(g, r, uid=f"round{n}-{g}")
            for g, rewards in enumerate(rewards_of_round(n))
            for r in rewards
        ]

    return sample, asked


def test_d07_equal_rewards_for_ever_end_after_the_allowed_rounds():
    sample, asked = rounds_of(lambda n: [[0.0, 0.0]] * 4)
    filled = fill_groups(sample, groups=4, max_rounds=10)
    assert asked == [4] * 10 and filled.trajectories == [] and filled.groups == 0
    assert (filled.rounds, filled.sampled_groups, filled.dropped_groups) == (10, 40, 40)
    assert len(filled.uids) == 40  # consumed prompts, for the resumed run
    with pytest.raises(ValueError, match="Skip the train step"):
        pack(filled.trajectories, learner_version=0)


def test_d07_one_useful_group_in_four_fills_the_batch():
    sample, asked = rounds_of(lambda n: [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    filled = fill_groups(sample, groups=4, max_rounds=10)
    assert asked == [4, 3, 2, 1] and filled.groups == 4 and filled.dropped_groups == 12
    assert [t.group for t in filled.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [t.prompt.uid for t in filled.trajectories[::2]] == [f"round{n}-2" for n in range(4)]
    assert filled.metrics["rollout/groups_dropped"] == 12


def test_d07_a_partial_batch_has_its_real_count():
    sample, _ = rounds_of(lambda n: [[0.0, 1.0]] if n == 1 else [[0.0, 0.0]])
    filled = fill_groups(sample, groups=4, max_rounds=3)
    assert (filled.groups, filled.rounds) == (1, 3) and len(filled.trajectories) == 2
    batch = pack(filled.trajectories, learner_version=0)
    assert batch.shape[0] == 2 and int(np.asarray(batch.mask).sum()) == 4


def test_d07_surplus_is_counted():
    sample, _ = rounds_of(lambda n: [[0.0, 1.0]] * 6)
    filled = fill_groups(sample, groups=4, max_rounds=3)
    assert (filled.groups, filled.surplus_groups, filled.rounds) == (4, 2, 1)
    with pytest.raises(ValueError, match="at least 1"):
        fill_groups(sample, groups=0, max_rounds=1)


def test_a_part_that_a_score_lacks_is_none_and_left_out_of_the_means():
    first = prompt(0)
    task = dataclasses.replace(
        ADDITION,
        grader=ADDITION.grader._replace(
            score=lambda text, gold, question: Score(1.0, {"style": 0.5} if "7" in text else {"format": None})
        ),
    )
    trajectories, metrics = collect(
        [completion(" 7", first), completion(" 8", first, 1)], task, TOKENIZER, parts=("style", "format")
    )
    assert [t.rewards for t in trajectories] == [
        {"style": 0.5, "format": None},
        {"style": None, "format": None},
    ]
    assert metrics["reward/part_style"] == 0.5 and metrics["reward/part_format"] == 0.0
    batch = pack(trajectories, learner_version=0, parts=("style",))
    last = np.asarray(batch.rewards["style"])[np.asarray(batch.reward) > 0]
    assert last[0] == 0.5 and np.isnan(last[1])


def test_greedy_answers_are_the_baseline_of_their_prompt():
    a, b = prompt(0), prompt(1)
    right = item_of(a).answer
    greedy = [completion(f" {right}", a, 2), completion("", b, 2, StopReason.ERROR)]
    sampled = [completion(" 1", p, i) for p in (a, b) for i in range(2)]
    trajectories, metrics = collect(sampled, ADDITION, TOKENIZER, baselines=greedy)
    assert [t.baseline for t in trajectories] == [1.0, 1.0, None, None]
    assert metrics["reward/baseline"] == 1.0 and metrics["reward/baseline_errors"] == 1.0
    assert metrics["rollout/baseline_tokens"] == len(greedy[0].tokens)
    assert metrics["rollout/trajectories"] == 4
    plain, metrics = collect(sampled, ADDITION, TOKENIZER)
    assert plain[0].baseline is None and "reward/baseline" not in metrics

    batch = pack(trajectories, learner_version=0, fill=("baseline_reward",))
    batch, _ = jax.jit(remax().prepare)(batch, {})
    signal = np.asarray(batch.signal & batch.mask).any(axis=1)
    assert signal.tolist() == [True, True, False, False]  # no baseline: the group teaches nothing
    assert np.all(np.asarray(batch.advantage)[2:] == 0)
    assert np.all(np.asarray(batch.advantage)[:2][np.asarray(batch.mask)[:2]] == -1.0)


def test_lists_and_roles_reach_the_trajectory():
    role = prompt(0)
    role = dataclasses.replace(role, payload={**role.payload, "agent": 1})
    assert item_of(role).agent == 1 and item_of(prompt(0)).agent == 0 and "agent" not in prompt(0).payload
    one = completion(" 7", role)
    N, P = len(one.tokens), len(role.tokens)
    ids = np.arange(2 * N, dtype=np.int32).reshape(N, 2)
    one = dataclasses.replace(one, top_ids=ids, top_logprobs=-ids.astype(np.float32))
    (t,), _ = collect([one], ADDITION, TOKENIZER)
    assert t.agent == 1 and t.top_ids.shape == t.top_logprob.shape == (P + N, 2)
    assert np.array_equal(t.top_ids[P:], ids) and not t.top_ids[:P].any()
    assert np.array_equal(t.top_logprob[P:], -ids) and t.top_logprob.dtype == np.float32


def test_rewards_of_a_task_are_found_by_scoring():
    assert reward_parts(ADDITION) == ("reward", "format", "lenient")


# --------------------------------------------------------------------------- dynamic sampling


def in_rounds(*rounds):
    """sample(missing) that gives the rewards of one round after the other, two a group, and what was asked for."""
    asked = []

    def sample(missing):
        rewards = rounds[len(asked)]
        asked.append(missing)
        ours = [
            trajectory(group=i, reward=r, uid=f"r{len(asked)}p{i}", sampled=1 + (r == 1.0))
            for i, pair in enumerate(rewards)
            for r in pair
        ]
        return ours, rollout_metrics(ours)

    return sample, asked


def test_groups_that_say_nothing_are_replaced():
    sample, asked = in_rounds([(0, 1), (0, 0), (1, 1)], [(0, 0), (1, 0)], [(0, 1), (1, 0)])
    kept, metrics = refilled(sample, groups=3, max_rounds=3)
    assert asked == [3, 2, 1]
    assert [t.group for t in kept] == [0, 0, 1, 1, 2, 2]
    assert [t.prompt.uid for t in kept[::2]] == ["r1p0", "r2p1", "r3p0"]
    # Of all seven groups: 6 of 14 rewards are 1. Of the kept ones it would be a half, whatever the policy can do.
    assert metrics["reward/mean"] == pytest.approx(6 / 14)
    assert (metrics["rollout/groups"], metrics["rollout/trajectories"]) == (7, 14)
    assert metrics["rollout/rounds"] == 3
    assert (metrics["rollout/groups_dropped"], metrics["rollout/groups_surplus"]) == (3, 1)
    assert metrics["rollout/dropped_reward"] == pytest.approx(2 / 6)
    assert metrics["rollout/dropped_length"] == pytest.approx((4 * 1 + 2 * 2) / 6)


def test_refilling_ends_with_what_there_is():
    sample, asked = in_rounds([(0, 1), (0, 0)], [(0, 0)])
    kept, metrics = refilled(sample, groups=2, max_rounds=2)
    assert asked == [2, 1] and len(kept) == 2 and metrics["rollout/groups_dropped"] == 2


def test_nothing_to_learn_is_a_batch_that_trains_nothing():
    sample, _ = in_rounds([(1, 1), (0, None)], [(0, 0), (None, None)])
    kept, metrics = refilled(sample, groups=2, max_rounds=2)
    assert len(kept) == 4 and not any(t.mask.any() for t in kept)
    assert metrics["reward/mean"] == pytest.approx(2 / 5) and metrics["reward/errors"] == 3
    assert not np.asarray(pack(kept, learner_version=0).mask).any()


def test_greedy_baselines_of_several_rounds():
    ours = [trajectory(group=g, reward=g, uid=f"p{g}") for g in range(3)]
    extra = (
        {"reward/baseline": 0.5, "rollout/baseline_tokens": 4.0},
        {"reward/baseline": 1.0, "rollout/baseline_tokens": 3.0},
    )
    rounds = iter(
        [(ours[:2], rollout_metrics(ours[:2]) | extra[0]), (ours[2:], rollout_metrics(ours[2:]) | extra[1])]
    )
    _, metrics = refilled(lambda missing: next(rounds), groups=2, max_rounds=2)
    assert metrics["reward/baseline"] == pytest.approx((2 * 0.5 + 1 * 1.0) / 3)
    assert metrics["rollout/baseline_tokens"] == 7
