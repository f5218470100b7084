"""Objectives as configs name them: recipes, stages, import paths; and what is refused, with what it says."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.errors import InputError
from jaxrl_llm.objectives import (
    argument_help,
    build_objective,
    check_trainable,
    example_arguments,
    required_arguments,
    uses_groups,
)
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.types import TokenBatch

ARGUMENTS = {"dr_grpo": {"limit": 8}}  # of recipes that have no default for them
LISTS = {"topk_ids", "topk_logprob_behavior", "topk_logprob_proximal", "topk_logprob"}
FROM_ROLLOUT = {"rewards", "baseline_reward", "agent"}
# By the training loop:
FILLED = {"logprob_proximal", "logprob_reference", "entropy", "value", *LISTS, *FROM_ROLLOUT}
CHAIN = ["group_advantage", "normalize_by_token", "token_ratio", "clip_surrogate"]


def table(objective):
    return jrl.describe(objective)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    mask = np.ones((4, 6), bool)
    logprob = rng.normal(-1.0, 0.5, (4, 6))
    return TokenBatch.from_rows(
        rng.integers(0, 9, (4, 6)),
        mask,
        group=[0, 0, 1, 1],
        reward=[1.0, 0.0, 0.5, 2.0],
        logprob_behavior=logprob,
        version=0,
    ), jnp.asarray(logprob + rng.normal(0, 0.5, (4, 6)), jnp.float32)


def value(objective, given):
    batch, logprob = given
    return float(jrl.loss(objective, logprob, batch)[0])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_by_name(name):
    arguments = ARGUMENTS.get(name, {})
    objective = build_objective({"recipe": name, **arguments} if arguments else name)
    assert table(objective) == table(RECIPES[name](**arguments))
    reads = jrl.needs(objective)
    if {need.field for need in reads} <= FILLED | {
        "logprob_teacher",
        "divergence",
    } and "loss.value" not in reads:
        check_trainable(objective)
    else:
        with pytest.raises(InputError, match="The training loop does not provide it"):
            check_trainable(objective)


@pytest.mark.parametrize("anchor", ["proximal", "behavior"])
def test_the_loop_has_lists_of_both_policies(anchor):
    check_trainable(build_objective({"recipe": "dppo", "kind": "topk_tv", "anchor": anchor}))


def test_parts_of_the_reward_are_those_of_the_task():
    objective = build_objective({"recipe": "gdpo", "weights": {"format": 1.0, "taste": 1.0}})
    check_trainable(objective, ("reward", "format", "taste"))
    with pytest.raises(InputError, match=r"'taste', which.*Its parts: format, reward\.") as error:
        check_trainable(objective, ("reward", "format"))
    assert "does not provide" not in str(error.value)


def test_roles_are_filled():
    stages = [{"agent_baseline_advantage": {"agents": 2}}, "normalize_by_sequence_sum", "reinforce_surrogate"]
    check_trainable(build_objective(stages))


def test_arguments_and_overrides_of_stages(batch):
    spec = {"recipe": "grpo", "clip_high": 0.3, "stages": {"clip_surrogate": {"low": 0.1}}}
    objective = build_objective(spec)
    assert table(objective) == table(
        jrl.chain(
            jrl.group_advantage(),
            jrl.normalize_by_sequence(),
            jrl.token_ratio(),
            jrl.clip_surrogate(low=0.1, high=0.3),
        )
    )
    assert value(objective, batch) != value(build_objective("grpo"), batch)
    assert spec["stages"] == {"clip_surrogate": {"low": 0.1}} and spec["recipe"] == "grpo"  # not consumed
    assert table(build_objective({"recipe": "grpo", "stages": {}})) == table(build_objective("grpo"))


def test_n31_a_coefficient_always_reaches_the_loss(batch):
    given, logprob = batch
    given = given.replace(logprob_reference=given.logprob_behavior - 0.3)
    values = [
        value(build_objective({"recipe": name, "kl_coef": coefficient}), (given, logprob))
        for name in ("grpo", "rloo", "gspo")
        for coefficient in (0.0, 0.1)
    ]
    assert all(with_kl > without for without, with_kl in zip(values[::2], values[1::2], strict=True))


def test_a_list_of_stages(batch):
    objective = build_objective(
        [
            {"group_advantage": {"scale": "none"}},
            "normalize_by_token",
            {"token_ratio": None},
            "clip_surrogate",
        ]
    )
    by_hand = jrl.chain(
        jrl.group_advantage(scale="none"), jrl.normalize_by_token(), jrl.token_ratio(), jrl.clip_surrogate()
    )
    assert table(objective) == table(by_hand)
    assert value(objective, batch) == value(by_hand, batch)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of one's own, in the folder one is in."""
    (tmp_path / "own_objectives.py").write_text(
        "import jaxrl_llm as jrl\n"
        "ready = jrl.recipes.rloo()\n"
        "def made(high=0.2):\n"
        "    return jrl.chain(jrl.group_advantage(), jrl.normalize_by_token(), jrl.token_ratio(),\n"
        "                     jrl.clip_surrogate(high=high))\n"
        "def partial():\n"
        "    return jrl.group_advantage()\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    # As under a console script: the folder one is in is not searched.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield "own_objectives"
    sys.modules.pop("own_objectives", None)


def test_an_import_path(module):
    assert table(build_objective(f"{module}:ready")) == table(RECIPES["rloo"]())
    made = build_objective({"recipe": f"{module}:made", "high": 0.5})
    assert table(made) == table(build_objective([*CHAIN[:3], {"clip_surrogate": {"high": 0.5}}]))
    changed = build_objective({"recipe": f"{module}:made", "stages": {"clip_surrogate": {"high": 0.5}}})
    assert table(changed) == table(made)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("{}:number", ["int", "not a LossTransform"]),
        ("{}:partial", ["incomplete", "normalize_by_token"]),
        ("{}:absent", ["absent", "cannot import"]),
        ({"recipe": "{}:made", "hgh": 1}, ["no argument 'hgh'", "Did you mean high?"]),
    ],
)
def test_import_paths_that_are_refused(module, path, parts):
    if isinstance(path, dict):
        path = {**path, "recipe": path["recipe"].format(module)}
    else:
        path = path.format(module)
    refused(path, parts)


