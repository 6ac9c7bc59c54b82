"""Turn requests into episodes: the rollout worker.

It consumes requests/ and produces episodes/. It waits for a ready request, which the coordinator dispatches,
and for an engine in the endpoints cell: without one it claims nothing, and a request whose episode had
sampled nothing when the engines went away goes back.
"""

import logging
from threading import Thread

from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import Episode, RolloutRequest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import Spool
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.episode import Played, RolloutResources
from hpc_swe.roles.worker import GiveBack, Work, Worker

CLEANUP_S = 15.0
"""Time for sandboxes to close when the process must end; Slurm kills 90 s after its signal."""

log = logging.getLogger(__name__)


class EpisodeWork(Work[Episode]):
    """Run one episode, and give it up from outside when it hangs."""

    def __init__(
        self, resources: RolloutResources, owner: str, hung_s: float, request: RolloutRequest
    ) -> None:
        self._resources, self._owner, self._request = resources, owner, request
        self._recorder = resources.recorder(request)
        self._longest_s = resources.config.episode_timeout_s + hung_s

    def run(self) -> Episode:
        """Run the episode and make its record."""
        played = episode.play(self._resources, self._request, self._recorder)
        made = episode.record(self._request, self._recorder, played, self._owner)
        failure = self._recorder.failure
        has_engine = self._resources.sampler.endpoints.has_engine
        if isinstance(failure, EngineError) and not made.turns and not has_engine():
            raise GiveBack(f"no engine serves, and nothing was sampled yet: {failure}")
        log.info("finished %s: %s, %d turns", self._request.name, made.exit_status, len(made.turns))
        return made

    def steps(self, thread: Thread) -> int:
        """Count answers of engines to the episode, and the sandboxes that were opened or closed for it."""
        return self._recorder.answers + self._resources.opened_by(thread)

    def overdue(self) -> Episode | None:
        """Return an infrastructure failure when the episode hangs beyond its time-out."""
        if self._recorder.outside_engine_s <= self._longest_s:
            return None
        why = f"the episode hangs, {self._longest_s:g} s outside the engine; [rollout] episode_timeout_s"
        log.warning("given up %s: %s", self._request.name, why)
        return episode.record(self._request, self._recorder, Played(episode.failed(why)), self._owner)

    def stop(self) -> None:
        """Refuse further requests of the agent."""
        self._recorder.close("the worker is stopping")


def worker(
    run: RunDir, lease: Lease, resources: RolloutResources, poll_s: float, hung_s: float = 60.0
) -> Worker[RolloutRequest, Episode]:
    """Make the rollout worker, which gives up an episode that exceeds its time-out by `hung_s`."""
    return Worker(
        run,
        lease,
        Spool(run.requests, RolloutRequest),
        Spool(run.episodes, Episode),
        lambda claim: EpisodeWork(resources, lease.owner, hung_s, claim.message),
        resources.config.slots,
        poll_s,
        CLEANUP_S,
        resources.sampler.endpoints.has_engine,
    )
