# ruff: noqa: E501
"""A model folder without weights: a tiny byte-level tokenizer, and templates that behave like known ones."""

import functools
import json
import math
import os
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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

# Tools in the system turn, several tool results in one user turn, as hermes-style models have it.
HEAD = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- 'Write <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"""
TOOL = """{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"""
JSON_CALLS = """{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}"""
XML_CALLS = """{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value | string if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"""
# As Qwen3-Coder: what a tool is called stands in the template's text, not in JSON.
XML_HEAD = HEAD.replace(
    "{{- tool | tojson + '\n' }}",
    """
{{- '<' ~ tool.function.name ~ '>' ~ tool.function.description | trim }}
{%- for key, schema in tool.function.parameters.properties | items %}
{{- ' <' ~ key ~ '>' ~ schema.type ~ ('!' if key in tool.function.parameters.required or [] else '') }}
{%- endfor %}{{- '\n' }}""",
)
PLAIN_ANSWER = """{{- '<|im_start|>assistant\n' + message.content }}CALLS{{- '<|im_end|>\n' }}"""
# As Qwen3: thoughts before the last question are dropped, later ones are written anew.
THINKING_ANSWER = """{%- set thought = '' %}{%- set said = message.content %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + said }}
{%- else %}{{- '<|im_start|>assistant\n' + said }}{%- endif %}CALLS{{- '<|im_end|>\n' }}"""
FRAME = """{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}
HEAD{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}TOOL{%- elif message.role == 'assistant' %}ANSWER{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""


def template(answer: str, calls: str) -> str:
    return (
        FRAME.replace("HEAD", HEAD).replace("TOOL", TOOL, 1).replace("ANSWER", answer).replace("CALLS", calls)
    )


HERMES = template(PLAIN_ANSWER, JSON_CALLS)
THINKING = template(THINKING_ANSWER, JSON_CALLS)
XML = template(PLAIN_ANSWER, XML_CALLS).replace(HEAD, XML_HEAD)


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
