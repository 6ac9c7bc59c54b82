"""Parse the tool calls of Qwen3-Coder, in which names, keys and values are not quoted:

    <tool_call>
    <function=view>
    <parameter=path>
    m.py
    </parameter>
    </function>
    </tool_call>

Nothing in a value is escaped, so `</parameter>` ends a value only where the call continues or ends after it.
One case stays ambiguous: a value that spells, on lines of their own, this end and then the beginning of a
parameter that the call does not have yet. It is read as that parameter.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec
from msgspec import Raw, Struct

from hpc_swe.conversation.marks import CLOSE, OPEN, CompletionText, Malformed
from hpc_swe.records import ToolCall

_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_BARE = re.compile(r"^[ \t]*(?=<function=[^>\n]+>)", re.MULTILINE)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_AS_WRITTEN = re.compile(r"\n</parameter>\n<parameter=[^\W\d]\w*>\n")
_END, _ENDED = "</parameter>", "</function>"

MAX_UNOPENED = 16
"""Most calls without an opening mark that are tried, since each may scan the rest of the text."""
Kinds = Mapping[str, frozenset[str]]
"""Parameter -> its JSON types; empty when it may have any type."""
Tools = Mapping[str, Kinds]
_TYPE = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
TEXT = frozenset(["string"])
NESTED = frozenset(["array", "object"])
ANYTHING = frozenset(_TYPE.values()) - TEXT
"""Types that a value is tried as when the schema does not give any."""


class _Parameters(Struct, frozen=True):
    properties: dict[str, object] = {}


class _Function(Struct):
    name: str
    parameters: _Parameters = _Parameters()


class _Tool(Struct):
    function: _Function


@dataclass(frozen=True)
class _Found:
    call: ToolCall
    start: int
    end: int


def read(spelled: CompletionText, start: int, tools: str) -> tuple[int, list[ToolCall]]:
    """Read all calls after `start`; return the place of the first (-1 without one) and the calls.

    The policy often leaves out the opening mark. A call without one counts if it begins a line, names a tool
    of `tools` (any name if that is empty), and is followed by a closing mark, by the next call or by nothing.
    So a call that is quoted before a real one is not executed.

    Raises:
        Malformed: A call cannot be read.
    """
    known, found, complaints = _kinds(tools), list[_Found](), list[str]()
    at = start
    while True:
        opened = spelled.find(OPEN, at)
        taken = next(
            _unopened(spelled, (at, opened if opened >= 0 else len(spelled.text)), known, complaints), None
        )
        if taken is None and opened >= 0:
            taken = _call(spelled, spelled.skip(opened + len(OPEN)), known, opened)
        if taken is None:
            break
        found.append(taken)
        at = taken.end
    if complaints and not found:
        raise Malformed(complaints[0])
    return (found[0].start, [each.call for each in found]) if found else (-1, [])


def _unopened(
    spelled: CompletionText, span: tuple[int, int], known: Tools, complaints: list[str]
) -> Iterator[_Found]:
    """Yield the calls without an opening mark that begin lines of a span; add why others are not calls."""
    for match in islice(_BARE.finditer(spelled.text, *span), MAX_UNOPENED):
        name = _FUNCTION.match(spelled.text, match.end())
        if name is None or (known and name[1].strip() not in known):
            complaints.append(f"no {OPEN} before it, and no such tool")
            continue
        try:
            found = _call(spelled, match.end(), known, match.start())
        except Malformed as error:
            complaints.append(f"no {OPEN} before it, and {error}")
            continue
        if found.end <= span[1]:
            yield found


def _call(spelled: CompletionText, at: int, known: Tools, start: int) -> _Found:
    """Read the call whose function begins at `at`; it ends where its closing mark begins."""
    text, function = spelled.text, _FUNCTION.match(spelled.text, at)
    if function is None:
        raise Malformed(f"expected <function=NAME> ... {_ENDED}")
    name, at = function[1].strip(), function.end()
    kinds, values = known.get(name, {}), dict[str, object]()
    while not text.startswith(_ENDED, at):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            raise Malformed(f"expected <parameter=KEY> ... {_END} in the call of {name!r}")
        key = parameter[1].strip()
        end, at = _value(spelled, parameter.end(), {*values, key}, kinds)
        value = text[parameter.end() : end].removesuffix("\n")
        values[key] = typed(value, kinds.get(key, TEXT))
    end = spelled.skip(at + len(_ENDED))
    if not _closes(spelled, end):
        raise Malformed(f"{CLOSE} is missing after the call of {name!r}")
    return _Found(ToolCall(name=name, arguments=json.dumps(values)), start, end)


def _value(spelled: CompletionText, at: int, taken: Collection[str], kinds: Kinds) -> tuple[int, int]:
    """Find the end of a value, and the place where the call continues."""
    text, last = spelled.text, None
    for match in re.compile(_END).finditer(text, at):
        end, after = match.start(), spelled.skip(match.end())
        parameter = _PARAMETER.match(text, after)
        if parameter is not None:
            key = parameter[1].strip()
            if key not in taken and (key in kinds or _AS_WRITTEN.match(text, end - 1)):
                return end, after
        elif text.startswith(_ENDED, after) and _closes(spelled, spelled.skip(after + len(_ENDED))):
            if not _goes_on(spelled, after + len(_ENDED)):
                return end, after
            last = last or (end, after)
    if last is None:
        raise Malformed(f"expected {_END}, then {_ENDED} and {CLOSE} after a value")
    return last


def _closes(spelled: CompletionText, at: int) -> bool:
    """Tell whether a call may end here: at its closing mark, at the next call, or at the end of the text."""
    if at in (spelled.find(CLOSE, at), spelled.find(OPEN, at)) or _FUNCTION.match(spelled.text, at):
        return True
    return not spelled.text[at:].removeprefix(CLOSE).strip()


def _goes_on(spelled: CompletionText, at: int) -> bool:
    """Tell whether more end marks come before the next call: then the end marks here were part of a value."""
    at = spelled.skip(at)
    at = spelled.skip(at + len(CLOSE) if spelled.find(CLOSE, at) == at else at)
    if _FUNCTION.match(spelled.text, at):
        return False
    opened = spelled.find(OPEN, at)
    until = opened if opened >= 0 else len(spelled.text)
    return any(spelled.text.find(mark, at, until) >= 0 for mark in (_END, _ENDED))


def typed(value: str, kinds: Collection[str]) -> object:
    """Convert a value to one of its JSON types; it stays text when it has none of them.

    Templates write booleans and null as Python does: True, False, None.
    """
    if kinds == TEXT:
        return value
    word, kinds = value.strip(), kinds or ANYTHING
    if "null" in kinds and word in ("None", "null"):
        return None
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if "string" in kinds and not (word[:1] in ("{", "[") and NESTED.intersection(kinds)):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(word, parse_constant=_refuse)
    return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _kinds(tools: str) -> dict[str, Kinds]:
    """Map each tool to the types of its parameters; skip a tool whose schema has another form."""
    known: dict[str, Kinds] = {}
    for tool in msgspec.json.decode(tools, type=list[Raw]) if tools else []:
        with suppress(msgspec.ValidationError, RecursionError):
            function = msgspec.json.decode(tool, type=_Tool).function
            properties = function.parameters.properties
            known[function.name] = {key: _types(schema) for key, schema in properties.items()}
    return known


def _types(schema: object, depth: int = 4) -> frozenset[str]:
    """Collect the JSON types that a schema allows; empty when it gives none."""
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    kinds = _listed(schema.get("type"))
    values = _listed(schema.get("enum")) + [schema[key] for key in ("const",) if key in schema]
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in _listed(schema.get(key))]
    found = {kind for kind in kinds if isinstance(kind, str)} | {_TYPE[type(value)] for value in values}
    return frozenset(found.union(*(_types(option, depth - 1) for option in options)))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
