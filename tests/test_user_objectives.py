"""Objectives from a user's own module: whatever is wrong there is one clear error, before a model is loaded."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.errors import InputError
from jaxrl_llm.objectives import build_objective, check_group_size, check_trainable

MODULE = """
import jax.numpy as jnp
import jaxrl_llm as jrl

const = jrl.recipes.grpo()

def boom():
    raise RuntimeError("no luck")

@jrl.stage(reads=("loss.log_ratio", "batch.advantage"), writes=("loss.weight",))
def undeclared():
    def apply(loss, batch):
        return loss.scale_weight(jnp.exp(batch.logprob_proximal - loss.log_ratio))
    return apply

@jrl.stage(reads=("loss.log_ratio",), writes=("loss.weight",))
def concrete():
    def apply(loss, batch):
        return loss.scale_weight(jnp.ones_like(loss.log_ratio) * float(jnp.sum(loss.log_ratio)))
    return apply

def chained(stage):
    return jrl.chain(
        jrl.group_advantage(), jrl.normalize_by_token(), jrl.token_ratio(), jrl.clip_surrogate(), stage
    )

def with_undeclared():
    return chained(undeclared())

def with_concrete():
    return chained(concrete())
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "dead_for_test.py").write_text("raise KeyError('gone')")
    (tmp_path / "syntax_for_test.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "spec, said",
    [
        (
            "mine_for_test:boom",
            r"mine_for_test:boom failed: RuntimeError: no luck \(.*mine_for_test.py, line 8\)",
        ),
        (
            "dead_for_test:x",
            r"cannot import 'dead_for_test:x': KeyError: 'gone' \(.*dead_for_test.py, line 1\)",
        ),
        ("syntax_for_test:x", "cannot import 'syntax_for_test:x': SyntaxError"),
        ("builtins:dict", "builtins:dict is no function of Python"),
        (".mine_for_test:x", "cannot import '.mine_for_test:x'"),
        (
            {"recipe": "mine_for_test:const", "clip_high": 0.3},
            r"is a chain already, which takes no arguments \(got clip_high\).*objective.stages.STAGE",
        ),
    ],
)
def test_what_cannot_be_built(modules, spec, said):
    with pytest.raises(InputError, match=said):
        build_objective(spec)


@pytest.mark.parametrize(
    "name, said",
    [
        ("with_undeclared", r"TypeError: .*NoneType.* \(.*mine_for_test.py, line 13\).*name it in reads="),
        ("with_concrete", r"traced as jax.jit does: ConcretizationTypeError.*mine_for_test.py, line 19"),
    ],
)
def test_what_cannot_be_trained(modules, name, said):
    with pytest.raises(InputError, match=said):
        check_trainable(build_objective(f"mine_for_test:{name}"))


def test_groups_must_be_larger_than_k():
    check_group_size(jrl.recipes.pass_at_k(k=4), 5)
    with pytest.raises(InputError, match="4 samples per prompt hold only one set of k=4"):
        check_group_size(jrl.recipes.pass_at_k(k=4), 4)
    check_group_size(jrl.recipes.reinforce(), 1)
    with pytest.raises(InputError, match="rollout.group_size: with 1 sample"):
        check_group_size(jrl.recipes.grpo(), 1)


def test_bounds_that_leave_nothing_are_refused():
    with pytest.raises(ValueError, match=r"low=5.* is above high=0.5"):
        jrl.recipes.icepop(low=5.0, high=0.5)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "robust_dpo", "ipo", "hinge", "orpo", "simpo"])
def test_pairs_under_jit_with_the_batch_closed_over(name):
    batch = jrl.TokenBatch.from_rows(
        np.ones((2, 3), int), np.ones((2, 3), bool), logprob_reference=np.zeros((2, 3))
    )
    logprob = jnp.array([[0.0, -1.0, -2.0], [0.0, -2.0, -0.5]])
    objective = jrl.recipes.RECIPES[name]()
    eager = jrl.loss(objective, logprob, batch)[0]
    np.testing.assert_allclose(jax.jit(lambda x: jrl.loss(objective, x, batch)[0])(logprob), eager, rtol=1e-6)


def test_published_margins_of_simpo():
    """gamma is a margin in nats there, not a discount."""
    margins = [info.arguments.get("margin") for info in jrl.recipes.simpo(beta=2.5, gamma=1.4).info]
    assert 1.4 in margins
