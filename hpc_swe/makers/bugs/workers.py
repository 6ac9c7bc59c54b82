"""Try mutants in processes of their own: judging one takes a tenth of a second of the host's interpreter.

With threads of one process ten mutants a second are the most, however many cores there are.
"""

import logging
import multiprocessing
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from hpc_swe.agents.sandboxes.base import WatchedSandboxes
from hpc_swe.base.errors import SandboxError
from hpc_swe.cluster.processes import die_with_parent
from hpc_swe.config.settings import RunConfig
from hpc_swe.makers.bugs.attempts import Trier
from hpc_swe.makers.bugs.mutations import Mutant
from hpc_swe.makers.bugs.sources import CodeSource
from hpc_swe.makers.bugs.statements import Kind
from hpc_swe.makers.bugs.surveys import Survey
from hpc_swe.makers.bugs.trials import TrialPlace

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

    def pool(self) -> ProcessPoolExecutor:
        """Return the processes, each with one trier; they end with this one."""
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.jobs, context, _begin, (self,))

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


def _begin(workers: TrierWorkers) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, _go_on)
    logging.basicConfig(level=logging.ERROR)  # the command has given the warnings
    warnings.simplefilter("ignore", SyntaxWarning)  # about code that others wrote
    _own.append(workers.trier())


def _go_on(*_: object) -> None:
    """Leave Ctrl-C to the command. A signal that is ignored would stay so in the programs of sandboxes."""
