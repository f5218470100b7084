"""`jaxrl bench compare`: real processes that print what a peer would print; no other library is needed."""

import json
import os
import sys

import pytest

from jaxrl_llm.bench import compare as module
from jaxrl_llm.bench.compare import PEERS, Contender, Row, compare, comparison_table
from jaxrl_llm.bench.peers import jaxrl_generate
from jaxrl_llm.bench.rollout import synthetic_prompts
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY

# Writes down that it ran, then does "the work" in as many seconds as it is told.
FAKE = """
import json, pathlib, sys
name, seconds, shift, log = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4])
work = json.loads(pathlib.Path(sys.argv[5]).read_text())
log.write_text(log.read_text() + f"{name} {work['dtype']}\\n")
assert (pathlib.Path(work["model"]) / "model.safetensors").is_file() and work["threads"] >= 1
print("noise {")
print(json.dumps({
    "logprobs": [shift - 1.0] * (len(work["probe"]) - 1),
    "seconds": dict.fromkeys(work["lengths"], seconds),
    "tokens": {kind: sum(lengths) for kind, lengths in work["lengths"].items()},
}))
print("more noise")
"""
SMALL = {"dtypes": ("float32",), "prompts": 2, "group": 2, "prompt_tokens": 4, "new_tokens": 8}


