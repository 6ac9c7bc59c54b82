"""Every task is tried before it is trained on: verdicts tell why, and keep what is unfit out of a run."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.base.records import Score
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import control
from hpc_swe.makers import mine_history
from hpc_swe.makers.check import Checker, judged, projected, run, wanted
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders._changed_tests import retest
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.hidden_tests import HiddenEdit, Version
from hpc_swe.tasks.sets.bugs import Bugs
from hpc_swe.tasks.sets.programs import Programs
from jobs.reward import graded
from tests.kit.checkout import IMAGES, ROOT, environment
from tests.kit.constants import NOBODY, empty_model
from tests.kit.toy import BROKEN, RECIPES, UNITTESTS, gold, patch, row, taskset, write_rows

DOUBLES = "Twice a number is the number doubled."


def rows(base: str, scratch: Path) -> list[dict[str, object]]:
    """One for each verdict."""
    # In turns the reference, the bare script and nothing run the test; only every other look is odd.
    odd = f"""
    def test_add(self):
        with open({str(scratch / "looks")!r}, "ab+") as file:
            file.write(b"x")
            self.assertEqual(file.tell() % 2, 1)
"""
    changes: dict[str, dict[str, object]] = {
        "usable": {},
        "gold_fails": {"patch": patch("calc/core.py", BROKEN, BROKEN.replace("a - b", "a * b"))},
        "empty_passes": {"FAIL_TO_PASS": json.dumps([DOUBLES]), "PASS_TO_PASS": "[]"},
        "flaky": {"test_patch": patch("tests/test_core.py", UNITTESTS, UNITTESTS + odd)},
        "broken": {"test_patch": patch("tests/test_core.py", "not\nthere\n", "not\nthere\nat all\n")},
    }
    return [row("unittest", base, instance_id=f"toy__{kind}-1", **change) for kind, change in changes.items()]


def command(folder: Path, repository: Path, *more: str) -> list[str]:
    (folder / "toy.toml").write_text(
        f"""
