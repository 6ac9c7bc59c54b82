"""The calls of Qwen3-Coder, in which names, keys and values stand bare:

    <tool_call>
    <function=view>
    <parameter=path>
    m.py
    </parameter>
    </function>
    </tool_call>

Nothing in a value is escaped, so `</parameter>` ends one only where the call goes on or ends behind it.
What no reader can tell apart is a value that spells, on lines of their own, this end and then the beginning
of a parameter that the call does not have yet; it is read as that parameter.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec
from msgspec import Raw, Struct

from hpc_swe.conversation.marks import CLOSE, OPEN, Malformed, Said
from hpc_swe.records import ToolCall

_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_BARE = re.compile(r"^[ \t]*(?=<function=[^>\n]+>)", re.MULTILINE)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_AS_WRITTEN = re.compile(r"\n</parameter>\n<parameter=[^\W\d]\w*>\n")
_END, _ENDED = "</parameter>", "</function>"

MOST_UNOPENED = 16
"""Places that are tried, since each may take a look at all that follows."""
Kinds = Mapping[str, frozenset[str]]
"""Parameter -> its JSON types; empty where it may be anything."""
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
"""What a value is tried as where a schema says nothing."""


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


def read(said: Said, start: int, tools: str) -> tuple[int, list[ToolCall]]:
    """Where the first call begins, and all calls; -1 and none where there is nothing like one.

    The policy often leaves out the opening mark. A call without one counts where it begins a line, names a
    tool of `tools`, if there are any, and is followed by a closing mark, by the next call or by nothing. So
    a call that is quoted on the way to a real one does not act.

    Raises:
        Malformed: A call cannot be read.
    """
    known, found, complaints = _kinds(tools), list[_Found](), list[str]()
    at = start
    while True:
        opened = said.find(OPEN, at)
        taken = next(
            _unopened(said, (at, opened if opened >= 0 else len(said.text)), known, complaints), None
        )
        if taken is None and opened >= 0:
            taken = _call(said, said.skip(opened + len(OPEN)), known, opened)
        if taken is None:
            break
        found.append(taken)
        at = taken.end
    if complaints and not found:
        raise Malformed(complaints[0])
    return (found[0].start, [one.call for one in found]) if found else (-1, [])


def _unopened(said: Said, span: tuple[int, int], known: Tools, complaints: list[str]) -> Iterator[_Found]:
    """Calls that begin lines of a span without an opening mark; what is none is complained of."""
    for match in islice(_BARE.finditer(said.text, *span), MOST_UNOPENED):
        name = _FUNCTION.match(said.text, match.end())
        if name is None or (known and name[1].strip() not in known):
            complaints.append(f"no {OPEN} before it, and no such tool")
            continue
        try:
            found = _call(said, match.end(), known, match.start())
        except Malformed as error:
            complaints.append(f"no {OPEN} before it, and {error}")
            continue
        if found.end <= span[1]:
            yield found


def _call(said: Said, at: int, known: Tools, start: int) -> _Found:
    """The call whose function begins at `at`; it ends where its closing mark begins."""
    text, function = said.text, _FUNCTION.match(said.text, at)
    if function is None:
        raise Malformed(f"expected <function=NAME> ... {_ENDED}")
    name, at = function[1].strip(), function.end()
    kinds, values = known.get(name, {}), dict[str, object]()
    while not text.startswith(_ENDED, at):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            raise Malformed(f"expected <parameter=KEY> ... {_END} in the call of {name!r}")
        key = parameter[1].strip()
        end, at = _value(said, parameter.end(), {*values, key}, kinds)
        value = text[parameter.end() : end].removesuffix("\n")
        values[key] = typed(value, kinds.get(key, TEXT))
    end = said.skip(at + len(_ENDED))
    if not _closes(said, end):
        raise Malformed(f"{CLOSE} is missing after the call of {name!r}")
    return _Found(ToolCall(name=name, arguments=json.dumps(values)), start, end)


def _value(said: Said, at: int, taken: Collection[str], kinds: Kinds) -> tuple[int, int]:
    """Where a value ends, and where the call goes on."""
    text, last = said.text, None
    for match in re.compile(_END).finditer(text, at):
        end, after = match.start(), said.skip(match.end())
        parameter = _PARAMETER.match(text, after)
        if parameter is not None:
            key = parameter[1].strip()
            if key not in taken and (key in kinds or _AS_WRITTEN.match(text, end - 1)):
                return end, after
        elif text.startswith(_ENDED, after) and _closes(said, said.skip(after + len(_ENDED))):
            if not _goes_on(said, after + len(_ENDED)):
                return end, after
            last = last or (end, after)
    if last is None:
        raise Malformed(f"expected {_END}, then {_ENDED} and {CLOSE} after a value")
    return last


def _closes(said: Said, at: int) -> bool:
    """Whether a call may end here: at its mark, at the next call, or with the reply."""
    if at in (said.find(CLOSE, at), said.find(OPEN, at)) or _FUNCTION.match(said.text, at):
        return True
    return not said.text[at:].removeprefix(CLOSE).strip()


def _goes_on(said: Said, at: int) -> bool:
    """Whether ends follow before the next call begins: then what ended here was quoted in a value."""
    at = said.skip(at)
    at = said.skip(at + len(CLOSE) if said.find(CLOSE, at) == at else at)
    if _FUNCTION.match(said.text, at):
        return False
    opened = said.find(OPEN, at)
    until = opened if opened >= 0 else len(said.text)
    return any(said.text.find(mark, at, until) >= 0 for mark in (_END, _ENDED))


def typed(value: str, kinds: Collection[str]) -> object:
    """A value by its JSON types; text where it is none of them.

    Templates write what is no text, list or object as Python does: True, False, None.
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
    """Tool -> its parameters' types. What describes none in the usual way is no fault of the policy's."""
    known: dict[str, Kinds] = {}
    for tool in msgspec.json.decode(tools, type=list[Raw]) if tools else []:
        with suppress(msgspec.ValidationError, RecursionError):
            function = msgspec.json.decode(tool, type=_Tool).function
            properties = function.parameters.properties
            known[function.name] = {key: _types(schema) for key, schema in properties.items()}
    return known


def _types(schema: object, depth: int = 4) -> frozenset[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    said = _listed(schema.get("type"))
    values = _listed(schema.get("enum")) + [schema[key] for key in ("const",) if key in schema]
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in _listed(schema.get(key))]
    found = {kind for kind in said if isinstance(kind, str)} | {_TYPE[type(value)] for value in values}
    return frozenset(found.union(*(_types(option, depth - 1) for option in options)))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
