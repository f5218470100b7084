"""Keeps secrets out of everything that a run writes: configs, snapshots, trackers, logs, reports.

Standard library only, so that any part may use it.
"""

from __future__ import annotations

import os
import re
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
_URL_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)[^/\s@'\"]+@")
# name=value, "name": "value", a YAML line `name: value`; not prose with a colon.
_ASSIGNMENT = re.compile(
    r"""(?mx)
    (?P<before> ^[ \t-]* (?P<yaml>[\w.\-]+) [ \t]*:[ \t]+ ["']?
      | ["'] (?P<json>[\w.\-]+) ["'] \s* : \s* ["']?
      | (?P<name>[\w.\-]+) = ["']? )
    (?P<value>[^\s"'&,;}\])]+)
    """
)
_OPTION = re.compile(r"(?P<before>--(?P<name>[\w.\-]+) +)(?P<value>[^\s\-]\S*)")
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{6,}")
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{6,}|sk-[A-Za-z0-9_\-]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_[A-Za-z0-9_]{12,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[A-Za-z0-9_\-]{20,}|xox[abprs]-[A-Za-z0-9\-]{8,}|ya29\.[A-Za-z0-9_\-]{8,})"
)
_SHORTEST_ENVIRONMENT_SECRET = 6  # shorter values would blank out ordinary words


def secret_key(key: str) -> bool:
    """True when a field of this name (its last dotted part) holds a secret.

    `logger.api_key`, `WANDB_API_KEY`, `hf_token` and `token` do; `max_tokens` and `eos_token` do not.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rsplit(".", 1)[-1]).lower().replace("-", "_")
    padded = f"_{name}_"
    if any(f"_{word}_" in padded or name.endswith(word) for word in _SECRET_WORDS):
        return True
    if name.endswith("token"):
        before = name[: -len("token")].rstrip("_").rsplit("_", 1)[-1]
        return before not in _VOCABULARY_TOKENS
    return False


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
    text = _KNOWN_SHAPES.sub(REDACTED, text)

    def assignment(match: re.Match[str]) -> str:
        groups = match.groupdict()
        name = groups.get("yaml") or groups.get("json") or groups["name"]
        if not secret_key(name) or match["value"] in ("None", "null", "True", "False", "true", "false"):
            return match[0]
        return match["before"] + REDACTED

    return _OPTION.sub(assignment, _ASSIGNMENT.sub(assignment, text))


def redact(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of a config (nested dicts, lists, scalars) with every secret replaced by "***".

    A string under a secret key is replaced whole; every other string goes through `redact_text`. Keys,
    numbers, booleans and None stay, so the shape of the config is kept.
    """
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if isinstance(key, str) and isinstance(item, str | bytes) and item and secret_key(key)
            else redact(item, environment)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redact(item, environment) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return redact_text(value, environment)
    return value


def _environment_secrets(environment: Mapping[str, str]) -> list[str]:
    values = {
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST_ENVIRONMENT_SECRET and secret_key(name)
    }
    return sorted(values, key=len, reverse=True)
