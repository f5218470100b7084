"""What `jaxrl objectives` says about recipes and stages."""

import inspect
import json

import pytest

import jaxrl_llm as jrl
from jaxrl_llm import cli, explain, recipes, transforms
from jaxrl_llm.errors import InputError
from jaxrl_llm.transforms.dataflow import ON_DEMAND


def test_the_list_has_every_recipe_and_stage():
    text = explain.list_objectives().splitlines()
    for name in recipes.RECIPES:
        assert any(line.startswith(f"{name}(") for line in text), name
    for name in transforms.STAGES:
        assert any(line.startswith(f"{name}(") for line in text), name
    at = next(i for i, line in enumerate(text) if line.startswith("grpo("))
    assert "clip_low=0.2" in text[at] and "2402.03300" in text[at + 1]
    assert text[at + 2] == "    needs: nothing beyond the rollout"


def test_a_derivation_has_the_chain_its_equations_and_its_numbers():
    text = explain.derivation("dapo", {"clip_high": 0.3})
    assert jrl.describe(jrl.dapo(clip_high=0.3)) in text
    assert "clip(r_t, 1 - low, 1 + high)" in text and "with low = 0.2, high = 0.3" in text
    assert "Needs: nothing beyond the rollout." in text
    assert "batch.logprob_reference" in explain.derivation("grpo", {"kl_coef": 0.04})


@pytest.mark.slow
def test_token_weights_by_hand():
    """Dividing by the std gives a token of 1 right answer in 8 the weight 7 times that of a wrong one."""
    by_token = explain.token_weights(jrl.dapo(), rates=(1, 4), lengths=(2, 8))
    right, wrong = by_token[1, 2]
    assert by_token[1, 8] == pytest.approx((right, wrong)) and right == pytest.approx(-7 * wrong)
    assert by_token[4, 2][0] == pytest.approx(-by_token[4, 2][1])
    by_sequence = explain.token_weights(jrl.grpo(), rates=(1,), lengths=(2, 8))
    assert by_sequence[1, 2][0] == pytest.approx(4 * by_sequence[1, 8][0])
    # In units of the mean over tokens: a group of 8 answers of 8 tokens, one right, no std.
    chain = jrl.chain(jrl.group_advantage(scale="none"), jrl.normalize_by_token(), jrl.reinforce_surrogate())
    assert explain.token_weights(chain, rates=(1,), lengths=(8,))[1, 8] == pytest.approx((4.0, -4 / 7))


def test_names_and_arguments_that_do_not_exist():
    with pytest.raises(InputError, match="Did you mean grpo"):
        explain.derivation("grop")
    with pytest.raises(InputError, match="no argument 'clip'"):
        explain.derivation("grpo", {"clip": 0.2})


# Without a table: they compare pairs of answers, or read lists or a teacher that such a batch does not have.
NO_TABLE = {
    "cdpo",
    "dpo",
    "gkd",
    "hinge",
    "ipo",
    "kto",
    "opd",
    "orpo",
    "ppo",
    "reward_model",
    "robust_dpo",
    "simko",
    "simpo",
}


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_every_recipe_has_a_derivation(name):
    text = explain.derivation(name, {"dr_grpo": {"limit": 64}}.get(name))
    assert text.startswith(f"{name}(")
    # For users: no field of a batch that is None, no function to call.
    assert "is None" not in text[text.index("Needs: ") :] and "batch." not in text[text.index("Needs: ") :]
    assert ("Weight of a token" in text) == (name not in NO_TABLE)
    assert ("No table of token weights" in text) == (name in NO_TABLE)


def test_why_there_is_no_table():
    assert "a teacher decides" in explain.derivation("opd") and "a teacher decides" in explain.derivation(
        "gkd"
    )
    assert "a critic decides" in explain.derivation("ppo")
    assert "Assumed: the greedy answer has reward 0." in explain.derivation("remax")
    assert "Assumed" not in explain.derivation("grpo")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gkd", "a teacher: set teacher.source or teacher.snapshot."),
        ("opd", "a teacher: set teacher.source or teacher.snapshot."),
        ("ppo", "a critic, trained beside the policy: see critic.* (critic.learning_rate, default 1e-5"),
        ("prorl", "a frozen copy of the start"),
        ("remax", "one greedy answer more per prompt."),
        ("gdpo", "several named rewards of the task."),
        ("dpo", "given pairs of answers (`jaxrl sft`): rows {prompt, chosen, rejected}"),
        ("kto", "rows {prompt, completion, label}, or {prompt, chosen, rejected}"),
        ("grpo", "Needs: nothing beyond the rollout."),
    ],
)
def test_needs_are_told_in_words(name, words):
    text = explain.derivation(name)
    assert words in text[text.index("Needs: ") :]
    listed = explain.list_objectives().splitlines()
    at = next(i for i, line in enumerate(listed) if line.startswith(f"{name}("))
    assert words.removeprefix("Needs: ").rstrip(".") in listed[at + 2]


def test_every_field_that_can_be_needed_has_words():
    assert ON_DEMAND <= set(explain._WORDS)


def test_arguments_are_explained():
    assert inspect.getdoc(recipes.RECIPES["gspo"]) in explain.derivation("gspo")
    with pytest.raises(InputError, match=r"needs limit \(the most tokens.*--set objective\.limit=256"):
        explain.derivation("dr_grpo")
    assert "must be set: limit (the most tokens" in explain.list_objectives()


@pytest.mark.parametrize("name", sorted(transforms.STAGES))
def test_every_stage_is_shown(name):
    text = explain.derivation(name) if name not in recipes.RECIPES else explain._stage(name, {})
    assert text.startswith(f"{name}(") and inspect.getdoc(transforms.STAGES[name]) in text
    assert "Reads: " in text and "Writes: " in text and f"objective.stages.{name}." in text


def test_a_stage_with_arguments():
    assert "batch.logprob_proximal" in explain.derivation("token_ratio", {"anchor": "proximal"})
    for arguments, message in (({"scle": "none"}, "Did you mean scale"), ({"scale": "non"}, "'non'")):
        with pytest.raises(InputError, match=message):
            explain.derivation("group_advantage", arguments)


def jaxrl(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_the_command(capsys):
    code, out, _ = jaxrl(capsys, "objectives")
    assert code == 0 and out == explain.list_objectives() + "\n"
    code, out, _ = jaxrl(capsys, "objectives", "show", "dapo", "--set", "clip_high=0.35")
    assert code == 0 and out == explain.derivation("dapo", {"clip_high": 0.35}) + "\n"
    assert jaxrl(capsys, "objectives", "show", "dapo", "--set", "objective.clip_high=0.35")[1] == out
    assert jaxrl(capsys, "objectives", "show", "group_advantage")[0] == 0
    for wrong in (("show",), ("list", "dapo"), ("show", "dapo", "--set", "clip=1"), ("show", "dopa")):
        code, out, err = jaxrl(capsys, "objectives", *wrong)
        assert code == 2 and not out and err.startswith("jaxrl: ") and "Traceback" not in err


def test_the_list_as_data_is_json():
    data = json.loads(json.dumps(explain.objectives_as_data(), allow_nan=False))
    assert set(data) == {"recipes", "stages"} and set(data["recipes"]) == set(recipes.RECIPES)
    assert data["recipes"]["dr_grpo"]["required"] == ["limit"]
    assert data["recipes"]["dapo"]["arguments"]["clip_high"] == 0.28
    assert data["recipes"]["grpo"]["reads"] == [] and "batch.value" in data["recipes"]["ppo"]["reads"]
