"""python -m jobs.learner RUN: one rank of the learner; jobs.run starts all of them."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_swe.errors import HpcSweError, StorageError
from hpc_swe.metrics import Log
from hpc_swe.processes import Flag
from hpc_swe.roles.learner.batch_source import BatchSource
from hpc_swe.roles.learner.loop import LearnerPlan, OnStep, learn
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RunConfig
from jobs import entry

PLACES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}

log = logging.getLogger(__name__)


def work(run: RunDir, config: RunConfig) -> None:
    """Train until the last step or an order."""
    interrupted = Flag()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda *_: interrupted.set())  # all ranks get it; rank 0's verdict counts
    table = config.learner
    objective = PolicyObjective(table.loss)
    reference = Path(config.reference or config.model) if objective.needs_reference else None
    with _voice(run, config) as (writer, tell):
        learner = config.policy.build(Path(config.model), table.optimizer, reference)
        plan = LearnerPlan(config.steps, table.export_every, table.checkpoint_every, writer)
        source = BatchSource(run, table.batch_wait_s, table.poll_s, interrupted.is_set)
        try:
            learn(run, learner, objective, plan, source, tell)
        except (HpcSweError, FloatingPointError):
            learner.close()  # all ranks raised it, so none waits; threads left running could abort the exit
            raise
        learner.close()


@contextmanager
def _voice(run: RunDir, config: RunConfig) -> Iterator[tuple[str, OnStep]]:
    """Rank 0 holds the lease and writes the metrics; the others are silent."""
    if os.environ.get("RANK", "0") != "0":
        yield "", lambda _step, _metrics: None
        return
    with entry.lease(run, config, "learner") as lease:
        curves = Log(run.metric_log(lease.owner))

        def tell(step: int, metrics: dict[str, float]) -> None:
            try:
                lease.publish(step=step, state="ready")
            except StorageError as error:
                log.warning("not shown: %s", error)  # the beat thread tries again
            if metrics:
                curves.write(step - 1, metrics)

        yield lease.owner, tell


if __name__ == "__main__":
    if "RANK" not in os.environ:  # srun has its own names for a process's place
        os.environ |= {name: os.environ[theirs] for name, theirs in PLACES.items() if theirs in os.environ}
    entry.enter(work)
