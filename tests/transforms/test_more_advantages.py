"""Stages of advantages and shaped rewards, by hand numbers; what they define at the edges; recipes made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes, testing


@pytest.fixture(autouse=True, scope="module")
def double():
    with testing.float64():
        yield


ROWS, COLUMNS = 8, 12  # every batch is filled up to the shape of the law tests, to share compiled operations


def wide(x, fill=0):
    x = np.asarray(x)
    if x.ndim == 1:
        return np.pad(x, (0, ROWS - len(x)), constant_values=fill)
    return np.pad(x, ((0, ROWS - x.shape[0]), (0, COLUMNS - x.shape[1])), constant_values=fill)


def crop(x, batch):
    """The part that `wide` did not add, where tokens are 1."""
    real = np.asarray(batch.tokens) == 1
    return np.asarray(x)[: real.any(axis=1).sum(), : real.any(axis=0).sum()]


def rows(lengths, reward=None, width=6, group=None, **fields):
    """(batch, mask): each answer follows one token of a prompt."""
    lengths = np.array(lengths)
    columns = np.arange(width)
    mask = (columns >= 1) & (columns <= lengths[:, None])
    group = np.arange(len(lengths)) if group is None else group
    fields = {name: jnp.asarray(wide(x)) for name, x in fields.items()}
    batch = jrl.TokenBatch.from_rows(
        wide(np.ones(mask.shape, int)),
        wide(mask),
        reward=None if reward is None else wide(reward, np.nan),
        group=np.concatenate([group, np.arange(90, 90 + ROWS - len(lengths))]),
        **fields,
    )
    return batch, mask


def column(values, fill=0):
    """[8, 12]: one value a row."""
    return jnp.broadcast_to(jnp.asarray(wide(np.asarray(values), fill))[:, None], (ROWS, COLUMNS))


def advantage(stages, batch):
    """(advantage without what `wide` added, the prepared batch)."""
    chain = jrl.chain(*([stages] if not isinstance(stages, list) else stages))
    prepared, _ = chain.prepare(batch)
    assert not np.any(np.asarray(prepared.advantage)[~np.asarray(batch.mask)])
    return crop(prepared.advantage, batch), prepared


def by_row(stage, batch, mask):
    """One number a row, after checking that its trained tokens agree."""
    found, prepared = advantage(stage, batch)
    last = [row[m][-1] if m.any() else 0.0 for row, m in zip(found, mask, strict=True)]
    np.testing.assert_array_equal(found, np.where(mask, np.array(last)[:, None], 0.0))
    return np.array(last), prepared


def logged(prepared, name):
    return float(jnp.sum(prepared.logged[name].total) / jnp.sum(prepared.logged[name].count))


class TestGroups:
    def test_batch_scale_divides_by_the_std_of_all_rewards(self):
        reward = np.array([1.0, 0.0, 5.0, 3.0])
        batch, mask = rows([2, 3, 1, 2], reward, group=[0, 0, 1, 1])
        found, _ = by_row(jrl.group_advantage(scale="batch", eps=0.1), batch, mask)
        np.testing.assert_allclose(found, np.array([0.5, -0.5, 1.0, -1.0]) / (reward.std(ddof=1) + 0.1))

    def test_leave_one_out_std(self):
        batch, mask = rows([2, 3, 1], [1.0, 0.0, 0.5], group=[0, 0, 0])
        found, _ = by_row(jrl.leave_one_out_advantage(scale="std", eps=0.0), batch, mask)
        std = np.std([0.0, 0.5], ddof=1), np.std([1.0, 0.5], ddof=1), np.std([1.0, 0.0], ddof=1)
        np.testing.assert_allclose(found, np.array([0.75, -0.75, 0.0]) / std)

    def test_opo(self):
        batch, mask = rows([2, 6, 3], [1.0, 0.0, 1.0], width=8, group=[0, 0, 1])
        found, _ = by_row(jrl.length_weighted_advantage(), batch, mask)
        np.testing.assert_allclose(found, [0.75, -0.25, 0.0])

    def test_gpg_rescales_for_groups_without_a_signal(self):
        batch, mask = rows([2, 2, 2, 2, 2], [1.0, 0.0, 1.0, 1.0, np.nan], group=[0, 0, 1, 1, 1])
        found, prepared = by_row(jrl.rescaled_group_advantage(), batch, mask)
        np.testing.assert_allclose(found, [1.0, -1.0, 0.0, 0.0, 0.0])  # 4 with a reward, 2 that teach
        assert logged(prepared, "advantage_rescale") == 2.0
        found, _ = by_row(jrl.rescaled_group_advantage(rescale="nonzero"), batch, mask)
        np.testing.assert_allclose(found, np.array([0.5, -0.5, 0.0, 0.0, 0.0]) * 4 / 3)

    def test_pass_at_k(self):
        batch, mask = rows([1, 2, 1, 1], [1.0, 0.0, 0.0, 0.0], group=[0] * 4)
        found, _ = by_row(jrl.pass_at_k_advantage(k=2), batch, mask)
        # R̄ = 1 - 3 / 6; a success is in subsets that all pass, a failure in one of three
        np.testing.assert_allclose(found, [1.0, -1 / 3, -1 / 3, -1 / 3])
        one, _ = by_row(jrl.pass_at_k_advantage(k=1), batch, mask)
        grpo, _ = by_row(jrl.group_advantage(ddof=0, eps=0.0), batch, mask)
        np.testing.assert_allclose(one, grpo)

    def test_pass_at_k_max(self):
        batch, mask = rows([1, 2, 1, 1], [1.0, 0.25, 0.0, 0.25], group=[0] * 4)
        found, _ = by_row(jrl.pass_at_k_advantage(form="max", scale="none"), batch, mask)
        np.testing.assert_allclose(found, [0.75, 0.0, 0.0, 0.0])
        found, _ = by_row(jrl.pass_at_k_advantage(form="max", eps=0.0), batch, mask)
        np.testing.assert_allclose(found[0], 0.75 / np.std([1.0, 0.25, 0.0, 0.25], ddof=1))


class TestMultipleRewards:
    def batch(self, right, style, reward=0.0, **fields):
        batch, mask = rows([2] * len(right), np.full(len(right), reward), group=[0, 0, 1, 1])
        last = jnp.arange(COLUMNS) == 2
        streams = {
            name: jnp.where(last, column(values), 0.0)
            for name, values in {"right": right, "style": style}.items()
        }
        return batch.replace(rewards=streams, **fields), mask

    def test_each_part_is_normalised_before_the_sum(self):
        batch, mask = self.batch([1.0, 0.0, 0.0, 0.0], [0.0, 4.0, 9.0, 1.0])
        found, prepared = by_row(jrl.multi_reward_advantage(eps=0.0), batch, mask)
        half = np.sqrt(0.5)
        np.testing.assert_allclose(found, [0.0, 0.0, half, -half], atol=1e-12)
        assert logged(prepared, "group_no_signal") == 0.0
        stage = jrl.multi_reward_advantage(weights={"style": -2.0}, scale="none")
        found, _ = by_row(stage, batch, mask)
        np.testing.assert_allclose(found, [4.0, -4.0, -8.0, 8.0])

    def test_a_missing_part_adds_nothing(self):
        batch, mask = self.batch([1.0, 0.0, 1.0, 0.0], [np.nan, 4.0, 9.0, 1.0])
        found, prepared = by_row(jrl.multi_reward_advantage(scale="none"), batch, mask)
        np.testing.assert_allclose(found, [0.5, -0.5, 4.5, -4.5])
        assert logged(prepared, "reward_part_missing") == 1 / 8

    def test_no_reward_no_advantage(self):
        batch, mask = self.batch([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0])
        batch = batch.replace(reward_valid=batch.reward_valid.at[0].set(False))
        found, _ = by_row(jrl.multi_reward_advantage(scale="none"), batch, mask)
        np.testing.assert_allclose(found, [0.0, 0.0, 1.0, -1.0])

    def test_errors(self):
        batch, _ = self.batch([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0])
        with pytest.raises(ValueError, match="no part tone; it has right, style"):
            jrl.multi_reward_advantage(weights={"tone": 1.0}).prepare(batch, None)
        with pytest.raises(ValueError, match="needs batch.rewards"):
            jrl.multi_reward_advantage().prepare(batch.replace(rewards=None), None)
        with pytest.raises(ValueError, match="at least one part"):
            jrl.multi_reward_advantage(weights={})
        with pytest.raises(ValueError, match="weights\\['right'\\]"):
            jrl.multi_reward_advantage(weights={"right": "a lot"})


class TestWhitenTrajectories:
    def test_each_trajectory_once(self):
        values = np.array([1.0, 2.0, 6.0])
        batch, mask = rows([1, 5, 2], np.zeros(3), advantage=values)
        stages = [jrl.given_advantage(), jrl.whiten_advantage(level="trajectory", eps=0.5)]
        found, _ = by_row(stages, batch, mask)
        np.testing.assert_allclose(found, (values - 3.0) / (values.std(ddof=1) + 0.5))

    def test_equal_advantages_give_exactly_zero(self):
        batch, _ = rows([1, 5, 2], np.zeros(3), advantage=np.full(3, 0.3))
        stages = [jrl.given_advantage(), jrl.whiten_advantage(level="trajectory", eps=0.0)]
        assert not np.any(advantage(stages, batch)[0])


class TestGae:
    MASK = np.array([[0, 1, 0, 1, 1, 0]] * 2, bool)

    def batch(self, **fields):
        value = np.array([[np.nan, 1.0, np.nan, 2.0, 4.0, np.nan]] * 2)
        batch, _ = rows([4, 4], [3.0, 3.0], truncated=[False, True], value=value, **fields)
        return batch.replace(mask=jnp.asarray(wide(self.MASK))), self.MASK

    def test_crosses_a_gap_and_ends_with_zero(self):
        batch, mask = self.batch()
        found, prepared = advantage(jrl.gae(gamma=0.5, lam=0.5), batch)
        # δ = [0.5·2 - 1, 0.5·4 - 2, 3 - 4]
        np.testing.assert_allclose(found[0][mask[0]], [-0.0625, -0.25, -1.0])
        np.testing.assert_allclose(crop(prepared.returns, batch)[0], [0, 0.9375, 0, 1.75, 3.0, 0])
        np.testing.assert_array_equal(found[0], found[1])

    def test_bootstrap_of_truncated_trajectories(self):
        after = np.full((2, 6), np.nan)
        after[:, 4] = 8.0
        batch, mask = self.batch(bootstrap_value=after)
        found, _ = advantage(jrl.gae(gamma=0.5, lam=0.5, bootstrap=True), batch)
        np.testing.assert_allclose(found[0][mask[0]], [-0.0625, -0.25, -1.0])
        np.testing.assert_allclose(found[1][mask[1]], [0.1875, 0.75, 3.0])
        with pytest.raises(ValueError, match="bootstrap_value"):
            jrl.gae(bootstrap=True).prepare(self.batch()[0], None)

    def test_decoupled_and_length_adaptive(self):
        batch, mask = self.batch()
        decoupled, prepared = advantage(jrl.gae(gamma=0.5, lam=0.5, lam_value=1.0), batch)
        np.testing.assert_allclose(decoupled, advantage(jrl.gae(gamma=0.5, lam=0.5), batch)[0])
        np.testing.assert_allclose(crop(prepared.returns, batch)[0][mask[0]], [0.75, 1.5, 3.0])
        adaptive, _ = advantage(jrl.gae(gamma=0.5, lam=1.0, length_adaptive=2 / 3), batch)  # λ = 1 - 1 / 2
        np.testing.assert_allclose(adaptive, decoupled)

    def test_no_reward_teaches_nobody(self):
        batch, mask = self.batch()
        batch = batch.replace(reward_valid=jnp.zeros_like(batch.reward_valid))
        found, prepared = advantage(jrl.gae(), batch)
        assert not np.any(found)
        np.testing.assert_array_equal(crop(prepared.returns, batch)[mask], np.tile([1.0, 2.0, 4.0], 2))
        assert "batch.bootstrap_value" not in jrl.needs(jrl.gae())
        assert jrl.needs(jrl.gae(bootstrap=True)) == {"batch.value", "batch.bootstrap_value"}

    def test_explained_variance(self):
        batch, _ = self.batch()
        _, prepared = advantage(jrl.gae(), batch)  # returns are 3 everywhere
        assert logged(prepared, "explained_variance") == 0.0 and logged(prepared, "returns") == 3.0


class TestBaselines:
    def test_greedy(self):
        batch, mask = rows([2, 3, 2], [1.0, 0.0, 1.0])
        batch = batch.replace(baseline_reward=column([0.25, 0.75, np.nan]))
        found, prepared = by_row(jrl.greedy_baseline_advantage(), batch, mask)
        np.testing.assert_allclose(found, [0.75, -0.75, 0.0])
        assert logged(prepared, "baseline_reward") == 0.5

    def test_agents_keep_their_own_baselines(self):
        stage = jrl.chain(jrl.agent_baseline_advantage(agents=2, decay=0.5))
        batch, _ = rows([2, 2, 2, 2], [1.0, 3.0, 4.0, np.nan])
        batch = batch.replace(agent=column([0, 0, 1, 1]))
        state = stage.init()
        first, state = stage.prepare(batch, state)
        np.testing.assert_allclose(np.asarray(first.advantage)[:4, 1], [1.0, 3.0, 4.0, 0.0])
        # 0.5² · 0 + (1 - 0.5²) · mean 2; 0.5 · 0 + 0.5 · 4
        np.testing.assert_allclose(state["agent_baseline_advantage"]["baseline"], [1.5, 2.0])
        second, _ = stage.prepare(batch, state)
        np.testing.assert_allclose(np.asarray(second.advantage)[:4, 1], [-0.5, 1.5, 2.0, 0.0])
        assert not np.any(np.asarray(second.advantage)[~np.asarray(batch.mask)])

    def test_agents_outside_the_range_have_no_signal(self):
        stage = jrl.chain(jrl.agent_baseline_advantage(agents=2))
        batch, _ = rows([2, 2, 2], [1.0, 3.0, 4.0])
        batch = batch.replace(agent=column([-1, 1, 2]))
        prepared, state = stage.prepare(batch, stage.init())
        np.testing.assert_allclose(np.asarray(prepared.advantage)[:3, 1], [0.0, 3.0, 0.0])
        np.testing.assert_allclose(state["agent_baseline_advantage"]["baseline"], [0.0, 0.15])


class TestDistillation:
    def batch(self):
        behavior = np.array([[0.0, -1.0, -2.0, -1.0, 0.0, 0.0]])
        teacher = np.array([[9.0, -0.5, -4.0, -1.0, 9.0, 9.0]])
        return rows([3], [1.0], logprob_behavior=behavior, logprob_teacher=teacher)[0]

    def test_whole_advantage_is_teacher_minus_policy(self):
        found, _ = advantage(jrl.distill_advantage(coef=2.0), self.batch())
        np.testing.assert_allclose(found, [[0.0, 1.0, -4.0, 0.0, 0.0, 0.0]])

    def test_sums_later_tokens(self):
        found, _ = advantage(jrl.distill_advantage(gamma=0.5), self.batch())
        np.testing.assert_allclose(found, [[0.0, -0.5, -2.0, 0.0, 0.0, 0.0]])

    def test_centred_and_limited(self):
        found, prepared = advantage(jrl.distill_advantage(center=True, limit=1.0), self.batch())
        kl = np.array([-0.5, 1.0, 0.0])
        np.testing.assert_allclose(found[0, 1:4], kl.mean() - kl)
        np.testing.assert_allclose(logged(prepared, "kl_in_advantage"), kl.mean())

    def test_added_to_another(self):
        stages = [jrl.returns_to_go(), jrl.distill_advantage(0.5, add=True)]
        found, _ = advantage(stages, self.batch())
        np.testing.assert_allclose(found, [[0.0, 1.25, 0.0, 1.0, 0.0, 0.0]])
        missing = self.batch().replace(reward_valid=jnp.zeros((ROWS, COLUMNS), bool))
        assert not np.any(advantage(stages, missing)[0])


class TestRewards:
    def shaped(self, stage, batch):
        prepared, _ = jrl.chain(stage, jrl.returns_to_go()).prepare(batch)
        assert np.all(np.asarray(prepared.reward)[~np.asarray(batch.mask)] == 0)
        return crop(prepared.reward, batch).sum(axis=1), prepared

    def test_rescaled(self):
        batch, _ = rows([2, 3, 2], [1.0, -3.0, np.nan])
        found, _ = self.shaped(jrl.rescale_reward(scale=5.0, bias=-0.5, limit=10.0), batch)
        np.testing.assert_allclose(found, [2.5, -10.0, 0.0])

    def test_truncated(self):
        batch, _ = rows([2, 3, 2, 2], [1.0, 1.0, -0.2, np.nan], truncated=[False, True, True, True])
        np.testing.assert_allclose(self.shaped(jrl.shape_truncated(), batch)[0], [1.0, 0.0, 0.0, 0.0])
        np.testing.assert_allclose(self.shaped(jrl.shape_truncated(0.5), batch)[0], [1.0, 0.5, -0.1, 0.0])
        found, prepared = self.shaped(jrl.shape_truncated(value=-0.5), batch)
        np.testing.assert_allclose(found, [1.0, -0.5, -0.5, 0.0])
        np.testing.assert_allclose(logged(prepared, "stopped_improperly"), 2 / 3)

    def test_length(self):
        batch, _ = rows([1, 4, 2], [1.0, 1.0, np.nan], group=[0, 0, 0])
        # answers of 1 and 4 tokens after a prompt of 1, one turn each
        found, prepared = self.shaped(jrl.shape_length(output=0.2, context=0.1, turns=0.3), batch)
        np.testing.assert_allclose(found, [1 - 0.05 - 0.1 - 0.3, 1 - 0.2 - 0.1 - 0.3, 0.0])
        np.testing.assert_allclose(logged(prepared, "length_cost"), 0.525)
        two_turns = batch.replace(mask=batch.mask.at[1, 2].set(False))
        found, _ = self.shaped(jrl.shape_length(output=0.3, context=0.2, turns=0.1), two_turns)
        np.testing.assert_allclose(found, [1 - 0.1 - 0.1 - 0.05, 1 - 0.3 - 0.2 - 0.1, 0.0])

    def test_length_never_pays_long_answers(self):
        batch, _ = rows([1, 4], [-1.0, -0.5], group=[0, 0])
        np.testing.assert_allclose(self.shaped(jrl.shape_length(), batch)[0], [-1.0, -0.5])


STAGES = [
    jrl.group_advantage(scale="batch"),
    jrl.leave_one_out_advantage(scale="std"),
    jrl.length_weighted_advantage(),
    jrl.rescaled_group_advantage(),
    jrl.pass_at_k_advantage(),
    jrl.pass_at_k_advantage(form="max"),
    jrl.multi_reward_advantage(),
    jrl.gae(),
    jrl.greedy_baseline_advantage(),
    jrl.agent_baseline_advantage(),
    jrl.distill_advantage(),
]


@pytest.mark.parametrize("stage", STAGES, ids=str)
class TestEdges:
    def prepared(self, stage, **changes):
        batch = testing.sample_batch().replace(**changes)
        shaping = [jrl.rescale_reward(2.0), jrl.shape_truncated(), jrl.shape_length()]
        whiten = jrl.whiten_advantage(level="trajectory")
        prepared, _ = jrl.chain(*shaping, stage, whiten).prepare(batch)
        assert all(np.isfinite(x).all() for mean in prepared.logged.values() for x in mean)
        assert np.isfinite(prepared.advantage).all()
        return np.asarray(prepared.advantage)

    def test_nothing_trained(self, stage):
        assert not np.any(self.prepared(stage, mask=jnp.zeros((8, 12), bool)))

    def test_no_rewards(self, stage):
        found = self.prepared(stage, reward_valid=jnp.zeros((8, 12), bool))
        assert np.any(found) == (stage.info.stage == "distill_advantage")

    def test_log_ratios_of_800(self, stage):
        self.prepared(stage, logprob_behavior=jnp.zeros((8, 12)), logprob_teacher=jnp.full((8, 12), -800.0))


@pytest.mark.parametrize("stage", STAGES[:6:2], ids=str)
def test_groups_of_one_and_of_equal_rewards_have_advantage_zero(stage):
    with jax.enable_x64(False):  # where the mean of equal rewards is off by an ulp
        batch, _ = rows([1, 2, 3, 4, 1, 2, 3, 4], [0.3] * 7 + [1.0], group=[0] * 7 + [1])
        assert not np.any(advantage(stage, batch)[0])


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: jrl.gae(lam=1.5), "lam must be"),
        (lambda: jrl.gae(length_adaptive=0.0), "length_adaptive must be"),
        (lambda: jrl.pass_at_k_advantage(k=0), "k must be an integer"),
        (lambda: jrl.pass_at_k_advantage(form="mean"), "form must be one of"),
        (lambda: jrl.agent_baseline_advantage(agents=0), "agents must be an integer"),
        (lambda: jrl.rescaled_group_advantage(rescale="all"), "rescale must be one of"),
        (lambda: jrl.whiten_advantage(level="row"), "level must be one of"),
        (lambda: jrl.distill_advantage(anchor="behavior"), "anchor must be one of"),
        (lambda: jrl.shape_length(output=-1.0), "output must be"),
        (lambda: jrl.rescale_reward(limit=0.0), "limit must be"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_distillation_is_added_after_an_advantage_only():
    with pytest.raises(ValueError, match="reads batch.advantage, which no earlier stage writes"):
        jrl.chain(jrl.distill_advantage(add=True))
    with pytest.raises(ValueError, match="exactly one creator of batch.advantage"):
        jrl.chain(jrl.group_advantage(), jrl.distill_advantage())


# ---------------------------------------------------------------------------------------- recipes

LENGTHS, REWARD, GROUP = [4, 3, 2, 4], np.array([1.0, 0.0, 0.0, 1.0]), [0, 0, 1, 1]
HALF = np.array([0.5, -0.5, -0.5, 0.5])


def recipe_batch():
    rng = np.random.default_rng(3)
    behavior = -rng.random((4, 6))
    batch, mask = rows(LENGTHS, REWARD, group=GROUP, logprob_behavior=behavior)
    batch = batch.replace(
        baseline_reward=jnp.full(batch.shape, 0.25),
        rewards={"right": batch.reward, "short": batch.reward * 3.0},
    )
    return batch, behavior + 0.3 * rng.normal(size=mask.shape), behavior, mask


NAMES = ["reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "maxrl", "pass_at_k", "gdpo"]


def numpy_loss(name, lp, mu, m):
    """Each algorithm with its advantage, clip and average written out."""
    n = np.array(LENGTHS)
    if name in ("reinforce_pp", "reinforce_pp_baseline"):
        raw = np.where(m, (REWARD if name == "reinforce_pp" else HALF)[:, None], 0.0)
        a = (raw - raw[m].mean()) / np.sqrt(raw[m].var(ddof=1) + 1e-8)
    else:
        total = HALF / (np.sqrt(0.5) + 1e-6) + 3 * HALF / (3 * np.sqrt(0.5) + 1e-6)  # two parts
        rows_ = {
            "remax": REWARD - 0.25,
            "opo": REWARD - np.repeat([4 / 7, 4 / 6], 2),
            "gpg": HALF,
            "maxrl": HALF / 0.5,
            "pass_at_k": 2 * HALF,  # k=1: centred, over the biased std
            "gdpo": total / (total.std(ddof=1) + 1e-4),
        }[name]
        a = np.repeat(rows_[:, None], 6, axis=1)
    if name in ("remax", "opo", "gpg", "maxrl"):
        loss = -a * lp
    else:
        r = np.exp(lp - mu)
        loss = np.maximum(-a * r, -a * np.clip(r, 0.8, 1.2))
    loss = np.where(m, loss, 0.0).sum(axis=1)
    if name == "remax":
        return loss.mean()
    return (loss / n).mean() if name == "gdpo" else loss.sum() / n.sum()


@pytest.mark.parametrize("name", NAMES)
def test_recipe_equals_its_paper(name):
    """Value against NumPy, gradient against central differences of it."""
    batch, lp, mu, mask = recipe_batch()
    objective = recipes.RECIPES[name](**({"k": 1} if name == "pass_at_k" else {}))
    function = jax.value_and_grad(lambda lp: jrl.transforms.loss(objective, lp, batch)[0])
    options = {"xla_backend_optimization_level": 0}
    value, gradient = jax.jit(function, compiler_options=options)(jnp.asarray(wide(lp)))
    gradient = crop(gradient, batch)
    np.testing.assert_allclose(value, numpy_loss(name, lp, mu, mask), rtol=1e-9)
    h, expected = 1e-6, np.zeros_like(lp)
    for b, t in np.argwhere(mask):
        up, down = lp.copy(), lp.copy()
        up[b, t] += h
        down[b, t] -= h
        expected[b, t] = (numpy_loss(name, up, mu, mask) - numpy_loss(name, down, mu, mask)) / (2 * h)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)


def test_reinforce_pp_takes_the_kl_off_the_reward():
    names = [info.name for info in jrl.reinforce_pp(reward_kl_coef=0.1).info]
    assert names[:3] == ["penalize_kl_in_reward", "returns_to_go", "whiten_advantage"]
    assert jrl.needs(jrl.reinforce_pp(reward_kl_coef=0.1)) == {"batch.logprob_reference"}
