"""Evaluation: intervals, the split of format and skill, and the whole way through the real sampler."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.data.source import PromptSource
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.ops.logprobs import policy_output
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.collect import collect
from jaxrl_llm.rollout.evaluate import evaluate, summary, wilson_interval
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.rollout.task import item_of, make_task
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.sampler.base import Completion, SamplerStats
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.types import StopReason

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    "right,n,low,high",
    [
        (0, 10, 0.0, 0.27753),  # z^2 / (n + z^2)
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (1, 1, 0.20654, 1.0),
        (90, 128, 0.61899, 0.77542),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(right, n, low, high):
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=1e-5)


def test_format_is_split_from_skill():
    def score(value, form, lenient):
        return Score(value, {"format": form, "lenient": lenient}, "r")

    scores = [score(1.0, 1, 1), score(0.0, 1, 0), score(0.0, 0, 1), score(0.0, 0, 0), score(None, 1, 1)]
    figures = summary(scores, "e/")
    assert figures["e/accuracy"] == 0.25 and figures["e/format_rate"] == 0.5
    assert figures["e/accuracy_given_format"] == 0.5 and figures["e/lenient_accuracy"] == 0.5
    assert figures["e/reward_errors"] == 1
    assert (figures["e/accuracy_low"], figures["e/accuracy_high"]) == wilson_interval(1, 4)
    assert summary([], "")["accuracy"] == 0.0
    assert "format_rate" not in summary([Score(1.0)], "")


class Scripted:
    """A sampler that answers by a rule instead of a model."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def generate(self, params, prompts, sampling, *, version=0, on_progress=None):
        self.calls.append((sampling, [p.uid for p in prompts]))
        out = []
        for i, prompt in enumerate(prompts):
            tokens = np.array(TOKENIZER.encode(self.answer(item_of(prompt), sampling)), np.int32)
            n = len(tokens)
            zeros = np.zeros(n, np.int32)
            out.append(
                Completion(
                    prompt=prompt, index=0, tokens=tokens, logprobs=np.zeros(n, np.float32),
                    stop=StopReason.LENGTH if i % 2 else StopReason.EOS, versions=zeros, kv_versions=zeros,
                )
            )  # fmt: skip
            if on_progress is not None:
                on_progress(SamplerStats(completions=i + 1))
        return out


def test_evaluation_of_a_scripted_policy():
    task = make_task("addition")

    def answer(item, sampling):
        if sampling.greedy:
            return f" {item.answer}\n"
        return f" The sum is {item.answer}" if int(item.answer) % 2 else " 0\n"

    sampler, progress = Scripted(answer), []
    figures = evaluate(
        sampler, None, task, TOKENIZER, n=40, seed=5, on_progress=lambda *a: progress.append(a)
    )
    key = "eval/addition/"
    assert (
        figures[f"{key}greedy_accuracy"]
        == figures[f"{key}greedy_format_rate"]
        == figures[f"{key}format_rate"]
        == 1
    )
    assert figures[f"{key}greedy_accuracy_high"] == 1 and 0.9 < figures[f"{key}greedy_accuracy_low"] < 1
    assert figures[f"{key}sampled_accuracy"] == 0 and 0 < figures[f"{key}sampled_lenient_accuracy"] < 1
    assert figures[f"{key}sampled_format_rate"] == 1 - figures[f"{key}sampled_lenient_accuracy"]
    assert figures[f"{key}items"] == 40 and 0 < figures[f"{key}constant_baseline"] < 0.2
    assert figures[f"{key}greedy_truncated_fraction"] == 0.5
    assert all(isinstance(v, float) for v in figures.values())
    assert progress == [(i, 80) for i in range(1, 81)]

    (greedy, uids), (sampled, again) = sampler.calls
    assert (
        greedy.temperature == 0
        and sampled.temperature == 1
        and greedy.stop == ("\n",)
        and greedy.max_tokens == 8
    )
    assert uids == again and len(set(uids)) == 40
    evaluate(sampler, None, task, TOKENIZER, n=40, seed=5, sampled=False)
    assert len(sampler.calls) == 3 and sampler.calls[2] == (greedy, uids)  # the same questions every time

    train = {p.payload["key"] for p in PromptSource(task, TOKENIZER, seed=5).next_batch(300)}
    items = [task.split("eval", 5).item(i).key for i in range(100)]
    assert not train & set(items)


