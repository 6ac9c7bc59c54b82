"""What a run of 64 workers asks of the metadata server, counted by strace, and by the simulation."""

import shutil
import subprocess

import pytest

from tests.bench import metadata
from tests.bench.simulate import Settings, simulate

pytestmark = pytest.mark.slow
BUDGET = 14
STEPS, EPISODE_S = 6, 2.0


@pytest.fixture(scope="module")
def counted() -> metadata.Count:
    if shutil.which("strace") is None:
        pytest.skip("strace is missing: apt-get install strace")
    if subprocess.run(["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "true"], check=False).returncode:
        pytest.skip("strace may not trace here: a container needs the capability SYS_PTRACE")
    return metadata.count(rollout=48, reward=16, steps=STEPS, episode_s=EPISODE_S)


def test_an_episode_changes_the_name_space_13_times_in_a_run_of_64_workers(counted):
    print(*metadata.table(counted), sep="\n")
    assert counted.episodes == STEPS * 64
    changes = counted.of(metadata.SPOOLS, metadata.CHANGES) - counted.of(metadata.SPOOLS, ["mkdir"])
    assert 13 * counted.episodes <= changes <= 13.2 * counted.episodes
    leases = counted.of(["nodes"], metadata.CHANGES)
    assert counted.of(kinds=metadata.CHANGES) - leases <= BUDGET * counted.episodes, "batches, cells, archive"


def test_messages_are_opened_once_and_never_looked_up(counted):
    assert counted.of(metadata.SPOOLS, ["open"]) <= 3.1 * counted.episodes
    assert counted.of(metadata.SPOOLS, ["look up"]) <= 0.1 * counted.episodes


def test_the_simulation_of_64_workers_agrees_with_the_count(counted):
    slots, rate = 48 * 2, counted.episodes / counted.seconds
    settings = Settings(
        workers=64,
        load=rate * 1.3 * EPISODE_S / slots,
        rollout_slots=2,
        reward_slots=2,
        episode_s=1.1 * EPISODE_S,
        grading_s=EPISODE_S / 10,
        lasts_s=90.0,
        warm_s=30.0,
    )
    found = simulate(settings)
    print(found, counted.lost, counted.listings(["control"]))
    assert found["changes/episode"] == pytest.approx(13, rel=0.05)
    orders, ready = counted.listings(["control"]), counted.listings(["requests", "episodes"])
    asks = found["orders/s"] / 64, found["listings of ready/s"] / 64
    # Processes that wait for a core ask less often than in virtual time, and their listings are older:
    # so their pace has no lower bound, and the races that they lose have no upper one.
    assert orders < 2 * asks[0]
    assert ready < 2 * asks[1]
    assert 0.5 < (orders / ready) / (asks[0] / asks[1]) < 2
    assert found["lost races/claim"] < 2
