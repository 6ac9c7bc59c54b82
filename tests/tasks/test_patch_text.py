"""Patches as git and people write them, in the one form that is read here."""

import json
import subprocess
import time

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import apply, difference, take
from hpc_swe.tasks.patch_text import normalised, reversed_patch
from tests.kit.cheats.cheat_task import RIGHT, TASK, WRONG
from tests.kit.toy import MENDED, Checkout, git, gold, make_repository, new, row, taskset, write_rows

LETTERS = 'diff --git "a/gr\\303\\266\\303\\237e.py" "b/gr\\303\\266\\303\\237e.py"\n'


def test_a_reversed_patch_undoes_what_git_wrote(tmp_path):
    make_repository(tmp_path / "calc")
    folder, before = tmp_path / "calc", git(tmp_path / "calc", "rev-parse", "HEAD^{tree}")
    (folder / "calc/core.py").write_text(MENDED.replace("2 * a", "2 *\\\n        a").rstrip() + " + 1")
    (folder / "README.md").unlink()
    (folder / "-- a").write_text("-- b\n++ c\n")
    (folder / "latin.txt").chmod(0o755)
    git(folder, "add", "-A")
    done = subprocess.run(["git", "diff", "--cached"], cwd=folder, capture_output=True, check=True).stdout
    git(folder, "commit", "-qm", "fault")
    (tmp_path / "back").write_text(reversed_patch(normalised(done.decode())))
    git(folder, "apply", "--index", str(tmp_path / "back"))
    assert git(folder, "write-tree") == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"),
        (LETTERS, "diff --git a/gr\u00f6\u00dfe.py b/gr\u00f6\u00dfe.py\n"),
        ('--- "a/\\303\\266"\n', "--- a/\u00f6\n"),
        ('+++ "b/a\\tb"\n', '+++ "b/a\\tb"\n'),
        ('+++ "b/\\377"\n', '+++ "b/\\377"\n'),
        ('@@ -1,2 +1 @@\n--- "a/\\303\\266"\n+x\n', '@@ -1,2 +1 @@\n--- "a/\\303\\266"\n+x\n'),
        ('rename from "\\303\\266"\n', "rename from \u00f6\n"),
        ('diff --git a/a b "b/\\303\\266"\n', "diff --git a/a b b/\u00f6\n"),
        ('diff --git "a/\\303\\266" b/a b\n', "diff --git a/\u00f6 b/a b\n"),
        ('--- a/say"hi".txt\n', '--- a/say"hi".txt\n'),
        ('diff --git a/say "hi" b/say "hi"\n', 'diff --git a/say "hi" b/say "hi"\n'),
    ],
)
def test_only_ends_and_names_change(before, after):
    assert normalised(before) == after
    assert normalised(after) == after


@pytest.mark.parametrize("keyword", ["diff --git ", "+++ ", "diff --git a/a "])
def test_a_name_without_an_end_is_read_once(keyword):
    def seconds(size: int) -> float:
        line = keyword + '\\"' * size + "\n"
        began = time.process_time()
        assert normalised(line) == line
        assert normalised(keyword + '"' + line) == keyword + '"' + line
        return time.process_time() - began

    short, long = (min(seconds(size) for _ in range(5)) for size in (500, 8_000))
    assert long < 64 * short  # 16 times the work; once for each character is 256 times


def test_a_file_with_quotes_in_its_name_is_handed_in(tmp_path):
    with Process().open(TASK) as sandbox:
        sandbox.write('say"hi".txt', b"a\n")
        text = take(TASK, sandbox, Process())
    assert apply(TASK, text)['say"hi".txt'] == "a\n"


@pytest.mark.parametrize("name", ["gr\u00f6\u00dfe", "with space", "[a]", "plain"])
def test_git_applies_what_it_has_quoted(tmp_path, name):
    git(tmp_path, "init", "-q")
    path = tmp_path / f"{name}.py"
    path.write_text("a\n")
    git(tmp_path, "add", "-A")
    path.write_text("b\n")
    text = normalised(git(tmp_path, "-c", "core.quotePath=true", "diff"))
    path.write_text("a\n")
    subprocess.run(["git", "apply", "-"], input=text, text=True, cwd=tmp_path, check=True)
    assert path.read_text() == "b\n"


