"""Read requests of OpenAI's Responses, and write their answers. Each request brings its whole history."""

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Raw, Struct

from hpc_swe.base.records import Message
from hpc_swe.roles.rollout.dialects import base
from hpc_swe.roles.rollout.recorder import Exchange

ROLES = {"developer": "system"}
Event = tuple[str, dict[str, object]]


class _Item(Struct):
    type: str = "message"
    role: str = ""
    content: base.Content = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: base.Content = None


class _Tool(Struct):
    type: str
    name: str = ""
    description: str = ""
    parameters: Raw = Raw(b"{}")


class OpenaiResponses(Struct):
    """Hold the body of `POST /v1/responses`."""

    input: str | Annotated[list[_Item], base.Messages]
    instructions: str | None = None
    tools: list[_Tool] = []
    stream: bool = False

    def conversation(self, sampled: base.Sampled) -> base.Conversation:
        items = [_Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        parts = [Message(role="system", content=self.instructions)] if self.instructions else []
        read = [_read(item, sampled) for item in items if item.type != "reasoning"]
        parts += [message for message in read if message is not None]
        tools = [
            base.tool(tool.name, tool.description, tool.parameters)
            for tool in self.tools
            if tool.type == "function"
        ]
        dropped = len(self.tools) - len(tools) + read.count(None)
        return base.Conversation(base.folded(parts), base.tool_list(tools), dropped)

    def answer(self, exchange: Exchange) -> dict[str, object]:
        return _response(exchange)

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        numbered = enumerate(_events(exchange))
        return base.named((name, {"sequence_number": number} | data) for number, (name, data) in numbered)


def _read(item: _Item, sampled: base.Sampled) -> Message | None:
    """Return an item as a message of its own, or None for a kind that no chat template shows."""
    match item.type:
        case "message":
            fields = {"role": ROLES.get(item.role, item.role), "content": base.text_of(item.content)}
            return msgspec.convert(fields, Message)
        case "function_call":
            call = base.echoed(sampled, item.call_id, item.name, item.arguments)
            return Message(role="assistant", content="", tool_calls=[call])
        case "function_call_output":
            return Message(role="tool", content=base.text_of(item.output))
    return None


def _response(exchange: Exchange) -> dict[str, object]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    is_cut = _is_cut(exchange)
    return {
        "id": f"resp_{exchange.index}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(exchange),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _is_cut(exchange: Exchange) -> bool:
    return exchange.reply.truncated and not exchange.reply.tool_calls


def _items(exchange: Exchange) -> list[dict[str, object]]:
    calls = base.delivered(exchange)
    message: dict[str, object] = {
        "type": "message",
        "id": f"msg_{exchange.index}",
        "role": "assistant",
        "status": "incomplete" if _is_cut(exchange) else "completed",
        "content": [_part(exchange)],
    }
    items: list[dict[str, object]] = [
        {
            "type": "function_call",
            "id": f"fc_{call_id}",
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call_id, call in calls.items()
    ]
    return [message, *items] if exchange.reply.content or not calls else items


def _part(exchange: Exchange) -> dict[str, object]:
    return {"type": "output_text", "text": exchange.reply.content, "annotations": []}


def _events(exchange: Exchange) -> Iterator[Event]:
    response = _response(exchange)
    begun: dict[str, object] = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield "response.created", {"response": response | begun}
    for index, item in enumerate(_items(exchange)):
        place: dict[str, object] = {"output_index": index}
        is_message = item["type"] == "message"
        empty: dict[str, object] = {"content": []} if is_message else {"arguments": ""}
        yield "response.output_item.added", place | {"item": item | empty | {"status": "in_progress"}}
        for name, data in _text_changes(_part(exchange)) if is_message else _call_changes(item):
            yield f"response.{name}", place | {"item_id": item["id"]} | data
        yield "response.output_item.done", place | {"item": item}
    yield f"response.{response['status']}", {"response": response}


def _text_changes(part: dict[str, object]) -> list[Event]:
    """Return what fills an empty message."""
    place: dict[str, object] = {"content_index": 0}
    text: dict[str, object] = {"logprobs": []}
    return [
        ("content_part.added", place | {"part": part | {"text": ""}}),
        ("output_text.delta", place | text | {"delta": part["text"]}),
        ("output_text.done", place | text | {"text": part["text"]}),
        ("content_part.done", place | {"part": part}),
    ]


def _call_changes(item: dict[str, object]) -> list[Event]:
    """Return what fills an empty call."""
    return [
        ("function_call_arguments.delta", {"delta": item["arguments"]}),
        ("function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}),
    ]
