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
        jrl.group_advantage(scale="batch"),
    ],
    "leave_one_out_advantage": [jrl.leave_one_out_advantage(), jrl.leave_one_out_advantage(scale="std")],
    "length_weighted_advantage": [jrl.length_weighted_advantage()],
    "rescaled_group_advantage": [
        jrl.rescaled_group_advantage(),
        jrl.rescaled_group_advantage(rescale="nonzero"),
    ],
    "pass_at_k_advantage": [
        jrl.pass_at_k_advantage(k=2),
        jrl.pass_at_k_advantage(form="max"),
        jrl.pass_at_k_advantage(form="max", scale="none"),
    ],
    "multi_reward_advantage": [
        jrl.multi_reward_advantage(),
        jrl.multi_reward_advantage(weights={"right": 1.0, "format": 0.25}, scale="batch"),
    ],
    "returns_to_go": [jrl.returns_to_go(gamma=0.9)],
    "gae": [
        jrl.gae(gamma=0.9, lam=0.8),
        jrl.gae(gamma=0.9, lam_value=1.0, length_adaptive=0.5, bootstrap=True),
    ],
    "greedy_baseline_advantage": [jrl.greedy_baseline_advantage()],
    "agent_baseline_advantage": [
        jrl.agent_baseline_advantage(),
        jrl.agent_baseline_advantage(agents=2, initial=0.25),
    ],
    "distill_advantage": [
        jrl.distill_advantage(),
        jrl.distill_advantage(0.1, estimator="k3", policy="proximal", gamma=0.9, center=True, limit=0.3),
    ],
    "whiten_advantage": [jrl.whiten_advantage(), jrl.whiten_advantage(level="trajectory", ddof=0)],
    "rescale_reward": [jrl.rescale_reward(scale=2.0, bias=-0.5, limit=1.0)],
    "shape_length": [jrl.shape_length()],
    "shape_truncated": [jrl.shape_truncated(), jrl.shape_truncated(value=-0.5)],
    "shape_overlong": [jrl.shape_overlong(limit=7, buffer=4)],
    "penalize_kl_in_reward": [
        jrl.penalize_kl_in_reward(0.1),
        jrl.penalize_kl_in_reward(0.1, "k3", "proximal"),
    ],
    "truncate_importance": [
        jrl.truncate_importance(cap=1.1),
        jrl.truncate_importance(cap=1.1, floor=0.9, level="sequence"),
        jrl.truncate_importance(cap=1.02, level="geometric"),
        jrl.truncate_importance(cap=1.1, divide_by_mean=True),
        jrl.truncate_importance(cap=1.1, level="sequence", divide_by_mean=True),
    ],
    "mask_negative_offpolicy": [
        jrl.mask_negative_offpolicy(delta=0.05),
        jrl.mask_negative_offpolicy(delta=-0.05, anchor="proximal"),
    ],
    "mask_outlier_sequences": [
        jrl.mask_outlier_sequences(0.5, 1.8),
        jrl.mask_outlier_sequences(0.5, 1.8, renormalize=True),
    ],
    "mask_divergent_sequences": [
        jrl.mask_divergent_sequences(0.01),
        jrl.mask_divergent_sequences(0.05, "k2", "sum", renormalize=True),
    ],
    "mask_second_moment": [
        jrl.mask_second_moment(limit=0.04),
        jrl.mask_second_moment(limit=0.04, renormalize=False),
    ],
    "decay_stale": [jrl.decay_stale(rate=0.5), jrl.decay_stale(rate=0.5, grace=1)],
    "mask_importance": [
        jrl.mask_importance(0.8, 1.2),
        jrl.mask_importance(0.5, 2.0, level="sequence"),
        jrl.mask_importance(0.95, 1.05, level="geometric"),
        jrl.mask_importance(0.8, 1.2, reweight=False),
        jrl.mask_importance(0.8, 1.2, renormalize=True),
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
    "approximate_proximal": [
        jrl.approximate_proximal(),
        jrl.approximate_proximal(between="probabilities", cap=1.2),
    ],
    "sequence_ratio": [jrl.sequence_ratio(anchor="proximal")],
    "sequence_ratio_per_token": [jrl.sequence_ratio_per_token()],
    "reinforce_surrogate": [jrl.reinforce_surrogate()],
    "clip_surrogate": [jrl.clip_surrogate(low=0.1, high=0.2), jrl.clip_surrogate(0.1, 0.1, dual=1.2)],
    "cispo_surrogate": [jrl.cispo_surrogate(high=1.1)],
    "soft_surrogate": [jrl.soft_surrogate()],
    "geometric_surrogate": [jrl.geometric_surrogate(low=0.1, high=0.2)],
    "lag_clip_surrogate": [jrl.lag_clip_surrogate(low=0.3, high=0.4, decay=0.5, floor=0.05)],
    "quadratic_surrogate": [jrl.quadratic_surrogate(beta=0.5)],
    "vespo_surrogate": [jrl.vespo_surrogate()],
    "divergence_surrogate": [
        jrl.divergence_surrogate("kl", low=0.005, high=0.005, anchor="proximal", cap=1.2),
        jrl.divergence_surrogate("topk_tv", low=0.02, high=0.03),
    ],
    "covariance_surrogate": [
        jrl.covariance_surrogate("kl", fraction=0.2),
        jrl.covariance_surrogate("clip", fraction=0.1, cov_low=0.1, low=0.1, high=0.1),
    ],
    "simko_surrogate": [jrl.simko_surrogate(share=0.2, quantile=0.5)],
    "penalize_kl": [
        *(
            jrl.penalize_kl(0.1, estimator=e)
            for e in ("k1", "k2", "k3", "abs", "k1_straight_through", "k3_straight_through")
        ),
        *(
            jrl.penalize_kl(0.1, estimator=e, anchor="teacher")
            for e in ("k1_weighted", "k1_policy_gradient", "k2_weighted", "k3_weighted")
        ),
        jrl.penalize_kl(0.1, normalize=jrl.normalize_by_token()),
    ],
    "reward_entropy": [jrl.reward_entropy(0.1), jrl.reward_entropy(0.1, normalize=jrl.normalize_by_group())],
    "penalize_log_ratio_square": [
        jrl.penalize_log_ratio_square(0.1),
        jrl.penalize_log_ratio_square(0.1, normalize=jrl.normalize_by_token()),
    ],
    "penalize_value_error": [
        jrl.penalize_value_error(0.5),
        jrl.penalize_value_error(0.5, None, jrl.normalize_by_token()),
    ],
    "next_token": [
        jrl.next_token(0.1),
        jrl.next_token(0.1, "positive", 0.4),
    ],
    "adaptive_kl": [jrl.adaptive_kl(0.05), jrl.adaptive_kl(0.05, normalize=jrl.normalize_by_token())],
    "adaptive_entropy": [jrl.adaptive_entropy(coef=0.1)],
    "balance_experts": [jrl.balance_experts(0.1)],
    "balance_experts_by_bias": [jrl.balance_experts_by_bias(0.1)],
    "imitate": [
        jrl.imitate(0.1),
        jrl.imitate(0.1, "forward", "topk"),
        jrl.imitate(0.1, "reverse", "topk", rest=False),
        jrl.imitate(0.1, "jsd", "topk", beta=0.3, normalize=jrl.normalize_by_token()),
    ],
    "normalize_by_pair": [jrl.normalize_by_pair()],
    "logistic_preference": [
        jrl.logistic_preference(beta=0.5, smoothing=0.1),
        jrl.logistic_preference(beta=2.0, margin=0.5, reference=False, average=True),
    ],
    "robust_preference": [jrl.robust_preference()],
    "square_preference": [jrl.square_preference(beta=0.5), jrl.square_preference(average=False)],
    "hinge_preference": [jrl.hinge_preference(beta=0.5)],
    "odds_preference": [jrl.odds_preference(beta=1.0), jrl.odds_preference(average=False)],
    "kto_preference": [jrl.kto_preference(beta=0.5, undesirable=1.3)],
    "score_preference": [jrl.score_preference(margin=0.5, center=0.01)],
    "imitate_chosen": [jrl.imitate_chosen(0.5), jrl.imitate_chosen(0.5, average=False)],
    "masked": [
        jrl.masked(jrl.reward_entropy(0.1), first_half),
        jrl.masked(jrl.truncate_importance(cap=1.1), first_half),
    ],
    "scheduled": [jrl.scheduled(jrl.reward_entropy, coef=decay)],
}
# Surrogates whose gradient on-policy is not that of REINFORCE, by design.
NOT_REINFORCE = {"simko_surrogate"}
# The first row of these is fast, all others are slow.
QUICK_STAGES = set(
    """group_advantage leave_one_out_advantage multi_reward_advantage returns_to_go gae whiten_advantage
    shape_overlong penalize_kl_in_reward truncate_importance mask_importance mask_second_moment drop_stale
    drop_truncated normalize_by_token normalize_by_sequence normalize_by_length_limit normalize_by_group token_ratio
    sequence_ratio clip_surrogate cispo_surrogate geometric_surrogate penalize_kl reward_entropy
    penalize_value_error imitate logistic_preference kto_preference masked scheduled""".split()
)
ROWS = [
    pytest.param(
        stage,
        id=str(stage.info),
        marks=[pytest.mark.slow] if number or name not in QUICK_STAGES else [],
    )
    for name, stages in STAGES.items()
    for number, stage in enumerate(stages)
]

