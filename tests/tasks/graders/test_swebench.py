"""The reference resolves, nothing does not, and what looks like a solution is none."""

import json
import time
import tracemalloc

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.tasks.graders import swebench
from hpc_swe.tasks.graders._swebench import Run
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.swebench_rows import END, START
from tests.kit.cheats.forgeries import FILES as FORGED
from tests.kit.cheats.forgeries import LAX, LIES, PASSES
from tests.kit.scripted import SMALL
from tests.kit.toy import (
    BROKEN,
    GONE,
    LATE,
    MENDED,
    MORE_UNITTESTS,
    UNITTESTS,
    Checkout,
    FailingCheckout,
    gold,
    make_repository,
    new,
    patch,
    row,
    task,
    taskset,
    write_rows,
)

GRADER = Swebench()


def core(text: str) -> str:
    return patch("calc/core.py", BROKEN, text)


@pytest.fixture
def grade(toy_task, sandboxes):
    def grade(submission: str, grader: Swebench = GRADER):
        return grader.grade(toy_task, submission, sandboxes)

    return grade


def test_the_reference_resolves_and_nothing_does_not(toy_task, sandboxes):
    score = GRADER.grade(toy_task, gold(), sandboxes)
    assert (score.outcome, score.reward, score.failed, score.detail) == ("resolved", 1.0, [], "")
    assert score.passed == sorted([*toy_task.tests.fail_to_pass, *toy_task.tests.pass_to_pass])
    score = GRADER.examine(toy_task, "", sandboxes)
    assert (score.outcome, score.reward) == ("unresolved", -1.0)
    assert score.failed == sorted(toy_task.tests.fail_to_pass)
    assert score.passed == toy_task.tests.pass_to_pass


def test_an_empty_submission_starts_nothing(toy_task):
    assert GRADER.grade(toy_task, " \n", Process()).outcome == "no_submission"


def test_a_run_that_lets_everything_pass_is_called_a_cheat(grade):
    score = grade(core(LIES + BROKEN), Swebench(cheated_reward=-2.0))
    assert (score.outcome, score.reward) == ("cheated", -2.0)
    assert "a canary test ended wrongly" in score.detail


@pytest.mark.parametrize("text", LAX.values(), ids=LAX.keys())
def test_values_that_equal_everything_are_called_a_cheat(repository, sandboxes, tmp_path, text):
    score = GRADER.grade(task(tmp_path, "unittest", repository[1]), core(text), sandboxes)
    assert (score.outcome, score.reward) == ("cheated", -2.0)
    assert "equal everything" in score.detail


def test_such_a_class_in_a_file_whose_name_git_quotes_is_found(repository, sandboxes, tmp_path):
    files = FORGED["equals everything, by a name that git quotes"]
    text = "".join(
        core(text) if path == "calc/core.py" else quoted(path, text) for path, text in files.items()
    )
    score = GRADER.grade(task(tmp_path, "unittest", repository[1]), text, sandboxes)
    assert "equal everything" in score.detail


def quoted(path: str, text: str) -> str:
    octal = "".join(f"\\{byte:o}" if byte > 127 else chr(byte) for byte in path.encode())
    return new(path, text).replace(f"b/{path}", f'"b/{octal}"').replace(f"a/{path}", f'"a/{octal}"')


ANYTHING = "class Anything:\n    def __eq__(self, other):\n        return True\n\n\n"


@pytest.mark.parametrize("more", ["", "\n\nclass More(Anything):\n    pass\n"], ids=["beside it", "of it"])
def test_a_class_that_the_base_commit_has_accuses_nobody(tmp_path, more):
    """Nor when only the solution loads its module."""
    before, apart = ANYTHING + BROKEN, ANYTHING.replace("Anything", "Apart")
    base = make_repository(tmp_path / "calc", {"calc/core.py": before, "calc/apart.py": apart})
    one, sandboxes = task(tmp_path, "unittest", base), Checkout(repository=str(tmp_path / "calc"))
    after = "import calc.apart\n" + before.replace("a - b", "a + b") + more
    text = patch("calc/core.py", before, after) + patch("calc/apart.py", apart, f"# Words\n{apart}")
    score = GRADER.grade(one, text, sandboxes)
    assert (score.outcome, score.reward) == ("resolved", 1.0), score


