"""Edit a task's hidden tests so that they expect other values.

hpc_swe/makers/check.py chooses these versions, a set adds them, and a grader uses them in retests.
"""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Final

import msgspec
from msgspec.structs import replace

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Task
from hpc_swe.tasks.patch_text import HIDDEN

CHANGED_TESTS: Final = "changed_tests"
"""Key of `TestPlan.extra` with versions of the hidden tests, in JSON. Only reward workers' tasks have it."""

UNSEALED: Final = "unsealed"
"""Key of `TestPlan.extra` with the assertions that must compare in the sandbox, in JSON."""


class HiddenEdit(msgspec.Struct, frozen=True):
    """An edit replaces one piece of a task's test patch."""

    start: int
    """Offset in characters from the beginning of the test patch."""
    old: str
    new: str
    more: list[str] = []
    """Other texts that do as well as `new`."""


class Version(msgspec.Struct, frozen=True):
    """A version of the hidden tests expects other values than the original; several can be joined."""

    edits: list[HiddenEdit]
    tests: list[str]
    """Names of wanted tests that were changed and that the reference now fails."""
    unsure: list[str]
    """Other names that say nothing about a patch: the reference fails them too, or passes the change."""


def draw_version(groups: Iterable[Sequence[Version]], draw: Random) -> Version:
    """Join one version of each test, those of the first group first, and draw a text for each edit."""
    edits: list[HiddenEdit] = []
    tests: set[str] = set()
    unsure: set[str] = set()
    for one in (one for group in groups for one in draw.sample(group, len(group))):
        if (tests | unsure).isdisjoint([*one.tests, *one.unsure]):
            edits += [replace(edit, new=draw.choice([edit.new, *edit.more])) for edit in one.edits]
            tests.update(one.tests)
            unsure.update(one.unsure)
    return Version(edits=edits, tests=sorted(tests), unsure=sorted(unsure))


def encode_versions(task: Task, versions: Sequence[Version]) -> str:
    """Encode versions for `TestPlan.extra`, or none as ""; raise ConfigError for another test patch's."""
    for version in versions if task.tests.extra["test_patch"] != HIDDEN else ():
        with_edits(task, version.edits)
    return msgspec.json.encode(versions).decode() if versions else ""


def with_versions(task: Task, versions: str) -> Task:
    """Add encoded versions of the hidden tests to a task; an empty text leaves the task as it is."""
    if not versions:
        return task
    extra = task.tests.extra | {CHANGED_TESTS: versions}
    return replace(task, tests=replace(task.tests, extra=extra))


def versions_of(task: Task) -> list[Version]:
    """Decode the versions that `with_versions` added to a task; there are none without it."""
    return msgspec.json.decode(task.tests.extra.get(CHANGED_TESTS, "[]"), type=list[Version])


def with_edits(task: Task, edits: Sequence[HiddenEdit]) -> Task:
    """Replace pieces of the task's test patch, in its script too.

    Raise ConfigError if the edits are of another test patch, or the script does not hold the patch once.
    """
    patch = before = task.tests.extra["test_patch"]
    for edit in sorted(edits, key=lambda one: one.start, reverse=True):
        if patch[edit.start : edit.start + len(edit.old)] != edit.old:
            raise ConfigError(
                f"{task.task_id}: taskset.checked is of another test patch: run hpc_swe.check again"
            )
        patch = patch[: edit.start] + edit.new + patch[edit.start + len(edit.old) :]
    command = task.tests.command.replace(before.strip("\n"), patch.strip("\n"))
    if not holds_patch(task):
        raise ConfigError(f"{task.task_id}: its eval script does not hold its test patch once")
    extra = task.tests.extra | {"test_patch": patch}
    return replace(task, tests=replace(task.tests, command=command, extra=extra))


def with_unsealed(task: Task, places: Mapping[str, Sequence[str]]) -> Task:
    """Name assertions that a grader must not seal: test file -> lines and columns, such as ``12:4``."""
    if not places:
        return task
    extra = task.tests.extra | {UNSEALED: msgspec.json.encode(places, order="sorted").decode()}
    return replace(task, tests=replace(task.tests, extra=extra))


def unsealed_of(task: Task) -> dict[str, list[str]]:
    """Decode the places that `with_unsealed` added to a task; there are none without it."""
    return msgspec.json.decode(task.tests.extra.get(UNSEALED, "{}"), type=dict[str, list[str]])


def holds_patch(task: Task) -> bool:
    """Return whether the eval script holds the test patch exactly once, so that it can be replaced there."""
    return task.tests.command.count(task.tests.extra["test_patch"].strip("\n")) == 1
