"""The command for the learner's benchmark, on the CPU with a tiny shape."""

import re
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
        (["--peer", "fsdp3"], "did you mean 'fsdp2'?"),
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
def test_peers_train_the_same_loss_and_gradient_as_the_learner():
    """Also when a peer takes the sequences one by one, computes layers again and makes all logits."""
    pytest.importorskip("megatron.core")
    words = ("--warm", "1", "--steps", "1", "--mask-share", "0.5", "--peer", "fsdp2,published-b")
    done = run(*words, "--profile", "policy.dtype=float32", "policy.recompute=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line.startswith(("hpc_swe (none) ", "fsdp2 ", "published-b "))]
    assert len(rows) >= 3
    assert "nan" not in done.stdout
    line = next(line for line in lines if line.startswith("first step"))
    differences = [float(word) for word in re.findall(r"by (\S+) %", line)]
    assert len(differences) == 2
    assert max(differences) < 0.01, line
    assert any(line.startswith("matrix products") for line in lines)
