"""Parse tool calls whose arguments are JSON, in the forms of three families.

Each reader returns the place of the first call (-1 without one) and the calls after `start`, or raises
Malformed. JSON's decoder finds the end of a call, so that a mark inside a string ends nothing.
"""

import json
import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from hpc_swe.agents.chat.marks import CLOSE, OPEN, TOOL_CALLS, CompletionText, Malformed
from hpc_swe.base.records import ToolCall

_JSON = json.JSONDecoder()
_PYTHON = "<|python_tag|>"
_END = "<|eom_id|>"  # of a call to a tool of Llama 3's own, where an answer to a person has <|eot_id|>
_CALLED = re.compile(r'\{\s*"(?:type|name|parameters)"\s*:')
_NAMED = re.compile(r"\s*([^\[{\s]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\s*\{)")


class _Call(Struct):
    name: str
    arguments: Raw


class _LlamaCall(Struct):
    name: str
    arguments: Raw = msgspec.field(name="parameters")


def hermes(spelled: CompletionText, start: int, _: str) -> tuple[int, list[ToolCall]]:
    """Read <tool_call>{"name": .., "arguments": ..}</tool_call>, of Qwen and others."""
    first, calls = spelled.find(OPEN, start), list[ToolCall]()
    at = first
    while at >= 0:
        value, at = _object(spelled, spelled.skip(at + len(OPEN)))
        call = _call(value, _Call)
        if not spelled.text.startswith(CLOSE, at):
            raise Malformed(f"{CLOSE} is missing after the call of {call.name!r}")
        calls.append(call)
        at = spelled.find(OPEN, at)
    return first, calls


def llama(spelled: CompletionText, start: int, _: str) -> tuple[int, list[ToolCall]]:
    """Read {"name": .., "parameters": ..} of Llama 3, which has no marks: it must be the whole reply.

    Several calls are separated by semicolons.
    """
    first = at = spelled.skip(start)
    if spelled.text.startswith(_PYTHON, at):
        at = spelled.skip(at + len(_PYTHON))
    if not _CALLED.match(spelled.text, at):
        return -1, []
    calls = list[ToolCall]()
    while at < len(spelled.text):
        value, at = _object(spelled, at)
        calls.append(_call(value, _LlamaCall))
        if spelled.text.startswith(_END, at):
            break
        if at < len(spelled.text):
            if spelled.text[at] != ";":
                raise Malformed(f"text follows the call of {calls[-1].name!r}; write the call alone")
            at = spelled.skip(at + 1)
    return first, calls


def mistral(spelled: CompletionText, start: int, _: str) -> tuple[int, list[ToolCall]]:
    """Read [TOOL_CALLS]name[ARGS]{..} for each call, or [TOOL_CALLS][{"name": .., "arguments": ..}, ..].

    Older models write the second form, and some give an identity, [CALL_ID] or "id", which nobody needs.
    """
    first, calls = spelled.find(TOOL_CALLS, start), list[ToolCall]()
    at = first
    while 0 <= at < len(spelled.text):
        at = spelled.skip(at + len(TOOL_CALLS))
        if named := _NAMED.match(spelled.text, at):
            value, at = _object(spelled, spelled.skip(named.end()))
            arguments = bytes(_decoded(value, Raw)).decode()
            calls.append(ToolCall(name=named[1], arguments=_arguments(arguments)))
        else:
            value, at = _object(spelled, at)
            calls += [_call(item, _Call) for item in _decoded(value, list[Raw])]
        if at < len(spelled.text) and spelled.find(TOOL_CALLS, at) != at:
            raise Malformed("text follows a call; write the calls last")
    return first, calls


def _object(spelled: CompletionText, at: int) -> tuple[str, int]:
    """Return the JSON at `at`, and the place after it."""
    try:
        _, end = _JSON.raw_decode(spelled.text, at)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None
    return spelled.text[at:end], spelled.skip(end)


def _call(value: str | Raw, kind: type[_Call | _LlamaCall]) -> ToolCall:
    call = _decoded(value, kind)
    return ToolCall(name=call.name, arguments=_arguments(bytes(call.arguments).decode()))


def _decoded(value: str | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None


def _arguments(value: str) -> str:
    if not value.startswith("{"):
        raise Malformed('"arguments" must be a JSON object')
    return value
