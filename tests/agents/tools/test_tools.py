"""Tools by the policy's calls, and the host's hand in a hostile folder."""

import errno
import json
import os
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_swe.agents import pytest_command
from hpc_swe.agents.sandboxes._tree import READ_BYTES, Tree
from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox, SandboxWrapper, TreeEntry
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools.base import SandboxBroken, ToolError, invoke, schema
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import known, load
from hpc_swe.base.records import TestPlan
from tests.kit.scripted import SMALL

SOURCE = "def add(a, b):\n    return a - b - b\n"
TESTS = "from mod import add\n\n\ndef test_0():\n    assert add(1, 2) == 3\n"
TASK = msgspec.structs.replace(
    SMALL,
    files={"mod.py": SOURCE, "test_mod.py": TESTS, "no_end.txt": "a\nb"},
    tests=TestPlan(
        command="python -m pytest -q test_mod.py test_hidden.py",
        files={"test_hidden.py": "def test_1(): assert False\n"},
        fail_to_pass=["test_mod.py::test_0"],
        timeout_s=10.0,
    ),
)

COUNTS = """
import ast
names, parse = [], ast.parse
def counted(text, *rest, **named):
    names.extend(rest[:1])
    return parse(text, *rest, **named)
ast.parse = counted
def pytest_unconfigure():
    print(names.count("source"))
"""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Process().open(TASK) as opened:
        yield opened


def use(sandbox: Sandbox, name: str, /, **arguments: object) -> str:
    return invoke(load("tools", {"type": name}), json.dumps(arguments), sandbox, TASK)


def test_view_numbers_lines_from_one(sandbox):
    assert use(sandbox, "view", path="mod.py") == "1:def add(a, b):\n2:    return a - b - b"
    assert use(sandbox, "view", path="/testbed/mod.py", start=2) == "2:    return a - b - b"
    assert use(sandbox, "view", path="mod.py", start="1", end="1") == "1:def add(a, b):"
    short = load("tools", {"type": "view", "most_lines": 1})
    assert invoke(short, '{"path": "mod.py"}', sandbox, TASK) == "1:def add(a, b):\n... 2 lines in all"


def test_replace_changes_the_first_occurrence_in_its_line_only(sandbox):
    assert use(sandbox, "replace", path="mod.py", line=2, old="-", new="+") == "ok"
    assert sandbox.read("mod.py").decode() == "def add(a, b):\n    return a + b - b\n"
    assert use(sandbox, "replace", path="no_end.txt", line=2, old="b", new="c") == "ok"
    assert sandbox.read("no_end.txt") == b"a\nc"


def test_rewrite_makes_a_new_file(sandbox):
    assert use(sandbox, "rewrite", path="new/file.py", start=1, end=0, new_code="x = 1") == "ok"
    assert sandbox.read("new/file.py") == b"x = 1\n"
    assert use(sandbox, "rewrite", path="no_end.txt", start=3, end=2, new_code="c") == "ok"
    assert sandbox.read("no_end.txt") == b"a\nb\nc\n"


def test_evaluate_runs_the_visible_tests_only(sandbox):
    sandbox.write("test_hidden.py", b"def test_1(): assert False\n")
    assert "1 failed" in use(sandbox, "evaluate")
    use(sandbox, "rewrite", path="mod.py", start=2, end=2, new_code="    return a + b")
    assert "1 passed" in use(sandbox, "evaluate")


def test_evaluate_names_the_failing_line_and_no_plugins(sandbox):
    sandbox.write("pytest.ini", b"[pytest]\nfilterwarnings = error\n")
    told = use(sandbox, "evaluate")
    assert "test_mod.py:" in told, told
    assert "Warning" not in told, told


@pytest.mark.parametrize("body", ["def test_{n}():\n    assert add(\n        1, {n}\n    ) == 3", "("])
def test_evaluate_shows_what_pytest_does_and_parses_half_as_much_for_it(sandbox, body):
    tests = "\n\n\n".join(["from mod import add", *(body.format(n=n) for n in range(3))])
    sandbox.write("test_mod.py", tests.encode())
    sandbox.write("conftest.py", COUNTS.encode())
    options = ["-q", "--tb=short", "--no-header"]
    shows = load("tools", {"type": "evaluate", "options": options, "most_chars": 10_000})
    *told, _, few = invoke(shows, "", sandbox, TASK).split("\n")
    command = shlex.join(["python", "-m", "pytest", *options, "test_mod.py"])
    *plain, _, many = sandbox.run(command, 60).output.strip().split("\n")
    assert 0 < 2 * int(few) <= int(many)
    assert told == plain


