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
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from hpc_swe.agents.chat.marks import CLOSE, OPEN, CompletionText, Malformed
from hpc_swe.base.records import ToolCall

_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_BARE = re.compile(r"^[ \t]*(?=<function=([^>\n]+)>)", re.MULTILINE)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_AS_WRITTEN = re.compile(r"\n</parameter>\n<parameter=[^\W\d]\w*>\n")
_END, _ENDED = "</parameter>", "</function>"

MAX_SEARCHES = 16
"""Most vain searches in a text, each of which may go through the whole rest: for a call without an opening
mark, and for an end mark that ends a value more surely than the first one does."""
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


class _Found(NamedTuple):
    call: ToolCall
    start: int
    end: int


class _Stop(NamedTuple):
    """A value may end here: the call continues or ends after an end mark."""

    end: int
    after: int
    """Place where the call continues."""
    key: str | None
    """Parameter that begins there; None where the function ends."""
    is_sure: bool
    """The parameter begins as the template writes it; no other end mark follows before the next call."""


def read(spelled: CompletionText, start: int, tools: str) -> tuple[int, list[ToolCall]]:
    """Read all calls after `start`; return the place of the first (-1 without one) and the calls.

    The policy often leaves out the opening mark. A call without one counts if it begins a line, names a tool
    of `tools` (any name if that is empty), and is followed by a closing mark, by the next call or by nothing.
    So a call that is quoted before a real one is not executed. Raise Malformed if a call cannot be read.
    """
    reader, found = _Reader(spelled, _kinds(tools)), list[_Found]()
    at = start
    while True:
        opened = spelled.find(OPEN, at)
        taken = reader.unopened(at, opened if opened >= 0 else len(spelled.text))
        if taken is None and opened >= 0:
            taken = reader.call(spelled.skip(opened + len(OPEN)), opened)
        if taken is None:
            break
        found.append(taken)
        at = taken.end
    if reader.complaints and not found:
        raise Malformed(reader.complaints[0])
    return (found[0].start, [each.call for each in found]) if found else (-1, [])


class _Reader:
    """Read single calls of a completion. The time is linear in its length, since marks are found once."""

    def __init__(self, spelled: CompletionText, known: Tools) -> None:
        self._spelled, self._text, self._known = spelled, spelled.text, known
        self._ends = [match.start() for match in re.finditer(f"{_END}|{_ENDED}", self._text)]
        self._stops = list(self._find_stops())
        self._searches = MAX_SEARCHES
        self.complaints: list[str] = []
        """Why what looks like a call without an opening mark is none."""

    def unopened(self, at: int, until: int) -> _Found | None:
        """Return the first call without an opening mark that begins a line and lies between two places."""
        for match in _BARE.finditer(self._text, at, until):
            if self._searches <= 0:
                break
            try:
                if self._known and match[1].strip() not in self._known:
                    raise Malformed("no such tool")
                found = self.call(match.end(), match.start())
                if found.end <= until:
                    return found
            except Malformed as error:
                self.complaints.append(f"no {OPEN} before it, and {error}")
            self._searches -= 1
        return None

    def call(self, at: int, start: int) -> _Found:
        """Read the call whose function begins at `at`; it ends where its closing mark begins."""
        text, function = self._text, _FUNCTION.match(self._text, at)
        if function is None:
            raise Malformed(f"expected <function=NAME> ... {_ENDED}")
        name, at = function[1].strip(), function.end()
        kinds, values = self._known.get(name, {}), dict[str, object]()
        while not text.startswith(_ENDED, at):
            parameter = _PARAMETER.match(text, at)
            if parameter is None:
                raise Malformed(f"expected <parameter=KEY> ... {_END} in the call of {name!r}")
            key = parameter[1].strip()
            values[key] = None
            stop = self._stop(parameter.end(), values, kinds)
            value = text[parameter.end() : stop.end].removesuffix("\n")
            values[key], at = typed(value, kinds.get(key, TEXT)), stop.after
        end = self._spelled.skip(at + len(_ENDED))
        if not self._closes(end):
            raise Malformed(f"{CLOSE} is missing after the call of {name!r}")
        return _Found(ToolCall(name=name, arguments=json.dumps(values)), start, end)

    def _stop(self, at: int, taken: Collection[str], kinds: Kinds) -> _Stop:
        """Find the end of the value at `at`; the call has the parameters `taken` already."""
        last = None
        for index in range(bisect_left(self._stops, at, key=lambda stop: stop.end), len(self._stops)):
            stop = self._stops[index]
            if stop.key is not None:
                if stop.key not in taken and (stop.key in kinds or stop.is_sure):
                    return stop
            elif stop.is_sure or self._searches <= 0:
                return stop
            else:
                last = last or stop
        if last is None:
            raise Malformed(f"expected {_END}, then {_ENDED} and {CLOSE} after a value")
        self._searches -= 1
        return last

    def _find_stops(self) -> Iterator[_Stop]:
        text, spelled = self._text, self._spelled
        for match in re.finditer(_END, text):
            end, after = match.start(), spelled.skip(match.end())
            parameter = _PARAMETER.match(text, after)
            if parameter is not None:
                yield _Stop(end, after, parameter[1].strip(), bool(_AS_WRITTEN.match(text, end - 1)))
            elif text.startswith(_ENDED, after) and self._closes(spelled.skip(after + len(_ENDED))):
                yield _Stop(end, after, None, not self._continues(after + len(_ENDED)))

    def _closes(self, at: int) -> bool:
        """Return whether a call may end here: at its closing mark, at the next call, or at the text's end."""
        spelled = self._spelled
        if at in (spelled.find(CLOSE, at), spelled.find(OPEN, at)) or _FUNCTION.match(self._text, at):
            return True
        rest = at + len(CLOSE) if self._text.startswith(CLOSE, at) else at
        return spelled.skip(rest) == len(self._text)

    def _continues(self, at: int) -> bool:
        """Return whether more end marks come before the next call: then those here were part of a value."""
        spelled = self._spelled
        at = spelled.skip(at)
        at = spelled.skip(at + len(CLOSE) if spelled.find(CLOSE, at) == at else at)
        if _FUNCTION.match(self._text, at):
            return False
        opened, index = spelled.find(OPEN, at), bisect_left(self._ends, at)
        return index < len(self._ends) and (opened < 0 or self._ends[index] < opened)


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
        found = json.loads(word)
        json.dumps(found, allow_nan=False)  # refuses NaN and infinity, as which 1e999 is read
        return found
    return value


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
