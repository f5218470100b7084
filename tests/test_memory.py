"""Sizes that no machine has are refused before anything is compiled; what fits is not."""

import dataclasses
import pathlib

import pytest

import jaxrl_llm.memory as memory
from jaxrl_llm.cli import main
from jaxrl_llm.config import apply_overrides, load_config, parse_config, read_yaml
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY, ModelConfig
from jaxrl_llm.sampler import Sampler, SamplingParams

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    dtype="bfloat16",
)
MOST = 2**31 - 1


def check(config, model, max_tokens=16):
    memory.check_memory(
        config,
        model,
        rows=config.rollout.prompts * config.rollout.group_size,
        settings=("rollout.prompts", "rollout.group_size"),
        max_tokens=max_tokens,
        evaluated=config.evaluation.items,
    )


def free(monkeypatch, number):
    monkeypatch.setattr(memory, "available_memory", lambda: number)


@pytest.mark.parametrize(("name", "model", "megabytes"), [("quickstart", SMOLLM2, 2_200), ("tiny", TINY, 20)])
def test_the_shipped_configs_fit_into_a_small_machine_and_not_into_nothing(
    monkeypatch, name, model, megabytes
):
    config = load_config(CONFIGS / f"{name}.yaml")
    free(monkeypatch, megabytes * 10**6)
    check(config, model)
    free(monkeypatch, 500_000)
    with pytest.raises(InputError, match="memory: this needs at least .* and 500 kB are free. It goes to:"):
        check(config, model)


def test_no_answer_of_the_machine_refuses_nothing(monkeypatch):
    free(monkeypatch, None)
    check(parse_config({"rollout": {"prompts": MOST}}), TINY)


ABSURD = [
    ("sampler.slots", MOST, "decoding|K/V cache"),
    ("sampler.pages", MOST, "K/V cache"),
    ("sampler.page_size", MOST, "prefill"),
    ("sampler.steps_per_dispatch", MOST, "decoding"),
    ("rollout.prompts", MOST, "batch|completions"),
    ("rollout.group_size", MOST, "batch|completions"),
    ("evaluation.items", MOST, "completions"),
    ("learner.row_tokens", MOST, "activations"),
    ("learner.micro_batch_rows", MOST, "batch|activations"),
]


@pytest.mark.parametrize(("setting", "value", "what"), ABSURD)
@pytest.mark.parametrize("model", [TINY, SMOLLM2])
def test_absurd_sizes_are_refused_with_what_to_lower(monkeypatch, setting, value, what, model):
    free(monkeypatch, 5 * 10**11)
    config = parse_config(apply_overrides({"model": {"max_context": 64}}, [f"{setting}={value}"]))
    with pytest.raises(InputError, match=rf"500 GB are free. It goes to: ({what}) .*{setting}"):
        check(config, model)


def test_the_logits_of_a_chunk_are_no_more_than_those_of_a_micro_batch(monkeypatch):
    wide = dataclasses.replace(TINY, vocab_size=10**6)
    free(monkeypatch, 10**9)  # bytes; the logits of 1,024 positions would be four times as many
    check(parse_config({"learner": {"micro_batch_rows": 1}, "model": {"max_context": 64}}), wide)
    with pytest.raises(InputError, match="logits 4.1 GB .model.source, learner.micro_batch_rows"):
        check(parse_config({"learner": {"micro_batch_rows": 128}}), wide)
    free(monkeypatch, 5 * 10**9)
    check(parse_config({"learner": {"micro_batch_rows": 128}}), wide)
    with pytest.raises(InputError, match="logits 8.19 GB"):  # as many on each device
        check(parse_config({"learner": {"micro_batch_rows": 128}, "mesh": {"fsdp": 2}}), wide)


@pytest.mark.parametrize("setting", [f"{name}={MOST}" for name in ("sampler.slots", "learner.row_tokens")])
def test_the_command_refuses_before_it_compiles(monkeypatch, capsys, tmp_path, setting):
    def forbidden(*args, **more):
        raise AssertionError("something was started")

    monkeypatch.setattr("jaxrl_llm.base_run.make_update_step", forbidden)
    monkeypatch.setattr("jaxrl_llm.sampler.Sampler.generate", forbidden)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", str(CONFIGS / "tiny.yaml"), "--run", str(run), "--set", setting])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("jaxrl: memory: this needs at least") == 1, error
    assert setting.split("=")[0] in error and not (run / "config.yaml").exists()


def test_a_teacher_counts_while_learning_and_while_sampling(monkeypatch):
    config = parse_config({"teacher": {"source": "tiny", "dtype": "bfloat16"}, "sampler": {"pages": 10}})
    parts = {part.what: part.bytes for part in memory.teacher_parts(config, SMOLLM2)}
    assert parts["teacher"] == 2 * SMOLLM2.num_parameters
    assert parts["logits of the teacher"] == 4 * 16 * 16 * SMOLLM2.vocab_size
    free(monkeypatch, 200 * 10**6)
    for pages in (10, 4_000):  # the learner needs most, the sampler does
        config = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, pages=pages))
        more = {"rows": 128, "settings": (), "max_tokens": 16}
        memory.check_memory(config, TINY, **more)
        with pytest.raises(InputError, match=r"teacher 2\d\d MB \(teacher.source, teacher.dtype\)"):
            memory.check_memory(config, TINY, **more, teacher=SMOLLM2)


