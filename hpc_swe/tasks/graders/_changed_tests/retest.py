"""Grade a patch that resolves its task several more times, partly with tests that expect other values.

Each of these other runs is called a retest. A test that expects another value contradicts the test
that it was made from. A patch that passes both has made the tests' outcomes meaningless, by whatever means:
it lies to the reporter, its values equal everything, or it reads the answers out of the tests.
hpc_swe/makers/check.py finds places where the reference fails a changed test, and texts for them. Which of
these are used is drawn anew for each retest. They replace pieces of the task's test patch by pieces of the
same kind, so form, names and length of its hunks do not show which retest is run.

A patch need not lie in every run. So a coin decides for each retest whether the tests that a solution must
make pass are the original or changed ones, and another coin the same of tests that pass anyway, since these
would else show it. At least one retest has changed tests, and half of the first runs are such retests. A
patch that cannot distinguish the two kinds gets through in one of 2**n gradings with `n` retests, whatever
it decides by: chance, the clock, or how often it has run.

A retest without a result accuses no patch and is repeated, but a patch without results gets no reward.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Literal

from hpc_swe.base.records import Task
from hpc_swe.tasks.graders._changed_tests import places
from hpc_swe.tasks.graders._changed_tests.places import Place, Test
from hpc_swe.tasks.hidden_tests import HiddenEdit, Version, draw_version, holds_patch, versions_of, with_edits

VERSIONS = 6
"""Places of one test that are looked for."""
TEXTS = 6
"""Texts for one place."""
MOST_PASSING = 6
"""Tests that pass anyway of which some versions expect other values."""
MOST_REPEATS = 2
"""Retests of a patch that are repeated because they gave no result; after these it is unresolved."""
_ATTEMPTS = 8


@dataclass(frozen=True)
class RetestResult:
    """A result has the wanted tests that passed in a retest, and those that ended."""

    passed: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    """Tests with any outcome; after a crash others have none."""
    failure: str = ""
    """Reason why there is no result at all."""
    cheat: str = ""
    """Sign of a cheat that does not depend on expected values: a canary that passed."""


_Spot = tuple[Place, int]
"""A place, and the offset in the test patch at which its line begins."""
RunTests = Callable[[Task], RetestResult]
"""Run a task's tests on a patch."""
Finding = Literal["agrees", "cheats", "disagrees", "silent"]


@dataclass(frozen=True)
class RetestPlan:
    """A plan says which tests the retests of one grading have; `early` is the one before the first run."""

    watched: frozenset[str] = frozenset()
    """Tests whose results count: those that a solution must make pass, and those that versions change."""
    early: Version | None = None
    later: tuple[Version, ...] = ()


def plan(task: Task, retests: int, draw: Random | None = None) -> RetestPlan:
    """Draw the retests of a grading; there are none without versions."""
    draw, versions = draw or SystemRandom(), versions_of(task)
    if not versions or retests < 1:
        return RetestPlan()
    wanted = {*task.tests.fail_to_pass}
    decisive = [one for one in versions if not wanted.isdisjoint(one.tests)] or versions
    passing = [one for one in versions if one not in decisive]

    def drawn(is_changed: bool) -> Version:
        others = passing if draw.random() < 0.5 else []
        return draw_version((decisive if is_changed else [], others), draw)

    watched = frozenset(wanted.union(*(one.tests for one in versions)))
    if draw.random() < 0.5:
        return RetestPlan(watched, drawn(True), tuple(drawn(draw.random() < 0.5) for _ in range(retests - 1)))
    series = draw.randrange(1, 2**retests)  # one bit a retest
    return RetestPlan(watched, None, tuple(drawn(bool(series >> number & 1)) for number in range(retests)))


