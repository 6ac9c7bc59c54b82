"""Read conversations that any program wrote: rows of a parquet or JSONL file in chat form.

A row has `messages` as OpenAI's API has them, and may have `tools`, `enable_thinking` and `task_id`. A row of
`hpc_swe.export_episodes` has the recorded token ids, too. Other columns are ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hpc_swe.agents.chat.marks import THINK, THOUGHT
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import IdArray, Message, ToolCall

FORM = "docs/sft.md describes the columns"
RawRow = bytes | Mapping[str, object]
"""A line of JSON, or the values of a parquet row by column."""


@dataclass(frozen=True)
class RecordedTokens:
    """Hold the tokens of an exported row as the engine and the recorder left them."""

    token_ids: IdArray
    mask: NDArray[np.bool_]
    """True where the policy sampled the token."""
    tokenizer: str
    """Digest of the tokenizer that the ids belong to."""


@dataclass(frozen=True)
class ChatRow:
    """Hold one conversation."""

    place: str
    """File and row, for messages."""
    messages: list[Message]
    """Without thoughts."""
    thoughts: list[str]
    """Thought of each message; empty where there is none."""
    tools: str
    """JSON list of the tools' schemas, or empty."""
    enable_thinking: bool | None
    """As the row says; None when it does not."""
    task_id: str
    recorded: RecordedTokens | None = None


class _Function(Struct):
    name: str
    arguments: str | dict[str, object]


class _Call(Struct):
    function: _Function
    id: str | None = None


