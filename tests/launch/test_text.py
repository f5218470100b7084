"""YAML and shell words: whatever goes in comes back when the real reader reads it."""

import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.text import array, assign, yaml_text

# YAML cannot carry lone surrogates and NUL at all; everything else is allowed.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_yaml_comes_back(value):
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(
    "text",
    ["yes", "null", "No", "1e5", "0x1f", "12", "1:30", "~", "", " a", "a ", "a: b", "- a", "# a", "'a'", '"', "é😀",
     "a\nb\n", "a\n\nb\n", " a\nb\n", "a\nb", "a\n\n", "\n", "a\n  b\t\n", "2026-01-01", "*", "&a", "!x", "|", "%", "\x7f", "\x85\u2028\ufeff", "\x00\x1b"],
)  # fmt: skip
def test_texts_that_look_like_something_else(text):
    value = {"key": text, "list": [text, [text], {"a": text}]}
    assert yaml.safe_load(yaml_text(value)) == value


def test_a_script_stays_readable():
    assert yaml_text({"run": "echo a\n\necho 'b'\n"}) == "run: |\n  echo a\n\n  echo 'b'\n"


@pytest.mark.parametrize("items", [["a b", "it's", '"q"', "$HOME", "`x`", "a\nb", "", "é", "*"], ["x"]])
def test_bash_reads_what_was_meant(items):
    script = array("items", items) + assign(one=items[0]) + 'printf "%s\\0" "$one" "${items[@]}"'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\0")[:-1] == [items[0], *items]