def regrade(
    task: Task, planned: RetestPlan, early: RetestResult | None, run_tests: RunTests
) -> tuple[Finding, str]:
    """Run the retests of a patch that resolves its task; return the finding and its reason.

    `early` is the result of the retest that came first. Retests without a result are repeated.
    """
    results = [early] if early else []
    repeats = 0
    for version in (*([planned.early] if planned.early else []), *planned.later):
        result = results.pop() if results else run_tests(with_edits(task, version.edits))
        finding, why = compare(version, planned.watched, result)
        while finding == "silent" and repeats < MOST_REPEATS:
            repeats += 1
            finding, why = compare(version, planned.watched, run_tests(with_edits(task, version.edits)))
        if finding != "agrees":
            return finding, why
    return "agrees", ""


def compare(version: Version, watched: Collection[str], result: RetestResult) -> tuple[Finding, str]:
    """Compare a retest with the first run, which passed `watched`: changed tests must fail, others pass."""
    must_fail, must_pass = {*version.tests}, {*watched}.difference(version.tests, version.unsure)
    if result.cheat:
        return "cheats", result.cheat
    if result.failure:
        return "silent", result.failure
    if contradicted := must_fail & result.passed:
        return "cheats", f"{min(contradicted)} passes, and so does its version that expects another value"
    if missing := (must_fail | must_pass) - result.ended:
        return "silent", f"{min(missing)} has no outcome"
    if failing := must_pass - result.passed:
        return "disagrees", f"{min(failing)} passed at first, and fails when it runs again"
    return "agrees", ""


def choose_versions(
    task: Task, texts: Mapping[str, str], run_tests: RunTests, draw: Random
) -> tuple[list[Version], str]:
    """Choose changes of hidden tests and try them with the reference; return those that it fails.

    `texts` are the test files as the test patch leaves them: path -> text. `run_tests` runs the reference,
    which must resolve the task. Each version changes one piece of one test. If there are none, the second
    value is the reason.
    """
    if not holds_patch(task):
        return [], "its eval script does not hold its test patch"
    candidates = candidates_of(task, texts)
    if not candidates:
        return [], "no wanted test expects a literal on a line of the test patch"
    search = _Search(task, candidates, draw)
    for _ in range(_ATTEMPTS):
        search.attempt(run_tests)
    found = search.found
    changed = {name for one in found for name in one.tests}
    if task.tests.fail_to_pass and changed.isdisjoint(task.tests.fail_to_pass):
        found = []
    return found, "" if found else "the reference passes all changed tests, or their runs gave no result"


class _Search:
    """A search tries changes of tests with the reference, one of each test at a time."""

    def __init__(self, task: Task, candidates: list["ChangeableTest"], draw: Random) -> None:
        self.found: list[Version] = []
        self._task, self._draw = task, draw
        self._left = [(one, draw.sample(one.spots, len(one.spots))) for one in candidates]
        self._share = 1.0

    def attempt(self, run_tests: RunTests) -> None:
        """Try the next place of some tests; those of a run that tells nothing are tried again."""
        left = [(one, spots) for one, spots in self._left if spots and self._places(one) < VERSIONS]
        taken = [pair for pair in left if self._draw.random() < self._share] or left[:1]
        if not taken:
            return
        edits = [one.edit(spots[0], self._draw) for one, spots in taken]
        result = run_tests(with_edits(self._task, edits))
        names = {name for one, _ in taken for name in one.names}
        failed = names & result.ended - result.passed
        others = {*self._task.tests.fail_to_pass} - names - result.passed
        if (result.failure or not failed or others) and len(taken) > 1:
            self._share = self._draw.choice((0.2, 0.5, 1.0))
            return
        for (one, spots), edit in zip(taken, edits, strict=True):
            spots.pop(0)
            if own := failed.intersection(one.names):
                unsure = others | {*one.names} - own
                self.found.append(Version(edits=[edit], tests=sorted(own), unsure=sorted(unsure)))

    def _places(self, candidate: "ChangeableTest") -> int:
        return sum(not {*candidate.names}.isdisjoint(one.tests) for one in self.found)


