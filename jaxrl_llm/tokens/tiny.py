"""The tokenizer of the tiny preset: one character, one token, 128 ids."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["tiny_tokenizer"]

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}  # ids 0, 1, 2


def _character(i: int) -> str:
    """ASCII characters keep their code; the other control codes show as Unicode's pictures of them."""
    if i in (9, 10) or 32 <= i < 127:
        return chr(i)
    return "\u2421" if i == 127 else chr(0x2400 + i)


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Ids 0, 1, 2 are pad, bos, eos; 3…127 are ASCII codes. Any other character encodes as "?"."""
    vocabulary = {text: i for i, text in enumerate(_SPECIAL.values())}
    vocabulary |= {_character(i): i for i in range(3, 128)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL.values()])
    return Tokenizer(backend.to_str(), special=_SPECIAL, chat_template=_TEMPLATE)
