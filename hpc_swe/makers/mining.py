"""Try candidates of a history: run their tests without and with the reference, and make rows.

A commit becomes a task only if a test of it fails in every run without the code part and passes in every run
with it. The grader of the run that will train on the task runs these tests, in the very image of the task. So
whatever that grader refuses is refused here too.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base import loader
from hpc_swe.base.errors import ConfigError, DeadlineError, EpisodeError, HpcSweError, StorageError, boundary
from hpc_swe.base.records import Task
from hpc_swe.makers.history import Candidate
from hpc_swe.makers.images import links
from hpc_swe.makers.images.sources import ImageSource
from hpc_swe.makers.images.store import ImageStore, Problem
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders.base import Grader
from hpc_swe.tasks.recipes import Recipe
from hpc_swe.tasks.swebench_rows import TESTS, Row, TestPatch, script

EDITION = 1
"""Increase this when trials judge otherwise, so that candidates are tried again."""
LOG_PARSER = "parse_log_pytest"
WORKDIR = "/testbed"
_NOT_KNOWN = "not-known-yet"  # a row without any test that must pass is refused
_END = 600
Verdict = Literal["task", "unfit", "no_image", "does_not_run", "nothing_fails", "flaky", "host"]
VERDICTS: dict[Verdict, str] = {
    "task": "some tests fail in every run without the change and pass in every run with it",
    "unfit": "its patches are not in the form that rows need",
    "no_image": "its image cannot be built, or shows the solution",
    "does_not_run": "its tests give no result with the change, for example because a package is missing",
    "nothing_fails": "no test fails without the change and passes with it",
    "flaky": "tests that fail without the change and pass with it do not do so in every run",
    "host": "this machine failed twice; the next call tries it again",
}
"""Results of trials."""


class TriedCommit(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of a trial; it is one line of a file, written at once."""

    commit: str
    verdict: Verdict
    reason: str = ""
    settings: str
    """Digest of everything that the trial depends on, except the commit."""
    date: str = ""
    row: Row | None = None
    """Row of the task, if it became one."""
    flaky: list[str] = []
    """Tests that were left out because runs differ."""


@dataclass(frozen=True)
class SortedTests:
    """The tests of a candidate are sorted by how they ended in all runs."""

    fail_to_pass: list[str]
    pass_to_pass: list[str]
    flaky: list[str]


