"""Files of very many lines: a tool takes memory for the text, and not for each of its lines."""

import tracemalloc
from collections.abc import Iterator

import pytest

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools._text.files import count_lines, line_start
from hpc_swe.agents.tools.base import ToolError
from tests.kit.debugging import Session, task

MOST = 1_000_000
TIMES = 8
"""Bytes of memory for a byte of the file; it is read, decoded, cut and written again."""
TEXTS = {
    "ends": "\n" * MOST,
    "pairs": "ab\n" * (MOST // 3),
    "windows": "\r\n" * (MOST // 2),
    "one": "x" * MOST,
}
CALLS = {
    "view": {},
    "view the end": {"start": MOST // 4, "end": MOST // 4 + 1},
    "replace": {"line": 1, "old": "no such text", "new": ""},
    "rewrite": {"start": 1, "end": 1, "new_code": "y"},
    "edit": {"old": "ab\nno such text", "new": ""},
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Process().open(task()) as opened:
        yield opened


def peak(act) -> int:
    tracemalloc.start()
    try:
        act()
    except ToolError:
        pass
    finally:
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("kind", TEXTS)
def test_a_tool_takes_memory_for_the_text_and_not_for_its_lines(sandbox, kind):
    of = task()
    tools = Session(sandbox, None, of)
    for call, arguments in CALLS.items():
        sandbox.write("many", TEXTS[kind].encode())
        used = peak(lambda a=arguments, c=call: tools.use(c.split()[0], path="many", **a))
        assert used <= TIMES * MOST, call


@pytest.mark.parametrize(
    "text", ["", "\n", "a", "a\n", "a\nb", "\n\n", "\n" * 9000 + "b", "a\r\n\fb\n" * 5000]
)
def test_lines_are_found_where_a_list_of_them_has_them(text):
    *lines, last = text.split("\n")
    lines = [f"{line}\n" for line in lines] + ([last] if last else [])
    assert count_lines(text) == len(lines)
    places = {1, 2, 3, len(lines) // 2 + 1, len(lines), len(lines) + 1, len(lines) + 7} - {0}
    assert {n: line_start(text, n) for n in places} == {n: len("".join(lines[: n - 1])) for n in places}
