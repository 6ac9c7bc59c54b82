"""Parse the tool calls of a completion.

A policy may quote marks that it has seen in a file or an issue. If it sampled any mark as a control token,
only control tokens are marks; spelled ones are text. A mark that is no token is spelled and always counts.
"""

import json
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from hpc_swe.agents.chat import xml_calls
from hpc_swe.agents.chat.marks import CLOSE, OPEN, THINK, THOUGHT, CompletionText, Malformed
from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.records import ToolCall

ToolFormat = Literal["hermes", "qwen3_coder"]
"""hermes: JSON between <tool_call> marks; qwen3_coder: <function=name> and <parameter=key> marks."""
_JSON = json.JSONDecoder()


class _Call(Struct):
    name: str
    arguments: Raw


def parse(
    spelled: CompletionText, tool_format: ToolFormat, *, truncated: bool, tools: str, thinking: bool
) -> Reply:
    """Parse a completion into its content and tool calls; calls inside a thought do not count.

    A malformed call makes the whole text plain content, and `parse_error` explains the fault to the policy.
    `thinking` means that the prompt itself opened a thought. `tools`, the JSON list of an OpenAI request,
    gives the types of qwen3_coder's arguments.
    """
    start, text = 0, spelled.text
    if thinking or spelled.find(THINK, 0) == len(text) - len(text.lstrip()):
        end = spelled.find(THOUGHT, 0)
        start = len(text) if end < 0 else end + len(THOUGHT)
    read = _json_calls if tool_format == "hermes" else xml_calls.read
    try:
        first, calls = read(spelled, start, tools)
        if first < 0 <= spelled.find(CLOSE, start):
            raise Malformed(f"{OPEN} is missing before {CLOSE}")
    except Malformed as error:
        return Reply(text, truncated=truncated, parse_error=f"Tool call not understood: {error}")
    return Reply(text[:first].rstrip(), calls, truncated) if calls else Reply(text, truncated=truncated)


def _json_calls(spelled: CompletionText, start: int, _: str) -> tuple[int, list[ToolCall]]:
    """Read the calls of hermes; return the place of the first opening mark (-1 without one) and all calls."""
    first, found = spelled.find(OPEN, start), list[ToolCall]()
    at = first
    while at >= 0:
        call, at = _json_call(spelled, spelled.skip(at + len(OPEN)))
        if not spelled.text.startswith(CLOSE, at):
            raise Malformed(f"{CLOSE} is missing after the call of {call.name!r}")
        found.append(call)
        at = spelled.find(OPEN, at)
    return first, found


def _json_call(spelled: CompletionText, at: int) -> tuple[ToolCall, int]:
    """Decode the JSON at `at`; return the call and the place after it.

    The decoder finds the end, so that a closing mark inside a string of the JSON ends nothing.
    """
    try:
        _, end = _JSON.raw_decode(spelled.text, at)
        call = msgspec.json.decode(spelled.text[at:end], type=_Call)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None
    arguments = bytes(call.arguments).decode()
    if not arguments.startswith("{"):
        raise Malformed('"arguments" must be a JSON object')
    return ToolCall(name=call.name, arguments=arguments), spelled.skip(end)
