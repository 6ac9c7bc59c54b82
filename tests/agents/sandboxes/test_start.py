"""A task may start from a patch of its image's repository: nothing in its sandbox shows the state before."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes._session import Limits
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.records import Start
from hpc_swe.makers.images.repository import stage
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import take
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import (
    BROKEN,
    MENDED,
    REVERTS,
    Checkout,
    git,
    gold,
    make_repository,
    patch,
    row,
    taskset,
    write_rows,
)

FAULT = patch("calc/core.py", MENDED, BROKEN)
HISTORY = (
    "git log --all --reflog --oneline | wc -l; git reflog | wc -l; git for-each-ref --format='%(refname)'"
)
EVERYTHING = (
    "git cat-file --batch-all-objects --batch --buffer; cat .git/packed-refs .git/logs/HEAD; git stash list"
)
UNTOUCHED = "find calc tests -name '*.py' ! -newermt 2021-01-01"


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The toy repository's youngest commit, which has no fault; its history has."""
    folder = tmp_path_factory.mktemp("mended") / "calc"
    make_repository(folder)
    return folder, git(folder, "rev-parse", "main")


def started(folder: Path, base: str, **more: object):
    rows = write_rows(folder / "rows.jsonl", row("unittest", base, start_patch=FAULT, **more))
    (task,) = taskset(rows).load("train")
    return task


@pytest.fixture(scope="module")
def opened(mended, tmp_path_factory: pytest.TempPathFactory) -> tuple[Apptainer, str]:
    """An image at the sound commit, as `build_images` lays its repository out."""
    require_apptainer(UNPACKED)
    images = tmp_path_factory.mktemp("images")
    subprocess.run(["cp", "-a", str(UNPACKED), str(images / "calc")], check=True, timeout=300)
    stage(mended[0], mended[1], images / "calc" / "testbed")
    subprocess.run(
        ["find", images / "calc/testbed", "-exec", "touch", "-hd", "2020-01-01", "{}", "+"], check=True
    )
    return Apptainer(images=str(images)), "calc"


@pytest.mark.slow
def test_a_policy_finds_no_state_before_the_start_in_an_image(mended, opened, tmp_path):
    sandboxes, image = opened
    task = msgspec.structs.replace(started(tmp_path, mended[1]), image=image)
    with sandboxes.open(task) as sandbox:
        assert sandbox.read("calc/core.py").decode() == BROKEN
        assert sandbox.run("git status --porcelain; git diff HEAD", 60).output == ""
        assert sandbox.run(HISTORY, 60).output.split() == ["1", "0", "refs/heads/main"]
        assert "a + b" not in sandbox.run(EVERYTHING, 60).output
        assert sandbox.run(UNTOUCHED, 60).output == ""  # or times would name the file with the fault
        for revert in (f"git checkout {mended[1]} -- .", *REVERTS):
            sandbox.run(revert, 60)
            assert sandbox.run("grep -rn 'a + b' .", 60).output == "", revert


@pytest.mark.slow
def test_a_start_needs_no_file_larger_than_a_sandbox_may_write(mended, opened, tmp_path):
    """A large repository is one pack, which its sandbox could not write anew."""
    sandboxes, image = opened
    images, folder = Path(sandboxes.images), Path(sandboxes.images, "large", "testbed")
    subprocess.run(["cp", "-a", str(images / image), str(images / "large")], check=True, timeout=300)
    for name in "ab":
        (folder / name).write_bytes(os.urandom(18 << 20))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "large")
    git(folder, "repack", "-adq")
    task = msgspec.structs.replace(started(tmp_path, "HEAD"), image="large")
    with msgspec.structs.replace(sandboxes, limits=Limits(file_mb=33)).open(task) as sandbox:
        assert sandbox.run("git fsck --full && git log --oneline | wc -l", 60).output == "1\n"


def test_a_start_leaves_one_commit_whatever_the_repository_held(mended, tmp_path):
    """Its branches, tags, logs and remote lead nowhere, and two sandboxes have the same commit."""
    source, base = mended
    also = f"git remote add origin {source} && git fetch -q --tags origin && mkdir -p calc/__pycache__"
    also += " && touch calc/__pycache__/core.pyc"
    sandboxes, heads = Checkout(repository=str(source), also=also), set()
    for _ in range(2):
        with sandboxes.open(started(tmp_path, base)) as sandbox:
            assert sandbox.run(HISTORY, 60).output.split() == ["1", "0", "refs/heads/main"]
            assert "a + b" not in sandbox.run(EVERYTHING, 60).output
            assert not any("__pycache__" in path for path in sandbox.paths())
            heads.add(sandbox.run("git rev-parse HEAD", 60).output)
    assert len(heads) == 1


def test_a_patch_of_the_start_is_taken_and_judged(mended, tmp_path):
    """Nothing, and a change of the test that the test patch replaces, do not resolve it."""
    source, base = mended
    task, sandboxes, grader = started(tmp_path, base), Checkout(repository=str(source)), Swebench()
    with sandboxes.open(task) as sandbox:
        sandbox.write("calc/core.py", MENDED.encode())
        taken = take(task, sandbox, sandboxes)
        sandbox.write("calc/core.py", BROKEN.encode())
        sandbox.write("tests/test_core.py", b"")
        cheat = take(task, sandbox, sandboxes)
    assert ("+    return a + b" in taken, "tests/test_core.py" in cheat) == (True, True)
    outcomes = [grader.examine(task, text, sandboxes).outcome for text in (taken, gold(), "", cheat)]
    assert outcomes == ["resolved", "resolved", "unresolved", "unresolved"]


def test_a_start_that_does_not_fit_blames_the_image_and_no_policy(mended, tmp_path):
    source, base = mended
    task = msgspec.structs.replace(started(tmp_path, base), start=Start(patch=gold()))
    with pytest.raises(SandboxError, match=r"its start cannot be made from commit "):
        Checkout(repository=str(source)).open(task).__enter__()


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"eval_script": "true", "log_parser": "parse_log_pytest"}, "checks out the base commit"),
        ({"eval_type": "fail_only"}, "counts tests that never ran as passed"),
    ],
)
def test_a_row_whose_judge_does_not_go_with_a_start_is_refused(tmp_path, mended, columns, fault):
    with pytest.raises(ConfigError, match=fault):
        started(tmp_path, mended[1], **columns)


@pytest.mark.slow
def test_what_must_be_absent_from_an_image_is_gone_and_nothing_else(task, apptainer):
    """A patch cannot make that fail, by a folder of a name that is removed and too deep for it."""
    absent = ["/usr/lib*/python3*/json", "/*/lib*/python3*/__pycache__/*", "/usr/*/python3.*/tarf?le.py"]
    absent += ["/none/at/*", f"{task.workdir}/json"]
    own = {"json/" + "a/" * 1500 + "f.py": "x = 1\n"}
    with apptainer.open(msgspec.structs.replace(task, files=own, absent=absent)) as sandbox:
        left = sandbox.run("cd /usr/lib/python3.*; ls -d json tarfile.py __pycache__/* csv.py", 20).output
    assert [line for line in left.split("\n") if "No such file" not in line] == ["csv.py", ""]
    with (
        pytest.raises(SandboxError, match="no pattern"),
        apptainer.open(msgspec.structs.replace(task, absent=["/usr/$(id)"])),
    ):
        pass
