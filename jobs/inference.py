"""Run one engine and its supervisor: python -m jobs.inference RUN."""

import os
from pathlib import Path

from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster import gpu_turns
from hpc_swe.cluster.executors.base import own_address
from hpc_swe.cluster.gpu_turns import EngineTurn
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.models import builds
from hpc_swe.roles.inference.supervisor import Supervisor
from jobs import entry


def work(run: RunDir, config: RunConfig) -> None:
    """Serve until the run has finished or is ordered to end."""
    builds.require(config.engine)
    with entry.lease(run, config, "inference") as lease:
        Supervisor(
            run=run,
            lease=lease,
            engine=config.engine,
            config=config.inference,
            max_restarts=config.max_restarts,
            poll_s=config.poll_s,
            leases=config.lease,
            model=Path(config.model),
            context=config.rollout.context,
            host=own_address(),
            turn=_turn(config) if job_counts.is_hybrid(config) else None,
        ).serve()


def _turn(config: RunConfig) -> EngineTurn:
    ranks = job_counts.processes("learner", config)
    return EngineTurn(Path(os.environ[gpu_turns.FOLDER]), ranks, int(os.environ["LOCAL_RANK"]))


if __name__ == "__main__":
    entry.run_role(work)
