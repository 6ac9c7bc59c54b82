"""What one look and one round cost the real coordinator: python -m tests.bench.look --workers 64 4096.

The folder is as in the midst of a run: each worker has its lease and a claim in each slot, nothing is new.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from hpc_swe.records import Node
from hpc_swe.roles.coordinator.maintenance import Maintenance
from hpc_swe.roles.coordinator.training import Training
from hpc_swe.rundir import RunDir
from hpc_swe.settings import GroupsConfig
from hpc_swe.store import atomic
from hpc_swe.store.spool import Address
from tests.bench.simulate import Settings
from tests.kit import coordinator_kit
from tests.kit.crash import calls

GROUP, BATCHES = 8, 4
BEAT_S = 30.0
PATIENCE_S = 3600.0  # nobody beats here
ROUNDS = 5


def fill(run: RunDir, settings: Settings) -> int:
    """Leases and claims; the number of groups that are open."""
    run.make()
    for worker in range(settings.workers):
        role = "rollout" if worker < settings.rollout else "reward"
        owner = f"{role}-1_{worker}-{worker:08x}"
        first = worker * settings.rollout_slots
        held = range(first, first + settings.rollout_slots) if role == "rollout" else ()
        names = [f"train-{number // GROUP:06d}-{number % GROUP:02d}" for number in held]
        node = Node(owner=owner, role=role, beat=1, host="h", pid=1, state="ready", claims=names)
        atomic.put(run.node(owner), node, durable=False)
        for name in names:
            (run.requests / "claimed" / Address(name, 0, owner).claimed).touch()
    return settings.rollout * settings.rollout_slots // GROUP


class Desk:
    """A coordinator that is at work."""

    def __init__(self, run: RunDir, groups: int) -> None:
        self.clock = coordinator_kit.Clock()
        limits = GroupsConfig(
            group_size=GROUP, groups_per_step=groups // BATCHES, max_staleness=BATCHES - 1, straggler_s=1e9
        )
        self.maintenance: Maintenance = coordinator_kit.make_maintenance(run, self.clock, BEAT_S, PATIENCE_S)
        self.mode: Training = coordinator_kit.training(run, limits)

    def round(self, seconds: float) -> None:
        """After so many seconds of its clock; a beat or more makes it read the leases."""
        self.clock.now += seconds
        self.mode.iterate(self.maintenance.snapshot())


def measure(root: Path, workers: int) -> tuple[Counter[str], float, float]:
    """Calls of a round that reads the leases; seconds of such a round, and of one that does not."""
    run = RunDir(root)
    groups = fill(run, Settings(workers=workers))
    desk = Desk(run, groups)
    desk.round(BEAT_S)  # the ledger is made
    tally = calls(root, lambda _: desk.round(BEAT_S))
    seconds = []
    for beat_s in (BEAT_S, 0.0):
        began = time.process_time()
        for _ in range(ROUNDS):
            desk.round(beat_s)
        seconds.append((time.process_time() - began) / ROUNDS)
    return tally, seconds[0], seconds[1]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024, 4096])
    given = words.parse_args()
    heads = ["workers", "claims", "opens", "listings", "CPU of a round, ms", "with leases, ms"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for workers in given.workers:
        settings = Settings(workers=workers)
        with tempfile.TemporaryDirectory(prefix="hpc_swe.") as name:
            tally, leases_s, plain_s = measure(Path(name) / "run", workers)
        row = [workers, settings.rollout * settings.rollout_slots, tally["open"], tally["os.listdir"]]
        print("|", " | ".join(f"{n:,}" for n in row), f"| {1e3 * plain_s:.0f} | {1e3 * leases_s:.0f} |")


if __name__ == "__main__":
    main()
