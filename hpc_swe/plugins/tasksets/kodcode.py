"""Load programming tasks from parquet rows in the form of KodCode and AceCode: some files, one is test.py.

The agent sees half of the tests in test.py and may run them; a solution must pass all of them, so that a
table of the visible answers earns nothing. The task's id alone decides which half is visible. Changes of the
agent to test.py have no effect: a grader replaces it with the row's own. A row with a single test shows it,
since nothing else says what is asked; there, and only there, such a table is rewarded.
"""

import ast
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin
from hpc_swe.records import Split, Task, TestPlan

TESTS = "test.py"
COMMAND = f"python -m pytest --tb=short -sq {TESTS}"
_Function = ast.FunctionDef | ast.AsyncFunctionDef

log = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True):
    path: str
    content: str


class _Extra(msgspec.Struct, frozen=True):
    files: list[_File]


class _Row(msgspec.Struct, frozen=True):
    task_id: str
    problem_statement: str
    extra_info: _Extra


class Kodcode(Plugin, frozen=True, kw_only=True):
    """Each row of a split's parquet file becomes a task."""

    train: str = ""
    """Parquet file of the training rows."""
    eval: str = ""
    """Parquet file of the held-out rows."""
    image: str = "python-pytest"
    """Image of the sandbox."""
    workdir: str = "/work"
    """Folder of the task's files in the sandbox."""
    timeout_s: float = 30.0
    """Seconds that all tests of a task may take together."""
    hidden: float = 0.5
    """Share of a task's tests that the agent does not see, rounded down; 0 shows all of them."""

    def __post_init__(self) -> None:
        """Refuse a share that would hide all tests, since some test must show what is asked."""
        if not 0.0 <= self.hidden < 1.0:
            raise ValueError(f"hidden = {self.hidden}: it must be at least 0 and below 1")

    def load(self, split: Split) -> Iterator[Task]:
        """Yield a task for each row in the file's order; skip rows whose tests test.py does not name."""
        skipped = shown = 0
        for row in _rows(split, Path(self.train if split == "train" else self.eval)):
            task = self._task(row)
            if task is None:
                skipped += 1
            else:
                shown += task.files[TESTS] == task.tests.files[TESTS]
                yield task
        if shown:
            log.warning(
                "%d tasks of %s show all of their tests: a table of the answers earns the reward",
                shown,
                split,
            )
        if skipped:
            log.warning("skipped %d rows of %s: their test.py names no test", skipped, split)

    def _task(self, row: _Row) -> Task | None:
        files = {file.path: file.content for file in row.extra_info.files}
        names = ids_of_tests(files.get(TESTS, ""))
        if not names:
            return None
        return Task(
            task_id=row.task_id,
            taskset="kodcode",
            prompt=f"{row.problem_statement}\n\nFiles: {', '.join(sorted(files))}",
            image=self.image,
            workdir=self.workdir,
            files=files | {TESTS: visible(files[TESTS], _hidden(names, row.task_id, self.hidden))},
            tests=TestPlan(
                command=COMMAND, files={TESTS: files[TESTS]}, fail_to_pass=names, timeout_s=self.timeout_s
            ),
        )


def ids_of_tests(text: str) -> list[str]:
    """Return the ids that pytest gives the tests of test.py; none if only a run could determine them.

    Example:
        >>> ids_of_tests("def test_a():\\n    assert True\\n")
        ['test.py::test_a']
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    if any(isinstance(node, ast.Attribute) and node.attr == "parametrize" for node in ast.walk(module)):
        return []
    found = [f"{TESTS}::{test.name}" for test in _functions(module.body)]
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_unittest(node)):
            found += [f"{TESTS}::{node.name}::{test.name}" for test in _functions(node.body)]
    return list(dict.fromkeys(found))  # a later function of the same name replaces an earlier one


def _hidden(names: list[str], task_id: str, share: float) -> set[str]:
    """Choose the hidden tests by a hash of task id and name, so that every run hides the same ones."""
    order = sorted(names, key=lambda name: hashlib.sha256(f"{task_id} {name}".encode()).digest())
    return set(order[: int(share * len(names))])


def visible(text: str, hidden: set[str]) -> str:
    """Return the text of test.py without the hidden tests, and without classes of which no test is left."""
    module = ast.parse(text)
    gone: list[_Function | ast.ClassDef] = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            tests = [one for one in _functions(node.body) if f"{TESTS}::{node.name}::{one.name}" in hidden]
            gone += [node] if len(tests) == len(node.body) else tests
    gone += [node for node in _functions(module.body) if f"{TESTS}::{node.name}" in hidden]
    lines = text.splitlines(keepends=True)
    for node in gone:
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        last = node.end_lineno or node.lineno
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join(lines)


def _functions(body: list[ast.stmt]) -> list[_Function]:
    return [node for node in body if isinstance(node, _Function) and node.name.startswith("test")]


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)


def _rows(split: Split, path: Path) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ConfigError(f"[taskset] {split} = {str(path)!r}: no such file; name a parquet file of rows")
    try:
        for batch in pq.ParquetFile(path).iter_batches(
            columns=["task_id", "problem_statement", "extra_info"]
        ):
            yield from msgspec.convert(batch.to_pylist(), list[_Row])
    except (pa.ArrowException, msgspec.ValidationError, OSError) as error:
        raise ConfigError(
            f"[taskset] {split} = {str(path)!r}: {error}; its columns must be task_id, problem_statement "
            "and extra_info.files of path and content"
        ) from None
