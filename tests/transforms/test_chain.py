"""How stages chain: dataflow, errors, tables, overrides, state, wrappers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import testing, transforms
from jaxrl_llm.transforms import Parts


def error(build):
    with pytest.raises(ValueError) as caught:
        build()
    return str(caught.value)


@pytest.fixture(autouse=True, scope="module")
def double():
    """The type and shapes of the law tests, so that their compiled operations are used again."""
    with testing.float64():
        yield


@pytest.fixture
def batch():
    return testing.sample_batch()


@pytest.fixture
def forget():
    """Takes stages that a test defines out of the registry again."""
    before = dict(transforms.STAGES)
    yield
    transforms.STAGES.clear()
    transforms.STAGES.update(before)


def current(batch):
    return testing.tiny_policy(testing.tiny_policy_params(1), batch)


# ------------------------------------------------------------------------------------------ errors


def test_reader_before_its_writer():
    text = error(lambda: jrl.chain(jrl.group_advantage(), jrl.clip_surrogate(), jrl.token_ratio()))
    assert text == (
        "chain(): stage 1 clip_surrogate(low=0.2, high=0.2) reads loss.log_ratio, which no earlier stage writes. "
        "Stage 2 token_ratio(anchor=behavior) writes it but comes later: move it before stage 1."
    )


def test_reader_without_a_writer_lists_the_stages_that_exist():
    text = error(lambda: jrl.chain(jrl.token_ratio(), jrl.clip_surrogate()))
    start = (
        "chain(): stage 1 clip_surrogate(low=0.2, high=0.2) reads batch.advantage, which no earlier stage writes. "
        "Add one of: "
    )
    assert text.startswith(start)
    listed = text.removeprefix(start).removesuffix(".").split(", ")
    assert {"given_advantage", "group_advantage", "leave_one_out_advantage", "returns_to_go"} <= set(listed)
    assert "whiten_advantage" not in listed  # it rewrites an advantage, it does not make one
    assert set(listed) <= set(transforms.STAGES)


def test_lists_grow_with_the_stages(forget):
    @jrl.stage(writes=("batch.advantage",))
    def flat_advantage():
        def prepare(batch):
            return batch.replace(advantage=jnp.ones_like(batch.reward))

        return prepare

    assert "flat_advantage" in error(lambda: jrl.chain(jrl.reinforce_surrogate()))


def test_reward_shaping_after_the_advantage():
    text = error(lambda: jrl.chain(jrl.group_advantage(), jrl.shape_overlong(10, 5)))
    assert text == (
        "chain(): stage 1 shape_overlong(limit=10, buffer=5, penalty=1) changes batch.reward after stage 0 "
        "group_advantage(scale=std, ddof=1, eps=1e-06) has read it. Move stage 1 before stage 0."
    )


def test_second_writer():
    text = error(
        lambda: jrl.chain(
            jrl.given_advantage(),
            jrl.token_ratio(),
            jrl.clip_surrogate(),
            jrl.clip_surrogate(0.1, name="tight"),
        )
    )
    assert text == (
        "chain(): stage 3 tight: clip_surrogate(low=0.1, high=0.2) writes loss.policy, already written by stage 2 "
        "clip_surrogate(low=0.2, high=0.2). A chain has exactly one writer of loss.policy."
    )


def test_second_creator_but_any_number_of_rewriters():
    text = error(lambda: jrl.chain(jrl.given_advantage(), jrl.group_advantage()))
    assert "exactly one creator of batch.advantage" in text
    jrl.chain(jrl.group_advantage(), jrl.whiten_advantage(), jrl.whiten_advantage(name="again"))


def test_rewriter_after_a_reader():
    text = error(lambda: jrl.chain(jrl.group_advantage(), jrl.reinforce_surrogate(), jrl.whiten_advantage()))
    assert "stage 2 whiten_advantage" in text and "Move stage 2 before stage 1" in text


def test_dropping_after_the_normaliser():
    text = error(lambda: jrl.chain(jrl.normalize_by_token(), jrl.drop_truncated()))
    assert "changes batch.counted after stage 0 normalize_by_token() has read it" in text
    jrl.chain(jrl.normalize_by_token(), jrl.drop_truncated(renormalize=False))  # a weight: any order


def test_two_stages_of_one_name():
    text = error(lambda: jrl.chain(jrl.token_ratio(), jrl.token_ratio()))
    assert "both called token_ratio" in text and 'name="token_ratio_2"' in text


def test_not_a_stage():
    assert "Did you forget to call it: clip_surrogate()?" in error(lambda: jrl.chain(jrl.clip_surrogate))
    assert "argument 1 is int" in error(lambda: jrl.chain(jrl.token_ratio(), 3))


def test_incomplete_where_it_is_used(batch):
    partial = jrl.chain(jrl.group_advantage(), jrl.reinforce_surrogate())  # composable all the same
    text = error(lambda: jrl.transforms.loss(partial, batch.logprob_behavior, batch))
    assert text == (
        "objective is incomplete: nothing writes batch.norm. Add one of: normalize_by_constant, normalize_by_group, "
        "normalize_by_length_limit, normalize_by_pair, normalize_by_sequence, normalize_by_sequence_sum, normalize_by_token."
    )
    text = error(lambda: jrl.transforms.check_complete(jrl.chain(jrl.normalize_by_token())))
    assert "nothing to minimise" in text and "clip_surrogate" in text
    jrl.transforms.check_complete(jrl.chain(jrl.normalize_by_token(), jrl.reward_entropy(0.1)))


def test_evaluate_wants_a_prepared_batch(batch):
    objective = jrl.grpo()
    assert "objective.prepare" in error(lambda: jrl.evaluate(objective, current(batch), batch))
    prepared, _ = objective.prepare(batch, objective.init())
    assert "prepared before" in error(lambda: objective.prepare(prepared, objective.init()))


@pytest.mark.parametrize(
    "objective, field, fix",
    [
        (jrl.grpo(kl_coef=0.1), "logprob_reference", "reference policy"),
        (jrl.grpo(anchor="proximal"), "logprob_proximal", "Score the batch"),
        (jrl.grpo(), "logprob_behavior", "from_rows"),
        (jrl.grpo(entropy_coef=0.1), "entropy", "policy_output"),
        (jrl.dapo(anchor="proximal", importance_cap=2.0), "logprob_proximal", "Score the batch"),
        (
            jrl.chain(jrl.given_advantage(), jrl.normalize_by_token(), jrl.reinforce_surrogate()),
            "advantage",
            "from_rows",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_missing_field_names_stage_field_and_fix(batch, objective, field, fix):
    if field != "entropy":
        batch = batch.replace(**{field: None})
    text = error(lambda: jrl.transforms.loss(objective, jnp.zeros(batch.shape), batch))
    stage = next(
        i.name for i in objective.info if any(r.endswith("." + field) for r in i.reads) or not i.reads
    )
    assert f"{stage} needs" in text and field in text and fix in text


def test_shape_of_logprob(batch):
    assert "(8, 11)" in error(lambda: jrl.transforms.loss(jrl.grpo(), jnp.zeros((8, 11)), batch))


@pytest.mark.parametrize(
    "build, parts",
    [
        (lambda: jrl.group_advantage(scale="variance"), ["scale", "'std'", "'variance'"]),
        (lambda: jrl.group_advantage(ddof=2), ["ddof"]),
        (lambda: jrl.clip_surrogate(low=-0.1), ["low", "≥ 0", "-0.1"]),
        (lambda: jrl.clip_surrogate(high="0.2"), ["high", "'0.2'"]),
        (lambda: jrl.clip_surrogate(dual=0.5), ["dual", "≥ 1"]),
        (lambda: jrl.token_ratio(anchor="old"), ["anchor", "'behavior'", "'old'"]),
        (lambda: jrl.penalize_kl(float("nan")), ["coef"]),
        (lambda: jrl.penalize_kl(True), ["coef", "True"]),
        (lambda: jrl.penalize_kl(0.1, estimator="k4"), ["estimator", "'k3_weighted'"]),
        (lambda: jrl.penalize_kl(0.1, normalize="token"), ["normalize_by_"]),
        (lambda: jrl.normalize_by_length_limit(0), ["limit", "> 0"]),
        (lambda: jrl.shape_overlong(limit=10, buffer=11), ["buffer", "≤ 10"]),
        (lambda: jrl.truncate_importance(cap=2, floor=3), ["floor", "≤ 2"]),
        (lambda: jrl.truncate_importance(cap=2, level="row"), ["level"]),
        (lambda: jrl.returns_to_go(gamma=1.5), ["gamma"]),
        (lambda: jrl.grpo(importance_cap=2.0), ["importance_cap", 'anchor="proximal"']),
    ],
)
def test_bad_arguments(build, parts):
    text = error(build)
    assert all(part in text for part in parts), text


def test_stage_definitions_are_checked(forget):
    @jrl.stage(reads=("batch.advntage",))
    def misspelt():
        def apply(loss, batch):
            return loss

        return apply

    assert "Did you mean batch.advantage?" in error(misspelt)

    @jrl.stage()
    def lost():
        return lambda loss, batch: loss

    assert "`apply` or `prepare`" in error(lost)


# ------------------------------------------------------------------------- what a chain says of itself


def test_describe():
    table = jrl.transforms.describe(jrl.grpo(anchor="proximal", importance_cap=5.0, kl_coef=0.1))
    expected = """
