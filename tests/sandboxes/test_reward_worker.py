"""The reward worker meets others only in the run folder."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_swe.config import RewardConfig
from hpc_swe.errors import SandboxError
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.plugins.sandboxes.process import Process
from hpc_swe.records import Episode, RolloutRequest, Sampling, Score, ScoredEpisode, Task, Timing
from hpc_swe.roles.reward.worker import Means, worker
from hpc_swe.rundir import RunDir
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Spool


class Judge:
    """A grader that says what the submission says."""

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        if submission == "host":
            raise SandboxError("the disk is full")
        if submission == "bug":
            raise KeyError("bug")
        if submission.startswith("sleep"):
            time.sleep(float(submission.split()[1]))
        return Score(outcome="unresolved" if submission else "no_submission", reward=0.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.make()
    return made


def episode(number: int, submission: str, exit_status: str = "submitted", task_id: str = "t") -> Episode:
    request = RolloutRequest(group_id=number, index=0, task_id=task_id, seed=0, sampling=Sampling())
    return Episode(
        request=request,
        turns=[],
        messages=[],
        exit_status=exit_status,
        submission=submission,
        timing=Timing(),
        worker="w",
        error="why",
    )


def put(run: RunDir, *episodes: Episode) -> None:
    for one in episodes:
        Spool(run.episodes, Episode).put(one.request.name, one)


def scores(run: RunDir) -> dict[int, Score]:
    spool = Spool(run.scored, ScoredEpisode)
    found = [spool.read(address) for address in spool.addresses("ready")]
    return {one.episode.request.group_id: one.score for one in found if one is not None}


def work(run: RunDir, task: Task, until: Callable[[], bool], order: str = "DRAIN", slots: int = 2) -> None:
    config = RewardConfig(slots=slots, poll_s=0.05)
    with Lease(run, "reward", "test", 1.0) as lease:
        grader = worker(run, lease, Means({"t": task}, Process(), Judge(), config))
        failures: list[BaseException] = []

        def body() -> None:
            try:
                grader.work()
            except KeyError as error:
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        deadline = time.monotonic() + 10
        while not until() and time.monotonic() < deadline and thread.is_alive():
            time.sleep(0.01)
        (run.control / order).touch()
        thread.join(10)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def states(run: RunDir) -> dict[str, int]:
    return {
        state: len(Spool(run.episodes, Episode).addresses(state)) for state in ("ready", "claimed", "dead")
    }


def test_every_episode_gets_the_score_it_deserves(run, task):
    put(
        run,
        episode(0, "text"),
        episode(1, ""),
        episode(2, "text", "infra_error"),
        episode(3, "text", "agent_error"),
        episode(4, "host"),
        episode(5, "text", task_id="unknown"),
    )
    work(run, task, lambda: len(scores(run)) == 6)
    outcomes = {number: score.outcome for number, score in scores(run).items()}
    assert outcomes == {
        0: "unresolved",
        1: "no_submission",
        2: "infra_error",
        3: "no_submission",
        4: "infra_error",
        5: "infra_error",
    }
    assert scores(run)[2].detail == "why"
    assert scores(run)[4].detail == "the disk is full"
    assert states(run) == {"ready": 0, "claimed": 0, "dead": 0}


def test_a_corrupt_message_is_buried_and_work_goes_on(run, task):
    (run.episodes / "ready" / "train-000000-00~0").write_bytes(b"junk")
    put(run, episode(1, "text"))
    work(run, task, lambda: len(scores(run)) == 1)
    assert states(run) == {"ready": 0, "claimed": 0, "dead": 1}


def test_drain_finishes_what_is_at_work_and_takes_no_more(run, task):
    put(run, *(episode(number, "sleep 0.5") for number in range(4)))
    work(run, task, lambda: states(run)["claimed"] == 2)
    assert len(scores(run)) == 2
    assert states(run) == {"ready": 2, "claimed": 0, "dead": 0}


def test_stop_gives_back_what_is_at_work(run, task):
    put(run, *(episode(number, "sleep 3") for number in range(4)))
    began = time.monotonic()
    work(run, task, lambda: states(run)["claimed"] == 2, order="STOP")
    assert time.monotonic() - began < 2
    assert states(run) == {"ready": 4, "claimed": 0, "dead": 0}


def test_a_bug_in_a_grader_ends_the_process_and_recovery_counts_the_loss(run, task):
    put(run, episode(0, "bug"))
    with pytest.raises(KeyError, match="bug"):
        work(run, task, lambda: False)
    assert scores(run) == {}
    assert states(run)["claimed"] == 1


def test_a_worker_that_is_told_to_end_gives_back_within_a_second(run):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_reward_worker import *
from hpc_swe.records import TestPlan
task = Task(task_id="t", taskset="", prompt="", image="", workdir="/", tests=TestPlan(
    command="", fail_to_pass=[], timeout_s=1.0))
run = RunDir(Path({str(run.root)!r}))
with Lease(run, "reward", "test", 1.0) as lease:
    worker(run, lease, Means({{"t": task}}, Process(), Judge(), RewardConfig())).work()
"""
    put(run, episode(0, "sleep 30"))
    process = subprocess.Popen([sys.executable, "-c", program])
    while not states(run)["claimed"]:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert states(run) == {"ready": 1, "claimed": 0, "dead": 0}
