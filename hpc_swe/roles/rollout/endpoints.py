"""Choose an engine for each request from the coordinator's endpoints cell, which is read at intervals."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpc_swe.base.errors import CorruptRecord, EngineError, Overdue, StorageError
from hpc_swe.base.records import Endpoint, EndpointTable, Node, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, weights

SUSPENSION_S = (1.0, 30.0)
"""First and longest suspension of a failing engine; each successive failure doubles it."""
PATIENCE_S = 10.0
"""So long after new weights are listed, a new episode waits for the engine of its choice to load them."""
LOADING_S = 60.0
"""So long it waits for any engine to load them; what older weights sample may be too old for its batch."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Suspension:
    """Say until when a failing engine is not asked. One outage, which many requests meet, counts once."""

    seconds: float = 0.0
    failed_at: float = float("-inf")
    """Time of the failure that set `seconds`; requests that began earlier fail in the same outage."""
    until: float = float("-inf")

    def after_failure(self, began: float, now: float) -> "_Suspension":
        """Return the suspension that follows when a request fails which began at `began`."""
        if began > self.failed_at:
            seconds = min(max(SUSPENSION_S[0], 2 * self.seconds), SUSPENSION_S[1])
            return _Suspension(seconds, now, now + seconds)
        return self if now < self.until else replace(self, until=now + self.seconds)


NOT_SUSPENDED = _Suspension()


