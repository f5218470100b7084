"""The training loop on the tiny model: it learns, it repeats, it stops and goes on, it survives."""

import concurrent.futures
import dataclasses
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings

import jax
import numpy as np
import pytest
from runs import (
    SHORT,
    TINY_YAML,
    figures,
    in_a_process,
    killed,
    learned_something,
    params,
    run_to_the_end,
    same_run,
)

import jaxrl_llm.train as loop
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import MetricsWriter, read_jsonl, read_metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.inference import load_policy
from jaxrl_llm.models.load import load_model
from jaxrl_llm.rewards.registry import Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout import task as tasks
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.stopping import EXIT_STOPPED, StoppedError, StopRequest
from jaxrl_llm.train import train


def short(*overrides):
    """configs/tiny.yaml, six steps long."""
    return load_config(TINY_YAML, [*SHORT, *overrides])


@pytest.fixture
def start(tmp_path):
    """start(config, name, resume=…) -> (exit code, folder)."""

    def start(config, name="run", **more):
        return train(config, tmp_path / name, **more), tmp_path / name

    return start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted short run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(short(), folder) == 0
    assert learned_something(folder)
    return folder


# ------------------------------------------------------------------------------------ learning


def test_a_tiny_run_learns(tiny_run):
    rows = figures(tiny_run)
    assert [row["version"] for row in rows] == list(range(31))
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5
    for kind in ("greedy", "sampled"):
        before, after = (row[f"eval/vowel/{kind}_accuracy"] for row in (rows[0], rows[-1]))
        assert after > before + 0.5
        assert (
            rows[-1][f"eval/vowel/{kind}_accuracy_low"]
            <= after
            <= rows[-1][f"eval/vowel/{kind}_accuracy_high"]
        )
    assert rows[-1]["policy/entropy"] < rows[1]["policy/entropy"]


def test_metrics_are_where_they_should_be(tiny_run):
    rows = figures(tiny_run)
    evaluated = [row["version"] for row in rows if "eval/vowel/greedy_accuracy" in row]
    assert evaluated == [0, 10, 20, 30]
    config = load_config(tiny_run / "config.yaml")
    for row in rows[1:]:
        assert row["policy/logprob_gap_max"] < 1e-4  # sampler and learner agree on every token
        assert row["rollout/trajectories"] == config.rollout.prompts * config.rollout.group_size
        assert row["optimizer/learning_rate"] == pytest.approx(3e-3)
        assert row["optimizer/skipped"] == 0
        # Strictly on-policy: the sampler drew from the very weights that the step starts from.
        assert abs(row["policy/kl_behavior"]) < 1e-6
        assert row["policy/ratio_low"] == pytest.approx(1.0, abs=1e-4)
        assert row["policy/ratio_high"] == pytest.approx(1.0, abs=1e-4)
    for row in read_metrics(tiny_run)[1:]:
        assert {"time/rollout", "time/score", "time/update", "time/total", "time/tokens_per_second"} <= set(
            row
        )
        assert row["memory/peak_bytes"] > 2**20


def test_run_folder_is_complete(tiny_run):
    assert load_config(tiny_run / "config.yaml") == load_config(TINY_YAML)
    samples = read_jsonl(tiny_run / "samples.jsonl")
    assert {s["version"] for s in samples} == set(range(1, 31))
    assert all(isinstance(s["prompt"], str) and isinstance(s["completion"], str) for s in samples)
    assert {0.0, 1.0} == {s["reward"] for s in samples}
    with SnapshotStore(tiny_run / "snapshots", read_only=True) as store:
        assert store.versions() == [25, 30]
        assert store.meta(30)["config"]["objective"] == "grpo"
    html = (tiny_run / "report.html").read_text()
    assert "Reward" in html and "vowel" in html
    assert "<script src=" not in html  # self-contained
    names = {p.name for p in tiny_run.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "report.html", "run.json", "samples.jsonl", "snapshots"}


# ---------------------------------------------------------------------------------- repeating


