"""Text that other programs read: YAML and shell words."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["array", "assign", "yaml_text"]

# Words that YAML readers take for text, and nothing else: they begin with a letter, and are not true, no, null, …
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./\-]*(?: [A-Za-z0-9_./\-]+)*")
_NOT_TEXT = frozenset("true false yes no on off y n null none nan inf".split())


def yaml_text(value: Any, indent: int = 0) -> str:
    """Mappings, sequences and scalars as block YAML with a line end. Texts of several lines stay readable."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{pad}{_scalar(str(key))}:{_below(item, indent)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        out = []
        for item in value:
            if isinstance(item, Mapping | list | tuple) and item:
                out.append(f"{pad}- {yaml_text(item, indent + 1).lstrip(' ')}")
            else:
                out.append(f"{pad}-{_below(item, indent)}")
        return "".join(out)
    return f"{pad}{_scalar(value)}\n"


def _below(value: Any, indent: int) -> str:
    """What stands after `key:` or `-`."""
    if isinstance(value, Mapping | list | tuple) and value:
        return "\n" + yaml_text(value, indent + 1)
    if isinstance(value, str) and _is_block(value):
        pad = "  " * (indent + 1)
        return " |\n" + "".join(f"{pad}{line}\n" if line else "\n" for line in value[:-1].split("\n"))
    return f" {_scalar(value)}\n"


def _is_block(text: str) -> bool:
    """Whether a literal block gives it back: lines of printable characters, a line end at the end, no blanks at the beginning."""
    return (
        text.count("\n") > 1
        and text.endswith("\n")
        and not text.endswith("\n\n")
        and text[0] not in " \n\t"
        and all(character.isprintable() for character in text.replace("\n", ""))
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
            return value
        return '"' + "".join(map(_escaped, value)) + '"'
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TypeError(f"{type(value).__name__} has no form in YAML here")


def _escaped(character: str) -> str:
    """As YAML reads it in double quotes: as in JSON, but for characters beyond 16 bits, which are two in JSON."""
    if character == "\x7f":  # the one that JSON leaves as it is, and YAML does not allow
        return "\\x7F"
    return f"\\U{ord(character):08X}" if ord(character) > 0xFFFF else json.dumps(character)[1:-1]


def assign(**values: str | int) -> str:
    """Bash variables, one a line."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def array(name: str, items: Sequence[str]) -> str:
    """A bash array, one item a line."""
    return f"{name}=(\n" + "".join(f"  {shlex.quote(item)}\n" for item in items) + ")\n"