# Which law holds for which kind of stage, and of which kind each is.
#   declarations  fields are read and written as declared      signal  a gradient is left      jit  can be traced
#   split      any micro-batches          order    any order of trajectories, or pairs
#   padding    NaN under the mask         packing  several sequences a row      trees  rows with shared prompts
#   mesh       1 device = 8 in two meshes  detached  no gradient through the weight
#   gradient   central differences, what is detached held
#   on_policy  behavior = proximal = current gives REINFORCE's gradient, clip fraction 0, KL 0
EVERY = {"declarations", "signal", "jit", "split", "order", "padding", "mesh", "detached", "gradient"}
ROW_WISE = EVERY | {"packing", "trees"}
LAWS = {
    "reward": ROW_WISE,
    "advantage": ROW_WISE,
    "correction": ROW_WISE,
    "normaliser": ROW_WISE,
    "penalty": ROW_WISE,
    "ratio": ROW_WISE | {"on_policy"},
    "surrogate": ROW_WISE | {"on_policy"},
    "preference": EVERY,  # an answer has a row, a pair the rows 2i and 2i + 1
}
OTHER_KINDS = {
    "covariance_surrogate": "penalty",  # that of KL-Cov, too  # the kind of most is the end of their name
    **dict.fromkeys(
        ("rescale_reward", "shape_length", "shape_truncated", "shape_overlong", "penalize_kl_in_reward"),
        "reward",
    ),
    **dict.fromkeys(("returns_to_go", "gae"), "advantage"),
    **dict.fromkeys(
        ("truncate_importance", "approximate_proximal", "decay_stale", "drop_stale", "drop_truncated"),
        "correction",
    ),
    **dict.fromkeys(
        ("sequence_ratio_per_token", "balance_experts_by_bias"), "ratio"
    ),  # the second writes nothing at all
    **dict.fromkeys(
        ("adaptive_kl", "adaptive_entropy", "reward_entropy", "balance_experts", "imitate", "next_token"),
        "penalty",
    ),
    **dict.fromkeys(("normalize_by_pair", "imitate_chosen"), "preference"),
    **dict.fromkeys(
        ("masked", "scheduled"), "penalty"
    ),  # of what they wrap: here penalties, and a correction
}