class Endpoints:
    """Share the engines among the episode threads of a process."""

    def __init__(
        self, run: RunDir, max_lag: int, fresh_s: float = 1.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Exclude engines more than `max_lag` steps behind the newest weights; reread after `fresh_s`."""
        self._run, self._max_lag, self._fresh_s, self._monotonic = run, max_lag, fresh_s, monotonic
        self._lock = threading.Lock()
        self._table = EndpointTable(beat=0, endpoints=[], newest=WeightVersion())
        """The last table read; its beat is 0 until the coordinator has written one."""
        self._read_at = self._newest_since = float("-inf")
        self._busy: Counter[str] = Counter()
        self._asleep_s = 0.0
        """Seconds in which all listed engines slept."""
        self._suspensions: dict[str, _Suspension] = {}
        self._last_error = "none"

    @contextmanager
    def take(self, prefer: str, wait_s: float) -> Iterator[Endpoint]:
        """Lend an engine for one request: `prefer` while it serves, else the least loaded.

        Without `prefer` the table is read again: a new episode may be for newer weights than it named. All
        groups that new weights allow begin at once, and then wait a while for an engine that loads them:
        otherwise most of their tokens would count as those of the weights before.
        Raise EngineError if no engine served within `wait_s` of this object's clock. An EngineError of the
        block suspends the engine, since all threads would meet it; Overdue, which concerns a single request,
        does not. A request that is overdue because engines slept meanwhile raises EngineError.
        """
        if not prefer:
            with self._lock:
                self._read(again=True)
        (endpoint, began), asleep_s = self._wait(prefer, wait_s), self._asleep_s
        try:
            yield endpoint
        except Overdue as error:
            if self._asleep_s > asleep_s:
                raise EngineError(f"the engine slept: {error}") from error
            raise
        except EngineError as error:
            self._suspend(endpoint.owner, began, error)
            raise
        else:
            self._suspensions.pop(endpoint.owner, None)
        finally:
            with self._lock:
                self._busy[endpoint.owner] -= 1

    def has_engine(self) -> bool:
        """Return whether the coordinator lists an awake and recent engine; suspended engines count."""
        with self._lock:
            return bool(self._recent())

    def clock(self) -> float:
        """Return a time in seconds that passes as a monotonic clock's, but not while all engines sleep."""
        with self._lock:
            self._read()
            return self._monotonic() - self._asleep_s

    def versions(self, endpoint: Endpoint) -> list[WeightVersion]:
        """Read the weight versions in the engine's own cell.

        The table is some seconds old, and the engine may have changed its weights since. The supervisor
        names both versions before it swaps, so a cell that is read after an answer covers that answer. Raise
        EngineError if the cell is gone or names no version: the engine was ending, its version is unknown.
        """
        try:
            versions = atomic.get(self._run.node(endpoint.owner), Node).versions
        except (FileNotFoundError, CorruptRecord, StorageError) as error:
            raise EngineError(f"cannot tell the weights of {endpoint.owner}: {error}") from error
        if not versions:
            raise EngineError(f"cannot tell the weights of {endpoint.owner}: its cell names none")
        return versions

    def _wait(self, prefer: str, wait_s: float) -> tuple[Endpoint, float]:
        """Return an engine, and the time at which it was chosen."""
        until, draw = self.clock() + wait_s, random.random()
        while True:
            is_last = self.clock() >= until
            with self._lock:
                found = self._choose(prefer, draw, is_patient=not prefer and not is_last)
                if found is not None:
                    self._busy[found.owner] += 1
                    return found, self._monotonic()
            if is_last:
                raise EngineError(f"no engine served within {wait_s:g} s: {self._describe()}")
            time.sleep(random.uniform(0.5, 1.5) * min(self._fresh_s, wait_s) / 4)

    def _choose(self, prefer: str, draw: float, *, is_patient: bool) -> Endpoint | None:
        """Return the engine to ask now; None if there is none, or if it is worth waiting for the one chosen.

        A patient request first chooses by load alone, and always the same of equals by its `draw`: so engines
        that load weights later than others get their share. Then it prefers those with the newest weights.
        """
        serving, now = self._recent(), self._monotonic()
        serving = [e for e in serving if self._suspensions.get(e.owner, NOT_SUSPENDED).until <= now]
        newest, listed_s = self._table.newest, now - self._asleep_s - self._newest_since
        by_load = is_patient and listed_s < PATIENCE_S

        def is_old(e: Endpoint) -> bool:
            return e.updating or not weights.recent(e.versions, newest)

        def rank(e: Endpoint) -> tuple[bool, bool, bool, int, float]:
            lot = random.Random(f"{draw} {e.owner}").random()  # hashes of tuples that end alike are not even
            late, busy = not by_load, self._busy[e.owner]
            return e.owner != prefer, late and is_old(e), late and e.updating, busy, lot

        found = min(serving, key=rank, default=None)
        waits = is_patient and listed_s < LOADING_S and found is not None and is_old(found)
        return None if waits else found

    def _recent(self) -> list[Endpoint]:
        """Return the listed engines that are awake and whose weights are recent enough."""
        self._read()
        newest, awake = self._table.newest, [e for e in self._table.endpoints if not e.sleeping]
        return [e for e in awake if weights.recent(e.versions, newest, self._max_lag)]

    def _read(self, *, again: bool = False) -> None:
        if (since_s := self._monotonic() - self._read_at) < self._fresh_s and not again:
            return
        self._read_at = self._monotonic()
        if self._table.endpoints and all(endpoint.sleeping for endpoint in self._table.endpoints):
            self._asleep_s += since_s
        newest = self._table.newest
        try:
            self._table = atomic.get(self._run.endpoints, EndpointTable)
        except FileNotFoundError:
            pass  # the coordinator has not written it yet
        except (CorruptRecord, StorageError) as error:
            log.warning("unreadable endpoints, using the last ones read: %s", error)
        if self._table.newest != newest:
            self._newest_since = self._read_at - self._asleep_s

    def _suspend(self, owner: str, began: float, error: EngineError) -> None:
        with self._lock:
            before = self._suspensions.get(owner, NOT_SUSPENDED)
            found = self._suspensions[owner] = before.after_failure(began, self._monotonic())
            self._last_error = f"{owner}: {error}"
        if found is not before:
            log.warning("failing engine %s suspended for %g s: %s", owner, found.seconds, error)

    def _describe(self) -> str:
        if not self._table.beat:
            return f"the coordinator has not written {self._run.endpoints}"
        listed = [f"{e.owner} at {[v.name for v in e.versions]}" for e in self._table.endpoints]
        return (
            f"the coordinator's {self._run.endpoints} lists {', '.join(listed) or 'none'}, needed one within "
            f"{self._max_lag} steps of {self._table.newest.name} that answers; last error: {self._last_error}"
        )
