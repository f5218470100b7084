"""The parts of `jaxrl plan` that need no compiler for TPUs: shapes by name, meshes, the search's formula, errors."""

import dataclasses
import glob
import math
import re
import sys

import jax
import pytest

from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config, parse_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.parallel.mesh import AXES, make_mesh
from jaxrl_llm.planning.chips import CHIPS, Topology, shape_of_type, topology_of
from jaxrl_llm.planning.executables import compiled
from jaxrl_llm.planning.known import shape_of
from jaxrl_llm.planning.plan import compile_programs, make_plan, meshes
from jaxrl_llm.planning.programs import Program, forward_flops, workload_of
from jaxrl_llm.planning.search import candidates
from jaxrl_llm.planning.traffic import least_traffic
from launch.topology import GENERATIONS


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-1.7B", 1.721),
        ("Qwen/Qwen3-8B", 8.191),
        ("Qwen/Qwen3-30B-A3B", 30.532),
        ("meta-llama/Meta-Llama-3-8B", 8.030),
        ("meta-llama/Meta-Llama-3-8B-Instruct@main", 8.030),
    ],
)
def test_shapes_are_known_by_name_and_have_the_published_number_of_parameters(name, billions):
    model = shape_of(f"hf://{name}", "bfloat16")
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=5e-4)
    assert model.dtype == "bfloat16"


def test_a_model_that_is_not_known_is_refused_with_what_to_give_instead():
    with pytest.raises(InputError, match=r"Did you mean Qwen/Qwen3-8B\?.*config\.json"):
        shape_of("hf://Qwen/Qwen3-8b", "bfloat16")


def test_the_shape_of_a_folder_needs_its_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, '
        '"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
    )
    assert shape_of(str(tmp_path), "float32").hidden_size == 32


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--topology", "v5q:4x4"), r"no such kind of TPU.*Did you mean v5"),
        (("--topology", "v5p"), r"KIND:SHAPE"),
        (("--topology", "v5p:4by4"), r"two or three sizes"),
        (
            ("--topology", "v5p-100"),
            r"counts TensorCores, two a chip. Nearest: v5p-64 .v5p:2x4x4., v5p-128 .v5p:4x4x4.",
        ),
        (
            ("--topology", "v5litepod-12"),
            r"counts chips. Nearest: v5litepod-8 .v5e:2x4., v5litepod-16 .v5e:4x4.",
        ),
        (("--topology", "tpu7x-64"), r"write its shape"),
        (("--topology", "v3-8"), r"no such kind of TPU"),
        (("--topology", "v5p:4x4x4", "--slices", "0"), r"--slices"),
        (("--topology", "v5p:4x4x4", "--programs", "updat"), r"no program 'updat'"),
        (("--topology", "v5p:4x4x4", "--set", "objective=dpo"), r"jaxrl sft"),
        (("--topology", "v5p:4x4x4", "--set", "model.source=hf://no/such"), r"not built in"),
    ],
)
def test_bad_input_ends_with_code_2_before_anything_is_compiled(capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "configs/tiny.yaml", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert re.search(told, shown.err), shown.err


def test_without_libtpu_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "configs/tiny.yaml", "--topology", "v5e:2x2"])
    assert ended.value.code == 2
    assert "pip install 'jaxrl-llm[tpu]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="libtpu"):
        topology_of("v5e:2x2")


def test_accelerator_types_are_the_shapes_that_the_launcher_has_for_them():
    for name, kind in GENERATIONS.items():
        largest = max(kind.shapes)
        for number in range(2 * largest):
            assert shape_of_type(name, number) == kind.shapes.get(number), (name, number)


class Device:
    """As much of a device as a mesh reads."""

    platform, device_kind, process_index = "fake", "fake", 0

    def __init__(self, number, slice_index=0):
        self.id, self.slice_index = number, slice_index


