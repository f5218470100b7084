"""Loading of configs: strict, typed, every problem at once, before anything heavy is imported."""

import dataclasses
import subprocess
import sys
import typing

import pytest

from jaxrl_llm.config import Config, apply_overrides, as_data, flatten, load_config, parse_config, to_yaml
from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.synonyms import SYNONYMS


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return load


def test_defaults_are_a_valid_config():
    assert parse_config({}) == Config()


def test_under_80_settings():
    def count(cls):
        hints = typing.get_type_hints(cls)
        return sum(count(t) if dataclasses.is_dataclass(t) else 1 for t in hints.values())

    assert count(Config) < 80


@pytest.mark.parametrize(
    ("longest", "shards", "multiple"),
    [
        (64, 1, 16),
        (256, 1, 16),
        (1024, 1, 64),
        (2048, 1, 128),
        (3000, 1, 256),
        (131_072, 16, 8192),
        (64, 3, 48),
    ],
)
def test_rows_have_one_of_16_lengths_that_their_shards_divide(longest, shards, multiple):
    config = parse_config({"model": {"max_context": longest}, "mesh": {"context": shards}})
    assert config.row_multiple == multiple and config.row_multiple % (16 * shards) == 0
    assert longest <= 16 * multiple


def test_round_trip_through_yaml(load):
    config = load(
        'objective: {recipe: dapo, clip_high: 0.3}\nrollout: {stop: ["\\n"]}\noptimizer: {learning_rate: 3e-6}'
    )
    assert load(to_yaml(config)) == config
    assert config.rollout.stop == ("\n",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5e-4", 5e-4),
        ("1e6", 1e6),
        ("1e+3", 1e3),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("1", 1.0),
        ("1_000", 1000.0),
    ],
)
def test_u01_numbers(load, text, value):
    for config in (
        load(f"optimizer: {{learning_rate: {text}}}"),
        load("steps: 1", f"optimizer.learning_rate={text}"),
    ):
        assert config.optimizer.learning_rate == value
        assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optimizer: {learning_rate: abc}", ["c.yaml", "optimizer.learning_rate", "'abc'"]),
        ("optimizer: {learning_rate: .nan}", ["optimizer.learning_rate", "finite"]),
        ("optimizer: {learning_rate: yes}", ["optimizer.learning_rate", "'yes'"]),
        ("steps: 3\noptimizer: {learning_rate: 1e-400}", ["c.yaml", "line 2", "1e-400 is too small"]),
        ("objective: {recipe: dapo, clip_high: 0.00001e-330}", ["line 1", "e-330"]),
        ("steps: 0777", ["steps", "'0777'"]),
        ("steps: 12:30:45", ["steps", "'12:30:45'"]),
        ("steps: true", ["steps", "true"]),
        ("steps: 1.5", ["steps", "1.5"]),
        ("steps: 0", ["steps", "greater than 0"]),
        ("model: {dtype: fp16}", ["model.dtype", "'float32' or 'bfloat16'", "fp16"]),
        ("a: 1\na: 2", ["line 2", "'a'", "line 1"]),
        ("steps: 3\noptimizer: {b1: 0.9, b1: 0.8}", ["line 2", "'b1'"]),
        ("optimizer: {<<: {b1: 0.9, b1: 0.8}}", ["line 1", "'b1'"]),
        ("[1, 2]", ["mapping", "list"]),
        ("model: [1]", ["model", "mapping", "[1]"]),
        ("mesh: null", ["mesh", "mapping"]),
        ("mesh: {expert: 0}", ["mesh.expert", "greater than 0"]),
        ("mesh: {expert: 2}\nlearner: {exact: train}", ["learner.exact", "one device"]),
        ("steps: [", ["line", "not valid YAML"]),
        ("rollout: {top_p: 0.0}", ["rollout.top_p", "0.0", "greater than 0"]),
        ("rollout: {top_k: -5}", ["rollout.top_k", "-5"]),
        ("rollout: {min_p: 1.0}", ["rollout.min_p", "less than 1"]),
        ("rollout: {max_support: 0}", ["rollout.max_support", "greater than 0"]),
        ("rollout: {temperature: 0}", ["rollout.temperature", "greedy", "greater than or equal to 0.001"]),
        ("rollout: {temperature: 1.0e-45}", ["rollout.temperature", "0.001"]),
        ("rollout: {temperature: 1.0e+300}", ["rollout.temperature", "1000"]),
        ("seed: 9223372036854775808", ["seed", "less than 9223372036854775808"]),
        ("steps: 2147483648", ["steps", "less than 2147483648"]),
        ("learner: {row_tokens: 99999999999}", ["learner.row_tokens", "less than 2147483648"]),
        ("learner: {row_tokens: 100}", ["learner.row_tokens", "model.max_context 256"]),
        ("learner: {head_chunk: 256}", ["learner.head_chunk: there is no such setting"]),
        ("schedule: {sync_every: 0}", ["schedule.sync_every", "greater than 0"]),
        (
            "schedule: {sync_every: 4, max_age: 1}",
            ["schedule.sync_every: the last of 4", "3 train steps old", "max_age to 3, or sync_every to 2"],
        ),
        (
            "learner: {row_tokens: 256, minibatches: 4, micro_batch_rows: 2}",
            ["learner.minibatches", "learner.micro_batch_rows"],
        ),
        (
            "rollout: {max_tokens: 256}\nmodel: {max_context: 256}",
            ["rollout.max_tokens", "model.max_context"],
        ),
        ("teacher: {dtype: bfloat16}", ["teacher.dtype: there is no teacher", "teacher.source"]),
        ("reference: {tau: 0.5, reset_every: 3}", ["reference.tau: has no effect", "reference.move_every"]),
        (
            "reference: {reset_optimizer: true, move_every: 3}",
            ["reference.reset_optimizer: has no effect", "reference.reset_every"],
        ),
        ('rollout: {stop: [""]}', ["rollout.stop", "empty"]),
    ],
)
def test_u01_bad_values_name_file_key_and_value(load, text, parts):
    with pytest.raises(InputError) as error:
        load(text)
    for part in parts:
        assert part in str(error.value)