def test_a_base_commit_whose_tests_come_to_no_end_is_not_always_run(tmp_path):
    before = BROKEN + "import os\nos._exit(3)\n"
    base = make_repository(tmp_path / "calc", {"calc/core.py": before})
    sandboxes = Checkout(repository=str(tmp_path / "calc"), also=f"echo >> {tmp_path}/opened")
    one, after = task(tmp_path, "unittest", base), ANYTHING + MENDED
    opened = []
    for _ in range(5):
        assert GRADER.grade(one, patch("calc/core.py", before, after), sandboxes).outcome == "cheated"
        opened.append(len((tmp_path / "opened").read_text()) - sum(opened))
    assert opened[-2:] == [opened[0] - 1] * 2


def test_a_solution_is_paid_whatever_else_lies_about(grade):
    rest = new("conftest.py", "raise SystemExit(1)\n") + new("tests/test_mine.py", "assert False\n")
    for folder in ("evil-1.dist-info", "odd-1.Dist-Info", "EVIL.EGG-INFO"):  # pytest would load its plugin
        rest += new(f"{folder}/entry_points.txt", "[pytest11]\nevil = not_there\n")
    score = grade(gold() + rest + new("setup.cfg", "[tool:pytest]\naddopts = --nothing-like-this\n"))
    assert score.outcome == "resolved"


def test_what_an_agent_renames_stays_where_it_was(tmp_path):
    """Git looks only at the new name of a rename, so that a patch with one would take a conftest.py away."""
    base = make_repository(tmp_path / "calc", {"tests/conftest.py": "import builtins\nbuiltins.nought = 0\n"})
    one, sandboxes = task(tmp_path, "pytest", base), Checkout(repository=str(tmp_path / "calc"))
    with sandboxes.open(one) as sandbox:
        sandbox.run("git config diff.renames copies; git mv tests/conftest.py calc/other.py", 60)
        sandbox.write("calc/core.py", MENDED.replace("a + b", "a + b + nought").encode())
        submission = take(one, sandbox, sandboxes)
    assert "calc/other.py" in submission
    assert GRADER.grade(one, submission, sandboxes).outcome == "resolved"


def test_what_the_reference_changes_may_be_changed(repository, sandboxes, tmp_path):
    """Where the reference itself changes a conftest.py, the submission's counts."""
    change = {"patch": gold() + new("conftest.py", "\n")}
    rows = write_rows(tmp_path / "rows.jsonl", row("pytest", repository[1], **change))
    (one,) = taskset(rows).load("train")
    score = GRADER.grade(one, gold() + new("conftest.py", "raise SystemExit(1)\n"), sandboxes)
    assert score.outcome == "unresolved"


def test_a_file_in_the_place_of_a_new_test_file_is_not_laid(repository, sandboxes, tmp_path):
    tests = new("tests/test_new.py", UNITTESTS + MORE_UNITTESTS)
    change = {"test_patch": tests, "FAIL_TO_PASS": json.dumps(["test_add (tests.test_new.TestCore)"])}
    rows = write_rows(tmp_path / "rows.jsonl", row("unittest", repository[1], **change))
    (one,) = taskset(rows).load("train")
    assert GRADER.grade(one, new("tests/test_new.py", PASSES), sandboxes).outcome == "unresolved"
    assert GRADER.grade(one, new("tests/test_new.py", PASSES) + gold(), sandboxes).outcome == "resolved"


@pytest.mark.slow
def test_the_tests_are_run_twice_and_no_more_when_time_is_out(toy_task, sandboxes):
    plan = msgspec.structs.replace(toy_task.tests, timeout_s=3.0)
    one = msgspec.structs.replace(toy_task, tests=plan)
    score = GRADER.grade(one, core("import time\ntime.sleep(60)\n"), sandboxes)
    assert (score.outcome, score.reward) == ("unresolved", -1.0)
    assert score.detail.startswith("timed out")
    assert 6.0 < score.seconds < 110.0


def test_an_image_without_the_base_commit_is_nobody_s_fault(toy_task, sandboxes):
    with pytest.raises(SandboxError, match="is not that of toy__"):
        GRADER.grade(toy_task, gold(), Process())
    tests = msgspec.structs.replace(
        toy_task.tests, extra=toy_task.tests.extra | {"test_patch": patch("README.md", "x\n", "y\n")}
    )
    with pytest.raises(SandboxError, match="does not fit"):
        GRADER.grade(msgspec.structs.replace(toy_task, tests=tests), gold(), sandboxes)


