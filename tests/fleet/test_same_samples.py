"""With real engines: a fleet's samples are those of the learner's own process, bit for bit, whoever dies."""

import collections

import jax
import numpy as np
from fleet.standins import PATIENCE, Chaos, judge

from jaxrl_llm.fleet import Fleet, FleetStream
from jaxrl_llm.models.config import TINY
from jaxrl_llm.rollout.stream import Schedule, Stream
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.types import Prompt

SCHEDULE = Schedule(groups=2, samples=2, max_age=1, swap="drain")
SAMPLING = SamplingParams(max_tokens=12, n=2, seed=3, temperature=1.0)
STEPS = 4


class Source:
    def __init__(self):
        self.number = 0

    def next_batch(self, n):
        self.number += n
        return [
            Prompt(uid=f"p{i}", tokens=np.arange(2 + i % 3, dtype=np.int32) + i)
            for i in range(self.number - n, self.number)
        ]


def sampler():
    return Sampler(TINY, slots=4, page_size=8, max_context=32, steps_per_dispatch=2)


def batches(stream, params):
    trees = [jax.tree.map(lambda x: x * (1.0 + 0.05 * version), params) for version in range(STEPS)]  # noqa: B023
    return [
        (
            t.prompt.uid,
            t.group,
            t.tokens.tolist(),
            t.version.tolist(),
            t.logprob.tobytes(),
            t.kv_version.tolist(),
        )
        for version in range(STEPS)
        for t in stream.next_batch(trees[version], version)[0]
    ]


def fleet_batches(params, size, plan):
    transport, events = Chaos(plan), []
    transport.employ(sampler(), SAMPLING, -(-SCHEDULE.outstanding // size) * 2)
    fleet = Fleet(
        transport,
        size,
        samples=2,
        outstanding=SCHEDULE.outstanding,
        patience=PATIENCE,
        clock=transport.now,
        report=events.append,
    )
    found = batches(FleetStream(fleet, Source(), judge, SCHEDULE), params)
    return found, events


def test_a_fleet_samples_what_the_learners_process_would(tiny_params):
    here = sampler()
    local = batches(Stream(lambda: here.engine(8), Source(), judge, SAMPLING, SCHEDULE), tiny_params)
    assert len({logprobs for *_, logprobs, _ in local}) == len(local)  # they differ from each other
    alone, _ = fleet_batches(tiny_params, 1, [])
    assert alone == local
    # One dies while its samples are half done, one while it has weights alone; a third is sent other weights.
    disturbed, events = fleet_batches(
        tiny_params, 2, [("turn", 2, "kill"), ("turn", 9, "kill"), ("load", 3, "flip"), ("work", 2, "delay")]
    )
    assert disturbed == local
    kinds = collections.Counter(event.kind for event in events)
    assert kinds["died"] == 2 and kinds["refused_weights"] == 1
    assert sum(event.reissued for event in events) >= 2
