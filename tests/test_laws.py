"""The laws of design §4, for every public stage from one table. A new public stage without a row fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import testing, transforms


def first_half(batch):
    return batch.positions <= 5


def decay(updates):
    return 0.1 / (1.0 + updates)


# One row or more a stage.
STAGES = {
    "given_advantage": [jrl.given_advantage()],
    "group_advantage": [
        jrl.group_advantage(),
        jrl.group_advantage(scale="none"),
        jrl.group_advantage(scale="mean", ddof=0),
    ],
    "leave_one_out_advantage": [jrl.leave_one_out_advantage()],
    "returns_to_go": [jrl.returns_to_go(gamma=0.9)],
    "whiten_advantage": [jrl.whiten_advantage()],
    "shape_overlong": [jrl.shape_overlong(limit=7, buffer=4)],
    "penalize_kl_in_reward": [jrl.penalize_kl_in_reward(0.1), jrl.penalize_kl_in_reward(0.1, "k3", "proximal")],
    "truncate_importance": [
        jrl.truncate_importance(cap=1.1),
        jrl.truncate_importance(cap=1.1, floor=0.9, level="sequence"),
        jrl.truncate_importance(cap=1.02, level="geometric"),
    ],
    "mask_importance": [
        jrl.mask_importance(0.8, 1.2),
        jrl.mask_importance(0.5, 2.0, level="sequence"),
        jrl.mask_importance(0.95, 1.05, level="geometric"),
        jrl.mask_importance(0.8, 1.2, reweight=False, renormalize=True),
    ],
    "drop_stale": [jrl.drop_stale(max_age=1), jrl.drop_stale(max_age=1, renormalize=True)],
    "drop_truncated": [jrl.drop_truncated(), jrl.drop_truncated(renormalize=False)],
    "normalize_by_token": [jrl.normalize_by_token()],
    "normalize_by_sequence": [jrl.normalize_by_sequence()],
    "normalize_by_length_limit": [jrl.normalize_by_length_limit(limit=12)],
    "normalize_by_sequence_sum": [jrl.normalize_by_sequence_sum()],
    "normalize_by_group": [jrl.normalize_by_group()],
    "normalize_by_constant": [jrl.normalize_by_constant(5.0)],
    "token_ratio": [jrl.token_ratio(), jrl.token_ratio(anchor="proximal")],
    "sequence_ratio": [jrl.sequence_ratio(anchor="proximal")],
    "sequence_ratio_per_token": [jrl.sequence_ratio_per_token()],
    "reinforce_surrogate": [jrl.reinforce_surrogate()],
    "clip_surrogate": [jrl.clip_surrogate(low=0.1, high=0.2), jrl.clip_surrogate(0.1, 0.1, dual=1.2)],
    "penalize_kl": [
        *(jrl.penalize_kl(0.1, estimator=e) for e in ("k1", "k2", "k3", "k3_straight_through", "k3_weighted")),
        jrl.penalize_kl(0.1, normalize=jrl.normalize_by_token()),
    ],
    "reward_entropy": [jrl.reward_entropy(0.1), jrl.reward_entropy(0.1, normalize=jrl.normalize_by_group())],
    "masked": [
        jrl.masked(jrl.reward_entropy(0.1), first_half),
        jrl.masked(jrl.truncate_importance(cap=1.1), first_half),
    ],
    "scheduled": [jrl.scheduled(jrl.reward_entropy, coef=decay)],
}
ROWS = [pytest.param(stage, id=str(stage.info)) for stages in STAGES.values() for stage in stages]

# The mesh law compiles a program for 8 devices, so it runs on chains that hold several stages each.
CHAINS = {
    "grpo": jrl.grpo(kl_coef=0.1, entropy_coef=0.1, anchor="proximal", importance_cap=1.2),
    "dapo": jrl.dapo(overlong_limit=7, filter_truncated=True),
    "dr_grpo": jrl.dr_grpo(limit=12, kl_coef=0.1),
    "gspo": jrl.gspo(clip_low=0.1, clip_high=0.1),
    "gspo_token": jrl.gspo_token(clip_low=0.1, clip_high=0.1),
    "rloo": jrl.rloo(),
    "reinforce": jrl.reinforce(gamma=0.9),
    "others": jrl.chain(
        jrl.penalize_kl_in_reward(0.1),
        jrl.group_advantage(scale="mean"),
        jrl.drop_stale(max_age=1, renormalize=True),
        jrl.mask_importance(0.9, 1.1, level="geometric"),
        jrl.normalize_by_group(),
        jrl.token_ratio(),
        jrl.clip_surrogate(),
        jrl.penalize_kl(0.1, normalize=jrl.normalize_by_constant(3.0)),
        jrl.scheduled(jrl.reward_entropy, coef=decay),
        jrl.masked(jrl.penalize_kl(0.1, anchor="behavior", name="near"), first_half),
    ),
}


def public_stages():
    plain = set(transforms.STAGES) & set(transforms.__all__)
    return plain | {"masked", "scheduled"}


def test_every_public_stage_has_a_row():
    assert public_stages() == set(STAGES)
    for name, stages in STAGES.items():
        assert stages, name
        if name not in ("masked", "scheduled"):
            assert {stage.info.stage for stage in stages} == {name}


def test_every_stage_is_on_the_package_and_documented():
    for name in public_stages():
        factory = getattr(jrl, name)
        assert factory.__doc__ and len(factory.__doc__) > 60, name


@pytest.mark.parametrize("stage", ROWS)
def test_split_invariant(stage):
    testing.assert_split_invariant(stage, splits=((4, 4),))  # one more shape to compile, not three


@pytest.mark.parametrize("stage", ROWS)
def test_padding_inert(stage):
    testing.assert_padding_inert(stage)


@pytest.mark.parametrize("stage", ROWS)
def test_packing_invariant(stage):
    testing.assert_packing_invariant(stage)


@pytest.mark.parametrize("stage", ROWS)
def test_weight_detached(stage):
    testing.assert_weight_detached(stage)


@pytest.mark.parametrize(
    "stage",
    [s for name in ("token_ratio", "sequence_ratio", "sequence_ratio_per_token", "reinforce_surrogate", "clip_surrogate",
                    "truncate_importance", "mask_importance") for s in STAGES[name]],
    ids=lambda stage: str(stage.info),
)
def test_on_policy_identity(stage):
    testing.assert_on_policy_identity(stage)


@pytest.mark.parametrize("name", CHAINS)
def test_mesh_invariant(name):
    testing.assert_mesh_invariant(CHAINS[name])


@pytest.mark.parametrize("name", CHAINS)
def test_chains_obey_the_laws(name):
    chain = CHAINS[name]
    testing.assert_split_invariant(chain, splits=((3, 1, 4),))
    testing.assert_padding_inert(chain)
    testing.assert_packing_invariant(chain)
