"""A git history becomes tasks: what a commit must have, which tests count, and what an interruption costs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.config import config as configuration
from hpc_swe.makers import history
from hpc_swe.makers.mine_history import Sifting, run
from hpc_swe.makers.mining import Trial, sort_tests
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders.swebench import Swebench
from tests.kit.checkout import IMAGES, ROOT, environment, typed
from tests.kit.histories import commit, make
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import git
from tests.kit.waiting import until

COMMAND = "hpc_swe.mine_history"


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """The repository, the ids of its commits by kind, and the file in which its flaky test counts."""
    folder = tmp_path_factory.mktemp("history")
    return folder / "calc", make(folder / "calc", folder / "looks"), folder / "looks"


def sift(repository, texts=None, limit=None):
    return Sifting(repository, history.TESTS, texts or {}).sift(history.commits(repository), limit)


def test_a_commit_needs_code_tests_and_a_message_to_be_a_candidate(past):
    repository, made, _ = past
    found, refused = sift(repository)
    kinds = ("good", "flaky", "does_not_run", "nothing_fails", "rename")
    assert {one.commit.sha for one in found} == {made[kind] for kind in kinds}
    others = ("first", "no_tests", "no_code", "merge", "binary", "says_nothing")
    assert refused == {made[kind]: kind for kind in others}
    youngest, before = sift(repository, limit=1)
    assert [one.commit.sha for one in youngest] == [made["rename"]]
    assert before == {made[kind]: kind for kind in ("says_nothing", "binary")}


def test_a_commit_is_split_without_what_sets_up_tests(past):
    repository, made, _ = past
    found, _ = sift(repository)
    by_commit = {one.commit.sha: one for one in found}
    good, rename = by_commit[made["good"]], by_commit[made["rename"]]
    assert [line for line in good.patch.splitlines() if line.startswith("diff")] == [
        "diff --git a/calc/core.py b/calc/core.py"
    ], "neither setup.cfg nor a picture is in the reference"
    assert good.modules == ("tests/test_core.py",)
    assert good.base == made["first"]
    assert "deleted file mode" in rename.patch
    assert rename.modules == ("tests/test_sums.py",), "a removed module is not run"


def test_the_prompt_does_not_show_the_solution_or_where_it_is(past):
    repository, made, _ = past
    texts = {made["says_nothing"]: "The value of one should be two."}
    found, refused = sift(repository, texts)
    told = {one.commit.sha: one.statement for one in found}
    assert told[made["good"]] == ("Add numbers instead of subtracting them\n\nadd(3, 2) gave 1, which and"), (
        "trailers, pointers and lines of the patch are left out"
    )
    assert told[made["says_nothing"]] == "The value of one should be two."
    assert made["says_nothing"] not in refused


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("Fix the parser (#123)", "Fix the parser"),
        ("Fixes: owner/name#4", ""),
        ("gh-105: close the file", "close the file"),
        ("This reverts commit 1a2b3c4d5e6f.", "This reverts commit."),
        ("Accept 1000000 rows, fix 2 faults", "Accept 1000000 rows, fix 2 faults"),
        ("Colour #fff stays, as decade and defaced do", "Colour #fff stays, as decade and defaced do"),
    ],
)
def test_pointers_to_the_solution_are_taken_out_of_a_line(line, kept):
    assert history.statement(line, "") == kept


def test_patches_keep_the_line_ends_of_files(tmp_path):
    git(tmp_path, "init", "-q")
    commit(tmp_path, "Begin the project", {"a.py": b"one = 1\r\ntwo = 2\r\n", "test_a.py": b"import a\r\n"})
    commit(
        tmp_path, "Make one a two", {"a.py": b"one = 2\r\ntwo = 2\r\n", "test_a.py": b"import a  # two\r\n"}
    )
    (one,), _ = sift(tmp_path)
    assert "-one = 1\r\n+one = 2\r\n two = 2\r\n" in one.patch
    git(tmp_path, "checkout", "-q", "HEAD~1")
    subprocess.run(["git", "apply"], cwd=tmp_path, input=one.patch.encode(), check=True)


P, F = {"t": "passed"}, {"t": "failed"}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ([F, F], [P, P], "fail_to_pass"),
        ([{}, {}], [P, P], "fail_to_pass"),  # the module could not be imported
        ([{"t": "skipped"}] * 2, [P, P], "fail_to_pass"),
        ([P, P], [P, P], "pass_to_pass"),
        ([P, F], [P, P], "flaky"),
        ([F, F], [P, F], "flaky"),
        ([F, F], [P, {}], "flaky"),  # its parameter is another one in each run
        ([F, F], [F, F], ""),
        ([P, P], [F, F], ""),
        ([F, F], [{"t": "skipped"}] * 2, ""),
    ],
)
def test_only_tests_that_end_alike_in_all_runs_count(before, after, kind):
    found = sort_tests(before, after)
    lists = {"fail_to_pass": found.fail_to_pass, "pass_to_pass": found.pass_to_pass, "flaky": found.flaky}
    assert {name: tests for name, tests in lists.items() if tests} == ({kind: ["t"]} if kind else {})


def test_a_dry_run_lists_the_commits_and_writes_nothing(past, tmp_path):
    done = typed(COMMAND, past[0], "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "11 of 11 commits were looked at: 5 candidates; nothing was run" in done.stdout
    assert done.stdout.count("a candidate") == 5
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_the_call_is_one_clear_error(past, tmp_path):
    empty = typed(COMMAND, tmp_path, "--out", tmp_path / "out", "--dry-run")
    assert (empty.returncode, empty.stderr.count("\n")) == (2, 1)
    assert "not a git repository" in empty.stderr
    inside = typed(COMMAND, past[0] / "calc", "--out", tmp_path / "out", "--dry-run")
    assert "name the repository itself" in inside.stderr
    (tmp_path / "issues").write_text('{"commit": "0123456", "text": "a b c"}\n')
    issues = typed(COMMAND, past[0], "--out", tmp_path / "out", "--dry-run", "--issues", tmp_path / "issues")
    assert f"{tmp_path}/issues:1: 0 of 11 commits begin with '0123456'" in issues.stderr
    (tmp_path / "issues").write_text("[]\n")
    with pytest.raises(ConfigError, match="it must be"):
        history.described(tmp_path / "issues", [])


def test_nothing_is_written_without_candidates_or_into_folders_of_others(past, tmp_path):
    done = typed(COMMAND, past[0], "--out", tmp_path / "out", "--tests", "checks/*")
    assert done.returncode == 1, done.stderr
    assert "there is no candidate; nothing was run or written" in " ".join(done.stdout.split())
    assert not (tmp_path / "out").exists()
    (tmp_path / "rows.jsonl").write_text("mine\n")
    refused = typed(COMMAND, past[0], "--out", tmp_path, "sandbox={type='process'}")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "has files that are not of this command; choose another --out" in refused.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine\n"]


class Crowded:
    """A grader whose host fails in the first trial of a task, and always in that of the first task."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def outcomes(self, task, patch, sandboxes):
        self.tried.append(task.task_id)
        if task.task_id == self.tried[0] or self.tried.count(task.task_id) == 1:
            raise SandboxError("an image is being built")
        return {}, "no test ran"


