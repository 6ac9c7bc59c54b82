"""The later sittings: what resolved is graded some more times, partly by tests that expect something else.

A test that expects another value contradicts the one that it was made from. A submission that passes both
has made the tests' verdicts mean nothing, whatever way it found: it lies to the reporter, its values equal
everything, or it reads the answers out of the tests. hpc_swe/tasks/check.py chooses the changes once: those
that the reference fails. They replace literals in the task's test patch, so that in form, in names and in
length of its hunks nothing tells one sitting from the other; which of several versions is sat is drawn anew.

A submission need not lie each time. So a coin decides of each later sitting whether its tests are the
original or changed ones, and one at least is changed: of `n` sittings there are 2**n - 1 series, all equally
likely. A submission that cannot tell the two kinds apart is believed in at most one of them, whatever it
lies by: chance, the clock, or how often it has run.

Nobody is accused by a sitting that told nothing, which is sat again; but nobody is paid by such ones either.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import msgspec

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.graders import _places
from hpc_swe.plugins.graders._places import Place, Test
from hpc_swe.plugins.graders.base import CHANGED_TESTS, HiddenEdit, Version
from hpc_swe.records import Task

VERSIONS = 4
AGAIN = 2
"""Sittings that may tell nothing before a submission is unresolved."""
_ATTEMPTS = 8
_ORIGINAL = Version(edits=[], tests=[], unsure=[])


@dataclass(frozen=True)
class Told:
    """What a sitting told of the wanted tests."""

    passed: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    """Those with an outcome, passed or not; a crash leaves others without."""
    nothing: str = ""
    """Why it told nothing at all."""
    cheat: str = ""
    """What shows a cheat whatever was expected: a canary that passed."""


_Spot = tuple[Place, int]
"""A place, and where in the test patch its line begins."""
Sit = Callable[[Task], Told]
"""Run a submission by a task's tests."""
Kind = Literal["agrees", "cheats", "disagrees", "silent"]


_versions = msgspec.json.Decoder(list[Version])


def encoded(task: Task, versions: Sequence[Version]) -> str:
    """For `TestPlan.extra`; empty where there are none.

    Raises:
        ConfigError: They are of another test patch.
    """
    for version in versions:
        changed(task, version.edits)
    return msgspec.json.encode(versions).decode() if versions else ""


def resat(task: Task, sittings: int, sit: Sit) -> tuple[Kind, str]:
    """What later sittings show of a submission that resolved the task; and which test shows it.

    Args:
        task: With the versions of its hidden tests; without any there are no later sittings.
        sittings: How many later sittings there are, besides those that tell nothing.
        sit: Run the submission.
    """
    versions = _versions.decode(task.tests.extra.get(CHANGED_TESTS, "[]"))
    if not versions or sittings < 1:
        return "agrees", ""
    watched = {*task.tests.fail_to_pass}.union(*(version.tests for version in versions))
    series = secrets.randbelow(2**sittings - 1) + 1  # a bit a sitting: whether its tests are changed
    silent = 0
    for place in range(sittings):
        version = secrets.choice(versions) if series >> place & 1 else _ORIGINAL
        kind, why = judged(version, watched, sit(changed(task, version.edits)))
        while kind == "silent" and silent < AGAIN:
            silent += 1
            kind, why = judged(version, watched, sit(changed(task, version.edits)))
        if kind != "agrees":
            return kind, why
    return "agrees", ""


def judged(version: Version, watched: Collection[str], told: Told) -> tuple[Kind, str]:
    """Whether a submission that passed all `watched` tests still does, but for those that are changed."""
    must_fail, must_pass = {*version.tests}, {*watched}.difference(version.tests, version.unsure)
    if told.cheat:
        return "cheats", told.cheat
    if told.nothing:
        return "silent", told.nothing
    if through := must_fail & told.passed:
        return "cheats", f"{min(through)} passes also where it expects what contradicts it"
    if missing := (must_fail | must_pass) - told.ended:
        return "silent", f"{min(missing)} has no outcome"
    if failing := must_pass - told.passed:
        return "disagrees", f"{min(failing)} passed at first, and does not when it runs again"
    return "agrees", ""


def changed(task: Task, edits: Sequence[HiddenEdit]) -> Task:
    """The task with another test patch, in its script too.

    Raises:
        ConfigError: The edits are of another test patch, or the script does not hold it.
    """
    patch = before = task.tests.extra["test_patch"]
    for edit in sorted(edits, key=lambda one: one.start, reverse=True):
        if patch[edit.start : edit.start + len(edit.old)] != edit.old:
            raise ConfigError(
                f"{task.task_id}: taskset.checked is of another test patch: run hpc_swe.tasks.check again"
            )
        patch = patch[: edit.start] + edit.new + patch[edit.start + len(edit.old) :]
    command = task.tests.command.replace(before.strip("\n"), patch.strip("\n"))
    if not _holds_patch(task):
        raise ConfigError(f"{task.task_id}: its eval script does not hold its test patch once")
    extra = task.tests.extra | {"test_patch": patch}
    return msgspec.structs.replace(
        task, tests=msgspec.structs.replace(task.tests, command=command, extra=extra)
    )


def _holds_patch(task: Task) -> bool:
    return task.tests.command.count(task.tests.extra["test_patch"].strip("\n")) == 1


