# ruff: noqa: E501
"""A model folder without weights: a tiny byte-level tokenizer, and templates that have the traits of known ones."""

import functools
import json
import math
import os
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hpc_swe.demo.model import TEMPLATE
from hpc_swe.models.model_shape import ModelShape

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
TEXT = """You repair programs. Tools: view, replace, run. system user assistant tool
{"name": "view", "arguments": {"path": "m.py"}} def f(x, y): return x + y  # <function=view> <parameter=path>
"""

SHAPE: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
}

HERMES = TEMPLATE
# What these share with the families' templates is where control tokens stand and what they ask of a message;
# the words are our own.
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
THINKING = QWEN3.replace("OPEN", "")
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


@functools.cache
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 4], trainer)
    return _with_control(tokenizer)


def sentencepiece_json(scheme: str) -> str:
    """A tokenizer as those converted from SentencePiece are; `scheme` says where a space comes before a text.

    "legacy" is the form of Llama 2: a normalizer puts the space there, and no part is a Metaspace.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    words = TEXT.replace("\n", " ")  # which is a byte in such tokenizers
    trained.train_from_iterator([words * 4], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _with_control(tokenizer)


def _with_control(tokenizer: Tokenizer) -> str:
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CONTROL[:3]])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in CONTROL[3:]])
    return tokenizer.to_str()


def make_model(folder: Path, chat_template: str, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text(chat_template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    return folder


def write_weights(folder: Path, but: str = "") -> None:
    """Write a sparse file of zeros for the tensors that config.json asks for, but one."""
    header, end = dict[str, object](), 0
    for name, size in ModelShape.read(folder).tensors.items():
        offsets = [end, end := end + 2 * math.prod(size)]
        if name != but:
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": offsets}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