def test_evaluate_has_a_limit_and_tells_a_broken_sandbox(sandbox):
    sandbox.write("mod.py", b"while True: pass\n")
    slow = load("tools", {"type": "evaluate", "timeout_s": 0.5})
    assert invoke(slow, "", sandbox, TASK) == "The tests ran longer than 0.5 s."

    class Broken:
        def python(self, *_: object) -> CommandResult:
            return CommandResult(exit_code=137, output="", broke_sandbox=True)

    with pytest.raises(SandboxBroken):
        invoke(slow, "", Broken(), TASK)


@pytest.mark.slow
def test_bash_shows_both_outputs_and_how_it_ended(sandbox):
    assert use(sandbox, "bash", command="echo out; echo err >&2; exit 3") == "out\nerr\n[exit code 3]"
    assert use(sandbox, "bash", command="true") == "[exit code 0]"
    assert use(sandbox, "bash", command="cat mod.py") == f"{SOURCE}[exit code 0]"
    late = use(sandbox, "bash", command="echo early; sleep 60; echo late", timeout_s=5)
    assert late == "early\n[stopped after 5 s]"


def test_every_bash_is_a_fresh_one_and_says_so(sandbox):
    use(sandbox, "bash", command="sleep 60 & echo $! > pid; export SEEN=1; cd /")
    seen = use(
        sandbox,
        "bash",
        command="ls no_end.txt; echo $SEEN; grep -q sleep /proc/$(cat pid)/cmdline || echo ended",
    )
    assert seen.startswith("no_end.txt\n\n")
    assert "ended" in seen
    assert "fresh" in schema(load("tools", {"type": "bash"})).description


def test_a_flood_is_cut_in_the_middle_and_says_by_how_much(sandbox):
    short = load("tools", {"type": "bash", "most_chars": 100})
    flood = invoke(short, '{"command": "echo begin; yes | head -c 20000; echo end"}', sandbox, TASK)
    begin, rest = flood.split("\n[... at least ")
    assert begin.startswith("begin\ny\n")
    assert rest.partition("]\n")[0] == "19909 characters cut ..."
    assert rest.endswith("y\nend\n[exit code 0]")
    assert len(use(sandbox, "bash", command="yes | head -c 10000000")) < 9000


HOSTILE = r"""
mkdir -p pkg/sub .git; mkfifo pipe; ln -s mod.py link; ln -s nowhere dangling; ln -s / root
printf 'return \377\n' > latin; printf 'return\0' > binary; echo return > .git/config
printf 'return' > pkg/sub/deep.py; printf 'return' > "$(printf 'two\nlines\377')"
head -c 300000 /dev/zero | tr '\0' x > long; echo return >> long; chmod 000 pkg/sub/deep.py
"""


def test_grep_numbers_lines_by_file_and_minds_nothing_that_lies_about(sandbox):
    sandbox.run(HOSTILE, 10.0)
    found = use(sandbox, "grep", pattern="^ *return|x{9}").split("\n")
    assert found[:6] == [
        "latin",
        "1:return \ufffd",
        "long",
        f"1:{'x' * 200} ...",
        "mod.py",
        "2:    return a - b - b",
    ]
    assert r"'two\nlines\udcff'" in found
    assert not [line for line in found if line in ("link", "pipe", "binary", ".git/config")]
    assert use(sandbox, "grep", pattern="def", path="/testbed/mod.py") == "mod.py\n1:def add(a, b):"
    assert use(sandbox, "grep", pattern="nothing like it", path="/testbed") == "no match"


