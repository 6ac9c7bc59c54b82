# ruff: noqa: E501
"""Model folders without weights whose templates have the traits of the families that are trained.

What they share with those is where control tokens stand and what the template asks of a message; the
words are our own.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.demo.model import TEMPLATE as DEMO
from tests.kit.toy_model import CONTROL, HERMES, THINKING, XML, make_model, tokenizer_json

MORE = [
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
NAMES = CONTROL + MORE
"""What Qwen's tokenizers add to their vocabulary."""

# Qwen2.5: a system turn of its own when none is given; calls begin a turn without a line for content.
JSON_HEAD = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are somebody.' }}{%- endif %}
{{- '\\n\\n# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- DEFAULT }}{%- endif %}"""
JSON_CALLS = """{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- LINE + '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}"""
RESULTS = """{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
QWEN25 = (
    JSON_HEAD.replace("DEFAULT", "'<|im_start|>system\\nYou are somebody.<|im_end|>\\n'")
    + """{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"""
    + JSON_CALLS.replace("LINE", "'\\n'")
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + RESULTS
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Qwen3: looks back for the last question, which no tool's answer is; drops the thoughts before it.
QWEN3 = (
    JSON_HEAD.replace("DEFAULT", "''")
    + """{%- set ns = namespace(looking=true, question=messages | length - 1) %}
{%- for message in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}
{%- if ns.looking and message.role == 'user' and message.content is string
   and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.looking = false %}{%- set ns.question = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.question and (loop.last or thought) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"""
    + JSON_CALLS.replace("LINE", "('' if loop.first and not content else '\\n')")
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + RESULTS.replace("message.content", "content")
    + """{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}OPEN{%- endif %}"""
)
# Qwen3-Coder: tools and calls as marks, in which names and keys stand bare.
CODER = """{%- macro others(item, known) %}{%- for key in item %}{%- if key not in known %}
{%- if item[key] is mapping or item[key] is sequence and item[key] is not string %}{{- '\\n<' ~ key ~ '>' ~ (item[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
{%- else %}{{- '\\n<' ~ key ~ '>' ~ item[key] ~ '</' ~ key ~ '>' }}{%- endif %}{%- endif %}{%- endfor %}{%- endmacro %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}
{%- if system is defined %}{{- '<|im_start|>system\\n' + system }}
{%- elif tools is iterable and tools | length > 0 %}{{- '<|im_start|>system\\nYou act by tools.' }}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}{{- '\\n\\n<tools>' }}
{%- for tool in tools %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
{%- if tool.description is defined %}{{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}{{- '\\n<parameters>' }}
{%- if tool.parameters is mapping and tool.parameters.properties is mapping %}{%- for name, fields in tool.parameters.properties | items %}
{{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}{%- if fields.type is defined %}{{- '\\n<type>' ~ (fields.type | string) ~ '</type>' }}{%- endif %}
{{- others(fields, ['name', 'type', 'description']) }}{{- '\\n</parameter>' }}{%- endfor %}{%- endif %}
{{- others(tool.parameters, ['type', 'properties']) }}{{- '\\n</parameters>\\n</function>' }}{%- endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}
{%- if system is defined or tools is iterable and tools | length > 0 %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in rest %}
{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
{{- '<|im_start|>assistant' }}{%- if message.content is string and message.content | trim | length > 0 %}{{- '\\n' + (message.content | trim) + '\\n' }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role in ('user', 'system', 'assistant') %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{%- if loop.previtem and loop.previtem.role != 'tool' or loop.first %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Qwen3.5: the thoughts of Qwen3 and the calls of Qwen3-Coder; each turn after the last question has a thought.
BARE_CALLS = """{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- ('' if loop.first and not content else '\\n\\n' if loop.first else '\\n') + '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}"""
QWEN35 = QWEN3.replace(
    JSON_CALLS.replace("LINE", "('' if loop.first and not content else '\\n')"), BARE_CALLS
).replace(" and (loop.last or thought)", "")

FORMS: dict[str, tuple[str, str, dict[str, object], str]] = {
    "qwen2.5": (QWEN25, "hermes", {}, ""),
    "qwen3": (QWEN3.replace("OPEN", ""), "hermes", {"enable_thinking": True}, "<think>\nhm\n</think>\n\n"),
    "qwen3 not thinking": (QWEN3.replace("OPEN", ""), "hermes", {"enable_thinking": False}, ""),
    "qwen3 only thinking": (
        QWEN3.replace("OPEN", "{{- '<think>\\n' }}"),
        "hermes",
        {},
        "hm\n</think>\n\n",
    ),
    "qwen3-coder": (CODER, "qwen3_coder", {}, ""),
    "qwen3.5": (QWEN35.replace("OPEN", "{{- '<think>\\n' }}"), "qwen3_coder", {}, "hm\n</think>\n\n"),
    "qwen3.5 not thinking": (QWEN35.replace("OPEN", ""), "qwen3_coder", {"enable_thinking": False}, ""),
    "demo": (DEMO, "hermes", {}, ""),
    "toy": (HERMES, "hermes", {}, ""),
    "toy thinking": (THINKING, "hermes", {}, "<think>\nhm\n</think>\n\n"),
    "toy xml": (XML, "qwen3_coder", {}, ""),
}
"""Template, format of calls, arguments, and the thought that an answer begins with."""


def form(kind: str, root: Path) -> TokenBuilder:
    """The builder of a folder with all added tokens."""
    source, tool_format, arguments, _ = FORMS[kind]
    folder = make_model(root / kind, source)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in MORE])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return TokenBuilder(folder, tool_format, arguments)


Part = tuple[str, bool]
"""Text of a reply, and whether its control tokens were sampled as such."""


def call(kind: str, name: str, **arguments: object) -> list[Part]:
    """A call as the policy samples it: the marks are control tokens, what is between them is not."""
    if FORMS[kind][1] == "hermes":
        said = json.dumps({"name": name, "arguments": arguments})
    else:
        keys = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        said = f"<function={name}>\n{''.join(keys)}</function>"
    return [("<tool_call>\n", True), (said, False), ("\n</tool_call>", True)]


def thought(kind: str, text: str) -> list[Part]:
    """How answers begin: perhaps with a thought, in which the text is quoted."""
    opening, _, closing = FORMS[kind][3].partition("hm")
    return [(opening, True), (f"hm {text}", False), (closing, True)] if closing else []
