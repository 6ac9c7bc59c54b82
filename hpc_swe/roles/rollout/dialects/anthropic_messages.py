"""Read requests of Anthropic's Messages, and write their answers.

A reply has one block of text and one for each call; a thought stays in the text, as the policy wrote it.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from msgspec import Raw, Struct

from hpc_swe.base.records import Message
from hpc_swe.roles.rollout.dialects import base
from hpc_swe.roles.rollout.recorder import Exchange

Event = tuple[str, dict[str, object]]


class _Block(Struct):
    type: str = "text"
    text: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")
    content: base.Content = None


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], base.Parts]


class _Tool(Struct):
    name: str = ""
    description: str = ""
    input_schema: Raw = Raw()
    """Empty for a tool that Anthropic's own servers run."""


class AnthropicMessages(Struct):
    """Hold the body of `POST /v1/messages`."""

    messages: Annotated[list[_Message], base.Messages]
    system: base.Content = None
    tools: list[_Tool] = []
    stream: bool = False

    def conversation(self, sampled: base.Sampled) -> base.Conversation:
        parts = [Message(role="system", content=base.text_of(self.system))] if self.system else []
        for message in self.messages:
            parts += _read(message, sampled)
        shown = [
            base.tool(tool.name, tool.description, tool.input_schema)
            for tool in self.tools
            if bytes(tool.input_schema)
        ]
        return base.Conversation(base.folded(parts), base.tool_list(shown), len(self.tools) - len(shown))

    def answer(self, exchange: Exchange) -> object:
        reply = {"content": _blocks(exchange), "stop_reason": _stop(exchange), "usage": _usage(exchange)}
        return _head(exchange) | reply

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        return base.named(_events(exchange))


def _read(message: _Message, sampled: base.Sampled) -> list[Message]:
    """Return the messages that a message holds: one for each result of a tool, and one for texts between."""
    blocks = [_Block(text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        calls = [
            base.echoed(sampled, block.id, block.name, bytes(block.input).decode())
            for block in blocks
            if block.type == "tool_use"
        ]
        return [Message(role="assistant", content="".join(block.text for block in blocks), tool_calls=calls)]
    messages: list[Message] = []
    for is_result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if is_result:
            messages += [Message(role="tool", content=base.text_of(block.content)) for block in group]
        else:
            text = "\n\n".join(block.text for block in group if block.text)
            messages.append(Message(role=message.role, content=text))
    return messages


def _head(exchange: Exchange) -> dict[str, object]:
    return {
        "id": f"msg_{exchange.index}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(exchange) | {"output_tokens": 0},
    }


def _blocks(exchange: Exchange) -> list[dict[str, object]]:
    calls = base.delivered(exchange)
    text = exchange.reply.content
    blocks: list[dict[str, object]] = [{"type": "text", "text": text}] if text or not calls else []
    return blocks + [
        {"type": "tool_use", "id": call_id, "name": call.name, "input": Raw(call.arguments.encode())}
        for call_id, call in calls.items()
    ]


def _events(exchange: Exchange) -> Iterator[Event]:
    yield "message_start", {"message": _head(exchange)}
    for index, block in enumerate(_blocks(exchange)):
        yield from _block_events(index, block)
    delta = {"stop_reason": _stop(exchange), "stop_sequence": None}
    yield "message_delta", {"delta": delta, "usage": _usage(exchange)}
    yield "message_stop", {}


def _block_events(index: int, block: dict[str, object]) -> Iterator[Event]:
    """Send a block as one empty block and one change of it."""
    empty: dict[str, object] = {"text": ""}
    delta = {"type": "text_delta", "text": block.get("text")}
    if block["type"] == "tool_use":
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    yield "content_block_start", {"index": index, "content_block": block | empty}
    yield "content_block_delta", {"index": index, "delta": delta}
    yield "content_block_stop", {"index": index}


def _stop(exchange: Exchange) -> str:
    if exchange.reply.tool_calls:
        return "tool_use"
    return "max_tokens" if exchange.reply.truncated else "end_turn"


def _usage(exchange: Exchange) -> dict[str, int]:
    return {"input_tokens": exchange.prompt_tokens, "output_tokens": exchange.completion_tokens}
