"""Parse the tool calls of a completion.

A policy may quote marks that it has seen in a file or an issue. If it sampled any mark as a control token,
only control tokens are marks; spelled ones are text. A mark that is no token is spelled and always counts.
"""

from typing import Literal

from hpc_swe.agents.chat import json_calls, xml_calls
from hpc_swe.agents.chat.marks import CLOSE, OPEN, THINK, THOUGHT, CompletionText, Malformed
from hpc_swe.agents.loops.base import Reply

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json", "mistral"]
"""hermes: JSON between <tool_call> marks; qwen3_coder: <function=name> and <parameter=key> marks;
llama3_json: JSON alone; mistral: JSON after [TOOL_CALLS]. The names are those of vLLM."""
ALONE = ("llama3_json",)
"""Formats of which templates write one call in a turn, and no text beside it."""
_READERS = {
    "hermes": json_calls.hermes,
    "qwen3_coder": xml_calls.read,
    "llama3_json": json_calls.llama,
    "mistral": json_calls.mistral,
}
_CLOSED = ("hermes", "qwen3_coder")


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
    try:
        first, calls = _READERS[tool_format](spelled, start, tools)
        if tool_format in _CLOSED and first < 0 <= spelled.find(CLOSE, start):
            raise Malformed(f"{OPEN} is missing before {CLOSE}")
    except Malformed as error:
        return Reply(text, truncated=truncated, parse_error=f"Tool call not understood: {error}")
    return Reply(text[:first].rstrip(), calls, truncated) if calls else Reply(text, truncated=truncated)
