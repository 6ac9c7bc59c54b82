"""Keeps one engine serving, on the newest weights.

Consumes weights/; produces its node cell (address, versions, state). Waits for a newer version of the
live incarnation, which the learner publishes, and for the health of an engine that somebody else runs,
which is up to them. Whatever it reads it names in its cell first, so that retention leaves it alone, and
before weights change the cell names both versions.

A version is verified here, while the engine serves, and once however many workers the engine has. A version
is refused for what an engine says of it; an engine that says nothing is hung or dead, and is replaced.
"""

import logging
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from hpc_swe.errors import ConfigError, CorruptRecord, EngineError, NoAnswer, Overdue, StorageError
from hpc_swe.plugins.engines.base import Engine
from hpc_swe.processes import Flag, free_port
from hpc_swe.records import WeightVersion
from hpc_swe.roles.inference.child import Child
from hpc_swe.roles.inference.pulse import Pulse
from hpc_swe.roles.inference.served import Ours, Served, Theirs, Weights
from hpc_swe.rundir import RunDir
from hpc_swe.settings import InferenceConfig, LeaseConfig
from hpc_swe.store import folders, weights
from hpc_swe.store.lease import Lease, Watcher

QUIET_S = 300.0  # an engine that lived this long has earned its restarts back
LOOK_S = 0.5  # between looks at an engine while a version is verified or loaded
REFUSALS = 3  # versions in a row; then the engine is more likely at fault than all of them

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """One engine of a run."""

    run: RunDir
    lease: Lease
    engine: Engine
    config: InferenceConfig
    leases: LeaseConfig
    model: Path
    """Served until a version is published."""
    host: str
    """Name or address by which rollout workers reach this node."""
    _version: WeightVersion = field(default=WeightVersion(), init=False)
    _since: float = field(default=float("inf"), init=False)
    """When it began to serve."""
    _refused: set[WeightVersion] = field(default_factory=set, init=False)
    _row: int = field(default=0, init=False)
    """Refusals since the last version that was taken."""
    _told: Flag = field(default_factory=Flag, init=False)

    def __post_init__(self) -> None:
        self._watcher = Watcher(self.run, self.leases.beat_s, self.leases.ttl_s)

    def serve(self) -> None:
        """Until STOP, the run's end or a signal; after DRAIN until no rollout worker lives.

        Raises:
            ConfigError: The engine cannot be started as configured.
            EngineError: It failed more often than `max_restarts`; the message names its log, or whose it is.
        """
        restarts = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._tell)
        while not self._must_end():
            self._since = float("inf")
            try:
                self._serve_once()
            except EngineError as error:
                restarts = 1 if time.monotonic() - self._since > QUIET_S else restarts + 1
                if restarts > self.config.max_restarts:
                    raise
                log.warning("restart %d of %d: %s", restarts, self.config.max_restarts, error)
                self._told.wait(min(2.0 ** (restarts - 1), 60.0))

    def _serve_once(self) -> None:
        token = self.run.token.read_text().strip()
        wanted = self._choose()
        self._version = wanted.version
        served = self._meet(token, wanted.folder)
        alive = partial(self.engine.is_alive, served.url, token)
        try:
            if self._is_healthy_in_time(served):
                self._give(served, wanted)
                self.lease.publish(state="ready", url=served.url, versions=[self._version], reading="")
                log.info("serving %s at %s", self._version.name, served.url)
                self._since = time.monotonic()
                with Pulse(alive, self.config.hang_s) as pulse:
                    self._follow(served, pulse)
        except NoAnswer as error:
            raise EngineError(f"{error}; {served.remedy}") from error
        finally:
            state = "draining" if self._told.is_set() else "starting"
            self.lease.publish(state=state, url="", versions=[], reading="")
            served.leave()

    def _meet(self, token: str, folder: Path) -> Served:
        """The engine that the configuration names, else one of ours, just started."""
        if self.config.url:
            log.info("attaching to %s", self.config.url)
            return Theirs(self.engine, self.config.url, token)
        port = self._free_port()
        url, output = (
            f"http://{self.host}:{port}",
            self.run.logs("inference") / f"{self.lease.owner}.engine.log",
        )
        command = self.engine.command(folder, self.host, port, self.run.root.name)
        log.info("starting %s at %s, output in %s", folder, url, output)
        return Ours(self.engine, url, token, Child(command, self.engine.environment(token), output))

    def _choose(self) -> Weights:
        """The newest version that was not refused, else the model."""
        for version in reversed(weights.published(self.run)):
            if version in self._refused:
                continue
            self.lease.publish(reading=version.name)
            try:
                return self._verify(version)
            except (FileNotFoundError, CorruptRecord) as error:
                log.warning("skipped %s: %s", version.name, error)
            except CancelledError:
                break
        return Weights(WeightVersion(), self.model, None, None)

    def _verify(self, version: WeightVersion) -> Weights:
        manifest = weights.manifest(self.run, version)
        folder = self.run.weight(version)
        return Weights(version, folder, manifest, folders.verify(folder, manifest, self._told.is_set))

    def _is_healthy_in_time(self, served: Served) -> bool:
        """False when we are told to end meanwhile."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self.engine.is_healthy(served.url):
            served.require_coming()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no health at {served.url} in {self.config.start_timeout_s:g} s; {served.remedy}"
                )
            if self._told.wait(0.25) or self._must_end():
                return False
        return True

    def _give(self, served: Served, wanted: Weights) -> None:
        try:
            served.take(wanted)
        except (NoAnswer, Overdue):
            raise
        except EngineError:
            if self.engine.is_healthy(served.url):  # one that died says nothing about the version
                self._refused.add(wanted.version)  # the next start takes the one before
            raise

    def _follow(self, served: Served, pulse: Pulse) -> None:
        while not self._must_end():
            served.require_serving()
            pulse.require()
            try:
                newest = weights.newest(self.run)
                if newest is not None and newest > self._version and newest not in self._refused:
                    self._update(served, newest, pulse)
            except StorageError as error:
                log.warning("looking again: %s", error)
            self._told.wait(self.config.poll_s * random.uniform(0.5, 1.5))

    def _update(self, served: Served, newest: WeightVersion, pulse: Pulse) -> None:
        began = time.monotonic()
        self.lease.publish(reading=newest.name)
        try:
            wanted = self._beside(partial(self._verify, newest), served.require_serving, pulse.require)
            verified = time.monotonic()
            self.lease.publish(state="updating", versions=[self._version, newest])
            self._beside(partial(served.update, wanted), served.require_coming)  # one that loads is silent
            pulse.renew()
        except FileNotFoundError:
            log.warning("%s is gone; the next look takes the newest", newest.name)
        except CancelledError:
            return
        except (NoAnswer, Overdue):
            raise  # it says nothing of the version
        except (EngineError, CorruptRecord) as error:
            self._refuse(served, newest, error)
        else:
            self._version, self._row = newest, 0
            now = time.monotonic()
            log.info(
                "updated to %s: verified in %.2f s, swapped in %.2f s",
                newest.name,
                verified - began,
                now - verified,
            )
        self.lease.publish(state="ready", reading="", versions=[self._version])

    def _beside(self, work: Callable[[], T], *looks: Callable[[], None]) -> T:
        """Work in a thread: an engine that dies or stops meanwhile is seen, and an order to end heard."""
        pool = ThreadPoolExecutor(1, "beside")
        done = pool.submit(work)
        pool.shutdown(wait=False)
        while not wait([done], LOOK_S).done:
            for look in looks:
                look()
            if self._told.is_set():
                raise CancelledError
        return done.result()

    def _refuse(self, served: Served, version: WeightVersion, error: Exception) -> None:
        """Go on with the weights before, but not for ever.

        Raises:
            EngineError: The engine died meanwhile, or refused so many in a row that it is started anew.
        """
        if not self.engine.is_healthy(served.url):  # it died, and says nothing about the version
            raise EngineError(f"the engine died while {version.name} was loaded: {error}") from error
        self._refused.add(version)
        self._row += 1
        log.error("refused %s, serving %s: %s", version.name, self._version.name, error)
        if self._row >= REFUSALS:
            self._refused.clear()
            self._row = 0
            raise EngineError(f"{REFUSALS} versions in a row were refused, the last since {error}") from error

    def _must_end(self) -> bool:
        if self._told.is_set() or self.run.stop.exists() or self.run.finished.exists():
            return True
        if not self.run.drain.exists():
            return False
        self._watcher.look()
        return not self._watcher.live("rollout")  # they finish what they began, and need us for it

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()

    def _free_port(self) -> int:
        try:
            return free_port(self.host, self.config.port)
        except OSError as error:
            raise ConfigError(
                f"[inference] port = {self.config.port}: {self.host} refuses: {error.strerror}; "
                "name a free port, or 0"
            ) from error
