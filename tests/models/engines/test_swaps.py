"""Swaps of weights in the real vLLM, by architecture and by its number of workers."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.gpu import engines  # noqa: E402
from tests.kit.checkout import ROOT, environment  # noqa: E402

ON_CPUS = ("qwen2-2", "ministral", "experts", "delta-net", "delta-moe", "lora-moe")
CASES = [case for case in engines.CASES if case in ON_CPUS or engines.CUDA]


@pytest.fixture(scope="module")
def printed() -> str:
    command = [sys.executable, "-m", "tests.gpu.engines", *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=2400)
    return f"{done.stdout}exit code {done.returncode}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("case", CASES)
def test_what_a_learner_publishes_is_what_the_engine_samples_from(printed: str, case: str) -> None:
    """As transformers computes it: at the start, after a delta and after a full snapshot."""
    found = {tuple(line.split()[:3]) for line in printed.splitlines() if line.split()[1:2] == [case]}
    assert found == {("ok", case, name) for name in ("start", "delta", "full")}, printed


@pytest.mark.parametrize(
    ("case", "kind", "gaps", "passed"),
    [
        ("dense", "", [0.009] * 40, True),
        ("dense", "", [0.011] * 40, False),
        ("dense", "", [0.005] * 38 + [0.2] * 2, False),
        ("experts", "replay", [0.011] * 40, False),
        ("experts", "free", [0.011] * 40, True),
        ("delta-moe", "", [0.005] * 38 + [0.2] * 2, True),
        ("delta-moe", "", [0.005] * 37 + [0.2] * 3, False),
        ("delta-moe", "", [0.011] * 40, False),
    ],
)
def test_learner_and_engine_differ_by_a_hundredth_at_most(
    case: str, kind: str, gaps: list[float], passed: bool
) -> None:
    """Though bfloat16 does as much to transformers; experts that are not replayed are only shown."""
    found = {name: np.full(40, 0.008) for name in ("engine", "learner", "bf16")} | {"gap": np.array(gaps)}
    assert engines.Row(case, "start", kind, found).passed == passed
