"""Calls in Qwen3-Coder's form: what its template writes is read back; what its policy forgets is not lost."""

import json
import re
import sys

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hpc_swe.agents.chat import TokenBuilder, ToolFormat
from hpc_swe.agents.chat.marks import CompletionText
from hpc_swe.agents.chat.replies import parse
from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.records import Message, ToolCall
from tests.kit.toy_model import CODER, make_model

TYPES = {
    "path": {"type": "string"},
    "line": {"type": "integer"},
    "share": {"type": "number"},
    "all": {"type": "boolean"},
    "only": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "span": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None},
    "last": {"type": ["integer", "null"]},
    "kind": {"enum": ["a", "b", None]},
    "table": {"type": "object"},
}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "view", "parameters": {"properties": TYPES}}}]
    + [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("run", "submit")]
)
MARKS = ["<tool_call>", "</tool_call>", "<function=view>", "</function>", "<parameter=path>", "</parameter>"]
CALL = "<tool_call>\n<function=view>\n<parameter=path>\nm.py\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return TokenBuilder(make_model(tmp_path_factory.mktemp("model"), CODER), "qwen3_coder")


def read(builder: TokenBuilder, *parts: str | tuple[str, bool], tools: str = TOOLS) -> Reply:
    """A tuple says whether the text's marks were sampled as control tokens."""
    flagged = [(part, True) if isinstance(part, str) else part for part in parts]
    return builder.reply(builder.tokens.encode_parts(flagged), tools=tools)


def calls(reply: Reply) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


SPELLED = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5), st.just("\n")), max_size=7).map(
    "".join
)
NUMBER = st.integers(-(2**53), 2**53)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "path": SPELLED,
        "line": NUMBER,
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "all": st.booleans(),
        "only": st.one_of(st.none(), SPELLED.filter(lambda text: text.strip() not in ("None", "null"))),
        "span": st.one_of(st.none(), st.lists(NUMBER, max_size=3)),
        "last": st.one_of(st.none(), NUMBER),
        "kind": st.sampled_from(["a", "b", None]),
        "table": st.dictionaries(SPELLED, st.one_of(SPELLED, st.booleans(), st.none(), NUMBER), max_size=3),
    },
)


