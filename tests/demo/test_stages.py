"""What the demo reads for each of its stages."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.demo.__main__ import Demo
from hpc_swe.demo.model import SIZES
from hpc_swe.demo.stages import of_stage
from tests.kit.checkout import ROOT, environment, typed
from tests.kit.run_processes import processes_of, role_pids
from tests.kit.waiting import until

GIVEN = str(ROOT / "configs/demo_model.toml")


def test_a_file_of_overrides_has_another_beside_it_for_one_stage():
    assert list(of_stage([GIVEN, "seed=3"], ["demo_sft"])) == [
        GIVEN,
        str(ROOT / "configs/demo_model_sft.toml"),
        "seed=3",
    ]


def test_a_model_for_shorter_conversations_is_not_taken(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SIZES | {"max_position_embeddings": 256}))
    assert Demo(tmp_path, 0, ["rollout.context=256"]).make_model() == tmp_path / "model"
    with pytest.raises(HpcSweError, match="256 tokens, but rollout.context = 512; .* by --out"):
        Demo(tmp_path, 0, []).make_model()


def test_a_longer_run_is_asked_for_by_its_steps_and_keeps_its_warm_start(tmp_path):
    demo = Demo(tmp_path, 0, [GIVEN], steps=7)
    steps = [configuration.from_words(demo.words(tmp_path, *more)).steps for more in ([], ["demo_sft"])]
    assert steps == [7, 60]


def test_a_machine_without_sandboxes_is_told_before_anything_is_trained(tmp_path):
    out = tmp_path / "out"
    done = typed("hpc_swe.demo", "--out", out, f"sandbox.images={tmp_path}", PATH="/nowhere")
    assert (done.returncode, done.stderr.count("\n"), out.exists()) == (2, 1, False), done.stderr
    assert "no apptainer on PATH: install Apptainer, or set type" in done.stderr


@pytest.mark.slow
def test_a_stage_beyond_its_minutes_leaves_no_process(tmp_path):
    words = ["hpc_swe.demo", "--out", str(tmp_path / "out"), "--stage-minutes", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    run = tmp_path / "out/sft"
    assert (done.returncode, f"{run}: not finished after 0.06 s" in done.stderr) == (5, True), done.stderr
    until(lambda: processes_of(run) == [], "the end of its processes")


@pytest.fixture
def training(tmp_path, tmpfs):
    """A warm start of three steps in the foreground, on a disk of its own, and the file of what it says."""
    small, model, said = tmpfs(tmp_path / "small", "size=400m"), tmp_path / "model", tmp_path / "said"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", model], cwd=ROOT, check=True)
    run = RunDir(small / "run")
    words = ["configs/demo.toml", "configs/demo_sft.toml", f"model={model}", "sandbox={type='process'}"]
    words += ["tasks.train=8", "steps=3", "learner.optimizer.warmup_steps=1", "max_restarts=1"]
    words += ["--run", str(run.root), "--wait=500"]
    with (
        said.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "hpc_swe.launch", "start", *words],
            **{"cwd": ROOT, "stdout": output, "stderr": output},
            env=environment(HPC_SWE_FOREGROUND="1"),
        ) as command,
    ):
        yield run, command, said.read_text
        command.kill()
    until(lambda: processes_of(run.root) == [], "the end of its processes")


@pytest.mark.slow
def test_a_learner_without_room_is_told_at_once_and_goes_on_with_room(training, tmpfs):
    run, command, said = training
    until(run.status.exists, "the coordinator")  # it has room, but a version of the learner has not
    found = subprocess.run(["du", "-sk", run.root], stdout=subprocess.PIPE)  # some files go meanwhile
    used = int(found.stdout.split()[0])
    tmpfs(run.root.parent, f"size={used + 1200}k")
    line = f"logs/learner/000001.log: .* ERROR .*{run.root}/.*: no space is left; free some"
    until(lambda: re.search(rf"learner: exit code 4 on .* and starts again: {line}", said()), "the reason")
    tmpfs(run.root.parent, "size=400m")
    assert command.wait(500) == 0, said()
    assert run.finished.exists()


@pytest.mark.slow
def test_a_learner_that_is_always_killed_ends_the_command_with_the_reason(training):
    run, command, said = training

    def kill() -> bool:
        for pid in role_pids(run, "learner"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return command.poll() is not None

    until(kill, "the end of the command", 120)
    assert command.returncode == 5, said()
    assert "learner: exit code -9" in said()
    assert "learner: its last submission failed (exit code 1" in said().splitlines()[-1]
    assert "by signal 9 (Killed); 9 is often a lack of memory" in said().splitlines()[-1]
