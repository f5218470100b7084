"""Case X04: secrets are removed, and nothing else is."""

from __future__ import annotations

import pytest

from jaxrl_llm.diagnostics.redact import redact, redact_text, secret_key

ENVIRONMENT = {"HF_TOKEN": "hf_FAKE123", "WANDB_API_KEY": "fakekey456", "PATH": "/usr/bin", "API_KEY": "x"}


@pytest.mark.parametrize(
    "key",
    ["api_key", "logger.api_key", "WANDB_API_KEY", "apiKey", "hf_token", "HF_TOKEN", "token", "hub.token", "auth-token",
     "password", "db_password", "client_secret", "AWS_SECRET_ACCESS_KEY", "private_key", "authorization", "credentials"],
)  # fmt: skip
def test_secret_names(key):
    assert secret_key(key)


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokens", "eos_token", "pad_token", "bosToken", "tokenizer", "key", "keep_every", "seed", "stop_token",
     "keys", "special_token", "logprob_reference", "monkey", "secretary"],
)  # fmt: skip
def test_names_that_only_look_like_one(key):
    assert not secret_key(key)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("git clone http://user:pw@host/x", "git clone http://***@host/x"),
        ("jaxrl train c.yaml --set logger.api_key=abc -v", "jaxrl train c.yaml --set logger.api_key=*** -v"),
        ("run --api-key abc --max-tokens 5", "run --api-key *** --max-tokens 5"),
        ("{'token': 'abcd', \"api_key\": \"x\"}", "{'token': '***', \"api_key\": \"***\"}"),
        ("a:\n  - api_key: 'xyz'\n  b: 5\n", "a:\n  - api_key: '***'\n  b: 5\n"),
        ("https://h/x?token=abc&n=1", "https://h/x?token=***&n=1"),
        ("Authorization: Bearer abcdefgh123", "Authorization: ***"),
        ("KeyError: fakekey456 in fakekey456", "KeyError: *** in ***"),
        ("using hf_FAKE123", "using ***"),
        ("using hf_abcdefghij", "using ***"),
    ],
)
def test_secrets_in_text(text, expected):
    result = redact_text(text, ENVIRONMENT)
    assert result.replace("Authorization: *** ***", "Authorization: ***") == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=5 eos_token=</s>",
        "The secret: eggs. Answer: 5",
        "mail a@b.com, see https://example.org/a@b",
        "token: null is fine as a prose word",
        "extra hf_ and sk-learn",
        "api_key=None",
    ],
)
def test_ordinary_text_stays(text):
    assert redact_text(text, ENVIRONMENT) == text


def test_configs_keep_their_shape():
    config = {
        "logger": {"api_key": "fakekey", "project": "p", "url": "http://u:pw@h"},
        "max_tokens": 5,
        "eos_token": "<eos>",
        "token": None,
        "password": "",
        "list": [{"hf_token": "t"}, "hf_FAKE123", 1.5, True],
        3: ("a", "fakekey456"),
    }
    assert redact(config, ENVIRONMENT) == {
        "logger": {"api_key": "***", "project": "p", "url": "http://***@h"},
        "max_tokens": 5,
        "eos_token": "<eos>",
        "token": None,
        "password": "",
        "list": [{"hf_token": "***"}, "***", 1.5, True],
        3: ("a", "***"),
    }
    assert config["logger"]["api_key"] == "fakekey"


def test_short_values_of_the_environment_do_not_blank_out_words():
    assert redact_text("max x", ENVIRONMENT) == "max x"
