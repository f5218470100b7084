"""Streamed text: whole characters, nothing of a stop string, and in sum what was sampled."""

import random

import pytest

from jaxrl_llm.sampler.stopping import StopStrings, bytes_of_tokens
from jaxrl_llm.serve.text import Deltas


def stream(tokenizer, tokens, stop=()):
    """(pieces given before the end, whole text): tokens up to a stop string, as the sampler takes them."""
    matcher, seen, kept = StopStrings(stop, bytes_of_tokens(tokenizer, tokenizer.vocab_size)), bytearray(), []
    deltas, pieces, text = Deltas(tokenizer, stop), [], None
    for token in tokens:
        kept.append(token)
        if stop and matcher.push(seen, token):
            text = matcher.cut(tokenizer.decode(kept), tokenizer.decode(kept[:-1]))
            break
        pieces.append(deltas.push([token]))
    text = tokenizer.decode(kept) if text is None else text
    return pieces, deltas.finish(text), text


def test_characters_are_never_split(bytes_tokenizer):
    tokens = bytes_tokenizer.encode("naïve 東京 🙂!")
    assert len(tokens) > len("naïve 東京 🙂!")
    pieces, rest, text = stream(bytes_tokenizer, tokens)
    assert "".join(pieces) == text == "naïve 東京 🙂!" and rest == ""
    assert "" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_stays_incomplete_is_told_at_the_end(bytes_tokenizer):
    tokens = bytes_tokenizer.encode("a🙂")[:-1]
    pieces, rest, text = stream(bytes_tokenizer, tokens)
    assert "".join(pieces) == "a" and rest == "\ufffd" and text == "a\ufffd"


def test_a_beginning_of_a_stop_string_is_held_back_until_it_is_none(bytes_tokenizer):
    tokens = [bytes_tokenizer.token_id(c) for c in "xENxEND"]
    pieces, rest, text = stream(bytes_tokenizer, tokens, stop=("END",))
    assert pieces == ["x", "", "", "ENx", "", ""] and rest == "" and text == "xENx"
    pieces, rest, text = stream(bytes_tokenizer, tokens[:3], stop=("END",))
    assert pieces == ["x", "", ""] and rest == "EN" and text == "xEN"


def test_a_stop_character_that_two_tokens_make_is_cut(bytes_tokenizer):
    tokens = bytes_tokenizer.encode("a東b")
    assert len(tokens) == 5
    pieces, rest, text = stream(bytes_tokenizer, tokens, stop=("東",))
    assert "".join(pieces) == text == "a" and rest == ""


def test_any_tokens_and_any_stop_strings_add_up_and_nothing_leaks(bytes_tokenizer):
    draw = random.Random(0)
    stopped = 0
    for _ in range(400):
        tokens = [draw.randrange(3, bytes_tokenizer.vocab_size) for _ in range(draw.randrange(1, 30))]
        whole = bytes_tokenizer.decode(tokens)
        at = draw.randrange(len(whole) + 1)
        stop = tuple({whole[at : at + draw.randrange(1, 4)], "zz"} - {""})
        pieces, rest, text = stream(bytes_tokenizer, tokens, stop)
        assert "".join(pieces) + rest == text
        if text != whole:
            stopped += 1
            assert text == whole[: len(text)] and any(whole[len(text) :].startswith(s) for s in stop)
    assert stopped > 50


def test_text_that_is_not_what_was_sent_is_an_error(bytes_tokenizer):
    deltas = Deltas(bytes_tokenizer)
    assert deltas.push(bytes_tokenizer.encode("abc")) == "abc"
    with pytest.raises(RuntimeError, match="not how the completion begins"):
        deltas.finish("axcd")
