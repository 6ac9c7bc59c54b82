"""A node that cannot open sandboxes must not eat up a run's groups as fast as it can fail them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from hpc_swe.errors import ConfigError, NodeError, SandboxError
from hpc_swe.plugins.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.records import Task

PATIENCE = 8  # sandboxes in a row that could not be opened


@dataclass
class Watched(Sandboxes):
    """The sandboxes of one process."""

    sandboxes: Sandboxes
    _failed: int = field(default=0, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def check(self) -> None:
        """As the sandboxes' own."""
        self.sandboxes.check()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """As the sandboxes' own; raises NodeError, which ends the process, when none opens any more."""
        with ExitStack() as stack:
            try:
                sandbox = stack.enter_context(self.sandboxes.open(task))
            except SandboxError as error:
                self._count(error)
                raise
            with self._counting:
                self._failed = 0
            yield sandbox

    def _count(self, error: SandboxError) -> None:
        with self._counting:
            self._failed += 1
            if self._failed % PATIENCE:
                return
            try:
                self.sandboxes.check()  # or it is the image of one task that is broken
            except ConfigError:
                where = socket.gethostname()
                raise NodeError(
                    f"{self._failed} sandboxes in a row could not be opened on {where}: {error}"
                ) from error