def test_u01_keys_of_a_mapping_override_those_that_are_merged_into_it(load):
    config = load("optimizer: {<<: {eps: 1e-7, b1: 0.8}, eps: 1e-6}")
    assert (config.optimizer.eps, config.optimizer.b1) == (1e-6, 0.8)


@pytest.mark.parametrize(
    ("text", "overrides", "path", "hint"),
    [
        ("optimizer: {learning_rte: 1e-6}", (), "optimizer.learning_rte", "optimizer.learning_rate"),
        ("learning_rate: 1e-6", (), "learning_rate", "optimizer.learning_rate"),
        ("learning_rte: 1e-6", (), "learning_rte", "Did you mean optimizer.learning_rate or critic"),
        ("clip_nrm: 1", (), "clip_nrm", "Did you mean optimizer.clip_norm?"),
        ("num-epochs: 3", (), "num-epochs", "learner.epochs"),
        ("rollout: {group-size: 3}", (), "rollout.group-size", "rollout.group_size"),
        ("steps: 3", ("optim.lrr=1",), "optim", "optimizer"),
        ("steps: 3", ("optimizer.lr=1",), "optimizer.lr", "Did you mean optimizer.learning_rate?"),
        ("critic: {lr: 1}", (), "critic.lr", "Did you mean critic.learning_rate?"),
        ("lr: 1", (), "lr", "Did you mean optimizer.learning_rate or critic.learning_rate?"),
        ("trainer: {lr: 1, batch-size: 8}", (), "trainer", "lr may be optimizer.learning_rate"),
        ("trainer: {lr: 1, batch-size: 8}", (), "trainer", "batch-size may be data.batch or rollout.prompts"),
        ("rollout: {sampling: {top_p: 1}}", (), "rollout.sampling", "top_p may be rollout.top_p"),
        ("batch_size: 8", (), "batch_size", "Did you mean data.batch or rollout.prompts?"),
        ("model: {Temperature: 1}", (), "model.Temperature", "Did you mean rollout.temperature?"),
        ("sampler: {top_p: 1}", (), "sampler.top_p", "Did you mean rollout.top_p?"),
        ("rollout: {max_new_tokens: 1}", (), "rollout.max_new_tokens", "Did you mean rollout.max_tokens?"),
        ("max_new_token: 1", (), "max_new_token", "Did you mean rollout.max_tokens"),
        ("learner: {num_generations: 1}", (), "learner.num_generations", "Did you mean rollout.group_size?"),
        ("epochs: 1", (), "epochs", "Did you mean learner.epochs?"),
        ("data: {seed: 1}", (), "data.seed", "Did you mean seed, task.seed or evaluation.seed?"),
        ("mesh: {ep: 2}", (), "mesh.ep", "Did you mean mesh.expert?"),
        ("expert_model_parallel_size: 2", (), "expert_model_parallel_size", "Did you mean mesh.expert?"),
        ("rollout: {seed: 1}", (), "rollout.seed", "seed, task.seed or evaluation.seed?"),
        ("optimizer.eps: 1", (), "optimizer.eps", "in sections: optimizer: {eps: …}"),
        ("qqqqqq: 1", (), "qqqqqq", "such setting. Settings at the top: critic, data,"),
        ("objective: dapo", ("clip_high=0.3",), "clip_high", "is set as objective.clip_high=…"),
        ("eps: 1e-4", (), "eps", "is set as objective.eps=…. Did you mean optimizer.eps?"),
        ("clip_high: 0.3", (), "clip_high", "is set as objective.clip_high=…"),
        (
            "steps: 3",
            ("weights={a: 1}",),
            "weights",
            "the recipe gdpo: an argument of the recipe is set as objective.weights=…",
        ),
        ("objective: [sft]", ("beta=1",), "beta", "objective.beta=…, beside objective=cdpo or another"),
    ],
)
def test_u02_unknown_keys_are_refused_with_the_nearest_name(load, text, overrides, path, hint):
    with pytest.raises(InputError) as error:
        load(text, *overrides)
    assert f"{path}: there is no such setting" in str(error.value)
    assert hint in str(error.value)


