"""Text to ids and back, and the bytes behind each id."""

import json

import pytest
import tokenizers

from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.tokens.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "naïve café 東京 🙂\n\t x",
    "1234 + 5",
    "\u0000\ue000 odd",
    "<think>a</think>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_the_library_and_decodes_back(chatml, backend_json, text):
    reference = tokenizers.Tokenizer.from_str(backend_json)
    ids = chatml.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert chatml.decode(ids) == text
    assert b"".join(chatml.token_bytes(i) for i in ids).decode() == text


def test_control_tokens_in_text_are_text_unless_allowed(chatml):
    text = "a<|im_end|>b<|im_start|>"
    ids = chatml.encode(text)
    assert not any(chatml.is_special(i) for i in ids) and chatml.decode(ids) == text
    allowed = chatml.encode(text, allow_special=True)
    assert [i for i in allowed if chatml.is_special(i)] == [2, 1]
    assert chatml.decode(allowed) == "ab" and chatml.decode(allowed, skip_special=False) == text


def test_special_ids(chatml):
    assert (chatml.bos_id, chatml.eos_ids, chatml.pad_id) == (1, (2,), 2)
    assert chatml.vocab_size == 366 and chatml.token_id("</think>") == 365 and chatml.token_id("nope") is None
    assert not chatml.adds_bos and chatml.encode("x", add_bos=True) == chatml.encode("x")
    assert chatml.token_bytes(2) == b"<|im_end|>" and chatml.token_bytes(10**6) == b""


def test_given_stop_ids_win(backend_json):
    made = Tokenizer(backend_json, special={"eos_token": "<|im_end|>"}, eos_ids=(0, 2), pad_id=0)
    assert made.eos_ids == (0, 2) and made.pad_id == 0


def test_bos_only_where_the_model_expects_it(with_bos):
    tokenizer = with_bos(None)
    assert tokenizer.adds_bos and tokenizer.encode("x", add_bos=True) == [0, *tokenizer.encode("x")]


def test_truncation_and_padding_of_the_file_are_not_applied(backend_json):
    backend = tokenizers.Tokenizer.from_str(backend_json)
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend.to_str()).encode("The quick brown fox jumps")) > 2
    assert len(Tokenizer(backend.to_str()).encode("The quick brown fox jumps")) < 50


def test_save_and_reload(tmp_path, chatml):
    chatml.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    for name in ("vocab_size", "bos_id", "eos_ids", "pad_id", "special", "chat_template"):
        assert getattr(again, name) == getattr(chatml, name)
    messages = [{"role": "user", "content": "hi"}]
    assert again.chat(messages) == chatml.chat(messages)


def test_folder_spellings(tmp_path, backend_json):
    assert Tokenizer.from_directory(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(backend_json)
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<|endoftext|>"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "D" and tokenizer.render_chat(messages, tools=[{}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(tmp_path).render_chat(messages) == "J"


def test_bad_tokenizers_are_refused(tmp_path, backend_json):
    (tmp_path / "tokenizer.json").write_text(backend_json[: len(backend_json) // 2])
    with pytest.raises(InputError, match=r"tokenizer\.json: not a valid tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(InputError, match="eos_token='<nope>' is not in the vocabulary"):
        Tokenizer(backend_json, special={"eos_token": "<nope>"})


def test_sentencepiece_style_bytes():
    vocabulary = {
        "<unk>": 0,
        "\u2581hi": 1,
        "<0x0A>": 2,
        "<0xC3>": 3,
        "<0xA9>": 4,
        "\u2581": 5,
        "h": 6,
        "i": 7,
    }
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(backend.to_str())
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3, 4)] == [b" hi", b"\n", b"\xc3", b"\xa9"]
    assert tokenizer.decode([1, 3, 4]) == "hié"


def test_tiny_tokenizer_is_a_bijection_on_its_ids():
    tiny = tiny_tokenizer()
    assert tiny.vocab_size == 128 and (tiny.pad_id, tiny.bos_id, tiny.eos_ids) == (0, 1, (2,))
    for i in range(128):
        text = tiny.decode([i], skip_special=False)
        assert tiny.encode(text, allow_special=True) == [i] and tiny.token_bytes(i) == text.encode()
    assert tiny.encode("3 + 4\n") == [ord(c) for c in "3 + 4\n"]
    assert tiny.encode("é") == [ord("?")]
    assert tiny.decode(tiny.encode("<eos>")) == "<eos>"  # text, not a control token


def test_tiny_chat():
    tiny = tiny_tokenizer()
    ids = tiny.chat([{"role": "user", "content": "3+4?"}])
    assert ids[0] == tiny.bos_id and tiny.decode(ids) == "u: 3+4?\na: "
    begun = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "3+4="}]
    assert tiny.decode(tiny.chat(begun, continue_final_message=True)) == "u: 3+4?\na: 3+4="
    assert tiny.chat(begun, add_generation_prompt=False)[-2:] == [2, ord("\n")]
