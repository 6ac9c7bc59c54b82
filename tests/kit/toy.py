"""A small repository with a past and a future, and rows for it in both formats of SWE-bench."""

import difflib
import errno
import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from hpc_swe.agents.sandboxes._start import apply_start
from hpc_swe.agents.sandboxes.base import Clock, CommandResult, Sandbox, Sandboxes, TreeEntry
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task
from hpc_swe.tasks.sets.swebench import Swebench

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
MENDED = BROKEN.replace("a - b", "a + b")
UNITTESTS = '''import unittest

from calc.core import add, double


class TestCore(unittest.TestCase):
    def test_double(self):
        """Twice a number is the number doubled."""
        self.assertEqual(double(4), 8)
'''
MORE_UNITTESTS = """
    def test_add(self):
        for a, b, c in ((1, 2, 3), (2, 2, 4)):
            with self.subTest(a=a):
                self.assertEqual(add(a, b), c)
"""
PYTESTS = """import pytest

from calc.core import add, double


def test_double():
    assert double(4) == 8
"""
MORE_PYTESTS = """

@pytest.mark.parametrize("a", [1, 2])
def test_add(a):
    assert add(a, 2) == a + 2
"""
FILES = {
    "calc/__init__.py": "",
    "calc/core.py": BROKEN,
    "README.md": "Calc\n",
    "latin.txt": "caf\xe9\n",
    ".gitignore": "*.log\n__pycache__/\nbuild/\n",
    "tests/__init__.py": "",
    "tests/test_core.py": UNITTESTS,
    "tests/test_plain.py": PYTESTS,
}
RECIPES = {
    "toy/unittest": {"command": "python -m unittest -v", "log_parser": "parse_log_django"},
    "toy/pytest": {"command": "python -m pytest -rA", "log_parser": "parse_log_pytest"},
    "toy/other": {"command": "python -m pytest -rA -v", "log_parser": "parse_log_gotest"},
}


REVERTS = (
    "git checkout HEAD~1 -- .",
    "git checkout origin/main -- .",
    "git reset --hard HEAD@{1}",
    "git revert --no-edit HEAD",
    "git stash pop",
    "git restore --source=$(git fsck --lost-found | cut -d' ' -f3 | head -n 1) .",
)
"""How a policy may look for a state that a repository had before."""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def make_repository(folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Three commits, a tag, a branch and a remote; returns the middle commit, which has the bug."""
    folder.mkdir()
    git(folder, "init", "-q")
    for path, text in (FILES | dict(more)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="latin-1")
    (folder / "link").symlink_to("README.md")
    (folder / "README.md").write_text("old\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "README.md").write_text(FILES["README.md"])
    git(folder, "commit", "-qam", "base")
    base = git(folder, "rev-parse", "HEAD")
    core = folder / "calc/core.py"
    core.write_text(core.read_text().replace("a - b", "a + b"))
    git(folder, "commit", "-qam", "the future")
    git(folder, "tag", "v2")
    git(folder, "branch", "later")
    git(folder, "remote", "add", "origin", "https://example.invalid/calc.git")
    return base


def patch(path: str, old: str, new: str) -> str:
    """As git writes it."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def new(path: str, text: str) -> str:
    """A file that was not there, as git writes it."""
    body = patch(path, "", text).split("\n", 2)[2]
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n{body}"


def gold() -> str:
    return patch("calc/core.py", BROKEN, MENDED)


def row(kind: str, base: str, **more: object) -> dict[str, object]:
    path, old, new, names = {
        "unittest": (
            "tests/test_core.py",
            UNITTESTS,
            MORE_UNITTESTS,
            ["test_add (tests.test_core.TestCore)", "Twice a number is the number doubled."],
        ),
        "pytest": (
            "tests/test_plain.py",
            PYTESTS,
            MORE_PYTESTS,
            [*(f"tests/test_plain.py::test_add[{a}]" for a in (1, 2)), "tests/test_plain.py::test_double"],
        ),
    }[kind]
    return {
        "repo": f"toy/{kind}",
        "instance_id": f"toy__{kind}-1",
        "base_commit": base,
        "patch": gold(),
        "test_patch": patch(path, old, old + new),
        "problem_statement": "add subtracts {sic}",
        "hints_text": "",
        "created_at": "",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(names[:-1]),
        "PASS_TO_PASS": json.dumps(names[-1:]),
        "environment_setup_commit": base,
    } | more


def write_rows(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def taskset(rows: Path, **more: object) -> Swebench:
    return msgspec.convert(
        {"train": {"rows": str(rows)}, "recipes": RECIPES, "timeout_s": 60.0, **more}, Swebench
    )


def task(folder: Path, kind: str, base: str) -> Task:
    (one,) = taskset(write_rows(folder / f"{kind}.jsonl", row(kind, base))).load("train")
    return one


class Checkout(Plugin, Sandboxes, frozen=True, kw_only=True):
    """Sandboxes that are no sandboxes, with a repository at the task's base commit in the work directory."""

    repository: str
    also: str = "true"
    """What else the image's maker ran there."""

    def check(self) -> None:
        """Every machine can do this."""

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        with Process().open(task) as sandbox:
            steps = [
                "git init -q",
                f"git fetch -q {self.repository} main",
                f"git checkout -q {task.base_commit.replace('HEAD', 'FETCH_HEAD')}",
                self.also,
            ]
            cloned = sandbox.run(" && ".join(steps), 60)
            assert cloned.exit_code == 0, cloned.output
            apply_start(sandbox, task)
            yield sandbox


@dataclass
class Failing:
    """A host that fails at one step, and at no other: a command is killed or late, a file is not written."""

    inner: Sandbox
    step: str
    result: CommandResult | None = None
    """What the step ends with; None is no space left."""

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        found = self.result if self.step in command else None
        return found or self.inner.run(command, timeout_s, clock)

    def python(self, program: str, *rest: float, prelude: str = "") -> CommandResult:
        found = self.result if self.step in prelude + program else None
        return found or self.inner.python(program, *rest, prelude=prelude)

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def write(self, path: str, data: bytes) -> None:
        if self.result is None and path.endswith(self.step):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.inner.write(path, data)

    def paths(self) -> list[str]:
        return self.inner.paths()

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        return self.inner.entries(folder)

    def target(self, path: str) -> str:
        return self.inner.target(path)

    def listen(self, port: int) -> socket.socket:
        return self.inner.listen(port)


class FailingCheckout(Checkout, frozen=True, kw_only=True):
    step: str
    result: CommandResult | None = None

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        with super().open(task) as sandbox:
            yield Failing(sandbox, self.step, self.result)


LATE = CommandResult(exit_code=124, output="", timed_out=True)
GONE = CommandResult(exit_code=137, output="The sandbox is gone.", broke_sandbox=True)