@pytest.mark.parametrize(
    ("step", "result"),
    [("git apply --whitespace", LATE), ("git apply --whitespace", GONE)]
    + [(name, None) for name in (".tests", ".patch", "eval.sh")],
)
def test_what_fails_before_the_submission_runs_is_nobody_s_fault(repository, tmp_path, step, result):
    failing = FailingCheckout(repository=str(repository[0]), step=step, result=result)
    with pytest.raises(SandboxError, match="was not applied|No space left"):
        GRADER.grade(task(tmp_path, "unittest", repository[1]), gold(), failing)


def test_a_host_that_hindered_runs_of_the_base_commit_is_asked_again(repository, tmp_path):
    """Else what an honest patch shares with the base commit would be a cheat until the process ends."""
    shown = task(tmp_path, "unittest", repository[1])
    one = msgspec.structs.replace(shown, task_id="toy__hindered")  # no other test has run its base commit
    healthy = Checkout(repository=str(repository[0]))
    late = FailingCheckout(repository=str(repository[0]), step="eval.sh", result=LATE)
    assert [swebench._base(one, "", late).complaint for _ in range(3)] == ["timed out"] * 3
    assert swebench._base(one, "", healthy).complaint == "timed out", "for an hour"
    swebench._bases.update({key: (run, end - 3600.0) for key, (run, end) in swebench._bases.items()})
    assert swebench._base(one, "", healthy).complaint == ""


def test_other_parsers_read_what_is_printed_between_marks(repository, sandboxes, tmp_path):
    script = (
        "#!/bin/bash\nset -uxo pipefail\necho '--- PASS: TestAdd (0.00s)'\n: '>>>>> Start Test Output'\n"
        "python -c 'from calc.core import add; import sys; ok = add(1, 2) == 3; "
        'print("--- PASS" if ok else "--- FAIL", "TestAdd (0.00s)", sep=": "); sys.exit(not ok)\'\n'
        ": '>>>>> End Test Output'\necho '--- PASS: TestAdd (0.00s)'\n"
    )
    change = {
        "FAIL_TO_PASS": ["TestAdd"],
        "PASS_TO_PASS": [],
        "eval_script": script,
        "log_parser": "parse_log_gotest",
    }
    rows = write_rows(tmp_path / "rows.jsonl", row("pytest", repository[1], **change))
    (one,) = taskset(rows).load("train")
    assert GRADER.grade(one, gold(), sandboxes).outcome == "resolved"
    assert GRADER.examine(one, "", sandboxes).outcome == "unresolved"


def test_a_log_full_of_marks_keeps_no_other_thread_waiting(repository, tmp_path):
    """An expression that tries each beginning holds the interpreter for minutes, and its lease is lost."""
    one = task(tmp_path, "unittest", repository[1])
    extra = one.tests.extra | {"log_parser": "parse_log_gotest"}
    run = Run(msgspec.structs.replace(one, tests=msgspec.structs.replace(one.tests, extra=extra)))
    begin, end = f"{run.token}-start", f"{run.token}-end"
    started = time.process_time()
    assert run.parse(b"", f"{begin}\n" * 40_000).complaint == "the tests did not come to their end"
    parsed = run.parse(b"", f"x\n{begin}\n>>>>> a\n{begin}\n{end} x\n{end} 0\n" + f"{begin}\n" * 40_000)
    assert time.process_time() - started < 10.0
    assert parsed.log == f"{START}\n a\n{begin}\n{end} x\n\n{END}\n>>>>> Test Exit Code: 0\n"
    for log in ("", f"{end} 0\n{begin}\n", f"{begin}\n{end} 0 \n", f" {begin}\n{end} 0\n"):
        assert run.parse(b"", log).complaint, log
    tracemalloc.start()
    assert not run.parse(b"", f"{begin}\n" + "\n" * 4_000_000 + f"{end} 0\n").complaint
    most, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert most < 40_000_000, "no memory for each line"


def test_plain_tasks_and_scripts_without_marks_are_refused(toy_task, sandboxes):
    with pytest.raises(ConfigError, match="t is none"):
        GRADER.grade(SMALL, "x", Process())
    plan = msgspec.structs.replace(toy_task.tests, command="true\n")
    with pytest.raises(ConfigError, match="must hold '>>>>> Start Test Output'"):
        GRADER.grade(msgspec.structs.replace(toy_task, tests=plan), gold(), sandboxes)


def test_rewards_are_as_configured(grade):
    grader = Swebench(unresolved_reward=0.0)
    assert grade(gold(), grader).reward == 1.0
    assert grade("", grader).reward == 0.0