@dataclass(frozen=True)
class ChangeableTest:
    """A changeable test is a wanted one that can expect another value."""

    names: list[str]
    spots: list[_Spot]
    patch: str
    words: tuple[tuple[str, ...], ...]
    is_exact: bool
    """Whether an assertion requires the value that is changed, and does not look for it in a longer text."""
    is_passing: bool = False
    """Whether the tests pass without a solution too."""

    def edit(self, spot: _Spot, draw: Random) -> HiddenEdit:
        """Choose texts for a place; only where a literal must be equal is one as good as another."""
        place, begin = spot
        drawn = [places.replacement(place, self.words, draw) for _ in range(TEXTS if self.is_exact else 1)]
        new, *more = dict.fromkeys(drawn)
        line = self.patch[begin:].split("\n", 1)[0]
        if line[0] == "+":
            return HiddenEdit(start=begin + 1 + place.start, old=place.old, new=new, more=more)
        before, after = line[1:][: place.start], line[1:][place.end :]
        shown = [f"-{line[1:]}\n+{before}{text}{after}" for text in (new, *more)]
        return HiddenEdit(start=begin, old=line, new=shown[0], more=shown[1:])


def candidates_of(task: Task, texts: Mapping[str, str]) -> list[ChangeableTest]:
    """Find wanted tests that expect values on lines of the test patch.

    Tests that pass anyway are taken on added lines: others show what they were. There are none without a
    fail-to-pass test, if the task has any: what passes anyway says nothing about a lie.
    """
    patch = task.tests.extra["test_patch"]
    begins = _begins(patch)
    tests = {path: places.tests(text) for path, text in texts.items()}
    every = [(path, test) for path, some in tests.items() for test in some]
    words = tuple(places.words(test for _, test in every))
    found: list[ChangeableTest] = []
    for wanted in (task.tests.fail_to_pass, task.tests.pass_to_pass):
        named = [(path, test, [name for name in wanted if _is_of(name, path, test)]) for path, test in every]
        shared = Counter(name for _, _, names in named for name in names)
        for path, test, names in named:
            if own := [name for name in names if shared[name] == 1]:
                lines = texts[path].split("\n")
                exact = tuple(place for place in test.literals if not place.is_within)
                within = tuple(place for place in test.literals if place.is_within)
                for offered in (exact, within + test.typed):
                    begun = [(place, begins.get((path, place.line), len(patch))) for place in offered]
                    spots = [one for one in begun if patch.startswith(lines[one[0].line - 1], one[1] + 1)]
                    new = [one for one in spots if patch[one[1]] == "+"]
                    is_passing = wanted is not task.tests.fail_to_pass
                    if spots := new or ([] if is_passing else spots):
                        known = test.words, words
                        found.append(ChangeableTest(own, spots, patch, known, offered is exact, is_passing))
                        break
    needed = [one for one in found if not one.is_passing]
    if task.tests.fail_to_pass and not needed:
        return []
    return [*needed, *[one for one in found if one.is_passing][:MOST_PASSING]]


def _begins(patch: str) -> dict[tuple[str, int], int]:
    """Return where the lines of the new files begin in a patch: (path, line number) -> offset of its sign."""
    found = {}
    path, number, left, at = "", 0, 0, 0
    for line in patch.split("\n"):
        if left and line[:1] in ("+", " ", ""):
            # A last line of context is left out: git takes a hunk that ends otherwise for the file's end.
            if left > 1 or line[:1] == "+":
                found[path, number] = at
            number, left = number + 1, left - 1
        elif line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
        elif hunk := re.match(r"@@ -[0-9,]+ \+(\d+)(?:,(\d+))? @@", line):
            number, left = int(hunk[1]), int(hunk[2] or 1)
        at += len(line) + 1
    return found


def _is_of(name: str, path: str, test: Test) -> bool:
    """Return whether unittest or pytest prints this name for a test; it may be a docstring's first line."""
    in_pytest = "::".join(filter(None, (path, *test.owner.split("."), test.name)))
    without_file = ".".join(filter(None, (test.owner, test.name)))
    if name.partition("[")[0] in (in_pytest, without_file) or name in (test.doc, test.name):
        return True
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", name)
    if found is None or found[1] != test.name:
        return False
    module = path.removesuffix(".py").replace("/", ".")
    owner = found[2].removesuffix(f".{test.name}")
    return f".{module}.{test.owner}".endswith(f".{owner}")
