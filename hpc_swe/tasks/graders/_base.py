"""Ask a task's own files, without any patch, which tests there are, how they end and what they compute.

A patch could hide a test from pytest or skip it, so what a patched run shows decides neither. Each question
is asked at most once for a task in a worker, and up to three times while its run does not come to its end:
a failure of the host must not stay, and a program that never ends must not be run for each patch. No policy
can change the answer.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.records import Task
from hpc_swe.tasks.graders._exam import Exam, TestReport
from hpc_swe.tasks.graders._sealing.sealed import Sealed
from hpc_swe.tasks.patch import apply
from hpc_swe.tasks.visible_tests import holds_tests, name_of, names_of_tests

HOME = "a test is from "
"""Beginning of the sign by which the guard names the file of a test."""
_MOST_BASES = 1024
_MOST_TRIES = 3


@dataclass(frozen=True)
class _Known:
    """Earlier runs have shown this; it holds neither the task nor its files."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reports: dict[tuple[str, ...], TestReport] = field(default_factory=dict)
    """Options of pytest -> report."""
    tries: Counter[tuple[str, ...]] = field(default_factory=Counter)


_known: dict[bytes, _Known] = {}
_known_lock = threading.Lock()


@dataclass(frozen=True)
class Base:
    """Find out what one task's own files show, as soon as somebody asks."""

    task: Task
    modules: Mapping[str, Sealed]
    known: _Known
    unfinished: list[TestReport] = field(default_factory=list)
    """Answers to this grading by runs that did not come to their end: a later patch may get others."""

    @cached_property
    def exam(self) -> Exam:
        return Exam(self.task, apply(self.task, ""), self.modules, is_base=True)

    def collected(self, sandboxes: Sandboxes) -> list[str]:
        """Return the ids of the tests that pytest finds; raise SandboxError if the host failed."""
        return self._asked(sandboxes, "--collect-only").collected

    def homes(self, sandboxes: Sandboxes) -> set[str]:
        """Return the files that these tests are from, also by inheritance or an import."""
        signs = self._asked(sandboxes, "--collect-only").odd
        found = {file for sign, files in signs.items() if sign.startswith(HOME) for file in files}
        return {file for file in found if self.may_hold(self.task.files.get(file, ""))}

    def may_hold(self, text: str) -> bool:
        """Return whether a file may have tests; of a task that names its tests, whether one of these."""
        ids = [*self.task.tests.fail_to_pass, *self.task.tests.pass_to_pass]
        named = {name_of(one).rpartition(".")[2] for one in ids}
        return not named or (
            holds_tests(text) and any(one.rpartition(".")[2] in named for one in names_of_tests(text))
        )

    def report(self, sandboxes: Sandboxes) -> TestReport:
        """Return how the tests end; raise SandboxError if the host failed."""
        return self._asked(sandboxes)

    def _asked(self, sandboxes: Sandboxes, *options: str) -> TestReport:
        known = self.known
        with known.lock:
            if options not in known.reports:
                _, report = self.exam.run(sandboxes, *options)
                known.tries[options] += 1
                if not report.has_end and known.tries[options] < _MOST_TRIES:
                    self.unfinished.append(report)
                    return report
                known.reports[options] = report
            return known.reports[options]


def base_of(task: Task, modules: Mapping[str, Sealed]) -> Base:
    """Return what is known of a task whose tests are sealed in this way."""
    whole = msgspec.json.encode((task, {path: one.text for path, one in modules.items()}))
    key = hashlib.sha256(whole).digest()
    with _known_lock:
        known = _known.get(key)
        if known is None:
            while len(_known) >= _MOST_BASES:
                del _known[next(iter(_known))]
            known = _known[key] = _Known()
    return Base(task, modules, known)
