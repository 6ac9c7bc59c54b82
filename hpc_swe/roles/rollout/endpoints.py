"""Which engine to ask: the coordinator's endpoints cell, read at most once a second by a process."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_swe.errors import CorruptRecord, EngineError, Overdue, StorageError
from hpc_swe.records import Endpoint, EndpointTable, Node, WeightVersion
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

REST_S = (1.0, 30.0)
"""A failing engine is left alone for so long, first and at most; each failure in a row doubles it."""

log = logging.getLogger(__name__)


class Endpoints:
    """Shared by the episode threads of a process."""

    def __init__(self, run: RunDir, max_lag: int, fresh_s: float = 1.0) -> None:
        """Engines more than `max_lag` steps behind the newest weights are not asked."""
        self._run, self._max_lag, self._fresh_s = run, max_lag, fresh_s
        self._lock = threading.Lock()
        self._table: EndpointTable | None = None
        self._read_at = float("-inf")
        self._busy: Counter[str] = Counter()
        self._failures: dict[str, tuple[int, float]] = {}
        self._last_error = "none"

    @contextmanager
    def take(self, prefer: str, wait_s: float) -> Iterator[Endpoint]:
        """An engine for one request: `prefer` while it serves, else the least loaded.

        An EngineError of the block rests the engine, since all threads would run into it; one of a single
        request (Overdue) does not.

        Raises:
            EngineError: None came to serve within `wait_s`.
        """
        endpoint = self._wait(prefer, wait_s)
        try:
            yield endpoint
        except Overdue:
            raise
        except EngineError as error:
            self._rest(endpoint.owner, error)
            raise
        else:
            self._failures.pop(endpoint.owner, None)
        finally:
            with self._lock:
                self._busy[endpoint.owner] -= 1

    def serves(self) -> bool:
        """Whether the coordinator lists an engine that may be asked; one that only rests counts."""
        with self._lock:
            table = self._read()
            return table is not None and any(not self._is_behind(e, table.newest) for e in table.endpoints)

    def versions(self, endpoint: Endpoint) -> list[WeightVersion]:
        """Weights that the engine's own cell names at this moment.

        The table is a copy some seconds old, and an engine may have changed its weights since. The
        supervisor names both versions before it swaps, so what is read after an answer came covers it.

        Raises:
            EngineError: The cell is gone or names none: the engine was ending, and nobody knows at which.
        """
        try:
            versions = atomic.get(self._run.node(endpoint.owner), Node).versions
        except (FileNotFoundError, CorruptRecord, StorageError) as error:
            raise EngineError(f"cannot tell the weights of {endpoint.owner}: {error}") from error
        if not versions:
            raise EngineError(f"cannot tell the weights of {endpoint.owner}: its cell names none")
        return versions

    def _wait(self, prefer: str, wait_s: float) -> Endpoint:
        until = time.monotonic() + wait_s
        while True:
            with self._lock:
                found = self._choose(self._read(), prefer)
                if found is not None:
                    self._busy[found.owner] += 1
                    return found
            if time.monotonic() >= until:
                raise EngineError(f"no engine came to serve in {wait_s:g} s: {self._why()}")
            time.sleep(random.uniform(0.5, 1.5) * min(self._fresh_s, wait_s) / 4)

    def _choose(self, table: EndpointTable | None, prefer: str) -> Endpoint | None:
        now = time.monotonic()
        serving = [
            endpoint
            for endpoint in (table.endpoints if table else [])
            if table is not None
            and not self._is_behind(endpoint, table.newest)
            and self._failures.get(endpoint.owner, (0, 0.0))[1] <= now
        ]
        kept = [endpoint for endpoint in serving if endpoint.owner == prefer]
        order = sorted(serving, key=lambda e: (e.updating, self._busy[e.owner], random.random()))
        return next(iter(kept or order), None)

    def _is_behind(self, endpoint: Endpoint, newest: WeightVersion) -> bool:
        steps = [version.step for version in endpoint.versions]
        return not steps or newest.step - max(steps) > self._max_lag

    def _read(self) -> EndpointTable | None:
        if time.monotonic() - self._read_at < self._fresh_s:
            return self._table
        self._read_at = time.monotonic()
        try:
            self._table = atomic.get(self._run.endpoints, EndpointTable)
        except FileNotFoundError:
            pass  # the coordinator has not written it yet
        except (CorruptRecord, StorageError) as error:
            log.warning("unreadable endpoints, going on with the last: %s", error)
        return self._table

    def _rest(self, owner: str, error: EngineError) -> None:
        with self._lock:
            count = self._failures.get(owner, (0, 0.0))[0] + 1
            rest = min(REST_S[0] * 2 ** (count - 1), REST_S[1])
            self._failures[owner] = (count, time.monotonic() + rest)
            self._last_error = f"{owner}: {error}"
        log.warning("failing engine %s rests %g s: %s", owner, rest, error)

    def _why(self) -> str:
        if self._table is None:
            return f"the coordinator has not written {self._run.endpoints}"
        listed = [f"{e.owner} at {[v.name for v in e.versions]}" for e in self._table.endpoints]
        return (
            f"the coordinator's {self._run.endpoints} lists {', '.join(listed) or 'none'}, needed one within "
            f"{self._max_lag} steps of {self._table.newest.name} that answers; last error: {self._last_error}"
        )
