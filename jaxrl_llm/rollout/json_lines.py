"""JSON-lines files of people: one object a line, messages with roles and texts. What is wrong is named with its line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.errors import InputError

__all__ = ["Message", "check_messages", "read_objects"]

_ROLES = ("system", "user", "assistant", "tool")
# What a template would show beside the text of a message, and is not read here.
_NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
Message = Mapping[str, str]


def read_objects(path: str | pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("data file PATH, line N", object) of each line that is not blank; UTF-8 with or without a byte-order mark, any
    line ends.

    Raises:
      InputError: the file cannot be read, or a line is not a JSON object.
    """
    if "://" in str(path):
        raise InputError(
            f"data file {path}: addresses are not read; download it and give the path of the file."
        )
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # any line ends become line feeds
    except FileNotFoundError:
        raise InputError(f"data file {path} does not exist. Check the path.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"data file {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, or one that cannot be encoded
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"data file {str(path)!a} cannot be read: {reason}.") from None
    # Not splitlines(): a JSON string may hold U+2028 and its kind as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"data file {path}, line {number}"
            yield where, _object(line, where)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=_unique_keys)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}).") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}.")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError when a key is there twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return row


def check_messages(value: Any, where: str, key: str) -> tuple[dict[str, str], ...]:
    """A list of messages with roles and texts; what else a message says about itself (id, name) is left out.

    Raises:
      InputError: anything else, and messages that say more than their text (tool calls, a separate thought), which
        would be trained on or asked without it.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: {key!r} must be a list of messages that is not empty, got {value!r}.")
    for message in value:
        if (
            not isinstance(message, dict)
            or message.get("role") not in _ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise InputError(
                f"{where}: each message in {key!r} must be {{'role': one of {', '.join(_ROLES)}, 'content': text}}, "
                f"got {message!r}."
            )
        if more := [name for name in _NOT_READ if message.get(name)]:
            raise InputError(
                f"{where}: a message in {key!r} has {', '.join(more)} beside its content, which is not read; write it into "
                "the content as the model would."
            )
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
