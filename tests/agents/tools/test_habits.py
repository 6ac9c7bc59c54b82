"""What tools hide and refuse to change, where breakpoints go, and what policies of other systems write."""

import json

import msgspec
import pytest

from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools._pdb.breakpoints import moved_line
from hpc_swe.agents.tools._text.patterns import matches
from hpc_swe.agents.tools.base import ToolError, invoke
from hpc_swe.base.loader import load
from hpc_swe.base.records import TestPlan
from hpc_swe.tasks import patch
from tests.kit.debugging import task

IGNORED = "# what nobody needs\nsecret*\n/build/\n!secret_not.py\n"
FILES = {"mod": "x = 1\n", "secret_key": "x = 2\n", "secret_not": "x = 3\n", "build/made": "x = 4\n"}
FILES |= {"sub/build/kept": "x = 5\n", "test_mod": "x = 6\n"}


def use(name: str, /, **arguments: object) -> str:
    of = task(**FILES)
    of.files.update({".debugignore": IGNORED, ".debugreadonly": "test_*.py\n"})
    with Process().open(of) as sandbox:
        try:
            return invoke(load("tools", {"type": name}), json.dumps(arguments), sandbox, of)
        except ToolError as error:
            return f"error: {error}"


def test_ignored_files_are_neither_listed_nor_found_nor_shown():
    listed = use("listdir", depth=3).split("\n")
    assert "secret_key.py" not in listed
    assert "build/" not in listed
    assert "secret_not.py" in listed
    assert "  build/" in listed, "only that of the work directory is bound to it"
    found = use("grep", pattern="x = .")
    assert "secret_key" not in found
    assert "x = 4" not in found
    assert "x = 5" in found
    assert use("view", path="secret_key.py") == "error: secret_key.py is not shown: .debugignore names it."
    assert use("edit", path="./build/made.py", old="x", new="y").startswith("error: ./build/made.py is not")


def test_read_only_files_are_shown_as_such_and_not_changed():
    assert use("view", path="test_mod.py") == "1:x = 6\n(read-only)"
    assert "test_mod.py (read-only)" in use("listdir")
    refused = "error: test_mod.py is read-only; change other files."
    assert use("edit", path="test_mod.py", old="6", new="7") == refused
    assert use("replace", path="test_mod.py", line=1, old="6", new="7") == refused
    assert use("rewrite", path="test_mod.py", start=1, end=1, new_code="x") == refused
    assert use("rewrite", path="test_new.py", start=1, end=0, new_code="x").endswith("change other files.")


@pytest.mark.parametrize(
    ("patterns", "path", "expected"),
    [
        ("*.py[cod]", "a/b.pyc", True),
        ("*.py[cod]", "a/b.py", False),
        ("*test*.py", "deep/my_test_1.py", True),
        ("docs/_build/", "docs/_build/x/y", True),
        ("docs/_build/", "other/docs/_build/x", False),
        ("lib/", "lib", False),
        ("lib/", "a/lib/b", True),
        ("/site", "site/x", True),
        ("/site", "a/site", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("**/z", "q/z", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("*.log\n!keep.log", "keep.log", False),
        ("[", "[", True),
        ("[!a]b", "cb", True),
        ("", "a", False),
        ("a/*\n!a/b", "a/b", False),
        ("*a*b", "a" * 100_000, False),
        ("# a\n\n/\n!", "a", False),
    ],
)
def test_patterns_are_read_as_git_reads_them(patterns, path, expected):
    assert matches(patterns, path) is expected


def test_policies_write_null_for_what_they_leave_out():
    assert use("view", path="mod.py", start=None, end=None) == "1:x = 1"
    assert use("grep", pattern="x = 1", path=None, max_results=1).startswith("mod.py\n1:x = 1")
    assert use("rewrite", path="mod.py", start=None, end=None, new_code="y = 2") == "ok"
    assert use("rewrite", path="mod.py", start=1, end=None, new_code="y = 2") == "ok"
    found = use("grep", pattern="x = ", path="*mod.py", max_results=5)
    assert found == "mod.py\n1:x = 1\ntest_mod.py\n1:x = 6"
    assert use("view", path="mod.py", include_line_numbers_and_breakpoints=False) == "x = 1"


def test_a_tool_has_the_name_that_its_table_gives():
    agent = ToolAgent(tools=({"type": "evaluate", "name": "eval", "timeout_s": 1.0}, "pdb"), show_tools=True)
    shown = json.loads(agent.preface.tools)
    assert [each["function"]["name"] for each in shown] == ["eval", "pdb"] == agent.preface.names


def test_methods_of_unittest_pass_for_agents_and_graders():
    """pytest's plugin `debugging` has options that such tests ask for, so it must be loaded."""
    tests = "import unittest\n\nfrom mod import f\n\n\nclass TestF(unittest.TestCase):\n"
    tests += "    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
    plan = TestPlan(
        command="python -m pytest -q test_f.py",
        files={"test_f.py": tests},
        fail_to_pass=["test_f.py::TestF::test_f"],
        timeout_s=60.0,
    )
    of = msgspec.structs.replace(task(mod="def f(x):\n    return x\n", test_f=tests), tests=plan)
    with Process().open(of) as sandbox:
        evaluate = load("tools", {"type": "evaluate"})
        assert "1 failed" in invoke(evaluate, "", sandbox, of)
        sandbox.write("mod.py", b"def f(x):\n    return x + 1\n")
        assert "1 passed" in invoke(evaluate, "", sandbox, of)
        submitted = patch.take(of, sandbox, Process())
    assert load("graders", {"type": "pytest"}).grade(of, submitted, Process()).outcome == "resolved"


OLD = ["a\n", "b\n", "c\n", "d\n", "e\n"]


@pytest.mark.parametrize(
    ("line", "new", "expected"),
    [
        (2, OLD, 2),
        (2, ["x\n", *OLD], 3),
        (2, [*OLD, "x\n"], 2),
        (2, ["a\n", "b\n", "d\n", "e\n"], None),
        (2, ["a\n", "b\n", "C\n", "d\n", "e\n"], 2),
        (2, ["x\n", "a\n", "c\n", "y\n", "e\n"], 2),
        (4, [], None),
        (0, ["q\n"], 0),
    ],
)
def test_a_breakpoint_follows_its_line(line, new, expected):
    assert moved_line(line, OLD, new) == expected
