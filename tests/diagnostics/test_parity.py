"""The parity certificate: what it compares, when it passes, what it says."""

import dataclasses
import json
import types

import numpy as np
import pytest

from jaxrl_llm.diagnostics.parity import (
    ParityLimits,
    certify,
    probe_prompts,
    show_certificate,
    ulp_distance,
    ulp_histogram,
)
from jaxrl_llm.models.config import TINY
from jaxrl_llm.tokens.tiny import tiny_tokenizer

PARAMS = {"a": np.arange(6, dtype=np.float32), "b": {"c": np.ones((2, 2), np.float32)}}


def sampled(prompts):
    """Log-probs that are a function of token and position; 40 tokens."""
    out = []
    for prompt in prompts:
        tokens = (np.arange(40) * 7 + len(prompt.tokens)).astype(np.int32) % 128
        out.append(
            types.SimpleNamespace(
                prompt=prompt, tokens=tokens, logprobs=expected(tokens), support_ids=None, routing_ids=None
            )
        )
    return out


def expected(tokens):
    return (-0.1 - tokens / np.float32(50)).astype(np.float32)


def scored(off=0.0):
    """A learner that agrees with `sampled` up to `off` nats."""

    def score(params, batch):
        return expected(np.asarray(batch.tokens)) + np.float32(off)

    return score


def certificate(score=None, **more):
    probes = probe_prompts(tiny_tokenizer(), count=3, longest=20)
    more = {"params": PARAMS, "config": TINY, "temperature": 1.0, "rows_multiple": 4, **more}
    return certify(sampled, score or scored(), probes, **more)


def test_ulp_distance_counts_the_numbers_in_between():
    one = np.float32(1)
    a = np.array([1, -1, 0.0, -0.0, 1, -1e-45], np.float32)
    b = np.array([np.nextafter(one, one * 2), -1, -0.0, 1e-45, 2, 1e-45], np.float32)
    assert ulp_distance(a, b).tolist() == [1, 0, 0, 1, 2**23, 2]


def test_histogram_has_positions_by_ulp():
    ulp = [np.array([0] * 16 + [1] * 16 + [5]), np.array([0, 3, 20000])]
    assert ulp_histogram(ulp) == {
        "0-15": {"0": 17, "2-3": 1, "16384 or more": 1},
        "16-31": {"1": 16},
        "32-63": {"4-15": 1},
    }


def test_probes_are_pinned():
    first = probe_prompts(tiny_tokenizer(), count=8, longest=500)
    assert [len(p.tokens) for p in first] == [5, 9, 17, 24, 33, 40, 57, 64]
    assert first[0].tokens.tolist() == [ord(c) for c in "The c"] and first[3].uid == "parity/3"
    assert [len(p.tokens) for p in probe_prompts(tiny_tokenizer(), count=3, longest=7)] == [5, 7, 7]
    with pytest.raises(ValueError, match="between 1 and 8"):
        probe_prompts(tiny_tokenizer(), count=9, longest=7)


def test_a_learner_that_agrees_passes():
    found = certificate(exact=lambda params, completions: [c.logprobs for c in completions], version=7)
    assert found.passed and found.reasons == () and found.version == 7 and found.tokens == 120
    assert found.max_gap == found.mean_gap == found.exact_max_gap == found.exact_mean_gap == 0
    assert found.histogram == {"0-15": {"0": 48}, "16-31": {"0": 48}, "32-63": {"0": 24}}
    assert found.exact_histogram == found.histogram
    assert len(found.fingerprint) == 32 and found.fingerprint == found.served_fingerprint
    assert found.dtype == found.head_dtype == "float32" and found.mesh is None
    assert found.versions["python"] and found.versions["jax"] and found.versions["jaxlib"]
    assert found.backend == "cpu" and found.device
    data = found.as_data()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {field.name for field in dataclasses.fields(found)}
    assert "parity passed: 120 tokens" in show_certificate(found)


@pytest.mark.parametrize(
    ("off", "limits", "reason"),
    [
        (1e-3, None, "the largest difference is 0.001 nats, more than 0.0002"),
        (np.nan, None, "the largest difference is inf"),
        (1e-3, ParityLimits(mean_gap=1e-4), "the mean difference is 0.001 nats"),
        (1e-3, ParityLimits.of("bfloat16"), None),
        (1e-4, None, None),
        (1e-2, ParityLimits.of("bfloat16"), "the mean difference is 0.01 nats, more than 0.005"),
    ],
)
def test_limits(off, limits, reason):
    found = certificate(scored(off), limits=limits)
    assert found.passed == (reason is None)
    assert [r for r in found.reasons if reason and reason in r] == (
        [] if reason is None else [found.reasons[0]]
    )
    shown = show_certificate(found)
    assert ("FAILED" in shown) == (reason is not None) and "tokens by distance in ulp" in shown


def test_an_exact_score_must_be_exact():
    def nearly(params, completions):
        values = [c.logprobs.copy() for c in completions]
        values[1][5] = np.nextafter(values[1][5], np.float32(0))
        return values

    found = certificate(exact=nearly)
    assert not found.passed and found.max_gap == 0
    assert found.reasons[0].startswith("exact scoring differs on 1 of 120 tokens")
    assert found.exact_histogram["0-15"] == {"0": 47, "1": 1}
    assert "exact scoring, tokens by distance" in show_certificate(found)


def test_other_weights_do_not_pass_even_where_they_agree_on_the_probes():
    changed = {**PARAMS, "a": PARAMS["a"].copy()}
    changed["a"][3] = np.nextafter(changed["a"][3], np.float32(9))
    found = certificate(served=changed)
    assert not found.passed and found.fingerprint != found.served_fingerprint
    assert "serves other weights" in found.reasons[0]