[taskset]
type = "swebench"
train = {{ rows = "{folder}/rows.jsonl", ids = "" }}
eval = {{ rows = "", ids = "" }}
recipes = {{ "toy/unittest" = {json.dumps(RECIPES["toy/unittest"]).replace(": ", " = ")} }}
[sandbox]
type = "tests.kit.toy:Checkout"
repository = "{repository}"
"""
    )
    words = [
        str(ROOT / "configs/swebench.toml"),
        str(folder / "toy.toml"),
        "--out",
        str(folder / "checked.jsonl"),
    ]
    return [sys.executable, "-m", "hpc_swe.check", *words, "--runs", "2", "--jobs", "2", *more]


def check(folder: Path, repository: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, repository, *more),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_every_verdict_has_its_reason_and_stands_until_its_task_changes(repository, tmp_path):
    source, base = repository
    made = rows(base, tmp_path)
    write_rows(tmp_path / "rows.jsonl", *made)
    done = check(tmp_path, source)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = task_checks.read(tmp_path / "checked.jsonl")
    assert {name: one.verdict for name, one in verdicts.items()} == {
        f"toy__{kind}-1": kind for kind in ("usable", "gold_fails", "empty_passes", "flaky", "broken")
    }
    reasons = {one.verdict: one.reason for one in verdicts.values()}
    assert "test_add (tests.test_core.TestCore)" in reasons["gold_fails"]
    assert DOUBLES in reasons["empty_passes"]
    assert "resolved in run 1, unresolved in run 2 of 2; differ: test_add" in reasons["flaky"]
    assert "test patch does not fit" in reasons["broken"]
    usable = verdicts["toy__usable-1"]
    assert (usable.gold, usable.empty) == (["resolved"] * 2, ["unresolved"] * 2)
    assert usable.seconds is not None
    assert usable.seconds.bare > 0
    assert [name for name, one in verdicts.items() if one.changed_tests] == ["toy__usable-1"]
    assert "1 of 1 usable tasks have a retest (100%)" in done.stdout
    assert "5 tasks: 1 usable" in done.stdout

    made[1]["patch"] = gold()  # somebody mends the row
    write_rows(tmp_path / "rows.jsonl", *made)
    before = (tmp_path / "checked.jsonl").read_text().splitlines()
    check(tmp_path, source)
    lines = (tmp_path / "checked.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    again = [json.loads(line) for line in lines[len(before) :]]
    assert {one["task_id"]: one["verdict"] for one in again} == {
        "toy__gold_fails-1": "usable",
        "toy__broken-1": "broken",
    }, "what the host may have broken is tried again, and what changed; nothing else"

    (tmp_path / "ids").write_text("toy__broken-1\n")
    none = check(tmp_path, source, f"taskset.train.ids={tmp_path}/ids")
    assert none.returncode == 1, none.stdout


@pytest.mark.slow
def test_a_check_that_was_killed_goes_on_where_it_was(repository, tmp_path):
    source, base = repository
    names = [f"toy__usable-{number}" for number in range(6)]
    write_rows(tmp_path / "rows.jsonl", *(row("unittest", base, instance_id=name) for name in names))
    out = tmp_path / "checked.jsonl"
    process = subprocess.Popen(
        command(tmp_path, source),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        assert process.poll() is None, "ended by itself"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    assert 2 <= before.count(b"\n") < len(names), "killed in the middle"
    out.write_bytes(before + b'{"task_id":"toy__usable-5","verd')  # as a machine that dies leaves it
    done = check(tmp_path, source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dropped its last line" in done.stderr
    assert out.read_bytes().startswith(before)
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert sorted(line["task_id"] for line in lines) == names, "each once"


def score(outcome: str, failed: list[str]) -> Score:
    return Score(outcome=outcome, reward=0.0, failed=failed, passed=["always"])


GOOD, BAD = score("resolved", []), score("unresolved", ["a"])


@pytest.mark.parametrize(
    ("reference", "nothing", "verdict", "told"),
    [
        ([GOOD] * 3, [BAD] * 3, "usable", ""),
        ([BAD] * 3, [BAD] * 3, "gold_fails", "unresolved: a"),
        ([score("cheated", ["a"])] * 3, [BAD] * 3, "gold_fails", "cheated"),
        ([GOOD] * 3, [GOOD] * 3, "empty_passes", "always"),
        ([GOOD, GOOD, BAD], [BAD] * 3, "flaky", "the reference: resolved in run 1, unresolved in run 3 of 3"),
        ([GOOD] * 2, [BAD, GOOD], "flaky", "nothing: unresolved in run 1, resolved in run 2 of 2"),
        ([GOOD] * 2, [BAD, score("unresolved", ["a", "b"])], "flaky", "differ: b"),
        ([GOOD], [BAD], "usable", ""),
    ],
)
def test_only_what_is_the_same_every_time_is_usable(reference, nothing, verdict, told):
    kind, reason = judged(reference, nothing)
    assert kind == verdict
    assert told in reason


def test_a_run_takes_what_is_usable_and_says_what_it_left_out(tmp_path, caplog):
    made = [row("unittest", "b" * 40, instance_id=f"toy__{name}-1") for name in ("one", "two", "three")]
    path, out = write_rows(tmp_path / "rows.jsonl", *made), tmp_path / "checked.jsonl"
    for name, verdict in {"one": "usable", "two": "usable", "three": "gold_fails"}.items():
        image = f"sweb.eval.x86_64.toy_1776_{name}-1"
        one = task_checks.TaskCheck(
            task_id=f"toy__{name}-1", verdict=verdict, image=image, image_digest="", settings=""
        )
        task_checks.append(out, one)
    two = "sweb.eval.x86_64.toy_1776_two-1"
    task_checks.append(out, msgspec.structs.replace(one, task_id="toy__two-1", verdict="flaky", image=two))
    with caplog.at_level(logging.INFO):
        found = list(taskset(path, checked=str(out)).load("train"))
    assert [task.task_id for task in found] == ["toy__one-1"], "of two lines the last one counts"
    assert "1 of 3 tasks are usable; left out: 1 flaky, 1 gold_fails" in caplog.text
    write_rows(path, *made, row("unittest", "b" * 40, instance_id="toy__new-1"))
    with pytest.raises(ConfigError, match=r"rows.jsonl:4: toy__new-1 .*hpc_swe.check"):
        list(taskset(path, checked=str(out)).load("train"))
    write_rows(path, *made[:2], made[2] | {"image": "me/mine:latest"})
    with pytest.raises(ConfigError, match=r"rows.jsonl:3: .*with image sweb.*, not mine, in .*hpc_swe.check"):
        list(taskset(path, checked=str(out)).load("train"))
    with pytest.raises(ConfigError, match=r"nowhere.*hpc_swe/makers/check.py makes it"):
        list(taskset(path, checked=str(tmp_path / "nowhere")).load("train"))


def configured(rows: Path, *words: str) -> RunConfig:
    """A run of rows beside which a model lies, without processes."""
    empty_model(rows.parent)
    recipe = json.dumps(RECIPES["toy/unittest"]).replace(": ", " = ")
    overrides = [
        *NOBODY,
        f"model={rows.parent}",
        f'taskset.train={{rows="{rows}", ids=""}}',
        'taskset.eval={rows="", ids=""}',
        "eval.every=0",
        f'taskset.recipes={{"toy/unittest"={recipe}}}',
    ]
    return configuration.read(ROOT / "configs/swebench.toml", overrides=[*overrides, *words])


def test_a_run_refuses_an_image_that_was_built_again_since_its_check(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", row("unittest", "b" * 40))
    (task,) = taskset(path).load("train")
    (tmp_path / f"{task.image}.json").write_text("{}")
    verdict = task_checks.TaskCheck(
        task_id=task.task_id,
        verdict="usable",
        image=task.image,
        image_digest=task_checks.image_digest(tmp_path, task.image),
        settings="",
    )
    task_checks.append(tmp_path / "checked.jsonl", verdict)
    config = configured(
        path,
        'executor={type="slurm"}',  # on whose nodes the sandbox is checked
        f"sandbox.images={tmp_path}",
        f"taskset.checked={tmp_path}/checked.jsonl",
    )
    (tmp_path / f"{task.image}.json").write_text("{} ")
    with pytest.raises(ConfigError, match=rf"^{task.task_id}: .*another image.*hpc_swe.check CONFIG"):
        control.start(RunDir(tmp_path / "run"), config)
    (tmp_path / f"{task.image}.json").write_text("{}")
    with contextlib.suppress(SchedulerError):
        control.start(RunDir(tmp_path / "run"), config)
    assert RunDir(tmp_path / "run").tasks.exists()


def test_no_reference_is_where_a_rollout_worker_looks(tmp_path, caplog):
    """The agent is shown what its worker holds: the tasks of the run."""
    path = write_rows(tmp_path / "rows.jsonl", row("unittest", "b" * 40))
    config = configured(path, 'executor={type="local"}', 'sandbox={type="process"}')
    run = RunDir(tmp_path / "run")
    control.start(run, config)
    (task,) = tasks.read(run.tasks)["train"]
    assert tasks.read_hidden(run.references) == {task.task_id: gold()}
    assert run.references.stat().st_mode & 0o77 == 0
    line = next(line for line in gold().splitlines() if line.startswith("+    "))
    holders = [file for file in run.root.rglob("*") if file.is_file() and line.encode() in file.read_bytes()]
    assert holders == [run.references]
    assert "checked is not set" in caplog.text


def test_no_changed_test_is_where_a_rollout_worker_looks(tmp_path, caplog):
    """They go to the reward workers, and to nobody else; what has none is told at the start."""
    made = [row("unittest", "b" * 40), row("unittest", "b" * 40, instance_id="toy__unittest-2")]
    path, out = write_rows(tmp_path / "rows.jsonl", *made), tmp_path / "checked.jsonl"
    one, two = taskset(path).load("train")
    start = one.tests.extra["test_patch"].index("(1, 2, 3)")
    edit = HiddenEdit(start=start, old="(1, 2, 3)", new="(1, 2, 7654321)")
    version = Version(edits=[edit], tests=one.tests.fail_to_pass, unsure=[])
    for task, versions in ((one, [version]), (two, [])):
        known = task_checks.TaskCheck(
            task_id=task.task_id,
            verdict="usable",
            image=task.image,
            image_digest="",
            settings="",
            changed_tests=versions,
        )
        task_checks.append(out, known)
    words = ['executor={type="local"}', 'sandbox={type="process"}', f"taskset.checked={out}"]
    run = RunDir(tmp_path / "run")
    control.start(run, configured(path, *words))
    assert run.changed_tests.stat().st_mode & 0o77 == 0
    holders = [file for file in run.root.rglob("*") if file.is_file() and b"7654321" in file.read_bytes()]
    assert holders == [run.changed_tests]
    tasks_ = graded(run)
    lie = retest.RetestResult(passed=frozenset(one.tests.fail_to_pass))
    for task, finding in ((one, "cheats"), (two, "agrees")):
        held = tasks_[task.task_id]
        found = retest.regrade(held, retest.plan(held, 1), None, lambda _: lie)
        assert found[0] == finding
    assert "1 of 2 tasks have no retest" in caplog.text


def test_a_sample_is_the_same_for_all_and_says_what_the_whole_costs(tmp_path):
    config = configuration.read(ROOT / "configs/demo.toml", overrides=["tasks.train=40", "tasks.eval=0"])
    found, _ = wanted(config)
    few, more = (task_checks.sample(found, count) for count in (4, 10))
    assert (few, len(more)) == (more[:4], 10)
    assert task_checks.sample(reversed(found), 10) == more != found[:10], "no first ones of a sorted file"
    (tmp_path / f"{found[0].image}.sif").write_bytes(bytes(2_000_000))
    digests = {"image": found[0].image, "image_digest": "", "settings": ""}
    kinds = ["usable", "unproven", "gold_fails", "usable"]
    checks = [
        task_checks.TaskCheck(task_id=task.task_id, verdict=kind, spent_s=90.0, **digests)
        for task, kind in zip(few, kinds, strict=True)
    ]
    share, time_s, size = projected(checks, found, 2, tmp_path)
    assert share.startswith(
        "sample: 75% of 4 tasks can be used, so 30% to 95% of all 40; not used: 25% gold_fails"
    )
    whole = next(projected(checks[:2], found, 2, None))
    assert whole.startswith("sample: 100% of 2 tasks can be used, so 34% to 100% of all 40"), "two are few"
    assert time_s == "to check all 40 with --jobs 2 takes about 30 min"
    assert size == "all 1 images take about 0.0 GB, by the 1 that are there"


def test_our_own_tasks_are_checked_and_those_without_references_refused():
    bugs = Bugs()
    task = next(iter(bugs.load("eval")))
    verdict = Checker(Pytest(), Process(), 1).check(task, bugs.references([task])[task.task_id])
    assert (verdict.verdict, verdict.empty) == ("usable", ["unresolved"]), verdict
    demo = [ROOT / "configs/demo.toml"]
    config = configuration.read(*demo, overrides=["tasks.train=2", "tasks.eval=1"])
    assert sorted(wanted(config)[1]) == ["bugs-eval-0", "bugs-train-0", "bugs-train-1"]


@pytest.mark.slow
def test_programs_are_checked_by_their_repair_or_left_unproven(tmp_path):
    test = (
        "from solution import f\ndef test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(3) == 6\n"
    )
    bad, good = "def f(x):\n    return x + 3\n", "def f(x):\n    return x * 2\n"

    def files(program):
        return [{"path": "solution.py", "content": program}, {"path": "test.py", "content": test}]

    def fixed(program):
        return [{"path": "solution.py", "content": program}]

    made = [
        {"task_id": "usable", "files": files(bad), "fixed": fixed(good)},
        {"task_id": "gold_fails", "files": files(bad), "fixed": fixed(bad + "\n")},
        {"task_id": "empty_passes", "files": files(good), "fixed": fixed(good + "\n")},
        {"task_id": "unproven", "files": files(bad)},
        {"task_id": "broken", "files": files("import no_such_package\n" + bad)},
        {
            "task_id": "humaneval/usable",
            "prompt": "def f(x):\n",
            "declaration": "def f(x):\n",
            "buggy_solution": "    return x + 1\n",
            "canonical_solution": "    return x * 2\n",
            "test": "def check(f):\n    assert f(2) == 4\n    assert f(5) == 10\n\ncheck(f)\n",
            "entry_point": "f",
        },
    ]
    rows = write_rows(tmp_path / "rows.jsonl", *made)
    programs = Programs(eval=str(rows))
    tasks_ = list(programs.load("eval"))
    checks = run(
        Checker(Pytest(), Process(), 2), tasks_, programs.references(tasks_), tmp_path / "checked.jsonl", 2
    )
    found = {one.task_id: one.verdict for one in checks}
    assert found == {name: name.rpartition("-")[2] for name in found}, [one.reason for one in checks]
    assert "the module no_such_package" in checks[4].reason
    if (IMAGES / "python-pytest.sif").exists():  # in which there is python3, and no python
        real = Checker(Pytest(), Apptainer(images=str(IMAGES)), 1).check(tasks_[4], None)
        assert "the module no_such_package, which the image python-pytest lacks" in real.reason
    taken = Programs(eval=str(rows), checked=str(tmp_path / "checked.jsonl"))
    assert [task.task_id for task in taken.load("eval")] == ["usable", "unproven", "humaneval-usable"]


@pytest.mark.slow
def test_a_task_of_which_nothing_is_sealed_is_taken_if_that_is_accepted(tmp_path):
    test = "from solution import f, g\ndef test_a():\n    assert f(2) == g(2)\n"
    bad, good = (f"def f(x):\n    return x {sign} 2\ndef g(x):\n    return 2 * x\n" for sign in "-*")
    files = [{"path": "solution.py", "content": bad}, {"path": "test.py", "content": test}]
    fixed = [{"path": "solution.py", "content": good}]
    made = [{"task_id": "a", "files": files, "fixed": fixed}, {"task_id": "b", "files": files}]
    programs = Programs(eval=str(write_rows(tmp_path / "rows.jsonl", *made)))
    tasks_ = list(programs.load("eval"))

    def verdicts(grader):
        checker = Checker(grader, Process(), 1)
        return [checker.check(task, programs.references(tasks_).get(task.task_id)).verdict for task in tasks_]

    assert verdicts(Pytest()) == ["unsealed", "unsealed"]
    assert not {"unsealed"}.intersection(task_checks.TAKEN)
    assert verdicts(Pytest(accept_unsealed=True)) == ["usable", "unproven"]


def test_a_task_that_breaks_the_grader_is_broken_the_others_are_checked(repository, sandboxes, tmp_path):
    (good,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", repository[1]))).load("train")
    extra = good.tests.extra | {"log_parser": "parse_log_nobody"}
    tests = msgspec.structs.replace(good.tests, extra=extra)
    bad = msgspec.structs.replace(good, task_id="toy__bad-1", tests=tests)
    references = {task.task_id: gold() for task in (bad, good)}
    checker = Checker(Swebench(), sandboxes, 1)
    verdicts = run(checker, [bad, good], references, tmp_path / "checked.jsonl", 1)
    assert [one.verdict for one in verdicts] == ["broken", "usable"]
    assert "parse_log_nobody" in verdicts[0].reason


@pytest.mark.slow
def test_a_verdict_holds_for_one_image_and_one_grader_only(repository, sandboxes, tmp_path):
    (one,) = taskset(write_rows(tmp_path / "rows.jsonl", row("unittest", repository[1]))).load("train")
    checker = Checker(Swebench(), sandboxes, 1, tmp_path)
    verdict = checker.check(one, gold())
    assert checker.is_known(one, gold(), verdict)
    assert not Checker(Swebench(unresolved_reward=0.0), sandboxes, 1, tmp_path).is_known(one, gold(), verdict)
    assert not Checker(Swebench(), sandboxes, 2, tmp_path).is_known(one, gold(), verdict), "fewer runs"
    (tmp_path / f"{one.image}.json").write_text('{"sif_sha256": "other"}')
    assert not checker.is_known(one, gold(), verdict), "the image was built again"


def test_two_commands_do_not_write_one_file_of_verdicts(tmp_path):
    """Each would cut off the line that the other is writing."""
    out = tmp_path / "verdicts.jsonl"
    out.touch()
    with task_checks.alone(out):
        for command in (partial(run, None, [], {}), partial(mine_history.run, None, [])):
            with pytest.raises(ConfigError, match="another command works there"):
                command(out, 1)
    assert run(None, [], {}, out, 1) == []
