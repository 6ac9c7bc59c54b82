"""Keep one engine serving the weights of the most steps.

The supervisor consumes weights/ and produces its node cell (address, versions, state). It waits for a newer
version of at least as many steps, which the learner publishes, and for the health of an engine that somebody
else runs. While a learner that went back repeats steps, the engine keeps the weights of more steps, and one
that starts takes them. The cell names a version before it is read, so that retention keeps it, and both
versions before weights change.

A version is verified here, while the engine serves, and once for all workers of the engine. It is refused
when the engine reports an error about it; an engine that does not answer is hung or dead, and is replaced.
When that happens twice in a row while the same version is loaded, the version is refused, too.
A delta is loaded with all versions that it builds on, from a full snapshot on; the engine takes what it does
not have yet. When one of them is missing or was refused, the engine goes on with what it serves until the
next full snapshot. The learner publishes one next, because the supervisor names the delta that was not
loaded. An engine starts from a full snapshot, too.
"""

import logging
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpc_swe.base.errors import CorruptRecord, EngineError, NoAnswer, Overdue, StorageError
from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.lease import Lease, Watcher
from hpc_swe.cluster.gpu_turns import LOOK_S as TURN_LOOK_S
from hpc_swe.cluster.gpu_turns import EngineTurn
from hpc_swe.cluster.processes import Flag, free_port
from hpc_swe.config.settings import InferenceConfig, LeaseConfig
from hpc_swe.models.engines.base import Engine, Weights
from hpc_swe.roles.inference.child import Child
from hpc_swe.roles.inference.liveness import LivenessMonitor
from hpc_swe.roles.inference.refusals import Refusals
from hpc_swe.roles.inference.served import ExternalEngine, OwnEngine, ServedEngine

QUIET_S = 300.0  # after so long without a failure, restarts are counted from 0 again
LOOK_S = 0.5  # between two checks of an engine while a version is verified or loaded
MAX_REFUSALS = 3  # successive refusals after which the engine, not the weights, is blamed
RETRY_POLLS = 20  # after so many looks the newest weights, which were refused, are tried again

T = TypeVar("T")

log = logging.getLogger(__name__)


class BrokenChain(CorruptRecord):
    """A delta builds on a version that cannot be loaded."""