#  stage                                                          clock    reads                                      writes
0  group_advantage(scale=std, ddof=1, eps=1e-06)                  prepare  batch.reward, .reward_valid, .group        batch.advantage
1  truncate_importance(cap=5, level=token, divide_by_mean=False)  prepare  batch.logprob_proximal, .logprob_behavior  batch.weight
2  normalize_by_sequence()                                        prepare  batch.counted                              batch.norm, .count
3  token_ratio(anchor=proximal)                                   apply    batch.logprob_proximal                     loss.log_ratio
4  clip_surrogate(low=0.2, high=0.2)                              apply    loss.log_ratio, batch.advantage            loss.policy
5  penalize_kl(coef=0.1, estimator=k3, anchor=reference)          apply    batch.logprob_reference                    loss.penalties
"""
    assert table == expected.strip()


def test_needs():
    assert jrl.needs(jrl.dapo()) == frozenset()
    assert jrl.needs(jrl.grpo(kl_coef=0.1)) == {"batch.logprob_reference"}
    everything = jrl.grpo(kl_coef=0.1, entropy_coef=0.1, anchor="proximal")
    assert jrl.needed_fields(everything) == {"logprob_reference", "logprob_proximal", "entropy"}
    (need,) = jrl.needs(jrl.reinforce(entropy_coef=0.1))
    assert (need.record, need.field, need.arguments) == ("loss", "entropy", {})


def test_needs_carry_arguments(forget):
    @jrl.stage(reads=lambda a: (f"loss.divergence(kind={a['kind']}, k=64)",), writes=("loss.penalties",))
    def imitate_a_little(kind="jsd"):
        def apply(loss, batch):
            return loss.penalize("imitate", loss.divergence)

        return apply

    (need,) = jrl.needs(imitate_a_little())
    assert (need.field, need.arguments) == ("divergence", {"kind": "jsd", "k": "64"})


def test_nested_chains_are_flat(batch):
    head = jrl.chain(jrl.group_advantage(), jrl.normalize_by_sequence())
    nested = jrl.chain(jrl.chain(head), jrl.chain(jrl.token_ratio()), jrl.clip_surrogate())
    assert repr(nested) == repr(jrl.grpo())
    value, _ = jrl.transforms.loss(nested, current(batch).logprob, batch)
    np.testing.assert_array_equal(value, jrl.transforms.loss(jrl.grpo(), current(batch).logprob, batch)[0])


def test_rebuild():
    changed = jrl.rebuild(jrl.grpo(), {"clip_surrogate.high": 0.28, "token_ratio.anchor": "proximal"})
    assert repr(changed) == repr(jrl.grpo(clip_high=0.28, anchor="proximal"))
    text = error(lambda: jrl.rebuild(jrl.grpo(), {"clip_surrogate.hihg": 0.28}))
    assert "Did you mean clip_surrogate.high?" in text and "Known: group_advantage.scale" in text
    assert "low" in error(lambda: jrl.rebuild(jrl.grpo(), {"clip_surrogate.low": -1.0}))


def test_rebuild_keeps_names():
    objective = jrl.chain(
        jrl.normalize_by_token(), jrl.penalize_kl(0.1), jrl.penalize_kl(0.2, estimator="k2", name="second")
    )
    changed = jrl.rebuild(objective, {"second.coef": 0.5})
    assert [info.arguments["coef"] for info in list(changed.info)[1:]] == [0.1, 0.5]
    assert [info.name for info in changed.info] == ["normalize_by_token", "penalize_kl", "second"]


# ---------------------------------------------------------------------------------------------- state


def counting(forget=None):
    @jrl.stage(writes=("loss.weight",))
    def counter(start: int = 0):
        """Counts its clocks; the weight is the number of updates."""
        return Parts(
            init=lambda: {"prepared": jnp.int32(start), "updates": jnp.int32(start)},
            prepare=lambda batch, state: (batch, {**state, "prepared": state["prepared"] + 1}),
            apply=lambda loss, batch, state: loss.scale_weight(1.0 * state["updates"]),
            update=lambda state, metrics: {**state, "updates": state["updates"] + 1},
        )

    return counter


def test_state_is_keyed_by_name_and_moves_by_its_clocks(batch, forget):
    counter = counting()
    objective = jrl.chain(counter(), counter(start=5, name="other"), jrl.reinforce())
    state = objective.init()
    assert set(state) == {"counter", "other"}  # stateless stages have none
    batch, state = objective.prepare(batch, state)
    state = objective.update(state, {})
    state = objective.update(state, {})
    assert {k: (int(v["prepared"]), int(v["updates"])) for k, v in state.items()} == {
        "counter": (1, 2),
        "other": (6, 7),
    }
    weighted = jrl.evaluate(objective, current(batch), batch, state)
    plain = jrl.evaluate(jrl.reinforce(), current(batch), batch)
    np.testing.assert_allclose(weighted.loss_sum, 14 * plain.loss_sum, rtol=1e-5)


def test_a_new_stage_does_not_break_an_old_state(batch, forget):
    counter = counting()
    old = jrl.chain(counter(), jrl.reinforce()).init()
    new = jrl.chain(counter(), counter(start=3, name="other"), jrl.reinforce())
    _, state = new.prepare(batch, old)
    assert int(state["other"]["prepared"]) == 4


def test_scheduled_follows_the_updates(batch):
    objective = jrl.chain(
        jrl.normalize_by_token(), jrl.scheduled(jrl.reward_entropy, coef=lambda n: 0.5 * 0.5**n)
    )
    state = objective.init()
    prepared, state = objective.prepare(batch, state)
    values = []
    for _ in range(3):
        result = jrl.evaluate(objective, current(batch), prepared, state)
        values.append(float(result.loss_sum))
        state = objective.update(state, result.metrics)
    np.testing.assert_allclose(np.array(values) / values[0], [1, 0.5, 0.25], rtol=1e-6)
    assert "loss.entropy" in jrl.needs(objective)
    constant = jrl.rebuild(objective, {"reward_entropy.coef": 0.25})
    assert constant.init() == {}
    assert "schedule" in error(lambda: jrl.scheduled(jrl.reward_entropy, coef=0.1))
    assert "one stage" in error(lambda: jrl.masked(jrl.grpo(), lambda batch: batch.mask))


def test_masked_acts_where_it_should(batch):
    def early(batch):
        return batch.positions < 5

    whole = jrl.chain(jrl.normalize_by_token(), jrl.reward_entropy(1.0))
    part = jrl.chain(jrl.normalize_by_token(), jrl.masked(jrl.reward_entropy(1.0), early))
    prepared, _ = whole.prepare(batch, whole.init())
    gradient = {}
    for name, objective in (("whole", whole), ("part", part)):

        def value(entropy, objective=objective):
            output = jrl.PolicyOutput(logprob=jnp.zeros(batch.shape), entropy=entropy)
            return jrl.evaluate(objective, output, prepared).loss_sum

        gradient[name] = np.asarray(jax.grad(value)(jnp.ones(batch.shape)))
    on = np.asarray(early(batch))
    np.testing.assert_array_equal(gradient["part"], np.where(on, gradient["whole"], 0))
    assert np.any(gradient["part"] != 0)

    weights = jrl.chain(jrl.masked(jrl.truncate_importance(1.01), early), jrl.normalize_by_token())
    prepared, _ = weights.prepare(batch, None)
    outside = np.asarray(batch.mask & ~early(batch))
    assert np.all(np.asarray(prepared.weight)[outside] == 1) and np.any(prepared.weight != 1)


# -------------------------------------------------------------------------------------------- versions


def test_unknown_versions_are_an_error_where_they_can_be_seen(batch):
    unknown = batch.replace(version=jnp.where(batch.positions == 4, -1, batch.version))
    objective = jrl.chain(
        jrl.given_advantage(), jrl.drop_stale(max_age=9), jrl.normalize_by_token(), jrl.reinforce_surrogate()
    )
    text = error(lambda: objective.prepare(unknown, None))
    number = int(np.sum((unknown.version < 0) & unknown.mask))
    assert "drop_stale" in text and f"{number} trained tokens" in text and "version=" in text
    weight = jax.jit(lambda batch: objective.prepare(batch)[0].weight)(unknown)
    dropped = np.asarray((weight == 0) & unknown.mask)  # too old under jit, not silently fresh
    np.testing.assert_array_equal(dropped, np.asarray((unknown.version < 0) & unknown.mask))


@pytest.mark.parametrize("renormalize", [False, True])
def test_drop_stale_by_the_age_of_each_token(batch, renormalize):
    stages = [jrl.given_advantage(), jrl.normalize_by_token(), jrl.reinforce_surrogate()]
    objective = jrl.chain(stages[0], jrl.drop_stale(max_age=1, renormalize=renormalize), *stages[1:])
    batch = batch.replace(advantage=jnp.ones(batch.shape))
    value, metrics = jrl.transforms.loss(objective, jnp.full(batch.shape, -1.0), batch)
    trained = np.asarray(batch.mask)
    age = (np.asarray(batch.learner_version) - np.asarray(batch.version))[trained]
    assert 0 < np.mean(age > 1) < 1
    np.testing.assert_allclose(value, 1.0 if renormalize else np.mean(age <= 1), rtol=1e-9)
    if not renormalize:  # metrics are over the tokens that count
        np.testing.assert_allclose(metrics["age"].value, np.mean(age), rtol=1e-9)
    np.testing.assert_allclose(metrics["stale"].value, np.mean(age > 1), rtol=1e-9)


@pytest.mark.parametrize(
    "stages",
    [
        (jrl.sequence_ratio(), jrl.clip_surrogate()),
        (jrl.sequence_ratio_per_token(), jrl.clip_surrogate()),
        (jrl.token_ratio(), jrl.geometric_surrogate()),
        (jrl.token_ratio(), jrl.vespo_surrogate()),
        (jrl.token_ratio(), jrl.clip_surrogate()),
    ],
    ids=lambda stages: "+".join(stage.info.name for stage in stages),
)
def test_tokens_that_a_stage_drops_from_the_batch_are_in_no_ratio_of_their_sequence(stages):
    """Two stale tokens at the beginning of each answer: as if they had never been trained ones."""
    random = np.random.default_rng(0)
    behavior = random.normal(-1.0, 0.3, (4, 8)).astype(np.float32)
    logprob = jnp.asarray(behavior + random.normal(0.0, 0.05, (4, 8)), jnp.float32)
    columns = np.broadcast_to(np.arange(8), (4, 8))
    given = {
        "tokens": np.ones((4, 8), np.int32),
        "group": [0, 0, 1, 1],
        "reward": [1.0, 0.0, 0.0, 1.0],
        "logprob_behavior": behavior,
        "version": np.where(columns < 4, 3, 5),
        "learner_version": 5,
    }

    def of(*begin, trained):
        objective = jrl.chain(jrl.group_advantage(), *begin, jrl.normalize_by_sequence(), *stages)
        batch = jrl.TokenBatch.from_rows(mask=columns >= trained, **given)
        return jax.value_and_grad(lambda x: jrl.loss(objective, x, batch)[0])(logprob)

    value, gradient = of(jrl.drop_stale(0, renormalize=True), trained=2)
    expected, expected_gradient = of(trained=4)
    assert not gradient[:, :4].any() and gradient[:, 4:].any()
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


_CLIPPED = (jrl.token_ratio(), jrl.clip_surrogate())


@pytest.mark.parametrize(
    "stages",
    [
        (jrl.drop_stale(1), jrl.normalize_by_token(), *_CLIPPED),
        (jrl.decay_stale(0.5), jrl.normalize_by_token(), *_CLIPPED),
        (jrl.normalize_by_token(), jrl.token_ratio(), jrl.lag_clip_surrogate()),
        (jrl.normalize_by_token(), jrl.approximate_proximal(), jrl.clip_surrogate()),
    ],
    ids=("drop_stale", "decay_stale", "lag_clip_surrogate", "approximate_proximal"),
)
def test_ages_need_the_version_of_the_learner(stages):
    """Left at its default, 0, nothing would ever be stale."""
    mask = np.ones((2, 3), bool)
    given = {"reward": [0.0, 1.0], "group": [0, 0], "logprob_behavior": np.zeros((2, 3)), "version": 3}
    objective = jrl.chain(jrl.group_advantage(), *stages)
    with pytest.raises(
        ValueError, match=r"learner_version 0 and tokens .* from version 3.*Pass learner_version="
    ):
        jrl.loss(objective, jnp.zeros((2, 3)), jrl.TokenBatch.from_rows(np.ones((2, 3), int), mask, **given))
    unknown = given | {"version": -1}
    with pytest.raises(ValueError, match=r"-1 \(unknown\) on 4 trained tokens"):
        jrl.loss(
            objective, jnp.zeros((2, 3)), jrl.TokenBatch.from_rows(np.ones((2, 3), int), mask, **unknown)
        )
    given["learner_version"] = 3
    jrl.loss(objective, jnp.zeros((2, 3)), jrl.TokenBatch.from_rows(np.ones((2, 3), int), mask, **given))
