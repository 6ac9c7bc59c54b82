"""The command for the learner's benchmark, on the CPU with a tiny shape."""

import subprocess
import sys

import pytest

from tests.kit.checkout import ROOT, environment

COMMAND = (sys.executable, "-m", "hpc_swe.benchmarks.learner")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "5B"], "--shape '5B' is none of"),
        (["--lengths", "8k"], "--lengths '8k'"),
        (["policy.recompute=sometimes"], "sometimes"),
        (["learner.loss.clip_low=1"], "keys of [policy] only"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_table_of_the_learner_has_its_figures():
    pytest.importorskip("megatron.core")
    done = run("--warm", "1", "--steps", "1", "--mask-share", "0.5", "policy.dtype=float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "limits of CPU" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("hpc_swe"))
    assert "nan" not in row