def kind_of(name):
    if name in OTHER_KINDS:
        return OTHER_KINDS[name]
    begins = {"normalize_by": "normaliser", "penalize": "penalty", "mask_": "correction"}
    by_start = [kind for start, kind in begins.items() if name.startswith(start)]
    return by_start[0] if by_start else name.rpartition("_")[2]


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
    **{
        f"surrogate {surrogate.info.stage}": jrl.chain(
            jrl.group_advantage(), jrl.normalize_by_sequence(), jrl.token_ratio(), surrogate
        )
        for surrogate in (
            jrl.cispo_surrogate(high=1.2, low=0.9),
            jrl.soft_surrogate(),
            jrl.geometric_surrogate(low=0.1, high=0.2),
            jrl.lag_clip_surrogate(low=0.3, high=0.4, decay=0.5, floor=0.05),
            jrl.quadratic_surrogate(beta=0.5),
            jrl.vespo_surrogate(),
            jrl.divergence_surrogate("topk_kl", low=0.005, high=0.005, k=3),
            jrl.covariance_surrogate("kl", fraction=0.2),
            jrl.simko_surrogate(share=0.2, quantile=0.5),
        )
    },
    **{
        f"advantage {stages[-1].info.stage}": jrl.chain(
            *stages, jrl.normalize_by_token(), jrl.reinforce_surrogate()
        )
        for stages in (
            [jrl.shape_length(), jrl.length_weighted_advantage()],
            [jrl.rescale_reward(2.0, -0.5), jrl.rescaled_group_advantage()],
            [jrl.shape_truncated(value=-0.5), jrl.pass_at_k_advantage(k=2)],
            [jrl.multi_reward_advantage(), jrl.distill_advantage(add=True, anchor="reference")],
            [jrl.gae(0.9, 0.8, lam_value=1.0, bootstrap=True)],
            [jrl.greedy_baseline_advantage()],
            [jrl.agent_baseline_advantage(agents=2)],
        )
    },
    "given": jrl.chain(
        jrl.given_advantage(), jrl.normalize_by_token(), jrl.sequence_ratio(), jrl.clip_surrogate(0.1, 0.1)
    ),
    "second pass saved": jrl.chain(
        jrl.group_advantage(),
        jrl.mask_outlier_sequences(0.5, 1.8),
        jrl.mask_divergent_sequences(0.01),
        jrl.mask_second_moment(limit=0.04),
        jrl.decay_stale(rate=0.5),
        jrl.normalize_by_token(),
        jrl.mask_negative_offpolicy(delta=0.05),
        jrl.approximate_proximal(cap=1.2),
        jrl.clip_surrogate(),
        jrl.penalize_log_ratio_square(0.1),
        jrl.adaptive_kl(0.05),
        jrl.adaptive_entropy(coef=0.1),
        jrl.balance_experts(0.1),
        jrl.balance_experts_by_bias(0.1),
        jrl.next_token(0.1, "positive", 0.0, jrl.normalize_by_sequence()),
    ),
    "teacher and critic": jrl.chain(
        jrl.returns_to_go(),
        jrl.normalize_by_token(),
        jrl.imitate(0.1, "jsd", "topk", normalize=jrl.normalize_by_sequence()),
        jrl.imitate(0.1, name="whole"),
        jrl.penalize_value_error(0.5),
    ),
    "dpo": jrl.cdpo(beta=0.5, nll_coef=0.1),
    "robust_dpo": jrl.robust_dpo(),
    "ipo": jrl.ipo(),
    "hinge": jrl.hinge(beta=0.5),
    "orpo": jrl.orpo(),
    "kto": jrl.kto(beta=0.5),
    "reward_model": jrl.reward_model(margin=1.0, center=0.1),
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


