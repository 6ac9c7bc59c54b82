"""Tasks and submissions made of honest work, one or several pieces of it at a time."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from hpc_swe.base.records import Task, TestPlan
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.honest_submissions import BY_RULE, SUBMISSIONS
from tests.kit.cheats.honest_suites import MODULE, SUITES
from tests.kit.scripted import SMALL
from tests.kit.toy import new, row, taskset, write_rows

Piece = tuple[str, str]
"""The text of a module and that of its tests."""
WORK: dict[str, Piece] = {
    **SUBMISSIONS,
    **{f"suite: {name}": (MODULE, text) for name, text in SUITES.items()},
}


def named(pieces: Iterable[Piece]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return modules, test modules and the names of their tests."""
    modules, tests, names = {}, {}, []
    for number, piece in enumerate(pieces):
        text, test = (re.sub(r"MOD", f"mod_{number}", one) for one in piece)
        modules[f"mod_{number}.py"] = text
        tests[f"test_case_{number}.py"] = test
        owner = "TestIt::" if "class TestIt" in test else ""
        names.append(f"test_case_{number}.py::{owner}test_it")
    return modules, tests, names


def of_files(pieces: Iterable[Piece]) -> tuple[Task, str]:
    """Return a task of plain files and the submission that solves it."""
    modules, tests, names = named(pieces)
    command = f"python -m pytest {' '.join(tests)}"
    plan = TestPlan(command=command, files=tests, fail_to_pass=names, pass_to_pass=[], timeout_s=120.0)
    return replace(SMALL, files={"m.py": ""}, tests=plan), "".join(
        difference(path, None, text) for path, text in modules.items()
    )


def of_repository(folder: Path, base: str, pieces: Iterable[Piece]) -> tuple[Task, str]:
    """Return a task of the toy repository at its commit `base`, and the patch that solves it."""
    modules, tests, names = named(pieces)
    words = {
        "FAIL_TO_PASS": json.dumps(names),
        "PASS_TO_PASS": "[]",
        "patch": "".join(new(path, text) for path, text in modules.items()),
        "test_patch": "".join(new(path, text) for path, text in tests.items()),
    }
    rows = write_rows(folder / "rows.jsonl", row("pytest", base, **words))
    (task,) = taskset(rows).load("train")
    return task, words["patch"]


__all__ = ["BY_RULE", "WORK", "of_files", "of_repository"]
