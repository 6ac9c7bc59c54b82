"""Load tasks from a file of rows of SWE-bench, or those of them that a file of ids selects.

All formats of rows become the same `Task`. Rows of swebench 5 contain their eval script. Rows of SWE-bench
Verified and before it (12 columns) do not, and swebench no longer makes one: a `Recipe` for the row's
repository says how its tests are run. Rows of published sets bring a recipe of their own.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Split, Task
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.hidden_tests import encode_versions
from hpc_swe.tasks.published_rows import read_row
from hpc_swe.tasks.recipes import Recipe
from hpc_swe.tasks.sets.base import Taskset
from hpc_swe.tasks.swebench_rows import Row, read_ids, read_records, test_plan

PROMPT = """The repository in {workdir} has the problem that the report below describes.

<report>
{problem_statement}
</report>

Find the cause, then change the repository so that the problem is solved. Hidden tests decide: those that show
the problem must pass, and those that pass today must go on passing. Changes to tests and to the set-up of the
test runner are not counted.
"""

log = logging.getLogger(__name__)


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source names the files of one split's tasks; without rows the split has no tasks."""

    rows: str = ""
    """A .jsonl, .json or .parquet file."""
    ids: str = ""
    """A file with one instance id a line, which selects; empty is all rows."""


class Swebench(Plugin, Taskset, frozen=True, kw_only=True):
    """A taskset of SWE-bench has its tasks in the order of the ids file, or else of the rows."""

    train: Source = Source()
    eval: Source = Source()
    checked: str = ""
    """File of hpc_swe/makers/check.py: only instances that it calls usable are taken; empty takes all.

    `launch` compares images' names and manifests: check again after rows or the grader have changed.
    """
    recipes: dict[str, Recipe] = {}
    """Repository -> how its tests are run, for rows without an eval script; it comes before what a published
    row says, and Verified's are known."""
    prompt: str = PROMPT
    """Prompt for the agent; {problem_statement} and {workdir} are filled in."""
    workdir: ClassVar[str] = "/testbed"  # folder of the repository in the sandbox, for rows that name none
    timeout_s: float = 900.0
    """Seconds that the eval script may take."""

    def load(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of one split.

        Raise ConfigError if a row or an id is wrong; the message names the file and the line.
        """
        rows = self._selected(split)
        other = self._selected("eval" if split == "train" else "train")
        for row_id in rows.keys() & other.keys():
            raise ConfigError(f"[taskset] {row_id} is in train and in eval; select other ids for one of them")
        if self.checked:
            images = {row_id: (where, row.image_name) for row_id, (where, row) in rows.items()}
            usable = task_checks.usable(self.checked, split, images)
            rows = {row_id: found for row_id, found in rows.items() if row_id in usable}
        for where, row in rows.values():
            yield self.task(where, row)

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the column ``patch`` of each task."""
        rows = self._selected("train") | self._selected("eval")
        return {task.task_id: rows[task.task_id][1].patch for task in tasks}

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the versions of hidden tests that the file `checked` has for retests.

        Raise ConfigError if a task's test patch is not the one that was checked.
        """
        if not self.checked:
            return {}
        checks = task_checks.read(Path(self.checked))
        all_tasks = list(tasks)
        encoded = {
            task.task_id: encode_versions(task, checks[task.task_id].changed_tests) for task in all_tasks
        }
        found = {task_id: versions for task_id, versions in encoded.items() if versions}
        if len(found) < len(all_tasks):
            log.warning(
                "%d of %d tasks have no retest: a patch that resolves them is trusted; %s says why",
                len(all_tasks) - len(found),
                len(all_tasks),
                self.checked,
            )
        return found

    def unchecked(self) -> "Swebench":
        """Return the taskset of all instances, checked or not."""
        return msgspec.structs.replace(self, checked="")

    def _selected(self, split: Split) -> dict[str, tuple[str, Row]]:
        source = self.train if split == "train" else self.eval
        if not source.rows:
            return {}
        found: dict[str, tuple[str, Row]] = {}
        for where, record in read_records(Path(source.rows)):
            row = read_row(where, record)
            if row.instance_id in found:
                raise ConfigError(f"{where}: {row.instance_id} occurs twice: {found[row.instance_id][0]}")
            found[row.instance_id] = where, row
        if not source.ids:
            return found
        wanted = read_ids(Path(source.ids))
        for row_id, place in wanted.items():
            if row_id not in found:
                raise ConfigError(f"{place}: {row_id} is not a row of {source.rows}")
        return {row_id: found[row_id] for row_id in wanted}

    def task(self, where: str, row: Row) -> Task:
        """Make the task of a row; `where` names its file and line.

        Raise ConfigError if the row cannot be judged; see `test_plan`.
        """
        workdir = row.workdir or self.workdir
        tests = test_plan(where, row, self.recipes, workdir, self.timeout_s)
        # Other braces are the prompt's own. The report comes last, so that nothing in it is filled in.
        prompt = self.prompt.replace("{workdir}", workdir)
        return Task(
            task_id=row.instance_id,
            taskset="swebench",
            prompt=prompt.replace("{problem_statement}", row.problem_statement),
            image=row.image_name,
            workdir=workdir,
            base_commit=row.base_commit,
            absent=row.absent,
            start=row.start,
            tests=tests,
        )
