"""Load tasks from rows of SWE-bench: a JSONL or Parquet file, and perhaps a file of ids that selects some.

Two formats of rows become the same `Task`. Rows of swebench 5 contain their eval script. Rows of SWE-bench
Verified and before it (12 columns) do not, and swebench no longer makes one: a `Recipe` for the row's
repository says how its tests are run.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin, task_checks
from hpc_swe.plugins.hidden_tests import encode_versions
from hpc_swe.plugins.swebench_package import official
from hpc_swe.plugins.swebench_rows import (
    RECIPES,
    Recipe,
    Row,
    TestPatch,
    find_marks,
    parse,
    read_ids,
    read_records,
    script,
)
from hpc_swe.records import Split, Task, TestPlan

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
    """A .jsonl or .parquet file."""
    ids: str = ""
    """A file with one instance id a line, which selects; empty is all rows."""


class Swebench(Plugin, frozen=True, kw_only=True):
    """A taskset of SWE-bench has its tasks in the order of the ids file, or else of the rows."""

    train: Source = Source()
    eval: Source = Source()
    checked: str = ""
    """File of hpc_swe/tasks/check.py: only instances that it calls usable are taken; empty takes all.

    `launch` compares images' names and manifests: check again after rows or the grader have changed.
    """
    recipes: dict[str, Recipe] = {}
    """Repository -> how its tests are run, for rows without an eval script; Verified's are known."""
    prompt: str = PROMPT
    """Prompt for the agent; {problem_statement} and {workdir} are filled in."""
    workdir: str = "/testbed"
    """Folder of the repository in the sandbox."""
    timeout_s: float = 900.0
    """Seconds that the eval script may take."""

    def load(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of one split.

        Raises:
            ConfigError: A row or an id is wrong; the message names the file and the line.
        """
        rows = self._selected(split)
        other = self._selected("eval" if split == "train" else "train")
        for row_id in rows.keys() & other.keys():
            raise ConfigError(f"[taskset] {row_id} is in train and in eval; select other ids for one of them")
        if self.checked:
            rows = self._usable(split, rows)
        for where, row in rows.values():
            yield self.task(where, row)

    def references(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the column ``patch`` of each task."""
        rows = self._selected("train") | self._selected("eval")
        return {task.task_id: rows[task.task_id][1].patch for task in tasks}

    def changed_tests(self, tasks: Iterable[Task]) -> dict[str, str]:
        """Return the versions of hidden tests that the file `checked` has for second sittings.

        Raises:
            ConfigError: A task's test patch is not the one that was checked.
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
                "%d of %d tasks have no second sitting: a patch that resolves them is trusted; %s says why",
                len(all_tasks) - len(found),
                len(all_tasks),
                self.checked,
            )
        return found

    def unchecked(self) -> "Swebench":
        """Return the taskset of all instances, checked or not."""
        return msgspec.structs.replace(self, checked="")

    def check_images(self, tasks: Iterable[Task], images: Path) -> None:
        """Check that the images in the folder are those that were checked.

        Raises:
            ConfigError: An image is another one.
        """
        checks = task_checks.read(Path(self.checked))
        for task in tasks:
            now = task_checks.image_digest(images, task.image)
            if task_checks.is_another(now, checks[task.task_id].image_digest):
                raise ConfigError(
                    f"{task.task_id}: {images / task.image} is another image than taskset.checked = "
                    f"{self.checked!r} is of: run python -m hpc_swe.tasks.check CONFIG --out {self.checked}"
                )

    def _usable(self, split: Split, rows: dict[str, tuple[str, Row]]) -> dict[str, tuple[str, Row]]:
        checks = task_checks.read(Path(self.checked))
        for row_id, (where, row) in rows.items():
            known = checks.get(row_id)
            if known is None or known.image != row.image_name:
                how = f"with image {known.image}, not {row.image_name}," if known else "not"
                raise ConfigError(
                    f"{where}: {row_id} is {how} in taskset.checked = {self.checked!r}: run "
                    f"python -m hpc_swe.tasks.check CONFIG --out {self.checked}"
                )
        kinds = Counter(checks[row_id].verdict for row_id in rows)
        left_out = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind != "usable")
        if left_out:
            log.info(
                "%s: %d of %d instances are usable; left out: %s", split, kinds["usable"], len(rows), left_out
            )
        return {row_id: found for row_id, found in rows.items() if checks[row_id].verdict == "usable"}

    def _selected(self, split: Split) -> dict[str, tuple[str, Row]]:
        source = self.train if split == "train" else self.eval
        if not source.rows:
            return {}
        found: dict[str, tuple[str, Row]] = {}
        for where, record in read_records(Path(source.rows)):
            row = parse(where, record)
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

        Raises:
            ConfigError: A column is not a patch, nothing says how to run the tests, or the grader cannot
            judge
                the task.
        """
        patch = TestPatch.read(where, row)
        recipe = (RECIPES | self.recipes).get(row.repo)
        if not row.eval_script and recipe is None:
            raise ConfigError(
                f"{where}: {row.instance_id} has no eval_script, and [taskset.recipes] none for {row.repo!r}"
            )
        command, parser = row.eval_script, row.log_parser
        if recipe is not None and not command:
            command, parser = script(row, patch, recipe, self.workdir), recipe.log_parser
        # Other braces are the prompt's own. The report comes last, so that nothing in it is filled in.
        prompt = self.prompt.replace("{workdir}", self.workdir)
        task = Task(
            task_id=row.instance_id,
            taskset="swebench",
            prompt=prompt.replace("{problem_statement}", row.problem_statement),
            image=row.image_name,
            workdir=self.workdir,
            base_commit=row.base_commit,
            tests=TestPlan(
                command=command,
                fail_to_pass=row.fail_to_pass,
                pass_to_pass=row.pass_to_pass,
                timeout_s=self.timeout_s,
                extra=patch.extra(row) | {"log_parser": parser},
            ),
        )
        _require_gradable(where, task)
        return task


def _require_gradable(where: str, task: Task) -> None:
    """Raise now what the grader would raise for each episode, after its tests have run.

    Raises:
        ConfigError: The task has an unknown parser, or an eval script that the grader cannot use.
    """
    parser = task.tests.extra["log_parser"]
    if parser not in official("harness.log_parsers").PARSER_REGISTRY:
        raise ConfigError(
            f"{where}: {task.task_id}: swebench.harness.log_parsers has no log_parser {parser!r}; "
            "correct the row, or the recipe in [taskset.recipes]"
        )
    try:
        find_marks(task.task_id, task.tests.command.split("\n"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
