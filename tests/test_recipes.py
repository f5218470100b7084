"""Recipes: what they are made of, what they need, and one update of each pinned against its formula."""

import inspect
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes, testing

REQUIRED = {"dr_grpo": {"limit": 12}}


EXTRA = {  # what a preference loss is made of
    **dict.fromkeys(("dpo", "cdpo", "robust_dpo", "ipo", "hinge"), {"batch.logprob_reference"}),
    "kto": {"batch.logprob_reference", "batch.reference_point"},
    "reward_model": {"loss.value"},
    "remax": {"batch.baseline_reward"},
    "gdpo": {"batch.rewards"},
    **dict.fromkeys(("decoupled_ppo", "icepop", "m2po"), {"batch.logprob_proximal"}),
    "prorl": {"batch.logprob_reference"},
    "ppo": {"batch.value", "batch.logprob_proximal"},
    "trpo": {"batch.logprob_proximal"},
    "opd": {"batch.logprob_teacher"},
    "gkd": {"loss.divergence(kind=jsd, beta=0.5)"},
    "simko": {
        "batch.logprob_proximal",
        "batch.topk_ids(k=3)",
        "batch.topk_logprob_proximal",
        "loss.topk_logprob",
        "loss.entropy",
    },
}


def build(name, **arguments):
    return recipes.RECIPES[name](**REQUIRED.get(name, {}), **arguments)


def names(objective):
    return [info.name for info in objective.info]


def test_every_recipe_is_public_and_documented():
    assert set(recipes.RECIPES) == set(recipes.__all__) - {"RECIPES"}
    for name, recipe in recipes.RECIPES.items():
        assert recipe is getattr(jrl, name) and "arXiv" in recipe.__doc__ or "Williams" in recipe.__doc__


SHARED = {"kl_coef", "kl_estimator", "entropy_coef", "importance_cap", "anchor", "clip_low", "clip_high"}


def test_a_docstring_has_the_equation_the_reduction_and_each_argument():
    for name, recipe in recipes.RECIPES.items():
        first, _, rest = recipe.__doc__.partition("\n\n")
        assert any(sign in first for sign in ("= ", "log σ", "(1 - σ", "-log π", "max(", "-A", "(h - ")), name
        assert re.search(r"mean\s+over|sum", recipe.__doc__, re.IGNORECASE), name
        assert rest, name
        own = set(inspect.signature(recipe).parameters) - SHARED
        assert not {argument for argument in own if argument not in recipe.__doc__}, name


def test_no_module_hides_a_recipe_or_a_stage():
    """Importing jaxrl_llm.x binds the name x on the package: a recipe of that name would turn into a module."""
    modules = {m.name for package in (jrl, recipes) for m in pkgutil.iter_modules(package.__path__)}
    assert not modules & (set(recipes.__all__) | set(jrl.transforms.__all__))


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_default_recipe_needs_no_extra_forward_pass(name):
    objective = build(name)
    jrl.transforms.check_complete(objective)
    assert jrl.needs(objective) == EXTRA.get(name, frozenset())


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_zero_and_none_leave_the_stage_out(name):
    parameters = inspect.signature(recipes.RECIPES[name]).parameters
    candidates = ("kl_coef", "entropy_coef", "importance_cap", "overlong_limit", "nll_coef")
    optional = [p for p in candidates if p in parameters and not parameters[p].default]
    for value in (0, None):
        assert names(build(name, **dict.fromkeys(optional, value))) == names(build(name))
    more = {p: 4 if p == "overlong_limit" else 0.5 for p in optional}
    if "importance_cap" in optional and "anchor" in parameters:
        more["anchor"] = "proximal"
    assert len(names(build(name, **more))) == len(names(build(name))) + len(optional)


