"""Define a dialect: an API in which agent programs ask a model.

A request of a dialect is a struct, into which its body is decoded. Its methods are pure: they say what the
recorder is asked, and how the recorder's answer is written, whole or as a stream of events.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Annotated, ClassVar, Protocol

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from hpc_swe.base.records import Message, ToolCall
from hpc_swe.roles.rollout.recorder import Exchange

Messages = Meta(max_length=10_000)
Parts = Meta(max_length=1_000)
Sampled = Mapping[str, ToolCall]
"""Id of a delivered call -> the call as the policy wrote it."""


@dataclass(frozen=True)
class Conversation:
    """Hold a request as the recorder is asked."""

    messages: list[Message]
    tools: str = ""
    """The JSON list that the chat template shows, or empty."""
    dropped: int = 0
    """Tools and parts of the history of kinds that no chat template shows."""


class DialectRequest(Protocol):
    """Hold a request's body."""

    __struct_encode_fields__: ClassVar[tuple[str, ...]]

    @property
    def stream(self) -> bool:
        """Return whether the answer is sent as events."""

    def conversation(self, sampled: Sampled) -> Conversation:
        """Return what the recorder is asked; raise msgspec.ValidationError if it is none of the dialect."""

    def answer(self, exchange: Exchange) -> object:
        """Return the body of the response."""

    def events(self, exchange: Exchange) -> Iterable[bytes]:
        """Return the same as events that a server sends."""


class Text(Struct):
    """Take the text of a part; a part without one, for example an image, is left out."""

    text: str = ""


Content = str | Annotated[list[Text], Parts] | None


def text_of(content: Content) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def echoed(sampled: Sampled, call_id: str, name: str, arguments: str) -> ToolCall:
    """Return a call of a history as the policy wrote it, since programs complete arguments by defaults."""
    written = sampled.get(call_id)
    return written if written and written.name == name else ToolCall(name=name, arguments=arguments)


def delivered(exchange: Exchange) -> dict[str, ToolCall]:
    """Name each call of an answer by an id that no other call of the episode has."""
    calls = exchange.reply.tool_calls
    return {f"call_{exchange.index}_{number}": call for number, call in enumerate(calls)}


def folded(parts: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role, other than results of tools, and give later system messages to the user.

    Many chat templates allow a system message at the start only, and roles only in turn.
    """
    head = sum(1 for _ in takewhile(lambda part: part.role == "system", parts))
    rest = [replace(part, role="user") if part.role == "system" else part for part in parts[head:]]
    messages: list[Message] = []
    for role, group in groupby([*parts[:head], *rest], key=lambda part: part.role):
        same = list(group)
        if role == "tool":
            messages += same
            continue
        text = "\n\n".join(part.content for part in same if part.content)
        calls = [call for part in same for call in part.tool_calls]
        messages.append(Message(role=role, content=text, tool_calls=calls))
    return messages


def tool(name: str, description: str, *schemas: Raw) -> dict[str, object]:
    """Return a tool as chat templates show it, with the first schema of its parameters that is not null."""
    parameters = next((schema for schema in schemas if bytes(schema) != b"null"), Raw(b"{}"))
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_list(tools: list[dict[str, object]]) -> str:
    """Return the JSON list of tools, or nothing if there are none."""
    return msgspec.json.encode(tools).decode() if tools else ""


def named(events: Iterable[tuple[str, dict[str, object]]]) -> Iterator[bytes]:
    """Write events whose data repeats their names."""
    for name, data in events:
        yield b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name} | data))