def topology(chips, kind="v5p", slices=1):
    devices = tuple(Device(n, n * slices // chips) for n in range(chips))
    return Topology(f"{kind}:fake", CHIPS[kind], slices, devices)


@pytest.mark.parametrize(
    ("chips", "slices", "overrides", "message"),
    [
        (
            16,
            1,
            ["mesh.fsdp=4", "mesh.tensor=2"],
            "mesh.fsdp=4 .* takes 8 devices, 16 are given.*mesh.fsdp=16 .* chips of v5p:fake\\.",
        ),
        (
            16,
            2,
            ["mesh.fsdp=8", "mesh.tensor=2"],
            "2 slices must divide mesh.data.*mesh.data=2.*product is 8.*v5p:fake x 2 slices",
        ),
        (
            16,
            2,
            ["mesh.fsdp=12", "mesh.sampler=4"],
            "takes 8 and 4 devices of 2 slices.*8 devices of one.*beside those of mesh.sampler",
        ),
    ],
)
def test_a_mesh_that_the_chips_do_not_have_is_refused_with_sizes_that_they_have(
    chips, slices, overrides, message
):
    with pytest.raises(InputError, match=message):
        meshes(load_config("configs/tiny.yaml", overrides), topology(chips, slices=slices))


def test_the_work_of_a_train_step_follows_from_the_config():
    config = parse_config(
        {
            "model": {"max_context": 1000},
            "rollout": {"prompts": 5, "group_size": 4, "max_tokens": 600},
            "learner": {"micro_batch_rows": 8, "minibatches": 2},
            "sampler": {"slots": 16, "page_size": 64},
        }
    )
    work = workload_of(config)
    assert (work.samples, work.prompt, work.new) == (20, 400, 600)
    assert (work.rows, work.row_tokens, work.micro_rows) == (24, 1024, 8)
    assert (work.updates, work.update_rows) == (2, 16)
    assert work.pages == 1 + 16 * 16 + 2 * 16  # 16 pages for each of 16 slots, and two prompts ahead
    packed = parse_config({"model": {"max_context": 100}, "learner": {"row_tokens": 350}})
    assert workload_of(packed).rows == 48  # 128 samples, 3 in a row, filled up to micro-batches of 16


def test_flops_of_a_forward_pass_are_those_of_its_products():
    model = shape_of("tiny", "float32")
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    norms = 2 * (2 * 64) + 64
    exact = 2 * (2 * layer + 128 * 64) + 4 * 2 * 4 * 16 * 10
    assert forward_flops(model, 1, 10) == pytest.approx(exact + 2 * norms)


def test_the_least_that_an_update_sends():
    """8 rows of 16 tokens, 4 at a time, of 2 layers: 36,992 weights each, 64 of the last norm, a head of 128 x 64."""
    model, one = shape_of("tiny", "float32"), dict.fromkeys(AXES, 1)

    def least(**sizes):
        found = least_traffic(model, one | sizes, rows=8, tokens=16, micro_rows=4)
        return {axis: sent for axis, sent in found.items() if sent}

    layers, head = 2 * 36_992 + 64, 128 * 64
    assert least() == {}
    # Twice: layers gathered forward and backward in 2 bytes, gradients scattered in 4, and 32 tokens of a chip exchanged for
    # the embedding, there and back; half of the head gathered once.
    exchanged = 2 * 32 * 64 * 2 / 2
    assert least(fsdp=2) == {"fsdp": 2 * (layers * 8 + head * 4) / 2 + head * 2 / 2 + 2 * exchanged}
    # Twice: 64 tokens summed 5 times a layer, for the embedding and for the head; a sum over 2 chips sends all of it once.
    assert least(tensor=2) == {"tensor": 2 * 64 * 64 * 2 * (5 * 2 + 2)}
    # Twice: all gradients, in 4 bytes; embedding and head are one table.
    assert least(data=2) == {"data": 2 * 4 * (layers + head)}


@pytest.mark.parametrize(("chips", "slices"), [(8, 1), (64, 1), (32, 2)])
def test_the_search_considers_meshes_that_divide_the_model_and_its_rows(chips, slices):
    config = load_config("configs/qwen3_8b_grpo_v5p_64.yaml")
    model, work, where = (
        shape_of("hf://Qwen/Qwen3-8B", "bfloat16"),
        workload_of(config),
        topology(chips, slices=slices),
    )
    found = list(candidates(model, work, where))
    assert found
    for candidate in found:
        sizes = candidate.sizes
        assert math.prod(sizes.values()) == chips
        assert model.num_kv_heads % sizes["tensor"] == 0 and sizes["data"] % slices == 0
        assert candidate.micro_rows % (sizes["data"] * sizes["fsdp"]) == 0 and sizes["expert"] == 1
    by_sizes = {(*(c.sizes[axis] for axis in ("data", "fsdp", "tensor")), c.micro_rows): c for c in found}
    if chips == 64:
        # Twice the rows at a time: weights are gathered half as often, and activations take twice the room.
        few, many = (by_sizes[1, 16, 4, rows] for rows in (16, 32))
        assert many.sent < few.sent and many.bytes > few.bytes
        # Copies of the parameters take more room than shards of them.
        assert by_sizes[16, 1, 4, 16].bytes > few.bytes


def test_the_search_splits_the_tokens_of_long_rows_only():
    config = load_config("configs/qwen3_8b_grpo_v5p_64.yaml")
    model, chips = shape_of("hf://Qwen/Qwen3-8B", "bfloat16"), topology(64)
    assert {c.sizes["context"] for c in candidates(model, workload_of(config), chips)} == {1}
    long = dataclasses.replace(config, learner=dataclasses.replace(config.learner, row_tokens=131_072))
    found = list(candidates(model, workload_of(long), chips))
    assert {c.sizes["context"] for c in found} == {1, 2, 4, 8, 16, 32, 64}
    assert all(math.prod(c.sizes.values()) == 64 for c in found)
    by_sizes = {(*(c.sizes[axis] for axis in ("data", "fsdp", "context")), c.micro_rows): c for c in found}
    # A row of each shard at a time, with its tokens on 16 chips or on one.
    split, whole = by_sizes[1, 4, 16, 4], by_sizes[1, 64, 1, 64]
    assert split.bytes < whole.bytes / 4 and split.bytes < chips.chip.hbm_bytes
    assert whole.bytes < 2**40  # not all scores of a row, 2 TB


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("qwen3_8b_grpo_v5p_64", ["mesh.expert=2"], "mesh.expert: 2 shards.*Qwen3-8B has none.*mesh.fsdp=32"),
        ("qwen3_30b_a3b_gspo_v5p_128", ["mesh.expert=3"], "has 128 experts.*1, 2, 4, 8, 16, 32, 64, 128"),
    ],
)
def test_shards_of_experts_that_there_cannot_be_are_refused_before_the_topology(config, overrides, message):
    with pytest.raises(InputError, match=message):
        make_plan(load_config(f"configs/{config}.yaml", overrides), "no such topology")


