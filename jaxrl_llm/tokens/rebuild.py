"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.tokenizer import Tokenizer, id_list

__all__ = ["PRE_TOKENIZERS", "tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str):
    pattern = Regex(_WORDS.replace("{DIGITS}", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> (pre-tokenizer, Unicode normal form, whole words are looked up before merging)
PRE_TOKENIZERS: dict[str, tuple[Callable[[], Any], str | None, bool]] = {
    "smollm": (_smollm, None, False),
    "gpt-2": (_gpt2, None, False),
    "llama-bpe": (lambda: _words("{1,3}"), None, True),
    "qwen2": (lambda: _words(""), "NFC", False),
}


def tokenizer_from_gguf(get: Callable[..., Any], where: str) -> Tokenizer | None:
    """The tokenizer that `tokenizer.ggml.*` describes; None when the file has none.

    Args:
      get: `get(key, default=None)` over the metadata.

    Raises:
      InputError: a kind of tokenizer that cannot be rebuilt exactly, by name; inconsistent lists.
    """
    kind = get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind != "gpt2":
        raise InputError(
            f"{where}: tokenizer model {kind!r} cannot be rebuilt. Supported in GGUF files: gpt2 (byte-level BPE). "
            "Use the safetensors release of this model, which brings tokenizer.json."
        )
    pre = get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise InputError(
            f"{where}: pre-tokenizer {pre!r} is not supported. Supported: {', '.join(PRE_TOKENIZERS)}. "
            "Use the safetensors release of this model, which brings tokenizer.json."
        )
    build, form, whole_words = PRE_TOKENIZERS[pre]
    tokens, merges = get("tokenizer.ggml.tokens") or [], get("tokenizer.ggml.merges") or []
    types = get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        raise InputError(f"{where}: {len(tokens)} tokens but {len(types)} token types.")
    vocabulary = {text: i for i, (text, t) in enumerate(zip(tokens, types, strict=True)) if t != _UNUSED}
    if len(vocabulary) != sum(t != _UNUSED for t in types):
        raise InputError(f"{where}: an entry of tokenizer.ggml.tokens occurs twice.")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    broken = next((m for m, p in zip(merges, pairs, strict=True) if len(p) != 2), None)
    if broken is not None:
        raise InputError(f"{where}: {broken!r} in tokenizer.ggml.merges is not a pair.")
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=whole_words)
    except Exception as error:  # the library raises bare Exception on a merge outside the vocabulary
        raise InputError(f"{where}: tokenizer.ggml.merges do not fit the tokens ({error}).") from error

    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC() if form == "NFC" else None
    backend.pre_tokenizer = build()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    backend.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _USER_DEFINED
        ]
    )

    def token(name: str) -> str | None:
        found = id_list(get(f"tokenizer.ggml.{name}_token_id"))
        if found and found[0] >= len(tokens):
            raise InputError(f"{where}: {name}_token_id={found[0]} is outside the {len(tokens)} tokens.")
        return tokens[found[0]] if found and tokens[found[0]] in vocabulary else None

    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {key: text for key, name in names.items() if (text := token(name)) is not None}
    bos = special.get("bos_token")
    if bos is not None and get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]),
            ]
        )
    eos = id_list([get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")])
    template = get("tokenizer.chat_template")
    return Tokenizer(backend.to_str(), special=special, chat_template=template, eos_ids=eos, where=where)
