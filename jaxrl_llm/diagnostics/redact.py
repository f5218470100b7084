"""Keeps secrets out of everything that a run writes: configs, snapshots, trackers, logs, reports.

Standard library only, so that any part may use it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

__all__ = [
    "REDACTED",
    "hide_credentials",
    "hide_environment_secrets",
    "redact",
    "redact_text",
    "secret_key",
]

REDACTED = "***"

_SECRET_WORDS = (
    "api_key",
    "apikey",
    "access_key",
    "private_key",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
    "bearer",
)
# A key that ends in "token" is a secret, unless the token is one of a vocabulary.
_VOCABULARY_TOKENS = frozenset(
    "bos eos pad unk sep cls mask stop start end image audio tool think prompt special prefix suffix"
    " first last next per begin beginning".split()
)
# Tokens of a service; the plural too, where `tokens` alone are counted.
_SERVICE_TOKENS = frozenset(
    "hf hub huggingface wandb github gitlab slack api access auth refresh bearer bot session secret".split()
)
# Words before `key`, `pass` and `pw` in the name of a setting. In the name of an environment variable nearly any does.
_KEY_OWNERS = frozenset(
    "openai anthropic wandb hf huggingface aws azure gcp google gemini mistral cohere groq openrouter deepseek ssh"
    " encryption signing service account master license".split()
)
_PASS_OWNERS = frozenset("db database my user smtp mail ftp root admin login proxy".split())
_OPEN_KEYS = frozenset("public sort primary foreign cache group answer prompt text".split())
_URL_OWNERS = frozenset(
    "database db postgres postgresql mysql mongo mongodb redis amqp broker sentry webhook".split()
)
# The second form is for a password with a slash in it; a number there would be a port.
_URL_USER = re.compile(
    r"(?P<scheme>(?<![A-Za-z0-9+.\-])[A-Za-z0-9+.\-]+://|(?<![A-Za-z0-9+.\-:/])//(?=[^/\s:@'\"]{1,99}:[^/\s'\"]{1,999}@))"
    r"(?:[^/\s'\"]{1,999}|[^/\s:@'\"]{1,99}:(?!\d+/)[^\s'\"]{1,199}?)@"
)
# name=value, name = value, "name": "value", a YAML line `name: value`, {name: value}; not prose with a colon.
_NAME = re.compile(
    r"""(?mx)
    ^[ \t]* (?:-[ \t]+)* (?P<yaml>\w[\w.\-]*) [ \t]*:(?:[ \t]+|$)
    | ["'] (?P<json>[\w.\-]+) ["'] \s*:\s*
    | [{,] [ \t]* (?P<flow>[\w.\-]+) [ \t]*:[ \t]+
    | (?<![\w.\-]) (?P<equals>[\w.\-]+) [ \t]*=(?!=)[ \t]*
    | (?<![\w.\-]) --(?P<option>[\w.\-]+) [ ]+ (?=[^\s\-])
    """
)
_QUOTED = re.compile(r"""(?P<open>["'])(?P<inside>(?:\\.|(?!(?P=open))[^\n\\])*)(?P<close>(?P=open)?)""")
_BRACKETS = re.compile(r"""[\[\]{}]|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_LONGEST_BRACKETS = 2000  # characters
_BARE = re.compile(r"""[^\s"'&,;}\])]+""")
_OF_FLOW = re.compile(r"[^,}\n]+")
_OF_OPTION = re.compile(r"\S+")
_NOTHING = frozenset("None null True False true false".split())
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{6,}")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?!-----).){0,9999}(?:-----END [A-Z ]{0,40}-----)?", re.DOTALL
)
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{6,}|sk-[A-Za-z0-9_\-]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_[A-Za-z0-9_]{12,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[A-Za-z0-9_\-]{20,}|xox[abprs]-[A-Za-z0-9\-]{8,}|ya29\.[A-Za-z0-9_\-]{8,}"
    r"|glpat-[A-Za-z0-9_\-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_\-]{16,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}"  # a JSON web token
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{8,})"
)
_SHORTEST_ENVIRONMENT_SECRET = 6  # shorter values would blank out ordinary words


def _words(key: str) -> list[str]:
    """The words of the last dotted part of a name: `logger.apiKey` is api, key."""
    last = key.rsplit(".", 1)[-1]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower().replace("-", "_")
    return [word for word in name.split("_") if word]


@functools.lru_cache(maxsize=4096)
def secret_key(key: str) -> bool:
    """True when a field of this name (its last dotted part) holds a secret.

    `logger.api_key`, `api_keys`, `hf_token`, `token` and `cookie` do; `max_tokens`, `eos_token` and `answer_key` do not.
    A name in capitals is that of an environment variable, where more words mean a secret: `OPENAI_KEY`, `DB_PASS`,
    `DATABASE_URL`.
    """
    words = _words(key)
    if not words:
        return False
    name, last = "_".join(words), words[-1]
    before = words[-2] if len(words) > 1 else ""
    if any(f"_{word}_" in f"_{name}_" or name.endswith((word, f"{word}s")) for word in _SECRET_WORDS):
        return True
    if last in ("auth", "cookie", "cookies", "pw"):
        return True
    if name.endswith("token"):
        stem = name[: -len("token")].rstrip("_").rsplit("_", 1)[-1]
        return stem not in _VOCABULARY_TOKENS
    if last == "tokens":
        return before in _SERVICE_TOKENS
    variable = key.rsplit(".", 1)[-1].isupper()
    if last in ("key", "keys"):
        return before in _KEY_OWNERS or (variable and bool(before) and before not in _OPEN_KEYS)
    if last in ("pass", "pwd"):  # PWD is the working directory
        return before in _PASS_OWNERS or (variable and (bool(before) and before != "old" or last == "pass"))
    return variable and last in ("url", "uri", "dsn") and (before in _URL_OWNERS or last == "dsn")


def hide_environment_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables (default: of `os.environ`)."""
    for value in _environment_secrets(os.environ if environment is None else environment):
        text = text.replace(value, REDACTED)
    return text


def hide_credentials(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without secret environment variables and without the user part of URLs.

    For prose, such as prompts and completions: `redact_text` would also blank out what looks like an assignment.
    """
    text = hide_environment_secrets(text, environment)
    return _URL_USER.sub(lambda m: f"{m['scheme']}{REDACTED}@", text)


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables, URL credentials and known key shapes.

    Args:
      text: a log line, a traceback, a command line.
      environment: variables to look for; default `os.environ`. A variable counts when `secret_key` says so.
    """
    text = hide_credentials(text, environment)
    text = _AUTHORIZATION.sub(lambda m: f"{m[1]} {REDACTED}", text)
    text = _KNOWN_SHAPES.sub(REDACTED, _PRIVATE_KEY.sub(REDACTED, text))
    return _hide_assignments(text)


def _hide_assignments(text: str) -> str:
    """`text` without the values that stand beside the name of a secret."""
    pieces, at = [], 0
    while (match := _NAME.search(text, at)) is not None:
        pieces.append(text[at : match.end()])
        at = match.end()
        kind = str(match.lastgroup)
        if secret_key(match[kind]):
            hidden, at = _hidden_value(text, at, match, kind)
            pieces.append(hidden)
    return "".join(pieces) + text[at:]


def _hidden_value(text: str, at: int, name: re.Match[str], kind: str) -> tuple[str, int]:
    """What is written in place of the value that begins at `at`, and where that ends."""
    quoted = _QUOTED.match(text, at)
    around = text[name.start(kind) - 1] if name.start(kind) else ""
    if quoted is not None and (quoted["close"] or kind != "yaml"):
        shown = REDACTED if quoted["inside"] else ""
        return quoted["open"] + shown + quoted["close"], quoted.end()
    if text[at : at + 1] in ("[", "{"):
        return REDACTED, _end_of_brackets(text, at)
    if kind == "yaml":
        return _hidden_block(text, at, name.start(kind) - (text.rfind("\n", 0, name.start(kind)) + 1))
    pattern = {"flow": _OF_FLOW, "json": _OF_FLOW, "option": _OF_OPTION}.get(kind, _BARE)
    if kind == "equals" and around in ("'", '"'):  # 'name=some words', as a shell quotes it
        pattern = re.compile(rf"[^{around}\n]+")
    value = pattern.match(text, at)
    if value is None or value[0].strip() in _NOTHING:
        return "", at
    return REDACTED, value.end()


def _hidden_block(text: str, at: int, column: int) -> tuple[str, int]:
    """The same of what stands beside and below a key of block YAML, which begins in this column of its line.

    The value has all of the line, whatever blanks are in it, and the lines below that are indented more than the key:
    the text after | or >, the rest of a text that goes on, the items of a list.
    """
    end = _end_of_line(text, at)
    first = text[at:end].split()
    if first and first[0] in _NOTHING:
        return "", at
    line = end
    while line < len(text):
        begin, line = line + 1, _end_of_line(text, line + 1)
        content = text[begin:line].lstrip(" \t")
        indent = line - begin - len(content)
        # The dashes of a list may stand right below its key.
        if indent > column or (indent == column and not first and content.startswith("- ")):
            end = line if content.strip() else end
        elif content.strip():
            break
    if not text[at:end].strip():
        return "", at
    return REDACTED if text[at - 1] in " \t" else f" {REDACTED}", end


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _end_of_brackets(text: str, at: int) -> int:
    """Where the list or mapping that begins at `at` ends; where none does, the line."""
    depth = 0
    for found in _BRACKETS.finditer(text, at, at + _LONGEST_BRACKETS):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return _end_of_line(text, at)


def redact(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of a config (nested dicts, lists, scalars) with every secret replaced by "***".

    Whatever stands under a secret key is replaced whole, lists and mappings too, but not None, booleans and what is
    empty; every other string goes through `redact_text`. All else stays, so the shape of the config is kept.
    """
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if isinstance(key, str) and secret_key(key) and _is_secret(key, item)
            else redact(item, environment)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redact(item, environment) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return redact_text(value, environment)
    return value


def _is_secret(key: str, item: Any) -> bool:
    """Whether a value under a secret key is one: not None, a flag, nothing, or the id of a token of some vocabulary."""
    if isinstance(item, bool) or not item:
        return False
    words = _words(key)
    if isinstance(item, int | float) and words[-1] == "token" and len(words) > 1:
        return words[-2] in _SERVICE_TOKENS
    return True


def _environment_secrets(environment: Mapping[str, str]) -> list[str]:
    values = {
        spelled
        for name, value in environment.items()
        if len(value) >= _SHORTEST_ENVIRONMENT_SECRET and secret_key(name)
        for spelled in _spellings(value)
    }
    return sorted(values, key=len, reverse=True)


@functools.lru_cache(maxsize=256)
def _spellings(value: str) -> frozenset[str]:
    """A value as it stands in plain text, JSON, Python, URLs and headers."""
    raw = value.encode("utf-8", "surrogateescape")
    quoted = urllib.parse.quote(raw, safe="")
    return frozenset(
        (
            value,
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
            quoted,
            quoted.replace("%20", "+"),
            urllib.parse.quote(raw),
            base64.b64encode(raw).decode(),
        )
    )
