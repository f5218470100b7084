"""`jaxrl bench`: its figures add up and its counts are right; speed itself is never asserted."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.bench import loop, objectives, run_bench
from jaxrl_llm.bench.objectives import comparable_recipes
from jaxrl_llm.bench.rollout import bench_rollout, ragged_lengths, rollout_work
from jaxrl_llm.bench.update import update_flops
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.update import make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.types import Mean

SMALL = {
    "model": "tiny",
    "dtype": "float32",
    "prompts": 2,
    "group": 4,
    "prompt_tokens": 8,
    "new_tokens": 8,
    "micro_batch_rows": 4,
    "repeats": 1,
}


@pytest.mark.parametrize(
    ("what", "changes", "message"),
    [
        ("update", {"micro_batch_rows": 0}, "--micro-batch-rows must be at least 1"),
        ("rollout", {"repeats": -3}, "--repeats must be at least 1"),
        ("rollout", {"recipes": ("grpo",)}, "--recipes goes with"),
        ("objectives", {"recipes": ("nope",)}, "nope cannot be compared"),
        ("rollout", {"prompts": 10**12}, "Take fewer"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(what, changes, message):
    with pytest.raises(InputError, match=message):
        run_bench(what, **(SMALL | {"model": "no such model"} | changes))


@pytest.mark.slow
def test_an_iteration_is_a_rollout_and_an_update(monkeypatch):
    monkeypatch.setattr(loop, "bench_loop", lambda model, **sizes: {"loop_share": sizes["repeats"] / 50})
    out = run_bench("iteration", **SMALL)
    assert out["seconds"] == out["rollout/seconds"] + out["update/seconds"] > 0
    assert out["ratio_to_floor"] == out["seconds"] / out["floor_seconds"]
    assert out["update/trained_tokens"] == 2 * 4 * 8
    assert out["rollout/tokens_per_second"] == pytest.approx(64 / out["rollout/seconds"])
    assert out["loop/loop_share"] == 1 / 50


@pytest.mark.slow
def test_what_the_loop_itself_costs():
    sizes = {"prompts": 2, "group": 2, "new_tokens": 4, "context": 64, "micro_batch_rows": 4, "repeats": 1}
    out = loop.bench_loop("tiny", dtype="float32", **sizes)
    assert 0 < out["loop_seconds"] < out["step_seconds"]
    assert out["loop_share"] == out["loop_seconds"] / out["step_seconds"]
    assert 0 < out["snapshot_seconds"] and 0 < out["snapshot_share"] < 1


def test_arithmetic_of_an_update():
    """2 layers of width 64, 4 + 2 heads of 16, mlp 128, vocabulary 128; one row of 2 tokens, one of them trained."""
    attention_weights = 64 * (4 * 16) * 2 + 64 * (2 * 16) * 2  # q and o, k and v
    weights = attention_weights + 3 * 64 * 128
    keys_seen = 1 + 2  # by the first and the second token
    scores_and_values = 2 * 4 * 16 * keys_seen
    layers = 2 * 2 * (2 * weights + scores_and_values)
    assert update_flops(TINY, 1, 2, 1) == 3 * (layers + 2 * 64 * 128)


@pytest.mark.slow
def test_recipes_are_compared_with_grpo():
    names = ("gdpo", "simko")  # several rewards; lists of tokens
    out = run_bench("objectives", **SMALL, recipes=names)
    ratios = {key: value for key, value in out.items() if key.endswith("/ratio")}
    assert set(ratios) == {f"{name}/ratio" for name in names}
    assert all(math.isfinite(r) and r > 0 for r in ratios.values())
    assert out["largest_ratio"] == max(ratios.values())


@pytest.mark.slow
def test_every_comparable_recipe_is_compared(monkeypatch):
    """Updates are traced and not compiled, which takes minutes; each recipe trains in tests/test_recipes_train.py."""

    def traced_only(*args, **options):
        step = make_update_step(*args, **options)

        def run(state, batch):
            after, metrics = jax.eval_shape(step.jitted, state, batch)
            assert jax.tree.structure(after) == jax.tree.structure(state)
            return state, {name: Mean(jnp.float32(1), jnp.float32(1)) for name in metrics}

        return run

    monkeypatch.setattr(objectives, "make_update_step", traced_only)
    monkeypatch.setattr(objectives.time, "process_time", iter(range(10**6)).__next__)
    out = run_bench("objectives", **SMALL)
    assert {f"{name}/ratio" for name in comparable_recipes()} <= set(out)


def test_recipes_of_another_kind_are_refused():
    assert set(RECIPES) - set(comparable_recipes()) >= {"trpo", "dpo", "kto", "reward_model"}
    with pytest.raises(InputError, match="dpo cannot be compared. Comparable: "):
        run_bench("objectives", **SMALL, recipes=("dpo",))


@pytest.mark.slow
def test_rows_of_different_lengths_are_counted_and_floored():
    lengths = [3, 8, 1, 5]
    work = {"prompts": 2, "group": 2, "prompt_tokens": 8, "new_tokens": 8}
    out = bench_rollout(TINY, **work, dtype="float32", repeats=1, slots=4, lengths=lengths)
    assert out["tokens"] == sum(lengths) and out["shortest_tokens"] == 1
    assert out["tokens_per_second"] == pytest.approx(17 / out["seconds"])
    whole = bench_rollout(TINY, **work, dtype="float32", repeats=0, slots=4)
    assert whole["tokens"] == 32
    assert whole["flops"] > out["flops"] and whole["bytes"] > out["bytes"]


def test_work_of_equal_lengths_is_the_work_of_one_length():
    work = {"prompts": 2, "group": 3, "prompt_tokens": 8, "new_tokens": 5, "slots": 4}
    assert rollout_work(TINY, **work) == rollout_work(TINY, **work, lengths=[5] * 6)


def test_ragged_lengths_spread_between_the_two_ends():
    lengths = ragged_lengths(64, 16, 128)
    assert (min(lengths), max(lengths), len(lengths), sum(lengths)) == (16, 128, 64, 64 * 72)
    assert lengths == ragged_lengths(64, 16, 128) != sorted(lengths)
    with pytest.raises(InputError, match="between 1 and 8 .*, got 9"):
        ragged_lengths(4, 9, 8)


@pytest.mark.parametrize("lengths", [[1, 2, 3], [1, 2, 3, 9], [0, 1, 1, 1]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(InputError, match="lengths must be 2 x 2 numbers in"):
        bench_rollout(TINY, prompts=2, group=2, new_tokens=8, lengths=lengths)


def test_the_shortest_sample_can_be_given_for_rollouts_only():
    out = run_bench("rollout", **SMALL, shortest_tokens=2)
    assert (out["shortest_tokens"], out["tokens"]) == (2, sum(ragged_lengths(8, 2, 8)))
    with pytest.raises(InputError, match="--shortest-tokens goes with .*, not with update"):
        run_bench("update", **SMALL, shortest_tokens=2)
