"""The `jaxrl` command: exit codes, messages, what goes to which stream."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxrl_llm.train as loop
from jaxrl_llm import cli
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler
from jaxrl_llm.snapshots.store import SnapshotStore

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"


@pytest.fixture
def jaxrl(capsys):
    """jaxrl(*arguments) -> (exit code, standard output, standard error), in this process."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
def nothing_starts(monkeypatch):
    """Sampling and learning fail the test: bad input must be found before."""

    def forbidden(*args, **more):
        raise AssertionError("something was started")

    monkeypatch.setattr(Sampler, "generate", forbidden)
    monkeypatch.setattr(loop.Run, "learn", forbidden)


@pytest.fixture
def refused(jaxrl, nothing_starts, tmp_path):
    """refused(parts, *arguments): exit code 2, one message with these parts on standard error, no traceback.

    `train` gets a new run folder, which must be usable again afterwards.
    """

    def check(parts, *arguments, run=True):
        folder = tmp_path / "run"
        more = ("--run", folder) if arguments[0] == "train" and run else ()
        code, out, err = jaxrl(*arguments, *more)
        assert code == 2, err
        assert err.startswith("jaxrl: ") and err.count("jaxrl: ") == 1
        assert "Traceback" not in out + err
        for part in parts:
            assert part in err, err
        assert not (folder / "config.yaml").exists()
        return err

    return check


# --------------------------------------------------------------------------------------- help


def test_a_data_file_that_is_not_there_is_told_at_once(tmp_path):
    code = (
        "import sys\nfrom jaxrl_llm.cli import main\n"
        "try: main(['sft', sys.argv[1], *sys.argv[2:]])\nexcept SystemExit as end: code = end.code\n"
        "assert 'grain' not in sys.modules\nraise SystemExit(code)"
    )
    config = tmp_path / "c.yaml"
    config.write_text("steps: 1")
    for more, message in (
        ([], "data.path: give the JSONL file to train on"),
        (["--set", "data.path=nowhere.jsonl"], "data file nowhere.jsonl does not exist"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, str(config), *more], capture_output=True, text=True
        )
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from jaxrl_llm.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain', 'plotly', 'tokenizers', 'pydantic',\n"
        "         'safetensors', 'jinja2', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("train", "sft", "eval", "sample", "simulate", "plan", "report", "convert", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "command", ["train", "sft", "eval", "sample", "parity", "simulate", "plan", "report", "convert", "bench"]
)
def test_help_of_every_command(jaxrl, command):
    code, out, _ = jaxrl(command, "--help")
    assert code == 0
    assert f"jaxrl {command}" in out


@pytest.mark.parametrize("arguments", [(), ("trian",), ("train",), ("train", TINY_YAML, "--stpes", "3")])
def test_wrong_usage(jaxrl, arguments):
    code, _, err = jaxrl(*arguments)
    assert code == 2
    assert "Traceback" not in err and err


