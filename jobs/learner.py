"""Run one rank of the learner: python -m jobs.learner RUN. All ranks are started by jobs.run."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_swe.base.errors import HpcSweError, StorageError
from hpc_swe.base.metrics import Log
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster import gpu_turns
from hpc_swe.cluster.gpu_turns import LearnerTurn
from hpc_swe.cluster.processes import Flag
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig, StopConfig
from hpc_swe.roles.learner.alarm import Alarm
from hpc_swe.roles.learner.batch_source import BatchSource
from hpc_swe.roles.learner.loop import LearnerPlan, OnStep, learn
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.roles.learner.probe import probe_ids
from hpc_swe.roles.learner.publish import Snapshots
from jobs import entry

SLURM_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}

log = logging.getLogger(__name__)


def work(run: RunDir, config: RunConfig) -> None:
    """Train until the last step or an order."""
    interrupted = Flag()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda *_: interrupted.set())  # all ranks get it; rank 0 decides for all
    table = config.learner
    objective = PolicyObjective(table.loss)
    reference = Path(config.reference or config.model) if objective.needs_reference else None
    turn = _turn(config)
    if turn is not None and not turn.take(interrupted.is_set):
        log.info("ending on a signal, before the engines gave the GPUs")
        return
    with _reporting(run, config) as (writer, on_step):
        tokens = config.batches.microbatch_tokens
        learner = config.policy.build(Path(config.model), config.optimizer, reference, tokens, config.kept)
        kept = (config.eval.every, config.retention.keep_every)
        plan = LearnerPlan(
            config.steps,
            table.export_every,
            table.checkpoint_every,
            table.checkpoint_s,
            table.max_skipped,
            writer,
            turn,
            Snapshots(table.snapshot_every, kept, config.steps),
            probe_ids(Path(config.model), learner.vocabulary),
            config.stop if config.mode == "grpo" else StopConfig(),
        )
        source = BatchSource(run, config.batch_wait_s, config.poll_s, interrupted.is_set)
        try:
            learn(run, learner, objective, plan, source, on_step)
        except HpcSweError:
            learner.close()  # all ranks raised, so none waits here; running threads could abort the exit
            raise
        learner.close()


def _turn(config: RunConfig) -> LearnerTurn | None:
    """Return this rank's turn on its GPU, where engines use it, too."""
    if not job_counts.is_hybrid(config):
        return None
    folder, rank = Path(os.environ[gpu_turns.FOLDER]), int(os.environ["LOCAL_RANK"])
    return LearnerTurn(folder, rank, 2 * config.engine.load_timeout_s)


@contextmanager
def _reporting(run: RunDir, config: RunConfig) -> Iterator[tuple[str, OnStep]]:
    """Hold the lease and write the metrics on rank 0; do nothing on the other ranks."""
    if os.environ.get("RANK", "0") != "0":
        yield "", lambda _taken, _step, _metrics: None
        return
    with entry.lease(run, config, "learner") as lease:
        curves, alarm = Log(run.metric_log(lease.owner)), Alarm()

        def on_step(taken: int, step: int, metrics: dict[str, float]) -> None:
            if trouble := alarm.look(step, metrics):
                log.warning("%s", trouble)
            try:
                lease.publish(step=taken, state="ready", trouble=trouble)
            except StorageError as error:
                log.warning("not published: %s", error)  # the beat thread tries again
            if metrics:
                curves.write(step, metrics)

        yield lease.owner, on_step


if __name__ == "__main__":
    if "RANK" not in os.environ:  # srun has other names than torchrun
        os.environ |= {name: os.environ[slurm] for name, slurm in SLURM_NAMES.items() if slurm in os.environ}
    entry.run_role(work)
