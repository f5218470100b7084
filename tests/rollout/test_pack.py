"""Trajectories become rows: masks from lengths, ids, padding, several sequences in a row."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm import recipes
from jaxrl_llm.models.attention import visible_tokens
from jaxrl_llm.models.config import TINY
from jaxrl_llm.ops.logprobs import policy_output
from jaxrl_llm.rollout.pack import first_fit, pack
from jaxrl_llm.transforms.evaluate import evaluate
from jaxrl_llm.types import Prompt, StopReason, TokenBatch, Trajectory


def make(prompt, completion, *, group=0, reward: float | None = 1.0, **more):
    P, N = len(prompt), len(completion)
    mask = np.arange(P + N) >= P
    values = {
        "prompt": Prompt(uid=f"g{group}", tokens=np.array(prompt, np.int32)),
        "group": group,
        "tokens": np.array([*prompt, *completion], np.int32),
        "mask": mask,
        "logprob": np.where(mask, -1.0 - np.arange(P + N), 0.0).astype(np.float32),
        "version": np.where(mask, 4, -1).astype(np.int32),
        "kv_version": np.where(mask, 3, -1).astype(np.int32),
        "reward": reward,
    }
    return Trajectory(**{**values, **more})


def host(batch):
    return jax.tree.map(np.asarray, batch)


def test_t01_masks_come_from_lengths_not_from_values():
    """pad = eos = 2: the sampled end token is trained exactly once, padding never, and the 2 in the prompt is text."""
    trajectories = [make([5, 2, 6], [7, 8, 2]), make([5, 2, 6], [7, 2])]
    batch = host(pack(trajectories, learner_version=5, pad_to_multiple=8, pad_id=2))
    assert batch.tokens.tolist() == [[5, 2, 6, 7, 8, 2, 2, 2], [5, 2, 6, 7, 2, 2, 2, 2]]
    assert batch.mask[:, 3:].astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert not batch.mask[:, :3].any()
    assert batch.segments.tolist() == [
        [1] * 6 + [0] * 2,
        [1] * 5 + [0] * 3,
    ]  # the whole prompt is attended to
    assert np.flatnonzero(batch.reward[0]).tolist() == [5] and np.flatnonzero(batch.reward[1]).tolist() == [4]


def test_every_field_of_a_padded_row():
    t = make([5, 6], [7, 8], group=9, reward=0.5, stop=StopReason.LENGTH, temperature=0.8)
    batch = host(pack([t], learner_version=5, pad_to_multiple=3, rows_multiple=2, pad_id=1))
    assert batch.shape == (2, 6)
    first = jax.tree.map(lambda x: x[0].tolist() if x.ndim else x, batch)
    assert first.tokens == [5, 6, 7, 8, 1, 1]
    assert first.positions[:4] == [0, 1, 2, 3]
    assert first.trajectory[:4] == first.sequence[:4] == first.group[:4] == [0] * 4
    assert first.version == [-1, -1, 4, 4, -1, -1] and first.kv_version == [-1, -1, 3, 3, -1, -1]
    assert first.mask == [False, False, True, True, False, False]
    assert first.reward == [0, 0, 0, 0.5, 0, 0] and first.reward_valid[:4] == [True] * 4
    assert first.truncated[:4] == [True] * 4
    assert first.temperature == pytest.approx([0.8] * 4 + [1] * 2)
    assert first.logprob_behavior == [0, 0, -3, -4, 0, 0]
    assert int(batch.learner_version) == 5 and batch.rewards is None
    assert not batch.mask[1].any() and not batch.segments[1].any() and (batch.temperature[1] == 1).all()
    assert not set(batch.trajectory[1]) & set(batch.trajectory[0, :4]) and not batch.reward_valid[1].any()
    for field in dataclasses.fields(TokenBatch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray) and value.ndim:
            assert value.shape == (2, 6) and value.dtype in (np.int32, np.bool_, np.float32), field.name


def test_rows_agree_with_from_rows():
    trajectories = [make([5, 6], [7, 8, 9]), make([5], [7], group=1, reward=0.0)]
    ours = host(pack(trajectories, learner_version=2, pad_to_multiple=5))
    rows = TokenBatch.from_rows(
        ours.tokens,
        ours.mask,
        group=[0, 1],
        reward=[1.0, 0.0],
        logprob_behavior=ours.logprob_behavior,
        version=ours.version,
        kv_version=ours.kv_version,
        learner_version=2,
    )
    for name in ("tokens", "mask", "reward", "segments", "temperature", "logprob_behavior", "version"):
        np.testing.assert_array_equal(getattr(ours, name), np.asarray(getattr(rows, name)), err_msg=name)
    inside = ours.segments > 0
    for name in ("positions", "sequence", "trajectory", "group", "reward_valid", "truncated"):
        np.testing.assert_array_equal(
            getattr(ours, name)[inside], np.asarray(getattr(rows, name))[inside], err_msg=name
        )


def test_no_signal_is_not_a_zero():
    trajectories = [
        make([5], [7], reward=None, reason="timeout"),
        make([5], [7], reward=0.0),
        make([5], [], reward=1.0),
    ]
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=1))
    assert batch.reward_valid[:, 0].tolist() == [False, True, False]  # the last has no token to put it on
    assert batch.mask.sum(axis=1).tolist() == [1, 1, 0] and not batch.reward.any()


def test_the_first_token_of_a_sequence_is_never_trained():
    batch = host(pack([make([], [7, 8])], learner_version=0, pad_to_multiple=1))
    assert batch.mask.tolist() == [[False, True]] and batch.logprob_behavior[0, 0] == 0
    assert batch.version.tolist() == [[4, 4]]  # it was sampled, all the same


def test_groups_are_renumbered():
    trajectories = [make([5], [7], group=g) for g in (7, 3, 7, 1)]
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=1))
    assert batch.group[:, 0].tolist() == [0, 1, 0, 2] and batch.trajectory[:, 0].tolist() == [0, 1, 2, 3]


def test_parts_travel_as_streams():
    trajectories = [make([5], [7, 8], rewards={"format": 0.5, "x": 1.0}), make([5], [7], reward=None)]
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=1, parts=("format",)))
    assert set(batch.rewards) == {"format"}
    assert batch.rewards["format"].tolist() == [[0, 0, 0.5], [0, 0, 0]]
    with pytest.raises(ValueError, match="no reward part 'y'; it has format, x"):
        pack(trajectories, learner_version=0, parts=("y",))


def test_a_part_that_could_not_be_computed_is_no_zero():
    trajectories = [make([5], [7], rewards={"x": None}), make([5], [7], reward=0.5, rewards={"x": 2.0})]
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=1, parts=("reward", "x")))
    assert batch.reward_valid.all()
    assert batch.rewards["reward"][:, 1].tolist() == [1.0, 0.5]
    assert np.isnan(batch.rewards["x"][0, 1]) and batch.rewards["x"][1].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("row_tokens", [None, 9])
def test_fields_on_request_sit_on_their_trajectory(row_tokens):
    def listed(n, start):
        ids = np.arange(3 + n)[:, None] * 10 + np.array([start, start + 1])
        return {"top_ids": ids.astype(np.int32), "top_logprob": -ids.astype(np.float32)}

    a = make([5, 6, 7], [8, 9], agent=1, baseline=0.25, **listed(2, 0))
    b = make([5, 6, 7], [10], agent=0, baseline=None, **listed(1, 5))
    fill = ("agent", "baseline_reward", "topk_logprob_behavior")
    batch = host(pack([a, b], learner_version=0, pad_to_multiple=1, row_tokens=row_tokens, fill=fill))
    of_a, of_b = (batch.mask & (batch.trajectory == i) for i in range(2))
    assert batch.agent[of_a].tolist() == [1, 1] and batch.agent[of_b].tolist() == [0]
    assert batch.baseline_reward[of_a].tolist() == [0.25] * 2 and np.isnan(batch.baseline_reward[of_b]).all()
    assert batch.topk_ids[of_a].tolist() == [[30, 31], [40, 41]] and batch.topk_ids[of_b].tolist() == [
        [35, 36]
    ]
    assert (batch.topk_logprob_behavior[batch.mask] == -batch.topk_ids[batch.mask]).all()
    assert not batch.topk_ids[~batch.mask].any() and not batch.topk_logprob_behavior[~batch.mask].any()
    plain = pack([a, b], learner_version=0)
    assert plain.agent is plain.baseline_reward is plain.topk_ids is plain.topk_logprob_behavior is None


def test_lists_that_are_missing_and_unknown_fields_are_refused():
    lists = {"top_ids": np.zeros((2, 3), np.int32), "top_logprob": np.zeros((2, 3), np.float32)}
    good = make([5], [7], **lists)
    short = make([5], [7], **{name: x[:, :2] for name, x in lists.items()})
    for bad, message in (
        (make([5], [7]), "trajectory 1 .* no lists"),
        (make([5, 6], [7], **lists), "not one for each"),
        (short, r"hold \[2, 3\] tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([good, bad], learner_version=0, fill=("topk_logprob_behavior",))
    with pytest.raises(ValueError, match="cannot fill value; on request: agent, baseline_reward"):
        pack([good], learner_version=0, fill=("value",))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logprob": np.array([0, -np.inf], np.float32)}, "not finite"),
        ({"logprob": np.zeros(3, np.float32)}, "3 entries for 2 tokens"),
        ({"tokens": np.zeros(0, np.int32)}, "no tokens"),
    ],
)
def test_bad_trajectories_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pack([make([5], [7]), dataclasses.replace(make([5], [7]), **change)], learner_version=0)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        pack([], learner_version=0)
    with pytest.raises(ValueError, match="pad_to_multiple"):
        pack([make([5], [7])], learner_version=0, pad_to_multiple=0)
    with pytest.raises(ValueError, match="row_tokens=3"):
        pack([make([5, 6], [7, 8])], learner_version=0, row_tokens=3)


def test_first_fit():
    assert first_fit([5, 4, 3, 3, 1], 8) == [[0, 2], [1, 3, 4]]
    assert first_fit([8, 8], 8) == [[0], [1]]
    assert first_fit([], 8) == []


def ragged():
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (2, 1), (6, 2), (1, 7), (4, 4), (2, 3)]
    return [
        make(
            rng.integers(3, 120, p).tolist(),
            rng.integers(3, 120, n).tolist(),
            group=i // 2,
            reward=float(i % 3),
        )
        for i, (p, n) in enumerate(shapes)
    ]


def test_packed_rows_hold_every_trajectory_once():
    trajectories = ragged()
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=4, row_tokens=16))
    assert batch.shape == (3, 16)
    for index, t in enumerate(trajectories):
        at = (batch.trajectory == index) & (batch.segments > 0)
        assert batch.tokens[at].tolist() == t.tokens.tolist()
        assert batch.positions[at].tolist() == list(range(len(t.tokens)))
        assert batch.mask[at].tolist() == [bool(m) and i > 0 for i, m in enumerate(t.mask)]
        assert batch.logprob_behavior[at].tolist() == t.logprob.tolist()
        assert batch.reward[at].sum() == t.reward and batch.reward[at][-1] == t.reward
        assert set(batch.group[at]) == {t.group} and set(batch.sequence[at]) == {index}
        rows, columns = np.nonzero(at)
        assert len(set(rows)) == 1 and (np.diff(columns) == 1).all()
        assert len(set(batch.segments[at])) == 1
    assert (batch.segments > 0).sum() == sum(len(t.tokens) for t in trajectories)
    for row in batch.segments:
        inside = row[row > 0]
        assert (np.diff(inside) >= 0).all() and set(inside) == set(range(1, inside.max() + 1))
    padding = batch.segments == 0
    assert not batch.mask[padding].any() and set(batch.trajectory[padding]).isdisjoint(
        range(len(trajectories))
    )


def test_t08_packed_and_padded_rows_give_the_same_log_probs(tiny_params):
    trajectories = ragged()
    logprobs = []
    for row_tokens in (None, 24):
        batch = pack(trajectories, learner_version=0, pad_to_multiple=24, row_tokens=row_tokens)
        lp = np.asarray(policy_output(tiny_params, TINY, batch).logprob)
        host_batch = host(batch)
        logprobs.append(
            [lp[(host_batch.trajectory == i) & host_batch.mask] for i in range(len(trajectories))]
        )
    for padded, packed in zip(*logprobs, strict=True):
        np.testing.assert_allclose(padded, packed, atol=1e-5)
        assert len(padded) and (padded < 0).all()


# ------------------------------------------------------------------------------ prompts that are shared


def grouped(prefix=(4, 9, 5, 6), seed=0):
    """Two groups of three with their own prompt, completions of 1 to 4 tokens; one group of one."""
    rng = np.random.default_rng(seed)
    out = []
    for group, prompt in enumerate((prefix, (7, 7, 8), (3, 3))):
        for i in range(3 if group < 2 else 1):
            completion = rng.integers(10, 120, 1 + int(rng.integers(4))).tolist()
            out.append(make(list(prompt), completion, group=group, reward=float(i == 0)))
    return out


def test_the_prompt_of_a_group_is_laid_out_once():
    a = make([5, 6, 7], [8, 9], reward=1.0)
    b = make([5, 6, 7], [10], reward=0.0)
    batch = host(pack([a, b], learner_version=0, pad_to_multiple=1, row_tokens=9))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 7, 10, 0, 0]]
    assert batch.segments.tolist() == [[-1, -1, 1, 1, 1, 2, 2, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 0]]
    assert batch.mask[0].astype(int).tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0]
    assert batch.trajectory[0, 2:7].tolist() == [0, 0, 0, 1, 1]
    assert not {0, 1} & set(batch.trajectory[0, [0, 1, 7, 8]])
    assert batch.logprob_behavior[0].tolist() == [0, 0, 0, -4, -5, 0, -4, 0, 0]
    assert batch.reward[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_sequences_begin_at_even_columns_when_asked():
    trajectories = grouped()
    batch = host(pack(trajectories, learner_version=0, row_tokens=13, pad_to_multiple=1, start_multiple=2))
    assert batch.shape[1] == 14
    shared = (batch.segments < 0).sum(axis=1)
    assert shared.sum() == 2 + 2 and (batch.mask.sum() == sum(t.mask.sum() for t in trajectories))
    for index, t in enumerate(trajectories):
        row, columns = np.nonzero((batch.trajectory == index) & (batch.segments > 0))
        first = batch.positions[row[0], columns[0]]
        assert len(set(row)) == 1 and columns[0] % 2 == first % 2 == 0
        own = len(t.tokens) - first
        assert len(columns) - own in (0, 1)  # a token more, of which nothing is computed
        assert batch.tokens[row[0], columns[:own]].tolist() == t.tokens[first:].tolist()
        assert batch.positions[row[0], columns].tolist() == list(range(first, first + len(columns)))
        assert batch.mask[row[0], columns].sum() == t.mask.sum()
        assert not batch.mask[row[0], columns[own:]].any() and not batch.reward[row[0], columns[own:]].any()
    with pytest.raises(ValueError, match="start_multiple"):
        pack(trajectories, learner_version=0, start_multiple=0)


def test_a_prompt_of_its_own_comes_before_the_families_of_its_row():
    batch = host(pack(grouped(), learner_version=0, row_tokens=64))
    assert batch.shape == (1, 64)
    segments = batch.segments[0]
    alone = np.flatnonzero(batch.trajectory[0] == 6)
    assert alone[0] == 0 and (segments[alone] == 1).all()
    assert {int(s) for s in segments if s < 0} == {-2, -3}


def test_only_what_every_member_conditions_on_is_shared():
    same = dict(group=0)
    # A trained token among the common ones, prompts that differ at once, members that are prompt only.
    middle = np.array([False, False, True, False, True])
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    turns = [make([5, 6, 7, 8], [9], **same, mask=middle) for _ in range(2)]
    assert all((t.tokens == tokens).all() for t in turns)
    shared = host(pack(turns, learner_version=0, pad_to_multiple=1, row_tokens=20))
    assert (shared.segments < 0).sum() == 1  # token 2 is trained: token 1 predicts it, token 0 is shared
    different = [make([5, 6], [7], **same), make([6, 5], [7], **same)]
    assert not (host(pack(different, learner_version=0, row_tokens=20)).segments < 0).any()
    short = [make([5], [7], **same), make([5], [8], **same)]
    assert not (host(pack(short, learner_version=0, row_tokens=20)).segments < 0).any()
    bare = [make([5, 6, 7], [], **same), make([5, 6, 7], [8], **same)]
    batch = host(pack(bare, learner_version=0, pad_to_multiple=1, row_tokens=20))
    assert (batch.segments < 0).sum() == 2 and batch.mask.sum() == 1


def test_a_group_that_does_not_fit_a_row_repeats_its_prompt():
    trajectories = [make([5, 6, 7, 8], [9 + i, 20 + i], reward=1.0) for i in range(5)]
    batch = host(pack(trajectories, learner_version=0, pad_to_multiple=1, row_tokens=9))
    assert batch.shape == (3, 9) and (batch.segments < 0).sum(axis=1).tolist() == [3, 3, 0]
    assert batch.mask.sum() == 10 and sorted(set(batch.trajectory[batch.mask])) == [0, 1, 2, 3, 4]


def test_who_sees_whom_in_a_tree():
    segments = np.array([[1, -1, -1, 2, 2, 3, -2, 4, 0, 5]])
    seen = [set(np.flatnonzero(row)) for row in np.asarray(visible_tokens(segments))[0]]
    assert seen == [{0}, {1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 5}, {6}, {6, 7}, {8}, {9}]


def test_rows_side_by_side_are_as_much_work():
    """Eight rows a micro-batch, a device each: the busiest of each micro-batch, summed, is near the mean."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(3.0, 1.0, 400)), 1, 200).astype(int)
    trajectories = [make([5] * (2 + i // 4 % 30), [7] * n, group=i // 4) for i, n in enumerate(lengths)]
    segments = host(pack(trajectories, learner_version=0, row_tokens=256)).segments
    pairs = np.array([np.asarray(visible_tokens(row[None]))[0][row != 0].sum() for row in segments])

    def busiest(rows):
        rows = rows[: len(rows) // 8 * 8].reshape(-1, 8)
        return rows.max(1).sum() / rows.mean(1).sum()

    shuffled = np.mean([busiest(rng.permutation(pairs)) for _ in range(100)])
    assert busiest(pairs) - 1 < (shuffled - 1) / 3


WIDTHS = [14, pytest.param(24, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]


@pytest.mark.parametrize("row_tokens", WIDTHS)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("dr_grpo", marks=pytest.mark.slow),
        pytest.param("dapo", marks=pytest.mark.slow),
        "gspo",
        pytest.param("rloo", marks=pytest.mark.slow),
    ],
)
def test_shared_prompts_change_no_gradient(tiny_params, recipe, row_tokens):
    """One row a completion, and trees of any width: the same loss, metrics and gradients."""
    config = dataclasses.replace(TINY, dtype="float32")
    objective = recipes.dr_grpo(limit=4) if recipe == "dr_grpo" else getattr(recipes, recipe)()
    results = []
    for rows in (None, row_tokens):
        batch = pack(grouped(), learner_version=5, pad_to_multiple=8, row_tokens=rows, rows_multiple=2)
        batch = dataclasses.replace(
            batch, logprob_behavior=np.where(batch.mask, -4.5, 0.0).astype(np.float32)
        )
        batch, state = objective.prepare(batch, objective.init())

        def loss(params, batch=batch, state=state):
            output = policy_output(params, config, batch, entropy="detached")
            result = evaluate(objective, output, batch, state)
            return result.loss_sum / result.denominator, result.metrics

        results.append(jax.value_and_grad(loss, has_aux=True)(tiny_params))
    ((ours, metrics), grads), ((tree, tree_metrics), tree_grads) = results
    np.testing.assert_allclose(ours, tree, rtol=1e-5, atol=1e-6)
    assert max(float(abs(g).max()) for g in jax.tree.leaves(grads)) > 1e-3
    for g, h in zip(jax.tree.leaves(grads), jax.tree.leaves(tree_grads), strict=True):
        np.testing.assert_allclose(g, h, atol=2e-6)
    assert metrics.keys() == tree_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value.value, tree_metrics[name].value, atol=1e-5, err_msg=name)


def test_supports_come_along_in_padded_and_in_packed_rows():
    """Lists of different lengths, a prompt that is shared, and a trajectory that was drawn from the vocabulary."""

    def supported(completion, lists, **more):
        ids = np.full((2 + len(completion), len(lists[0])), -1, np.int32)
        ids[2:] = lists
        return make([5, 6], completion, support_ids=ids, **more)

    a = supported([7, 8], [[9, 7, -1], [8, -1, -1]])
    b = supported([9, 7], [[9, 3], [1, 7]])
    c = make([5, 6], [4], group=1)
    for row_tokens in (None, 16):
        batch = host(pack([a, b, c], learner_version=5, pad_to_multiple=4, row_tokens=row_tokens))
        assert batch.support_ids.shape == (*batch.shape, 3) and batch.support_ids.dtype == np.int32
        at = [np.flatnonzero((batch.trajectory == i).ravel() & batch.mask.ravel()) for i in range(3)]
        ids = batch.support_ids.reshape(-1, 3)
        assert ids[at[0]].tolist() == [[9, 7, -1], [8, -1, -1]]
        assert ids[at[1]].tolist() == [[9, 3, -1], [1, 7, -1]] and ids[at[2]].tolist() == [[-1, -1, -1]]
        assert (batch.support_ids[~batch.mask] == -1).all()
    assert pack([c], learner_version=5).support_ids is None


def test_a_support_outside_the_vocabulary_is_refused_where_that_is_known():
    t = make([5, 6], [7, 8], support_ids=np.array([[-1, -1], [-1, -1], [7, 90], [8, -1]], np.int32))
    assert pack([t], learner_version=5, vocab_size=91).support_ids is not None
    with pytest.raises(ValueError, match="hold 90, and the vocabulary of the model ends at 63"):
        pack([t], learner_version=5, vocab_size=64)


@pytest.mark.parametrize(
    ("support", "message"),
    [
        ([[-1, -1], [-1, -1], [7, 1]], r"shape \(3, 2\) for 4 tokens"),
        ([[-1, -1], [-1, -1], [7, 1], [1, 2]], "token 3 is not among its support_ids"),
        (
            [[-1, -1], [-1, -1], [-3, -1], [-2 - 2**30 - 8, -1]],
            "token 3 is not among its support_ids",
        ),  # all from 8
    ],
)
def test_a_support_without_its_token_is_refused(support, message):
    t = make([5, 6], [7, 8], support_ids=np.array(support, np.int32))
    with pytest.raises(ValueError, match=message):
        pack([make([5, 6], [7, 8]), t], learner_version=5)
