"""While tests run, nothing in the sandbox but the test files themselves says what is hidden."""

import json
import subprocess

import msgspec
import pytest

from hpc_swe.makers import history
from hpc_swe.tasks.graders._swebench import Run
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch_text import without_digests
from tests.kit.histories import make
from tests.kit.toy import (
    BROKEN,
    MENDED,
    MORE_UNITTESTS,
    UNITTESTS,
    Checkout,
    git,
    patch,
    row,
    taskset,
    write_rows,
)

ONCE = Swebench(second_sittings=0)
LOOKS = """
import glob, json, os, re
seen = []
for path in glob.glob(".git/**", recursive=True) + glob.glob("/proc/[0-9]*/fd/*"):
    try:
        if path.startswith("/proc") and os.readlink(path.split("/fd/")[0] + "/cwd") != os.getcwd():
            continue
        if os.path.isfile(path) and os.path.getsize(path) < 1e6:
            text = open(path, "rb").read().decode(errors="replace")
            shown = re.search(r"^[+] *def test_add|^index [0-9a-f]+[.][.]", text, re.M)
            if shown or path.endswith(".support"):
                seen.append(path)
    except OSError:
        pass
open("@BOOK@", "w").write(json.dumps(seen))
"""


@pytest.mark.parametrize("form", ["recipe", "own script", "own script with an empty line"])
def test_neither_the_test_patch_nor_its_digests_can_be_read(repository, tmp_path, form):
    folder, base = repository
    digests = "index 0000000..1234567 100644\n--- a/"
    tests = patch("tests/test_core.py", UNITTESTS, UNITTESTS + MORE_UNITTESTS).replace("--- a/", digests)
    change = {"test_patch": tests}
    if form != "recipe":
        (one,) = taskset(write_rows(tmp_path / "a.jsonl", row("unittest", base))).load("train")
        text = one.tests.command.replace(
            one.tests.extra["test_patch"].strip("\n"), tests.strip("\n") + "\n" * form.endswith("line")
        )
        assert digests in text
        change |= {"eval_script": text, "log_parser": "parse_log_django"}
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", base, **change))).load("train")
    assert "index " not in one.tests.command + one.tests.extra["test_patch"]
    book = tmp_path / "book"
    submission = patch("calc/core.py", BROKEN, MENDED + LOOKS.replace("@BOOK@", str(book)))
    score = ONCE.grade(one, submission, Checkout(repository=str(folder)))
    assert score.outcome == "resolved", score
    assert json.loads(book.read_text()) == []


def test_a_script_that_holds_its_test_patch_in_another_way_is_named(repository, tmp_path, caplog):
    _, base = repository
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", base))).load("train")
    other = one.tests.command.replace("git apply", "cat | git apply").replace("\n+", "\n+#")
    assert other != one.tests.command
    for text in (one.tests.command, other, other):
        plan = msgspec.structs.replace(one.tests, command=text)
        assert Run(msgspec.structs.replace(one, tests=plan)).files()
    (line,) = [line for line in caplog.messages if line.startswith("readable: ")]
    assert one.task_id in line


def test_binary_files_keep_the_digests_that_git_needs():
    text = "diff --git a/a b/a\nindex 12345..abcde 100644\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-index 1..2\n+b\n"
    binary = "diff --git a/b b/b\nnew file mode 100644\nindex 0000000..abcdef0\nGIT binary patch\nliteral 1\n"
    assert without_digests(text + binary + text) == (
        text.replace("index 12345..abcde 100644\n", "") + binary
    ) + text.replace("index 12345..abcde 100644\n", "")


def test_a_mined_row_has_no_digest_of_its_hidden_tests(tmp_path):
    made = make(tmp_path / "repository", tmp_path / "looks")
    commits = {one.sha: one for one in history.commits(tmp_path / "repository")}
    good = commits[made["good"]]
    found = history.candidate(tmp_path / "repository", good, history.split(good))
    assert "\nindex " not in found.test_patch
    git(tmp_path / "repository", "checkout", "-q", found.base)
    command = ["git", "apply", "--check", "-"]
    subprocess.run(command, cwd=tmp_path / "repository", input=found.test_patch, text=True, check=True)
