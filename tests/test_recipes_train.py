"""Every recipe that the training loop can fill learns something on the tiny model."""

import pathlib

import numpy as np
import pytest

from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.objectives import FILLED
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.train import train
from jaxrl_llm.transforms import needs, takes_pairs

pytestmark = pytest.mark.slow

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"
ARGUMENTS = {"dr_grpo": {"limit": 2}}
LISTS = {"topk_ids", "topk_logprob_proximal"}  # the learner makes them


def fills(name):
    """Whether rollout and learner give everything that a recipe reads."""
    objective = RECIPES[name](**ARGUMENTS.get(name, {}))
    fields = {need.field for need in needs(objective) if need.record == "batch"}
    return not takes_pairs(objective) and fields <= FILLED | LISTS


# `jaxrl sft` trains sft, reward models and preferences (tests/test_fine_tune.py).
TRAINED = sorted(name for name in RECIPES if name != "sft" and fills(name))


def test_what_the_loop_does_not_fill_is_known():
    """A teacher, several rewards, a greedy answer: asked for in Python, refused by `jaxrl train`."""
    left = {n for n in RECIPES if n not in TRAINED and not takes_pairs(RECIPES[n](**ARGUMENTS.get(n, {})))}
    assert left == {"gdpo", "opd", "remax", "sft"}


@pytest.mark.parametrize("name", TRAINED)
def test_the_reward_rises(name, tmp_path, monkeypatch):
    arguments = "".join(f", {key}: {value}" for key, value in ARGUMENTS.get(name, {}).items())
    config = load_config(
        TINY_YAML,
        [
            f"objective={{recipe: {name}{arguments}}}",
            "steps=24",
            "rollout.prompts=16",
            "evaluation.items=0",
            "snapshots.every=0",
            "critic.learning_rate=3e-3",
            "trust_region.max_kl=0.05",
        ],
    )
    assert train(config, tmp_path / "run") == 0
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run")]
    first, last = np.mean(rewards[:4]), np.mean(rewards[-4:])
    assert last > first + 0.1, rewards
