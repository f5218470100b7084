"""Data files of answers and of pairs: what is odd in them is named with its line."""

import pytest

from jaxrl_llm.data.preferences import read_preferences
from jaxrl_llm.data.sft import read_sft
from jaxrl_llm.errors import InputError

GOOD = {
    read_sft: b'{"prompt": "a b", "answer": "c"}\n',
    read_preferences: b'{"prompt": "a b", "chosen": "c", "rejected": "d"}\n',
}


@pytest.mark.parametrize("read", GOOD)
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (b"{", "line 3: not valid JSON"),
        (b"\0" * 9, "line 3: not valid JSON"),
        (b"[" * 100_000, "line 3: not valid JSON"),
        (b"[1]", "line 3: expected a JSON object, got list"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'{"prompt": "\\ud800", "answer": "x", "chosen": "x", "rejected": "y"}', "line 3: .*surrogate pair"),
        (b'{"prompt": "a", "prompt": "b", "answer": "x"}', "line 3: .*key 'prompt' is there twice"),
        (b'{"question": "a"}', "line 3: .*found:? (only )?'question'"),
    ],
)
def test_odd_lines(tmp_path, read, odd, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(2 * GOOD[read] + odd + b"\n" + GOOD[read])
    with pytest.raises(InputError, match=message):
        read(path)


@pytest.mark.parametrize("read", GOOD)
def test_line_ends_and_byte_order_marks(tmp_path, read):
    path = tmp_path / "rows.jsonl"
    for content in (
        3 * GOOD[read],
        3 * GOOD[read].replace(b"\n", b"\r\n"),
        3 * GOOD[read].replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + 3 * GOOD[read] + b"\n \n",
        3 * GOOD[read].replace(b"a b", "a\u2028b".encode() + b"x" * 10**6),
    ):
        path.write_bytes(content)
        assert len(read(path)) == 3


@pytest.mark.parametrize("read", GOOD)
@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 5000, "loop"])
def test_odd_paths(tmp_path, monkeypatch, read, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be read"):
        read(name)


@pytest.mark.parametrize("reward", [b'"x"', b"true", b"Infinity", b"NaN", b"9" * 400])
def test_odd_rewards(tmp_path, reward):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b", "reward": ' + reward + b"}\n")
    with pytest.raises(InputError, match="'reward' must be a finite number"):
        read_sft(path)