@pytest.mark.slow
def test_grep_finds_only_so_much_and_searches_only_so_long(sandbox):
    sandbox.write("many", b"a\n" * 5000)
    few = load("tools", {"type": "grep", "most_matches": 3, "timeout_s": 5.0})
    answer = invoke(few, '{"pattern": "^a$"}', sandbox, TASK).split("\n")
    assert answer == ["many", "1:a", "2:a", "3:a", "... more than 3 matches; narrow pattern or path"]
    sandbox.write("many", b"a\n" * 3)
    sandbox.write("more", b"a\n")
    assert invoke(few, '{"pattern": "^a$"}', sandbox, TASK).split("\n") == answer
    sandbox.write("slow", b"a" * 40 + b"!")
    with pytest.raises(ToolError, match="longer than 5 s"):
        invoke(few, '{"pattern": "(a+)+$", "path": "slow"}', sandbox, TASK)


def test_edit_replaces_the_one_occurrence(sandbox):
    assert use(sandbox, "edit", path="mod.py", old="a - b - b\n", new="a + b\n") == "ok"
    assert sandbox.read("mod.py").decode() == "def add(a, b):\n    return a + b\n"
    assert use(sandbox, "edit", path="/testbed/new/file.py", old="", new="x = 1\n") == "ok"
    assert sandbox.read("new/file.py") == b"x = 1\n"


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("def f():\r\n  a\r\n", "def f():\n  a\n", "x\ny\n", "x\r\ny\r\n"),
        ("\r\na\r\n\r\nb\r\n", "\nb", "\nc\nd", "\r\na\r\n\r\nc\r\nd\r\n"),
        ("a\r\nb", "b", "c\nd", "a\r\nc\r\nd"),
        ("a\r\nb\nc\n", "b\nc", "x\ny", "a\r\nx\ny\n"),
        ("a\nb\r\nc\r\n", "b\nc", "x\ny", "a\nx\r\ny\r\n"),
        ("a\r\nb\r\n", "a\r\n", "a\n", "a\nb\r\n"),
        ("a\r\nb\r\n", "b", "c\r\nd\n", "a\r\nc\r\nd\n\r\n"),
        ("a\rb\n", "a\rb", "x\ny", "x\ny\n"),
        ("a\r\nb\nc", "c", "x\ny", "a\r\nb\nx\ny"),
        ("a\nb\r\nc", "c", "x\ny", "a\nb\r\nx\r\ny"),
    ],
)
def test_an_edit_keeps_line_ends_that_view_does_not_show(sandbox, text, old, new, result):
    sandbox.write("ends.txt", text.encode())
    assert use(sandbox, "edit", path="ends.txt", old=old, new=new) == "ok"
    assert sandbox.read("ends.txt").decode() == result


def test_replace_writes_the_line_ends_of_its_line(sandbox):
    sandbox.write("ends.txt", b"a\r\nb\nc")
    for line, old in ((1, "a"), (3, "b"), (5, "c")):
        assert use(sandbox, "replace", path="ends.txt", line=line, old=old, new="x\ny") == "ok"
    assert sandbox.read("ends.txt") == b"x\r\ny\r\nx\ny\nx\ny"


@pytest.mark.parametrize(
    "text", ["a: \r\n\tb \r\n\r\nc\r\n", "a: \n\tb \n\x0c\nc\n", "a\rb\n c\n", "a\n b\r"]
)
def test_what_view_shows_is_rewritten_and_edited_as_it_stood(sandbox, text):
    sandbox.write("ends.txt", text.encode())
    seen = [line.partition(":")[2] for line in use(sandbox, "view", path="ends.txt").split("\n")]
    found = use(sandbox, "grep", pattern="", path="ends.txt").split("\n")[1:]
    assert [line.partition(":")[2] for line in found] == seen
    for first in range(1, len(seen) + 1):
        for last in range(first, len(seen) + 1):
            piece = "\n".join(seen[first - 1 : last])
            ended = piece if last == len(seen) and not text.endswith("\n") else f"{piece}\n"
            use(sandbox, "rewrite", path="ends.txt", start=first, end=last, new_code=ended)
            if piece.strip():
                use(sandbox, "edit", path="ends.txt", old=piece, new=piece)
    assert sandbox.read("ends.txt").decode() == text


def test_rewrite_writes_the_line_ends_of_its_neighbours(sandbox):
    sandbox.write("ends.txt", b"a\r\nb")
    for line, new in ((3, "c\nd"), (1, "x"), (5, "y\r\nz"), (5, "\n")):
        assert use(sandbox, "rewrite", path="ends.txt", start=line, end=line - 1, new_code=new) == "ok"
    assert sandbox.read("ends.txt") == b"x\r\na\r\nb\r\nc\r\n\r\ny\r\nz\r\nd\r\n"


