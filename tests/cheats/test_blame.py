"""What a policy's choices cost is the policy's: it keeps its reward, and its worker keeps its memory."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("blame.py")
IMAGE = Path(__file__).parents[2] / ".cache" / "images" / "python-pytest"
DEADLINE_S = 1500


def bounded() -> None:
    """A worker that is not bounded shall not take the machine along."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


@pytest.mark.slow
@pytest.mark.parametrize("group", ["repository:", "files:", "tests:", "report:"])
def test_no_choice_of_a_policy_is_paid_left_without_a_reward_or_kept_in_memory(group, capsys):
    if shutil.which("apptainer") is None or not IMAGE.exists():
        pytest.skip("Apptainer or its unpacked task image is missing: containers/build_image.sh")
    command = [sys.executable, PROGRAM, "--fewer", group]
    done = subprocess.run(command, preexec_fn=bounded, capture_output=True, text=True, timeout=DEADLINE_S)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