def test_sampling_settings_are_kept_but_for_n_and_truncation():
    sampler = Scripted(lambda item, sampling: "x")
    sampling = SamplingParams(max_tokens=5, n=8, temperature=0.7, top_k=3, stop=("!",), seed=9)
    evaluate(sampler, None, make_task("addition"), TOKENIZER, sampling, n=2)
    (greedy, _), (sampled, _) = sampler.calls
    assert sampled == dataclasses.replace(sampling, n=1)
    assert greedy == dataclasses.replace(sampling, n=1, temperature=0.0, top_k=0)


def test_long_prompts_are_left_out_and_counted(tmp_path):
    rows = ['{"prompt": "%s", "answer": "1"}' % ("a" * n) for n in (5, 200, 6, 300)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    (tmp_path / "t.jsonl").write_text('{"prompt": "t", "answer": "1"}')
    task = make_task(f"jsonl:{tmp_path / 't.jsonl'}", eval_path=str(tmp_path / "d.jsonl"))
    sampler = Scripted(lambda item, sampling: "1")
    figures = evaluate(sampler, None, task, TOKENIZER, n=10, max_prompt_tokens=50)
    assert figures["eval/jsonl:t.jsonl/items"] == 2 and figures["eval/jsonl:t.jsonl/prompts_skipped"] == 2
    assert figures["eval/jsonl:t.jsonl/constant_baseline"] == 1.0
    with pytest.raises(InputError, match="none of 4 held-out prompts fits into 3 tokens"):
        evaluate(sampler, None, task, TOKENIZER, n=10, max_prompt_tokens=3)
    with pytest.raises(InputError, match="at least 1"):
        evaluate(sampler, None, task, TOKENIZER, n=0)


@pytest.mark.slow
def test_from_prompts_to_a_batch_through_the_real_sampler(tiny_params):
    """Source, sampler, collect, pack: the learner finds the sampler's log-probs at the same places."""
    task = make_task("addition")
    sampler = Sampler(TINY, slots=8, tokenizer=TOKENIZER)
    prompts = PromptSource(task, TOKENIZER, seed=1).next_batch(3)
    sampling = SamplingParams(max_tokens=6, n=4, temperature=0.9, stop=task.stop, seed=0, top_logprobs=4)
    completions = sampler.generate(tiny_params, prompts, sampling, version=3)
    trajectories, metrics = collect(completions, task, TOKENIZER, temperature=0.9)
    assert [t.group for t in trajectories] == [0] * 4 + [1] * 4 + [2] * 4
    assert metrics["rollout/tokens"] == sum(len(c.tokens) for c in completions)
    for t in trajectories:
        if t.stop is StopReason.EOS:
            assert t.completion[-1] in TINY.eos_ids  # the end token is part of what is trained
    for row_tokens in (None, 128):
        layout = {"learner_version": 3, "pad_to_multiple": 64, "row_tokens": row_tokens}
        batch = pack(trajectories, **layout, fill=("topk_logprob_behavior",))
        mask = np.asarray(batch.mask)
        assert set(np.asarray(batch.version)[mask]) == {3}
        output = policy_output(tiny_params, TINY, batch, topk=True)
        for current, behavior in (
            (output.logprob, batch.logprob_behavior),
            (output.topk_logprob, batch.topk_logprob_behavior),  # of the lists that the sampler made
        ):
            np.testing.assert_allclose(np.asarray(current)[mask], np.asarray(behavior)[mask], atol=1e-4)
    figures = evaluate(sampler, tiny_params, task, TOKENIZER, n=8, version=3)
    again = evaluate(sampler, tiny_params, task, TOKENIZER, n=8, version=3)
    assert figures == again and figures["eval/addition/greedy_accuracy_high"] < 1
