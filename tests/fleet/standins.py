"""Stand-ins for a fleet's tests: an engine whose samples are a pure function, and a transport that does harm."""

import dataclasses
import hashlib
import random

import numpy as np

from jaxrl_llm.fleet import Fleet, FleetStream, Patience, Worker
from jaxrl_llm.fleet.messages import Answer, Gone, Held, Load, Ready, Work
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.collect import trajectory_of
from jaxrl_llm.rollout.stream import Schedule
from jaxrl_llm.sampler.base import Completion, SamplingParams
from jaxrl_llm.sampler.requests import Event
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.types import Prompt, StopReason

SAMPLES = 2
SAMPLING = SamplingParams(max_tokens=8, n=SAMPLES)


def weights(version):
    """Two leaves that differ in every version."""
    return {"a": np.arange(64, dtype=np.float32) + version, "b": {"c": np.full((3, 5), version, np.int32)}}


def drawn(uid, index, print_):
    """The tokens of a sample: of its prompt, its index and the weights, as those of an engine are."""
    digest = hashlib.blake2b(f"{uid}/{index}/{print_}".encode()).digest()
    return np.frombuffer(digest[1 : 1 + 2 + digest[0] % 6], np.uint8).astype(np.int32)


class ToyEngine:
    """As many steps as a sample has tokens."""

    def __init__(self):
        self.rows, self.next, self.print = {}, 0, None

    def swap(self, params, *, version, expect):
        assert not self.rows, "weights were swapped under a group"
        self.version, self.print = version, fingerprint(params)
        assert self.print == expect
        return self.print

    def submit(self, prompt, sampling):
        ids = []
        for index in range(sampling.n):
            tokens = drawn(prompt.uid, index, self.print)
            self.rows[self.next] = [len(tokens), prompt, index, tokens]
            ids.append(self.next)
            self.next += 1
        return ids

    def step(self):
        events = []
        for id, row in list(self.rows.items()):
            row[0] -= 1
            if row[0] <= 0:
                del self.rows[id]
                _, prompt, index, tokens = row
                stamps = np.full(len(tokens), self.version, np.int32)
                done = Completion(
                    prompt=prompt,
                    index=index,
                    tokens=tokens,
                    logprobs=-tokens.astype(np.float32),
                    stop=StopReason.EOS,
                    versions=stamps,
                    kv_versions=stamps,
                )
                events.append(Event(id, [], [], None, None, None, done))
        return events


class ToySampler:
    def engine(self, rows):
        return ToyEngine()


class Source:
    def __init__(self):
        self.number = 0

    def next_batch(self, n):
        numbers = range(self.number, self.number + n)
        self.number += n
        return [Prompt(uid=f"p{i}", tokens=np.array([1, 2, i])) for i in numbers]


def judge(completions, group):
    return [trajectory_of(c, Score(1.0), group=group, temperature=1.0) for c in completions]


def damaged(package, how, chance):
    """A copy with one leaf cut short, one bit flipped, one leaf missing, or the list of leaves changed."""
    leaves = {name: leaf.copy() for name, leaf in package.leaves.items()}
    records = dict(package.records)
    name = chance.choice(sorted(leaves))
    if how == "truncate":
        leaves[name] = leaves[name][: chance.randrange(len(leaves[name]))]
    elif how == "flip":
        leaves[name][chance.randrange(len(leaves[name]))] ^= 1 << chance.randrange(8)
    elif how == "miss":
        del leaves[name]
    else:
        del records[name]
    return dataclasses.replace(package, leaves=leaves, records=records)


