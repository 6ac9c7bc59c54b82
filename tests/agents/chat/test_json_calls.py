"""Calls of Llama 3 and of Mistral: what templates like theirs write is read, and faults are explained."""

import json

import pytest

from hpc_swe.agents.chat import TokenBuilder, ToolFormat
from hpc_swe.agents.chat.marks import CompletionText
from hpc_swe.agents.chat.replies import parse
from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Message, ToolCall
from tests.kit.toy_model import make_model

# As Llama's: one call, no text beside it, results in JSON, and tools with the first question.
LLAMA = """{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|im_start|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|im_end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>ipython\\n' }}{{- {'output': message.content} | tojson }}{{- '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if tools and loop.first %}{{- tools | tojson }}{%- endif %}{{- message.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As Mistral's later ones: no opening of an answer, and calls behind the text.
MISTRAL = """{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments | tojson }}{%- endfor %}{{- '<|im_end|>' }}
{%- else %}{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{%- endif %}
{{- '<|im_start|>' + message.content + '<|im_start|>' }}{%- endif %}{%- endfor %}"""
TEMPLATES: dict[ToolFormat, str] = {"llama3_json": LLAMA, "mistral": MISTRAL}
VIEW = '{"path": "m.py"}'


@pytest.fixture(scope="module")
def builders(tmp_path_factory) -> dict[str, TokenBuilder]:
    root = tmp_path_factory.mktemp("models")
    return {kind: TokenBuilder(make_model(root / kind, text), kind) for kind, text in TEMPLATES.items()}


def read(kind: ToolFormat, text: str, **control: list[int]) -> Reply:
    return parse(CompletionText(text, control), kind, truncated=False, tools="", thinking=False)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_conversation_is_read_as_it_was_written(builders, kind):
    """The builder checks the template's call when it is made; a turn is never rendered twice."""
    builder, call = builders[kind], ToolCall(name="view", arguments=VIEW)
    reply = builder.reply(builder.encode_answer(Message(role="assistant", content="", tool_calls=[call])))
    assert [(each.name, json.loads(each.arguments)) for each in reply.tool_calls] == [
        ("view", json.loads(VIEW))
    ]
    results = builder.extend(builder.end_id, [Message(role="tool", content='a "quoted" line')])
    assert "quoted" in builder.tokens.decode(results)


def test_a_template_of_another_form_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"which is not llama3_json"):
        TokenBuilder(make_model(tmp_path, MISTRAL), "llama3_json")


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("llama3_json", ' {"name": "view", "parameters": {"path": "m.py"}}\n', "", [("view", VIEW)]),
        (
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "view", "parameters": {"path": "m.py"}}<|eom_id|>',
            "",
            [("view", VIEW)],
        ),
        (
            "llama3_json",
            '<think>a</think>{"name": "view", "parameters": {"path": "m.py"}}; '
            '{"name": "run", "parameters": {}}',
            "<think>a</think>",
            [("view", VIEW), ("run", "{}")],
        ),
        ("llama3_json", 'See {"name": "view", "parameters": {}}', None, []),
        ("llama3_json", '{"path": "m.py"} is a table', None, []),
        ("mistral", f"Look.[TOOL_CALLS]view[ARGS]{VIEW}", "Look.", [("view", VIEW)]),
        ("mistral", f"[TOOL_CALLS]view[CALL_ID]a1B2c3D4e[ARGS]{VIEW}", "", [("view", VIEW)]),
        ("mistral", f"[TOOL_CALLS]view{VIEW}[TOOL_CALLS]run[ARGS]{{}}", "", [("view", VIEW), ("run", "{}")]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "view", "arguments": {"path": "[TOOL_CALLS]"}, "id": "a1B2c3D4e"}]',
            "",
            [("view", '{"path": "[TOOL_CALLS]"}')],
        ),
        ("mistral", "There is no call.", None, []),
    ],
)
def test_calls_are_read_and_other_text_is_none(kind, text, content, calls):
    reply = read(kind, text)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls
    assert reply.content == (text if content is None else content)
    assert not reply.parse_error


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("llama3_json", '{"name": "view", "parameters": {"path": ', "Tool call not understood"),
        ("llama3_json", '{"name": "view", "parameters": "m.py"}', '"arguments" must be a JSON object'),
        ("llama3_json", '{"name": "view", "arguments": {}}', "parameters"),
        ("llama3_json", '{"name": "view", "parameters": {}} Done.', "text follows the call of 'view'"),
        ("mistral", f"[TOOL_CALLS]view[ARGS]{VIEW} Done.", "text follows a call"),
        ("mistral", "[TOOL_CALLS]view m.py", "Expecting value"),
        ("mistral", '[TOOL_CALLS][{"name": "view"}]', "arguments"),
        ("mistral", "[TOOL_CALLS]", "Expecting value"),
        ("mistral", '[TOOL_CALLS]view[ARGS]{"end": NaN}', "malformed"),  # which Python's decoder would take
    ],
)
def test_a_fault_is_explained_to_the_policy(kind, text, fault):
    reply = read(kind, text)
    assert (reply.content, reply.tool_calls) == (text, [])
    assert fault in reply.parse_error


def test_a_quoted_mark_is_no_call_if_the_model_has_a_token_for_it():
    quoted = f"It wrote [TOOL_CALLS]run[ARGS]{{}}. [TOOL_CALLS]view[ARGS]{VIEW}"
    reply = read("mistral", quoted, **{"[TOOL_CALLS]": [quoted.rindex("[TOOL_CALLS]")]})
    assert [call.name for call in reply.tool_calls] == ["view"]
