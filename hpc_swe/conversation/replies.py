"""Reading tool calls out of what the policy wrote.

A policy may quote marks that it came upon: in a file, in an issue. Where it sampled any mark as the control
token that it is, only such are marks, and quoted ones are text. A mark for which the tokenizer has no token
can only be spelled, and is always read.
"""

import json
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from hpc_swe.conversation import xml_calls
from hpc_swe.conversation.marks import CLOSE, OPEN, THINK, THOUGHT, Malformed, Said
from hpc_swe.plugins.agents.base import Reply
from hpc_swe.records import ToolCall

ToolFormat = Literal["hermes", "qwen3_coder"]
"""hermes: JSON between <tool_call> marks; qwen3_coder: <function=name> and <parameter=key> marks."""
_JSON = json.JSONDecoder()


class _Call(Struct):
    name: str
    arguments: Raw


def parse(said: Said, tool_format: ToolFormat, *, truncated: bool, tools: str, thinking: bool) -> Reply:
    """What the policy said and which tools it calls.

    A call that cannot be read makes the whole text plain content, and `parse_error` tells the policy why.
    `thinking` says that the prompt itself opened a thought. `tools` types the arguments of qwen3_coder.
    """
    start, text = 0, said.text
    if thinking or said.find(THINK, 0) == len(text) - len(text.lstrip()):
        end = said.find(THOUGHT, 0)
        start = len(text) if end < 0 else end + len(THOUGHT)
    try:
        first, calls = _json(said, start) if tool_format == "hermes" else xml_calls.read(said, start, tools)
        if first < 0 <= said.find(CLOSE, start):
            raise Malformed(f"{OPEN} is missing before {CLOSE}")
    except Malformed as error:
        return Reply(text, truncated=truncated, parse_error=f"Tool call not understood: {error}")
    return Reply(text[:first].rstrip(), calls, truncated) if calls else Reply(text, truncated=truncated)


def _json(said: Said, start: int) -> tuple[int, list[ToolCall]]:
    """Where the first call's mark is, and all calls; -1 and none without one."""
    first, found = said.find(OPEN, start), list[ToolCall]()
    at = first
    while at >= 0:
        call, at = _hermes(said.text, at + len(OPEN))
        if not said.text.startswith(CLOSE, at):
            raise Malformed(f"{CLOSE} is missing after the call of {call.name!r}")
        found.append(call)
        at = said.find(OPEN, at)
    return first, found


def _hermes(text: str, at: int) -> tuple[ToolCall, int]:
    """JSON is decoded where it stands, so that a closing mark inside one of its strings ends nothing."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        _, end = _JSON.raw_decode(text, at)
        call = msgspec.json.decode(text[at:end], type=_Call)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None
    arguments = bytes(call.arguments).decode()
    if not arguments.startswith("{"):
        raise Malformed('"arguments" must be a JSON object')
    return ToolCall(name=call.name, arguments=arguments), end + len(text[end:]) - len(text[end:].lstrip())
