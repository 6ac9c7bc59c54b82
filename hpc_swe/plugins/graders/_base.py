"""Ask a task's own files, without any patch, which tests there are, how they end and what they compute.

A patch could hide a test from pytest or skip it, so what a patched run shows decides neither. Each question
is asked at most once for a task in a worker. No policy can change the answer.
"""

import threading
from collections.abc import Mapping
from functools import cached_property

import msgspec

from hpc_swe.plugins.graders._exam import Exam, TestReport
from hpc_swe.plugins.graders._sealed import Sealed
from hpc_swe.plugins.patch import apply
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Task

_MOST_BASES = 1024
_bases: dict[bytes, "Base"] = {}
_bases_lock = threading.Lock()


class Base:
    """Hold what one task's own files show, as soon as somebody asks."""

    def __init__(self, task: Task, modules: Mapping[str, Sealed]) -> None:
        self._task, self._modules = task, modules
        self._lock = threading.Lock()
        self._collected: list[str] | None = None
        self._report: TestReport | None = None

    @cached_property
    def exam(self) -> Exam:
        return Exam(self._task, apply(self._task, ""), self._modules)

    def collected(self, sandboxes: Sandboxes) -> list[str]:
        """Return the ids of the tests that pytest finds; raise SandboxError if the host failed."""
        with self._lock:
            if self._collected is None:
                self._collected = self.exam.run(sandboxes, "--collect-only")[1].collected
            return self._collected

    def report(self, sandboxes: Sandboxes) -> TestReport:
        """Return how the tests end; raise SandboxError if the host failed."""
        with self._lock:
            if self._report is None:
                self._report = self.exam.run(sandboxes)[1]
            return self._report


def base_of(task: Task, modules: Mapping[str, Sealed]) -> Base:
    """Return what is known of a task whose tests are sealed in this way."""
    key = msgspec.json.encode((task, {path: one.text for path, one in modules.items()}))
    with _bases_lock:
        known = _bases.get(key)
        if known is None:
            while len(_bases) >= _MOST_BASES:
                del _bases[next(iter(_bases))]
            known = _bases[key] = Base(task, modules)
        return known