# ------------------------------------------------------------------------------- configs, refused


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optimizer: {learning_rte: 1e-6}", ["c.yaml", "optimizer.learning_rte", "optimizer.learning_rate"]),
        ("learning_rate: 1e-6", ["learning_rate", "optimizer.learning_rate"]),
        ("steps: ten", ["steps", "'ten'", "integer"]),
        ("optimizer: {learning_rate: [1]}", ["optimizer.learning_rate", "[1]", "number"]),
        ("rollout: {top_p: 1.5}", ["rollout.top_p", "1.5", "less than or equal to 1"]),
        ("rollout: {max_support: 0}\nmodel: {source: tiny}", ["rollout.max_support", "greater than 0"]),
        ("steps: [", ["not valid YAML", "line"]),
        ("- 1", ["mapping"]),
        ("task: {name: adition}", ["task 'adition' does not exist", "addition"]),
        ("task: {name: addition, args: {digit: 3}}", ["addition", "'digit'", "digits"]),
        ("task: {name: addition, args: {digits: 99}}", ["addition", "digits", "99"]),
        ("task: {name: 'jsonl:nowhere.jsonl'}", ["nowhere.jsonl", "does not exist"]),
        ("objective: grop", ["no recipe 'grop'", "grpo"]),
        ("objective: {recipe: grpo, clip: 1}", ["no argument 'clip'", "clip_low"]),
        ("objective: [group_advantage]", ["incomplete", "normalize_by_token"]),
        ("objective: [given_advantage, normalize_by_token, reinforce_surrogate]", ["batch.advantage"]),
        ("rollout: {group_size: 1}", ["rollout.group_size", "at least 2"]),
        ("model: {source: tinny}", ["tinny", "no such file or folder", "tiny"]),
        ("model: {source: nowhere/model.gguf}", ["nowhere/model.gguf", "no such file"]),
        ("model: {source: 'ftp://x/y'}", ["unknown scheme ftp://", "hf://"]),
        ("model: {max_context: 100000}", ["model.max_context", "100000"]),
        ("model: {max_context: 8}\nrollout: {max_tokens: 8}", ["model.max_context", "rollout.max_tokens"]),
        ("rollout: {prompts: 3, group_size: 3}\nlearner: {minibatches: 2}", ["learner.minibatches", "9"]),
        ("mesh: {data: 3}\nlearner: {micro_batch_rows: 4}", ["micro_batch_rows"]),
        ("mesh: {data: 64}", ["mesh", "64"]),
        ("mesh: {tensor: 3}", ["3"]),
        ("mesh: {expert: 2}", ["mesh.expert", "2 shards", "tiny has none", "mesh.fsdp=2"]),
        ("mesh: {expert: 3}\nmodel: {source: tiny-moe}", ["mesh.expert", "8 experts", "1, 2, 4, 8"]),
        ("mesh: {expert: 3}\nmodel: {source: tiny-moe}", ["mesh.expert", "8 experts"]),
        ("trackers: [mlflow]", ["trackers", "mlflow", "wandb"]),
        ("sampler: {pages: 1}", ["pages"]),
    ],
)
def test_bad_configs_are_refused_before_anything_starts(refused, config_file, text, parts):
    refused(parts, "train", config_file(text))


@pytest.mark.parametrize(
    "item", ["steps", "=3", "a..b=1", "steps.x=1", "steps=[1", "stpes=3", "steps=ten", "steps="]
)
def test_bad_overrides(refused, item):
    refused(["steps" if "s" in item else item], "train", TINY_YAML, "--set", item)


def test_missing_and_unreadable_config_files(refused, tmp_path):
    refused(["nowhere.yaml", "does not exist"], "train", tmp_path / "nowhere.yaml")
    refused(["cannot be read"], "train", tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    refused(["binary.yaml", "cannot be read"], "train", tmp_path / "binary.yaml")


# -------------------------------------------------------------------------------- models, refused


@pytest.fixture(scope="module")
def good_model(tmp_path_factory):
    """A folder with the tiny model and its tokenizer."""
    model = load_model("tiny")
    return save_hf(model.config, model.params, model.tokenizer, tmp_path_factory.mktemp("model") / "good")


@pytest.fixture
def model_folder(good_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(good_model, folder)
    return folder


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def lose_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def leave_tensor(folder):
    edit_tensors(
        folder, lambda tensors: tensors.update({"model.layers.7.stray": np.zeros((2, 2), np.float32)})
    )


def spoil_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(3, np.float32)}))


def shrink_vocabulary(folder):
    """Embeddings of a model with fewer words than the tokenizer has."""

    def edit(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:100]

    edit_tensors(folder, edit)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


def change_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder: cut(folder / "model.safetensors", 0.5), ["model.safetensors"]),
        (lambda folder: cut(folder / "model.safetensors", 0.001), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 4096), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["no weights"]),
        (lose_tensor, ["missing: model.layers.1.mlp.up_proj.weight"]),
        (leave_tensor, ["left over: model.layers.7.stray"]),
        (spoil_shape, ["model.norm.weight", "[3]"]),
        (shrink_vocabulary, ["tokenizer", "128", "100"]),
        (change_architecture, ["mamba"]),
        (pickle_only, ["pytorch_model.bin", "only safetensors/GGUF"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "JSON"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer"]),
    ],
)
def test_damaged_models_are_refused(refused, model_folder, damage, parts):
    damage(model_folder)
    refused(parts, "train", TINY_YAML, "--set", f"model.source={model_folder}")


