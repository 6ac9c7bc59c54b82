# ruff: noqa: E501
"""Model folders without weights, in all forms of templates, and replies as their policies sample them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from hpc_swe.agents.chat import TokenBuilder
from tests.kit.toy_model import (
    CODER,
    CONTROL,
    HERMES,
    QWEN3,
    QWEN25,
    QWEN35,
    THINKING,
    make_model,
    tokenizer_json,
)

MORE = [
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
NAMES = CONTROL + MORE
"""What Qwen's tokenizers add to their vocabulary."""

FORMS: dict[str, tuple[str, str, dict[str, object], str]] = {
    "qwen2.5": (QWEN25, "hermes", {}, ""),
    "qwen3": (THINKING, "hermes", {"enable_thinking": True}, "<think>\nhm\n</think>\n\n"),
    "qwen3 not thinking": (THINKING, "hermes", {"enable_thinking": False}, ""),
    "qwen3 only thinking": (QWEN3.replace("OPEN", "{{- '<think>\\n' }}"), "hermes", {}, "hm\n</think>\n\n"),
    "qwen3-coder": (CODER, "qwen3_coder", {}, ""),
    "qwen3.5": (QWEN35.replace("OPEN", "{{- '<think>\\n' }}"), "qwen3_coder", {}, "hm\n</think>\n\n"),
    "qwen3.5 not thinking": (QWEN35.replace("OPEN", ""), "qwen3_coder", {"enable_thinking": False}, ""),
    "demo": (HERMES, "hermes", {}, ""),
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