@dataclass
class Supervisor:
    """Supervise one engine of a run."""

    run: RunDir
    lease: Lease
    engine: Engine
    config: InferenceConfig
    max_restarts: int
    poll_s: float
    leases: LeaseConfig
    model: Path
    """Served until a version is published."""
    context: int
    """Most tokens of a prompt and its completion together."""
    host: str
    """Name or address by which rollout workers reach this node."""
    turn: EngineTurn | None = None
    """The engine shares its GPUs with the learner, and uses them in its turns only."""
    _serving: Weights = field(init=False)
    """What the engine serves."""
    _since: float = field(default=float("inf"), init=False)
    """When the engine began to serve."""
    _refused: Refusals = field(init=False)
    _loading: frozenset[WeightVersion] = field(default=frozenset(), init=False)
    """Versions that the engine is loading now, a delta with those that it builds on."""
    _lost: frozenset[WeightVersion] = field(default=frozenset(), init=False)
    """Versions that an engine was loading when it was lost; empty when one was loaded since."""
    _stopping: Flag = field(default_factory=Flag, init=False)

    def __post_init__(self) -> None:
        self._serving = Weights(WeightVersion(), self.model)
        self._refused = Refusals(RETRY_POLLS * self.poll_s)
        self._watcher = Watcher(self.run, self.leases.beat_s, self.leases.ttl_s)

    def serve(self) -> None:
        """Serve until STOP, the run's end or a signal; after DRAIN until no rollout worker lives.

        Raise ConfigError if the engine cannot be started as configured, and EngineError, with its log or its
        owner, if it failed more than `max_restarts` times.
        """
        restarts = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: self._stopping.set())
        while not self._must_end():
            self._since = float("inf")
            try:
                self._serve_once()
            except EngineError as error:
                self._note_loss()
                restarts = 1 if time.monotonic() - self._since > QUIET_S else restarts + 1
                if restarts > self.max_restarts:
                    raise
                why = f"restart {restarts} of {self.max_restarts}: {error}"
                log.warning("%s", why)
                self._show(trouble=why, refusals=self._refused.in_row)
                self._stopping.wait(min(2.0 ** (restarts - 1), 60.0))
        log.info("ending %s", "on a signal" if self._stopping.is_set() else "on an order")

    def _serve_once(self) -> None:
        if not self._await_turn(lambda: None):
            return
        token = atomic.read(self.run.token).decode().strip()
        self._serving = wanted = self._choose()
        served = self._start(token, wanted.folder)
        is_alive = partial(self.engine.is_alive, served.url, token)
        try:
            if self._is_healthy_in_time(served):
                self._load(served, wanted)
                if is_newest := self._wanted() in (None, wanted.version):
                    self._refused.end(wanted.version)
                changes: dict[str, object] = {"trouble": ""} if is_newest or not self._refused else {}
                changes |= {"url": served.url, "refusals": self._refused.in_row}
                self._show(state="ready", versions=[wanted.version], reading="", **changes)
                log.info("serving %s at %s", wanted.version.name, served.url)
                self._since = time.monotonic()
                with LivenessMonitor(is_alive, self.config.hang_s) as monitor:
                    self._follow(served, monitor)
        except NoAnswer as error:
            raise EngineError(f"{error}; {served.remedy}") from error
        finally:
            state = "draining" if self._stopping.is_set() else "starting"
            self._show(state=state, url="", versions=[], reading="")
            served.release()
            if self.turn:
                self.turn.give()

    def _start(self, token: str, folder: Path) -> ServedEngine:
        """Attach to the engine that the configuration names, or else start one."""
        if self.config.url:
            log.info("attaching to %s", self.config.url)
            return ExternalEngine(self.engine, self.config.url, token)
        port = free_port(self.host)
        url = f"http://{self.host}:{port}"
        output = self.run.logs("inference") / f"{self.lease.owner}.engine.log"
        command = [*self.engine.command(folder, self.host, port, self.run.root.name, self.context)]
        if self.turn:
            command += self.engine.sleep_arguments or ()
        log.info("starting %s at %s, output in %s", folder, url, output)
        locks = self.turn.files if self.turn else ()
        child = Child(command, self.engine.environment(token), output, locks, self.engine.vital)
        return OwnEngine(self.engine, url, token, child)

    def _choose(self) -> Weights:
        """Choose the full snapshot of the most steps that was not refused, or else the model."""
        for version in sorted(weights.published(self.run), key=weights.by_step, reverse=True):
            if version in self._refused:
                continue
            self.lease.publish(reading=version.name)
            try:
                if folders.manifest(self.run.weight(version), WeightManifest).parent is None:
                    return self._verify(version)
            except (FileNotFoundError, CorruptRecord) as error:
                log.warning("skipped %s: %s", version.name, error)
            except CancelledError:
                break
        return Weights(WeightVersion(), self.model)

    def _verify(self, version: WeightVersion) -> Weights:
        """Verify a version and those that it builds on, unless the engine has them already.

        Raise FileNotFoundError if it is gone, CorruptRecord if it is damaged, and BrokenChain if a version
        that it builds on is gone, damaged or refused.
        """
        rest = self._unserved(version)
        loaded = self._served(rest[-1][1].parent)
        for each, manifest in reversed(rest):
            folder = self.run.weight(each)
            try:
                files = folders.verify(folder, manifest, self._stopping.is_set)
            except (FileNotFoundError, CorruptRecord) as error:
                if each == version:
                    raise
                raise BrokenChain(f"{version.name} builds on {each.name}: {error}") from error
            loaded = Weights(each, folder, manifest, files, loaded)
        assert loaded is not None
        return loaded

    def _unserved(self, version: WeightVersion) -> list[tuple[WeightVersion, WeightManifest]]:
        """Return the manifests of a version and of those that it builds on, back to one that is served."""
        found = [(version, folders.manifest(self.run.weight(version), WeightManifest))]
        while (parent := found[-1][1].parent) is not None and self._served(parent) is None:
            child = found[-1][0]
            if parent in self._refused or not parent < child:
                raise BrokenChain(
                    f"{child.name} builds on {parent.name}, which was refused or is no older one"
                )
            try:
                found.append((parent, folders.manifest(self.run.weight(parent), WeightManifest)))
            except (FileNotFoundError, CorruptRecord) as error:
                raise BrokenChain(f"{child.name} builds on {parent.name}: {error}") from error
        return found

    def _served(self, version: WeightVersion | None) -> Weights | None:
        if version == WeightVersion():
            return Weights(version, self.model)  # which adapters change
        return next((each for each in self._serving.chain if each.version == version), None)

    def _is_healthy_in_time(self, served: ServedEngine) -> bool:
        """Wait until the engine is healthy; return False when the supervisor must end meanwhile."""
        timeout_s = self.engine.load_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.engine.is_healthy(served.url):
            served.require_starting()
            if time.monotonic() > deadline:
                raise EngineError(f"no health at {served.url} in {timeout_s:g} s; {served.remedy}")
            if self._stopping.wait(0.25) or self._must_end():
                return False
        return True

    def _load(self, served: ServedEngine, wanted: Weights) -> None:
        try:
            served.load(wanted)
        except EngineError as error:  # one that died or hangs says nothing about the version
            if not isinstance(error, NoAnswer | Overdue) and self.engine.is_healthy(served.url):
                self._refused.note(wanted.version)  # the next start loads the version before
            raise

    def _follow(self, served: ServedEngine, monitor: LivenessMonitor) -> None:
        while not self._must_end():
            self._loading = frozenset()  # the last look was no load, or one that the engine survived
            served.require_serving()
            monitor.require_alive()
            if self.turn and self.turn.is_requested():
                with suppress(CancelledError):  # a signal: this loop ends
                    self._sleep(served, self.turn)
                monitor.reset()
            try:
                wanted = self._wanted()
                if wanted and weights.by_step(wanted) > weights.by_step(self._serving.version):
                    if self._refused.may_try(wanted, self._since):
                        self._update(served, wanted, monitor)
                    if wanted in self._refused:  # each time, because a write may fail
                        weights.report_refused(self.run, wanted)
            except StorageError as error:
                log.warning("looking again: %s", error)
            self._pause(self.poll_s * random.uniform(0.5, 1.5))

    def _wanted(self) -> WeightVersion | None:
        """Return the version of the most steps, or the newest one when that was refused."""
        found = weights.published(self.run)
        farthest = max(found, key=weights.by_step, default=None)
        return max(found) if farthest in self._refused else farthest

    def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the learner wants the GPUs."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not (self.turn and self.turn.is_requested()):
            if self._stopping.wait(min(left_s, TURN_LOOK_S) if self.turn else left_s):
                return

    def _sleep(self, served: ServedEngine, turn: EngineTurn) -> None:
        """Free the GPUs for the learner, and take them again when it has given them back."""
        began, engine = time.monotonic(), self.engine
        where = served.url, atomic.read(self.run.token).decode().strip()
        self._show(state="sleeping")  # requests are kept, and no answers come
        used = self._run_watched(partial(engine.sleep, *where), served.require_starting)
        turn.give()
        slept_s, left = time.monotonic() - began, "" if used is None else f"; {used:.2f} GiB are in use there"
        log.info("gave the GPUs back in %.2f s%s", slept_s, left)
        if not self._await_turn(served.require_starting):
            return
        taken = time.monotonic()
        self._run_watched(partial(engine.wake, *where), served.require_starting)
        self._show(state="ready")
        log.info("took the GPUs again in %.2f s", time.monotonic() - taken)

    def _await_turn(self, check: Callable[[], None]) -> bool:
        """Wait for the turn, if there are turns; return False when the supervisor must end meanwhile."""
        while self.turn and not self.turn.take():
            check()
            if self._stopping.wait(TURN_LOOK_S) or self._must_end():
                return False
        return True

    def _update(self, served: ServedEngine, version: WeightVersion, monitor: LivenessMonitor) -> None:
        began = time.monotonic()
        self.lease.publish(reading=version.name)
        try:
            verify = partial(self._verify, version)
            wanted = self._run_watched(verify, served.require_serving, monitor.require_alive)
            verified = time.monotonic()
            self.lease.publish(state="updating", versions=[self._serving.version, version])
            self._loading = frozenset(v for v in (w.version for w in wanted.chain) if not self._served(v))
            self._run_watched(partial(served.update, wanted), served.require_starting)  # no answers meanwhile
            monitor.reset()
        except FileNotFoundError:
            log.warning("%s is gone; looking again", version.name)
        except CancelledError:
            return
        except BrokenChain as error:
            self._refused.pass_over(version)  # this says nothing about the engine, and is not counted
            serving = f"serving {self._serving.version.name} until a full snapshot"
            self._complain(f"passed over {version.name}, {serving}: {error}")
        except (NoAnswer, Overdue):
            raise  # the version is at fault only if this happens again
        except (EngineError, CorruptRecord) as error:
            self._refuse(served, version, error)
        else:
            self._serving, self._lost = wanted, frozenset()
            self._refused.end(version)
            self.lease.update(trouble="", refusals=0)
            log.info(
                "updated to %s: verified in %.2f s, swapped in %.2f s",
                version.name,
                verified - began,
                time.monotonic() - verified,
            )
        self._show(state="ready", reading="", versions=[self._serving.version])

    def _run_watched(self, work: Callable[[], T], *checks: Callable[[], None]) -> T:
        """Run `work` in a thread; meanwhile call `checks`, which raise when the engine dies or hangs."""
        pool = ThreadPoolExecutor(1, "watched")
        done = pool.submit(work)
        pool.shutdown(wait=False)
        while not wait([done], LOOK_S).done:
            self.lease.turn()
            for check in checks:
                check()
            if self._stopping.is_set():
                raise CancelledError
        return done.result()

    def _refuse(self, served: ServedEngine, version: WeightVersion, error: Exception) -> None:
        """Keep serving the previous weights after an error about `version`, unless the engine is to blame."""
        if not self.engine.is_healthy(served.url):  # a death of the engine is no fault of the version
            raise EngineError(f"the engine died while {version.name} was loaded: {error}") from error
        self._refused.note(version)
        self._complain(f"refused {version.name}, serving {self._serving.version.name}: {error}")
        if not self._refused.in_row % MAX_REFUSALS:
            self._refused.forgive()
            self._loading = frozenset()  # this loss is not the version's
            why = f"weights were refused {self._refused.in_row} times in a row, the last since {error}"
            raise EngineError(why) from error

    def _note_loss(self) -> None:
        """Refuse a version if two engines in a row were lost while they loaded it, or what it builds on."""
        if self._loading & self._lost:
            version = max(self._loading)
            self._refused.pass_over(version, refusals=2)
            self._complain(f"refused {version.name}: two engines in a row were lost while they loaded it")
        self._lost, self._loading = self._loading or self._lost, frozenset()

    def _complain(self, why: str) -> None:
        log.error("%s", why)
        self._show(trouble=why, refusals=self._refused.in_row)

    def _show(self, **changes: object) -> None:
        """Publish what the engine does; where the file system refuses that, the next beat shows it."""
        try:
            self.lease.publish(**changes)
        except StorageError as error:
            log.warning("not shown yet: %s", error)

    def _must_end(self) -> bool:
        self.lease.turn()  # every loop of this object asks
        try:
            with atomic.storage(self.run.control):
                return self._stopping.is_set() or self._is_ordered_to_end()
        except StorageError as error:  # the engine serves on; a client that was evicted reconnects
            log.warning("looking again: %s", error)
            return False

    def _is_ordered_to_end(self) -> bool:
        if self.run.stop.exists() or self.run.finished.exists():
            return True
        if not self.run.drain.exists():
            return False
        self._watcher.look()
        return not self._watcher.live("rollout")  # draining rollout workers still need the engine
