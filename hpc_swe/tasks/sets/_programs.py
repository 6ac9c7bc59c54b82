"""Read buggy programs from rows and from folders.

These shapes become one record: rows of files (``files``, or ``extra_info.files``), rows of HumanEval and of
HumanEvalPack (``buggy_solution``), rows of other published sets (see `_published`), and folders with a
``test.py`` each.
"""

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpc_swe.base.errors import ConfigError, boundary
from hpc_swe.base.syntax import PythonText, parse, require_shallow
from hpc_swe.tasks.sets import _exercises
from hpc_swe.tasks.sets._exercises import first_python, with_names
from hpc_swe.tasks.sets._published import published
from hpc_swe.tasks.swebench_rows import columns, read_records
from hpc_swe.tasks.visible_tests import TESTS

FIXED = ".fixed"
"""Folder in a program's folder with the repaired files, which no agent sees."""
STATEMENT = "Some tests of this program fail. Find the fault and repair it, so that all tests pass."
WRITE = "Write the function in solution.py that is described there, so that all tests pass."
MOST_BYTES = 1_000_000
"""Size of the largest file of a folder that becomes part of a task."""
_NO_BODY = "    raise NotImplementedError\n"
_LEFT_OUT = {FIXED, ".git", "__pycache__", ".pytest_cache"}


class File(msgspec.Struct, frozen=True):
    """A file of a row has a path below the work directory and a text."""

    path: str
    content: str


class _Extra(msgspec.Struct, frozen=True):
    files: list[File]
    entrypoint: str = ""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of all shapes; a row has those of one."""

    task_id: str
    problem_statement: str = ""
    extra_info: _Extra | None = None
    files: list[File] = []
    entrypoint: str = ""
    tests: list[File] = []
    """Test files in full, where `files` already show a part of them only."""
    fixed: list[File] = []
    """Repaired files."""
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    absent: list[str] = []
    prompt: str = ""
    declaration: str = ""
    buggy_solution: str = ""
    canonical_solution: str = ""
    test: str = ""
    entry_point: str = ""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program has a fault, and tests that find it."""

    task_id: str
    statement: str
    files: dict[str, str]
    """Path -> text of all files, tests included."""
    tests: dict[str, str]
    """Path -> full text of the test files that judge the program."""
    is_cut: bool = False
    """Whether `files` already lack the hidden tests."""
    fail_to_pass: list[str] = []
    """Ids of tests; empty where the texts of the tests name them."""
    pass_to_pass: list[str] = []
    fixed: dict[str, str] = {}
    """Path -> repaired text; empty where no repair is known."""
    absent: list[str] = []
    """`Task.absent`."""


