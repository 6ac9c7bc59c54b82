"""A file that brings an environment: jobs start from their node's copy, and ask the shared folder little."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.base import Submission, job_script
from hpc_swe.cluster.executors.local import Local
from hpc_swe.launch import create
from tests.kit import runtime
from tests.kit.checkout import ROOT

pytestmark = pytest.mark.slow
PROGRAM = "import sys, jobs.rollout; print(sys.prefix, jobs.__file__, sep='\\n')"
TRACED = "trace=%file,getdents64"
UNPACKED = 40
"""Calls of a job that finds the copy of its node: it reads the script, and looks at both files."""


@dataclass(frozen=True)
class Shared:
    """What lies on the shared file system: an environment, a run's code and the runtime file."""

    root: Path
    environment: Path
    file: Path
    code: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    root = tmp_path_factory.mktemp("shared")
    environment = root / "environment"
    runtime.make_environment(environment)
    (environment / "bin/hello").write_text(f"#!{environment}/bin/python\nimport sys; print(sys.prefix)\n")
    (environment / "bin/hello").chmod(0o755)
    (environment / "runs").mkdir()
    file = root / "runtime.sqfs"
    runtime.pack(environment, file)
    run = RunDir(root / "run")
    run.root.mkdir()
    create.copy_code(run, run)
    return Shared(root, environment, file, run.code)


@dataclass(frozen=True)
class Started:
    """What one job said, and how many calls of it name a path below the shared folder."""

    said: list[str]
    calls: int


def start(shared: Shared, node: Path, runtime: Path | None, program: str = PROGRAM) -> Started:
    if shutil.which("strace") is None:
        pytest.skip("strace is missing: apt-get install strace")
    node.mkdir(exist_ok=True)
    python = str(shared.environment / "bin/python")
    submission = Submission(
        run_id="demo-1",
        role="rollout",
        number=1,
        count=1,
        processes=1,
        command=[python, "-P", "-c", program],
        code=str(shared.code),
    )
    lines = job_script(submission, [], {"TMPDIR": str(node)}, (), str(runtime or ""))
    trace = node / "trace"
    strace = ["strace", "-f", "-qq", "-y", "-s", "300", "-e", "signal=none", "-e", TRACED, "-o", str(trace)]
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*strace, "bash", "-c", "\n".join(lines)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with trace.open(encoding="utf-8", errors="replace") as file:
        return Started(done.stdout.split(), sum(f"{shared.root}/" in line for line in file))


def test_a_job_imports_from_its_node_after_the_first_has_unpacked(shared, tmp_path):
    before = start(shared, tmp_path / "node0", None)
    first = start(shared, tmp_path / "node1", shared.file)
    second = start(shared, tmp_path / "node1", shared.file)
    print(before.calls, first.calls, second.calls)
    assert before.said[0] == str(shared.environment)
    for started in (first, second):
        assert all(word.startswith(str(tmp_path / "node1")) for word in started.said), started.said
    assert max(first.calls, second.calls) <= UNPACKED < before.calls / 20


def test_jobs_that_start_at_once_unpack_once_and_old_copies_go(shared, tmp_path):
    node = tmp_path / "node"
    node.mkdir()
    script = shared.code / "hpc_swe/cluster/executors/runtime.sh"
    line = f'. {script} {shared.file} {shared.code}; echo "$python"; exec sleep "$0"'

    def job(seconds: str) -> "subprocess.Popen[str]":
        environ = {"PATH": os.environ["PATH"], "TMPDIR": str(node)}
        return subprocess.Popen(["bash", "-c", line, seconds], env=environ, stdout=subprocess.PIPE, text=True)

    jobs = [job("0") for _ in range(8)]
    places = {told.communicate(timeout=120)[0] for told in jobs}
    assert len(places) == 1
    holding = job("60")
    try:
        assert holding.stdout is not None
        held = Path(holding.stdout.readline().strip())
        os.utime(shared.file, (1, 1))  # another version
        job("0").communicate(timeout=120)
        assert held.exists(), "a job uses it"
    finally:
        holding.kill()
        holding.wait()
    os.utime(shared.file, (2, 2))
    job("0").communicate(timeout=120)
    assert not held.exists()


def test_scripts_of_the_environment_run_the_python_beside_them(shared, tmp_path):
    line = f". {shared.code}/hpc_swe/cluster/executors/runtime.sh {shared.file} {shared.code}"
    line += '; exec "$(dirname "$python")/hello"'
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_a_link_of_somebody_else_is_no_folder_of_this_user(shared, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "work.lock").touch()
    (mine / "work").touch()
    (tmp_path / f"hpc_swe-runtime-{os.getuid()}").symlink_to(mine)
    line = f". {shared.code}/hpc_swe/cluster/executors/runtime.sh {shared.file} {shared.code}"
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, sorted(os.listdir(mine))) == (2, ["work", "work.lock"])
    assert "is not a folder of this user" in done.stderr


def test_a_start_refuses_a_file_that_is_not_there(shared, tmp_path):
    submission = Submission("demo-1", "rollout", 1, 1, 1, ["python"])
    Local(runtime=str(shared.file)).check(submission)
    with pytest.raises(ConfigError, match="runtime = .*gone': no such file; containers/build_runtime.sh"):
        Local(runtime=f"{tmp_path}/gone").check(submission)


def test_a_folder_that_does_not_exist_is_named_before_anything_is_packed(shared, tmp_path):
    words = ["containers/build_runtime.sh", shared.environment, tmp_path / "gone/runtime.sqfs"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"runtime: {tmp_path}/gone: no such folder; make it\n")
    done = subprocess.run([*words[:1], "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:")
