"""Rows of made-up conversations in chat form, and what a model of the tests must be trained on for each.

The expectations are written by hand, as pieces of text with 1 where the policy writes and 0 elsewhere. Each
piece is tokenized on its own. They know nothing of templates or of the token builder.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

Piece = tuple[str, int]
VIEW = {
    "type": "function",
    "function": {
        "name": "view",
        "description": "Show a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
SHOWN = (
    "Tools, one JSON schema a line:\n<tools>\n"
    '{"type": "function", "function": {"name": "view", "description": "Show a file.", "parameters": '
    '{"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}\n'
    '</tools>\nCall one so:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'
)


def calls(*named: tuple[str, dict[str, object]]) -> list[dict[str, object]]:
    """Tool calls as rows have them; their ids are call_0, call_1 and so on."""
    return [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
        for n, (name, values) in enumerate(named)
    ]


def said(role: str, content: str | None, **more: object) -> dict[str, object]:
    return {"role": role, "content": content} | more


ONE_CALL = {
    "messages": [
        said("system", "Repair it."),
        said("user", "m.py fails."),
        said("assistant", "I look.", tool_calls=calls(("view", {"path": "m.py"}))),
        said("tool", "x = 1", tool_call_id="call_0", name="view"),
        said("assistant", None, tool_calls=calls(("submit", {}))),
        said("tool", "Submitted.", tool_call_id="call_0"),
    ],
    "tools": [VIEW],
}
ONE_CALL_PIECES: list[Piece] = [
    (
        f"<|im_start|>system\nRepair it.\n\n{SHOWN}"
        "<|im_start|>user\nm.py fails.<|im_end|>\n<|im_start|>assistant\n",
        0,
    ),
    ('I look.\n<tool_call>\n{"name": "view", "arguments": {"path": "m.py"}}\n</tool_call><|im_end|>', 1),
    ("\n<|im_start|>user\n<tool_response>\nx = 1\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
    ('<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>', 1),
]
"""The last tool's answer is not there: nothing follows it that is trained."""
TWO_CALLS = {
    "messages": [
        said("user", "Look at both."),
        said("assistant", "", tool_calls=calls(("view", {"path": "a.py"}), ("view", {"path": "b.py"}))),
        said("tool", "A", tool_call_id="call_0"),
        said("tool", "B", tool_call_id="call_1"),
        said("assistant", "They differ."),
        said("user", "Call a tool."),
        said("assistant", "Sorry.", tool_calls=calls(("submit", {}))),
    ],
}
TWO_CALLS_PIECES: list[Piece] = [
    ("<|im_start|>user\nLook at both.<|im_end|>\n<|im_start|>assistant\n", 0),
    (
        '<tool_call>\n{"name": "view", "arguments": {"path": "a.py"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "view", "arguments": {"path": "b.py"}}\n</tool_call><|im_end|>',
        1,
    ),
    (
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        0,
    ),
    ("They differ.<|im_end|>", 1),
    ("\n<|im_start|>user\nCall a tool.<|im_end|>\n<|im_start|>assistant\n", 0),
    ('Sorry.\n<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>', 1),
]
THOUGHTS = {
    "messages": [
        said("user", "Why?"),
        said(
            "assistant",
            "<think>\nIt adds.\n</think>\n\nI look.",
            tool_calls=calls(("view", {"path": "m.py"})),
        ),
        said("tool", "x - 1", tool_call_id="call_0"),
        said("assistant", "It subtracts.", reasoning_content="A minus."),
    ],
}
THOUGHTS_PIECES: list[Piece] = [
    ("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", 0),
    (
        "<think>\nIt adds.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "view", "arguments": {"path": "m.py"}}\n</tool_call><|im_end|>',
        1,
    ),
    ("\n<|im_start|>user\n<tool_response>\nx - 1\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
    ("<think>\nA minus.\n</think>\n\nIt subtracts.<|im_end|>", 1),
]


def tokens(model: Path, pieces: Iterable[Piece]) -> tuple[list[int], list[int]]:
    """Ids and mask of the pieces, by the tokenizer alone."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = []
    mask: list[int] = []
    for text, trained in pieces:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        ids += found
        mask += [trained] * len(found)
    return ids, mask


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