def choose(task: Task, texts: Mapping[str, str], sit: Sit, draw: Random) -> tuple[list[Version], str]:
    """Changes of hidden tests that the reference fails, tried by it; and why there are none.

    All versions change the same tests, so that for each of these tests the coins alone decide.

    Args:
        task: A task that the reference resolves.
        texts: Path -> text of each test file, as the test patch leaves it.
        sit: Run the reference.
        draw: Chances; other ones make other versions.
    """
    if not _holds_patch(task):
        return [], "its eval script does not hold its test patch"
    candidates = _candidates(task, texts)
    if not candidates:
        return [], "no wanted test expects a literal on a line of the test patch"
    found: list[Version] = []
    best: list[Version] = []
    deaf: set[_Spot] = set()
    share = 1.0
    for _ in range(_ATTEMPTS):
        taken = [one for one in candidates if draw.random() < share] or [draw.choice(candidates)]
        spots = [draw.choice([spot for spot in one.spots if spot not in deaf] or one.spots) for one in taken]
        edits = [one.edit(spot, draw) for one, spot in zip(taken, spots, strict=True)]
        told = sit(changed(task, edits))
        names = {name for one in taken for name in one.names}
        version = _version(task, edits, names, told)
        if told.nothing or not version.tests:
            share = draw.choice((0.2, 0.5, 1.0))
            continue
        deaf.update(
            spot for one, spot in zip(taken, spots, strict=True) if not {*one.names} <= {*version.tests}
        )
        found.append(version)
        most = max(found, key=lambda one: len(one.tests)).tests
        best = [one for one in found if one.tests == most]
        if len(best) == VERSIONS:
            break
    return best, "" if best else "the reference passes all changed tests, or their sittings tell nothing"


def _version(task: Task, edits: list[HiddenEdit], names: set[str], told: Told) -> Version:
    """Of the tests named, those that the reference now fails; nothing is asked of others that it fails."""
    tests = names & told.ended - told.passed
    unsure = (names | ({*task.tests.fail_to_pass} - told.passed)) - tests
    return Version(edits=edits, tests=sorted(tests), unsure=sorted(unsure))


@dataclass(frozen=True)
class _Candidate:
    """A wanted test that can be changed."""

    names: list[str]
    spots: list[_Spot]
    patch: str
    words: list[str]

    def edit(self, spot: _Spot, draw: Random) -> HiddenEdit:
        """Change one place."""
        place, begin = spot
        line = self.patch[begin:].split("\n", 1)[0]
        new = _places.another(place, self.words, draw)
        if line[0] == "+":
            return HiddenEdit(start=begin + 1 + place.start, old=place.old, new=new)
        text = line[1:]
        return HiddenEdit(
            start=begin, old=line, new=f"-{text}\n+{text[: place.start]}{new}{text[place.end :]}"
        )


def _candidates(task: Task, texts: Mapping[str, str]) -> list[_Candidate]:
    """Tests of lines that the test patch shows: of those that the bug breaks, or else of the others.

    A cheat must lie about the first; by the others, which pass anyway, it could tell which sitting it is in.
    """
    patch = task.tests.extra["test_patch"]
    begins = _begins(patch)
    tests = {path: _places.tests(text) for path, text in texts.items()}
    words = _places.words(test for some in tests.values() for test in some)
    for wanted in (task.tests.fail_to_pass, task.tests.pass_to_pass):
        found = []
        for path, test, names in _named(tests, wanted):
            lines = texts[path].split("\n")
            shown = [
                [
                    (place, begins[path, place.line])
                    for place in places
                    if patch.startswith(lines[place.line - 1], begins.get((path, place.line), len(patch)) + 1)
                ]
                for places in (test.literals, test.twists)
            ]
            spots = shown[0] or shown[1]
            if spots:
                found.append(_Candidate(names, spots, patch, words))
        if found:
            return found
    return []


def _begins(patch: str) -> dict[tuple[str, int], int]:
    """Path and number of each line that a patch leaves or shows -> where it begins, with its sign.

    Without the line of context that ends a hunk: git takes a hunk that ends otherwise for the file's end.
    """
    found = {}
    path, number, left, at = "", 0, 0, 0
    for line in patch.split("\n"):
        if left and line[:1] in ("+", " ", ""):
            if left > 1 or line[:1] == "+":
                found[path, number] = at
            number, left = number + 1, left - 1
        elif line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
        elif hunk := re.match(r"@@ -[0-9,]+ \+(\d+)(?:,(\d+))? @@", line):
            number, left = int(hunk[1]), int(hunk[2] or 1)
        at += len(line) + 1
    return found


def _named(
    tests: Mapping[str, Sequence[Test]], wanted: Sequence[str]
) -> Iterator[tuple[str, Test, list[str]]]:
    """Path, test, and the names that it is wanted by; tests that share a name have none."""
    every = [(path, test) for path, some in tests.items() for test in some]
    named = [[name for name in wanted if _is_of(name, path, test)] for path, test in every]
    shared = Counter(name for names in named for name in names)
    for (path, test), names in zip(every, named, strict=True):
        if own := [name for name in names if shared[name] == 1]:
            yield path, test, own


def _is_of(name: str, path: str, test: Test) -> bool:
    """Whether a list's name is a test's: as unittest prints it, as pytest does, or by its first words."""
    if name.partition("[")[0] == "::".join(filter(None, (path, *test.owner.split("."), test.name))):
        return True
    if name in (test.doc, test.name):
        return True
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", name)
    if found is None or found[1] != test.name:
        return False
    module = path.removesuffix(".py").replace("/", ".")
    owner = found[2].removesuffix(f".{test.name}")
    return f".{module}.{test.owner}".endswith(f".{owner}")