def test_a_candidate_whose_host_failed_is_tried_once_more_at_the_end(past, tmp_path):
    found, _ = sift(past[0], limit=3)
    trial = Trial("calc", "pytest", 60.0, 1, Crowded(), Process(), None)
    verdicts = [each.verdict for each in run(trial, found, tmp_path / "trials.jsonl", 1)]
    assert verdicts == ["host", "does_not_run", "does_not_run"]
    assert trial.grader.tried == trial.grader.tried[:3] * 2
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["host"] * 4 + ["does_not_run"] * 2


@pytest.mark.slow
def test_a_history_becomes_tasks_also_when_the_command_is_killed(past, tmp_path):
    repository, made, looks = past
    looks.unlink(missing_ok=True)
    config, out = tmp_path / "toy.toml", tmp_path / "mined"
    config.write_text(f'[sandbox]\ntype = "tests.kit.toy:Checkout"\nrepository = "{repository}"\n')
    words = [repository, "configs/swebench.toml", config, "--out", out, "--runs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", COMMAND, *map(str, words)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    trials = out / "trials.jsonl"
    until(lambda: trials.exists() and trials.read_bytes().count(b"\n") >= 2, "two trials", 300)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = trials.read_bytes()
    trials.write_bytes(before + b'{"commit": "torn')
    looks.unlink(missing_ok=True)
    done = typed(COMMAND, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trials.read_bytes().startswith(before), "what was known is not tried again"
    lines = [json.loads(line) for line in trials.read_text().splitlines()]
    kinds = {sha: kind for kind, sha in made.items()}
    assert {kinds[line["commit"]]: line["verdict"] for line in lines} == {
        "good": "task",
        "rename": "task",
        "flaky": "flaky",
        "does_not_run": "does_not_run",
        "nothing_fails": "nothing_fails",
    }
    assert len(lines) == 5, "each commit is tried once"
    assert "surely_not_installed" in next(
        line["reason"] for line in lines if line["verdict"] == "does_not_run"
    )
    assert "11 of 11 commits were looked at: 1 tasks for training and 1 held out" in done.stdout
    rows = {row["commit"]: row for row in map(json.loads, (out / "rows.jsonl").read_text().splitlines())}
    good = rows[made["good"]]
    assert good["FAIL_TO_PASS"] == ["tests/test_core.py::test_add"]
    assert good["PASS_TO_PASS"] == ["tests/test_core.py::test_double"]
    assert_usable([*words[1:3], out / "taskset.toml"], tmp_path / "checked.jsonl")


def assert_usable(files: list[object], out: Path) -> None:
    done = typed("hpc_swe.check", *files, "--out", out, "--runs", "1", "tasks.eval=0")
    assert done.returncode == 0, done.stderr
    verdicts = task_checks.read(out).values()
    assert [one.verdict for one in verdicts] == ["usable"]
    assert any(one.changed_tests for one in verdicts), "retests work on them"


@pytest.mark.slow
def test_images_of_tasks_hold_no_later_history_and_what_set_up_made(past, tmp_path):
    require_apptainer(UNPACKED)
    base, out, images = tmp_path / "base", tmp_path / "mined", tmp_path / "images"
    subprocess.run(["cp", "--archive", IMAGES / "python-pytest", base], check=True)
    for name in ("python3", "python3.11"):  # as images of other distributors have it
        (base / "usr/bin" / name).rename(base / "usr/local/bin" / name)
    (tmp_path / "requirements").write_text("")
    images.mkdir()
    shutil.copy(IMAGES / "python-pytest.sif", images)
    recipe = [
        "--base",
        base,
        "--requirements",
        tmp_path / "requirements",
        "--set-up",
        "echo made > calc/made.txt",
    ]
    done = typed(
        COMMAND,
        past[0],
        "--out",
        out,
        "--runs",
        "1",
        "--limit",
        "3",
        *recipe,
        "configs/swebench.toml",
        f"sandbox.images={images}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (name,) = (out / "train.txt").read_text().split()
    kept = sorted(path.name for path in images.iterdir() if not path.name.startswith((".", "python-pytest")))
    assert kept == [name, f"{name}.json", f"{name}.sif"], "images of refused commits are removed"
    config = configuration.read(Path("configs/swebench.toml"), out / "taskset.toml")
    (task,) = config.tasks.take(config.taskset)["train"]
    sandboxes = Apptainer(images=str(images))
    with sandboxes.open(task) as sandbox:
        asked = ". /opt/miniconda3/bin/activate; conda activate testbed; readlink -f $(which python)"
        assert sandbox.run(
            f"{asked}; cat calc/made.txt; git status --short; git rev-list --all --count", 60
        ).output == ("/usr/local/bin/python3.11\nmade\n?? calc/made.txt\n1\n")
    score = Swebench().examine(task, config.taskset.references([task])[task.task_id], sandboxes)
    assert score.outcome == "resolved"
