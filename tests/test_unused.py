"""Settings that the chosen objective or command leaves unread are named, with who reads them."""

import pathlib

import pytest

import jaxrl_llm.train as loop
from jaxrl_llm.config import apply_overrides, load_config, parse_config
from jaxrl_llm.objectives import build_objective
from jaxrl_llm.unused import unused_settings

CRITIC = "critic.learning_rate, critic.whiten: no effect, the objective has no critic. Read with ppo."
REGION = "trust_region.max_kl: no effect, the objective is trained by an optimiser. Read with trpo."
RATE = "optimizer.learning_rate: no effect, trpo has no optimiser"
DATA = "data.path: no effect, `jaxrl train` samples its data from task.name. Read by `jaxrl sft`."
GIVEN = [
    "critic.learning_rate=1e-3",
    "critic.whiten=true",
    "trust_region.max_kl=0.1",
    "optimizer.learning_rate=1e-4",
    "data.path=rows.jsonl",
]


def notes(objective, command="train", given=GIVEN):
    config = parse_config(apply_overrides({"objective": objective}, given))
    return unused_settings(config, build_objective(config.objective), command)


@pytest.mark.parametrize(
    ("objective", "command", "expected"),
    [
        ("grpo", "train", [CRITIC, REGION, DATA]),
        ("ppo", "train", [REGION, DATA]),
        ("trpo", "train", [CRITIC, RATE, DATA]),
        ({"recipe": "trpo"}, "train", [CRITIC, RATE, DATA]),
        ("dpo", "sft", [CRITIC, REGION]),
        ("reward_model", "sft", [CRITIC, REGION]),
    ],
)
def test_what_has_no_effect_is_named_with_its_readers(objective, command, expected):
    found = notes(objective, command)
    assert len(found) == len(expected)
    assert all(note.startswith(words) for note, words in zip(found, expected, strict=True))


@pytest.mark.parametrize("objective", ["grpo", "ppo", "trpo"])
def test_defaults_say_nothing_even_when_they_are_spelled_out(objective):
    assert notes(objective, given=["critic.learning_rate=1e-5", "trust_region.max_kl=0.01"]) == []


def test_a_run_says_it(tmp_path):
    tiny = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"
    config = load_config(tiny, ["objective=grpo", "trust_region.max_kl=0.1"])
    run = loop.Run(config, tmp_path / "run", resume=False)
    assert run.notes == (REGION,)