def test_every_required_argument_of_a_recipe_is_explained():
    for name, recipe in RECIPES.items():
        for argument in required_arguments(recipe):
            assert argument_help(recipe, argument), (name, argument)
        build_objective({"recipe": name, **example_arguments(recipe)})


def refused(spec, parts):
    with pytest.raises(InputError) as error:
        build_objective(spec)
    message = str(error.value)
    assert message.startswith("objective")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("grop", ["no recipe 'grop'", "Did you mean grpo?", "Recipes: cdpo, cispo, dapo"]),
        ("", ["no recipe ''"]),
        ({"clip_high": 0.3}, ["expected a recipe name under `recipe`", "None"]),
        ({"recipe": ["grpo"]}, ["expected a recipe name", "['grpo']"]),
        (
            {"recipe": "grpo", "clip_hgh": 1},
            ["recipe grpo has no argument 'clip_hgh'", "clip_high", "It takes"],
        ),
        ({"recipe": "grpo", "clip_high": -1}, ["recipe grpo", "high", "-1"]),
        ({"recipe": "grpo", "clip_high": "wide"}, ["recipe grpo", "high", "'wide'"]),
        ({"recipe": "grpo", "anchor": "old"}, ["anchor", "'old'", "behavior"]),
        ({"recipe": "grpo", "importance_cap": 2.0}, ["importance_cap", "proximal"]),
        (
            {"recipe": "dr_grpo"},
            ["recipe dr_grpo needs limit (the most tokens that an answer can", "--set objective.limit=256"],
        ),
        (
            {"recipe": "grpo", "stages": {"clip_surogate": {"low": 0.1}}},
            ["objective.stages", "clip_surrogate"],
        ),
        (
            {"recipe": "grpo", "stages": {"clip_surrogate": {"lw": 0.1}}},
            ["clip_surrogate.lw", "clip_surrogate.low"],
        ),
        ({"recipe": "grpo", "stages": {"clip_surrogate": {"low": -1}}}, ["objective.stages", "low", "-1"]),
        ({"recipe": "grpo", "stages": {"clip_surrogate": 0.1}}, ["objective.stages", "{argument: value}"]),
        ({"recipe": "grpo", "stages": ["clip_surrogate"]}, ["objective.stages", "clip_surrogate"]),
        ([], ["incomplete"]),
        (CHAIN[:1], ["incomplete", "normalize_by_sequence"]),
        (CHAIN[:3], ["nothing to minimise", "clip_surrogate"]),
        ([3], ["objective[0]", "stage name", "3"]),
        ([*CHAIN[:3], {"clip_surrogate": {}, "token_ratio": {}}], ["objective[3]", "stage name"]),
        (
            ["grp_advantage"],
            ["objective[0]: no stage 'grp_advantage'", "Did you mean group_advantage?", "Stages: "],
        ),
        ([{"group_advantage": {"scle": "none"}}], ["no argument 'scle'", "Did you mean scale?"]),
        ([{"group_advantage": {"scale": "non"}}], ["scale", "'none'", "'non'"]),
        ([{"group_advantage": "none"}], ["objective[0]", "{argument: value}", "'none'"]),
        (
            [{"penalize_kl_in_reward": {}}],
            ["objective[0]", "needs coef", "{penalize_kl_in_reward: {coef: 0.1}}"],
        ),
        ([CHAIN[3], *CHAIN[:3]], ["clip_surrogate", "reads", "move it before stage 0"]),
        ([CHAIN[0], *CHAIN], ["both called group_advantage"]),
        ("no_such_module:objective", ["cannot import 'no_such_module:objective'"]),
        ("jaxrl_llm.recipes:grpo:x", ["cannot import"]),
        (":grpo", ["cannot import"]),
        ("jaxrl_llm.recipes:RECIPES", ["dict", "not a LossTransform"]),
    ],
)
def test_what_is_refused_and_what_it_says(spec, parts):
    refused(spec, parts)


def test_what_the_loop_cannot_provide_is_refused_before_the_run():
    given = build_objective(["given_advantage", "normalize_by_token", "reinforce_surrogate"])
    with pytest.raises(InputError, match=r"given_advantage needs batch\.advantage.*loop does not provide"):
        check_trainable(given)
    check_trainable(
        build_objective(
            {
                "recipe": "grpo",
                "kl_coef": 0.1,
                "entropy_coef": 0.01,
                "anchor": "proximal",
                "importance_cap": 2.0,
            }
        )
    )


@pytest.mark.parametrize(("name", "groups"), [("grpo", True), ("rloo", True), ("reinforce", False)])
def test_which_objectives_compare_the_samples_of_a_prompt(name, groups):
    assert uses_groups(build_objective(name)) is groups
