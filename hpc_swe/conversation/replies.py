"""Reading tool calls out of what the policy wrote.

A policy may quote marks that it came upon: in a file, in an issue. Where it sampled any mark as the control
token that it is, only such are marks, and quoted ones are text. A mark for which the tokenizer has no token
can only be spelled, and is always read.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from hpc_swe.plugins.agents.base import Reply
from hpc_swe.records import ToolCall

ToolFormat = Literal["hermes", "qwen3_coder"]
"""hermes: JSON between <tool_call> marks; qwen3_coder: <function=name> and <parameter=key> marks."""

_OPEN, _CLOSE, _THINK, _THOUGHT = "<tool_call>", "</tool_call>", "<think>", "</think>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_JSON = json.JSONDecoder()


class _Malformed(ValueError):
    """The text is no tool call; says why."""


class _Call(Struct):
    name: str
    arguments: Raw


class _Parameters(Struct, frozen=True):
    properties: dict[str, object] = {}


class _Function(Struct):
    name: str
    parameters: _Parameters = _Parameters()


class _Tool(Struct):
    function: _Function


@dataclass(frozen=True)
class Said:
    """What a completion spells, and where in it each control token of the tokenizer stands, if anywhere."""

    text: str
    control: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def find(self, mark: str, start: int) -> int:
        """Where the next mark is; -1 when there is none."""
        places = self.control.get(mark)
        if places is not None and any(self.control.get(name) for name in (_OPEN, _CLOSE, _THINK, _THOUGHT)):
            return next(iter(places[bisect_left(places, start) :]), -1)
        return self.text.find(mark, start)


def parse(said: Said, tool_format: ToolFormat, *, truncated: bool, tools: str, thinking: bool) -> Reply:
    """What the policy said and which tools it calls.

    A call that cannot be read makes the whole text plain content, and `parse_error` tells the policy why.
    `thinking` says that the prompt itself opened a thought. `tools` types the arguments of qwen3_coder.
    """
    start, text = 0, said.text
    if thinking or said.find(_THINK, 0) == len(text) - len(text.lstrip()):
        end = said.find(_THOUGHT, 0)
        start = len(text) if end < 0 else end + len(_THOUGHT)
    first = said.find(_OPEN, start)
    if first < 0:
        return Reply(text, truncated=truncated)
    try:
        calls = _calls(said, first, tool_format, tools)
    except _Malformed as error:
        return Reply(text, truncated=truncated, parse_error=f"Tool call not understood: {error}")
    return Reply(text[:first].rstrip(), calls, truncated)


def _calls(said: Said, at: int, tool_format: ToolFormat, tools: str) -> list[ToolCall]:
    text, found = said.text, []
    while at >= 0:
        at += len(_OPEN)
        call, at = _hermes(text, at) if tool_format == "hermes" else _xml(text, at, tools)
        if not text.startswith(_CLOSE, at):
            raise _Malformed(f"{_CLOSE} is missing after the call of {call.name!r}")
        found.append(call)
        at = said.find(_OPEN, at)
    return found


def _hermes(text: str, at: int) -> tuple[ToolCall, int]:
    """JSON is decoded where it stands, so that a closing mark inside one of its strings ends nothing."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        _, end = _JSON.raw_decode(text, at)
        call = msgspec.json.decode(text[at:end], type=_Call)
    except (ValueError, RecursionError) as error:
        raise _Malformed(str(error)) from None
    arguments = bytes(call.arguments).decode()
    if not arguments.startswith("{"):
        raise _Malformed('"arguments" must be a JSON object')
    return ToolCall(name=call.name, arguments=arguments), end + len(text[end:]) - len(text[end:].lstrip())


def _xml(text: str, at: int, tools: str) -> tuple[ToolCall, int]:
    function = _FUNCTION.match(text, at)
    if function is None:
        raise _Malformed("expected <function=NAME> ... </function>")
    name, body, values = function[1].strip(), function[2], {}
    types, position = _types(name, tools), 0
    while parameter := _PARAMETER.match(body, position):
        values[parameter[1].strip()] = _typed(parameter[2], types.get(parameter[1].strip(), "string"))
        position = parameter.end()
    if body[position:].strip():
        raise _Malformed(f"expected <parameter=KEY> ... </parameter> in the call of {name!r}")
    return ToolCall(name=name, arguments=json.dumps(values)), function.end()


def _types(name: str, tools: str) -> dict[str, object]:
    """Of a tool's parameters. What describes no types in the usual way is no fault of the policy's."""
    types: dict[str, object] = {}
    for tool in msgspec.json.decode(tools, type=list[Raw]) if tools else []:
        with suppress(msgspec.ValidationError):
            function = msgspec.json.decode(tool, type=_Tool).function
            schemas = function.parameters.properties if function.name == name else {}
            types |= {key: schema.get("type") for key, schema in schemas.items() if isinstance(schema, dict)}
    return types


def _typed(value: str, kind: object) -> object:
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
