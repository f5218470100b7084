"""Whole runs on the tiny mixture of experts: balanced by biases, resumed, sampled from, written out."""

import shutil

import jax
import numpy as np
import pytest
from runs import TINY_YAML, figures, params, run_to_the_end, same_run

from jaxrl_llm.assembly import build_sampler, configured_model
from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.inference import load_policy
from jaxrl_llm.objectives import build_objective
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.train import train

ROUTERS = {
    f"policy/{name}"
    for name in """expert_load_max expert_load_min expert_idle expert_dropped expert_replayed expert_exchange
    router_entropy""".split()
}


def config(*overrides, stage="balance_experts_by_bias: {rate: 0.01}", source="tiny-moe"):
    objective = f"[group_advantage, normalize_by_token, token_ratio, clip_surrogate, {{{stage}}}]"
    return load_config(
        TINY_YAML,
        [
            f"objective={objective}",
            f"model.source={source}",
            "steps=3",
            "evaluation.items=0",
            "snapshots.every=1",
            "snapshots.keep_last=3",
            "learner.micro_batch_rows=64",
            *overrides,
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # tests of other files that compare bits compile their own


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    return run_to_the_end(config(), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.slow
def test_a_run_balances_by_biases_that_its_sampler_has_too(balanced):
    rows = figures(balanced)
    for step, row in enumerate(rows, 1):
        assert row.keys() >= ROUTERS | {"policy/expert_preferred_max", "policy/router_bias_max"}
        assert row["policy/router_bias_max"] == pytest.approx(0.01 * step)
        assert row["policy/logprob_gap_max"] < 1e-4 and row["policy/expert_dropped"] == 0
    # Without replay, too: certified probes, and the policy of a snapshot.
    model, version = load_policy(load_config(balanced / "config.yaml"), str(balanced))
    assert version == 3 and model.config.router_bias
    np.testing.assert_array_equal(
        model.params["layers"]["router_bias"], params(balanced)["layers"]["router_bias"]
    )
    # Whatever the objective of the config says.
    other, _ = load_policy(config("objective=grpo"), str(balanced))
    assert other.config.router_bias
    # Over several devices, too.
    spread, _ = load_policy(config("objective=grpo"), str(balanced), mesh=make_mesh(fsdp=2, expert=4))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(spread.params))
    np.testing.assert_array_equal(
        spread.params["layers"]["router_bias"], model.params["layers"]["router_bias"]
    )


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(balanced, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(balanced, folder)
    for version in (2, 3):
        shutil.rmtree(folder / "snapshots" / str(version))
    assert train(config(), folder, resume=True) == 0
    same_run(folder, balanced)


@pytest.mark.slow
def test_it_is_not_written_out_as_what_it_is_not(balanced, tmp_path, capsys):
    def convert(*flags):
        with pytest.raises(SystemExit) as ended:
            main(["convert", str(balanced), str(tmp_path / "hf"), *flags])
        return ended.value.code

    assert convert() == 2
    assert "--drop-router-bias" in capsys.readouterr().err and not (tmp_path / "hf").exists()
    assert convert("--drop-router-bias") == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_capacity_of_the_objective_is_that_of_the_learner_and_not_of_the_sampler():
    given = config(stage="balance_experts: {coef: 0, capacity: 1.25}")
    model = configured_model(given, None)
    assert model.config.expert_capacity == 1.25 and not model.config.router_bias
    assert build_sampler(given, model).config.expert_capacity is None
    assert configured_model(config(), None).config.expert_capacity is None
    with pytest.raises(InputError, match="capacity must be a number > 0, or None, got 0"):
        build_objective(config(stage="balance_experts: {capacity: 0}").objective)


def test_stages_for_experts_are_refused_for_a_model_without(tmp_path):
    for stage in ("balance_experts_by_bias: {}", "balance_experts: {}"):
        with pytest.raises(InputError, match="no experts"):
            train(config(stage=stage, source="tiny"), tmp_path / "run")