class Chaos:
    """A transport that does harm where `plan` says: (which occasion, which harm) of each kind of occasion.

    Occasions are counted over the life of the transport: "turn" (one for every receive), "load", "work", "reply".
    """

    HARM = {
        "turn": ("kill", "hang", "reorder"),
        "load": ("truncate", "flip", "miss", "relist", "lose", "double", "delay"),
        "work": ("lose", "double", "delay"),
        "held": ("lose", "double", "delay"),
        "answer": ("lose", "double", "delay", "forge"),
    }

    def __init__(self, plan=(), seed=0):
        self.plan = {(kind, number): harm for kind, number, harm in plan}
        self.counts = dict.fromkeys(self.HARM, 0)
        self.chance = random.Random(seed)
        self.workers, self.hung, self.stopped = {}, {}, set()
        self.later = []  # (turn, callable)
        self.replies = []
        self.done = []  # (harm, kind) that was really done
        self.clock = 0.0
        self.started = []

    def now(self):
        return self.clock

    def harm(self, kind):
        number = self.counts[kind]
        self.counts[kind] += 1
        return self.plan.get((kind, number))

    def employ(self, *arguments):
        self.arguments = arguments

    def start(self, worker):
        assert worker not in self.started
        self.started.append(worker)
        self.workers[worker] = Worker(*self.arguments)
        self.say(worker, Ready())

    def stop(self, worker):
        self.workers.pop(worker, None)
        self.hung.pop(worker, None)
        self.stopped.add(worker)

    def forget(self, before):
        pass

    def close(self):
        self.workers.clear()

    def send(self, worker, request):
        kind = {Load: "load", Work: "work"}.get(type(request))
        harm = self.harm(kind) if kind and worker in self.workers else None
        if harm:
            self.done.append((harm, kind, worker))
        if harm == "lose":
            return
        if harm in ("truncate", "flip", "miss", "relist"):
            request = dataclasses.replace(request, package=damaged(request.package, harm, self.chance))
        if harm == "delay":
            self.later.append((self.counts["turn"] + 3, lambda: self.arrive(worker, request)))
            return
        self.arrive(worker, request)
        if harm == "double":  # at once, while it is worked on, or after it has been done
            turn = self.counts["turn"] + self.chance.choice((0, 3, 60))
            self.later.append((turn, lambda: self.arrive(worker, request)))

    def arrive(self, worker, request):
        if worker in self.workers:
            for reply in self.workers[worker].receive(request):
                self.say(worker, reply)

    def say(self, worker, reply):
        kind = {Answer: "answer", Held: "held"}.get(type(reply))
        harm = self.harm(kind) if kind else None
        if harm:
            self.done.append((harm, kind, worker))
        if harm == "lose":
            return
        if harm == "forge":
            wrong = [dataclasses.replace(c, versions=c.versions - 1) for c in reply.completions]
            reply = dataclasses.replace(reply, completions=wrong)
        if harm in ("delay", "double"):
            # An answer is so late that its worker has been given up when it comes, half of the times.
            turn = self.counts["turn"] + (self.chance.choice((2, 400)) if kind == "answer" else 3)
            self.later.append((turn, lambda: self.replies.append((worker, reply))))
        if harm != "delay":
            self.replies.append((worker, reply))

    def receive(self, timeout):
        self.clock += 0.25
        harm, turn = self.harm("turn"), self.counts["turn"]
        live = sorted(w for w in self.workers if w not in self.hung)
        if harm in ("kill", "hang") and live:
            worker = self.chance.choice(live)
            self.done.append((harm, "turn", worker))
            if harm == "kill":
                del self.workers[worker]
                self.replies.append((worker, Gone("killed by the test")))
            else:
                self.hung[worker] = True
        for worker, inner in list(self.workers.items()):
            if worker not in self.hung:
                self.say(worker, Ready())
                if timeout and inner.busy:
                    for reply in inner.step():
                        self.say(worker, reply)
        for entry in [entry for entry in self.later if entry[0] <= turn]:
            self.later.remove(entry)
            entry[1]()
        replies, self.replies = self.replies, []
        if harm == "reorder":
            self.chance.shuffle(replies)
        return replies


PATIENCE = Patience(
    start=20.0, silence=5.0, weights=6.0, first_answer=15.0, answer=15.0, slow=50.0, attempts=60, losses=60
)


def make_stream(
    transport,
    *,
    size=3,
    groups=3,
    max_age=2,
    max_drops=0,
    patience=PATIENCE,
    report=None,
    judge=judge,
    source=None,
):
    schedule = Schedule(groups=groups, samples=SAMPLES, max_age=max_age, max_drops=max_drops, swap="drain")
    transport.employ(ToySampler(), SAMPLING, -(-schedule.outstanding // size) * SAMPLES)
    fleet = Fleet(
        transport,
        size,
        samples=SAMPLES,
        outstanding=schedule.outstanding,
        patience=patience,
        clock=transport.now,
        report=report,
    )
    return fleet, FleetStream(fleet, source or Source(), judge, schedule)


def plain(trajectories):
    return [
        (t.prompt.uid, t.group, t.tokens.tolist(), t.version[t.mask].tolist(), t.logprob.tolist())
        for t in trajectories
    ]
