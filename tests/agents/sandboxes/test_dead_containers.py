"""What a container's death does to its sandboxes is the host's doing: nobody is paid or blamed for it."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes._session import Session, namespace_pids
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Episode, RolloutRequest, Sampling, Task, Timing
from hpc_swe.cluster.processes import descendants, start_time
from hpc_swe.config.settings import RewardConfig
from hpc_swe.roles.reward.worker import RewardResources, judge
from hpc_swe.tasks import patch
from hpc_swe.tasks.graders.swebench import Swebench
from tests.kit.checkout import ROOT
from tests.kit.constants import varied
from tests.kit.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def served(apptainer: Apptainer, tmp_path: Path) -> Apptainer:
    """Its image is one file, which a FUSE daemon serves."""
    (tmp_path / "python-pytest.sif").symlink_to(Path(apptainer.images, "python-pytest.sif"))
    return varied(Apptainer, warm_containers=0)(images=str(tmp_path))


@pytest.fixture
def seen(task: Task) -> Task:
    """Its work directory is a part of the image."""
    return msgspec.structs.replace(task, workdir="/usr/share", files={})


def kill_daemon(sandbox: Session) -> None:
    daemons = [pid for pid in sandbox._container._outside if "fuse" in Path(f"/proc/{pid}/comm").read_text()]
    assert daemons
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(start_time, daemons)), "the daemons' end")


def test_a_submission_that_cannot_be_read_is_not_taken_for_an_empty_one(served, seen):
    with served.open(seen) as sandbox:
        kill_daemon(sandbox)
        with pytest.raises(SandboxError, match="ended under its sandboxes"):
            patch.take(seen, sandbox, served)


class Dying(Sandboxes):
    """Sandboxes whose daemon dies as soon as they are open."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self.sandboxes = sandboxes

    def check(self) -> None:
        self.sandboxes.check()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        with self.sandboxes.open(task) as sandbox:
            kill_daemon(sandbox)
            yield sandbox


def test_a_daemon_that_dies_under_a_grading_does_not_cost_the_worker(served, seen):
    extra = {"log_parser": "parse_log_django", "test_patch": "text"}
    tests = msgspec.structs.replace(seen.tests, extra=extra)
    row = msgspec.structs.replace(seen, base_commit="HEAD", tests=tests)
    request = RolloutRequest(group_id=0, index=0, task_id="t", seed=0, sampling=Sampling())
    episode = Episode(
        request=request,
        turns=[],
        messages=[],
        exit_status="submitted",
        submission="text",
        timing=Timing(),
        worker="w",
    )
    score = judge(RewardResources({"t": row}, Dying(served), Swebench(), RewardConfig()), episode)
    assert (score.outcome, score.reward) == ("infra_error", None)


def test_replacing_a_dead_container_tells_the_sandboxes_that_it_had(served, task):
    with served.open(task) as sandbox:
        kill_daemon(sandbox)
        with served.open(task) as another:
            assert another.run("cat mod.py", 30).output == "x = 1\n"
            with pytest.raises(SandboxError, match="ended under its sandboxes"):
                sandbox.run("true", 30)


def test_a_process_with_more_files_than_select_can_count_opens_sandboxes(served, task):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with served.open(task) as sandbox:
            assert sandbox.run("false", 30).exit_code == 1
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sandbox_that_does_not_answer_is_ended_at_once(served, task):
    with served.open(task) as sandbox:
        below = descendants(sandbox._container._process.pid)
        first = next(pid for pid in below if len(pids := namespace_pids(pid)) == 3 and pids[-1] == "1")
        os.kill(first, signal.SIGSTOP)
        sandbox._host.shutdown(socket.SHUT_RDWR)
        assert sandbox.run("true", 30).broke_sandbox
        assert start_time(first) is None
        assert sandbox.read("mod.py") == b"x = 1\n"


def test_an_apptainer_that_hangs_is_ended_and_costs_its_sandbox_only(served, task, tmp_path):
    program = tmp_path / "apptainer"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    hanging = varied(Apptainer, executable=str(program), start_timeout_s=4.0)(images=served.images)
    with pytest.raises(SandboxError, match="did not start"), hanging.open(task):
        pass
    assert start_time(int((tmp_path / "pid").read_text())) is None


def test_a_process_ends_without_a_word_of_the_containers_that_idle(served, task):
    program = f"""
import msgspec
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.records import Task
task = msgspec.json.decode({msgspec.json.encode(task)!r}, type=Task)
with Apptainer(images={served.images!r}).open(task) as sandbox:
    print(sandbox.run("cat mod.py", 30).output)
"""
    line = [sys.executable, "-W", "default:unclosed:ResourceWarning", "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("x = 1\n\n", "")