def test_u02_the_names_of_other_libraries_are_of_settings_and_are_none_themselves():
    known = flatten(as_data(Config())) | as_data(Config())
    ours = {name.rsplit(".", 1)[-1] for name in known}
    assert {path for paths in SYNONYMS.values() for path in paths} <= set(known)
    assert not set(SYNONYMS) & ours - {"dataset"}
    assert all(name == name.lower() and "-" not in name for name in SYNONYMS)


@pytest.mark.parametrize("number", ["1e400", "-1e400", ".inf", "-.Inf", ".nan", f"1{'0' * 400}"])
@pytest.mark.parametrize(
    "key", ["optimizer.learning_rate", "steps", "objective.clip_high", "task.args.x", "rollout.stop"]
)
def test_u01_numbers_that_are_not_finite_are_refused_by_name(load, number, key):
    nested = number
    for name in reversed(key.split(".")):
        nested = f"{{{name}: {nested}}}"
    for text, overrides in (
        (nested, ()),
        (nested.replace(number, f"[1, {number}]"), ()),
        ("{}", [f"{key}={number}"]),
    ):
        with pytest.raises(InputError, match=rf"{key}.* is not a finite number.*Write a finite one"):
            load(text, *overrides)


def test_u01_python_is_checked_as_files_are():
    with pytest.raises(InputError, match="objective.clip_high: inf is not a finite number"):
        parse_config({"objective": {"recipe": "dapo", "clip_high": float("inf")}})


def test_u02_all_problems_at_once(load):
    with pytest.raises(InputError) as error:
        load("steps: ten\nseed: 1.5\nrollout: {group_size: true}\nfoo: 1")
    for part in ("steps", "seed", "rollout.group_size", "foo"):
        assert part in str(error.value)


def test_overrides_do_not_touch_their_input_and_reach_recipes():
    data = {"objective": "dapo"}
    out = apply_overrides(data, ["objective.clip_high=0.3", "objective.stages.clip_surrogate.low=0.1"])
    assert data == {"objective": "dapo"}
    assert out["objective"] == {
        "recipe": "dapo",
        "clip_high": 0.3,
        "stages": {"clip_surrogate": {"low": 0.1}},
    }
    assert apply_overrides({}, ["objective.clip_high=0.3"])["objective"] == {
        "recipe": "grpo",
        "clip_high": 0.3,
    }


@pytest.mark.parametrize("item", ["steps", "=3", "a..b=1", "steps.x=1", "steps=[1"])
def test_malformed_overrides(item):
    with pytest.raises(InputError, match="--set"):
        apply_overrides({"steps": 3}, [item])


def test_missing_file_lists_what_is_there(tmp_path):
    (tmp_path / "real.yaml").write_text("steps: 1")
    with pytest.raises(InputError, match=r"does not exist.*real\.yaml"):
        load_config(tmp_path / "raal.yaml")


def test_checking_a_config_imports_neither_jax_nor_the_model_code():
    code = (
        "import sys, jaxrl_llm.cli, jaxrl_llm.config as c; c.parse_config({});"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'plotly'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------- odd values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objective: null", r"objective: expected a text or a mapping or a list \(got null\)$"),
        ("objective: 3", r"objective: expected a text or a mapping or a list \(got 3\)$"),
        ('model: {source: ""}', "model.source: is empty; give a model folder"),
        ('model: {source: " \\t"}', "model.source: is empty"),
        ('task: {name: ""}', "task.name: is empty; give a task"),
        ('task: {system: "x\\ud800y"}', r"task.system: 'x\\ud800y' holds half of a surrogate pair"),
        ('rollout: {stop: [a, "\\udc00"]}', r"rollout.stop.1: .* surrogate pair"),
        ('"\\ud800": 1', "surrogate pair"),
        ("steps: !!binary aGVsbG8=", "steps: a setting is a text, .* not a bytes; remove the tag"),
        ("steps: !!set {a, b}", "steps: .* not a set"),
        ("task: {args: {x: !!timestamp 2020-01-01}}", "task.args.x: .* not a date"),
        ("steps: !!omap [a: 1]", "steps"),
        ("[" * 600, "nested too deeply"),
        ("STEPS: 1", "Did you mean steps"),
        ("model: {dtype: Float32}", "Did you mean float32"),
        ("trackers: [WandB]", "Did you mean wandb"),
    ],
)
def test_odd_values_are_refused_in_one_clear_line(load, text, message):
    for overrides in ((), ("seed=1",)):
        with pytest.raises(InputError, match=message) as error:
            load(text, *overrides)
        assert str(error.value).count("\n  ") <= 1


def test_aliases_that_stand_for_endless_values_are_refused(load):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="more than 100,000 values"):
        load("\n".join(lines))


def test_the_nearest_word_whatever_its_case():
    assert did_you_mean("GRPO", ["dr_grpo", "grpo", "ppo"]) == " Did you mean grpo?"
    assert did_you_mean("Dr-GRPO", ["dr_grpo", "grpo", "ppo"]) == " Did you mean dr_grpo?"
    assert did_you_mean("xyz", ["grpo"]) == ""
