"""Training on given answers, on the tiny model: every loss learns its data, runs stop and go on, bad input is refused."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.data.sft import answered, read_sft, trajectory_of
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.fine_tune import RowSource, SupervisedRun, sft
from jaxrl_llm.inference import evaluate_config, export, sample_config
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.train import train

PAIR_LOSSES = ("dpo", "cdpo", "robust_dpo", "ipo", "hinge", "kto", "orpo", "simpo", "reward_model")


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{"answers": file, "pairs": file}: a prompt is answered with its first letter doubled, not with another's."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    answers, pairs = [], []
    for number in range(60):
        first, other = (chr(97 + i) for i in rng.choice(4, 2, replace=False))
        prompt = f"{first}{number % 10}"
        answers.append({"prompt": prompt, "answer": first * 2, "reward": float(number % 2)})
        pairs.append({"prompt": prompt, "chosen": first * 2, "rejected": other * (1 + number % 3)})
    return {
        "answers": write(folder / "answers.jsonl", answers),
        "pairs": write(folder / "pairs.jsonl", pairs),
    }


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "given.yaml"
    path.write_text(
        "steps: 4\nmodel: {source: tiny, max_context: 32}\noptimizer: {learning_rate: 3e-3}\n"
        "data: {batch: 8}\nlearner: {micro_batch_rows: 16}\nevaluation: {every: 2, items: 8}\n"
        "snapshots: {every: 2}\n"
    )
    return path


@pytest.fixture
def load(config_file, files):
    def load(objective, *more):
        file = files["answers" if objective == "sft" else "pairs"]
        return load_config(config_file, [f"objective={objective}", f"data.path={file}", *more])

    return load


def figures(folder):
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def steps(config, folder, number):
    """Metrics of the first steps of a run, without evaluation or report."""
    run = SupervisedRun(config, folder, resume=False)
    rows = []
    with run.snapshots:
        for _ in range(number):
            batch, _, _ = run.gather(None)
            rows.append(run.learn(batch)[0])
        return run, rows, run.evaluate() if number > 1 else {}


@pytest.mark.slow
@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_every_preference_loss_falls_and_pair_accuracy_rises(objective, load, tmp_path):
    config = load(objective, "optimizer.learning_rate=1e-2")
    run, rows, held_out = steps(config, tmp_path / "run", 20)
    mean = {
        key: [np.mean([row[key] for row in part]) for part in (rows[:4], rows[-4:])]
        for key in ("policy/loss", "policy/pair_accuracy", "policy/pair_margin")
    }
    assert mean["policy/loss"][1] < mean["policy/loss"][0]
    before, after = mean["policy/pair_accuracy"]
    assert after > 0.8 and after > before + 0.1
    assert mean["policy/pair_margin"][1] > mean["policy/pair_margin"][0]
    assert held_out["eval/pairs/pair_accuracy"] > 0.6 and np.isfinite(held_out["eval/pairs/loss"])
    assert all(row["optimizer/skipped"] == 0 for row in rows)
    if objective == "kto":
        assert all(row["policy/kto_point"] >= 0 for row in rows)
    if objective == "reward_model":
        assert run.state.params["value"].shape == (64,) and np.any(run.state.params["value"] != 0)


@pytest.mark.slow
def test_a_reward_model_is_measured_on_pairs_and_writes_nothing(load, files, tmp_path, capsys):
    config = load("reward_model", "steps=4", "optimizer.learning_rate=1e-2", "snapshots.every=0")
    run = tmp_path / "run"
    assert sft(config, run) == 0
    measured = evaluate_config(config, snapshot=str(run))
    last = figures(run)[-1]
    assert measured == {k: v for k, v in last.items() if k.startswith("eval/") or k == "version"}
    assert measured["version"] == 4 and 0 <= measured["eval/pairs/pair_accuracy"] <= 1
    with pytest.raises(SystemExit) as done:
        main(["eval", "--snapshot", str(run)])
    assert not done.value.code
    shown = capsys.readouterr().out
    assert f"step 4 of {run}\n" in shown
    assert "pairs right" in shown and f"{measured['eval/pairs/pair_accuracy']:.0%}" in shown
    for use in (
        lambda: sample_config(config, snapshot=str(run)),
        lambda: export(str(run), str(tmp_path / "hf")),
    ):
        with pytest.raises(InputError, match="holds a reward model.*jaxrl eval"):
            use()
    assert not (tmp_path / "hf").exists()
    with pytest.raises(InputError, match=r"data.path: give the JSONL file of pairs.*\{prompt, answer\}"):
        evaluate_config(load("reward_model", "data.path=null"), snapshot=str(run))
    few = write(tmp_path / "few.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    with pytest.raises(InputError, match="too few different prompts.*data.eval_path"):
        evaluate_config(load("reward_model", f"data.path={few}"), snapshot=str(run))


@pytest.mark.slow
def test_kto_learns_from_answers_without_a_partner(load, files, tmp_path):
    rows = [json.loads(line) for line in pathlib.Path(files["pairs"]).read_text().splitlines()]
    single = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        for i, row in enumerate(rows)
    ]
    path = write(tmp_path / "single.jsonl", single)
    # Micro-batches of three rows: nothing has to stay together.
    config = load(
        "kto",
        f"data.path={path}",
        "optimizer.learning_rate=1e-2",
        "learner.micro_batch_rows=3",
        "data.batch=9",
    )
    run, rows, held_out = steps(config, tmp_path / "run", 20)
    assert not run.pairs and rows[0]["policy/loss"] == pytest.approx(0.5)
    assert np.mean([row["policy/loss"] for row in rows[-4:]]) < 0.4
    assert rows[-1]["policy/reward_chosen"] > rows[-1]["policy/reward_rejected"] + 1.0
    assert "policy/pair_accuracy" not in rows[-1] and rows[-1]["policy/kto_point"] >= 0
    assert held_out["eval/single/reward_chosen"] > held_out["eval/single/reward_rejected"]
    with pytest.raises(InputError, match="data.min_reward"):
        SupervisedRun(load("kto", f"data.path={path}", "data.min_reward=1.0"), tmp_path / "b", resume=False)
    with pytest.raises(InputError, match="'chosen' is missing"):
        SupervisedRun(load("dpo", f"data.path={path}"), tmp_path / "c", resume=False)


@pytest.mark.slow
def test_a_preference_run_starts_at_the_reference(load, tmp_path):
    _, rows, _ = steps(load("dpo"), tmp_path / "run", 1)
    assert rows[0]["policy/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[0]["policy/pair_margin"] == pytest.approx(0.0, abs=1e-5)


def test_supervised_fine_tuning_lowers_its_loss(load, tmp_path):
    assert (
        sft(load("sft", "steps=20", "optimizer.learning_rate=1e-2", "snapshots.every=0"), tmp_path / "run")
        == 0
    )
    rows = figures(tmp_path / "run")
    assert [row["version"] for row in rows] == list(range(21))
    assert rows[-1]["policy/loss"] < 0.3 * rows[1]["policy/loss"]
    assert rows[-1]["eval/answers/loss"] < 0.3 * rows[0]["eval/answers/loss"]
    assert rows[0]["eval/answers/items"] >= 3
    assert rows[-1]["data/passes"] > 2 and rows[-1]["data/skipped"] == 0
    assert "policy/kl_behavior" not in rows[-1]  # nobody sampled these answers
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_rejection_sampling_keeps_the_rows_with_a_reward(load, tmp_path):
    run = SupervisedRun(load("sft", "data.min_reward=0.5"), tmp_path / "a", resume=False)
    batch, _, _ = run.gather(None)
    rewards = np.asarray(batch.reward.sum(axis=1))[np.asarray(batch.mask.any(axis=1))]
    assert np.all(rewards == 1.0)
    run.snapshots.close()
    with pytest.raises(InputError, match="none of the 60 rows"):
        SupervisedRun(load("sft", "data.min_reward=2.0"), tmp_path / "b", resume=False)
    zero = SupervisedRun(load("sft", "data.min_reward=0.0"), tmp_path / "c", resume=False)
    assert zero.source.state()["identity"]["rows"] + len(zero.held_out) == 60  # a reward of 0 is a reward
    zero.snapshots.close()


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(load, tmp_path, monkeypatch):
    objective = "kto"
    assert sft(load(objective), tmp_path / "whole") == 0
    learn, calls = SupervisedRun.learn, []

    def interrupted(self, batch):
        calls.append(True)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return learn(self, batch)

    monkeypatch.setattr(SupervisedRun, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sft(load(objective), tmp_path / "cut")
    assert sft(load(objective), tmp_path / "cut", resume=True) == 0
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    for name in ("cut", "whole"):
        assert (tmp_path / name / "samples.jsonl").read_bytes() == b""
    trees = []
    for name in ("cut", "whole"):
        with SnapshotStore(tmp_path / name / "snapshots", read_only=True) as store:
            trees.append(store.restore_params()[0])
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_rows(load, files, tmp_path):
    copy = tmp_path / "pairs.jsonl"
    copy.write_text(pathlib.Path(files["pairs"]).read_text())
    config = load("dpo", f"data.path={copy}", "steps=2")
    assert sft(config, tmp_path / "run") == 0
    copy.write_text("\n".join(copy.read_text().splitlines()[:-5]))
    with pytest.raises(InputError, match="not those of the snapshot"):
        sft(config, tmp_path / "run", resume=True, overrides=("steps=3",))


@pytest.mark.parametrize(
    ("objective", "more", "parts"),
    [
        ("dpo", ["learner.micro_batch_rows=15"], ["micro_batch_rows", "even", "15"]),
        ("dpo", ["learner.row_tokens=64"], ["row_tokens"]),
        ("dpo", ["learner.minibatches=3"], ["learner.minibatches", "data.batch; use 1"]),
        ("kto", ["data.batch=1"], ["data.batch", "at least 2", "not 1"]),
        ("dpo", ["data.path=nowhere.jsonl"], ["nowhere.jsonl", "does not exist"]),
        ("dpo", ["data.path=null"], ["data.path", "prompt, chosen, rejected"]),
        ("dpo", ["data.min_reward=1.0"], ["data.min_reward"]),
        ("grpo", [], ["'chosen'", "dpo"]),
        ("dpo", ["model.max_context=512"], ["model.max_context", "512"]),
    ],
)
def test_bad_settings_are_refused(objective, more, parts, load, tmp_path, monkeypatch):
    if "512" not in parts:  # what does not depend on the model is refused before it is loaded
        monkeypatch.setattr("jaxrl_llm.fine_tune.configured_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InputError) as error:
        sft(load(objective, *more), tmp_path / "run")
    assert all(part in str(error.value) for part in parts), error.value
    assert not (tmp_path / "run").exists()


def test_a_run_is_no_model_to_be_taught_by(load, tmp_path):
    (tmp_path / "taught" / "snapshots" / "20").mkdir(parents=True)
    for give, name in ((sft, "sft"), (train, "train")):
        with pytest.raises(InputError, match=r"teacher\.source: .*--set teacher\.snapshot="):
            config = load(
                "sft", "objective=gkd", f"teacher.source={tmp_path / 'taught'}", "learner.minibatches=1"
            )
            give(config, tmp_path / name)


def test_objectives_that_need_a_rollout_are_refused(load, files, tmp_path):
    config = load("sft", "objective=grpo")
    with pytest.raises(InputError, match="logprob_behavior"):
        sft(config, tmp_path / "run")
    with pytest.raises(InputError, match="jaxrl sft"):
        train(load("dpo"), tmp_path / "run")


def test_an_objective_that_compares_samples_of_a_prompt_is_refused(load, files, tmp_path):
    config = load("sft", "objective=[group_advantage, normalize_by_token, reinforce_surrogate]")
    with pytest.raises(InputError, match="advantages compare the samples of one prompt"):
        sft(config, tmp_path / "run")


def test_labels_of_one_kind_are_pointed_out(load, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.fine_tune.configured_model", lambda *_: 1 / 0)
    for labels, kinds in (
        ((True, True), "true.*no bad"),
        ((False, False), "false.*no good"),
        ((True, False), ""),
    ):
        rows = [{"prompt": f"q{i}", "completion": "a", "label": label} for i, label in enumerate(labels)]
        run = SupervisedRun.__new__(SupervisedRun)
        with pytest.raises(ZeroDivisionError):
            run.__init__(
                load("kto", f"data.path={write(tmp_path / 'rows.jsonl', rows)}"),
                tmp_path / "run",
                resume=False,
            )
        assert re.search(kinds, run.notes[0]) if kinds else run.notes == ()
        (tmp_path / "run" / "config.yaml").unlink()


def test_an_answer_without_its_label_is_named(load, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "a"}])
    with pytest.raises(InputError, match="line 1: 'label' is missing"):
        sft(load("kto", f"data.path={path}"), tmp_path / "run")


def test_rows_that_do_not_fit_are_skipped_and_counted(load, tmp_path):
    long = [{"prompt": "x" * 40, "answer": "y"}] * 3
    short = [{"prompt": f"q{i}", "answer": "z"} for i in range(5)]
    mixed = write(tmp_path / "mixed.jsonl", [*long, *short])
    run = SupervisedRun(load("sft", f"data.path={mixed}", "data.batch=5"), tmp_path / "run", resume=False)
    _, _, row = run.gather(None)
    _, _, row = run.gather(None)
    assert row["data/skipped"] >= 1
    run.snapshots.close()
    nothing = write(tmp_path / "long.jsonl", long)
    with pytest.raises(InputError, match="none of its rows fits into 32 tokens"):
        sft(load("sft", f"data.path={nothing}"), tmp_path / "a" / "other")
    assert not (tmp_path / "a").exists()


def test_row_source_visits_every_row_once_a_pass_and_goes_on_anywhere(files):
    rows = read_sft(files["answers"])
    tokenizer = tiny_tokenizer()

    def source():
        def render(row, uid, number):
            return (trajectory_of(answered(row.messages, tokenizer), uid, number),)

        return RowSource(rows, render, seed=3, longest=32, name="answers.jsonl")

    def uids(batch):
        return [trajectory.prompt.uid for (trajectory,) in batch]

    whole = source()
    first, second = uids(whole.next_batch(60)), uids(whole.next_batch(60))
    assert len(set(first)) == 60 and set(first) == set(second) and first != second
    cut = source()
    cut.next_batch(37)
    again = source()
    again.restore(json.loads(json.dumps(cut.state())))
    assert uids(again.next_batch(40)) == (first + second)[37:77]


def test_the_command(config_file, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        main(["sft", str(config_file), "--run", str(tmp_path / "run"), "--set", "objective=dpo"])
    assert done.value.code == 2
    assert "{prompt, completion, label}" in capsys.readouterr().err
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "a"}])
    arguments = ["--set", "objective=dpo", "--set", f"data.path={rows}"]
    with pytest.raises(SystemExit) as done:
        main(["sft", str(config_file), "--run", str(tmp_path / "run"), *arguments])
    assert done.value.code == 2
    assert "line 1: 'chosen' and 'rejected' are the same answer" in capsys.readouterr().err
