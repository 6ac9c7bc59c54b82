"""However an episode, a client or a container ends, the machine is as before.

What is counted is what the test itself began, so that it can run beside others: its orphans come to it, since
it takes the kernel's part as their new parent, and what agents leave bears a mark.
"""

import ctypes
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes._local import LocalImages
from hpc_swe.agents.sandboxes._session import end_namespace
from hpc_swe.cluster.processes import descendants, start_time
from tests.kit import checkout

pytestmark = pytest.mark.slow
EPISODES, KILLED, LANES = 150, 30, 3
FATES = ["worker", "container", "apptainer", "daemon", "first", "process", "socket"]
WITH_WORKER = "ended with its worker"
PR_SET_CHILD_SUBREAPER = 36


class Machine:
    """What this test has left on it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.mark = f"left-{secrets.token_hex(6)}"
        self._before = set(descendants(os.getpid()))
        self._mounts = self._mounted()

    def start(self, images: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        shown = checkout.environment(TMPDIR=str(self.scratch), **environment)
        line = [sys.executable, "-m", "tests.kit.sandbox_client", images, self.mark, *words]
        return subprocess.Popen(line, stdout=subprocess.PIPE, env=shown, text=True)

    def left(self) -> list[str]:
        """What is still there after a while."""
        deadline = time.monotonic() + 120
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        processes = [pid for pid in descendants(os.getpid()) if pid not in self._before and start_time(pid)]
        folders = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]
        keys = [line.split()[0] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
        return [
            *(Path(f"/proc/{pid}/stat").read_text() for pid in processes if Path(f"/proc/{pid}").exists()),
            *map(str, self.scratch.iterdir()),
            *(str(path) for folder in folders for path in folder.glob(f"*{self.mark}*")),
            *(line for line in Path("/proc/net/unix").read_text().splitlines() if self.mark in line),
            *(key for key in keys if key == str(sum(self.mark.encode()) << 16)),
            *(self._mounted() - self._mounts),
        ]

    def _mounted(self) -> set[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return {line for line in lines if "apptainer" in line or "fuse" in line or "/tmp/root" in line}


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    (tmp_path / "scratch").mkdir()
    yield Machine(tmp_path / "scratch")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def three(apptainer, tmp_path) -> str:
    """An unpacked image, and two that FUSE daemons serve or that are unpacked to the node's disk."""
    folder = tmp_path / "three"
    folder.mkdir()
    for name in ("a", "b.sif", "c.sif"):
        source = Path(apptainer.images, "python-pytest.sif" if "." in name else "python-pytest")
        if not source.exists():
            pytest.skip(f"there is no {source}")
        (folder / name).symlink_to(source)
    return str(folder)


class Lane:
    """One client after the other, as `jobs/run.py` would start them, until all episodes have begun."""

    def __init__(self, numbers: range, fates: dict[int, str]) -> None:
        self.words = {str(n): f"{n}:{fates[n]}" if n in fates else str(n) for n in numbers}
        self.outcomes: dict[int, str] = {}
        self.fated: dict[int, str] = {}
        self.grown: list[int] = []
        self.ends: list[int] = []

    def run(self, machine: Machine, images: str, local: str) -> None:
        while self.words and set(self.ends) <= {-signal.SIGKILL}:
            client = machine.start(images, *self.words.values(), LOCAL=local)
            for line in client.stdout:
                match line.split():
                    case ["begun", number]:
                        del self.words[number]
                        self.outcomes[int(number)] = WITH_WORKER
                    case ["fated", number, fate]:
                        self.fated[int(number)] = fate
                    case ["ended", number, outcome]:
                        self.outcomes[int(number)] = outcome
                    case ["files", more]:
                        self.grown.append(int(more))
            self.ends.append(client.wait(180))


def test_many_episodes_of_which_a_fifth_is_killed_at_random_leave_nothing(machine, three, tmp_path):
    seed = random.randrange(1 << 32)
    killed = random.Random(seed).sample(range(EPISODES), KILLED)
    fates = {number: FATES[place % len(FATES)] for place, number in enumerate(killed)}
    disk = tmp_path / "disk"
    disk.mkdir()
    lanes = [Lane(range(place, EPISODES, LANES), fates) for place in range(LANES)]
    with ThreadPoolExecutor(LANES) as pool:
        local = [str(disk), "", ""]
        list(pool.map(Lane.run, lanes, [machine] * LANES, [three] * LANES, local))
    outcomes = {number: outcome for lane in lanes for number, outcome in lane.outcomes.items()}
    fated = {number: fate for lane in lanes for number, fate in lane.fated.items()}
    ends = Counter(end for lane in lanes for end in lane.ends)
    print(f"\nseed {seed}: {len(outcomes)} episodes; clients by exit status {dict(ends)}")
    print(f"{len(fated)} killed, by {dict(Counter(fated.values()))}")
    others = Counter(outcome for number, outcome in outcomes.items() if number not in fated)
    print(f"their ends: {dict(Counter(outcomes[number] for number in fated))}; of the others: {dict(others)}")
    assert machine.left() == []
    assert len(outcomes) == EPISODES
    assert all(number in fated or outcomes[number] == WITH_WORKER for number in fates)
    assert set(ends) == {0, -signal.SIGKILL}
    most_files = 3 * 3  # a channel, a complaint and a lock for each of three containers
    assert max(more for lane in lanes for more in lane.grown) <= most_files
    assert not [*Path(three, "a").glob(f"*/{machine.mark}*"), *Path(three, "a").glob(f"*/*/{machine.mark}*")]
    check_whole(disk, Path(three, "b.sif"))


def check_whole(disk: Path, sif: Path) -> None:
    """The node's disk holds whole images only, once somebody has looked there."""
    os.utime(sif, (1, 1), follow_symlinks=False)
    with LocalImages(str(disk), 50.0, 300.0, "apptainer").unpacked(sif):
        kept = list(disk.glob("*/*"))
    assert {path.name[0] for path in kept} == {"b", "c"}
    assert all((path / "bytes").exists() for path in kept)


def episodes(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def test_a_container_that_is_killed_takes_its_fuse_daemon_along(images, machine):
    client = machine.start(images, *episodes(20))
    while "ended" not in client.stdout.readline():
        pass
    end_namespace(descendants(client.pid)[0])
    output, _ = client.communicate(timeout=600)
    assert client.returncode == 0
    assert " host\n" in output, "it is the host's doing"
    assert machine.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_client_that_is_asked_to_end_leaves_nothing(images, machine, number):
    client = machine.start(images, *episodes(20))
    for _ in range(5):
        client.stdout.readline()
    client.send_signal(number)
    client.communicate(timeout=600)
    assert machine.left() == []