def test_every_kind_has_its_laws():
    for name, stages in STAGES.items():
        for stage in stages:
            assert set(testing.laws(stage)) == LAWS[kind_of(name)], stage


@pytest.mark.parametrize("stage", ROWS)
def test_stage_obeys_the_laws(stage):
    """Those that compile little; the others are the chains', which hold every stage."""
    # Halves: one more shape to compile, where (3, 1, 4) would be three.
    on_policy = False if stage.info.stage in NOT_REINFORCE else None
    few = ("declarations", "signal", "split", "padding", "packing", "detached", "on_policy")
    checked = testing.check_transform(stage, splits=((4, 4),), mesh=False, on_policy=on_policy, only=few)
    assert {"declarations", "signal", "split", "padding", "detached"} <= set(checked)


# Each compiles programs for two meshes of 8 devices, which takes ten seconds or more.
QUICK = ("grpo",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS]
)
def test_chain_obeys_the_laws(name):
    assert "mesh" in testing.check_transform(CHAINS[name], splits=((4, 2, 2),), mesh=True)


def test_rows_of_trees_share_prompts():
    """The batch of the laws laid out as trees: fewer tokens, each branch with the prompt's last token before it."""
    batch = testing.sample_batch()
    packed, trees = testing.pack(batch), testing.pack(batch, trees=True)
    assert np.sum(trees.segments != 0) < np.sum(packed.segments != 0) == np.sum(batch.segments != 0)
    assert len(set(np.asarray(trees.segments)[np.asarray(trees.segments) < 0].tolist())) == 3  # groups
    assert np.sum(trees.mask) == np.sum(batch.mask)
    starts = np.pad(np.diff(np.asarray(trees.segments), axis=1), ((0, 0), (1, 0)), constant_values=1) != 0
    assert not np.any(starts & np.asarray(trees.mask))


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

    def test_hand_written_derivative(self):
        @jax.custom_jvp
        def square(x):
            return x**2

        square.defjvp(lambda primals, tangents: (primals[0] ** 2, primals[0] * tangents[0]))  # 2 is missing

        def apply(loss, batch):
            return loss.penalize("broken", square(loss.logprob))

        with pytest.raises(AssertionError, match="gradient.*derivative"):
            testing.assert_gradient(bad(apply, writes=("loss.penalties",)))

    def test_value_without_a_derivative(self):
        def apply(loss, batch):
            return loss.penalize("broken", jnp.exp(jnp.sign(loss.logprob + 2.0) * jax.lax.stop_gradient(1.0)))

        def rounded(loss, batch):
            return loss.penalize("broken", loss.logprob.astype(jnp.float16))

        testing.assert_gradient(bad(apply, writes=("loss.penalties",)))  # flat but at its steps
        with pytest.raises(AssertionError, match="gradient"):
            testing.assert_gradient(bad(rounded, writes=("loss.penalties",)))

    def test_detached_on_purpose_is_held(self):
        def apply(loss, batch):
            return loss.penalize("kept", jax.lax.stop_gradient(jnp.exp(loss.logprob)) * loss.logprob)

        testing.assert_gradient(bad(apply, writes=("loss.penalties",)))

    def test_first_row_as_baseline(self):
        def prepare(batch):
            return batch.replace(reward=batch.reward + jnp.sum(batch.reward[0]) * batch.reward**2)

        with pytest.raises(AssertionError, match="order of the rows"):
            testing.assert_order_invariant(
                bad(prepare=prepare, reads=("batch.reward",), writes=("batch.reward",))
            )

    def test_surrogate_of_another_sign(self):
        def apply(loss, batch):
            return loss.replace(policy=batch.advantage * loss.logprob)

        with pytest.raises(AssertionError, match="on-policy"):
            testing.assert_on_policy_identity(bad(apply, reads=("batch.advantage",), writes=("loss.policy",)))


