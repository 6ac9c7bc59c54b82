"""Run one rollout worker: python -m jobs.rollout RUN."""

from hpc_swe.agents.sandboxes.base import WatchedSandboxes
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks
from hpc_swe.config.settings import RunConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.episode import RolloutResources
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.roles.rollout.worker import worker
from jobs import entry

ENGINE_WAIT_S = 600.0  # longest wait for an engine; a completion may take longer while its engine is alive


def work(run: RunDir, config: RunConfig) -> None:
    """Make episodes until the run has finished or is ordered to end."""
    config.sandbox.check()
    table = config.rollout
    endpoints = Endpoints(run, config.groups.max_staleness, min(1.0, 2 * config.poll_s))
    sampler = Sampler(config.engine, endpoints, run.token.read_text(encoding="ascii"), ENGINE_WAIT_S)
    sandboxes = WatchedSandboxes(config.sandbox)
    resources = RolloutResources(
        tasks={task.task_id: task for found in tasks.read(run.tasks).values() for task in found},
        sandboxes=sandboxes,
        opened_by=lambda thread: sandboxes.opened_by.get(thread, 0),
        agent=config.agent,
        builder=token_builder(config),
        sampler=sampler,
        config=table,
    )
    with entry.lease(run, config, "rollout") as lease:
        worker(run, lease, resources, config.poll_s).work()


if __name__ == "__main__":
    entry.run_role(work)
