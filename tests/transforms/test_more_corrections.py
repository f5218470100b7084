"""Corrections that reject or decay, the approximated proximal policy, and recipes made of them: numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.transforms.evaluate import start_loss

MASK = np.array([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], bool)  # the last row trains nothing


def batch_of(mask=MASK, **fields):
    fields = {"reward": np.arange(len(mask), dtype=float), "group": np.zeros(len(mask), int), **fields}
    fields.setdefault("logprob_behavior", np.zeros(mask.shape))
    return jrl.TokenBatch.from_rows(np.zeros(mask.shape, int), mask, **fields)


def prepare(stage, batch):
    chain = jrl.chain(jrl.group_advantage(), stage, jrl.normalize_by_token())
    return chain.prepare(batch)[0]


def mean(batch, name):
    found = batch.logged[name]
    return float(jnp.sum(found.total) / jnp.sum(found.count))


def applied(stage, logprob, batch):
    start = start_loss(jrl.PolicyOutput(logprob=jnp.asarray(logprob)), batch)
    return stage.apply(start, batch, stage.init())


class TestOutlierSequences:
    Q = np.log(np.array([[1, 1, 50, 1], [1, 1.1, 1, 900], [7, 7, 7, 7]]))

    def test_one_token_drops_its_sequence(self):
        batch = prepare(jrl.mask_outlier_sequences(0.5, 10.0), batch_of(logprob_proximal=self.Q))
        assert np.asarray(batch.weight)[:2].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
        assert float(jnp.sum(batch.count)) == 5 and mean(batch, "outlier_masked") == pytest.approx(0.6)

    def test_renormalising_takes_it_out_of_the_denominator(self):
        stage = jrl.mask_outlier_sequences(0.5, 10.0, renormalize=True)
        assert float(jnp.sum(prepare(stage, batch_of(logprob_proximal=self.Q)).count)) == 2

    def test_a_token_without_a_ratio_is_an_outlier(self):
        q = np.zeros(MASK.shape)
        q[1, 1] = np.nan
        batch = prepare(jrl.mask_outlier_sequences(), batch_of(logprob_proximal=q))
        assert np.asarray(batch.weight)[0, 1:].tolist() == [1, 1, 1]
        assert np.asarray(batch.weight)[1, 1:3].tolist() == [0, 0]


class TestSecondMoment:
    Q = np.array([[9.0, 0.1, 0.6, 0.0], [9.0, -0.3, 0.2, 9.0], [9.0] * 4])  # M: .01 .36 0 .09 .04

    def test_ranks_over_the_batch(self):
        batch = prepare(jrl.mask_second_moment(0.04), batch_of(logprob_proximal=self.Q))
        assert np.asarray(batch.counted).astype(int).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0], [0] * 4]
        assert float(jnp.sum(batch.count)) == 4
        assert mean(batch, "mismatch_moment") == pytest.approx(0.1)
        assert mean(batch, "mismatch_moment_masked") == pytest.approx(0.2)

    def test_without_renormalising_the_denominator_stays(self):
        stage = jrl.mask_second_moment(0.04, renormalize=False)
        batch = prepare(stage, batch_of(logprob_proximal=self.Q))
        assert float(jnp.sum(batch.count)) == 5 and float(batch.weight[0, 2]) == 0

    def test_tokens_that_left_before_are_not_ranked(self):
        chain = jrl.chain(jrl.drop_truncated(), jrl.mask_second_moment(0.04), jrl.normalize_by_token())
        batch = batch_of(logprob_proximal=self.Q, truncated=np.array([True, False, False]))
        ready, _ = chain.prepare(batch)
        assert float(jnp.sum(ready.count)) == 1  # the mean of .09 and .04 is too large

    def test_on_policy_nothing_is_dropped(self):
        batch = prepare(jrl.mask_second_moment(1e-6), batch_of(logprob_proximal=np.zeros(MASK.shape)))
        assert float(jnp.sum(batch.count)) == 5


class TestStale:
    def batch(self, version):
        return batch_of(version=version, learner_version=5)

    def test_decay(self):
        batch = prepare(jrl.decay_stale(0.5, grace=1), self.batch(np.array([5, 2, 5])))
        assert np.asarray(batch.weight)[:2, 1:3].tolist() == [[1, 1], [0.25, 0.25]]
        assert mean(batch, "age") == pytest.approx(6 / 5)
        assert mean(batch, "stale_weight") == pytest.approx(3.5 / 5)

    def test_unknown_version(self):
        with pytest.raises(ValueError, match="decay_stale reads batch.version.*5 trained tokens"):
            prepare(jrl.decay_stale(0.5), self.batch(np.array([-1, -1, -1])))

    def test_rate_outside(self):
        with pytest.raises(ValueError, match="rate must be a number ≥ 0 and ≤ 1, got 1.5"):
            jrl.decay_stale(1.5)


class TestNegativeOffpolicy:
    def weights(self, stage, current, **fields):
        return applied(stage, current, batch_of(**fields))

    def test_bad_answers_that_drifted(self):
        current = np.array([[0, -0.2, -0.4, 0.0], [0, -0.2, -0.2, 0], [0.0] * 4])  # drift 0.2, 0.2
        advantage = np.array([[-1.0] * 4, [1.0] * 4, [-1.0] * 4])
        loss = self.weights(jrl.mask_negative_offpolicy(0.1), current, advantage=advantage)
        assert np.asarray(loss.weight)[:2, 1:3].tolist() == [[0, 0], [1, 1]]
        assert float(loss.metrics["offpolicy_masked"].value) == pytest.approx(0.6)
        kept = self.weights(jrl.mask_negative_offpolicy(0.3), current, advantage=advantage)
        assert np.all(np.asarray(kept.weight)[:, 1:] == 1)

    def test_no_gradient_through_the_decision(self):
        advantage = -np.ones(MASK.shape)

        def weight(current):
            loss = self.weights(jrl.mask_negative_offpolicy(0.0), current, advantage=advantage)
            return jnp.sum(loss.weight)

        assert np.all(np.asarray(jax.grad(weight)(jnp.full(MASK.shape, -0.1))) == 0)


class TestApproximateProximal:
    VERSION = np.array([4, 2, 4])  # at learner version 4: shares 0 and 2/3

    def loss(self, current, **arguments):
        batch = batch_of(version=self.VERSION, learner_version=4)
        return applied(jrl.approximate_proximal(**arguments), current, batch)

    def test_by_hand(self):
        current = np.full(MASK.shape, 0.3)
        loss = self.loss(current)
        np.testing.assert_allclose(np.asarray(loss.log_ratio)[:2, 1], [0.3, 0.1], rtol=1e-5)
        np.testing.assert_allclose(np.asarray(loss.weight)[:2, 1], [1.0, np.exp(0.2)], rtol=1e-5)

    def test_between_probabilities(self):
        loss = self.loss(np.full(MASK.shape, np.log(0.4)), between="probabilities")
        np.testing.assert_allclose(np.asarray(loss.weight)[:2, 1], [1.0, 1 / 3 + 0.4 * 2 / 3], rtol=1e-5)

    def test_the_weight_times_the_ratio_is_the_ratio_to_the_sampler(self):
        current = np.random.default_rng(0).normal(size=MASK.shape) * 0.3
        loss = self.loss(current)
        both = np.log(np.asarray(loss.weight)) + np.asarray(loss.log_ratio)
        np.testing.assert_allclose(both[MASK], current[MASK], atol=1e-6)

    def test_cap(self):
        loss = self.loss(np.full(MASK.shape, 9.0))
        assert np.asarray(loss.weight)[:2, 1].tolist() == [1.0, 0.0]
        assert float(self.loss(np.full(MASK.shape, 9.0), cap=None).weight[1, 1]) > 100

    def test_proximal_is_constant(self):
        """The gradient of the ratio is that of π over a fixed anchor."""
        grad = jax.grad(lambda x: jnp.sum(self.loss(x).log_ratio))(jnp.full(MASK.shape, 0.3))
        np.testing.assert_allclose(np.asarray(grad), MASK.astype(float))

    @pytest.mark.parametrize("far", [-800.0, 800.0])
    def test_far_apart_is_finite(self, far):
        for between in ("logarithms", "probabilities"):
            loss = self.loss(np.full(MASK.shape, far), between=between, cap=None)
            assert np.all(np.isfinite(np.asarray(loss.weight))) and np.all(np.isfinite(loss.log_ratio))


def test_weights_divided_by_their_mean():
    q = np.log(np.array([[1, 1, 2, 9], [1, 4, 1, 1], [1, 1, 1, 1]]))  # cut at 3: 1 2 3, 3 1 -> mean 2
    batch = prepare(jrl.truncate_importance(3.0, divide_by_mean=True), batch_of(logprob_proximal=q))
    np.testing.assert_allclose(np.asarray(batch.weight)[0, 1:], [0.5, 1.0, 1.5], rtol=1e-6)
    assert mean(batch, "importance_weight") == pytest.approx(1.0)


RECIPES = ("decoupled_ppo", "icepop", "m2po", "prime_rl", "prorl", "opd", "sft")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", ["usual", "nothing trained", "far apart", "no reward"])
def test_recipes_are_finite(name, case):
    rng = np.random.default_rng(1)
    mask = np.zeros_like(MASK) if case == "nothing trained" else MASK
    scale = 800.0 if case == "far apart" else 0.3
    fields = {
        f"logprob_{kind}": np.where(MASK, -1.0 + scale * rng.normal(size=MASK.shape), np.nan)
        for kind in ("behavior", "proximal", "reference", "teacher")
    }
    if case == "no reward":
        fields["reward"] = np.full(3, np.nan)
    batch = batch_of(mask, version=np.array([3, 4, 4]), learner_version=4, **fields)
    objective = jrl.recipes.RECIPES[name]()
    logprob = jnp.asarray(np.where(MASK, -1.0 - rng.random(MASK.shape), np.nan))
    value, gradient = jax.value_and_grad(lambda x: jrl.transforms.loss(objective, x, batch)[0])(logprob)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
    if case == "nothing trained":
        assert value == 0 and not np.any(gradient)
    if case == "usual":
        assert np.any(np.asarray(gradient)[MASK] != 0)


def test_decoupled_ppo_is_weighted_clipping_around_the_proximal_policy():
    rng = np.random.default_rng(2)
    behavior, proximal, current = (-rng.random(MASK.shape) for _ in range(3))
    batch = batch_of(logprob_behavior=behavior, logprob_proximal=proximal)
    value, _ = jrl.transforms.loss(jrl.decoupled_ppo(), jnp.asarray(current), batch)
    advantage = np.array([[-1.0], [1.0], [0.0]]) * np.sqrt(0.5)  # rewards 0 and 1 of one group
    r = np.exp(current - proximal)
    clipped = np.maximum(-advantage * r, -advantage * np.clip(r, 0.8, 1.2))
    expected = np.sum((np.exp(proximal - behavior) * clipped)[MASK]) / MASK.sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_decoupled_ppo_without_a_second_pass():
    assert jrl.transforms.needs(jrl.decoupled_ppo(approximate=True)) == frozenset()


def test_prime_rl_in_numpy():
    rng = np.random.default_rng(3)
    behavior, current = -2 * rng.random(MASK.shape), -2 * rng.random(MASK.shape)
    objective = jrl.prime_rl(low=0.05, high=0.05, square_coef=0.01)
    batch = batch_of(logprob_behavior=behavior)

    def loss(current):
        return jrl.transforms.loss(objective, current, batch)[0]

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(current)))
    advantage = np.array([[-0.5], [0.5], [0.0]])
    shift = np.exp(current) - np.exp(behavior)
    kept = np.where(advantage > 0, shift <= 0.05, shift >= -0.05)
    d = current - behavior
    expected = (kept * -advantage * np.exp(d) + 0.02 * d) * MASK / MASK.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert 0 < kept[MASK].sum() < MASK.sum()


class TestDivergentSequences:
    # log proximal - log behavior; the first sequence trains two tokens, the second two (see MASK).
    Q = np.where(MASK, np.array([[9.0, 0.1, 0.6, -0.4], [9.0, -0.3, 0.2, 9.0], [9.0] * 4]), 9.0)

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    @pytest.mark.parametrize("reduce", ["mean", "sum"])
    def test_by_hand(self, estimator, reduce):
        k = {"k2": self.Q**2 / 2, "k3": np.exp(self.Q) - 1 - self.Q}[estimator]  # KL(behavior ‖ proximal)
        sizes = [float(getattr(k[row][MASK[row]], reduce)()) for row in (0, 1)]
        batch = batch_of(logprob_proximal=self.Q)
        for limit, kept in ((min(sizes) * 0.99, 0), (min(sizes) * 1.01, 1), (max(sizes) * 1.01, 2)):
            done = prepare(jrl.mask_divergent_sequences(limit, estimator, reduce), batch)
            weights = np.asarray(done.weight)
            assert [bool(weights[row][MASK[row]].all()) for row in (0, 1)].count(True) == kept
            assert float(jnp.sum(done.count)) == 5
        alone = prepare(
            jrl.mask_divergent_sequences(min(sizes) * 1.01, estimator, reduce, renormalize=True), batch
        )
        assert float(jnp.sum(alone.count)) == MASK[int(np.argmin(sizes))].sum()

    def test_opposite_errors_do_not_cancel(self):
        q = np.where(MASK, np.array([[0, 1.0, -1.0, 0], [0] * 4, [0] * 4]), 0.0)
        batch = batch_of(logprob_proximal=q)
        assert (
            np.asarray(prepare(jrl.mask_importance(0.9, 1.1, "geometric", reweight=False), batch).weight)[
                0, 1
            ]
            == 1
        )
        assert np.asarray(prepare(jrl.mask_divergent_sequences(0.1, "k2"), batch).weight)[0, 1] == 0

    def test_a_token_without_a_ratio_drops_its_sequence(self):
        q = np.zeros(MASK.shape)
        q[1, 1] = np.nan
        weight = np.asarray(prepare(jrl.mask_divergent_sequences(0.5), batch_of(logprob_proximal=q)).weight)
        assert weight[1, 1:3].tolist() == [0, 0] and weight[0, 1] == 1

    def test_arguments(self):
        for bad in ({"limit": -1.0}, {"limit": 0.1, "estimator": "k1"}, {"limit": 0.1, "reduce": "max"}):
            with pytest.raises(ValueError, match="mask_divergent_sequences: "):
                jrl.mask_divergent_sequences(**bad)