def test_stages_of_the_recipes():
    assert names(jrl.grpo()) == ["group_advantage", "normalize_by_sequence", "token_ratio", "clip_surrogate"]
    assert names(jrl.dapo(overlong_limit=20, filter_truncated=True)) == [
        "shape_overlong",
        "group_advantage",
        "drop_truncated",
        "normalize_by_token",
        "token_ratio",
        "clip_surrogate",
    ]
    buffer = next(iter(jrl.dapo(overlong_limit=20480).info)).arguments["buffer"]
    assert buffer == 4096  # the paper's


VALUE = 0.3 * (np.arange(24).reshape(4, 6) % 5) - 0.4
BATCH_FIELDS = dict(lengths=[4, 3, 2, 4], reward=[1.0, 0.0, 0.0, 1.0], group=[0, 0, 1, 1])


def one_batch():
    mask = np.zeros((4, 6), bool)
    for row, length in zip(mask, BATCH_FIELDS["lengths"], strict=True):
        row[1 : 1 + length] = True
    rng = np.random.default_rng(3)
    behavior = -rng.random(mask.shape)
    current = behavior + 0.3 * rng.normal(size=mask.shape)
    batch = jrl.TokenBatch.from_rows(
        np.zeros(mask.shape, int),
        mask,
        reward=BATCH_FIELDS["reward"],
        group=BATCH_FIELDS["group"],
        logprob_behavior=behavior,
        logprob_proximal=behavior,
        value=VALUE,
    )
    return batch, current, behavior, mask


