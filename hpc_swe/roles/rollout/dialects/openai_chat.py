"""Read requests of OpenAI's chat completions, and write their answers."""

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Raw, Struct

from hpc_swe.base.records import Message
from hpc_swe.roles.rollout.dialects import base
from hpc_swe.roles.rollout.recorder import Exchange

ROLES = {"developer": "system", "function": "tool"}


class _Function(Struct):
    name: str
    arguments: str = "{}"


class _Call(Struct):
    function: _Function
    id: str = ""


class _Message(Struct):
    role: str
    content: base.Content = None
    tool_calls: Annotated[list[_Call], base.Parts] | None = None


class _StreamOptions(Struct):
    include_usage: bool = False


class ChatCompletions(Struct):
    """Hold the body of `POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], base.Messages]
    tools: Raw = Raw(b"null")
    stream: bool = False
    stream_options: _StreamOptions | None = None

    def conversation(self, sampled: base.Sampled) -> base.Conversation:
        tools = "" if bytes(self.tools) in (b"null", b"[]") else bytes(self.tools).decode()
        return base.Conversation([_convert(message, sampled) for message in self.messages], tools)

    def answer(self, exchange: Exchange) -> object:
        choice = {
            "index": 0,
            "message": _message(exchange),
            "finish_reason": _finish(exchange),
            "logprobs": None,
        }
        return _head(exchange, "chat.completion") | {"choices": [choice], "usage": _usage(exchange)}

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        head = _head(exchange, "chat.completion.chunk")
        first = {"index": 0, "delta": _message(exchange), "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": _finish(exchange)}
        chunks = [head | {"choices": [first]}, head | {"choices": [last]}]
        if self.stream_options is not None and self.stream_options.include_usage:
            chunks.append(head | {"choices": [], "usage": _usage(exchange)})
        for chunk in chunks:
            yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _convert(message: _Message, sampled: base.Sampled) -> Message:
    calls = [
        base.echoed(sampled, call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or []
    ]
    fields = {"role": ROLES.get(message.role, message.role), "content": base.text_of(message.content)}
    return msgspec.convert(fields | {"tool_calls": calls}, Message)


def _head(exchange: Exchange, kind: str) -> dict[str, object]:
    return {"id": f"turn-{exchange.index}", "object": kind, "created": int(time.time()), "model": "policy"}


def _message(exchange: Exchange) -> dict[str, object]:
    calls: list[dict[str, object]] = [
        {
            "index": number,
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, (call_id, call) in enumerate(base.delivered(exchange).items())
    ]
    message: dict[str, object] = {"role": "assistant", "content": exchange.reply.content}
    return message | ({"tool_calls": calls} if calls else {})


def _finish(exchange: Exchange) -> str:
    if exchange.reply.tool_calls:
        return "tool_calls"
    return "length" if exchange.reply.truncated else "stop"


def _usage(exchange: Exchange) -> dict[str, int]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