def sort_tests(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> SortedTests:
    """Sort tests by their outcomes in the runs without and in those with the reference.

    A test that did not pass, or that a run did not reach, counts as failed. A test whose runs on one side
    differ is flaky.
    """
    counts = {
        name: (_passes(before, name), _passes(after, name)) for run in (*before, *after) for name in run
    }
    kinds: dict[str, list[str]] = {"fail": [], "pass": [], "flaky": []}
    for name, (without, with_it) in sorted(counts.items()):
        if without not in (0, len(before)) or with_it not in (0, len(after)):
            kinds["flaky"].append(name)
        elif with_it:
            kinds["pass" if without else "fail"].append(name)
    return SortedTests(kinds["fail"], kinds["pass"], kinds["flaky"])


def _passes(runs: Sequence[dict[str, str]], name: str) -> int:
    return sum(run.get(name) == "passed" for run in runs)


@dataclass(frozen=True)
class ImageBuilder:
    """Images are built in one store from one source."""

    store: ImageStore
    source: ImageSource


@dataclass(frozen=True)
class Trial:
    """A trial runs the tests of candidates with one grader, and judges them."""

    name: str
    """Name of the repository, with which those of its tasks begin."""
    command: str
    """Command that runs tests with pytest; the modules follow."""
    timeout_s: float
    runs: int
    grader: Grader
    sandboxes: Sandboxes
    images: ImageBuilder | None
    """None where sandboxes need no image files."""
    tests: Sequence[str] = TESTS
    """Patterns of the paths that are tests."""

    def is_known(self, candidate: Candidate, tried: TriedCommit | None) -> bool:
        """Return whether an earlier verdict on a candidate still holds."""
        if tried is None or tried.verdict in ("unfit", "host"):
            return False
        try:
            task = self._task(self._row(candidate))
        except ConfigError:
            return False  # `run` makes it a verdict
        made, problem = self.images, Problem(task, candidate.patch)
        if tried.verdict == "task" and made and not made.store.has(made.source.digest(task), problem):
            return False
        return tried.settings == self._settings(task, candidate.patch)

    def run(self, candidate: Candidate) -> TriedCommit:
        """Try a candidate; a host that fails is a verdict, too.

        Raise ConfigError if what images are built from cannot be read, and StorageError if the disk is full.
        """
        tried = TriedCommit(
            commit=candidate.commit.sha, date=candidate.commit.date, verdict="unfit", settings=""
        )
        try:
            row = self._row(candidate)
            task = self._task(row)
        except ConfigError as error:
            return msgspec.structs.replace(tried, reason=str(error))
        settings = self._settings(task, candidate.patch)
        verdict, reason, found = self._judge(task, candidate.patch)
        if verdict != "task" and self.images:
            self.images.store.discard(task)
        full = None  # a row without any test that must pass cannot be made
        if verdict == "task":
            lists = {"FAIL_TO_PASS": found.fail_to_pass, "PASS_TO_PASS": found.pass_to_pass}
            full = msgspec.structs.replace(row, **lists)
        return msgspec.structs.replace(
            tried,
            verdict=verdict,
            reason=reason,
            settings=settings,
            row=full,
            flaky=found.flaky,
        )

    def _judge(self, task: Task, patch: str) -> tuple[Verdict, str, SortedTests]:
        found = SortedTests([], [], [])
        before: list[dict[str, str]] = []
        after: list[dict[str, str]] = []
        try:
            if self.images:
                self.images.store.build(self.images.source, Problem(task, patch))
        except (StorageError, DeadlineError):
            raise
        except HpcSweError as error:
            return "no_image", str(error), found
        try:
            for _ in range(self.runs):
                outcomes, why = self._outcomes(task, patch)
                if not outcomes:
                    return "does_not_run", _shortened(why), found
                after.append(outcomes)
                before.append(self._outcomes(task, "")[0])
                found = sort_tests(before, after)
                if not found.fail_to_pass:
                    return ("flaky" if found.flaky else "nothing_fails"), ", ".join(found.flaky[:3]), found
        except EpisodeError as error:
            return "host", str(error), found
        return "task", "", found

    def _outcomes(self, task: Task, patch: str) -> tuple[dict[str, str], str]:
        with boundary(EpisodeError, "run tests"), links.kept():  # others wait for each run, not for a trial
            return self.grader.outcomes(task, patch, self.sandboxes)

    def _row(self, candidate: Candidate) -> Row:
        """Return the row of a candidate, whose lists of tests are not known yet."""
        where = f"commit {candidate.commit.sha[:12]}"
        name = re.sub(r"[^a-z0-9_.-]", "-", f"{self.name}-{candidate.commit.sha[:12]}".lower()).lstrip("-.")
        row = Row(
            repo=self.name,
            instance_id=name,
            image=name,
            base_commit=candidate.base,
            patch=candidate.patch,
            test_patch=candidate.test_patch,
            problem_statement=candidate.statement,
            version="0",
            FAIL_TO_PASS=[_NOT_KNOWN],
            PASS_TO_PASS=[],
            log_parser=LOG_PARSER,
            test_paths=[] if tuple(self.tests) == TESTS else [*self.tests],
        )
        recipe = Recipe(
            command=f"{self.command} {shlex.join(candidate.modules)}", log_parser=LOG_PARSER, labels="none"
        )
        text = script(row, TestPatch.read(where, row), recipe, WORKDIR)
        return msgspec.structs.replace(row, eval_script=text)

    def _task(self, row: Row) -> Task:
        taskset = loader.load("tasksets", {"type": "swebench", "timeout_s": self.timeout_s})
        task: Task = taskset.task(row.instance_id, row)
        return task

    def _settings(self, task: Task, patch: str) -> str:
        grader = loader.dump(self.grader) if isinstance(self.grader, loader.Plugin) else {}
        image = self.images.source.digest(task) if self.images else ""
        return task_checks.digest((EDITION, grader, image, self.runs, task, patch))


def _shortened(text: str) -> str:
    """Return both ends of a text in one line: a complaint and the end of a log."""
    text = " ".join(text.split())
    return text if len(text) <= 2 * _END else f"{text[:_END]} ... {text[-_END:]}"
