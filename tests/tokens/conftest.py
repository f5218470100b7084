"""Small tokenizers, trained or written in the process."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from jaxrl_llm.tokens.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is 3 + 4? It is 7.",
    "Äpfel, naïve café, 東京, Привет, 🙂 and more words; the answer is 42.\n\tindented",
] * 20

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def backend_json():
    """A byte-level BPE of 366 entries; the three specials come first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend.to_str()


@pytest.fixture(scope="session")
def chatml(backend_json):
    """A tokenizer with a ChatML template that adds a system turn, as SmolLM2 does."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return Tokenizer(backend_json, special=special, chat_template=CHATML)


@pytest.fixture(scope="session")
def with_bos(backend_json):
    """(template or None) -> a tokenizer that puts BOS in front of text by default, as Llama 3 does."""

    def make(template):
        backend = tokenizers.Tokenizer.from_str(backend_json)
        bos = "<|endoftext|>"
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
        special = {"bos_token": bos, "eos_token": "<|im_end|>"}
        return Tokenizer(backend.to_str(), special=special, chat_template=template)

    return make
