"""A teacher in training: what is read of it, what is refused before anything is compiled, and that policies learn from it."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
import jaxrl_llm.train as loop
from jaxrl_llm.assembly import configured_model, configured_teacher
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl, read_metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.fine_tune import sft
from jaxrl_llm.learner.score import TeacherNeeds, fill_logprobs, make_score_teacher, teacher_needs
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.losses.divergences import Divergence
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.objectives import check_teacher
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import param_shardings
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.train import train

TINY_YAML = pathlib.Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = dataclasses.replace(TINY, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
TOPK = "{recipe: opd, over: topk, k: 8}"


def config(objective, *more):
    return load_config(
        TINY_YAML,
        [f"objective={objective}", "evaluation.items=0", "snapshots.every=0", "rollout.prompts=16", *more],
    )


# ------------------------------------------------------------------------------------ what is read


def test_what_objectives_read_of_a_teacher():
    nothing = TeacherNeeds(False, 0, None)
    assert teacher_needs(jrl.grpo(kl_coef=0.1)) == nothing and not nothing
    assert teacher_needs(jrl.opd()) == (True, 0, None)
    assert teacher_needs(jrl.opd(over="topk", k=8)) == (False, 8, None)
    assert teacher_needs(jrl.opd(over="vocabulary")) == (False, 0, Divergence("reverse"))
    for beta, kind in ((0, "forward"), (0.3, "jsd"), (1, "reverse")):
        found = teacher_needs(jrl.gkd(beta)).divergence
        assert found.kind == kind and (kind != "jsd" or found.beta == beta)
    beside = jrl.chain(
        jrl.grpo(), jrl.imitate(0.1, kind="jsd", beta=0.3), jrl.imitate(0.1, over="topk", name="top")
    )
    assert teacher_needs(beside) == (False, 64, Divergence("jsd", 0.3)) and teacher_needs(beside)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([jrl.imitate(), jrl.imitate(kind="reverse", name="two")], "two divergences from the teacher"),
        ([jrl.imitate(over="topk"), jrl.simko_surrogate()], "lists? a token"),
    ],
)
def test_what_one_pass_cannot_give_is_refused(stages, message):
    head = [jrl.group_advantage(), jrl.normalize_by_token(), jrl.token_ratio()]
    with pytest.raises(InputError, match=message):
        check_teacher(jrl.chain(*head, *stages), True)


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        ("opd", (), r"distill_advantage reads batch\.logprob_teacher, and the config has no teacher"),
        ("gkd", (), r"imitate reads loss\.divergence, and the config has no teacher"),
        (TOPK, (), r"imitate reads batch\.topk_logprob_teacher, and the config has no teacher"),
        ("grpo", ("teacher.source=tiny",), "no stage of the objective reads a teacher"),
        ("opd", ("teacher.snapshot=nowhere",), "No snapshot at .*nowhere"),
        ("opd", ("teacher.source=nowhere",), "nowhere"),
        ("{recipe: opd, over: topk, k: 200}", ("teacher.source=tiny",), "between 1 and 128 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    objective, more, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "loop", lambda *_: pytest.fail("the run began"))
    with pytest.raises(InputError, match=message):
        train(config(objective, *more), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_teacher_has_one_source():
    with pytest.raises(InputError, match=r"teacher\.source: .* give one of the two"):
        config("opd", "teacher.source=tiny", "teacher.snapshot=run")


def exported(folder, config=TINY, tokenizer=None):
    return save_hf(config, init_params(config, jax.random.key(1)), tokenizer, folder)


def another_word(folder):
    exported(folder, tokenizer=tiny_tokenizer())
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = [word for word, i in vocabulary.items() if i > 60][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokens))


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (lambda f: exported(f), (), "has no tokenizer"),
        (
            lambda f: exported(f, dataclasses.replace(TINY, vocab_size=144), tiny_tokenizer()),
            (),
            r"a vocabulary of 144 tokens, the policy \(tiny\) one of 128",
        ),
        (another_word, (), r"another tokenizer than the policy \(tiny\): token"),
        (
            lambda f: exported(f, dataclasses.replace(TINY, max_positions=32), tiny_tokenizer()),
            (),
            r"positions for 32 tokens, fewer than model\.max_context 64",
        ),
    ],
)
def test_a_teacher_reads_what_the_policy_writes(make, more, message, tmp_path):
    make(tmp_path / "teacher")
    given = config("opd", f"teacher.source={tmp_path / 'teacher'}", *more)
    with pytest.raises(InputError, match=f"teacher\\.source: .*{message}"):
        configured_teacher(given, configured_model(given, None), None)


def test_a_teacher_may_be_of_another_shape_and_is_kept_in_its_own_dtype(tmp_path):
    exported(tmp_path / "teacher", SMALL, tiny_tokenizer())
    given = config("opd", f"teacher.source={tmp_path / 'teacher'}", "teacher.dtype=bfloat16")
    teacher = configured_teacher(given, configured_model(given, None), None)
    assert (teacher.config.hidden_size, teacher.config.dtype) == (32, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(teacher.params)} == {jnp.bfloat16.dtype}
    assert teacher.digest == load_model(tmp_path / "teacher").digest
    assert configured_teacher(config("grpo"), configured_model(given, None), None) is None


# ----------------------------------------------------------------------------------- what is filled


def batch(rows=5, width=9):
    rng = np.random.default_rng(0)
    return jrl.TokenBatch.from_rows(
        rng.integers(3, TINY.vocab_size, (rows, width)),
        rng.random((rows, width)) < 0.7,
        lengths=np.full(rows, width),
        temperature=np.linspace(0.7, 1.3, rows),
        logprob_behavior=np.full((rows, width), -4.8),
        version=0,
    )


@pytest.fixture(scope="module")
def teacher_params():
    return init_params(SMALL, jax.random.key(3))


@pytest.mark.slow
def test_the_teacher_is_scored_under_the_temperature_of_training(teacher_params):
    rows = batch()
    wanted = TeacherNeeds(True, 4, Divergence("jsd"))
    filled = make_score_teacher(SMALL, wanted, micro_batch_rows=2)(teacher_params, rows)
    expected = token_logprobs(teacher_params, SMALL, rows.tokens, temperature=rows.temperature)
    np.testing.assert_allclose(
        filled.logprob_teacher, jnp.where(rows.mask, expected, 0.0), rtol=1e-5, atol=1e-6
    )
    assert filled.topk_ids.shape == filled.topk_logprob_teacher.shape == (5, 9, 4)
    assert np.all(np.diff(filled.topk_logprob_teacher, axis=-1) <= 0) and filled.hidden_teacher.shape == (
        5,
        9,
        32,
    )
    # What is there is kept: the lists of the batch are scored, and log-probs that were given stay.
    given = rows.replace(topk_ids=filled.topk_ids[..., ::-1], logprob_teacher=rows.logprob_behavior)
    teach = functools.partial(make_score_teacher(SMALL, wanted, micro_batch_rows=2), teacher_params)
    again = fill_logprobs(given, None, None, {"logprob_teacher", "topk_logprob_teacher"}, teach=teach)
    np.testing.assert_allclose(
        again.topk_logprob_teacher, filled.topk_logprob_teacher[..., ::-1], rtol=1e-5, atol=1e-6
    )
    assert again.logprob_teacher is rows.logprob_behavior


def updated(params, objective, teacher_params, mesh=None):
    optimizer = optax.sgd(1.0)
    params = jax.tree.map(jnp.copy, params)
    state = init_state(params, optimizer, objective, key=jax.random.key(0), config=TINY, mesh=mesh)
    if mesh is not None:
        teacher_params = jax.device_put(teacher_params, param_shardings(SMALL, mesh))
    rows = 4 if mesh is not None else 2
    wanted = teacher_needs(objective)
    teach = functools.partial(make_score_teacher(SMALL, wanted, mesh, micro_batch_rows=rows), teacher_params)
    filled = fill_logprobs(batch(), state, None, jrl.transforms.needed_fields(objective), teach=teach)
    ready, _ = make_prepare(objective, mesh)(filled, state.objective_state)
    step = make_update_step(objective, TINY, optimizer, mesh, micro_batch_rows=rows, teacher=SMALL)
    return step(state, ready, teacher_params)


@pytest.mark.slow
def test_an_update_follows_the_gradient_of_the_dense_formula_on_any_mesh(tiny_params, teacher_params):
    """Micro-batches, another width of the teacher, and rows that eight devices do not divide."""
    rows, objective = batch(), jrl.gkd(0.3)

    def dense(params):
        def logprobs(params, config):
            hidden = forward(params, config, rows.tokens, rows.positions, rows.segments)
            logits = jnp.matmul(hidden, head_weight(params, config), precision="highest")
            return jax.nn.log_softmax(logits / rows.temperature[..., None])

        each = Divergence("jsd", 0.3).value(logprobs(params, TINY), logprobs(teacher_params, SMALL))
        mask = rows.mask[:, 1:]
        return jnp.sum(jnp.where(mask, each[:, :-1], 0.0)) / jnp.sum(mask)

    value, gradient = jax.jit(jax.value_and_grad(dense))(tiny_params)
    for mesh in (None, make_mesh(2, 2, 2)):
        state, metrics = updated(tiny_params, objective, teacher_params, mesh)
        assert float(metrics["loss"].value) == pytest.approx(float(value), rel=1e-5)
        assert float(metrics["divergence_teacher"].value) == pytest.approx(float(value), rel=1e-5)
        for before, after, slope in zip(
            *map(jax.tree.leaves, (tiny_params, state.params, gradient)), strict=True
        ):
            np.testing.assert_allclose(
                before - after, slope, atol=2e-5 * float(jnp.max(jnp.abs(slope))) + 1e-7
            )


def test_an_update_without_the_teacher_it_needs_is_refused():
    with pytest.raises(ValueError, match="give the teacher's config as teacher="):
        make_update_step(jrl.gkd(), TINY, optax.sgd(1.0))


# ------------------------------------------------------------------------------------ what is learned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "figure", "share"),
    [
        ("opd", "policy/kl_in_advantage", 0.6),
        ("gkd", "policy/divergence_teacher", 0.1),
        (TOPK, "policy/divergence_teacher", 0.1),
    ],
)
def test_the_policy_becomes_its_teacher(objective, figure, share, tiny_run, tmp_path):
    """The teacher learned the task from rewards; the policy learns it from the teacher, and nobody shows it a reward."""
    given = config(objective, f"teacher.snapshot={tiny_run}", "steps=18")
    assert train(given, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run")
    distance = [row[figure] for row in rows]
    assert np.mean(distance[-3:]) < share * distance[0], distance
    assert np.mean([row["reward/mean"] for row in rows[-3:]]) > rows[0]["reward/mean"] + 0.2


@pytest.mark.slow
def test_a_snapshot_names_its_teacher_and_does_not_hold_it(tiny_run, tmp_path):
    given = config(
        "gkd", f"teacher.snapshot={tiny_run}", "steps=4", "snapshots.every=2", "learner.minibatches=2"
    )
    assert train(given, tmp_path / "whole") == 0
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    with SnapshotStore(half / "snapshots", keep_last=2) as store:
        assert store.discard_after(2) == [4]
        meta = store.meta(2)
    with SnapshotStore(tiny_run / "snapshots", read_only=True) as store:
        assert meta["teacher"] == store.meta()["fingerprint"]
    manifest = half / "snapshots" / "2" / "manifest"
    names = "".join(path.read_text() for path in manifest.rglob("*") if path.is_file())
    assert "params/" in names and "teacher" not in names
    assert train(given, half, resume=True) == 0
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in read_jsonl(path)]
        for path in (half / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    ]
    assert timeless[0] == timeless[1]
    with pytest.raises(InputError, match="this run began with a teacher with the digest"):
        train(given, half, resume=True, overrides=["teacher.snapshot=null", "teacher.source=tiny"])


@pytest.mark.slow
def test_given_answers_are_distilled_too(tiny_run, tmp_path):
    """Over the vocabulary and over lists at once."""
    objective = "[normalize_by_token, {imitate: {}}, {imitate: {over: topk, k: 8, name: listed}}]"
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"{letter}{i}", "answer": "aa"} for letter in "abcdefgh" for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = config(
        objective, f"teacher.snapshot={tiny_run}", f"data.path={path}", "steps=12", "evaluation.items=3"
    )
    assert sft(given, tmp_path / "run") == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for figure in ("policy/divergence_teacher", "eval/answers/divergence_teacher"):
        found = [row[figure] for row in rows if figure in row]
        assert found[-1] < 0.7 * found[0], (figure, found)
    with pytest.raises(InputError, match="no teacher"):
        sft(dataclasses.replace(given, teacher=load_config(TINY_YAML).teacher), tmp_path / "other")
