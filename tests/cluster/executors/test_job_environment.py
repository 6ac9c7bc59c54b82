"""What jobs find in their environment, whoever submits them: a tick of cron has next to none."""

import subprocess

import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.base import Submission, own_environment
from hpc_swe.cluster.executors.local import Local
from hpc_swe.cluster.executors.slurm import Slurm
from tests.kit.waiting import DEADLINE_S


def job(executor, folder, *command, environment=None, code=""):
    """What a job's shell does, started with an environment as cron's."""
    words = command or ("/usr/bin/env",)
    submission = Submission("run", "reward", 1, 1, 1, words, environment or {}, code)
    text = executor.script(RunDir(folder), submission)
    line = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "bash", "-c", text]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_start_keeps_what_jobs_need_and_no_secret(monkeypatch):
    kept = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "APPTAINER_CACHEDIR": "/fast/cache",
        "CUDA_HOME": "/opt/cuda",
        "TMPDIR": "/fast/tmp",
        "LOADEDMODULES": "cuda/12:apptainer",
        "LD_LIBRARY_PATH": "/opt/cuda/lib",
    }
    dropped = {
        "APPTAINER_DOCKER_PASSWORD": "a",
        "APPTAINER_DOCKER_USERNAME": "b",
        "HF_TOKEN": "c",
        "NCCL_API_KEY": "d",
        "APPTAINER_REGISTRY": "https://me:secret@example.org",
        "CUDA_TWO_LINES": "e\nf",
        "VLLM_API_KEY": "g",
        "HOME_OF_SOMEBODY": "h",
    }
    for name, text in (kept | dropped).items():
        monkeypatch.setenv(name, text)
    found = own_environment()
    assert kept.items() <= found.items()
    assert dropped.keys() & found.keys() == set()


@pytest.mark.parametrize("kind", [Local, Slurm])
def test_a_job_has_the_variables_of_the_start_then_environ_then_setup(tmp_path, kind):
    executor = kind(
        environ={"NCCL_DEBUG": "INFO", "NAME": "it's 1"},
        setup=['export PATH="/opt/tool:$PATH"', "SEEN=$NCCL_DEBUG", "export SEEN PYTHONPATH=/site"],
    )
    known = {"PATH": "/start:/usr/bin:/bin", "NCCL_DEBUG": "WARN", "TMPDIR": "/fast/tmp", "SLURM_JOB_ID": "7"}
    notice = ("sh", "-c", "env")  # Slurm's jobs are given an argument more
    done = job(executor, tmp_path, *notice, environment=known | {"CUDA_VISIBLE_DEVICES": "5"}, code="/code")
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert found["PATH"] == "/opt/tool:/start:/usr/bin:/bin"
    assert (found["NCCL_DEBUG"], found["NAME"], found["SEEN"]) == ("INFO", "it's 1", "INFO")
    assert found["TMPDIR"] == "/fast/tmp"
    assert found["PYTHONPATH"] == "/code:/site"
    assert {"SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"} & found.keys() == set()


def test_the_nodes_own_tmpdir_wins(tmp_path):
    executor = Local(setup=[])
    text = executor.script(
        RunDir(tmp_path), Submission("run", "reward", 1, 1, 1, ["env"], {"TMPDIR": "/login/tmp"})
    )
    line = ["env", "TMPDIR=/job/tmp", "bash", "-c", text]
    assert "TMPDIR=/job/tmp\n" in subprocess.run(line, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", [Local, Slurm])
def test_setup_can_load_modules_in_a_job_that_cron_submits(tmp_path, kind):
    """`module` is a function of login shells: a job submitted by hand inherits it, one of cron's does not."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { echo "module $*"; }\n')
    executor = kind(setup=["module load cuda"])
    done = job(executor, tmp_path, "true", environment={"MODULESHOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "module load cuda\n")
    assert job(executor, tmp_path, "true").returncode == 2, "without modules the line fails as before"


def test_a_line_of_setup_that_fails_ends_the_job_and_is_named(tmp_path):
    done = job(Local(setup=["true", "test -e /no/such/module"]), tmp_path, "echo", "begun")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: [executor] setup: 'test -e /no/such/module' fails with exit code 1\n"


@pytest.mark.parametrize("kind", [Local, Slurm])
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WANDB_API_KEY": "x"}, "environ.WANDB_API_KEY: this looks like a secret"),
        ({"URL": "http://me:word@host"}, "environ.URL: this looks like a secret"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "environ.CUDA_VISIBLE_DEVICES: each job gets its own"),
        ({"A-B": "0"}, "environ.A-B: an environment variable has a plain name"),
    ],
)
def test_environ_refuses_secrets_and_what_executors_set(kind, environ, message):
    with pytest.raises(ConfigError, match=message):
        kind(environ=environ)