def local_count(loss, batch):
    return loss.penalize("broken", loss.logprob / jnp.maximum(jnp.sum(batch.mask), 1))


def leaking_weight(loss, batch):
    return loss.replace(weight=loss.weight * jnp.exp(loss.logprob - batch.logprob_behavior))


def reads_padding(loss, batch):
    return loss.penalize("broken", loss.logprob * jnp.sum(batch.value, axis=1, keepdims=True))


def row_order(batch):
    later = jnp.arange(batch.shape[0])[:, None] * (batch.reward != 0)
    return batch.replace(reward=batch.reward + 0.1 * later)


def not_finite(loss, batch):
    return loss.penalize("broken", jnp.log(loss.logprob))


@pytest.mark.parametrize(
    "apply, prepare, reads, writes, law",
    [
        (local_count, None, (), ("loss.penalties",), "split"),
        (leaking_weight, None, (), ("loss.weight",), "weight|gradient"),
        (reads_padding, None, ("batch.value",), ("loss.penalties",), "padding"),
        (None, row_order, ("batch.reward",), ("batch.reward",), "order of the rows"),
        (not_finite, None, (), ("loss.penalties",), "finite"),
    ],
    ids=["local count", "leaking weight", "reads padding", "row order", "not finite"],
)
def test_check_transform_names_the_law_that_a_wrong_stage_breaks(apply, prepare, reads, writes, law):
    stage = bad(apply, prepare, reads, writes)
    with pytest.raises(AssertionError, match=law) as found:
        testing.check_transform(stage, splits=((4, 4),), mesh=False, only=testing.LAWS.keys() | {"split"})
    assert "broken" in str(found.value)


def by_the_largest(loss, batch):
    return loss.scale_weight(jnp.full(batch.shape, 1 / jnp.max(jnp.where(batch.mask, -loss.logprob, 0.0))))


@pytest.mark.slow
def test_the_default_splits_have_signal_in_several_parts():
    with pytest.raises(AssertionError, match="split"):
        testing.assert_split_invariant(bad(by_the_largest, writes=("loss.weight",)))


