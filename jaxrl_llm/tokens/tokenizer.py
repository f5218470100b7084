"""The tokenizer: text to ids and back, and conversations to ids.

Content of messages is data: text in it that looks like a control token is encoded as ordinary text.
Nothing here adds special tokens that were not asked for, so a template that starts with BOS gives one BOS.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.template import PLAIN_TEMPLATE, render_template

__all__ = ["Tokenizer", "id_list"]

_PRIVATE_USE = range(0xE000, 0xF8FF)
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Messages = Sequence[Mapping[str, Any]]


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if b not in set(printable)]
    return table | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    return {decoder.get("type", "")}.union(*(_decoder_kinds(d) for d in decoder.get("decoders", [])))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change) -> Any:
    """`value` with `change` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change): _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(v, change) for v in value]
    return value


def id_list(value: Any) -> tuple[int, ...]:
    """Token ids of a field that may be absent, a number or a list; negative numbers mean absent."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(
        dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    )


def _there(path: Path) -> bool:
    """Whether a file exists. Raises InputError for a folder, or a link that leads nowhere, in its place."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise InputError(
            f"{path} is not a file but a folder, or a link that leads nowhere. Fetch the model again."
        )
    return False


def _check_text(text: str) -> None:
    """Raises InputError for text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text {text[max(0, error.start - 20) : error.end + 20]!a} holds half of a surrogate pair (\\ud800 to \\udfff), "
            "which is no character; remove it."
        ) from None


class Tokenizer:
    """A tokenizer in the Hugging Face `tokenizer.json` format, with special ids and a chat template.

    Args:
      backend_json: text of a `tokenizer.json`.
      special: {"bos_token": "<s>", …}, text of the special tokens by role; handed to the template.
      chat_template: Jinja text, or {name: text} with the name "default"; None = a plain fallback.
      eos_ids: ids that end a completion; default: that of `eos_token`.
      pad_id: default: that of `pad_token`.

    Attributes:
      vocab_size: largest id + 1.
      bos_id, pad_id: int or None.  eos_ids: tuple of int.
      adds_bos: whether this model expects BOS in front of plain text.

    Raises:
      InputError: the text is not a tokenizer, or a special token is not in its vocabulary.
    """

    def __init__(
        self,
        backend_json: str,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        where: str = "tokenizer",
    ):
        def backend(encode_special: bool) -> tokenizers.Tokenizer:
            try:
                built = tokenizers.Tokenizer.from_str(backend_json)
            except Exception as error:  # the library raises bare Exception on a bad file
                raise InputError(f"{where}: not a valid tokenizer.json ({error}).") from error
            built.no_truncation()
            built.no_padding()
            built.encode_special_tokens = encode_special
            return built

        self._json = backend_json
        self._plain = backend(True)  # control tokens in the text are text
        self._control = backend(False)  # control tokens in the text are control tokens
        self._vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        added = self._plain.get_added_tokens_decoder()
        self._added = {i: token for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special = dict(special or {})
        self.chat_template = chat_template
        unknown = sorted(f"{k}={v!r}" for k, v in self.special.items() if v not in self._vocabulary)
        if unknown:
            raise InputError(f"{where}: special token {', '.join(unknown)} is not in the vocabulary.")

        def ids(name: str) -> tuple[int, ...]:
            return (self._vocabulary[self.special[name]],) if name in self.special else ()

        self.bos_id: int | None = next(iter(ids("bos_token")), None)
        self.eos_ids: tuple[int, ...] = tuple(eos_ids) or ids("eos_token")
        self.pad_id: int | None = pad_id if pad_id is not None else next(iter(ids("pad_token")), None)
        prefix = self._control.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and prefix[:1] == [self.bos_id]
        state = json.loads(backend_json)
        kinds = _decoder_kinds(state.get("decoder"))
        self._kind = "bytes" if "ByteLevel" in kinds else "pieces" if "ByteFallback" in kinds else "text"
        texts = sorted((self._added[i].content for i in self._special_ids), key=len, reverse=True)
        self._special_texts = tuple(t for t in texts if t)

    @classmethod
    def from_directory(
        cls, folder: Path, *, eos_ids: Sequence[int] = (), pad_id: int | None = None
    ) -> Tokenizer | None:
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja.

        None when the folder has no tokenizer at all. Code that the files name (auto_map) is not looked at.
        """
        path = folder / "tokenizer.json"
        if not _there(path):
            others = [n for n in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / n).exists()]
            if others:
                raise InputError(
                    f"{folder} has {', '.join(others)} but no tokenizer.json, the only form that is read. "
                    "Save the tokenizer once in its fast form and put tokenizer.json beside it."
                )
            return None

        def optional(name: str) -> dict[str, Any]:
            file = folder / name
            if not _there(file):
                return {}
            try:
                value = json.loads(file.read_text("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise InputError(f"{file}: not valid JSON ({error}).") from None
            if not isinstance(value, dict):
                raise InputError(f"{file}: must hold a JSON object.")
            return value

        config = optional("special_tokens_map.json") | optional("tokenizer_config.json")
        special = {}
        for name in _SPECIAL_NAMES:
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                special[name] = text
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates
            if not all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in template):
                raise InputError(
                    f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of "
                    f"{{name, template}}, got {template!r}."
                )
            template = {t["name"]: t["template"] for t in template}
        elif template is not None and not isinstance(template, str):
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: chat_template must be a text, got {template!r}."
            )
        file = folder / "chat_template.jinja"
        if _there(file):
            try:
                template = file.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{file}: not UTF-8 ({error}).") from None
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a valid tokenizer.json ({error}).") from error
        return cls(
            text, special=special, chat_template=template, eos_ids=eos_ids, pad_id=pad_id, where=str(path)
        )

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        (folder / "tokenizer.json").write_text(self._json, "utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        config["clean_up_tokenization_spaces"] = False
        if isinstance(self.chat_template, str):
            (folder / "chat_template.jinja").write_text(self.chat_template, "utf-8")
        elif self.chat_template is not None:
            config["chat_template"] = [{"name": n, "template": t} for n, t in self.chat_template.items()]
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=1, ensure_ascii=False), "utf-8"
        )

    # ------------------------------------------------------------------------------ text and ids

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of a text, without special tokens around it.

        Args:
          allow_special: read control tokens that are written in the text; never set it for text that
            somebody else wrote.
          add_bos: put BOS in front if this model expects one (`adds_bos`).
        """
        _check_text(text)
        backend = self._control if allow_special else self._plain
        ids = backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_bos and self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self._plain.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @property
    def vocabulary(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return dict(self._vocabulary)

    def token_id(self, text: str) -> int | None:
        """Id of one entry of the vocabulary, None if it is not there."""
        return self._vocabulary.get(text)

    def is_special(self, token: int) -> bool:
        """Whether an id is a control token."""
        return int(token) in self._special_ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the text that an id stands for; b"" for an id outside the vocabulary."""
        return self._bytes_table.get(int(token), b"")

    @functools.cached_property
    def _bytes_table(self) -> dict[int, bytes]:
        table = {}
        bytes_of = _byte_of_char()
        for text, i in self._vocabulary.items():
            if i in self._added:
                table[i] = self._added[i].content.encode()
            elif self._kind == "bytes" and all(c in bytes_of for c in text):
                table[i] = bytes(bytes_of[c] for c in text)
            elif self._kind == "pieces":
                match = _BYTE_TOKEN.fullmatch(text)
                table[i] = bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode()
            else:
                table[i] = text.encode()
        return table

    # ------------------------------------------------------------------------------ conversations

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        template: str | None = None,
        default_system: bool = True,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation, as its chat template lays it out.

        Text of the messages that spells a control token stays text.

        Args:
          messages: [{"role": …, "content": …}, …].
          add_generation_prompt: end with the header of an assistant turn. Ignored with the next one.
          continue_final_message: the last message is an assistant turn that has begun; stop right after
            its text, so that the model goes on from there.
          template: Jinja text to use instead of the model's own.
          default_system: False leaves out the system turn that a template adds when there is none.
          tools, variables: handed to the template.

        Raises:
          InputError: the template refuses the messages, or cannot do what was asked.
        """
        text, guard = self._render(
            messages,
            add_generation_prompt,
            continue_final_message,
            template,
            default_system,
            tools,
            variables,
        )
        return self._encode_guarded(text, guard)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        template: str | None = None,
        default_system: bool = True,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The text that `chat` encodes, for people to read. Do not encode it: use `chat`."""
        text, guard = self._render(
            messages,
            add_generation_prompt,
            continue_final_message,
            template,
            default_system,
            tools,
            variables,
        )
        return text.replace(guard, "")

    def next_turn(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids that follow the text of an assistant turn: its end marker, then the new messages.

        The ids before them are not rendered again, so that sampled tokens stay as they were sampled.
        """
        guard, mark = self._unused_characters([messages, tools, variables], 2)
        history = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
        new = self._protected(list(messages), guard)
        text = self._fill(
            [*history, *new], add_generation_prompt, template, self._protected(tools, guard), variables
        )
        if text.count(mark) != 1:
            raise InputError(
                "chat template: it does not show an assistant turn exactly once, so turns cannot be appended."
            )
        return self._encode_guarded(text.split(mark)[1], guard)

    def _template(self, template: str | None, tools: Sequence[Any] | None) -> str:
        if template is not None:
            return template
        own = self.chat_template
        if isinstance(own, Mapping):
            chosen = own.get("tool_use") if tools else None
            chosen = chosen or own.get("default")
            if chosen is None:
                raise InputError(
                    f"chat template: none is named 'default'. Named: {', '.join(own)}. Give template=."
                )
            return chosen
        return PLAIN_TEMPLATE if own is None else own

    def _fill(self, messages, add_generation_prompt, template, tools, variables) -> str:
        return render_template(
            self._template(template, tools),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **({"bos_token": "", "eos_token": "", "add_bos": self.adds_bos} | self.special | variables),
        )

    def _render(
        self,
        messages,
        add_generation_prompt,
        continue_final_message,
        template,
        default_system,
        tools,
        variables,
    ) -> tuple[str, str]:
        """The rendered text, in which `guard` (second result) breaks control tokens that are content."""
        messages = [dict(m) for m in messages]
        if not messages:
            raise InputError("chat: no messages.")
        guard, mark, head_mark = self._unused_characters([messages, tools, variables], 3)
        messages, tools, variables = (self._protected(v, guard) for v in (messages, tools, variables))
        if continue_final_message:
            last = messages[-1]
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
                raise InputError(
                    "chat: continue_final_message needs a last message with role assistant and a text."
                )
            last["content"] += mark
            add_generation_prompt = False

        def fill(turns, generation_prompt):
            return self._fill(turns, generation_prompt, template, tools, variables)

        if default_system or messages[0].get("role") == "system":
            text = fill(messages, add_generation_prompt)
        else:
            text = self._without_system(fill, messages, add_generation_prompt, head_mark)
        if continue_final_message:
            if text.count(mark) != 1:
                raise InputError(
                    "chat: the template does not show the last message, so it cannot be continued."
                )
            text = text.split(mark)[0]
        return text, guard

    def _without_system(self, fill, messages, add_generation_prompt: bool, mark: str) -> str:
        """The rendered conversation without the system turn that the template may add by itself.

        Three kinds of templates: those that give a system text a turn of its own (that turn is cut off again), those
        that put it into the first turn of the user (Llama 2, Gemma) and those that refuse it (Mistral). The last two
        add none, which for the second is seen from what they make of a system text: it is only inserted.
        """
        system = [{"role": "system", "content": mark}]
        try:
            text = fill([*system, *messages], add_generation_prompt)
        except InputError:
            return fill(messages, add_generation_prompt)
        try:
            head = fill(system, False)
        except InputError:  # many templates refuse a conversation without a user turn
            head = None
        if head is not None and text.startswith(head) and mark not in text[len(head) :]:
            bos = self.special.get("bos_token", "")
            # BOS belongs to the conversation; a marker that opens every turn does not.
            keep = bos if bos and head.startswith(bos) and not text[len(head) :].startswith(bos) else ""
            return keep + text[len(head) :]
        plain = fill(messages, add_generation_prompt)
        before = os.path.commonprefix([plain, text])
        if plain and mark in text and text.endswith(plain[len(before) :]):
            return plain
        raise InputError(
            "chat: default_system=False does not work with this template; give template= instead."
        )

    @staticmethod
    def _unused_characters(values: Any, count: int) -> list[str]:
        used = set().union(*(set(s) for s in _strings(values)))
        free = (chr(c) for c in _PRIVATE_USE if chr(c) not in used)
        return [next(free) for _ in range(count)]

    def _protected(self, value: Any, guard: str) -> Any:
        """`value` with a guard before each character of a control token, or of the start of one at the end."""
        if not self._special_texts:
            return value

        def change(text: str) -> str:
            text = self._special_pattern.sub(lambda m: "".join(guard + c for c in m[0]), text)
            for size in range(min(len(text), len(self._special_texts[0]) - 1), 0, -1):
                # Two strings that a template joins must not make a control token.
                if any(s.startswith(text[-size:]) and len(s) > size for s in self._special_texts):
                    return text[:-size] + "".join(guard + c for c in text[-size:])
            return text

        return _mapped(value, change)

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(t) for t in self._special_texts))

    def _encode_guarded(self, text: str, guard: str) -> list[int]:
        _check_text(text)
        if guard not in text:
            return self._control.encode(text, add_special_tokens=False).ids
        # Control tokens are those of the template: they have no guard in front. The text between two of
        # them is encoded in one piece, as if the guards had never been there.
        pattern = re.compile(f"(?<!{guard})(?:{self._special_pattern.pattern})")
        ids: list[int] = []
        position, strip_left = 0, False
        for match in [*pattern.finditer(text), None]:
            span = text[position : match.start() if match else len(text)].replace(guard, "")
            token = self._added[self._vocabulary[match[0]]] if match else None
            span = span.lstrip() if strip_left else span
            span = span.rstrip() if token is not None and token.lstrip else span
            ids += self._plain.encode(span, add_special_tokens=False).ids
            if match and token is not None:
                ids.append(self._vocabulary[match[0]])
                position, strip_left = match.end(), token.rstrip
        return ids