def write_gguf(path):
    """Not a whole model, but a well-formed file."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((128, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_damaged_gguf_files_are_refused(refused, tmp_path):
    path = tmp_path / "model.gguf"
    setting = f"model.source={path}"
    write_gguf(path)
    refused([str(path)], "train", TINY_YAML, "--set", setting)  # most of the model is missing
    cut(path, 0.6)
    refused([str(path)], "train", TINY_YAML, "--set", setting)
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    refused([str(path)], "train", TINY_YAML, "--set", setting)
    path.write_bytes(b"no such thing" * 100)
    refused([str(path)], "train", TINY_YAML, "--set", setting)


# ---------------------------------------------------------------------------- data and run folders


def rows(*prompts):
    return "".join(json.dumps({"prompt": p, "answer": "a"}) + "\n" for p in prompts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["data.jsonl", "no rows"]),
        ("\n \n", ["data.jsonl", "no rows"]),
        ("{}\n", ["data.jsonl, line 1", "prompt"]),
        (rows("x") + "{", ["data.jsonl, line 2", "JSON"]),
        (rows("x" * 80, "y" * 90, "z" * 85), ["none of", "fits into", "tokens"]),
    ],
)
@pytest.mark.parametrize("items", [0, 8])
def test_data_that_cannot_be_used(refused, tmp_path, text, parts, items):
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    sets = [f"task.name=jsonl:{data}", "rollout.max_tokens=4", f"evaluation.items={items}"]
    refused(parts, "train", TINY_YAML, *(part for item in sets for part in ("--set", item)))


@pytest.mark.slow
def test_prompts_that_are_too_long_are_skipped_and_counted(jaxrl, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(rows(*(f"{c} word and more" for c in "abcdef"), "x" * 80, "y" * 90))
    sets = [
        f"task.name=jsonl:{data}",
        "task.args.held_out=0.0",
        "rollout.max_tokens=2",
        "rollout.prompts=8",
        "evaluation.items=0",
        "steps=2",
    ]
    code, _, err = jaxrl(
        "train", TINY_YAML, "--run", tmp_path / "run", *(part for item in sets for part in ("--set", item))
    )
    assert code == 0, err
    counted = [row["rollout/prompts_skipped"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert counted[0] >= 2 and counted[1] > counted[0]
    assert all(len(s["prompt"]) < 64 for s in read_jsonl(tmp_path / "run" / "samples.jsonl"))


def test_more_tokens_at_least_than_at_most(refused):
    refused(
        ["rollout.min_tokens", "20", "rollout.max_tokens"],
        "train",
        TINY_YAML,
        "--set",
        "rollout.min_tokens=20",
    )


@pytest.mark.parametrize("objective", ["opd", "dpo", "{recipe: ppo, value_coef: 0.5}"])
def test_objectives_that_a_rollout_cannot_train_are_refused(refused, objective):
    refused(["objective"], "train", TINY_YAML, "--set", f"objective={objective}")


def test_run_folders_that_cannot_be_used(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/no/such")):
        refused([str(folder), "--run"], "train", TINY_YAML, "--run", folder, run=False)
    refused([f"{tmp_path}/new", "holds no run", "--resume"], "train", TINY_YAML, "--run", tmp_path / "new",
            "--resume", run=False)  # fmt: skip
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_a_run_is_not_overwritten(jaxrl, nothing_starts, tiny_run):
    before = {p: p.read_bytes() for p in tiny_run.iterdir() if p.is_file()}
    code, _, err = jaxrl("train", TINY_YAML, "--run", tiny_run)
    assert code == 2
    assert "already holds a run" in err and "--resume" in err
    assert {p: p.read_bytes() for p in tiny_run.iterdir() if p.is_file()} == before


def test_without_a_folder_runs_are_numbered(jaxrl, nothing_starts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(loop, "train", lambda config, folder, **more: asked.append(str(folder)) or 0)
    for name in ("runs/tiny", "runs/tiny-2"):
        assert jaxrl("train", TINY_YAML)[0] == 0
        pathlib.Path(name).mkdir(parents=True)
        pathlib.Path(name, "config.yaml").write_text("")
    for other in ("runs/tiny_async", "runs/tiny-wide"):  # newer, but of other configs
        pathlib.Path(other).mkdir()
        pathlib.Path(other, "config.yaml").write_text("")
    assert jaxrl("train", TINY_YAML, "--resume")[0] == 0
    assert asked == ["runs/tiny", "runs/tiny-2", "runs/tiny-2"]


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_message(jaxrl, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1))
    code, out, err = jaxrl("train", TINY_YAML, "--run", tmp_path / "run", "--set", "steps=1")
    assert code == 1 and "jaxrl: No room for a snapshot" in err and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("eval",), ["config", "--snapshot"]),
        (("eval", "--snapshot", "nowhere"), ["nowhere", "config.yaml"]),
        (("eval", TINY_YAML, "--snapshot", "nowhere"), ["nowhere", "snapshot"]),
        (("eval", TINY_YAML, "--version", "3"), ["--version", "--snapshot"]),
        (("eval", TINY_YAML, "--set", "evaluation.items=0"), ["evaluation.items"]),
        (("sample", TINY_YAML, "--n", "0"), ["--n"]),
        (("sample", TINY_YAML, "--prompt", "x" * 90), ["model.max_context"]),
        (("report", "nowhere"), ["nowhere", "config.yaml"]),
        (("convert", "nowhere", "target"), ["nowhere", "no such file"]),
    ],
)
def test_other_commands_refuse_bad_input(refused, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    refused(parts, *arguments)


def test_snapshots_that_do_not_exist_or_do_not_fit(refused, tiny_run, tmp_path, good_model):
    refused(["no snapshot 7", "25, 30"], "eval", "--snapshot", tiny_run, "--version", 7)
    other = dataclasses.replace(TINY, num_layers=TINY.num_layers + 1)
    folder = save_hf(
        other, init_params(other, jax.random.key(0)), load_model("tiny").tokenizer, tmp_path / "other"
    )
    refused(
        ["model.source: ", "is not the model of snapshot"],
        "eval",
        "--snapshot",
        tiny_run,
        "--set",
        f"model.source={folder}",
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    refused(["not an empty folder"], "convert", tiny_run, tmp_path / "full")


# ----------------------------------------------------------------------------------- what works


def test_eval_json_is_one_object_and_repeats_the_last_row_of_the_run(jaxrl, tiny_run):
    code, out, _ = jaxrl("eval", "--snapshot", tiny_run, "--json")
    assert code == 0
    assert out.count("\n") == 1
    figures = json.loads(out)
    last = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    assert figures["version"] == last["version"] == 30
    evaluated = {k: v for k, v in last.items() if k.startswith("eval/")}
    assert {k: v for k, v in figures.items() if k.startswith("eval/")} == evaluated
    assert {"eval/vowel/greedy_accuracy", "eval/vowel/sampled_accuracy_low"} <= set(evaluated)


def test_eval_of_an_older_snapshot_of_a_model_and_in_plain_words(jaxrl, tiny_run):
    code, out, _ = jaxrl("eval", TINY_YAML, "--snapshot", tiny_run / "snapshots" / "25", "--json")
    assert code == 0 and json.loads(out)["version"] == 25
    code, out, err = jaxrl("eval", TINY_YAML)
    assert code == 0
    first = read_jsonl(tiny_run / "metrics.jsonl")[0]
    lines = out.splitlines()
    assert lines[0] == "tiny" and lines[1].split() == ["task", "n", "greedy", "sampled", "format", "length"]
    name, items, greedy = lines[2].split()[:3]
    assert (name, items) == ("vowel", "64")
    assert float(greedy) == pytest.approx(first["eval/vowel/greedy_accuracy"], abs=1e-3)
    assert "[" in lines[2] and "eval/" not in out and "evaluation" in err


def test_sample(jaxrl, tiny_run):
    code, out, _ = jaxrl("sample", "--snapshot", tiny_run, "--json", "--greedy", "--items", 3)
    samples = json.loads(out)["samples"]
    assert code == 0 and len(samples) == 3
    for sample in samples:
        assert sample["reward"] == 1.0 and sample["completion"][0] in "aeiou" and sample["version"] == 30
        assert sample["logprob"] < 0
    code, out, _ = jaxrl("sample", TINY_YAML, "--prompt", "hello", "--prompt", "again", "--n", 2)
    assert code == 0
    assert out.count("hello") == out.count("again") == 2
    one, two = (jaxrl("sample", TINY_YAML, "--prompt", "hello", "--n", 2, "--json")[1] for _ in range(2))
    assert one == two  # the same seed, the same samples
    first, second = json.loads(one)["samples"]
    assert first["completion"] != second["completion"] and first["reward"] is None


def test_convert_round_trip(jaxrl, tiny_run, tmp_path):
    target = tmp_path / "exported"
    code, out, _ = jaxrl("convert", tiny_run, target)
    assert code == 0 and str(target) in out
    with SnapshotStore(tiny_run / "snapshots", read_only=True) as store:
        saved = store.restore_params(30)[0]
    again = load_model(target)
    jax.tree.map(np.testing.assert_array_equal, again.params, saved)
    assert again.config == dataclasses.replace(load_model("tiny").config, head_dtype=again.config.head_dtype)
    code, out, _ = jaxrl("eval", TINY_YAML, "--set", f"model.source={target}", "--json")
    last = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    assert {k: v for k, v in json.loads(out).items() if k != "version"} == {
        k: v for k, v in last.items() if k.startswith("eval/")
    }
    code, _, _ = jaxrl("convert", tiny_run, tmp_path / "older", "--version", 25)
    older = load_model(tmp_path / "older").params
    different = jax.tree.map(lambda a, b: bool((a != b).any()), older, saved)
    assert code == 0 and any(jax.tree.leaves(different))
    assert jaxrl("convert", "tiny", tmp_path / "tiny")[0] == 0
    jax.tree.map(
        np.testing.assert_array_equal, load_model(tmp_path / "tiny").params, load_model("tiny").params
    )


def test_report(jaxrl, tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    (folder / "report.html").unlink()
    code, out, _ = jaxrl("report", folder)
    assert code == 0
    assert out.strip() == str(folder / "report.html")
    assert (folder / "report.html").stat().st_size > 10_000


def test_help_and_errors_as_a_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.cli", "train", str(TINY_YAML), "--set", "stpes=3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("jaxrl: ") and "Did you mean steps" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- secrets

SECRETS = ("hf_FAKE123", "fakekey456", ":pw@")


@pytest.fixture
def secrets_around(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    monkeypatch.setenv("WANDB_API_KEY", "fakekey456")


def hidden(text):
    for secret in SECRETS:
        assert secret not in text


def test_x04_secrets_reach_neither_the_run_folder_nor_the_output(
    jaxrl, secrets_around, tmp_path, monkeypatch
):
    """A run whose prompts hold a secret and that crashes with one in the traceback."""
    learn = loop.Run.learn

    def learning(self, batch):
        if self.version == 1:
            raise RuntimeError("no route to http://user:pw@host with fakekey456")
        return learn(self, batch)

    monkeypatch.setattr(loop.Run, "learn", learning)
    folder = tmp_path / "run"
    sets = ("snapshots.every=1", "evaluation.items=0", "task.system=http://user:pw@host")
    arguments = [part for item in sets for part in ("--set", item)]
    monkeypatch.setattr(sys, "argv", ["jaxrl", "train", *arguments])  # what run.json records
    code, out, err = jaxrl("train", TINY_YAML, "--run", folder, *arguments)
    assert code == 1
    assert "Traceback" in err and "RuntimeError: no route to http://***@host with ***" in err
    hidden(out + err)
    code, out, err = jaxrl("report", folder)
    assert code == 0
    hidden(out + err)
    files = [p for p in folder.rglob("*") if p.is_file()]
    names = {p.name for p in files}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "run.json", "report.html"} <= names
    assert any("snapshots" in p.parts for p in files)
    for path in files:
        hidden(path.read_bytes().decode("latin-1"))


@pytest.mark.parametrize(
    "setting",
    [
        "model.source=http://user:pw@host/model",
        "logger.api_key=fakekey456",
        "task.name=jsonl:http://user:pw@host/data",
        "model.dtype=fakekey456",
        "objective=hf_FAKE123",
    ],
)
def test_x04_messages_about_bad_input_hold_no_secret(
    jaxrl, secrets_around, nothing_starts, tmp_path, setting
):
    code, out, err = jaxrl("train", TINY_YAML, "--run", tmp_path / "run", "--set", setting)
    assert code == 2 and err.startswith("jaxrl: ")
    hidden(out + err)


@pytest.mark.slow
def test_x04_a_run_with_a_secret_in_its_config_is_resumed_with_it(jaxrl, tmp_path):
    folder = tmp_path / "run"
    sets = ("steps=1", "evaluation.items=0", "rollout.stop=['http://user:pw@host']")
    arguments = [part for item in sets for part in ("--set", item)]
    assert jaxrl("train", TINY_YAML, "--run", folder, *arguments)[0] == 0
    assert load_config(folder / "config.yaml").rollout.stop == ("http://***@host",)
    # With its own config.yaml the run would go on with another stop string: refused.
    code, _, err = jaxrl("train", folder / "config.yaml", "--run", folder, "--resume", "--set", "steps=2")
    assert code == 2 and "the file that the run was started with" in err
    original = [*arguments, "--set", "steps=2"]
    assert jaxrl("train", TINY_YAML, "--run", folder, "--resume", *original)[0] == 0
    assert [row["version"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2]
    assert ":pw@" not in (folder / "config.yaml").read_text()
    assert re.search(r"^# Secrets", (folder / "config.yaml").read_text())