def test_a_run_counts_its_teacher_before_it_is_loaded(monkeypatch, tmp_path):
    import jaxrl_llm.train as loop

    asked = {}

    def stop(*args, teacher, **more):
        asked["teacher"] = teacher
        raise InputError("enough")

    monkeypatch.setattr(loop, "check_memory", stop)
    overrides = ["objective=opd", "teacher.source=tiny", "teacher.dtype=bfloat16"]
    with pytest.raises(InputError, match="enough"):
        loop.train(load_config(CONFIGS / "tiny.yaml", overrides), tmp_path / "run")
    assert asked["teacher"] == dataclasses.replace(TINY, dtype="bfloat16")


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"slots": MOST}, "slots, steps_per_dispatch"),
        ({"pages": MOST}, "pages, page_size, kv"),
        ({"page_size": MOST}, "page_size"),
        ({"steps_per_dispatch": MOST}, "slots, steps_per_dispatch"),
    ],
)
def test_a_sampler_is_refused_before_it_allocates(monkeypatch, sizes, named):
    free(monkeypatch, 5 * 10**10)
    with pytest.raises(InputError, match=rf"memory: this needs at least .* 50 GB are free.*\({named}\)"):
        Sampler(TINY, **sizes)


def test_a_call_of_a_sampler_is_refused_before_it_allocates(monkeypatch, tiny_params):
    sampler = Sampler(TINY, slots=2, page_size=4)
    monkeypatch.setattr("jaxrl_llm.sampler.decode.init_state", None)
    free(monkeypatch, 1000)
    with pytest.raises(InputError, match=r"memory: .* K/V cache .* \(slots, page_size, kv\)"):
        sampler.generate(tiny_params, [[1, 2]], SamplingParams(max_tokens=2))


def test_the_other_commands_refuse_too(capsys, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    tiny = str(CONFIGS / "tiny.yaml")
    for arguments in (
        ["eval", tiny, "--set", f"sampler.slots={MOST}"],
        ["sample", tiny, "--prompt", "x", "--n", str(MOST)],
        ["sft", tiny, "--run", str(tmp_path / "r"), "--set", "objective=sft", "--set", f"data.path={data}",
         "--set", f"data.batch={MOST}"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert "jaxrl: memory: this needs at least" in capsys.readouterr().err


def test_held_out_items_are_no_more_than_there_are(monkeypatch):
    from jaxrl_llm.assembly import build_task, held_out_items

    config = parse_config(apply_overrides(read_yaml(CONFIGS / "tiny.yaml"), [f"evaluation.items={MOST}"]))
    task = build_task(config)
    size = task.split("eval", config.evaluation.seed).size
    assert held_out_items(config, task) == (MOST if size is None else size)


# ------------------------------------------------------------------------------------- the machine


def test_what_the_machine_says():
    free = memory.available_memory()
    assert free is None or 10**6 < free < 10**16


def test_the_limit_of_a_container_counts(tmp_path):
    assert memory._container(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 600\nactive_file 400\n")
    assert memory._container(tmp_path) is None
    (tmp_path / "memory.max").write_text("9000\n")
    assert memory._container(tmp_path) == 9000 - 5000 + 1000


def test_accelerators_say_for_themselves(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device(), Device()])
    assert memory.available_memory() == 140


def test_the_support_of_truncated_sampling_counts():
    """4 bytes of each id, in the batch and in what a dispatch gives back; nothing without truncation."""

    def parts(text, **more):
        config = parse_config({"rollout": text})
        learner = memory.learner_parts(config, SMOLLM2, rows=16, settings=("rollout.prompts",), **more)
        sampler = memory.sampler_parts(config, SMOLLM2, rows=16, max_tokens=64)
        return {part.what: part for part in [*learner, *sampler]}

    plain = parts({"max_support": 50})
    for text, K in (({"top_p": 0.9}, 128), ({"min_p": 0.1, "max_support": 50}, 50), ({"top_k": 7}, 7)):
        found = parts(text)
        assert found["batch"].bytes - plain["batch"].bytes == 16 * 16 * 4 * K
        assert found["decoding"].bytes - plain["decoding"].bytes == 64 * 8 * 4 * K
        assert "rollout.max_support" in found["batch"].settings
        assert parts(text, sampled=False)["batch"] == plain["batch"]  # rows of a file have none


def test_moments_on_the_host_take_nothing_of_an_accelerator(monkeypatch):
    def moments(*offload):
        config = parse_config({"learner": {"offload": list(offload)}})
        parts = memory.learner_parts(config, TINY, rows=8, settings=("rollout.prompts",))
        return {part.what: part for part in parts}["moments of the optimiser"]

    assert moments().bytes == moments("optimizer").bytes == 8 * TINY.num_parameters
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "tpu")
    assert moments("reference").bytes == 8 * TINY.num_parameters and moments("optimizer").bytes == 0
    assert moments().settings[0] == "learner.offload"
