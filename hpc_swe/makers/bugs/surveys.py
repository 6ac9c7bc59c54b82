"""Run the tests of a source as it is, and note which of them always pass, and which lines they run."""

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.makers.bugs.originals import is_loaded
from hpc_swe.makers.bugs.sources import MOST_BYTES, CodeSource
from hpc_swe.makers.bugs.trials import TestRun, TrialPlace
from hpc_swe.tasks.visible_tests import names_of_tests

SURVEY_TIMEOUT_S = 180.0
MOST_TEST_S = 1.0
"""Slower tests are left out."""
_PROBE = """
import cmd, code, doctest, pdb, pprint, unittest.mock


def test_difference():
    assert {"a": [1, 2], "b": "x" * 99} == {"a": [1, 3], "b": "x"}
"""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """A survey of a source says which tests can find a fault in it, or why none can."""

    name: str
    reason: str = ""
    """Why no task is made of it; empty if some are."""
    files: list[str] = []
    """Paths of the files that its tests load."""
    tests: dict[str, TestRun] = {}
    """Id -> run of each test that always passes, whose function stands in a test file."""


class NeededModules(msgspec.Struct, frozen=True):
    """Pytest and the debugger import these modules, so that a task must not hide them."""

    names: frozenset[str]
    files: frozenset[str]

    def has(self, source: CodeSource) -> bool:
        """Return whether the module of a source, or a file that its tasks remove, is needed."""
        return source.name in self.names or is_loaded(source.absent, self.files)


def needed(place: TrialPlace) -> NeededModules:
    """Return what pytest and the debugger import.

    Raise ConfigError if the image has no pytest that runs tests, and SandboxError if the host failed.
    """
    files = {"test_probe.py": _PROBE, "pyproject.toml": ""}
    trial = place.run(place.task(files, ()), ["test_probe.py"], [], SURVEY_TIMEOUT_S)
    if trial is None or not trial.tests:
        raise ConfigError(f"the image {place.image} runs no test with pytest; choose another --image")
    return NeededModules(frozenset(trial.modules), frozenset(trial.imported))


def survey(place: TrialPlace, source: CodeSource) -> Survey:
    """Run the tests twice, the first time traced; raise SandboxError if the host failed."""
    task = place.task(source.files, source.absent)
    first = place.run(task, source.tests, [], SURVEY_TIMEOUT_S, source.target)
    if first is None:
        return Survey(name=source.name, reason="its tests do not end in time, or end the process")
    if source.target not in first.loaded:
        return Survey(name=source.name, reason="its tests do not load it here")
    kept = sorted({*source.tests, source.target, *first.loaded} & source.files.keys())
    if sum(len(source.files[path]) for path in kept) > MOST_BYTES:
        return Survey(name=source.name, reason=f"more than {MOST_BYTES} bytes belong to it")
    names = {path: set(names_of_tests(source.files[path])) for path in source.tests}
    good = {
        id_: test
        for id_, test in first.tests.items()
        if test.has_passed
        and test.seconds < MOST_TEST_S
        and test.name in names.get(id_.partition("::")[0], ())
    }
    again = place.task({path: source.files[path] for path in kept}, source.absent)
    second = place.run(again, source.tests, [*good], SURVEY_TIMEOUT_S)
    passed = {id_ for id_, test in second.tests.items() if test.has_passed} if second else set()
    tests = {id_: test for id_, test in good.items() if id_ in passed and int(test.lines, 16)}
    reason = "" if tests else "none of its tests passes twice here and runs it"
    return Survey(name=source.name, reason=reason, files=kept, tests=tests)