def numpy_loss(name, lp, mu, m):
    """Each algorithm as its paper writes it, with loops over sequences and tokens."""
    n = m.sum(axis=1)
    std = np.sqrt(0.5)  # of {0, 1} with ddof 1
    centred = np.array([0.5, -0.5, -0.5, 0.5])
    advantage = centred / (std + 1e-6)

    def clip(r, a, low, high):
        return max(-a * r, -a * np.clip(r, 1 - low, 1 + high))

    rows = range(4)
    tokens = [[t for t in range(6) if m[b, t]] for b in rows]
    ratio = np.exp(lp - mu)
    if name == "grpo":
        return np.mean(
            [np.mean([clip(ratio[b, t], advantage[b], 0.2, 0.2) for t in tokens[b]]) for b in rows]
        )
    if name == "dapo":
        return sum(clip(ratio[b, t], advantage[b], 0.2, 0.28) for b in rows for t in tokens[b]) / n.sum()
    if name == "dr_grpo":
        return sum(clip(ratio[b, t], centred[b], 0.2, 0.2) for b in rows for t in tokens[b]) / (4 * 12)
    if name in ("gspo", "gspo_token"):
        s = [np.exp(np.mean([lp[b, t] - mu[b, t] for t in tokens[b]])) for b in rows]
        return np.mean([clip(s[b], advantage[b], 3e-4, 4e-4) for b in rows])
    if name == "trpo":
        return sum(-advantage[b] * ratio[b, t] for b in rows for t in tokens[b]) / n.sum()
    if name == "ppo":  # with gamma = lambda = 1 the advantage is the return minus the value
        advantage = {(b, t): (1.0, 0.0, 0.0, 1.0)[b] - VALUE[b, t] for b in rows for t in tokens[b]}
        every = np.array(list(advantage.values()))
        white = {at: (a - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for at, a in advantage.items()}
        return sum(clip(ratio[at], a, 0.2, 0.2) for at, a in white.items()) / n.sum()
    if name == "rloo":
        return np.mean([sum(-2 * centred[b] * lp[b, t] for t in tokens[b]) for b in rows])
    returns = np.array([1.0, 0.0, 0.0, 1.0])[:, None] * m
    values = returns[m]
    white = (returns - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return sum(-white[b, t] * lp[b, t] for b in rows for t in tokens[b]) / n.sum()


PINNED = ("reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "ppo", "trpo")


@pytest.mark.parametrize("name", PINNED)
def test_recipe_equals_its_paper(name):
    """Value against loops in NumPy, gradient against central differences of them, in float64."""
    with testing.float64():
        batch, lp, mu, mask = one_batch()
        objective = build(name)
        function = jax.value_and_grad(lambda lp: jrl.transforms.loss(objective, lp, batch)[0])
        options = {"xla_backend_optimization_level": 0}
        value, gradient = jax.jit(function, compiler_options=options)(jnp.asarray(lp))
        np.testing.assert_allclose(value, numpy_loss(name, lp, mu, mask), rtol=1e-9)
        h, expected = 1e-6, np.zeros_like(lp)
        for b, t in np.argwhere(mask):
            up, down = lp.copy(), lp.copy()
            up[b, t] += h
            down[b, t] -= h
            expected[b, t] = (numpy_loss(name, up, mu, mask) - numpy_loss(name, down, mu, mask)) / (2 * h)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)


NONSENSE = ("nonsense", "", -1.0, -1e30, float("nan"), -float("inf"), 1.5, True, [], {})
HUGE = (1e30, float("inf"))


def tried():
    names = sorted(recipes.RECIPES)
    return [(name, key) for name in names for key in inspect.signature(build_of(name)).parameters]


def build_of(name):
    return recipes.RECIPES[name]


def outcome(name, argument, value):
    """The objective, or None where the recipe refuses the value by the argument's name."""
    try:
        return build_of(name)(**{**REQUIRED.get(name, {}), argument: value})
    except ValueError as error:
        assert argument.rpartition("_")[2] in str(error), f"{name}({argument}={value!r}): {error}"
        return None


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_nonsense_is_refused_by_name(name):
    for argument, parameter in inspect.signature(build_of(name)).parameters.items():
        for value in NONSENSE:
            if outcome(name, argument, value) is not None:
                what = f"{name}({argument}={value!r}) was accepted"
                if isinstance(value, bool):
                    assert isinstance(parameter.default, bool), what
                else:
                    assert value in (-1.0, -1e30, 1.5) and not isinstance(parameter.default, bool), what
                    assert value == 1.5 or argument in (
                        "entropy_coef",
                        "coef",
                        "threshold",
                        "gamma",
                        "delta",
                    ), what
                    assert value != 1.5 or type(parameter.default) is not int, what


@pytest.mark.slow
@pytest.mark.parametrize("name, argument", tried())
def test_huge_values_are_refused_or_finite(name, argument):
    batch = testing.sample_batch()
    output = testing.tiny_policy(testing.tiny_policy_params(1), batch)
    for value in HUGE:
        objective = outcome(name, argument, value)
        if objective is None:
            continue

        def loss(logprob, objective=objective):
            return jrl.loss(objective, output.replace(logprob=logprob), batch)[0]

        found, gradient = jax.value_and_grad(loss)(output.logprob)
        assert np.isfinite(found) and np.all(np.isfinite(gradient)), f"{name}({argument}={value!r}): {found}"


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("grpo", {"kl_estimator": "k2"}),
        ("ppo", {"value_clip": 0.3}),
        ("dapo", {"overlong_buffer": 4}),
        ("dapo", {"overlong_penalty": 0.5}),
        ("dppo", {"k": 8}),
        ("trpo", {"gamma": 0.9}),
        ("trpo", {"lam": 0.9, "eps": 1e-4}),
        ("opd", {"kind": "forward"}),
        ("sft", {"threshold": 0.5}),
    ],
)
def test_an_argument_without_effect_is_refused(name, arguments):
    with pytest.raises(ValueError, match=rf"{name}: {list(arguments)[-1]}=.* has no effect unless"):
        build_of(name)(**arguments)


def test_the_same_arguments_with_an_effect():
    jrl.grpo(kl_coef=0.1, kl_estimator="k2")
    jrl.dapo(overlong_limit=20, overlong_buffer=4, overlong_penalty=0.5)
    jrl.dppo("topk_kl", k=8)
    jrl.trpo(gamma=0.9, lam=0.0)
    jrl.sft(positive=True, threshold=0.5)
    with pytest.raises(ValueError, match="grpo: kl_estimator must be one of .*k9"):
        jrl.grpo(kl_estimator="k9")