def is_ambiguous(values: dict[str, object]) -> bool:
    """Whether a value spells its own end and then the beginning of a parameter that the call has not yet."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    return any(
        "</parameter>" in text and "<parameter=" in text.partition("</parameter>")[2] for text in texts
    )


@settings(max_examples=100)
@given(asked=st.lists(VALUES, min_size=1, max_size=3), said=st.sampled_from(["", "Let me see."]))
@example(asked=[{"path": CALL}], said="")
@example(asked=[{"path": f"{CALL}\n{CALL}\n", "all": True}, {"path": "</parameter>"}], said="")
@example(asked=[{"path": "</parameter>\n</function>\n</tool_call>", "line": 3, "last": None}], said="x")
def test_what_the_template_writes_is_read_back(builder, asked, said):
    assume(not any(map(is_ambiguous, asked)))
    tool_calls = [ToolCall(name="view", arguments=json.dumps(values)) for values in asked]
    message = Message(role="assistant", content=said, tool_calls=tool_calls)
    reply = builder.reply(builder.encode_answer(message), tools=TOOLS)
    assert (calls(reply), reply.parse_error) == ([("view", values) for values in asked], "")
    assert reply.content == said


@settings(max_examples=60)
@given(asked=st.lists(VALUES, min_size=1, max_size=3), missing=st.integers(0, 2))
def test_what_the_template_writes_is_read_back_without_an_opening_mark(builder, asked, missing):
    assume(not any(map(is_ambiguous, asked)))
    tool_calls = [ToolCall(name="view", arguments=json.dumps(values)) for values in asked]
    ids = builder.encode_answer(Message(role="assistant", content="", tool_calls=tool_calls))
    opening = builder.tokens.control["<tool_call>"]
    places = [place for place, token in enumerate(ids) if token == opening]
    del ids[places[min(missing, len(places) - 1)]]
    assert calls(builder.reply(ids, tools=TOOLS)) == [("view", values) for values in asked]


TYPED = {
    "all": {"True": True, "true": True, "FALSE": False, "1": 1, "maybe": "maybe"},
    **dict.fromkeys(("only", "last", "kind"), {"None": None, "null": None}),
    "span": {"None": None, "null": None, "[1, 1e999]": "[1, 1e999]"},
    "path": {text: text for text in ("12", "1e3", "[1, 2]", "nan", "True", "None", "null")},
    "share": {"NaN": "NaN", "-1e999": "-1e999"},  # which are no JSON
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, found in TYPED.items() for value in found])
def test_a_value_is_of_the_type_that_the_tool_takes_or_text(builder, key, value):
    text = f"<tool_call><function=view><parameter={key}>{value}</parameter></function></tool_call>"
    assert calls(read(builder, text)) == [("view", {key: TYPED[key][value]})]
    if TYPED[key][value] == value:
        assert calls(read(builder, text, tools="")) == [("view", {key: value})]


BODY = "<function=run>\n</function>"


@pytest.mark.parametrize(
    "text",
    [
        f"{BODY}\n</tool_call>",
        BODY,
        f"Let me see.\n{BODY}\n</tool_call>",
        f"Let me see.\n\n  {BODY}\n",
        f"<tool_call>\n{BODY}",  # the closing mark is forgotten
    ],
)
def test_a_call_without_one_of_its_marks_is_read(builder, text):
    for tools in (TOOLS, ""):
        reply = read(builder, text, tools=tools)
        assert (calls(reply), reply.parse_error) == ([("run", {})], "")
        assert reply.content == ("Let me see." if text.startswith("Let") else "")


@pytest.mark.parametrize(
    "text",
    [
        f"{BODY}\n</tool_call>\n{CALL}",
        f"{BODY}\n{CALL}",
        f"<tool_call>\n{BODY}\n</tool_call>\n{CALL.removeprefix('<tool_call>')}",
        f"{BODY}\n{CALL.removeprefix('<tool_call>')}",
        f"<tool_call>\n{BODY}\n{CALL.removeprefix('<tool_call>')}",
    ],
)
def test_neither_of_two_calls_is_lost(builder, text):
    assert calls(read(builder, text)) == [("run", {}), ("view", {"path": "m.py"})]


@pytest.mark.parametrize(
    "text",
    [
        "<function=run\n</function>\n</tool_call>",
        "<function=run>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "<function=run>\nnow\n</function>",
        "<function=fly>\n</function>\n</tool_call>",
        '{"name": "run"}\n</tool_call>',
        f"{BODY}\nThis is how one calls it.",
    ],
)
def test_what_looks_like_a_call_and_is_none_is_told_to_the_policy(builder, text):
    reply = read(builder, text)
    assert (reply.tool_calls, reply.content) == ([], text)
    assert reply.parse_error.startswith("Tool call not understood")


@pytest.mark.parametrize("quoted", [CALL, CALL.removeprefix("<tool_call>"), BODY, f"{BODY}\n</tool_call>"])
def test_a_call_that_is_quoted_on_the_way_to_a_real_one_does_not_act(builder, quoted):
    reply = read(builder, ("The issue says\n" + quoted + "\nSo I look.\n", False), CALL)
    assert calls(reply) == [("view", {"path": "m.py"})]
    assert "So I look." in reply.content
    assert not read(builder, f"To call it write {BODY} and wait.").parse_error


def test_a_value_is_not_ended_by_a_mark_that_is_quoted_in_it(builder):
    inner = (
        "a</parameter>b\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=run>\n</function>"
    )
    text = f"<parameter=path>\n{inner}\n</parameter>\n<parameter=line>\n3\n</parameter>"
    said = ["<tool_call>", (f"\n<function=view>\n{text}\n</function>\n", False), "</tool_call>"]
    assert calls(read(builder, *said)) == [("view", {"path": inner, "line": 3})]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 3, "enum": 5, "anyOf": 7},
        {"anyOf": {"type": "null"}},
        {"enum": [[1], {"a": 2}, None, 1.5]},
        {"type": ["string", 3], "oneOf": [4, [5]]},
    ],
)
def test_no_schema_breaks_the_reader(builder, schema):
    deep: object = schema
    for _ in range(400):
        deep = {"anyOf": [deep, schema]}
    for each in (schema, deep):
        function = {"name": "view", "parameters": {"properties": {"path": each}}}
        reply = read(builder, CALL, tools=json.dumps([{"type": "function", "function": function}]))
        assert calls(reply) == [("view", {"path": "m.py"})]


class Counted(str):
    """A text that counts the characters which are searched, compared or copied one by one."""

    seen = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        Counted.seen += len(part)
        return part

    def find(self, part, start=0, end=sys.maxsize):
        at = super().find(part, start, end)
        Counted.seen += (at if at >= 0 else min(end, len(self))) - start
        return at


def work(form: ToolFormat, text: str, control: dict[str, list[int]]) -> int:
    """Count the calls of functions and the characters that a reply costs to read."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    Counted.seen = 0
    spelled = CompletionText(Counted(text), control)
    sys.setprofile(count)
    try:
        parse(spelled, form, truncated=False, tools=TOOLS, thinking=False)
    finally:
        sys.setprofile(None)
    return calls + Counted.seen


HOSTILE = [
    "<function=view>\n",
    "</parameter></function>",
    "</parameter></function></tool_call>",
    "<function=view><parameter=path>",
    "\n<function=view>\n<parameter=path>\n<tool_call>\n<function=run>\n</function>\n</tool_call>",
    f"{CALL}\n</parameter>\n",
    f"{CALL}\n",
    f"{BODY}\n",
    "\n</parameter>\n<parameter=path>\n",
    "</tool_call>",
    "</parameter>",
    "\n",
    '<tool_call>{"name": "run", "arguments": {}}</tool_call>\n',
    "<tool_call> ",
]


@pytest.mark.parametrize("form", ["qwen3_coder", "hermes"])
@pytest.mark.parametrize("start", ["", "<tool_call><function=view><parameter=path>"])
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_reply_of_twice_the_size_takes_twice_the_work(form, start, piece):
    for are_tokens in (False, True):
        costs = []
        for size in (10_000, 20_000):
            text = start + piece * (size // len(piece))
            places = {mark: [m.start() for m in re.finditer(mark, text)] for mark in MARKS[:2]}
            costs.append(work(form, text, places if are_tokens else {}))
        assert costs[1] < 2.5 * costs[0]
