"""What ends or freezes the process that grades it ends as unresolved; what the host does is no verdict."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.base import WatchedSandboxes
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Episode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks
from hpc_swe.base.store.spool import Spool
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import SupervisionConfig
from hpc_swe.launch import control, existing
from hpc_swe.roles.reward.alone import Patience, watch
from hpc_swe.tasks.graders.base import GRADER_BROKE
from hpc_swe.tasks.graders.pytest import Pytest
from jobs import coordinator, reward
from tests.kit.checkout import ROOT, environment
from tests.kit.constants import NOBODY, empty_model
from tests.kit.tracing import ALLOWS, traced
from tests.kit.waiting import DEADLINE_S, until
from tests.roles.reward.test_worker import episode, put, scores

BEGINS = "import ctypes, os, signal, sys, time\nos.write(1, b'.')\n"
SAYS = 'os.write(1, b\'\\n{"outcome":"resolved","reward":1.0}\')\n'
SHORT = Patience(silent=3, leave_s=0.1)


def child(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BEGINS + "os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9"),
        (BEGINS + "ctypes.string_at(0)", "ended with code -11"),
        (BEGINS + "raise SystemError", "ended with code 1"),
        (BEGINS + "os.kill(os.getpid(), signal.SIGSTOP)", "showed no sign of life for 3 s"),
        (BEGINS + "ctypes.PyDLL(None).sleep(600)", "showed no sign of life for 3 s"),
    ],
)
def test_a_process_that_a_grading_ends_or_freezes_blames_the_submission(text, why):
    score = watch(child(text), episode(0, "text"), -0.5, SHORT)
    assert (score.outcome, score.reward) == ("unresolved", -0.5)
    assert score.detail.startswith(GRADER_BROKE)
    assert why in score.detail


@pytest.mark.parametrize("text", [BEGINS + "sys.exit(4)", "import os; os.kill(os.getpid(), 9)", "1 / 0"])
def test_a_process_that_fails_before_it_grades_is_nobody_s_doing(text):
    with pytest.raises(SandboxError, match="grading alone of train-000000-00"):
        watch(child(text), episode(0, "text"), -0.5, SHORT)


def test_a_killed_process_that_the_kernel_does_not_let_go_blames_nobody(tmp_path):
    """It is the host's fault, and the worker goes on."""
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + '\\n')\n"
    text = BEGINS + ALLOWS + note + "time.sleep(600)"
    patience = replace(SHORT, end_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        grading = pool.submit(watch, child(text), episode(0, "text"), -0.5, patience)
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the child")
        pid = int((tmp_path / "pid").read_text())
        with traced(pid), pytest.raises(SandboxError, match=f"process {pid} of a grading alone was killed"):
            grading.result(DEADLINE_S)


def test_a_process_that_closed_its_output_is_not_awaited_for_ever():
    text = BEGINS + "os.close(1); time.sleep(600)"
    score = watch(child(text), episode(0, "text"), -0.5, replace(SHORT, end_s=0.5))
    assert "ended with code -9" in score.detail


@pytest.mark.slow
def test_a_slow_grading_that_shows_signs_of_life_is_awaited():
    text = BEGINS + "for _ in range(6): time.sleep(1); os.write(1, b'.')\n" + SAYS
    assert watch(child(text), episode(0, "text"), -0.5, SHORT).outcome == "resolved"


@pytest.mark.slow
def test_a_living_process_without_progress_blames_the_submission_at_last():
    """Signs of life alone do not help it, and progress does."""
    lives = "for _ in range(600): time.sleep(0.5); os.write(1, b'.')\n"
    text = BEGINS + "for _ in range(4): time.sleep(1); os.write(1, b'+')\n" + lives + SAYS
    seen: list[int] = []
    killed = count()  # the kernel kills others all the time, which is no reason to hang once more
    patience = Patience(
        hung_s=3.0, leave_s=0.1, progressed=lambda: seen.append(1), killed=lambda: next(killed)
    )
    score = watch(child(text), episode(0, "text"), -0.5, patience)
    assert (score.outcome, len(seen)) == ("unresolved", 4)
    assert "made no progress for 3 s" in score.detail


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    words = [
        *NOBODY,
        f"model={empty_model(tmp_path)}",
        f'grader={{type="tests.kit.deadly_grader:Deadly", looks="{tmp_path}/looks"}}',
    ]
    words += ['sandbox={type="process"}', "tasks.train=2", "tasks.eval=0", "eval.every=0", "reward.slots=1"]
    made = RunDir(tmp_path / "run")
    control.start(made, configuration.read(ROOT / "configs/demo.toml", overrides=words))
    return made


def test_no_verdict_comes_before_tests_have_slept_for_all_their_time(run):
    config = existing.load(run)
    config = msgspec.structs.replace(config, supervision=SupervisionConfig(stuck_s=1.0), grader=Pytest())
    resources = reward._resources(run, config, WatchedSandboxes(config.sandbox))
    task, *_ = resources.tasks.values()
    longest_s = 10 * task.tests.timeout_s
    assert longest_s < resources.patience.hung_s < coordinator._limits(run, config)["reward"]


@pytest.mark.slow
def test_what_kills_one_reward_worker_is_unresolved_by_the_next(run, tmp_path):
    """The first worker dies over it, as over any fault of ours; the second lives."""
    (task, *_) = tasks.read(run.tasks)["train"]
    put(run, episode(0, "kill", task_id=task.task_id))
    command = [sys.executable, "-m", "jobs.reward", str(run.root)]
    assert subprocess.run(command, env=environment(), timeout=DEADLINE_S).returncode == -signal.SIGKILL
    assert scores(run) == {}
    assert Spool(run.episodes, Episode).recover(lambda _: True, 10)
    put(run, episode(1, "text", task_id=task.task_id))
    worker = subprocess.Popen(command, env=environment())
    try:
        until(lambda: len(scores(run)) == 2, "both results")
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
    found = scores(run)
    assert (found[0].outcome, found[0].reward, found[1].outcome) == ("unresolved", -0.5, "resolved")
    looks = (tmp_path / "looks").read_text().split()
    assert len(looks) == 3
    assert looks.count(str(worker.pid)) == 1, "what was not lost is graded by the worker itself"