def test_k03_same_seed_same_run_and_another_seed_another_run(whole, start):
    _, again = start(short(), "again")
    same_run(again, whole)
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["version"] == i for i, line in enumerate(lines))  # one object a line
    _, other = start(short("seed=1"), "other")
    assert figures(other)[1:] != figures(whole)[1:]
    first, second = (read_jsonl(f / "samples.jsonl")[:16] for f in (whole, other))
    assert [s["prompt"] for s in first] == [s["prompt"] for s in second]  # the task has a seed of its own
    assert [s["completion"] for s in first] != [s["completion"] for s in second]


# ----------------------------------------------------------------------------- stopping, going on


@pytest.fixture
def ask_to_stop(monkeypatch):
    """ask_to_stop(signal, after=version | rollout=n): raises the signal there, once."""

    def ask(number, *, after=None, rollout=None):
        if after is not None:
            write = MetricsWriter.write

            def writing(self, row):
                out = write(self, row)
                if row["version"] == after:
                    signal.raise_signal(number)
                return out

            monkeypatch.setattr(MetricsWriter, "write", writing)
        else:
            collect, calls = loop.collect, []

            def collecting(*args, **more):
                calls.append(1)
                if len(calls) == rollout:
                    signal.raise_signal(number)
                return collect(*args, **more)

            monkeypatch.setattr(loop, "collect", collecting)

    return ask


@pytest.mark.slow
def test_stopped_again_and_again_it_is_the_same_run(whole, start, monkeypatch, ask_to_stop, capfd):
    stops = [
        (signal.SIGTERM, {"after": 0}, 0),  # between the first evaluation and the first step
        (signal.SIGINT, {"after": 1}, 1),  # where no snapshot was due
        (signal.SIGTERM, {"rollout": 3}, 3),  # in the middle of the third step from there: it is not done
        (signal.SIGINT, {"after": 4}, 4),  # where one was due
    ]
    for number, (how, where, version) in enumerate(stops):
        with monkeypatch.context():
            ask_to_stop(how, **where)
            code, folder = start(short(), resume=number > 0, invocation="configs/tiny.yaml")
        monkeypatch.undo()
        assert code == EXIT_STOPPED == 75
        captured = capfd.readouterr()
        assert f"Stopped after step {version} of 6" in captured.out + captured.err
        assert f"jaxrl train configs/tiny.yaml --run {folder} --resume" in captured.out + captured.err
        assert [row["version"] for row in figures(folder)] == list(range(version + 1))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    code, folder = start(short(), resume=True)
    assert code == 0
    same_run(folder, whole)


def test_a_second_ctrl_c_stops_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a scheduler may send it twice
        with pytest.raises(StoppedError):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_is_caught():
    def stop_requested():
        with StopRequest() as stop:
            return stop.asked

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(stop_requested).result() is False


