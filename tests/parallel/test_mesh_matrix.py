"""One device = eight, however they are split: meshes x {Llama, Qwen3, Qwen3-MoE} x {update, sampling}.

In f32 an update has the same loss, metrics and gradients to 1e-5, and the pinned prompts and seeds give the same tokens.
A token may differ only where it was drawn at the edge between two: `near_tie` shows this of the first one that does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY, TINY_MOE
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import param_shardings
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.sampler.sampling import RowSampling, draw, row_key
from jaxrl_llm.types import Prompt, TokenBatch

MODELS = {
    "llama": TINY,
    "qwen2": dataclasses.replace(TINY, family="qwen2", attention_bias=True),
    "qwen3": dataclasses.replace(TINY, family="qwen3", qk_norm=True, head_dim=32, tie_embeddings=False),
    "moe": TINY_MOE,
}
MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor8": {"tensor": 8},
    "expert8": {"expert": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data2-fsdp2-expert2": {"data": 2, "fsdp": 2, "expert": 2},
    "fsdp2-expert2-tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
# Each axis alone and mixtures of them; `mesh.expert` is refused where there are no experts.
CELLS = [
    *(("llama", mesh) for mesh in ("data8", "fsdp8", "tensor8", "data2-fsdp2-tensor2")),
    ("qwen2", "data2-fsdp2-tensor2"),
    *(("qwen3", mesh) for mesh in ("tensor8", "data2-fsdp2-tensor2")),
    *(("moe", mesh) for mesh in MESHES if mesh not in ("data8", "fsdp8", "tensor8")),
]


def cells(fast=()):
    """The matrix as parameters of a test; each cell compiles its programs anew, so only a few are not slow."""
    params = [pytest.param(*cell, marks=() if cell in fast else pytest.mark.slow) for cell in CELLS]
    return pytest.mark.parametrize(("family", "mesh"), params)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time():
    """What is split and how is decided before the optimisations that this leaves out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def params(family):
    """Random parameters, those that begin as ones included, on the host."""
    leaves, tree = jax.tree.flatten(init_params(MODELS[family], jax.random.key(0)))
    rng = np.random.default_rng(1)
    leaves = [
        np.asarray(x) + 0.3 * rng.normal(size=x.shape).astype(np.float32) * (x.ndim < 3) for x in leaves
    ]
    return jax.tree.unflatten(tree, leaves)


# --------------------------------------------------------------------------------------- the update


def batch(family, rows=13, width=16):
    """Rows of very different lengths, one without any trained token; 13 divides by nothing."""
    rng = np.random.default_rng(0)
    lengths = np.array([16, 4, 5, 16, 6, 3, 9, 16, 4, 4, 12, 7, 16])
    columns = np.arange(width)
    mask = (columns >= 2) & (columns < lengths[:, None])
    mask[5] = False
    more = {}
    config = MODELS[family]
    if config.num_experts:  # of half of the tokens the sampler has recorded the experts
        chosen = rng.permuted(
            np.broadcast_to(
                np.arange(config.num_experts), (rows, width, config.num_layers, config.num_experts)
            ),
            axis=-1,
        )[..., : config.experts_per_token]
        more["routing_ids"] = np.where(columns[:, None, None] % 2 == 0, -1, chosen).astype(np.int16)
    return TokenBatch.from_rows(
        rng.integers(3, 128, (rows, width)),
        mask,
        group=np.arange(rows) // 4,
        reward=rng.integers(0, 2, rows).astype(np.float32),
        logprob_behavior=np.where(mask, -4.5, 0).astype(np.float32),
        lengths=lengths,
        **more,
    )