@pytest.mark.parametrize(
    ("text", "start", "end", "new_code", "result"),
    [
        ("a\nb\n", 2, 2, "c", "a\nc\n"),
        ("a\nb\n", 1, 2, "", ""),
        ("a\nb\n", 2, 1, "c", "a\nc\nb\n"),
        ("a\nb\n", 3, 2, "c\n", "a\nb\nc\n"),
        ("a\r\nb\n", 3, 2, "c", "a\r\nb\nc\n"),
        ("a\nb\r\nc", 3, 3, "d\ne", "a\nb\r\nd\r\ne"),
        ("a\nb\r\nc\n", 2, 1, "x", "a\nx\r\nb\r\nc\n"),
        ("a\nb", 2, 2, "c", "a\nc"),
        ("a\nb", 2, 2, "c\n", "a\nc\n"),
        ("a\nb", 1, 1, "c", "c\nb"),
        ("a\nb", 3, 2, "", "a\nb"),
        ("a", 1, 1, "b", "b"),
        ("a\rb", 1, 1, "c\nd", "c\nd"),
    ],
)
def test_rewrite_ends_lines_as_their_neighbours_and_the_file_as_it_was(
    sandbox, text, start, end, new_code, result
):
    sandbox.write("ends.txt", text.encode())
    assert use(sandbox, "rewrite", path="ends.txt", start=start, end=end, new_code=new_code) == "ok"
    assert sandbox.read("ends.txt").decode() == result


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ("foo\r\nbar\r\n", "foo$", ["1:foo"]),
        ("foo\r\nbar\r\n", "^$", []),
        ("a\n\nb\n", "^$", ["2:"]),
        ("", "^", []),
        ("x" * 200 + "\r\n", "x", ["1:" + "x" * 200]),
        ("a\r", "a", ["1:a\r"]),
    ],
)
def test_grep_matches_what_it_shows(sandbox, text, pattern, found):
    sandbox.write("ends.txt", text.encode())
    answer = use(sandbox, "grep", pattern=pattern, path="ends.txt")
    assert answer == ("\n".join(["ends.txt", *found]) if found else "no match")


def test_listdir_draws_files_to_a_depth(sandbox):
    sandbox.run(HOSTILE, 10.0)
    expected = ["binary", "latin", "long", "mod.py", "no_end.txt", "pkg/", "  sub/ (files: 1)", "test_mod.py"]
    assert use(sandbox, "listdir").split("\n") == [*expected, r"'two\nlines\udcff'"]
    assert use(sandbox, "listdir", path="/testbed/pkg/", depth=5) == "sub/\n  deep.py"
    assert use(sandbox, "listdir", path="/testbed", depth=1).split("\n")[5] == "pkg/ (files: 1)"
    short = load("tools", {"type": "listdir", "most_lines": 2})
    assert invoke(short, "", sandbox, TASK) == "binary\nlatin\n... 7 lines more"


@pytest.mark.slow
def test_a_flood_of_files_is_told_and_breaks_no_tool(sandbox):
    """The policy may make as many as it likes; what escaped as an error of the host would end the worker."""
    sandbox.run("mkdir -p f/deep z/y; touch z/y/own.py; cd f; seq 50001 | xargs touch; touch deep/er", 60.0)
    shown = ["f/ (files: not counted)", "mod.py", "no_end.txt", "test_mod.py", "z/ (files: 1)"]
    assert use(sandbox, "listdir", depth=1).split("\n") == shown
    assert use(sandbox, "listdir").split("\n")[::4] == ["f/ (more than 50000 names)", "z/"]
    assert use(sandbox, "listdir", path="f/deep") == use(sandbox, "view", path="f/deep") == "er"
    for name in ("listdir", "view"):
        with pytest.raises(ToolError, match="Cannot list f: more than 50000 names"):
            use(sandbox, name, path="f")
    assert use(sandbox, "rewrite", path="new.py", start=1, end=0, new_code="x = 1") == "ok"
    assert use(sandbox, "grep", pattern="def add") == "mod.py\n1:def add(a, b):"


