"""Penalties of critics, controllers, teachers and tokens; the reference that moves: numbers by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.base_run import BaseRun
from jaxrl_llm.config import Config, ReferenceSettings
from jaxrl_llm.learner.state import init_state, move_reference, reset_reference

MASK = np.array([[0, 1, 1, 1], [0, 1, 0, 0]], bool)
TOKENS = np.zeros(MASK.shape, int)


def batch_of(mask=MASK, **fields):
    fields.setdefault("logprob_behavior", np.zeros(mask.shape))
    return jrl.TokenBatch.from_rows(TOKENS, mask, **fields)


def loss(penalty, batch, *before, logprob=None, state=None, **output):
    """Loss and metrics of the penalty alone, by token unless `before` normalises."""
    before = before or (jrl.normalize_by_token(),)
    logprob = jnp.zeros(MASK.shape) if logprob is None else jnp.asarray(logprob)
    output = jrl.PolicyOutput(logprob=logprob, **{k: jnp.asarray(v) for k, v in output.items()})
    value, metrics = jrl.transforms.loss(jrl.chain(*before, penalty), output, batch, state)
    return float(value), {name: float(mean.value) for name, mean in metrics.items()}


class TestValueError:
    VALUE = np.array([[9, 1.0, 1.0, 1.0], [9, 2.0, 9, 9]])
    OLD = np.array([[9, 0.0, 0.9, 0.0], [9, 2.0, 9, 9]])
    RETURNS = np.array([[9, 2.0, 2.0, 0.0], [9, 1.0, 9, 9]])

    def value(self, penalty, **fields):
        # with gamma 0 the return of a token is its reward
        batch = batch_of(value=self.OLD, reward=self.RETURNS, **fields)
        return loss(penalty, batch, jrl.returns_to_go(0.0), jrl.normalize_by_token(), value=self.VALUE)

    def test_clipped(self):
        value, metrics = self.value(jrl.penalize_value_error(2.0, clip=0.2))
        assert value == pytest.approx(2 * (1.62 + 0.5 + 0.5 + 0.5) / 4)
        assert metrics["value_clipped"] == pytest.approx(0.25)
        assert metrics["value_error"] == pytest.approx(1.0)

    def test_not_clipped(self):
        assert self.value(jrl.penalize_value_error(clip=None))[0] == pytest.approx(0.5)

    def test_its_own_normaliser(self):
        penalty = jrl.penalize_value_error(normalize=jrl.normalize_by_sequence())
        assert self.value(penalty)[0] == pytest.approx(((1.62 + 0.5 + 0.5) / 3 + 0.5) / 2)

    def test_answers_without_a_reward_pay_nothing(self):
        value, metrics = self.value(jrl.penalize_value_error(clip=None), reward_valid=np.array([False, True]))
        assert value == pytest.approx(0.5 / 4) and metrics["value_error"] == pytest.approx(1.0)

    def test_needs_the_old_value_only_to_clip(self):
        def needed(penalty):
            return jrl.transforms.needed_fields(jrl.chain(jrl.returns_to_go(), penalty))

        assert needed(jrl.penalize_value_error(clip=None)) == {"value"}
        assert jrl.needs(jrl.chain(jrl.returns_to_go(), jrl.penalize_value_error(clip=None))) == {
            "loss.value"
        }
        assert "batch.value" in jrl.needs(jrl.chain(jrl.returns_to_go(), jrl.penalize_value_error()))

    def test_without_a_value_it_says_so(self):
        with pytest.raises(ValueError, match="penalize_value_error needs loss.value"):
            loss(
                jrl.penalize_value_error(clip=None),
                batch_of(reward=np.ones(2)),
                jrl.returns_to_go(),
                jrl.normalize_by_token(),
            )


class TestNextToken:
    LOGPROB = np.array([[9, -1.0, -2.0, -3.0], [9, -5.0, 9, 9]])

    def test_all(self):
        value, metrics = loss(jrl.next_token(), batch_of(), logprob=self.LOGPROB)
        assert value == pytest.approx(11 / 4) == metrics["nll"]

    def test_positive_is_a_mean_over_rewarded_answers(self):
        batch = batch_of(reward=np.array([0.7, 0.2]))
        penalty = jrl.next_token(0.5, "positive", threshold=0.5)
        value, metrics = loss(penalty, batch, logprob=self.LOGPROB)
        assert value == pytest.approx(0.5 * 2.0) and metrics["nll"] == pytest.approx(2.0)

    def test_nobody_is_good(self):
        for reward in (np.zeros(2), np.full(2, np.nan)):
            value, metrics = loss(
                jrl.next_token(where="positive"), batch_of(reward=reward), logprob=self.LOGPROB
            )
            assert value == 0 == metrics["nll"]

    def test_sft_recipes(self):
        batch = batch_of(reward=np.array([1.0, 0.0]))

        def value(**arguments):
            return float(jrl.transforms.loss(jrl.sft(**arguments), jnp.asarray(self.LOGPROB), batch)[0])

        assert value() == pytest.approx(11 / 4)
        assert value(by_sequence=True) == pytest.approx((2 + 5) / 2)
        assert value(positive=True) == pytest.approx(2.0)

    def test_masked_to_some_tokens(self):
        where = jrl.transforms.masked(
            jrl.next_token(normalize=jrl.normalize_by_token()), lambda batch: batch.positions >= 2
        )
        assert loss(where, batch_of(), logprob=self.LOGPROB)[0] == pytest.approx(2.5)


def test_log_ratio_square_has_no_half():
    logprob = np.array([[0, 0.1, -0.2, 0.3], [0, 0.4, 0, 0]])
    value, metrics = loss(jrl.penalize_log_ratio_square(2.0), batch_of(), logprob=logprob)
    assert value == pytest.approx(2 * 0.3 / 4) and metrics["log_ratio_square"] == pytest.approx(0.075)


class TestAdaptiveKl:
    def moved(self, kl, count=1.0, **arguments):
        stage = jrl.adaptive_kl(target=0.1, coef=0.5, horizon=10.0, **arguments)
        mean = jrl.Mean(jnp.float32(kl * count), jnp.float32(count))
        return float(stage.update(stage.init(), {"kl_controlled": mean})["coef"])

    def test_follows_the_kl_within_a_fifth(self):
        assert self.moved(0.11) == pytest.approx(0.5 * (1 + 0.1 / 10))
        assert self.moved(9.0) == pytest.approx(0.5 * 1.02)
        assert self.moved(0.0) == pytest.approx(0.5 * 0.98)

    def test_says_nothing(self):
        assert self.moved(0.3, count=0.0) == 0.5
        assert self.moved(np.nan) == 0.5

    def test_penalty_uses_the_state(self):
        batch = batch_of(logprob_reference=np.full(MASK.shape, -0.3))
        stage = jrl.adaptive_kl(target=0.1, estimator="k1")
        value, metrics = loss(stage, batch, state={"adaptive_kl": {"coef": jnp.float32(2.0)}})
        assert value == pytest.approx(0.6) and metrics["kl_coef"] == 2.0
        assert metrics["kl_controlled"] == pytest.approx(0.3)

    def test_in_a_chain_only_update_changes_the_state(self):
        chain = jrl.chain(jrl.normalize_by_token(), jrl.adaptive_kl(target=0.1, coef=1.0, horizon=1.0))
        batch, state = chain.prepare(batch_of(logprob_reference=np.full(MASK.shape, -3.0)), chain.init())
        assert float(state["adaptive_kl"]["coef"]) == 1.0
        metrics = jrl.transforms.evaluate(
            chain, jrl.PolicyOutput(logprob=jnp.zeros(MASK.shape)), batch, state
        ).metrics
        state = chain.update(state, metrics)
        assert float(state["adaptive_kl"]["coef"]) == pytest.approx(1.2)


class TestAdaptiveEntropy:
    ENTROPY = np.full(MASK.shape, 0.1)

    def test_controller(self):
        stage = jrl.adaptive_entropy(target=0.2, coef=0.01, step=0.005, high=0.014)
        state = stage.init()

        def update(state, entropy):
            return stage.update(state, {"entropy": jrl.Mean(jnp.float32(entropy), jnp.float32(1.0))})

        low = update(state, 0.1)
        assert (float(low["coef"]), float(low["acts"])) == (pytest.approx(0.014), 1.0)  # capped
        high = update(state, 0.3)
        assert (float(high["coef"]), float(high["acts"])) == (pytest.approx(0.005), 0.0)
        assert float(update(update(high, 0.3), 0.3)["coef"]) == 0.0
        assert float(update(state, 0.2)["acts"]) == 1.0

    def test_bonus(self):
        stage = jrl.adaptive_entropy(coef=0.5)
        assert loss(stage, batch_of(), entropy=self.ENTROPY)[0] == pytest.approx(-0.05)
        off = {"adaptive_entropy": {"coef": jnp.float32(0.5), "acts": jnp.float32(0.0)}}
        value, metrics = loss(stage, batch_of(), state=off, entropy=self.ENTROPY)
        assert value == 0 == metrics["entropy_coef"]


class TestImitate:
    S = np.log(np.broadcast_to([0.5, 0.25], (2, 4, 2)))
    T = np.log(np.broadcast_to([0.25, 0.25], (2, 4, 2)))

    def over_top(self, mask=MASK, student=S, teacher=T, **arguments):
        batch = batch_of(mask).replace(
            topk_ids=jnp.zeros((2, 4, 2), jnp.int32), topk_logprob_teacher=jnp.asarray(teacher)
        )
        return loss(jrl.imitate(over="topk", **arguments), batch, topk_logprob=student)[0]

    def test_forward(self):
        kl = 0.25 * np.log(0.5) + 0.5 * np.log(2)  # with the rest, 0.5 against 0.25
        assert self.over_top() == pytest.approx(kl, rel=1e-5)
        assert self.over_top(rest=False) == pytest.approx(0.25 * np.log(0.5), rel=1e-5)

    def test_reverse(self):
        assert self.over_top(kind="reverse") == pytest.approx(0.5 * np.log(2) + 0.25 * np.log(0.5), rel=1e-5)

    def test_jsd_is_symmetric_at_one_half(self):
        there = self.over_top(kind="jsd")
        assert there == pytest.approx(self.over_top(student=self.T, teacher=self.S, kind="jsd"), rel=1e-5)
        assert 0 < there < np.log(2)

    def test_impossible_tokens_are_finite(self):
        gone = np.where(np.arange(2) == 0, -np.inf, np.log(0.9)) * np.ones((2, 4, 1))
        for kind in ("forward", "reverse", "jsd"):
            for student, teacher in ((self.S, gone), (gone, self.S)):
                assert np.isfinite(self.over_top(student=student, teacher=teacher, kind=kind))

    def test_equal_policies(self):
        for kind in ("forward", "reverse", "jsd"):
            assert self.over_top(student=self.T, kind=kind) == pytest.approx(0.0, abs=1e-6)

    def test_nothing_trained(self):
        assert self.over_top(mask=np.zeros_like(MASK)) == 0

    def test_over_the_vocabulary_it_is_handed_in(self):
        divergence = np.array([[9, 1.0, 2.0, 3.0], [9, 4.0, 9, 9]])
        value, metrics = loss(jrl.imitate(0.1), batch_of(), divergence=divergence)
        assert value == pytest.approx(0.25) and metrics["divergence_teacher"] == pytest.approx(2.5)

    def test_needs_say_which_divergence(self):
        (need,) = jrl.needs(jrl.imitate(kind="jsd", beta=0.3))
        assert need.key == "loss.divergence" and need.arguments == {"kind": "jsd", "beta": "0.3"}

    def test_refused(self):
        with pytest.raises(ValueError, match='kind="jsd" needs 0 < beta < 1, got 1'):
            jrl.imitate(kind="jsd", beta=1)
        with pytest.raises(ValueError, match=r"shape \(2, 4, 2\).*\(2, 4, 3\)"):
            self.over_top(teacher=np.zeros((2, 4, 3)))


class TestEstimators:
    """x = log π - log reference = 0.5 and r = π / behavior = e^{0.2} at every token."""

    VALUES = {
        "abs": 0.5,
        "k1_straight_through": 0.5,
        "k1_weighted": np.exp(0.2) * 0.5,
        "k1_policy_gradient": np.exp(0.2) * 0.5,
        "k2_weighted": np.exp(0.2) * 0.125,
    }

    @pytest.mark.parametrize("name", VALUES)
    def test_values(self, name):
        batch = batch_of(
            logprob_reference=np.full(MASK.shape, -0.5), logprob_behavior=np.full(MASK.shape, -0.2)
        )
        value, metrics = loss(jrl.penalize_kl(2.0, estimator=name), batch)
        assert value == pytest.approx(2 * self.VALUES[name], rel=1e-5)
        assert metrics["kl_reference"] == pytest.approx(self.VALUES[name], rel=1e-5)

    def test_policy_gradient_to_a_teacher_is_on_policy_distillation(self):
        rng = np.random.default_rng(0)
        fields = {f"logprob_{name}": -rng.random(MASK.shape) for name in ("behavior", "teacher")}
        current = jnp.asarray(fields["logprob_behavior"])
        penalty = jrl.penalize_kl(1.0, estimator="k1_policy_gradient", anchor="teacher")
        one = jrl.chain(jrl.normalize_by_token(), penalty)
        gradients = [
            jax.grad(lambda x, c=chain: jrl.transforms.loss(c, x, batch_of(**fields))[0])(current)
            for chain in (one, jrl.opd())
        ]
        np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-8)


class TestReference:
    def state(self, reference=True):
        params = {"w": jnp.array([1.0, 2.0]), "n": jnp.array(3)}
        made = init_state(params, optax.adam(1e-3), jrl.grpo(), key=jax.random.key(0), reference=reference)
        return made.replace(params={"w": jnp.array([3.0, 6.0]), "n": jnp.array(4)})

    def test_reset(self):
        state = reset_reference(self.state())
        np.testing.assert_array_equal(state.reference["w"], [3.0, 6.0])
        assert state.reference["w"] is not state.params["w"]

    def test_reset_with_the_optimiser(self):
        optimizer = optax.adam(1e-3)
        state = self.state()
        _, moved = optimizer.update(state.params, state.opt_state, state.params)
        state = state.replace(opt_state=moved)
        assert reset_reference(state).opt_state is moved
        fresh = reset_reference(state, optimizer).opt_state
        assert all(not np.any(x) for x in jax.tree.leaves(fresh))

    def test_move(self):
        state = move_reference(self.state(), 0.25)
        np.testing.assert_allclose(state.reference["w"], [1.5, 3.0])
        np.testing.assert_allclose(state.params["w"], [3.0, 6.0])

    def test_refused(self):
        with pytest.raises(ValueError, match="reset_reference: the learner state keeps no reference"):
            reset_reference(self.state(reference=False))
        with pytest.raises(ValueError, match="move_reference: the learner state keeps no reference"):
            move_reference(self.state(reference=False), 0.5)
        with pytest.raises(ValueError, match=r"tau must lie in \[0, 1\], got 1.5"):
            move_reference(self.state(), 1.5)


class TestReferenceOfARun:
    def state(self, settings, version):
        config = Config(reference=ReferenceSettings(**settings))
        run = types.SimpleNamespace(config=config, optimizer=optax.sgd(0.1))
        made = TestReference().state()
        return BaseRun.renew_reference(run, made.replace(version=jnp.int32(version)))

    @pytest.mark.parametrize(
        ("settings", "version", "expected"),
        [
            ({}, 4, 1.0),
            ({"reset_every": 2}, 3, 1.0),
            ({"reset_every": 2}, 4, 3.0),
            ({"reset_every": 2, "reset_optimizer": True}, 4, 3.0),
            ({"move_every": 2, "tau": 0.25}, 4, 1.5),
            ({"reset_every": 4, "move_every": 2, "tau": 0.25}, 4, 3.0),
        ],
    )
    def test_after_a_train_step(self, settings, version, expected):
        state = self.state(settings, version)
        np.testing.assert_allclose(state.reference["w"][0], expected)
        fresh = jax.tree.structure(state.opt_state) == jax.tree.structure(optax.sgd(0.1).init(state.params))
        assert fresh == settings.get("reset_optimizer", False)
