"""Every recipe that the training loop can fill learns something on the tiny model."""

import dataclasses
import pathlib

import numpy as np
import pytest

from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.learner.score import teacher_needs
from jaxrl_llm.objectives import FILLED
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rollout.task import TASKS, GeneratedTask, make_task
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
    return not takes_pairs(objective) and not teacher_needs(objective) and fields <= FILLED | LISTS


# `jaxrl sft` trains sft, reward models and preferences (tests/test_fine_tune.py); tests/test_teacher.py has a teacher.
TRAINED = sorted(name for name in RECIPES if name != "sft" and fills(name))


def test_what_the_loop_does_not_fill_is_known():
    """Recipes with a teacher, and those over given answers, have tests of their own."""
    left = {n for n in RECIPES if n not in TRAINED and not takes_pairs(RECIPES[n](**ARGUMENTS.get(n, {})))}
    assert left == {"gkd", "opd", "sft"}


def config_of(objective, *more):
    return load_config(
        TINY_YAML,
        [
            f"objective={objective}",
            "steps=24",
            "rollout.prompts=16",
            "evaluation.items=0",
            "snapshots.every=0",
            "critic.learning_rate=3e-3",
            "trust_region.max_kl=0.05",
            *more,
        ],
    )


def trained(config, folder):
    assert train(config, folder) == 0
    rows = read_metrics(folder)
    rewards = [row["reward/mean"] for row in rows]
    first, last = np.mean(rewards[:4]), np.mean(rewards[-4:])
    assert last > first + 0.1, rewards
    return rows


@pytest.mark.parametrize("name", TRAINED)
def test_the_reward_rises(name, tmp_path):
    arguments = "".join(f", {key}: {value}" for key, value in ARGUMENTS.get(name, {}).items())
    trained(config_of(f"{{recipe: {name}{arguments}}}"), tmp_path / "run")


def test_dppo_by_the_lists_of_the_sampler(tmp_path):
    objective = "{recipe: dppo, kind: topk_tv, k: 8, anchor: behavior}"
    rows = trained(config_of(objective, "learner.row_tokens=128", "learner.minibatches=2"), tmp_path / "run")
    # On the first of two updates the learner is the policy that sampled.
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows)
    assert max(row["policy/divergence"] for row in rows) > 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoVoices(GeneratedTask):
    """Vowels by turns of two roles; the second earns 10 more, whatever it says."""

    def _item(self, name, seed, index):
        return dataclasses.replace(super()._item(name, seed, index), agent=index % 2)

    def score(self, item, completion):
        score = super().score(item, completion)
        return dataclasses.replace(score, value=score.value + 10.0 * item.agent)


def test_each_role_has_a_baseline_of_its_own(tmp_path, monkeypatch):
    def build():
        plain = make_task("vowel")
        return TwoVoices(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)})

    monkeypatch.setitem(TASKS, "two_voices", build)
    monkeypatch.setattr("jaxrl_llm.assembly.self_test", lambda task: None)  # it pays for wrong answers
    stages = (
        "[{agent_baseline_advantage: {agents: 2, decay: 0.98}}, normalize_by_sequence, reinforce_surrogate]"
    )
    rows = trained(config_of(stages, "task.name=two_voices", "rollout.group_size=4"), tmp_path / "run")
    # A baseline that mixed both roles would settle between them; with one each their mean does.
    assert rows[-1]["policy/agent_baseline"] == pytest.approx(rows[-1]["reward/mean"], abs=0.6)
