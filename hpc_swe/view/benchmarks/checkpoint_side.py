"""Save and load checkpoints on this rank: python -m hpc_swe.view.benchmarks.checkpoint_side PLAN OUT FOLDER.

`hpc_swe.benchmarks.checkpoint` starts it once for each rank; rank 0 writes what all have found.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpc_swe.base.records import Record
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders
from hpc_swe.models.policies.base import WRITERS, LossConfig, Ranks
from hpc_swe.roles.learner.collective import on_rank_zero
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.roles.learner.publish import Publisher, Snapshots
from hpc_swe.view.benchmarks.column import Plan, build_learner

PIECE = 1 << 26


class SaveTimes(Record, frozen=True, kw_only=True):
    """Hold the seconds of two checkpoints of one step, by the clock of rank 0."""

    size: int
    """Bytes of all files of one."""
    first_s: float
    """Until the first checkpoint's files are written, without checksums."""
    saved_s: float
    """Until the second one is published, with checksums."""
    plain_s: float
    """Until as many plain bytes are written and durable, by as many threads."""
    loaded_s: float
    """Until the second one is verified and loaded, from the page cache where it fits there."""


def measure(plan: Plan, folder: Path) -> SaveTimes:
    """Train a step, and save and load in a folder that is empty; leave nothing there but empty folders."""
    learner = build_learner(plan)
    ranks, run, objective = learner.ranks, RunDir(folder), PolicyObjective(LossConfig())
    replicas = len(set(ranks.gather(ranks.data_rank)))
    on_rank_zero(ranks, run.make)
    publisher = Publisher(run, learner, 1, "benchmark", Snapshots())
    learner.train(plan.workload.batch(0, ranks.data_rank, replicas), objective)
    stage = on_rank_zero(ranks, lambda: folders.staging(run.checkpoint(learner.step, 1)))
    first_s = _seconds(ranks, lambda: learner.save(stage))
    on_rank_zero(ranks, lambda: folders.discard(stage))
    saved_s = _seconds(ranks, publisher.publish_checkpoint)
    saved = run.checkpoint(learner.step, 1)
    size = sum(path.stat().st_size for path in saved.iterdir())
    loaded_s = _seconds(ranks, publisher.restore)
    on_rank_zero(ranks, lambda: folders.remove(saved))
    plain_s = _seconds(ranks, lambda: _write_plain(run.checkpoints, ranks, size))
    learner.close()
    return SaveTimes(size=size, first_s=first_s, saved_s=saved_s, plain_s=plain_s, loaded_s=loaded_s)


def _seconds(ranks: Ranks, act: Callable[[], object]) -> float:
    """Return the seconds until all ranks, which start together, have done something."""
    ranks.gather(None)
    began = time.perf_counter()
    act()
    ranks.gather(None)
    return time.perf_counter() - began


def _write_plain(folder: Path, ranks: Ranks, size: int) -> None:
    """Write this rank's share of so many bytes, and remove it."""
    paths = [folder / f"plain-{ranks.rank}-{index}" for index in range(WRITERS)]
    data = os.urandom(PIECE)

    def write(path: Path) -> None:
        left = size // (WRITERS * ranks.size)
        with atomic.storage(path), path.open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(memoryview(data)[:left])
            os.fsync(file.fileno())

    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(write, paths))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def main() -> None:
    """Read the plan, measure, and let rank 0 write the result."""
    found = measure(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan), Path(sys.argv[3]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