def on_demand(loss, batch):
    return loss.scale_weight(jnp.exp(batch.logprob_proximal - loss.logprob))


def on_demand_in_prepare(batch):
    return batch.scale_weight(1.0 if batch.value is None else jnp.abs(batch.value))


def scaled(loss, batch):
    return loss.scale_weight(jnp.full(batch.shape, 0.5))


def changes_the_reward(batch):
    return batch.scale_weight(0.5).replace(reward=2 * batch.reward)


def changes_the_ratio(loss, batch):
    return loss.replace(weight=0.5 * loss.weight, log_ratio=0.5 * loss.logprob)


def nothing(loss, batch):
    return loss.log("seen", loss.logprob)


def rounds(loss, batch):
    return loss.replace(logprob=jnp.round(loss.logprob, 2))


def detaches(loss, batch):
    return scaled(loss, batch).replace(logprob=jax.lax.stop_gradient(loss.logprob))


def flat_ratio(loss, batch):
    return loss.replace(log_ratio=jnp.round(loss.logprob - batch.logprob_behavior, 2))


def concrete(batch):
    return batch.scale_weight(float(jnp.sum(batch.mask)) / 50)


def branches(loss, batch):
    return scaled(loss, batch) if jnp.sum(loss.logprob) < 0 else loss


def whole_numbers(loss, batch):
    return loss.replace(weight=jnp.ones(batch.shape, int))


def plain_metric(loss, batch):
    return scaled(loss, batch).replace(metrics={**loss.metrics, "half": 0.5})


def fails(loss, batch):
    return loss.scale_weight(loss.entropies)


@pytest.mark.parametrize(
    "apply, prepare, reads, writes, said",
    [
        (on_demand, None, (), ("loss.weight",), 'Add "batch.logprob_proximal" to reads'),
        (None, on_demand_in_prepare, (), ("batch.weight",), 'Add "batch.value" to reads'),
        (scaled, None, ("batch.logprob_teacher",), ("loss.weight",), "logprob_teacher, and other values"),
        (scaled, None, ("loss.entropy",), ("loss.weight",), "loss.entropy, and other values"),
        (None, changes_the_reward, (), ("batch.weight",), 'Add "batch.reward" to writes'),
        (changes_the_ratio, None, (), ("loss.weight",), 'Add "loss.log_ratio" to writes'),
        (nothing, None, (), ("loss.weight",), "declares that it writes loss.weight"),
        (
            None,
            lambda batch: batch.replace(counted=batch.mask),
            (),
            ("batch.weight", "batch.counted"),
            "declares that it writes batch.weight .*writes=lambda",
        ),
        (rounds, None, (), ("loss.logprob",), "changes loss.logprob"),
        (detaches, None, (), ("loss.weight",), "changes loss.logprob"),
        (flat_ratio, None, (), ("loss.log_ratio",), "signal"),
        (None, concrete, (), ("batch.weight",), "jit: prepare"),
        (branches, None, (), ("loss.weight",), "jit: apply"),
        (
            whole_numbers,
            None,
            (),
            ("loss.weight",),
            "apply of broken.*int.*in loss.weight. Return a floating",
        ),
        (plain_metric, None, (), ("loss.weight",), "apply of broken.*float in loss.metrics.*loss.log"),
        (
            lambda loss, batch: None,
            None,
            (),
            ("loss.weight",),
            "apply of broken.*NoneType. Return a LossState",
        ),
        (None, lambda batch: None, (), ("batch.weight",), "prepare of broken.*NoneType. Return a TokenBatch"),
        (fails, None, (), ("loss.weight",), "apply of broken.*AttributeError.*entropies"),
    ],
)
def test_what_a_stage_declares_and_returns_is_checked(apply, prepare, reads, writes, said):
    stage = bad(apply, prepare, reads, writes)
    with pytest.raises(AssertionError, match=said) as found:
        testing.check_transform(stage, only=("declarations", "signal", "jit"))
    assert "broken" in str(found.value)


def test_the_checked_laws_are_returned():
    few = ("split", "jit", "mesh")
    with_mesh = testing.laws(jrl.reward_entropy(0.1))
    assert set(few) <= set(with_mesh)
    checked = testing.check_transform(jrl.reward_entropy(0.1), splits=((4, 4),), mesh=False, only=few)
    assert checked == ("finite", "jit", "split")