def test_a_folder_that_cannot_be_listed_leaves_the_others_shown(sandbox):
    sandbox.run("mkdir -p shut open; touch shut/a open/b; ln -s open link; ln -s /etc etc; mkdir empty", 10.0)

    class Shut(SandboxWrapper):
        problem = errno.EACCES

        def entries(self, folder: str) -> dict[str, TreeEntry]:
            if folder == "shut":
                raise OSError(self.problem, os.strerror(self.problem))
            return super().entries(folder)

    refusing = Shut(sandbox)
    rest = ["shut/ (Permission denied)", "test_mod.py"]
    assert use(refusing, "listdir").split("\n") == ["mod.py", "no_end.txt", "open/", "  b", *rest]
    assert "shut/ (files: not counted)" in use(refusing, "listdir", depth=1).split("\n")
    Shut.problem = errno.EIO  # of the whole file system: asking on could take seconds for each folder
    for depth in (1, 2):
        with pytest.raises(ToolError, match="Cannot list .: Input/output error"):
            use(refusing, "listdir", depth=depth)


def test_listdir_leads_out_of_no_folder_and_goes_only_so_deep(sandbox):
    sandbox.run("ln -s /etc out; p=$(seq -s/ 80); mkdir -p $p; touch $p/lost 1/2/near; mkdir .git", 10.0)
    sandbox.write(".git/config", b"")
    with pytest.raises(ToolError, match="Cannot list out: "):
        use(sandbox, "listdir", path="out")
    lines = use(sandbox, "listdir", depth=1000).split("\n")
    assert "  near" in [line[2:] for line in lines]
    assert "65/ (too many folders within one another)" in [line.strip() for line in lines]
    assert "1/ (files: at least 1)" in use(sandbox, "listdir", depth=1)
    assert not [line for line in lines if "out" in line or "lost" in line or ".git" in line]
    assert use(sandbox, "listdir", path=".git") == "config"


def test_an_empty_file_is_filled_by_an_edit_without_old(sandbox):
    sandbox.write("pkg/__init__.py", b"")
    assert use(sandbox, "edit", path="pkg/__init__.py", old="", new="x = 1\n") == "ok"
    assert sandbox.read("pkg/__init__.py") == b"x = 1\n"


@pytest.mark.parametrize("end", [0, -1, -7, 99])
def test_view_goes_to_the_last_line_for_an_end_that_is_none(sandbox, end):
    assert use(sandbox, "view", path="mod.py", start=1, end=end) == use(sandbox, "view", path="mod.py")
    assert use(sandbox, "view", path="mod.py", start=2, end=end) == "2:    return a - b - b"
    short = load("tools", {"type": "view", "most_lines": 1})
    limited = invoke(short, json.dumps({"path": "mod.py", "end": end}), sandbox, TASK)
    assert limited == "1:def add(a, b):\n... 2 lines in all"


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({}, "#!/bin/bash\nset -uxo pipefail\necho 'it\n"),
        ({}, "python -m pytest -q"),
        (TASK.files, "make test"),
        (TASK.files, "python -m pytest 'test_mod.py"),
        (TASK.files, "python -m pytest -q test_hidden.py tests"),
    ],
)
def test_evaluate_without_visible_tests_says_so_and_runs_nothing(files, command):
    """Any other error would end the worker for good, and all tests of a repository could take hours."""

    class Unused:
        pass

    task = msgspec.structs.replace(
        TASK, files=files, tests=TestPlan(command=command, timeout_s=1.0, fail_to_pass=[])
    )
    with pytest.raises(ToolError, match="There are no visible tests."):
        invoke(load("tools", {"type": "evaluate"}), "", Unused(), task)


