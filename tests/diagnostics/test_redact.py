"""Case X04: secrets are removed, and nothing else is."""

from __future__ import annotations

import time

import pytest

from jaxrl_llm.config import Config, as_data, flatten
from jaxrl_llm.diagnostics.catalog import METRICS
from jaxrl_llm.diagnostics.redact import redact, redact_text, secret_key

ENVIRONMENT = {"HF_TOKEN": "hf_FAKE123", "WANDB_API_KEY": "fakekey456", "PATH": "/usr/bin", "API_KEY": "x"}


@pytest.mark.parametrize(
    "key",
    ["api_key", "logger.api_key", "WANDB_API_KEY", "apiKey", "hf_token", "HF_TOKEN", "token", "hub.token", "auth-token",
     "password", "db_password", "client_secret", "AWS_SECRET_ACCESS_KEY", "private_key", "authorization", "credentials",
     "OPENAI_KEY", "DB_PASS", "MY_PW", "DATABASE_URL", "AUTH", "COOKIE", "DB_PWD", "SENTRY_DSN", "openai_key", "db_pass",
     "passwords", "api_keys", "secrets", "hf_tokens", "access_tokens", "cookies"],
)  # fmt: skip
def test_secret_names(key):
    assert secret_key(key)


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokens", "eos_token", "pad_token", "bosToken", "tokenizer", "key", "keep_every", "seed", "stop_token",
     "keys", "special_token", "logprob_reference", "monkey", "secretary", "row_tokens", "prompt_tokens", "max_prompt_tokens", "trained_tokens",
     "tokens_per_second", "optimizer/trained_tokens", "answer_key", "sort_keys", "PWD", "OLDPWD", "PUBLIC_KEY", "KEY",
     "pass_at_k", "forward_pass", "url", "base_url", "author", "path", "PATH", "", "___", "."],
)  # fmt: skip
def test_names_that_only_look_like_one(key):
    assert not secret_key(key)


def test_no_setting_and_no_figure_looks_like_a_secret():
    names = [*flatten(as_data(Config())), *METRICS]
    assert [name for name in names if secret_key(name) or secret_key(name.rsplit("/", 1)[-1])] == []
    assert redact(as_data(Config()), {}) == as_data(Config())


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
        ("{api_key: othersecret1}", "{api_key: ***}"),
        ("{a: 1, api_key: other secret1, b: 2}", "{a: 1, api_key: ***, b: 2}"),
        ("api_key = othersecret1", "api_key = ***"),
        ("api_key = 'other secret1'", "api_key = '***'"),
        ("{'api_key': 'other secret1', 'b': 2}", "{'api_key': '***', 'b': 2}"),
        (r'{"password": "a\"b c"}', '{"password": "***"}'),
        ('{"api_keys": ["one", "two"], "b": 2}', '{"api_keys": ***, "b": 2}'),
        ("jaxrl train --set 'logger.api_key=two words' -v", "jaxrl train --set 'logger.api_key=***' -v"),
        ("run --api-key 'two words' -v", "run --api-key '***' -v"),
        ("http://user:p@w@host", "http://***@host"),
        ("http://user:p/w@host/x", "http://***@host/x"),
        ("see...http://u:pw@host", "see...http://***@host"),
        ("OPENAI_KEY=abc DB_PASS=def", "OPENAI_KEY=*** DB_PASS=***"),
        ("Cookie: a=b; c=d\nHost: h", "Cookie: ***\nHost: h"),
        ("x=1,token=abc", "x=1,token=***"),
        ("token: abc def ghi\nb: 5", "token: ***\nb: 5"),
        ("token: abc, def\n  ghi\nb: 5", "token: ***\nb: 5"),
        ('token: "abc def" # mine\nb: 5', 'token: "***" # mine\nb: 5'),
        ("token: 'abc\n  def'\nb: 5", "token: ***\nb: 5"),
        ("hub:\n  token: |\n    abc def\n\n    ghi\n\n  b: 5\n", "hub:\n  token: ***\n\n  b: 5\n"),
        ("- password: >-\n    one two\n    three\n- b: 5", "- password: ***\n- b: 5"),
        ("- password: |\n   one two\n  b: 5", "- password: ***\n  b: 5"),
        ("token:\n  abc def\nb: 5", "token: ***\nb: 5"),
        ("api_keys:\n- one two\n- three\nb: [1]", "api_keys: ***\nb: [1]"),
        ("api_keys:\n  - one\n  - k: two\nb: 5", "api_keys: ***\nb: 5"),
        ('{"api_keys": [\n  "one",\n  ["two]", 3]\n], "b": 2}', '{"api_keys": ***, "b": 2}'),
        ('"token": abc def\nb: 5', '"token": ***\nb: 5'),
        ("x -----BEGIN RSA PRIVATE KEY-----\nMII\nabc=\n-----END RSA PRIVATE KEY----- y", "x *** y"),
        ("see //user:pw@host/x", "see //***@host/x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEFghi_jkl", "***"),
        ("to https://hooks.slack.com/services/T0/B0/XXXX now", "to https://*** now"),
        ("glpat-abcdefghij1234567890", "***"),
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
        "token:\nb: 5",
        "token: \n\nb: 5",
        "token: null\n  b: 5",
        "max_tokens: |\n  5 words",
        "api_key = None, token == 5",
        "{max_tokens: 5, eos_token: 7, row_tokens: 64}",
        "max_tokens = 5, prompt_tokens = 7",
        "https://example.org:8080/a@b",
        "password=''",
        "PWD=/home/someone/project",
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