def test_the_search_proposes_settings_that_there_are():
    config = load_config("configs/qwen3_30b_a3b_gspo_v5p_128.yaml")
    model = shape_of(config.model.source, config.model.dtype)
    found = next(c for c in candidates(model, workload_of(config), topology(128)) if c.sizes["expert"] == 8)
    again = load_config("configs/qwen3_30b_a3b_gspo_v5p_128.yaml", found.overrides)
    assert again.mesh.expert == 8 and again.mesh.learner == 128


def test_the_search_spreads_experts_and_what_a_token_takes_of_them_counts():
    model = shape_of("hf://Qwen/Qwen3-30B-A3B", "bfloat16")
    assert 3.0e9 < forward_flops(model, 1, 0) / 2 < 3.4e9  # "A3B": active parameters, the embedding left out
    work = workload_of(load_config("configs/qwen3_8b_grpo_v5p_64.yaml"))
    found = list(candidates(model, work, topology(64)))
    assert {c.sizes["expert"] for c in found} >= {1, 2, 8, 64}


def test_the_configs_for_pods_are_valid_and_their_models_known():
    names = sorted(glob.glob("configs/*_*.yaml"))
    assert len(names) >= 5
    for name in names:
        config = load_config(name)
        model = shape_of(config.model.source, config.model.dtype)
        assert config.model.max_context <= model.max_positions


class Lowered:
    """A program that the compiler refuses."""

    def __init__(self, message):
        self.message = message

    def as_text(self):
        return self.message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def refused(message, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    mesh = make_mesh(fsdp=2)
    program = Program("update", lambda: Lowered(message), mesh, {"master weights": 2**30}, 1, 1e9)
    return compile_programs([program], topology(2))[0]


def test_a_program_that_alone_is_larger_than_a_chip_says_by_how_much(monkeypatch, tmp_path):
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 130.50G of 95.74G hbm. Exceeded …"
    )
    found = refused(message, monkeypatch, tmp_path)
    assert found.arguments + found.temporaries == 130.5 * 2**30
    assert found.memory()["master weights"] == 2**30
    assert found.time == 0


def test_a_program_that_does_not_compile_is_a_fault_that_is_told(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="update does not compile .*INVALID_ARGUMENT: no such thing"):
        refused("INVALID_ARGUMENT: no such thing", monkeypatch, tmp_path)


def test_what_is_compiled_once_is_read_the_next_time(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    mesh = make_mesh(fsdp=2)
    lowered = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32"))
    first = compiled(lowered, mesh)
    monkeypatch.setattr(type(lowered), "compile", None)
    assert compiled(lowered, mesh) == first
    assert "ENTRY" in first.text and first.arguments == 8 * 8 * 4