@pytest.mark.slow
def test_k01_k05_resuming_anywhere_in_finite_data_with_a_schedule(tmp_path):
    """8 prompts, 2 a step: an epoch ends at step 4. Warm-up over 4 updates to 1e-3, then constant."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"say the letter {c}", "answer": c}) + "\n" for c in "abcdefghi")
    )
    text = f"""
        steps: 8
        objective: {{recipe: grpo, entropy_coef: 0.1}}
        model: {{source: tiny, max_context: 64}}
        task: {{name: "jsonl:{data}", args: {{held_out: 0.1}}}}
        rollout: {{prompts: 2, group_size: 32, max_tokens: 2}}
        sampler: {{slots: 16}}
        learner: {{micro_batch_rows: 32}}
        optimizer: {{learning_rate: 1e-3, warmup_updates: 4}}
        evaluation: {{items: 0}}
        snapshots: {{every: 1, keep_last: 8}}
    """
    path = tmp_path / "c.yaml"
    path.write_text(textwrap.dedent(text))
    config = load_config(path)
    complete = run_to_the_end(config, tmp_path / "whole")
    rates = [row["optimizer/learning_rate"] for row in figures(complete)]
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, *[1e-3] * 5], rtol=1e-6)
    samples = read_jsonl(complete / "samples.jsonl")
    epochs = [[s["prompt"] for s in samples if (s["version"] - 1) // 4 == e][::8] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(epochs[0]))  # every prompt once an epoch
    assert epochs[0] != epochs[1]
    assert len({s["uid"] for s in samples}) == 16  # a second visit is another visit
    assert learned_something(complete)

    for step in (1, 4, 7):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(complete, folder)
        for later in range(step + 1, 9):
            shutil.rmtree(folder / "snapshots" / str(later))
        assert train(config, folder, resume=True) == 0
        same_run(folder, complete)


def test_resuming_a_finished_run_changes_nothing_and_more_steps_extend_it(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert train(short(), folder, resume=True) == 0
    same_run(folder, whole)
    assert train(short(), folder, resume=True, overrides=["steps=7"]) == 0
    assert figures(folder)[-1]["version"] == 7
    assert figures(folder)[:6] == figures(whole)[:6]
    assert load_config(folder / "config.yaml").steps == 7


def test_a_resumed_run_keeps_its_own_settings_and_says_so(whole, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "snapshots" / "6")
    assert train(short("optimizer.learning_rate=1.0", "rollout.temperature=0.5"), folder, resume=True) == 0
    captured = capfd.readouterr()
    assert "optimizer.learning_rate: the run has 0.003, the file says 1.0" in captured.out + captured.err
    same_run(folder, whole)


def test_a_run_is_not_resumed_with_another_model(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    kept = [folder / "metrics.jsonl", folder / "config.yaml"]
    before = [path.read_bytes() for path in kept]
    original = loop.configured_model
    monkeypatch.setattr(
        loop, "configured_model", lambda *given: dataclasses.replace(original(*given), digest="f" * 64)
    )
    with pytest.raises(InputError, match="is not the model that this run started from"):
        train(short(), folder, resume=True, overrides=["steps=7"])
    assert [path.read_bytes() for path in kept] == before


def test_a_config_that_was_cut_off_is_not_filled_up_with_defaults(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "config.yaml"
    text = path.read_text()
    for kept, told in (
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        (text[: text.index("optimizer:")], r"lacks optimizer"),
        (text[: text.index("  weight_decay")], r"lacks learner, .* and \d+ more"),
        (text[: text.rindex("\n", 0, -1) + 1], r"lacks [\w.]+, which"),
    ):
        path.write_text(kept)
        with pytest.raises(
            InputError, match=f"{told}.* Put the config file that the run was started with in its place"
        ):
            train(short(), folder, resume=True, overrides=["steps=7"])
        assert path.read_text() == kept


def test_two_processes_do_not_write_one_run(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    holding = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); input()",
            folder,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holding:
        holding.stdout.readline()
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(InputError, match="another process is writing this run"):
            train(short(), folder, resume=True, overrides=["steps=7"])
        (folder / "config.yaml").rename(tmp_path / "config.yaml")  # as if the other had not come so far
        with pytest.raises(InputError, match="another process is writing this run"):
            train(short(), folder)
        (tmp_path / "config.yaml").rename(folder / "config.yaml")
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        holding.kill()
    with pytest.raises(InputError, match="already holds a run"):  # the lock ended with the process
        train(short(), folder)


def test_another_model_or_objective_is_named_by_its_setting_and_the_model_before_it_is_loaded(
    whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with pytest.raises(InputError, match=r"optimizer.weight_decay: 0.0 there, 0.5 here"):
        train(short(), folder, resume=True, overrides=["steps=7", "optimizer.weight_decay=0.5"])
    monkeypatch.setattr(loop, "configured_model", lambda *_: pytest.fail("it was loaded"))
    damaged = folder / "snapshots" / "6" / "manifest" / "metadata"
    damaged.write_bytes(b"")
    with pytest.raises(
        InputError, match=r"model.source: tiny-moe is not the model of.*Set model.source=tiny,"
    ):
        train(short(), folder, resume=True, overrides=["steps=7", "model.source=tiny-moe"])
    with pytest.raises(
        InputError, match=r"model.source: tiny-moe is not the model of.*Set model.source=tiny,"
    ):
        load_policy(short("model.source=tiny-moe"), str(folder))


def test_damaged_newest_snapshot_is_named_and_the_one_before_is_used(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    largest = max(
        (p for p in (folder / "snapshots" / "6").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=r"Snapshot 6 is damaged .*; using 4 instead"):
        assert train(short(), folder, resume=True) == 0
    same_run(folder, whole)


# ------------------------------------------------------------------------------------- killed


@pytest.mark.slow
def test_kill_9_between_metrics_and_snapshot_and_at_a_random_moment_and_twice(whole, tmp_path):
    folder = tmp_path / "run"
    killed(folder, "before saving", 2, resume=False)  # step 2 has its row; there is no snapshot at all yet
    killed(folder, "while saving", 2, resume=True)  # from the beginning again
    seed = random.randrange(2**32)
    print(f"random moment: {seed}")
    killed(folder, "anywhere", 4, resume=True, seed=seed)
    with warnings.catch_warnings():  # a snapshot that was under way is named
        warnings.filterwarnings("ignore", "Snapshot 4 was not finished", RuntimeWarning)
        assert train(short(), folder, resume=True) == 0
    same_run(folder, whole)


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    config = (*SHORT, "steps=16", "snapshots.every=3")
    folder = tmp_path_factory.mktemp("runs") / "longer"
    return config, run_to_the_end(load_config(TINY_YAML, config), folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_random_moments(longer, tmp_path, seed):
    config, complete = longer
    chance, folder = random.Random(seed), tmp_path / "run"
    for version in sorted(chance.sample(range(2, 12), 2)):
        killed(folder, "anywhere", version, resume=folder.exists(), seed=seed, steps=3, config=config)
    assert train(load_config(TINY_YAML, config), folder, resume=True) == 0
    same_run(folder, complete)


def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_75(whole, tmp_path):
    folder = tmp_path / "run"
    sets = [part for item in SHORT for part in ("--set", item)]
    process = in_a_process(
        ["-u", "-m", "jaxrl_llm.cli", "train", str(TINY_YAML), "--run", str(folder), *sets]
    )
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step  0/") or line.startswith("step 0/"):
            process.send_signal(signal.SIGINT)
            break
    output += process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert "Stopping" in output and "Traceback" not in output
    assert f"jaxrl train {TINY_YAML} --run {folder} --resume" in output
    assert train(short(), folder, resume=True) == 0
    same_run(folder, whole)


# ------------------------------------------------------------------------- other ways to train


@pytest.mark.slow
def test_several_updates_a_step_with_a_reference_and_resumed(tmp_path):
    """2 minibatches x 2 epochs, KL to a frozen reference: ratios leave 1, the reference stays."""
    config = short(
        "objective={recipe: grpo, kl_coef: 0.05}",
        "learner.minibatches=2",
        "learner.epochs=2",
        "steps=4",
    )
    folder = run_to_the_end(config, tmp_path / "run")
    rows = figures(folder)
    assert learned_something(folder)
    assert rows[-1]["policy/ratio_high"] > 1.001 and rows[-1]["policy/ratio_low"] < 0.999
    assert rows[-1]["policy/kl_reference"] > rows[1]["policy/kl_reference"] >= 0
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows[1:])  # of the first update
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "snapshots" / "4")
    assert train(config, again, resume=True) == 0
    same_run(again, folder)
    # The reference in the last snapshot is the model that the run began with, bit for bit.
    run = loop.Run(config, again, resume=True)
    with run.snapshots:
        run.restore()
    initial = load_model("tiny").params
    jax.tree.map(np.testing.assert_array_equal, run.state.reference, initial)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), run.state.params, initial)
    assert any(jax.tree.leaves(moved))


@pytest.mark.slow
def test_proximal_anchor_equals_behavior_when_on_policy(whole, start):
    """One update on fresh samples: proximal and behavior are the same policy, so the runs agree."""
    _, folder = start(
        short(
            "objective={recipe: grpo, anchor: proximal, importance_cap: 2.0}", "steps=3", "snapshots.every=0"
        )
    )
    for mine, theirs in zip(figures(folder)[1:], figures(whole)[1:4], strict=True):
        assert mine["optimizer/grad_norm"] == pytest.approx(theirs["optimizer/grad_norm"], abs=1e-4)
        assert mine["reward/mean"] == theirs["reward/mean"]
    assert learned_something(folder)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh={data: 2}", "mesh={data: 2, fsdp: 2, tensor: 2}"])
def test_a_mesh_computes_what_one_device_does(whole, start, mesh):
    code, folder = start(short(mesh))
    assert code == 0
    for mine, theirs in zip(figures(folder), figures(whole), strict=True):
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, abs=1e-4), key
    assert params(folder).keys() == params(whole).keys()


# --------------------------------------------------------------------------- rewards that fail


@pytest.fixture
def task_with(monkeypatch):
    """task_with(score): registers the task "strange", whose rollouts are judged by `score`."""
    collect, rolling_out = loop.collect, []

    def collecting(*args, **more):
        rolling_out.append(True)
        try:
            return collect(*args, **more)
        finally:
            rolling_out.clear()

    def make(score):
        def judge(completion, gold, question):  # sound as long as it is tested, before the run
            return score(completion) if rolling_out else Score(float(completion == gold), {}, "")

        def draw(stream):
            return tasks.Question(text=f"item {stream.below(10**6)}", answer="right")

        def build():
            grader = Grader(find=lambda text: text, score=judge, write=lambda answer: answer, instruction="")
            return tasks.GeneratedTask(
                name="strange", draw=draw, grader=grader, max_tokens=2, stop=(), exact=False
            )

        monkeypatch.setitem(tasks.TASKS, "strange", build)
        monkeypatch.setattr(loop, "collect", collecting)

    return make


def test_d07_rewards_that_are_all_zero_change_nothing(task_with, start):
    task_with(lambda text: Score(0.0, {}, "never"))
    config = short("task.name=strange", "steps=3")
    code, folder = start(config)
    assert code == 0
    rows = figures(folder)[1:]
    assert len(rows) == 3
    for row in rows:
        assert row["reward/mean"] == 0 and row["optimizer/grad_norm"] == 0 and row["policy/loss"] == 0
        assert row["rollout/no_signal_groups"] == row["rollout/groups"] == 8
        assert not any(v in ("NaN", "Infinity", "-Infinity") for v in row.values())
    jax.tree.map(np.testing.assert_array_equal, params(folder), load_model("tiny").params)
    uids = [s["uid"] for s in read_jsonl(folder / "samples.jsonl")]
    assert len(set(uids)) == 24  # the prompts were consumed all the same


@pytest.mark.slow
def test_refilled_batches_hold_what_says_something_and_resume_exactly(start):
    """Dynamic sampling: at the start hardly any group has rewards that differ."""
    config = short("rollout.refill_rounds=3", "steps=4")
    code, folder = start(config)
    assert code == 0
    rows = figures(folder)[1:]
    assert any(row["rollout/groups_dropped"] > 0 for row in rows)
    assert all(1 <= row["rollout/rounds"] <= 4 for row in rows)
    for row in rows:
        trained = (
            row["rollout/groups_sampled"] - row["rollout/groups_dropped"] - row["rollout/groups_surplus"]
        )
        assert (row["optimizer/trained_tokens"] > 0) == (trained > 0)
        assert not trained or row["policy/group_no_signal"] == 0
    assert learned_something(folder)
    again = folder.parent / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "snapshots" / "4")
    assert train(config, again, resume=True) == 0
    same_run(again, folder)


def test_refilling_in_vain_skips_the_update(task_with, start):
    task_with(lambda text: Score(1.0, {}, "always"))
    code, folder = start(short("task.name=strange", "steps=2", "rollout.refill_rounds=2"))
    assert code == 0
    for row in figures(folder)[1:]:
        assert row["rollout/rounds"] == 3 and row["rollout/groups_dropped"] == 24
        assert row["optimizer/skipped"] == 1 and row["optimizer/trained_tokens"] == 0
    jax.tree.map(np.testing.assert_array_equal, params(folder), load_model("tiny").params)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["{max_age: 0}", "{max_age: 1}"])
def test_d07_one_group_in_four_is_divided_by_its_own_tokens(task_with, start, schedule):
    """4 groups of 8 a step, every fourth that is sampled says something; what does not is replaced up to a bound."""
    judged = itertools.count()

    def score(text):
        number = next(judged)
        return Score(float(number % 2) if number // 8 % 4 == 0 else 0.0, {}, "")

    task_with(score)
    config = short(
        "task.name=strange",
        "rollout={prompts: 4, group_size: 8, refill_rounds: 1}",
        f"schedule={schedule}",
        "objective=[returns_to_go, normalize_by_token, token_ratio, clip_surrogate]",
        "steps=2",
    )
    code, folder = start(config)
    assert code == 0
    rows = figures(folder)[1:]
    for row in rows:
        assert row["optimizer/trained_tokens"] in (
            16,
            32,
            48,
        )  # of answers of two tokens: a part of the batch
    # Of the policy itself: minus the mean reward of a token that is trained on, which is one half.
    assert rows[0]["policy/loss"] == pytest.approx(-0.5, abs=1e-5)
    with SnapshotStore(folder / "snapshots", read_only=True) as store:
        consumed = store.meta(2)["cursor"]["cursor"]
    assert (
        consumed * 8 >= next(judged) > 2 * 4 * 8
    )  # more than was trained on, and a resumed run goes on behind it


@pytest.mark.slow
def test_d07_an_asynchronous_run_that_never_gets_a_reward_goes_on(task_with, start):
    task_with(lambda text: Score(0.0, {}, "never"))
    code, folder = start(
        short("task.name=strange", "steps=3", "rollout.refill_rounds=1", "schedule.max_age=2")
    )
    assert code == 0
    for row in figures(folder)[1:]:
        assert row["optimizer/skipped"] == 1 and row["optimizer/trained_tokens"] == 0
        assert row["ledger/uninformative_samples"] == 64  # the bound; the groups after them train nothing
    jax.tree.map(np.testing.assert_array_equal, params(folder), load_model("tiny").params)


def test_groups_of_one_cannot_be_refilled():
    with pytest.raises(InputError, match="rollout.refill_rounds: a group of 1 sample"):
        short("rollout.refill_rounds=1", "rollout.group_size=1", "objective=reinforce")


def broken(text):
    raise RuntimeError("the judge is down")


@pytest.mark.parametrize("score", [broken, lambda text: Score(None, {}, "no answer from the judge")])
def test_a_verifier_that_always_fails_is_reported_and_no_crash(task_with, start, score):
    task_with(score)
    code, folder = start(short("task.name=strange", "steps=2"))
    assert code == 0
    for row in figures(folder)[1:]:
        assert row["reward/no_signal"] == 1.0 and row["reward/errors"] == 64
        assert row["optimizer/grad_norm"] == 0
    samples = read_jsonl(folder / "samples.jsonl")
    assert {s["reward"] for s in samples} == {None}
    assert all("judge" in s["reason"] for s in samples)
    jax.tree.map(np.testing.assert_array_equal, params(folder), load_model("tiny").params)


# --------------------------------------------------------------------------- the real thing, slowly


@pytest.mark.slow
def test_quickstart_raises_the_accuracy_of_a_real_model(start):
    quickstart = TINY_YAML.parent / "quickstart.yaml"
    config = load_config(quickstart, ["steps=6", "evaluation.items=64", "evaluation.every=0"])
    code, folder = start(config)
    assert code == 0
    rows = figures(folder)
    key = f"eval/{config.task.name}/greedy_accuracy"
    assert rows[-1][key] >= rows[0][key] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo", "trpo"])
def test_steps_of_their_own_learn(tmp_path, objective):
    """PPO trains a critic before each update of the policy; TRPO has no optimiser but a line search."""
    config = load_config(
        TINY_YAML,
        [
            f"objective={objective}",
            "steps=16",
            "rollout.prompts=16",
            "evaluation.items=0",
            "critic.learning_rate=3e-3",
            "trust_region.max_kl=0.05",
        ],
    )
    assert train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run")
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (rows[:4], rows[-4:]))
    assert last > 2 * first
    if objective == "ppo":
        assert all(row["policy/critic_skipped"] == 0 for row in rows)
        # Against a critic that always says 0, whose error is the mean of the squared (0 or 1) returns.
        error, zero = (np.mean([row[k] for row in rows[-4:]]) for k in ("policy/critic_error", "reward/mean"))
        assert error < 0.8 * zero
        assert "optimizer/learning_rate" in rows[-1]
    else:
        assert all(0 <= row["policy/trust_region_kl"] <= 0.05 + 1e-6 for row in rows)
        assert sum(row["policy/trust_region_scale"] > 0 for row in rows) > 8


@pytest.mark.slow
def test_baselines_roles_and_lists_resume_exactly(tmp_path):
    stages = [
        "greedy_baseline_advantage",
        "normalize_by_token",
        "token_ratio",
        "{divergence_surrogate: {kind: topk_tv, k: 4}}",
    ]
    config = short(f"objective=[{', '.join(stages)}]", "steps=4", "evaluation.items=0")
    folder = run_to_the_end(config, tmp_path / "run")
    rows = figures(folder)
    assert all(0 <= row["reward/baseline"] <= 1 and row["rollout/baseline_tokens"] > 0 for row in rows)
    assert all(row["rollout/trajectories"] == 64 for row in rows)  # the greedy answers are not trained
    samples = read_jsonl(folder / "samples.jsonl")
    shares = [row["gradient_share"] for row in samples]
    assert min(shares) == 0 and 1 / 64 < max(shares) < 0.5
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "snapshots" / "4")
    assert train(config, again, resume=True) == 0
    same_run(again, folder)


def test_a_part_of_the_reward_that_the_task_does_not_give_is_refused(tmp_path):
    config = short("objective={recipe: gdpo, weights: {reward: 1.0, taste: 0.5}}")
    with pytest.raises(InputError, match="names 'taste'.*Its parts: format, lenient, reward"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_truncated_sampling_has_ratios_of_1(start):
    """The learner takes its log-probs over the tokens that the sampler drew from."""
    config = short("steps=2", "rollout.top_p=0.9", "rollout.max_support=100", "evaluation.every=2")
    code, folder = start(config)
    rows = [row for row in read_metrics(folder) if "policy/loss" in row]
    assert code == 0
    assert len(rows) == 2
    for row in rows:  # one update a step: the weights that sampled are those that are trained
        assert abs(row["policy/ratio_min"] - 1) < 1e-5 and abs(row["policy/ratio_max"] - 1) < 1e-5
        assert row["policy/logprob_gap_max"] < 2e-5
        assert 50 < row["completion/support_size"] <= 100 and 0 < row["completion/support_cut"] <= 1
        assert row["policy/entropy"] <= np.log(100) + 1e-5 and row["optimizer/grad_norm"] > 0


@pytest.mark.slow
def test_a_mixture_of_experts_learns_with_the_experts_of_its_samples(tmp_path):
    """The reward rises, the learner replays what the sampler chose, and their log-probs agree."""
    config = load_config(TINY_YAML, ["model.source=tiny-moe", "evaluation.every=30", "snapshots.every=30"])
    rows = figures(run_to_the_end(config, tmp_path / "moe"))[1:]
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (rows[:6], rows[-6:]))
    assert last > first + 0.2
    for row in rows:
        assert row["policy/expert_replayed"] > 0.9  # all but the last token of a row
        assert row["policy/logprob_gap_max"] < 1e-4 and row["policy/expert_dropped"] == 0