@pytest.fixture
def contender(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def make(name, seconds=1.0, shift=0.0, modules=("json",), code=None):
        program = ("-c", code) if code else (str(script), name, str(seconds), str(shift), str(log))
        return Contender(name, program, modules, ("numpy", "no-such-package"), f"pip install {name}")

    make.log = log
    return make


def test_a_ratio_of_each_kind_of_work_in_turns_with_ours(contender):
    told = []
    result = compare(
        "tiny",
        **SMALL,
        rounds=2,
        ours=contender("ours", 2.0),
        peers={"slow": contender("slow", 3.0), "fast": contender("fast", 1.0)},
        on_progress=lambda *what: told.append(what),
    )
    assert contender.log.read_text().split("\n")[:-1] == [
        f"{name} float32" for name in ("ours", "slow", "ours", "fast") * 2
    ]
    assert told[0] == ("ours float32", 0, 8) and told[-1] == ("fast float32", 7, 8)
    assert {(r["peer"], r["work"]): (r["ratio"], r["tokens"]) for r in result["rows"]} == {
        ("slow", "even"): (1.5, 32),
        ("slow", "ragged"): (1.5, 1 + 3 + 6 + 8),
        ("fast", "even"): (0.5, 32),
        ("fast", "ragged"): (0.5, 18),
    }
    row = result["rows"][0]
    assert row["ours_tokens_per_second"] == 16 and row["peer_tokens_per_second"] == pytest.approx(32 / 3)
    assert row["logprob_gap"] == 0 and row["load_average"] >= 0
    assert result["left_out"] == {}
    assert set(result["versions"]["slow"]) == {"python", "numpy"}
    table = comparison_table(json.loads(json.dumps(result)))
    assert "slow  float32  even" in table and "1.50" in table


def test_best_and_median_of_the_rounds():
    row = Row("x", "float32", "even", 100, (2.0, 1.0, 4.0), (3.0, 9.0, 5.0), 0.0, 0.0)
    assert (row.ratio, row.ratio_median) == (3.0, 2.5)
    assert row.figures()["ours_tokens_per_second_median"] == 50


def test_peers_without_a_ratio_are_named_and_the_others_measured(contender):
    peers = {
        "absent": contender("absent", modules=("json", "no_such_module")),
        "crashing": contender("crashing", code="raise SystemExit('no memory left')"),
        "other": contender("other", shift=0.5),
        "silent": contender("silent", code="print('hello')"),
        "fine": contender("fine"),
    }
    result = compare("tiny", **SMALL, rounds=2, ours=contender("ours"), peers=peers)
    assert {row["peer"] for row in result["rows"]} == {"fine"}
    why = result["left_out"]
    assert why["absent"] == "not installed (no_such_module): pip install absent"
    assert why["crashing float32"] == "failed with exit code 1: no memory left"
    assert "0.5 nats from ours" in why["other float32"] and "no ratio" in why["other float32"]
    assert why["silent float32"] == "printed no result, but: hello"
    assert contender.log.read_text().count("other") == 1  # not again in the second round
    assert "absent: not installed" in comparison_table(result)


def test_a_peer_that_samples_too_little_gets_no_ratio(contender):
    short = FAKE.replace("sum(lengths) for", "sum(lengths) - 1 for")
    (contender.log.parent / "short.py").write_text(short)
    peer = contender("short")
    peer = peer._replace(program=(str(contender.log.parent / "short.py"), *peer.program[1:]))
    result = compare("tiny", **SMALL, ours=contender("ours"), peers={"short": peer})
    assert result["rows"] == []
    assert "sampled {'even': 31, 'ragged': 17} tokens" in result["left_out"]["short float32"]
    assert "short float32: sampled" in comparison_table(result)


def test_the_log_probs_may_differ_by_the_rounding_of_the_dtype(contender):
    sizes = {**SMALL, "dtypes": ("float32", "bfloat16")}
    peers = {"rounded": contender("rounded", shift=0.1)}
    result = compare("tiny", **sizes, ours=contender("ours"), peers=peers)
    assert {row["dtype"] for row in result["rows"]} == {"bfloat16"}
    assert list(result["left_out"]) == ["rounded float32"]


def test_without_any_peer_nothing_is_measured(contender):
    absent = contender("absent", modules=("no_such_module",))
    with pytest.raises(
        InputError, match="(?s)no peer to compare with.*absent: not installed.*pip install absent"
    ):
        compare("tiny", **SMALL, ours=contender("ours"), peers={"absent": absent})
    assert contender.log.read_text() == ""


def test_failing_ourselves_is_a_fault(contender):
    broken = contender("ours", code="raise SystemExit('broken')")
    with pytest.raises(RuntimeError, match="our own program failed with exit code 1: broken"):
        compare("tiny", **SMALL, ours=broken, peers={"fine": contender("fine")})


def test_bad_input_is_refused(contender, tmp_path):
    peers = {"fine": contender("fine")}
    with pytest.raises(InputError, match="no peer 'fime'. Did you mean fine?"):
        compare("tiny", **SMALL, names=("fime",), peers=peers)
    with pytest.raises(InputError, match="--repeats must be at least 1, got 0"):
        compare("tiny", **SMALL, rounds=0, peers=peers)
    with pytest.raises(InputError, match="shortest completion must have between 1 and 8 .*, got 9"):
        compare("tiny", **SMALL, shortest_tokens=9, peers=peers)
    with pytest.raises(InputError, match="nowhere.* cannot be run"):
        compare("tiny", **SMALL, peers=peers, peer_python=str(tmp_path / "nowhere"))
    no_python = tmp_path / "other"
    no_python.write_text("#!/bin/sh\nexit 1\n")
    no_python.chmod(0o755)
    with pytest.raises(InputError, match="is no Python that the peers can run in"):
        compare("tiny", **SMALL, peers=peers, peer_python=str(no_python))
    no_python.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(InputError, match="it printed 'hello' where a list was expected"):
        compare("tiny", **SMALL, peers=peers, peer_python=str(no_python))
    with pytest.raises(InputError, match="cannot be run"):
        compare("tiny", **SMALL, peers=peers, peer_python="a\0b")
    with pytest.raises(InputError, match="Take fewer"):
        compare("tiny", **(SMALL | {"prompts": 10**12}), peers=peers)


def test_a_process_that_hangs_is_ended(contender, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="did not end within 0.5 s"):
        asleep = contender("ours", code="import time; time.sleep(60)")
        compare("tiny", **SMALL, ours=asleep, peers={"fine": contender("fine")})


def test_peers_compute_with_the_openmp_library_of_their_python(contender, tmp_path):
    home = tmp_path / "venv"
    for folder in ("bin", "lib"):
        (home / folder).mkdir(parents=True)
    (home / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    python = home / "bin" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    peer = contender("x", code="import os; raise SystemExit(os.environ.get('LD_PRELOAD', 'no library'))")
    told = []
    for _ in range(2):
        result = compare("tiny", **SMALL, ours=contender("ours"), peers={"x": peer}, peer_python=str(python))
        told.append(result["left_out"]["x float32"])
        (home / "lib" / "libiomp5.so").write_bytes(
            b""
        )  # the loader says that it is none, and goes on without
    assert told[0].endswith("no library")
    assert str(home / "lib" / "libiomp5.so") in told[1].rpartition(" / ")[2]


@pytest.mark.slow
def test_our_own_program_does_the_work():
    work = {
        "model": "tiny",
        "dtype": "float32",
        "threads": 1,
        "prompts": synthetic_prompts(TINY.vocab_size, 2, 4).tolist(),
        "lengths": {"even": [8] * 4, "ragged": [2, 8, 1, 5]},
        "probe": synthetic_prompts(TINY.vocab_size, 1, 16)[0].tolist(),
    }
    found = jaxrl_generate.main(work)
    assert found["tokens"] == {"even": 32, "ragged": 16}
    assert set(found["seconds"]) == {"even", "ragged"} and min(found["seconds"].values()) > 0
    assert len(found["logprobs"]) == 15 and max(found["logprobs"]) < 0


def test_the_programs_of_the_peers_exist():
    for peer in PEERS.values():
        assert os.path.isfile(peer.program[0])
        assert "pip install" in peer.install


def test_the_command_says_what_to_install(jaxrl_main, capsys):
    absent = os.path.join(os.path.dirname(sys.executable), "no-such-python")
    code = jaxrl_main("bench", "compare", "--model", "tiny", "--peer-python", absent)
    assert code == 2
    assert "cannot be run" in capsys.readouterr().err


@pytest.fixture
def jaxrl_main():
    from jaxrl_llm.cli import main

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return end.value.code

    return run
