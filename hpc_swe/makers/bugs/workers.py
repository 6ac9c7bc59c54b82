"""Try mutants in processes of their own: judging one takes a tenth of a second of the host's interpreter.

With threads of one process ten mutants a second are the most, however many cores there are.
"""

import logging
import multiprocessing
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from hpc_swe.agents.sandboxes.base import WatchedSandboxes
from hpc_swe.base.errors import HpcSweError, SandboxError
from hpc_swe.cluster.processes import die_with_parent
from hpc_swe.config.settings import RunConfig
from hpc_swe.makers.bugs.attempts import Trier
from hpc_swe.makers.bugs.mutations import Mutant
from hpc_swe.makers.bugs.sources import CodeSource
from hpc_swe.makers.bugs.statements import Kind
from hpc_swe.makers.bugs.surveys import Survey
from hpc_swe.makers.bugs.trials import TrialPlace

END_S = 600.0
"""Longest wait for a worker to end an attempt that nobody needs any more."""
Attempted = tuple[str, dict[str, Any]]
"""Verdict of `Trier.attempt`, and the row of a valid task."""

_own: list[Trier] = []
"""The trier of a worker's process."""


@dataclass(frozen=True)
class TrierWorkers:
    """Say how mutants are tried, and by how many processes."""

    jobs: int
    config: RunConfig
    image: str
    workdir: str
    hidden: float
    timeout_s: float
    statement: Kind

    @contextmanager
    def pool(self) -> Iterator[Executor]:
        """Open the processes, each with one trier; they end with this one.

        Raise HpcSweError if one of them was killed, and cancel what none of them has begun.
        """
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.jobs, context, _begin, (self,))
        try:
            yield pool
        except BrokenProcessPool:
            raise HpcSweError(
                "a process that tries mutants was killed, often for lack of memory, or did not begin for the "
                "reason above; lower --jobs and call again, what was tried is kept"
            ) from None
        finally:
            workers = multiprocessing.active_children()
            pool.shutdown(wait=False, cancel_futures=True)
            _await_end(workers)

    def trier(self) -> Trier:
        """Return a trier with sandboxes of its own."""
        place = TrialPlace(WatchedSandboxes(self.config.sandbox), self.image, self.workdir)
        return Trier(place, self.config.grader, self.hidden, self.timeout_s, self.statement)


def attempt(source: CodeSource, survey: Survey, mutant: Mutant, task_id: str) -> Attempted:
    """Try a mutant in a worker's process, and again if the host failed; a second failure is raised."""
    try:
        return _own[0].attempt(source, survey, mutant, task_id)
    except SandboxError:
        return _own[0].attempt(source, survey, mutant, task_id)


def _await_end(workers: Sequence[BaseProcess]) -> None:
    """Wait until all workers have ended; kill the others where one was killed or none ends within END_S.

    A worker that is killed may hold the lock of the queue that the others read their end from.
    """
    while alive := [worker for worker in workers if worker.is_alive()]:
        ended = connection.wait([worker.sentinel for worker in alive], END_S)
        if not ended or any(worker.exitcode for worker in workers):
            for worker in alive:
                worker.kill()


def _begin(workers: TrierWorkers) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, _go_on)
    logging.basicConfig(level=logging.ERROR)  # the command has given the warnings
    warnings.simplefilter("ignore", SyntaxWarning)  # about code that others wrote
    _own.append(workers.trier())


def _go_on(*_: object) -> None:
    """Leave Ctrl-C to the command. A signal that is ignored would stay so in the programs of sandboxes."""
