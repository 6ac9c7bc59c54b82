"""Load buggy programs with tests from a folder of folders, or from a .jsonl, .json or .parquet file of rows.

The agent sees half of the tests and may run them; a solution must pass all of them, so that a table of the
visible answers earns nothing. The task's id alone decides which half is visible. Changes of the agent to test
files have no effect: a grader replaces them with the row's own. A task with a single test shows it, since
nothing else says what is asked; there, and only there, such a table is rewarded.
"""

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Split, Task, TestPlan
from hpc_swe.tasks import patch, task_checks
from hpc_swe.tasks.hidden_tests import with_unsealed
from hpc_swe.tasks.sets._programs import Program, of_columns, read
from hpc_swe.tasks.sets.base import Taskset
from hpc_swe.tasks.visible_tests import cut, half, holds_tests, name_of, names_of_tests, split_only_test

WORKDIR = "/work"  # folder of the task's files in the sandbox
COMMAND = "python -m pytest --tb=short -sq"
SPLITS: tuple[Split, ...] = ("train", "eval")

log = logging.getLogger(__name__)


class Programs(Plugin, Taskset, frozen=True, kw_only=True):
    """Each program of a split's folder or file becomes a task."""

    taskset: ClassVar[str] = "programs"
    """Name in `Task.taskset`."""
    train: str = ""
    """Training programs: a folder of folders with a test.py each, or a .jsonl, .json or .parquet file of
    rows."""
    eval: str = ""
    """Held-out programs, in the same forms."""
    image: str = "python-pytest"
    """Image of the sandbox."""
    timeout_s: float = 30.0
    """Seconds of processor time that each process of a task's tests may use; all tests together may take
    twice as much time, or ten times as much where they wait for a processor."""
    hidden: float = 0.5
    """Share of a task's tests that the agent does not see, rounded down: with 0.5 it sees three of five, with
    0 all of them. Of a row with a column `tests` it sees those in `files`, whatever the share is."""
    first_message: Literal["statement_and_files", "statement", "directory_tree"] = "statement_and_files"
    """What the first message says: the problem statement with the names of the files, the statement alone, or
    the files as a tree alone."""
    checked: str = ""
    """File of hpc_swe/makers/check.py: only usable and unproven tasks of it are taken; empty takes all."""

    def __post_init__(self) -> None:
        """Refuse a share that would hide all tests, since some test must show what is asked."""
        if not 0.0 <= self.hidden < 1.0:
            raise ValueError(f"hidden = {self.hidden}: it must be at least 0 and below 1")

    def load(self, split: Split) -> Iterator[Task]:
        """Yield a task for each program in the file's order; skip those whose tests have no names.

        Raise ConfigError if a row is wrong, or was not checked; the message names the file and the row.
        """
        skipped = shown = 0
        for task in self._usable(split) if self.checked else map(self._task, self._programs(split).values()):
            if task is None:
                skipped += 1
            else:
                shown += all(task.files.get(path) == text for path, text in task.tests.files.items())
                yield task
        if shown:
            log.warning(
                "%d tasks of %s show all of their tests: a table of the answers earns the reward",
                shown,
                split,
            )
        if skipped:
            log.warning("skipped %d rows of %s: the texts of their tests name no test", skipped, split)

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the patch that makes the fixed program of each task, where its row has one."""
        splits: list[Split] = [split for split in SPLITS if Path(self._source(split) or " ").exists()]
        programs = {id_: one for split in splits for id_, one in self._programs(split).items()}
        return {
            task.task_id: "".join(
                patch.difference(path, task.files.get(path), text)
                for path, text in sorted(programs[task.task_id].fixed.items())
                if path not in task.tests.files
            )
            for task in tasks
            if programs[task.task_id].fixed
        }

    def row_of(self, where: str, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name of a row's form, and the row in the columns of a row of files, with its id."""
        try:
            form, row, program = of_columns(columns)
        except (ValueError, SyntaxError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from None
        return form, row | {"task_id": program.task_id}

    def unchecked(self) -> "Programs":
        """Return the taskset of all tasks, checked or not."""
        return msgspec.structs.replace(self, checked="")

    def _usable(self, split: Split) -> list[Task | None]:
        tasks = [self._task(program) for program in self._programs(split).values()]
        images = {task.task_id: (f"[taskset] {split}", task.image) for task in tasks if task is not None}
        usable = task_checks.usable(self.checked, split, images)
        unsealed = {name: one.unsealed for name, one in task_checks.read(Path(self.checked)).items()}
        return [
            task and with_unsealed(task, unsealed[task.task_id])
            for task in tasks
            if task is None or task.task_id in usable
        ]

    def _source(self, split: Split) -> str:
        return self.train if split == "train" else self.eval

    def _programs(self, split: Split) -> dict[str, Program]:
        source = self._source(split)
        if not source or not Path(source).exists():
            raise ConfigError(
                f"[taskset] {split} = {source!r}: no such file; name a folder or a file of programs, "
                "as python -m hpc_swe.prepare makes"
            )
        found: dict[str, Program] = {}
        try:
            for where, program in read(Path(source)):
                if program.task_id in found:
                    raise ConfigError(f"{where}: {program.task_id} occurs twice")
                found[program.task_id] = program
        except ConfigError as error:
            raise ConfigError(
                f"[taskset] {split} = {source!r}: {error}; rows have task_id and files of path and content, "
                "or the columns of a published set; hpc_swe.prepare --skip-bad leaves bad rows out"
            ) from None
        return found

    def _task(self, program: Program) -> Task | None:
        tests = program.tests
        named = [*program.fail_to_pass, *program.pass_to_pass]
        if not named:
            tests = {path: split_only_test(text) for path, text in tests.items()}
        if not named and not any(map(holds_tests, tests.values())):
            return None
        functions = {name.partition("[")[0] for name in named}
        for path, text in tests.items() if not named else ():
            functions |= {f"{path}::{name.replace('.', '::')}" for name in names_of_tests(text)}
        files = program.files
        if not program.is_cut:
            gone = half(functions, program.task_id, self.hidden)
            files = files | {
                path: cut(text, {name_of(name) for name in gone if name.startswith(f"{path}::")})
                for path, text in tests.items()
            }
        return Task(
            task_id=program.task_id,
            taskset=self.taskset,
            prompt=self._opening(program.statement, files),
            image=self.image,
            workdir=WORKDIR,
            absent=program.absent,
            files=files,
            tests=TestPlan(
                command=f"{COMMAND} {shlex.join(tests)}",
                files=tests,
                fail_to_pass=program.fail_to_pass,  # with none, all tests count that pytest collects
                pass_to_pass=program.pass_to_pass,
                timeout_s=self.timeout_s,
            ),
        )

    def _opening(self, statement: str, files: Iterable[str]) -> str:
        seen = sorted(path for path in files if not path.startswith("."))
        if self.first_message == "statement":
            return statement
        if self.first_message == "directory_tree":
            return "The files of the program:\n" + "\n".join(tree(seen))
        return f"{statement}\n\nFiles: {', '.join(seen)}"


def tree(paths: Iterable[str]) -> list[str]:
    """Return one line for each folder and file, indented by its depth.

    Example:
        >>> tree(["a/b.py", "c.py"])
        ['  a/', '    b.py', '  c.py']
    """
    lines: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            lines.setdefault("/".join(parts[:depth]) + "/", "  " * depth + parts[depth - 1] + "/")
        lines[path] = "  " * len(parts) + parts[-1]
    return [*lines.values()]