@pytest.mark.parametrize(
    ("command", "visible"),
    [
        (
            "python -m pytest -q ./test_mod.py tests/test_a.py::test_a",
            ["./test_mod.py", "tests/test_a.py::test_a"],
        ),
        ("pytest tests/ test_hidden.py", ["tests/"]),
        ("pytest tests", ["tests"]),
        ("pytest test", []),
        ("python3 -m pytest -q", ["."]),
        ("pytest .", ["."]),
    ],
)
def test_visible_tests_are_those_that_both_command_and_task_name(command, visible):
    files = {"test_mod.py": "", "tests/test_a.py": "", "mod.py": ""}
    plan = TestPlan(command=command, timeout_s=1.0, fail_to_pass=[])
    assert pytest_command.visible(msgspec.structs.replace(TASK, files=files, tests=plan)) == visible


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("view", '{"path": "none.py"}', "Cannot read none.py: No such file"),
        ("view", '{"path": "' + "x" * 5000 + '"}', "File name too long"),
        ("view", '{"path": "\\ud800"}', "Wrong arguments|Cannot read"),
        ("view", '{"path": "mod.py/x"}', "Not a directory"),
        ("view", '{"path": "mod.py", "start": 2, "end": 1}', "end = 1 is before start = 2; leave end out"),
        ("view", "{}", "missing required field `path`"),
        ("view", '{"path": 3}', "Expected `str`, got `int`"),
        ("view", '{"path": "mod.py", "mode": "r"}', "unknown field `mode`"),
        ("view", '{"path": "mod.py"', "Wrong arguments"),
        ("view", "[" * 100_000, "Wrong arguments"),
        ("replace", '{"path": "mod.py", "line": 1, "old": "+", "new": "-"}', "'\\+' is not in line 1"),
        ("rewrite", '{"path": "mod.py", "start": 1, "end": 3, "new_code": ""}', "has 2 lines"),
        ("rewrite", '{"path": "mod.py", "start": 2, "end": 0, "new_code": ""}', "end = 1 inserts there"),
        ("rewrite", '{"path": "mod.py", "start": 2, "end": -2, "new_code": ""}', "-2 is before start = 2"),
        ("evaluate", '{"path": "mod.py"}', "unknown field"),
        ("submit", '"now"', "Wrong arguments"),
        ("bash", '{"command": "true", "timeout_s": "nan"}', "above 0 and at most 600"),
        ("bash", '{"command": "a\\u0000b"}', "has no NUL"),
        ("bash", '{"command": "' + "x" * 200_000 + '"}', "at most 100000 bytes"),
        ("grep", '{"pattern": "("}', "no regular expression: missing"),
        ("grep", '{"pattern": "a", "path": "none"}', "There is no 'none'"),
        ("edit", '{"path": "mod.py", "old": "b", "new": ""}', "3 times in mod.py, first at lines 1, 2, 2;"),
        ("edit", '{"path": "no_end.txt", "old": "", "new": ""}', "is there and not empty; old must be"),
        ("edit", '{"path": "mod.py", "old": "\\treturn a - b - b\\n", "new": ""}', "like 2; compare"),
        ("edit", '{"path": "mod.py", "old": "none", "new": ""}', "old is not in mod.py.$"),
        ("edit", '{"path": "none.py", "old": "a", "new": ""}', "Cannot read none.py"),
        ("edit", '{"path": "mod.py/x", "old": "", "new": ""}', "Not a directory"),
        ("listdir", '{"path": "mod.py"}', "Cannot list mod.py: Not a directory"),
    ],
)
def test_a_wrong_call_is_told_to_the_policy(sandbox, name, arguments, complaint):
    with pytest.raises(ToolError, match=complaint):
        invoke(load("tools", {"type": name}), arguments, sandbox, TASK)


def test_every_tool_says_what_it_is():
    for name in known("tools"):
        tool = load("tools", {"type": name})
        described = schema(tool)
        assert described.name == name
        assert described.description.endswith(".")
        assert described.parameters["type"] == "object"
    assert schema(load("tools", {"type": "replace"})).parameters["required"] == ["path", "line", "old", "new"]
    assert load("tools", {"type": "submit"}).ends_episode


@pytest.mark.parametrize("command", ["make test", "pytest 'test.py"])
def test_a_test_command_that_is_no_pytest_is_a_configuration_error(command):
    plan = msgspec.structs.replace(TASK.tests, command=command)
    with pytest.raises(ConfigError, match=f"task t: tests.command .*{command}"):
        pytest_command.arguments(msgspec.structs.replace(TASK, tests=plan))


# What is planted in a folder must not lead the host's hand out of it.


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "secret").write_text("secret")
    return secret


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    return inside


@pytest.fixture
def tree(folder: Path) -> Iterator[Tree]:
    opened = Tree(os.open(folder, os.O_RDONLY))
    yield opened
    opened.close()


