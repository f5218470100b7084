"""Lengths of samples from distributions and files."""

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.lengths import drawn_from, limited, read_lengths, summary


def test_a_lognormal_has_the_quantiles_that_were_asked_for():
    found = summary(read_lengths("lognormal:median=200,p99=1600,max=5000"), seed=0, n=200_000)
    assert found["median"] == pytest.approx(200, rel=0.02)
    assert found["p99"] == pytest.approx(1600, rel=0.03)
    assert found["max"] == 5000
    # exp(sigma^2 / 2) times the median, sigma = ln 8 / 2.3263
    assert found["mean"] == pytest.approx(200 * np.exp((np.log(8) / 2.32635) ** 2 / 2), rel=0.02)


def test_other_distributions():
    values = read_lengths("uniform:low=3,high=5")(0)(3000)
    assert np.unique(values, return_counts=True)[0].tolist() == [3, 4, 5]
    assert np.bincount(values)[3:].min() > 900
    assert read_lengths("constant:tokens=7")(0)(4).tolist() == [7] * 4


@pytest.mark.parametrize(
    "text",
    ["[4, 9, 4, 2.0]", "4 9\n4,2\n", "4\n9\n\n4\n2", '{"tokens": 4, "task": "t"}\n{"tokens": 9}\n4 2\n'],
)
def test_files_of_numbers(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    values = read_lengths(str(path))(0)(4000)
    numbers, counts = np.unique(values, return_counts=True)
    assert numbers.tolist() == [2, 4, 9]
    np.testing.assert_allclose(counts / 4000, [0.25, 0.5, 0.25], atol=0.04)


def test_the_same_seed_draws_the_same_in_any_portions():
    source = read_lengths("lognormal:median=20,p99=90")
    whole, parts = source(3), source(3)
    assert whole(10).tolist() == [*parts(4), *parts(6)]
    assert source(3)(10).tolist() != source(4)(10).tolist()
    assert limited(drawn_from(np.array([5, 80])), 30)(0)(50).max() == 30


@pytest.mark.parametrize(
    "text, parts",
    [
        ("lognorml:median=3,p99=9", ["neither a distribution nor a file", "Did you mean lognormal?"]),
        ("nowhere.json", ["neither a distribution nor a file", "uniform:low=10,high=500"]),
        ("lognormal", ["median and p99 must be given"]),
        ("lognormal:median=3", ["p99 must be given"]),
        ("lognormal:median=30,p99=3", ["median <= p99 <= max", "30, 3"]),
        ("lognormal:median=3,p99=30,max=20", ["median <= p99 <= max"]),
        ("lognormal:median=3,p99=x", ["p99: 'x' is not a number"]),
        ("lognormal:median=nan,p99=3", ["between 1 and", "nan"]),
        ("lognormal:median=3,p99=inf", ["between 1 and", "inf"]),
        ("lognormal:median=3,median=4,p99=5", ["'median' is given twice"]),
        ("uniform:low=1,hi=2", ["'hi' is not an argument of uniform"]),
        ("uniform:low=5,high=2", ["low <= high"]),
        ("constant:tokens=0", ["between 1 and", "got 0"]),
        ("constant:", ["tokens must be given"]),
    ],
)
def test_what_is_no_distribution(text, parts):
    with pytest.raises(InputError) as error:
        read_lengths(text)
    assert str(error.value).startswith(f"--lengths {text}: ")
    for part in parts:
        assert part in str(error.value)


def test_parts_of_a_token_are_rounded_as_those_in_a_file_are(tmp_path):
    (tmp_path / "lengths").write_text("1.9")
    for text in ("constant:tokens=1.9", "uniform:low=1.8,high=2.2", str(tmp_path / "lengths")):
        np.testing.assert_array_equal(read_lengths(text)(0)(5), 2)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "holds no numbers"),
        (b"[]", "holds no numbers"),
        (b"3 4\nfive", "line 2: expected numbers"),
        (b'{"tokens": 3}\n{"length": 3}', "line 2: expected numbers"),
        (b"[3, -1]", "number 2: a length is between"),
        (b"[3, true]", "number 2: 'True' is not a number"),
        (b'{"tokens": [1]}', "number 1: '[1]' is not a number"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" + b"9" * 400 + b"]", "got a larger integer"),
        (b"[" * 100_000, "line 1: expected numbers"),
        (b'{"tokens":' + b"[" * 100_000, "line 1: expected numbers"),
    ],
)
def test_files_that_hold_no_lengths(tmp_path, content, message):
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(InputError, match="--lengths") as error:
        read_lengths(str(path))
    assert message in str(error.value)
