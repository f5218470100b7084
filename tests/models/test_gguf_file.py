"""GGUF: a tiny model written with the public writer, permuted as converters do, and read back."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY, RopeScaling
from jaxrl_llm.models.decoder import rope_frequencies
from jaxrl_llm.models.formats import gguf_file
from jaxrl_llm.models.formats.export import hf_tensors
from jaxrl_llm.models.formats.gguf_file import llama3_scaling_of_factors, unpermute_rotary
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _permute(rows, heads):
    """What converters do to q and k of Llama models (written from the definition, one row at a time)."""
    per_head = rows.reshape(heads, -1, rows.shape[-1])
    half = per_head.shape[1] // 2
    order = [i for pair in zip(range(half), range(half, 2 * half), strict=True) for i in pair]
    return per_head[:, order].reshape(rows.shape)


def _gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write_gguf(
    path, config, params, kind="F32", *, extra=(), drop=(), edit_metadata=None, architecture="llama"
):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if edit_metadata is not None:
        edit_metadata(writer)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, value in hf_tensors(params, config):
        value = np.asarray(value, np.float32)
        if "q_proj" in name or "k_proj" in name:
            value = _permute(value, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if _gguf_name(name) in drop:
            continue
        if value.ndim == 1:  # converters keep norms in f32
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(value))
        else:
            stored = gguf.quants.quantize(np.ascontiguousarray(value), quantisation)
            writer.add_tensor(_gguf_name(name), stored, raw_dtype=quantisation)
    for name, value in extra:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_n24_row_order_by_hand():
    rows = np.arange(8)[:, None]
    stored = rows[[0, 4, 1, 5, 2, 6, 3, 7]]
    np.testing.assert_array_equal(_permute(rows, 1), stored)
    np.testing.assert_array_equal(unpermute_rotary(stored, 1), rows)
    np.testing.assert_array_equal(unpermute_rotary(stored, 1), stored[[0, 2, 4, 6, 1, 3, 5, 7]])


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("F32", 0.0), ("F16", 5e-3), ("BF16", 5e-2), ("Q8_0", 0.3), ("Q4_1", 3.0)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (2, 1)])
def test_n24_round_trip_gives_the_same_logits(tmp_path, cache, logits, kind, tolerance, heads, kv_heads):
    config = dataclasses.replace(
        TINY, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, tie_embeddings=kv_heads != 1
    )
    params = init_params(config, jax.random.key(3))
    model = load_model(write_gguf(tmp_path / "m.gguf", config, params, kind), cache_dir=cache)
    for name in (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "tie_embeddings",
        "rms_norm_eps",
        "rope_theta",
    ):
        assert getattr(model.config, name) == getattr(config, name)
    # Quantisation works within a row, so every weight is known exactly, whatever the order of the rows.
    quantisation = gguf.GGMLQuantizationType[kind]
    for (name, found), (_, value) in zip(
        hf_tensors(model.params, model.config), hf_tensors(params, config), strict=True
    ):
        if value.ndim == 2:
            stored = gguf.quants.quantize(np.ascontiguousarray(value), quantisation)
            value = gguf.quants.dequantize(stored, quantisation)
        np.testing.assert_array_equal(found, value, err_msg=name)
    tokens = np.random.default_rng(0).integers(3, 128, (2, 24))
    expected = logits(params, config, tokens)
    found, scale = logits(model.params, model.config, tokens), np.std(expected)
    np.testing.assert_allclose(found / scale, expected / scale, atol=tolerance, rtol=0)


def test_n24_a_bias_that_the_family_has_not_is_left_over(tmp_path, cache):
    path = write_gguf(
        tmp_path / "m.gguf",
        TINY,
        init_params(TINY, jax.random.key(0)),
        extra=[("blk.0.attn_q.bias", np.zeros(64, np.float32))],
        drop=["blk.1.ffn_up.weight"],
    )
    with pytest.raises(InputError, match=r"blk\.0\.attn_q\.bias") as caught:
        load_model(path, cache_dir=cache)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert not list(cache.glob("gguf/*"))  # nothing half-made stays


def test_other_architectures_are_refused_by_name(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", TINY, init_params(TINY, jax.random.key(0)), architecture="qwen2")
    with pytest.raises(
        InputError, match="architecture 'qwen2' is not supported in GGUF files. Supported: llama"
    ):
        load_model(path, cache_dir=cache)
    path = write_gguf(
        tmp_path / "moe.gguf",
        TINY,
        init_params(TINY, jax.random.key(0)),
        edit_metadata=lambda w: w.add_expert_count(8),
    )
    with pytest.raises(InputError, match="mixture of experts"):
        load_model(path, cache_dir=cache)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.05, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(tmp_path, cache, part):
    path = write_gguf(tmp_path / "m.gguf", TINY, init_params(TINY, jax.random.key(0)))
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(InputError, match=r"m\.gguf"):
        load_model(path, cache_dir=cache)


def test_other_files_named_gguf_are_refused(tmp_path, cache):
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(InputError, match="not a GGUF file"):
        load_model(tmp_path / "m.gguf", cache_dir=cache)


def _count_conversions(monkeypatch):
    calls = []
    convert = gguf_file.convert_gguf
    monkeypatch.setattr(gguf_file, "convert_gguf", lambda *a: calls.append(a) or convert(*a))
    return calls


def test_dequantised_once_and_found_again_by_content(tmp_path, cache, monkeypatch):
    calls = _count_conversions(monkeypatch)
    path = write_gguf(tmp_path / "m.gguf", TINY, init_params(TINY, jax.random.key(0)), "Q8_0")
    first = load_model(path, cache_dir=cache)
    path.rename(tmp_path / "renamed.gguf")
    second = load_model(tmp_path / "renamed.gguf", cache_dir=cache)
    assert len(calls) == 1 and first.digest == second.digest
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first.params, second.params)
    write_gguf(tmp_path / "renamed.gguf", TINY, init_params(TINY, jax.random.key(9)), "Q8_0")
    assert load_model(tmp_path / "renamed.gguf", cache_dir=cache).digest != first.digest and len(calls) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "seal"])
def test_a_damaged_cache_is_built_again(tmp_path, cache, monkeypatch, caplog, damage):
    calls = _count_conversions(monkeypatch)
    path = write_gguf(tmp_path / "m.gguf", TINY, init_params(TINY, jax.random.key(0)))
    first = load_model(path, cache_dir=cache)
    (weights,) = cache.glob("gguf/*/model.safetensors")
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-1] ^= 1  # one bit of one weight
        weights.write_bytes(data)
    elif damage == "truncate":
        weights.write_bytes(data[:-8])
    elif damage == "delete":
        (weights.parent / "config.json").unlink()
    else:
        (weights.parent / "digests.json").write_text("{")
    again = load_model(path, cache_dir=cache)
    assert len(calls) == 2 and "converting" in caplog.text
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first.params, again.params)
    assert load_model(path, cache_dir=cache).digest == first.digest and len(calls) == 2
    assert len(list(cache.glob("gguf/*"))) == 1 and not list(cache.glob("gguf/.*"))


def test_a_folder_with_one_gguf_file_is_a_model(tmp_path, cache):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "m.gguf", TINY, init_params(TINY, jax.random.key(0)))
    assert load_model(folder, cache_dir=cache).config.num_layers == 2
    write_gguf(folder / "n.gguf", TINY, init_params(TINY, jax.random.key(0)))
    with pytest.raises(InputError, match=r"several GGUF files.*m\.gguf, n\.gguf"):
        load_model(folder, cache_dir=cache)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=8.0, original_max_positions=300),
    ],
)
def test_llama3_scaling_is_recovered_from_its_divisors(scaling):
    config = dataclasses.replace(TINY, head_dim=64, rope_theta=500_000.0)
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    factors = np.asarray(rope_frequencies(config) / rope_frequencies(scaled), np.float32)
    found = llama3_scaling_of_factors(factors, config.rope_theta, None)
    recovered = np.asarray(rope_frequencies(dataclasses.replace(config, rope_scaling=found)))
    np.testing.assert_allclose(recovered, rope_frequencies(scaled), rtol=2e-3)
    if scaling.original_max_positions == 8192:
        assert found == scaling


def test_n24_scaled_rotary_positions_survive(tmp_path, cache, logits):
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    config = dataclasses.replace(TINY, rope_scaling=scaling, rope_theta=500_000.0, head_dim=32)
    params = init_params(config, jax.random.key(5))
    plain = dataclasses.replace(config, rope_scaling=None)
    factors = np.asarray(rope_frequencies(plain) / rope_frequencies(config), np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, params, extra=[("rope_freqs.weight", factors)])
    model = load_model(path, cache_dir=cache)
    assert model.config.rope_scaling == scaling
    tokens = np.random.default_rng(0).integers(3, 128, (1, 24))
    np.testing.assert_array_equal(
        logits(model.params, model.config, tokens), logits(params, model.config, tokens)
    )


def test_other_rope_divisors_are_refused():
    with pytest.raises(InputError, match="not of the llama3 kind"):
        llama3_scaling_of_factors(np.asarray([1, 3, 2, 8, 1, 5, 2, 8], np.float32), 10_000.0, None)
