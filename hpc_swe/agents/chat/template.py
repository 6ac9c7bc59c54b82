"""Render a model's chat template with a placeholder for each text of people, tools and the policy.

The template sees only placeholders, and the rendering is split at them. So the template's own text, which
may contain control tokens, stays apart from all other text, which may not.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_swe.base.errors import AgentError, ConfigError, boundary
from hpc_swe.base.records import Message, ToolCall

_MARK = f"slot{secrets.token_hex(8)}"
_SLOT = re.compile(rf"{_MARK}\.(\d+);")
_SCHEMA = frozenset(
    re.findall(
        r"\w+",
        "type function name description parameters properties required items enum default anyOf oneOf allOf "
        "additionalProperties string integer number boolean object array null",
    )
)
"""Words of a tool's schema that templates test for; all other strings are the client's and are hidden."""


class _Slots:
    """Number the hidden texts of one rendering."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._names: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Return a placeholder for a text; empty text stays empty, since templates test for it."""
        if not text:
            return ""
        self.texts.append(text)
        return f"{_MARK}.{len(self.texts) - 1};"

    def hide_name(self, text: str) -> str:
        """Hide a string of a tool's JSON unless it is a word of schemas; equal strings stay equal."""
        if text in _SCHEMA:
            return text
        return self._names.get(text) or self._names.setdefault(text, self.hide(text))

    def reveal_json(self, text: str) -> str:
        """Fill in the placeholders of a JSON text."""
        return _SLOT.sub(lambda match: _dumps(self.texts[int(match[1])])[1:-1], text)


@dataclass(frozen=True)
class Rendering:
    """Hold template and hidden texts in turn: parts[0] is the template's, parts[1] the text of slots[0]."""

    parts: list[str]
    slots: list[int]

    @property
    def flagged(self) -> list[tuple[str, bool]]:
        """Pair each part with whether the template wrote it."""
        return [(part, index % 2 == 0) for index, part in enumerate(self.parts)]

    @property
    def contents(self) -> list[str]:
        """Return the hidden texts in order."""
        return self.parts[1::2]

    @property
    def text(self) -> str:
        """Return the whole rendering."""
        return "".join(self.parts)

    def cut(self, slot: int) -> "tuple[Rendering, Rendering]":
        """Split into the parts before and after a slot; raise ConfigError unless it was rendered once."""
        if self.slots.count(slot) != 1:
            raise ConfigError(f"it renders one message {self.slots.count(slot)} times")
        at = self.slots.index(slot)
        before = Rendering(self.parts[: 2 * at + 1], self.slots[:at])
        return before, Rendering(self.parts[2 * at + 2 :], self.slots[at + 1 :])


class ChatTemplate:
    """Hold the compiled template and the run's arguments for it."""

    def __init__(self, folder: Path, arguments: Mapping[str, object]) -> None:
        source, special = _read(folder)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is not valid Jinja: {error}") from None
        self._arguments = special | dict(arguments)

    def render(
        self, messages: Sequence[Message], tools: str, generate: bool, served: bool = False
    ) -> Rendering:
        """Render messages, or raise AgentError if the template refuses them.

        `tools` is the JSON list of an OpenAI request, or empty. With `generate` the opening of the next
        answer follows. With `served` the template sees the marks of thoughts in earlier answers: it may drop
        these thoughts, and the marks are control tokens, as they are for an engine that renders chats itself.
        """
        slots = _Slots()
        try:
            text = self._template.render(
                self._arguments,
                messages=[_for_template(message, slots, served) for message in messages],
                tools=_map_strings(json.loads(tools), slots.hide_name) if tools else None,
                add_generation_prompt=generate,
                hpc_swe_slots=slots,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise AgentError(f"the chat template refuses the messages: {error}") from error
        parts = _SLOT.split(text)
        numbers = [int(number) for number in parts[1::2]]
        parts[1::2] = [slots.texts[number] for number in numbers]
        return Rendering(parts, numbers)


def _read(folder: Path) -> tuple[str, dict[str, object]]:
    with boundary(ConfigError, f"read the chat template of {folder}"):
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{folder} has neither chat_template.jinja nor a chat_template (called default, where there are "
            f"several) in {path.name}; give it a chat_template.jinja: see docs/models.md"
        )
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    return source, {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items()}


def _for_template(message: Message, slots: _Slots, served: bool) -> dict[str, object]:
    thinks = served and message.role == "assistant" and "</think>" in message.content
    content = _hide_thought(message.content, slots) if thinks else slots.hide(message.content)
    fields: dict[str, object] = {"role": message.role, "content": content}
    if message.tool_calls:
        fields["tool_calls"] = [_call_for_template(call, slots) for call in message.tool_calls]
    return fields


def _hide_thought(content: str, slots: _Slots) -> str:
    """Hide an answer but for the marks of its thought and the newlines beside them, which templates strip.

    The expression contains no newlines: with a missing mark it would take hours over many of them.
    """
    parts = re.split(r"(</?think>)", content)
    for number in range(0, len(parts), 2):
        text = parts[number].lstrip("\n") if number else parts[number]
        kept = text if number == len(parts) - 1 else text.rstrip("\n")
        ends = "\n" * (len(text) - len(kept))
        parts[number] = "\n" * (len(parts[number]) - len(text)) + slots.hide(kept) + ends
    return "".join(parts)


def _call_for_template(call: ToolCall, slots: _Slots) -> dict[str, object]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    function = {"name": slots.hide(call.name), "arguments": _map_strings(arguments, slots.hide)}
    return {"type": "function", "function": function}


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value


def _dumps(value: object, **options: object) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))  # type: ignore[arg-type]


@pass_context
def _tojson(context: Context, value: object, **options: object) -> str:
    """Replace Jinja's own filter, which escapes HTML; the result is hidden as one text."""
    slots: _Slots = context["hpc_swe_slots"]
    return slots.hide(slots.reveal_json(_dumps(value, **options)))


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """Accept and ignore ``{% generation %}``, which marks the assistant's text for other programs."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
