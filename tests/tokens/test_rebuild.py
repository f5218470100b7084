"""Tokenizers rebuilt from GGUF metadata equal the ones they were made from."""

import json

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.rebuild import PRE_TOKENIZERS, tokenizer_from_gguf

TEXTS = [
    "The quick brown fox, 12345 and 3.14!",
    "naïve café\n\n  東京's 🙂\t",
    "it's I'M we'll",
    "x  <|im_end|> y",
]


@pytest.fixture
def metadata(backend_json):
    state = json.loads(backend_json)
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    added = [t["content"] for t in state["added_tokens"]]
    tokens = vocabulary + [t for t in added if t not in vocabulary]
    special = {t["content"] for t in state["added_tokens"] if t["special"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 4 if t in added else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_kind_equals_the_original(metadata, backend_json, text):
    original, rebuilt = (
        tokenizers.Tokenizer.from_str(backend_json),
        tokenizer_from_gguf(metadata.get, "m.gguf"),
    )
    assert rebuilt.encode(text, allow_special=True) == original.encode(text, add_special_tokens=False).ids
    assert rebuilt.decode(rebuilt.encode(text)) == text
    assert (rebuilt.bos_id, rebuilt.eos_ids, rebuilt.pad_id) == (1, (2,), 2)
    assert rebuilt.render_chat([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", "Ġ12345", "ĠabcĠĊ"[:4], "ĠĊ"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "Ġabc", "ĠĊ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "Ġabc", "ĠĊ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "Ġabc", "ĠĊ"]),
    ],
)
def test_words_are_cut_as_each_family_does(pre, pieces):
    found = [piece for piece, _ in PRE_TOKENIZERS[pre][0]().pre_tokenize_str("I'm 12345 abc \n")]
    assert found == pieces


def test_bos_is_added_where_the_file_says_so(metadata):
    assert not tokenizer_from_gguf(metadata.get, "m").adds_bos
    assert tokenizer_from_gguf((metadata | {"tokenizer.ggml.add_bos_token": True}).get, "m").adds_bos
    llama = metadata | {"tokenizer.ggml.pre": "llama-bpe"}
    assert tokenizer_from_gguf(llama.get, "m").adds_bos  # the default of that family
    assert not tokenizer_from_gguf((llama | {"tokenizer.ggml.add_bos_token": False}).get, "m").adds_bos


def test_end_of_turn_ids_are_stop_ids_too(metadata):
    assert tokenizer_from_gguf((metadata | {"tokenizer.ggml.eot_token_id": 0}).get, "m").eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' cannot be rebuilt"),
        (
            {"tokenizer.ggml.pre": "deepseek-llm"},
            "pre-tokenizer 'deepseek-llm' is not supported. Supported: smollm",
        ),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.token_type": [1]}, "366 tokens but 1 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' in tokenizer.ggml.merges is not a pair"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id=9999 is outside"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_refused(metadata, change, message):
    with pytest.raises(InputError, match=message):
        tokenizer_from_gguf((metadata | change).get, "m.gguf")


def test_a_file_without_tokenizer_gives_none():
    assert tokenizer_from_gguf({}.get, "m.gguf") is None


def test_pre_tokenizers_share_no_state():
    first, second = (PRE_TOKENIZERS["smollm"][0]() for _ in range(2))
    assert isinstance(first, pre_tokenizers.Sequence) and first is not second
