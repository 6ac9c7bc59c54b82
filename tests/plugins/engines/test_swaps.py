"""Swaps of weights in the real vLLM, by architecture and by its number of workers."""

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.gpu import engines  # noqa: E402
from tests.kit.checkout import ROOT, environment  # noqa: E402

CASES = [case for case in engines.CASES if case in ("qwen2-2", "experts") or engines.CUDA]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    command = [sys.executable, "-m", "tests.gpu.engines", *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    print(done.stdout, done.stderr[-3000:])
    return done.stdout.splitlines()


@pytest.mark.parametrize("case", CASES)
def test_what_a_learner_publishes_is_what_the_engine_samples_from(lines: list[str], case: str) -> None:
    """As transformers computes it: at the start, after a delta and after a full snapshot."""
    found = [line.split() for line in lines if line.split()[1:2] == [case]]
    assert {line[2] for line in found} == {"start", "delta", "full"}
    assert {line[0] for line in found} == {"ok"}
