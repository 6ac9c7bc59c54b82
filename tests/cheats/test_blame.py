"""What a policy's choices cost is the policy's: it keeps its reward, and its worker keeps its memory."""

import resource
import subprocess
import sys

import pytest

from tests.kit.checkout import environment
from tests.kit.images import UNPACKED, require_apptainer

DEADLINE_S = 3000


def bounded() -> None:
    """A worker that is not bounded shall not take the machine along."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


@pytest.mark.slow
def test_no_choice_of_a_policy_is_paid_unrewarded_or_kept_in_memory(capsys):
    require_apptainer(UNPACKED)
    command = [sys.executable, "-m", "tests.bench.blame", "--fewer"]
    done = subprocess.run(
        command, preexec_fn=bounded, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