def test_whatever_is_under_a_secret_key_is_hidden():
    config = {
        "api_keys": ["one", "two"],
        "token": 12345,
        "secret": {"a": 1},
        "passwords": "x",
        "auth": ("u", "p"),
        "eos_token": 7,
        "newline_token": 198,
        "hub_token": True,
        "credentials": [],
        "max_tokens": 64,
        "rollout": {"row_tokens": 5, "prompt_tokens": [1, 2]},
    }
    hidden = ("api_keys", "token", "secret", "passwords", "auth")
    assert redact(config, {}) == {k: "***" if k in hidden else v for k, v in config.items()}


def test_values_of_the_environment_are_hidden_wherever_they_stand():
    secrets = {
        "OPENAI_KEY": "openai-value", "DB_PASS": "hunter22", "MY_PW": "pw-value", "DATABASE_URL": "db.internal:5432/x",
        "AUTH": "auth-value", "COOKIE": "cookie-value",
    }  # fmt: skip
    plain = {"PWD": "/home/someone", "TOKENIZERS_PARALLELISM": "disabled", "EDITOR": "editor-value"}
    for value in secrets.values():
        assert redact_text(f"so {value} it is", secrets | plain) == "so *** it is"
    for value in plain.values():
        assert redact_text(f"so {value} it is", secrets | plain) == f"so {value} it is"


@pytest.mark.parametrize(
    "spelled",
    [
        'p&s "w"\\ rd9\u00e9',
        r"p&s \"w\"\\ rd9\u00e9",  # JSON
        r"p&s \"w\"\\ rd9" + "\u00e9",
        repr('p&s "w"\\ rd9\u00e9')[1:-1],
        "p%26s%20%22w%22%5C%20rd9%C3%A9",  # in a URL
        "p%26s+%22w%22%5C+rd9%C3%A9",
        "cCZzICJ3IlwgcmQ5w6k=",  # in a header
    ],
)
def test_values_of_the_environment_are_hidden_however_they_are_spelled(spelled):
    assert redact_text(f"so {spelled} it is", {"MY_PASSWORD": 'p&s "w"\\ rd9\u00e9'}) == "so *** it is"


def test_long_texts_take_no_time():
    begin = time.process_time()
    for piece in (
        "a",
        "a.",
        "-",
        "- ",
        "http://",
        "http://a:",
        "a=",
        "{a, ",
        "'",
        "token=",
        "'a",
        "token=[",
        "token: [",
        "token:\n",
        "token: a\n b\n",
        "-----BEGIN PRIVATE KEY-----",
    ):
        redact_text(piece * 4000, {})
    assert time.process_time() - begin < 2.0


def test_short_values_of_the_environment_do_not_blank_out_words():
    assert redact_text("max x", ENVIRONMENT) == "max x"
