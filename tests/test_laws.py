"""The laws of design §4, for every public stage from one table. A new public stage without a row fails."""

import jax.numpy as jnp
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
    "penalize_kl_in_reward": [
        jrl.penalize_kl_in_reward(0.1),
        jrl.penalize_kl_in_reward(0.1, "k3", "proximal"),
    ],
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
        *(
            jrl.penalize_kl(0.1, estimator=e)
            for e in ("k1", "k2", "k3", "k3_straight_through", "k3_weighted")
        ),
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

# The mesh law compiles a program for 8 devices, so it runs on chains that hold many stages each: between them,
# every stage.
CHAINS = {
    "grpo": jrl.grpo(kl_coef=0.1, entropy_coef=0.1, anchor="proximal", importance_cap=1.2),
    "groups": jrl.chain(
        jrl.penalize_kl_in_reward(0.1),
        jrl.shape_overlong(limit=7, buffer=4),
        jrl.leave_one_out_advantage(),
        jrl.drop_truncated(),
        jrl.whiten_advantage(),
        jrl.normalize_by_length_limit(12),
        jrl.sequence_ratio_per_token(),
        jrl.clip_surrogate(0.1, 0.1, dual=1.2),
    ),
    "streams": jrl.chain(
        jrl.returns_to_go(gamma=0.9),
        jrl.drop_stale(max_age=1, renormalize=True),
        jrl.mask_importance(0.9, 1.1, level="geometric"),
        jrl.normalize_by_group(),
        jrl.reinforce_surrogate(),
        jrl.penalize_kl(0.1, normalize=jrl.normalize_by_constant(3.0)),
        jrl.scheduled(jrl.reward_entropy, coef=decay, normalize=jrl.normalize_by_sequence_sum()),
        jrl.masked(jrl.penalize_kl(0.1, anchor="behavior", name="near"), first_half),
    ),
    "given": jrl.chain(
        jrl.given_advantage(), jrl.normalize_by_token(), jrl.sequence_ratio(), jrl.clip_surrogate(0.1, 0.1)
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
def test_stage_obeys_the_laws(stage):
    # Halves: one more shape to compile, where (3, 1, 4) would be three.
    testing.check_transform(stage, splits=((4, 4),), mesh=False)


@pytest.mark.parametrize("name", CHAINS)
def test_chain_obeys_the_laws(name):
    testing.check_transform(CHAINS[name], splits=((4, 2, 2),), mesh=True)


@pytest.mark.parametrize("name", ["truncate_importance", "mask_importance"])
def test_corrections_are_inert_on_policy(name):
    for stage in STAGES[name]:
        testing.assert_on_policy_identity(stage)


def test_chains_cover_every_stage():
    inside = {info.stage for chain in CHAINS.values() for info in chain.info}
    arguments = [v for chain in CHAINS.values() for info in chain.info for v in info.arguments.values()]
    inside |= {v.info.stage for v in arguments if isinstance(v, jrl.transforms.LossTransform)}
    assert public_stages() - {"masked", "scheduled"} <= inside


def bad(apply=None, prepare=None, reads=(), writes=()):
    @jrl.stage(reads=reads, writes=writes)
    def broken():
        return transforms.Parts(apply=apply, prepare=prepare)

    transforms.STAGES.pop("broken")
    return broken()


class TestTheChecksFindViolations:
    """Each law, broken on purpose: a check that cannot fail proves nothing."""

    def test_mean_of_a_micro_batch(self):
        def apply(loss, batch):
            return loss.scale_weight(loss.logprob / jnp.mean(jnp.abs(loss.logprob)))

        with pytest.raises(AssertionError, match="split"):
            testing.assert_split_invariant(bad(apply, writes=("loss.weight",)), splits=((4, 4),))

    def test_metric_that_is_a_mean_of_rows(self):
        def apply(loss, batch):
            each = jnp.sum(loss.logprob, axis=1)
            total = jnp.sum(each) * jnp.max(each)
            return loss.replace(metrics={**loss.metrics, "wrong": jrl.Mean(total, jnp.float64(1.0))})

        with pytest.raises(AssertionError, match="split.*metrics"):
            testing.assert_split_invariant(bad(apply, writes=("loss.metrics",)), splits=((4, 4),))

    def test_reading_under_the_mask(self):
        def apply(loss, batch):
            return loss.penalize("broken", jnp.cumsum(batch.value, axis=1))

        with pytest.raises(AssertionError, match="padding"):
            testing.assert_padding_inert(bad(apply, writes=("loss.penalties",)))

    def test_position_in_the_row(self):
        def apply(loss, batch):
            return loss.penalize("broken", loss.logprob * jnp.arange(batch.shape[1]))

        with pytest.raises(AssertionError, match="packing"):
            testing.assert_packing_invariant(bad(apply, writes=("loss.penalties",)))

    def test_weight_on_the_tape(self):
        def apply(loss, batch):
            return loss.replace(weight=loss.weight * loss.logprob)

        with pytest.raises(AssertionError, match="weight"):
            testing.assert_weight_detached(bad(apply, writes=("loss.weight",)))

    def test_surrogate_of_another_sign(self):
        def apply(loss, batch):
            return loss.replace(policy=batch.advantage * loss.logprob)

        with pytest.raises(AssertionError, match="on-policy"):
            testing.assert_on_policy_identity(bad(apply, reads=("batch.advantage",), writes=("loss.policy",)))
