"""Chat templates: Jinja in a sandbox, with the options and helpers that published templates expect."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jaxrl_llm.errors import InputError

__all__ = ["PLAIN_TEMPLATE", "render_template"]

# For models that bring no template: role and content in plain words, and the BOS that the tokenizer
# itself would put in front.
PLAIN_TEMPLATE = (
    "{% if add_bos %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


_MOST = (
    1_000_000  # characters of a text, entries of a list, bits of a number that a template may multiply up to
)


def _size(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else len(value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a template cannot fill the memory with one product or power either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        sized = isinstance(left, int | str | list | tuple) and isinstance(right, int | str | list | tuple)
        if sized:
            times = [abs(v) for v in (left, right) if isinstance(v, int)]
            texts = [len(v) for v in (left, right) if not isinstance(v, int)]
            if operator == "**" and len(times) == 2:
                size = _size(left) * times[1]
            elif operator == "*" and len(times) == len(texts) == 1:
                size = times[0] * texts[0]
            else:
                size = _size(left) + _size(right)
            if size > _MOST:
                raise SecurityError(f"{operator} would give more than {_MOST:,} characters, entries or bits")
        return super().call_binop(context, operator, left, right)


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller) -> str:
        return caller()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False
) -> str:
    # Jinja's own filter sorts keys and escapes HTML, which changes the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Raises:
      InputError: the template does not compile, refuses the messages, or tries to leave the sandbox.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=None,
            **variables,
        )
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise InputError(f"chat template: {type(error).__name__}: {error}") from error
