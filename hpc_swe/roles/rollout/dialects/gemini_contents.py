"""Read requests of Gemini's generateContent, and write their answers. The path says whether to stream.

Google's servers read each field by two names, of JSON and of the proto, `functionCall` and `function_call`.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, ClassVar

import msgspec
from msgspec import Raw, Struct, field

from hpc_swe.base.records import Message
from hpc_swe.roles.rollout.dialects import base
from hpc_swe.roles.rollout.recorder import Exchange


class _Call(Struct):
    name: str
    id: str = ""
    args: Raw = Raw(b"{}")


class _Result(Struct):
    response: dict[str, Raw] = {}


class _Part(Struct, rename="camel"):
    text: str = ""
    thought: bool = False
    function_call: _Call | None = None
    function_response: _Result | None = None
    proto_call: _Call | None = field(default=None, name="function_call")
    proto_response: _Result | None = field(default=None, name="function_response")

    def __post_init__(self) -> None:
        self.function_call = self.function_call or self.proto_call
        self.function_response = self.function_response or self.proto_response


class _Content(Struct):
    parts: Annotated[list[_Part], base.Parts] = []
    role: str = "user"


class _Function(Struct, rename="camel"):
    name: str
    description: str = ""
    parameters: Raw = Raw(b"null")
    parameters_json_schema: Raw = Raw(b"null")
    proto_schema: Raw = field(default=Raw(b"null"), name="parameters_json_schema")


class _Tool(Struct, rename="camel"):
    function_declarations: list[_Function] | None = None
    """None for a tool that Google's own servers run."""
    proto_declarations: list[_Function] | None = field(default=None, name="function_declarations")

    def __post_init__(self) -> None:
        self.function_declarations = self.function_declarations or self.proto_declarations


class GenerateContent(Struct, rename="camel"):
    """Hold the body of `POST /v1beta/models/MODEL:generateContent`."""

    contents: Annotated[list[_Content], base.Messages]
    system_instruction: _Content | None = None
    proto_instruction: _Content | None = field(default=None, name="system_instruction")
    tools: list[_Tool] = []
    stream: ClassVar[bool] = False

    def conversation(self, sampled: base.Sampled) -> base.Conversation:
        system = self.system_instruction or self.proto_instruction
        parts = [Message(role="system", content=_text(system.parts))] if system else []
        for content in self.contents:
            parts += _read(content, sampled)
        tools = [
            base.tool(one.name, one.description, one.parameters_json_schema, one.proto_schema, one.parameters)
            for tool in self.tools
            for one in tool.function_declarations or []
        ]
        dropped = sum(tool.function_declarations is None for tool in self.tools)
        return base.Conversation(base.folded(parts), base.tool_list(tools), dropped)

    def answer(self, exchange: Exchange) -> object:
        prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
        is_cut = exchange.reply.truncated and not exchange.reply.tool_calls
        candidate = {
            "index": 0,
            "content": {"role": "model", "parts": _parts(exchange)},
            "finishReason": "MAX_TOKENS" if is_cut else "STOP",
        }
        usage = {
            "promptTokenCount": prompt,
            "candidatesTokenCount": completion,
            "totalTokenCount": prompt + completion,
        }
        return {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": "policy",
            "responseId": f"turn-{exchange.index}",
        }

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        yield b"data: %s\n\n" % msgspec.json.encode(self.answer(exchange))


class StreamGenerateContent(GenerateContent):
    """Hold the body of `POST /v1beta/models/MODEL:streamGenerateContent`."""

    stream: ClassVar[bool] = True


def _text(parts: list[_Part]) -> str:
    return "".join(part.text for part in parts if not part.thought)


def _read(content: _Content, sampled: base.Sampled) -> list[Message]:
    """Return the messages of a content: one for each result of a function, and one for texts between."""
    if content.role == "model":
        calls = [
            base.echoed(sampled, call.id, call.name, bytes(call.args).decode())
            for part in content.parts
            if (call := part.function_call)
        ]
        return [Message(role="assistant", content=_text(content.parts), tool_calls=calls)]
    messages: list[Message] = []
    for is_result, group in groupby(content.parts, key=lambda part: part.function_response is not None):
        if is_result:
            messages += [Message(role="tool", content=_result(part.function_response)) for part in group]
        else:
            text = "\n\n".join(part.text for part in group if part.text)
            messages.append(Message(role="user", content=text))
    return messages


def _result(result: _Result | None) -> str:
    """Return the text of a response that has a single field, as `output`, or else its JSON."""
    response = result.response if result else {}
    if len(response) == 1:
        value = msgspec.json.decode(*response.values())
        if isinstance(value, str):
            return value
    return msgspec.json.encode(response).decode()


def _parts(exchange: Exchange) -> list[dict[str, object]]:
    calls = base.delivered(exchange)
    text = exchange.reply.content
    parts: list[dict[str, object]] = [{"text": text}] if text or not calls else []
    return parts + [
        {"functionCall": {"id": call_id, "name": call.name, "args": Raw(call.arguments.encode())}}
        for call_id, call in calls.items()
    ]