def test_links_are_not_followed(tree, folder, outside):
    (folder / "file").symlink_to(outside / "secret")
    (folder / "dir").symlink_to(outside)
    (folder / "up").symlink_to("..")
    for path in ("file", "dir/secret", "up/outside/secret"):
        with pytest.raises(OSError, match="symbolic|directory"):
            tree.read(path)
    for path in ("dir/new", "dir/secret", "up/new", "dir/sub/new"):
        with pytest.raises(OSError, match="directory"):
            tree.write(path, b"x")
    assert tree.paths() == []
    assert {path.name for path in outside.iterdir()} == {"secret"}


def test_writing_replaces_a_link_and_never_what_it_points_to(tree, folder, outside):
    (folder / "file").symlink_to(outside / "secret")
    os.link(outside / "secret", folder / "hard")
    for path in ("file", "hard"):
        tree.write(path, b"mine")
        assert (folder / path).read_bytes() == b"mine"
    assert (outside / "secret").read_text() == "secret"


def test_pipes_sockets_and_folders_are_no_files_and_never_block(tree, folder):
    os.mkfifo(folder / "pipe")
    (folder / "dir").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(folder)
        server.bind("socket")
        os.chdir(here)
        for path in ("pipe", "dir", "socket", "."):
            with pytest.raises(OSError, match=r".+"):
                tree.read(path)
    assert tree.paths() == []
    tree.write("pipe", b"x")
    assert tree.read("pipe") == b"x"
    with pytest.raises(OSError, match="directory"):
        tree.write("dir", b"x")
    assert sorted(path.name for path in folder.iterdir()) == ["dir", "pipe", "socket"]


def test_what_is_too_large_or_too_much_is_not_given_out(tree, folder):
    (folder / "big").write_bytes(b"x" * (READ_BYTES + 1))
    with pytest.raises(OSError, match=f"larger than {READ_BYTES}"):
        tree.read("big")
    deep = folder
    for _ in range(80):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    assert tree.paths() == ["big"]


def test_permissions_stay_but_no_set_user_id(tree, folder):
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o4755)
    tree.write("run", b"#!/bin/bash\n")
    assert (folder / "run").stat().st_mode & 0o7777 == 0o755


@pytest.mark.slow
def test_a_folder_that_turns_into_a_link_under_the_hand_leads_nowhere(tree, folder, outside):
    (outside / "a").mkdir()
    (outside / "a" / "f").write_text("secret")
    (folder / "real" / "a").mkdir(parents=True)
    (folder / "real" / "a" / "f").write_text("own")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for target in (outside, folder / "real"):
                (folder / "next").symlink_to(target)
                os.replace(folder / "next", folder / "link")
            with suppress(OSError):  # the hand makes folders that are missing
                os.rename(folder / "real", folder / "way")
                os.rename(folder / "way", folder / "real")

    racer = threading.Thread(target=swap)
    racer.start()
    seen = set()
    for _ in range(3000):
        for path in ("link/a/f", "real/a/f", "way/a/f"):
            try:
                seen.add(tree.read(path))
                tree.write(path, b"own")
            except OSError:
                continue
    done.set()
    racer.join()
    assert seen == {b"own"}
    assert (outside / "a" / "f").read_text() == "secret"


WORDS = st.sampled_from(
    ["mod.py", ".", "/testbed", "\x00", "x" * 300, "a/../b", "(a|", "mod.py/x", "new/file", ""]
)
NUMBERS = st.sampled_from([0, 1, 2, -1, 2**62, 2**70, 0.5, "1", "nan", "inf", "1e9", None])
ODD = {"string": WORDS | st.text(max_size=20).filter(lambda text: "/" not in text)}


@settings(max_examples=100)
@given(
    data=st.data(), name=st.sampled_from(["view", "replace", "rewrite", "edit", "grep", "listdir", "bash"])
)
def test_no_argument_gets_past_a_tool_as_anything_but_its_answer(sandbox, data, name):
    """Whatever else escaped would end the worker instead of the call."""
    known = schema(load("tools", {"type": name})).parameters["properties"]
    arguments = {key: data.draw(ODD.get(value["type"], NUMBERS)) for key, value in known.items()}
    if "command" in arguments:
        arguments["command"] = f"true {shlex.quote(str(arguments['command']))}"
    with suppress(ToolError):
        assert isinstance(use(sandbox, name, **arguments), str)
