"""Text that grows token by token, and stop strings that cross token boundaries."""

import numpy as np
import pytest

from jaxrl_llm.tokens.stream import StopMatcher, TextStream

TEXT = "naïve café 東京 🙂 done"


def _bytes_as_tokens(tokenizer, text):
    """One token per byte: the hardest cut there is."""
    of_byte = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [of_byte[bytes([b])] for b in text.encode()]


def test_stream_gives_whole_characters_only(chatml):
    stream = TextStream(chatml)
    given = [stream.push(i) for i in _bytes_as_tokens(chatml, TEXT)]
    assert "".join(given) == stream.text == TEXT
    assert all(len(piece) <= 1 and "\ufffd" not in piece for piece in given) and "" in given


def test_stream_marks_bytes_that_never_become_a_character(chatml):
    stream = TextStream(chatml)
    for token in _bytes_as_tokens(chatml, "a東")[:-1]:
        stream.push(token)
    assert stream.text == "a" and stream.finish() == "\ufffd" and stream.text == "a\ufffd"


def test_stream_leaves_control_tokens_out_or_in(chatml):
    ids = chatml.encode("a<|im_end|>b", allow_special=True)
    hidden, shown = TextStream(chatml), TextStream(chatml, skip_special=False)
    for i in ids:
        hidden.push(i), shown.push(i)
    assert hidden.text == "ab" and shown.text == "a<|im_end|>b"


@pytest.mark.parametrize("stop", ["é", "京 🙂", "\n", "done", "fé 東", "<|im_end|>"])
def test_stop_strings_are_found_wherever_tokens_are_cut(chatml, stop):
    text = TEXT + "\n" + "<|im_end|>" + " rest"
    for ids in (_bytes_as_tokens(chatml, text), chatml.encode(text), chatml.encode(text, allow_special=True)):
        matcher = StopMatcher(chatml, [stop, "never"])
        count = matcher.push_all(ids)
        assert matcher.stopped and matcher.text == text.split(stop)[0]
        before = b"".join(chatml.token_bytes(i) for i in ids[: count - 1])
        assert stop.encode() not in before  # not one token too late


def test_the_earliest_of_several_stops_wins(chatml):
    matcher = StopMatcher(chatml, ["brown", "quick brown", "fox"])
    assert matcher.push_all(chatml.encode("The quick brown fox")) is not None
    assert matcher.text == "The "


def test_no_stop(chatml):
    ids = chatml.encode(TEXT)
    matcher = StopMatcher(chatml, [])
    assert matcher.push_all(ids) is None and not matcher.stopped and matcher.text == TEXT
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(chatml, [""])


def test_matching_equals_searching_the_whole_text(chatml):
    random = np.random.default_rng(0)
    for _ in range(100):
        ids = random.choice(_bytes_as_tokens(chatml, "abc"), 30).tolist()
        stop = "".join(random.choice(list("abc"), 4))
        text = chatml.decode(ids)
        matcher = StopMatcher(chatml, [stop])
        count = matcher.push_all(ids)
        found = text.find(stop)
        assert count == (None if found < 0 else found + 4)
