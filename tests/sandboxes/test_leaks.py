"""However a client or a sandbox ends, the machine is as before."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_swe.plugins.sandboxes._session import end_namespace
from hpc_swe.processes import descendants

pytestmark = pytest.mark.slow
CLIENT = Path(__file__).with_name("client.py")


def start(images: str, scratch: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(CLIENT.parents[2])}
    return subprocess.Popen([sys.executable, str(CLIENT), images], stdout=subprocess.PIPE, env=environment)


def born(process: int) -> tuple[int, str] | None:
    """A process and its start time, which tell it from a later one of the same number."""
    try:
        return process, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def family(process: int) -> set[tuple[int, str]]:
    return {found for found in map(born, [process, *descendants(process)]) if found}


def survivors(watched: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Who of them is still there after a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = {found for found in watched if born(found[0]) == found}
        if not left:
            break
        time.sleep(0.1)
    return left


def mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "apptainer" in line or "fuse" in line or "/tmp/root" in line]


def test_two_hundred_sandboxes_with_clients_killed_at_random_leave_nothing(images, tmp_path):
    before = mounts()
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print("seed", seed)
    for round_ in range(5):
        clients = [start(images, tmp_path) for _ in range(2)]
        victim, other = clients
        for _ in range(rng.randrange(1, 16)):
            victim.stdout.readline()
        watched = family(victim.pid) | family(other.pid)
        assert len(watched) > 6
        victim.kill()
        watched |= family(other.pid)
        other.communicate(timeout=120)
        victim.communicate()
        assert other.returncode == 0
        assert survivors(watched) == set(), f"round {round_}"
    assert mounts() == before
    assert list(tmp_path.iterdir()) == []


def test_a_container_that_is_killed_takes_its_fuse_daemon_along(images, tmp_path):
    client = start(images, tmp_path)
    client.stdout.readline()
    watched = family(client.pid)
    for child in descendants(client.pid)[:1]:
        end_namespace(child)
    client.communicate()
    assert client.returncode == 1  # the host's doing: SandboxError
    assert survivors(watched) == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_client_that_is_asked_to_end_leaves_nothing(images, tmp_path, number):
    client = start(images, tmp_path)
    client.stdout.readline()
    watched = family(client.pid)
    client.send_signal(number)
    client.communicate()
    assert survivors(watched) == set()
