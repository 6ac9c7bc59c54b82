"""The answer agent: repairs out of fenced blocks, its tries, and what a reply can never change."""

from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.agents.loops._answers import BadAnswer, Form, changes
from hpc_swe.agents.loops.answer_agent import AnswerAgent
from hpc_swe.agents.loops.base import Reply, Result
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Task
from tests.kit.scripted import SMALL, Script

TEST = "from mod import f\n\ndef test_f():\n    assert f(2) == 4\n"
TASK = msgspec.structs.replace(
    SMALL,
    files={"mod.py": "def f(x):\n    return x + x + 1\n", "test.py": TEST, ".debugignore": "secret*\n"},
    tests=msgspec.structs.replace(SMALL.tests, command="python -m pytest test.py", files={"test.py": TEST}),
)
RIGHT = "It doubles.\n```python\ndef f(x):\n    return 2 * x\n```\n"
WRONG = "```python\ndef f(x):\n    return 3 * x\n```"
MODULE = """import os


class A:
    @property
    def x(self):
        return 1

    @x.setter
    def x(self, value):
        pass

    def m(self):
        return 1


def g():
    return 1
"""


def two(text: str) -> str:
    return text.replace("return 1", "return 2")


def solve(*replies: Reply | str | Exception, task: Task = TASK, **fields: object) -> tuple[Result, str]:
    with Process().open(task) as sandbox:
        result = AnswerAgent(**fields).solve(task, sandbox, Script(*replies))
        return result, sandbox.read("mod.py").decode()


def test_the_first_message_shows_the_files_and_the_reply_replaces_one():
    result, text = solve(RIGHT)
    assert (result.exit_status, text) == ("submitted", "def f(x):\n    return 2 * x\n")
    assert [message.role for message in result.messages] == ["system", "user", "assistant"]
    opening = result.messages[1].content
    assert opening.startswith("Mend it.\n\nmod.py\n```python\ndef f(x):")
    assert TEST in opening
    assert ".debugignore" not in opening


def test_a_failing_try_is_answered_by_the_visible_tests_until_they_pass():
    result, text = solve(WRONG, RIGHT, RIGHT, max_turns=3)
    assert result.exit_status == "submitted"
    assert "2 * x" in text
    assert [message.role for message in result.messages[2:]] == ["assistant", "user", "assistant"]
    assert "assert 6 == 4" in result.messages[3].content


def test_the_last_try_is_handed_in_whatever_the_tests_say():
    result, text = solve(WRONG, "I give up.", max_turns=2)
    assert result.exit_status == "submitted"
    assert "3 * x" in text


@pytest.mark.parametrize(("truncated", "status"), [(True, "max_turns"), (False, "submitted")])
def test_only_a_reply_that_its_length_cut_off_counts_as_truncated(truncated, status):
    result, _ = solve(Reply("```python\ndef f(x):\n", truncated=truncated))
    assert result.exit_status == status


def test_tests_that_end_the_sandbox_are_the_policys_own_failure():
    killer = "```python\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n```"
    result, _ = solve(killer, RIGHT, max_turns=2)
    assert result.exit_status in ("agent_error", "submitted")  # a sandbox may survive it
    assert result.exit_status != "infra_error"


@pytest.mark.parametrize("path", ["test.py", ".debugignore", "../mod.py", "/etc/passwd", "new.py"])
def test_a_reply_changes_no_tests_and_nothing_outside_the_program(path):
    reply = f"{path}\n```python\nX = 1\n```\nmod.py\n```python\ndef f(x):\n    return 2 * x\n```"
    with Process().open(TASK) as sandbox:
        AnswerAgent().solve(TASK, sandbox, Script(reply))
        assert sandbox.read("test.py").decode() == TEST
        assert {*sandbox.paths()} == {*TASK.files}


def test_tasks_without_files_are_refused_before_a_run():
    with pytest.raises(ConfigError, match="task t of tests has no files besides its tests"):
        AnswerAgent().check_tasks([msgspec.structs.replace(TASK, files={"test.py": TEST})])


def test_a_fence_in_a_file_does_not_close_its_block():
    task = msgspec.structs.replace(TASK, files={"mod.py": 'X = """\n```\n"""\n'})
    result, _ = solve(RIGHT, task=task)
    assert '````python\nX = """\n```\n"""\n````' in result.messages[1].content


G, METHOD = "def g():\n    return 1", "    def m(self):\n        return 1"
METHOD_WITH_TEXT = 'def m(self):\n    return """\na\n  b"""'
GETTER = "    @property\n    def x(self):\n        return 1"


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("```\nx = 1\n```\nCall it so:\n```\nx = 2\n```", "x = 2\n"),
        ("**mod.py**\n```python\nx = 2\n```\n```sh\npython mod.py\n```", "x = 2\n"),
        ("```python mod.py\r\nx = 2\r\n```", "x = 2\n"),
    ],
)
def test_the_last_block_is_the_file_unless_a_block_is_named(reply, wanted):
    assert changes(reply, {"mod.py": MODULE}, "file") == {"mod.py": wanted}


@pytest.mark.parametrize(
    ("block", "old", "new"),
    [
        (two(G), G, two(G)),
        (two(METHOD), METHOD, two(METHOD)),
        (f"class A:\n{two(GETTER)}", GETTER, two(GETTER)),
        (f"import re\n{two(G)}", G, f"import re\n{two(G)}"),
        (f"from __future__ import annotations\n{two(G)}\n\n\nresult = g()", G, two(G)),
        (
            METHOD_WITH_TEXT,
            METHOD,
            METHOD_WITH_TEXT.replace("\n    return", "\n        return").replace("def", "    def"),
        ),
    ],
    ids=[
        "function",
        "indented method",
        "one of two of a name",
        "with an import",
        "with a call",
        "with a text",
    ],
)
def test_a_function_takes_the_place_of_the_one_of_its_name(block, old, new):
    found = changes(f"```python\n{block}\n```", {"mod.py": MODULE}, "function")
    assert found == {"mod.py": MODULE.replace(old, new)}


@pytest.mark.parametrize(
    ("form", "reply", "why"),
    [
        ("file", "def f(): pass", "no block"),
        ("file", "```python\nx = 2\n", "no block"),
        ("function", "```\nx = 2\n```", "no function"),
        ("function", "```\ndef h():\n    pass\n```", "0 of the files have h"),
        ("function", "```\ndef x(self):\n    pass\n```", "0 of the files have x"),
        ("function", "```\ndef (:\n```", "no Python"),
    ],
)
def test_an_answer_that_does_not_fit_says_why(form, reply, why):
    with pytest.raises(BadAnswer, match=why):
        changes(reply, {"mod.py": MODULE}, form)


@given(st.text("`def gx():\n <>=*", max_size=300), st.sampled_from(get_args(Form)))
def test_no_reply_raises_anything_else_or_names_another_file(reply, form):
    files = {"mod.py": MODULE, "other.py": "y = 1\n"}
    with suppress(BadAnswer):
        assert {*changes(reply, files, form)} <= {*files}


def test_a_function_is_put_where_python_counts_its_lines():
    """A lone carriage return ends one; the text of the file may be of any age."""
    text = "# a\r# b\ndef f(x):\n    return 3 * x\n\n\ndef g(x):\n    return 7\n"
    found = changes("```python\ndef f(x):\n    return 2 * x\n```", {"mod.py": text}, "function")
    assert found["mod.py"] == text.replace("3 * x", "2 * x").replace("\r", "\n")