class _Message(Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: object = None


class _Row(Struct):
    messages: list[_Message]
    tools: str | list[dict[str, object]] | None = None
    enable_thinking: bool | None = None
    task_id: str | None = None
    token_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    tokenizer: str | None = None


def read(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield each row with its place: file, and number from 1; raise ConfigError if it cannot be read."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: neither .jsonl nor .parquet; name a file of rows in chat form")
    rows = _of_parquet(path) if path.suffix == ".parquet" else _of_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if row:
            yield f"{path}: row {number}", row


def parse(place: str, raw: RawRow) -> ChatRow:
    """Convert a row to a conversation, or raise ConfigError with file, row, key and what to do."""
    try:
        row = msgspec.json.decode(raw, type=_Row) if isinstance(raw, bytes) else msgspec.convert(raw, _Row)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: not a row in chat form: {error}; {FORM}") from None
    padded = not isinstance(raw, bytes)
    recorded = _recorded(place, row)
    fault = "" if recorded else next(_faults(row.messages), "")
    if fault:
        raise ConfigError(f"{place}: {fault}")
    split = [_split(message, padded=padded) for message in row.messages]
    return ChatRow(
        place=place,
        messages=[message for message, _ in split],
        thoughts=[thought for _, thought in split],
        tools=_tools(place, row.tools, padded=padded),
        enable_thinking=row.enable_thinking,
        task_id=row.task_id or "",
        recorded=recorded,
    )


def _of_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = [name for name in _Row.__struct_fields__ if name in file.schema_arrow.names]
        for batch in file.iter_batches(64, columns=columns):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: not a parquet file that can be read: {error}") from None


def _of_jsonl(path: Path) -> Iterator[RawRow]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield line.removeprefix(b"\xef\xbb\xbf").strip()  # some editors begin with a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None


def _recorded(place: str, row: _Row) -> RecordedTokens | None:
    if row.token_ids is None:
        return None
    if row.loss_mask is None or row.tokenizer is None:
        missing = "loss_mask" if row.loss_mask is None else "tokenizer"
        raise ConfigError(f"{place}: token_ids without {missing}; export it again, or remove token_ids")
    ids, mask = np.asarray(row.token_ids), np.asarray(row.loss_mask, dtype=np.bool_)
    if len(ids) != len(mask) or not mask.any() or mask[0] or ids.min() < 0:
        raise ConfigError(
            f"{place}: token_ids and loss_mask: {len(ids)} ids, {len(mask)} marks, {mask.sum()} of them 1; "
            "they need equal lengths, a token with a loss, and a first token without one: export it again"
        )
    return RecordedTokens(ids.astype(np.int32), mask, row.tokenizer)


def _faults(messages: list[_Message]) -> Iterator[str]:
    """Yield what the recorder could not have recorded, or what cannot be trained."""
    if not any(message.role == "assistant" for message in messages):
        yield "messages: no assistant message, so there is nothing to train; leave the row out"
    before, called = "", list[str | None]()
    for number, message in enumerate(messages):
        faults = [*_misplaced(message, before, called), *_wrong_calls(message)]
        yield from (f"messages[{number}].{fault}" for fault in faults)
        before = message.role
        if before != "tool":
            called = [call.id for call in message.tool_calls or []]


def _misplaced(message: _Message, before: str, called: list[str | None]) -> Iterator[str]:
    """Yield what is wrong with a message after one of the role `before`; `called` are ids of calls."""
    role, answered = message.role, message.tool_call_id
    rules = [
        (message.function_call is not None, "function_call: an old form; write tool_calls"),
        (role == "system" and before, "role: only the first message may be the system's; make it a user's"),
        (
            role == "assistant" and before in ("", "assistant"),
            "role: an answer to no message; put a user's or a tool's message before it",
        ),
        (role != "assistant" and message.tool_calls, "tool_calls: only an assistant has calls; remove them"),
        (
            role == "tool" and not called,
            "role: a tool's answer to no call; give it the role user, or leave the row out",
        ),
        (
            role == "tool" and called and all(called) and answered not in (*called, None),
            f"tool_call_id: {answered!r} is the id of no call before it; correct it",
        ),
    ]
    yield from (text for is_broken, text in rules if is_broken)


def _wrong_calls(message: _Message) -> Iterator[str]:
    for index, call in enumerate(message.tool_calls or []):
        arguments = call.function.arguments
        try:
            known = json.loads(arguments if isinstance(arguments, str) else json.dumps(arguments))
        except (TypeError, ValueError, RecursionError):  # parquet has values that JSON lacks, such as dates
            known = None
        if not isinstance(known, dict):
            yield (
                f"tool_calls[{index}].function.arguments: {str(arguments)[:60]!r} is no JSON object, so no "
                "agent could carry it out; correct it, or leave the row out"
            )


def _split(message: _Message, *, padded: bool) -> tuple[Message, str]:
    """Return the message without its thought, and the thought; only answers have one, at their beginning."""
    content, thought = message.content or "", ""
    if message.role == "assistant" and content.lstrip().startswith(THINK) and THOUGHT in content:
        thought, _, content = content.lstrip().removeprefix(THINK).partition(THOUGHT)
        content = content.lstrip("\n")
    if message.role == "assistant" and message.reasoning_content:
        thought = message.reasoning_content
    calls = [
        ToolCall(name=call.function.name, arguments=_as_text(call.function.arguments, padded=padded))
        for call in message.tool_calls or []
    ]
    thought = thought.strip("\n") if thought.strip() else ""
    return Message(role=message.role, content=content, tool_calls=calls), thought


def _as_text(arguments: str | dict[str, object], *, padded: bool) -> str:
    """Return arguments as JSON text; an object of parquet has all keys of its column, the others as null."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(_without_nulls(arguments) if padded else arguments, ensure_ascii=False)


def _tools(place: str, tools: str | list[dict[str, object]] | None, *, padded: bool) -> str:
    """Return the schemas as a JSON list; parquet pads structs of other keys with null, which is removed."""
    if isinstance(tools, str) and tools:
        try:
            tools, padded = msgspec.json.decode(tools, type=list[dict[str, object]]), False
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{place}: tools: not a JSON list of schemas: {error}; {FORM}") from None
    return json.dumps(_without_nulls(tools) if padded else tools) if tools else ""


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