@functools.cache
def updated(family, mesh=None):
    """(what gradient descent takes off the parameters, metrics); Adam would hide a gradient too large by a factor."""
    on = None if mesh is None else make_mesh(**MESHES[mesh])
    config, objective, optimizer = (
        MODELS[family],
        recipes.grpo(),
        optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(1.0)),
    )
    state = init_state(
        jax.tree.map(jnp.array, params(family)),
        optimizer,
        objective,
        key=jax.random.key(1),
        config=config,
        mesh=on,
    )
    prepared, objective_state = make_prepare(objective, on)(batch(family), state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(objective, config, optimizer, on, remat=False)
    state, metrics = step(state, prepared)
    taken = jax.tree.map(lambda old, new: old - np.asarray(new), params(family), state.params)
    return taken, {name: float(mean.value) for name, mean in metrics.items()}


@cells()
def test_an_update_is_that_of_one_device(family, mesh):
    (expected_taken, expected), (taken, metrics) = updated(family), updated(family, mesh)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        if name != "expert_exchange":  # what a mesh adds
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert expected["grad_norm"] > 0.3  # so that clipping acts
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_taken))
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * largest)
    jax.tree.map(close, taken, expected_taken)
    if family == "moe":
        # Each token goes to the other ranks as f32, with 2 experts and gates, and comes back as f32; in 2 layers.
        sizes, width = MESHES[mesh], MODELS[family].hidden_size
        moved = 2 * (sizes.get("expert", 1) - 1) * 16 * 16 * (4 * width + 2 * 8 + 4 * width)
        assert metrics["expert_exchange"] == moved * sizes.get("tensor", 1)


# ----------------------------------------------------------------------------------------- sampling

SAMPLING = SamplingParams(max_tokens=10, n=2, seed=3)
NOISE = 1e-4  # of logits in other orders of addition, and more


@functools.cache
def sampled(family, mesh=None):
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid=f"p{n}", tokens=rng.integers(3, 128, n).astype(np.int32)) for n in (1, 5, 17, 30)]
    config, tree = MODELS[family], params(family)
    if mesh is not None:
        tree = jax.device_put(tree, param_shardings(config, make_mesh(**MESHES[mesh])))
    sampler = Sampler(config, slots=8, page_size=8, pages=64)
    return sampler.generate(tree, prompts, SAMPLING)


def reached(logits, completion, place):
    """The tokens that logits no further than NOISE from these give at a place of a completion."""
    rng, copies = np.random.default_rng(0), 512
    moved = logits + rng.uniform(-NOISE, NOISE, (copies, len(logits)))
    key = row_key(SAMPLING.seed, completion.prompt.uid, completion.index)
    position = len(completion.prompt.tokens) + place
    drawn = draw(
        jnp.asarray(moved, jnp.float32),
        jnp.tile(key, (copies, 1)),
        jnp.full(copies, position, jnp.int32),
        RowSampling.uniform(copies, temperature=SAMPLING.temperature),
        truncate=False,
    )
    return set(np.asarray(drawn.token).tolist())


def near_tie(family, one, other):
    """Whether the first token that differs was drawn so close to an edge that rounding decides."""
    length = min(len(one.tokens), len(other.tokens))
    differ = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
    if not len(differ):
        return False  # one ends earlier with equal tokens
    place = int(differ[0])
    tokens = jnp.asarray(np.concatenate([one.prompt.tokens, one.tokens[:place]]))[None]
    hidden = forward(
        params(family), MODELS[family], tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)
    )
    logits = np.asarray(hidden[0, -1] @ head_weight(params(family), MODELS[family]), np.float64)
    return {int(one.tokens[place]), int(other.tokens[place])} <= reached(logits, one, place)


@cells(fast=[("moe", "fsdp2-expert2-tensor2")])
def test_the_sampled_tokens_are_those_of_one_device(family, mesh):
    expected, found = sampled(family), sampled(family, mesh)
    assert sum(len(c.tokens) for c in expected) > 40
    for one, other in zip(expected, found, strict=True):
        if not np.array_equal(one.tokens, other.tokens):
            assert near_tie(family, one, other), (one.prompt.uid, one.index, one.tokens, other.tokens)
            continue
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-5)
        if one.routing_ids is not None:
            np.testing.assert_array_equal(other.routing_ids, one.routing_ids)


def test_only_what_rounding_decides_is_a_near_tie():
    """At the uniform of a draw, between two tokens whose edge lies there, and one that is far from it."""
    completion = sampled("moe")[0]
    key = row_key(SAMPLING.seed, completion.prompt.uid, completion.index)
    position = len(completion.prompt.tokens)
    folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    uniform = float(jax.random.uniform(folded, (2,), jnp.float32)[1])
    logits = np.full(128, -30.0)
    logits[7], logits[9] = np.log(uniform), np.log1p(-uniform)
    assert reached(logits, completion, 0) == {7, 9}
    logits[7] += 0.1
    assert reached(logits, completion, 0) == {7}
