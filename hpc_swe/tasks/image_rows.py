"""Derive the columns that rows lack where an image holds the tests, or serves many rows.

SWE-smith: the column `patch` makes the fault, in the repository of an image that many rows share. R2E-Gym:
the tests lie in the image beside the repository, and a solution makes every one end as the reference does.
Scale-SWE: some of the tests are a script, which becomes a part of the test patch.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hpc_swe.tasks.patch_text import normalised, reversed_patch

HEAD = "HEAD"
"""The commit that an image's repository is at, for rows that name none which it has."""
SCRIPT = "test_fail_to_pass.py"
"""The file in which the tests of Scale-SWE expect a row's script."""
_OF_R2E = "r2e_tests run_tests.sh install.sh syn_issue.json expected_test_output.json execution_result.json"
_OF_R2E += " parsed_commit.json modified_files.json modified_entities.json"
"""Files that its makers left in /testbed, which show the tests or the solution."""
_PYTEST = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {}.venv/bin/python -W ignore -m pytest -rA"
)
_DISPLAY = "QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum "
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_TEST = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test\.py)|(.*/)?[tT]ests?/.*")
_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def of_smith(row: Mapping[str, Any], names_of: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return the columns of a row of SWE-smith; raise ValueError, which names the column, for others."""
    fail_to_pass, pass_to_pass = names_of("FAIL_TO_PASS"), names_of("PASS_TO_PASS")
    if not fail_to_pass:
        raise ValueError("column FAIL_TO_PASS is missing or empty")
    for name in fail_to_pass:
        if not re.fullmatch(r"[^:]+\.py::.+", name, re.DOTALL):
            raise ValueError(
                f"column FAIL_TO_PASS: {name!r} is no test of pytest: nothing says how it is run"
            )
    files = dict.fromkeys(name.partition("::")[0] for name in fail_to_pass)
    try:
        reference = reversed_patch(normalised(str(row["patch"])))
    except ValueError as error:
        raise ValueError(f"column patch: {error}") from None
    return {
        "base_commit": HEAD,
        "start_patch": row["patch"],
        "patch": reference,
        "test_patch": "",
        "hidden_tests": [*files],
        # As its own harness does: the other files stay, and are not run.
        "PASS_TO_PASS": [name for name in pass_to_pass if name.partition("::")[0] in files],
    }


def of_scale(row: Mapping[str, Any], _: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return the columns of a row of Scale-SWE, whose `f2p_script` is a file of its own.

    Its `patch` is that of a whole pull request, whose changes of tests are left out: a solution may change
    what the reference changes. Its `pre_commands`, which are not run, check out the base commit, since images
    are at an older one, and hide its future, as our images do.
    """
    script, patch = (str(row.get(name) or "") for name in ("f2p_script", "f2p_patch"))
    if not (script + patch).strip():
        raise ValueError("columns f2p_script and f2p_patch are missing or empty")
    if script.strip():
        lines = script.removesuffix("\n").split("\n")
        added = ["--- /dev/null", f"+++ b/{SCRIPT}", f"@@ -0,0 +1,{len(lines)} @@"]
        patch = normalised(patch) + "\n".join([*added, *(f"+{line}" for line in lines)])
    parts = re.split("^(?=diff --git )", str(row.get("patch") or ""), flags=re.MULTILINE)
    kept = [part for part in parts if not _TEST.fullmatch(part.partition("\n")[0].rpartition(" b/")[2])]
    return {"patch": "".join(kept), "test_patch": patch, "of_another_commit": True}


class _Range(msgspec.Struct):
    start: int
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.start}" if self.length is None else f"{self.start},{self.length}"


class _Descriptor(msgspec.Struct):
    old_range: _Range
    new_range: _Range
    section: str = ""


class _Line(msgspec.Struct):
    content: str
    type: str


class _Lines(msgspec.Struct):
    all_lines: list[_Line]


class _Hunk(msgspec.Struct):
    descriptor: _Descriptor
    line_group: _Lines


class _File(msgspec.Struct):
    path: str


class _Header(msgspec.Struct):
    file: _File
    misc_line: str | None = None


class _FileDiff(msgspec.Struct):
    """R2E-Gym keeps this of one file of a commit."""

    header: _Header
    is_binary_file: bool = False
    minus_file: _File | None = None
    plus_file: _File | None = None
    hunks: list[_Hunk] = []

    def patch(self) -> str:
        path = self.header.file.path
        lines = [f"diff --git a/{path} b/{path}", *filter(None, [self.header.misc_line])]
        if self.minus_file and self.plus_file:
            lines += [f"--- {self.minus_file.path}", f"+++ {self.plus_file.path}"]
        for hunk in self.hunks:
            about = hunk.descriptor
            lines.append(f"@@ -{about.old_range} +{about.new_range} @@ {about.section}".rstrip())
            lines += [_SIGNS[line.type] + line.content for line in hunk.line_group.all_lines]
        return "\n".join(lines) + "\n"


class _Commit(msgspec.Struct):
    file_diffs: list[_FileDiff]


def of_r2e(row: Mapping[str, Any], _: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return the columns of a row of R2E-Gym; raise ValueError, which names the column, for others."""
    statuses = {
        _COLOUR.sub("", name).partition(" - ")[0]: status
        for name, status in _read(row, "expected_output_json", dict[str, str]).items()
    }
    bad = {name.split(" ")[0] for name in statuses if statuses[name] != "PASSED"}
    commit = _read(row, "parsed_commit_content", _Commit)
    solved = [each for each in commit.file_diffs if not _TEST.fullmatch(each.header.file.path)]
    if any(each.is_binary_file for each in solved) or not solved:
        raise ValueError("column parsed_commit_content: it must change files that are text, and no tests")
    if lacking := [name for name in ("repo_name", "commit_hash", "problem_statement") if not row.get(name)]:
        raise ValueError(f"column {lacking[0]} is missing or empty")
    issue = str(row["problem_statement"])
    inner = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", issue, re.DOTALL)
    display = _DISPLAY if row["repo_name"] == "orange3" else ""
    return {
        "repo": row["repo_name"],
        "instance_id": f"{row['repo_name']}__{row['commit_hash']}",
        "base_commit": HEAD,
        "patch": "".join(each.patch() for each in solved),
        "test_patch": "",
        "hidden_tests": ["/r2e_tests"],
        "absent": [f"/testbed/{name}" for name in _OF_R2E.split()],
        "problem_statement": inner[1].strip() if inner else issue,
        # swebench's parser cuts a name at a blank, and the worst end of a name counts
        "FAIL_TO_PASS": [*dict.fromkeys(cut for name in statuses if (cut := name.split(" ")[0]) not in bad)],
        "PASS_TO_PASS": [],
        "statuses": statuses,
        "test_cmd": f"{_PYTEST.format(display)} r2e_tests",
    }


def _read(row: Mapping[str, Any], column: str, kind: Any) -> Any:
    if not row.get(column):
        raise ValueError(f"column {column} is missing or empty")
    try:
        return msgspec.json.decode(str(row[column]), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"column {column}: {error}") from None