def read(path: Path) -> Iterator[tuple[str, Program]]:
    """Yield each program of a folder or a file of rows, with its place for messages.

    Raise ConfigError if a row has none of the shapes, or the folder holds no program.
    """
    if path.is_dir():
        with boundary(ConfigError, f"read {path}"):
            folders = [each for each in sorted(path.iterdir()) if (each / TESTS).is_file()]
        if not folders:
            raise ConfigError(f"{path}: no folder in it holds a {TESTS}")
        yield from ((str(folder), _of_folder(folder)) for folder in folders)
        return
    for where, record in read_records(path):
        try:
            yield where, of_columns(columns(record))[2]
        except (msgspec.MsgspecError, ValueError, SyntaxError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from None


def of_columns(given: Mapping[str, Any]) -> tuple[str, dict[str, Any], Program]:
    """Return the name of a row's form, the row with the columns of a row of files, and its program.

    Raise ValueError, SyntaxError or RecursionError if the row has none of the forms.
    """
    given = {name: value for name, value in given.items() if value is not None}
    form, row = published(given) or ("programs", given)
    if "task_id" not in row:
        raise ValueError("the row has no task_id, nor the columns of a published set: see docs/your_tasks.md")
    return form, row, _of_row(msgspec.convert(row, _Row))


def _of_folder(folder: Path) -> Program:
    with boundary(ConfigError, f"read {folder}"):
        files = _texts(folder)
    if TESTS not in files:
        raise ConfigError(
            f"{folder / TESTS}: it has more than {MOST_BYTES} bytes or is not UTF-8; divide or convert it"
        )
    try:
        _require_readable(files[TESTS])
    except SyntaxError as error:
        raise ConfigError(f"{folder / TESTS}: {error}") from None
    fixed = _texts(folder / FIXED) if (folder / FIXED).is_dir() else {}
    return Program(
        task_id=folder.name,
        statement=STATEMENT,
        files=files,
        tests={TESTS: with_names(files[TESTS], files, files | fixed)},
        fixed=fixed,
    )


def _texts(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not _LEFT_OUT & set(name.parts) and path.stat().st_size <= MOST_BYTES:
            try:
                found[name.as_posix()] = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
    return found


def _of_row(row: _Row) -> Program:
    """Make a program of a row.

    Raise ValueError if the row has none of the shapes, or its entrypoint does not run pytest.
    """
    if not row.task_id.strip():
        raise ValueError("task_id is empty")
    if row.buggy_solution or row.canonical_solution:
        return _of_humaneval(row)
    files = _by_path(row.extra_info.files if row.extra_info else row.files)
    if not files:
        raise ValueError(f"{row.task_id}: needs extra_info.files, files or buggy_solution")
    full = _by_path(row.tests)
    entrypoint = row.extra_info.entrypoint if row.extra_info else row.entrypoint
    tests = full or {path: files.get(path, "") for path in _test_paths(row.task_id, entrypoint)}
    if row.fail_to_pass:
        _ = [parse(text) for text in tests.values()]  # the tests have ids, so they must be Python
    for text in tests.values():
        _require_readable(text)
    fixed = _by_path(row.fixed)
    return Program(
        task_id=row.task_id,
        statement=row.problem_statement or STATEMENT,
        files=files,
        tests={path: with_names(text, files, files | fixed) for path, text in tests.items()},
        is_cut=bool(full),
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        fixed=fixed,
        absent=row.absent,
    )


def _require_readable(text: str) -> None:
    """Raise SyntaxError for tests that are nested too deeply; what is no Python at all names no tests."""
    try:
        tree = parse(text)
    except (SyntaxError, ValueError):
        return
    require_shallow(tree)


def _test_paths(task_id: str, entrypoint: str) -> list[str]:
    """Return the test files that an entrypoint names; its options only shape the output and are not used."""
    words = shlex.split(entrypoint)
    if words and "pytest" not in words:
        raise ValueError(f"{task_id}: entrypoint {entrypoint!r} does not run pytest")
    return [word.partition("::")[0] for word in words if word.partition("::")[0].endswith(".py")] or [TESTS]


def _by_path(files: Iterable[File]) -> dict[str, str]:
    """Return path -> text.

    Raise ValueError if a path occurs twice, or is not one of a file below the work directory.
    """
    found: dict[str, str] = {}
    for file in files:
        if file.path in found:
            raise ValueError(f"{file.path!r} occurs twice among the files")
        if not file.path.isprintable() or {"", ".", ".."} & {*file.path.split("/")}:
            raise ValueError(f"{file.path!r} is not the path of a file below the work directory")
        found[file.path] = file.content
    return found


def _of_humaneval(row: _Row) -> Program:
    """Join the header, which says what is asked, with each of the two bodies; the first may be missing."""
    head = row.prompt or row.declaration
    given = row.buggy_solution or _NO_BODY
    tests = _tests_of_check(row.test, row.entry_point, head)
    return Program(
        task_id=row.task_id.replace("/", "-"),
        statement=row.problem_statement or (STATEMENT if row.buggy_solution else WRITE),
        files={"solution.py": head + given, TESTS: tests},
        tests={TESTS: tests},
        fixed={"solution.py": head + row.canonical_solution} if row.canonical_solution else {},
    )


def _tests_of_check(text: str, entry_point: str, head: str) -> str:
    """Turn the function ``check(candidate)`` and its call into a test for pytest.

    The test has its own copy of what stands above the function, which a patch could replace. Raise ValueError
    if there is no such function.
    """
    source = _exercises.read("test", text)
    module = source.tree
    check = next((n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise ValueError("test has no function check(candidate)")
    name = check.args.args[0].arg
    own = [n for n in module.body if n is not check and not _is_call_of(n, "check")]
    changes = [
        (n, "pass") for n in check.body if isinstance(n, ast.Assert) and isinstance(n.test, ast.Constant)
    ]
    given = PythonText(first_python([head + _NO_BODY]))
    lines = [given.segment(n) for n in given.tree.body if getattr(n, "name", "") != entry_point]
    lines += [f"from solution import {entry_point}", *map(source.segment, own)]
    lines += [f"{name} = {entry_point}"] if name != entry_point else []
    return "\n".join(lines) + f"\n\n\ndef test_check():\n{source.block(check.body, changes)}\n"


def _is_call_of(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=called))):
            return called == name
    return False