def test_a_row_whose_patches_lack_the_last_newline_is_read_and_graded(tmp_path):
    base = make_repository(tmp_path / "calc")
    texts = {key: row("pytest", base)[key].rstrip("\n") for key in ("patch", "test_patch")}
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("pytest", base, **texts))).load("train")
    score = Swebench().grade(one, gold().rstrip("\n"), Checkout(repository=str(tmp_path / "calc")))
    assert score.outcome == "resolved", score


@pytest.mark.slow
def test_tests_in_a_file_whose_name_is_quoted_are_graded(tmp_path):
    name = "tests/test_gr\u00f6\u00dfe.py"
    text = "from calc.core import add, double\n\n\ndef test_double():\n    assert double(1) == 2\n"
    base = make_repository(tmp_path / "calc", {name: text})
    (tmp_path / "calc" / name).write_text(text + "\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    tests = git(tmp_path / "calc", "-c", "core.quotePath=true", "diff")
    assert "\\303" in tests
    words = {"FAIL_TO_PASS": json.dumps([f"{name}::test_add"]), "test_patch": tests}
    words["PASS_TO_PASS"] = json.dumps([f"{name}::test_double"])
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("pytest", base, **words))).load("train")
    sandboxes = Checkout(repository=str(tmp_path / "calc"))
    assert Swebench().examine(one, "", sandboxes).passed == [f"{name}::test_double"]
    assert Swebench().grade(one, gold(), sandboxes).outcome == "resolved"


def test_a_patch_of_plain_files_without_its_last_newline_fits():
    text = difference("mod.py", WRONG, RIGHT).rstrip("\n")
    assert apply(TASK, text)["mod.py"] == RIGHT
    assert Pytest().grade(TASK, text, Process()).outcome == "resolved"
    one = msgspec.structs.replace(TASK, files={"\u00f6.py": "a\n"})
    quoted = '--- "a/\\303\\266.py"\n+++ "b/\\303\\266.py"\n@@ -1 +1 @@\n-a\n+b\n'
    assert apply(one, quoted) == {"\u00f6.py": "b\n"}


@pytest.mark.slow
@pytest.mark.parametrize("is_in_reference", [False, True])
def test_a_stray_test_module_stops_no_suite(tmp_path, is_in_reference):
    """The script runs the whole suite, which would collect it."""
    base = make_repository(tmp_path / "calc")
    recipes = {
        "toy/pytest": {"command": "python -m pytest -rA", "log_parser": "parse_log_pytest", "labels": "none"}
    }
    stray = new("test_repro.py", "import nothing_of_this_name\n") + new("tests/check_test.py", "1 / 0\n")
    given = {"patch": gold() + stray} if is_in_reference else {}
    rows = write_rows(tmp_path / "rows.jsonl", row("pytest", base, **given))
    (one,) = taskset(rows, recipes=recipes).load("train")
    score = Swebench().grade(one, gold() + stray, Checkout(repository=str(tmp_path / "calc")))
    assert score.outcome == "resolved", score


@pytest.mark.parametrize(
    ("saved", "handed_in"),
    [
        (
            "# -*- coding: latin-1 -*-\n# gr\u00f6\u00dfer\nx = '\u00e9'\n",
            "# -*- coding: utf-8 -*-\n# gr\u00f6\u00dfer\nx = '\u00e9'\n",
        ),
        ("#!/bin/python\n# coding=cp1252\nx = '\u00e9'\n", "#!/bin/python\n# coding=utf-8\nx = '\u00e9'\n"),
        ("x = 1\n# coding: latin-1\ny = '\u00e9'\n", None),
        ("# coding: punycode\ny = '\u00e9'\n", None),
    ],
)
def test_a_repair_that_declares_its_encoding_is_handed_in(saved, handed_in):
    with Process().open(TASK) as sandbox:
        sandbox.write("mod.py", saved.encode("cp1252"))
        text = take(TASK, sandbox, Process())
    assert (apply(TASK, text)["mod.py"] if text else None) == handed_in
