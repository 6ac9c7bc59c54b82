"""A run of the demo whose processes are killed and frozen at random: at its end the disk must be right.

    python -m tests.bench.chaos --model FOLDER [--faults N] [--minutes M] [--seed S] [KEY=VALUE ...]

The model must call tools, as one after the demo's warm start does. The configuration is configs/demo.toml
with its own limits, unless keys are given. Each fault hits one process of a kind chosen at random, several,
all of one role, or everything. What is frozen goes on after a random time, or never. Ticks are commands of
their own, as cron's are, and are hit as well. At last everything is killed at once, the run is told its last
step, and nothing but ticks follows. The exit code is 0 when all invariants hold, nothing is left, and the run
never stood still.
"""

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import weights
from hpc_swe.cluster.processes import start_time
from hpc_swe.launch import existing
from tests.kit.books import Books
from tests.kit.checkout import ROOT
from tests.kit.run_processes import Process, family, temporary

PR_SET_CHILD_SUBREAPER = 36
TICK_S = 5.0
LOOK_S = 0.5
LAST_STEPS = 2
"""Steps that the run has to take after the last fault."""
SPARED_S = {"learner": 75.0, "inference": 75.0, "coordinator": 20.0, "": 20.0}
"""These take long to start: if they were hit more often, nothing would ever be trained. Other roles are
spared for 5 s."""
FROZEN_S = (1.0, 60.0)
FOREVER = 0.25
"""Share of the frozen that are never told to go on."""
STILL_S = 900.0
"""Without a new version for so long the run stands still: longer than a role rests, and than a lost lease."""
LEFT_S = 90.0
"""After `stop --now` nothing may be left once this has passed."""
WAYS = {"kill": 40, "freeze": 25, "terminate": 10, "kill several": 10, "kill role": 8, "freeze role": 5}
WHOLE = {"kill everything": 2}


@dataclass
class Chaos:
    run: RunDir
    books: Books
    rng: random.Random
    words: Sequence[str]
    """What differs from the demo's configuration."""
    faults: int = 0
    hits: int = 0
    """Processes that the faults hit."""
    progress: float = 0.0
    """When a new version was seen last; 0 before the first."""
    still: list[str] = field(default_factory=list)
    """The times that the run stood still, and how."""
    files: set[Path] = field(default_factory=set)
    """Shared memory and folders of temporary files that any process had."""
    _thaws: list[tuple[float, Process]] = field(default_factory=list)
    _spared: dict[str, float] = field(default_factory=dict)
    _ticked: float = 0.0
    _ticks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    # what is done to it

    def strike(self) -> bool:
        """One fault; whether there was anything to hit."""
        now = time.monotonic()
        living = [p for p in family() if self._spared.get(p.role, 0.0) <= now]
        ways = WAYS | (WHOLE if all(until <= now for until in self._spared.values()) else {})
        way = self.rng.choices(list(ways), list(ways.values()))[0]
        victims = self._victims(way, living)
        if not victims:
            return False
        self.files |= temporary([process.pid for process in family()])
        for victim in victims:
            self._hit(way, victim, now)
        self.faults += 1
        self.hits += len(victims)
        say(f"{way}: {', '.join(f'{p.kind} {p.pid} ({p.role})' for p in victims[:6])}")
        for role in {p.role for p in victims}:
            self._spared[role] = now + SPARED_S.get(role, 5.0)
        return True

    def _victims(self, way: str, living: list[Process]) -> list[Process]:
        if not living or way in WHOLE:
            return living
        if way.endswith("role"):
            role = self.rng.choice(sorted({p.role for p in living}))
            return [p for p in living if p.role == role]
        kinds = sorted({p.kind for p in living})
        chosen = [self.rng.choice(kinds) for _ in range(self.rng.randint(2, 5) if "several" in way else 1)]
        return list({p.pid: p for kind in chosen for p in [self.rng.choice(of(kind, living))]}.values())

    def _hit(self, way: str, victim: Process, now: float) -> None:
        number = {"freeze": signal.SIGSTOP, "terminate": signal.SIGTERM}.get(way.split()[0], signal.SIGKILL)
        send(victim, number)
        if number == signal.SIGSTOP and self.rng.random() > FOREVER:
            self._thaws.append((now + self.rng.uniform(*FROZEN_S), victim))

    def thaw(self, *, all_of_it: bool = False) -> None:
        """Whoever is due, or everybody."""
        if all_of_it:
            for process in family():
                send(process, signal.SIGCONT)
        due = [thaw for thaw in self._thaws if all_of_it or thaw[0] <= time.monotonic()]
        self._thaws = [thaw for thaw in self._thaws if thaw not in due]
        for _, process in due:
            send(process, signal.SIGCONT)

    # what goes on by itself

    def look(self) -> None:
        """One round: cron's tick, the books, what is due."""
        now = time.monotonic()
        self.thaw()
        seen = len(self.books.versions)
        self.books.keep()
        if len(self.books.versions) > seen:
            self.progress = now
        if now - self._ticked > TICK_S:
            self._ticked = now
            self._ticks = [each for each in self._ticks if each.poll() is None]
            self._ticks.append(self.launch("tick"))
        reap([each.pid for each in self._ticks])
        if now - (self.progress or self._ticked) > STILL_S:
            self._stands_still(now)

    def _stands_still(self, now: float) -> None:
        """Say why, and thaw everybody, so that the other faults can be tried."""
        self.progress = now
        frozen = [f"{p.kind} ({p.role})" for p in family() if state(p.pid) == "T"]
        self.still.append(f"no new version for {STILL_S:g} s; frozen: {', '.join(frozen) or 'nobody'}")
        say(self.still[-1])
        self.thaw(all_of_it=True)

    def configuration(self, steps: int) -> list[str]:
        """The run's. A schedule that ends at step 48 has no place in a run of any length."""
        model = self.run.root.parent / "model"
        fixed = [f"model={model}", f"steps={steps}", "learner.optimizer.decay_share=0"]
        return ["configs/demo.toml", *fixed, *self.words]

    def launch(self, verb: str, *words: str) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-m", "hpc_swe.launch", verb]
        line += [*words, "--run", str(self.run.root)] if verb == "start" else [str(self.run.root), *words]
        return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=self._log())

    def _log(self) -> int:
        return os.open(self.run.root.parent / "ticks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    # its course

    def storm(self, faults: int, seconds: float) -> None:
        pause_s = seconds / faults
        while self.faults < faults:
            until = time.monotonic() + (self.rng.expovariate(1 / pause_s) if self.strike() else 1.0)
            while time.monotonic() < until:
                self.look()
                time.sleep(LOOK_S)

    def finish(self) -> int:
        """Everything dies at once, and nothing but ticks follows; the last step."""
        everything = family()
        for process in everything:
            send(process, signal.SIGKILL)
        self.faults += 1
        self.hits += len(everything)
        self._thaws.clear()
        version = weights.newest(self.run)
        last = LAST_STEPS + max(len(self.books.versions) and version.step if version else 0, self._batches())
        say(f"everything was killed; the run ends at step {last}")
        self.launch("start", *self.configuration(last)).wait()
        deadline = time.monotonic() + 4 * STILL_S
        while not self.run.finished.exists() and time.monotonic() < deadline:
            self.look()
            time.sleep(LOOK_S)
        return last

    def _batches(self) -> int:
        return 1 + max((manifest.step for manifest, _ in self.books.batches), default=-1)

    def leftovers(self) -> list[str]:
        """What outlives `stop --now`: processes, mounts, shared memory, temporary files."""
        self.launch("stop", "--now").wait()
        deadline = time.monotonic() + LEFT_S
        while (left := family()) and time.monotonic() < deadline:
            reap([])
            time.sleep(LOOK_S)
        found = [f"process {p.pid}: {p.kind} of {p.role or 'nobody'}, {state(p.pid)}" for p in left]
        for process in left:
            send(process, signal.SIGKILL)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.run.root) in line]
        found += [f"file {path}" for path in sorted(self.files) if path.exists() and path != scratch()]
        # torch keeps one cache folder a user, empty here; it is no run's.
        kept = [path for path in scratch().iterdir() if not path.name.startswith("torchinductor_")]
        return found + [f"temporary {path}" for path in kept if path not in self.files]


def of(kind: str, living: list[Process]) -> list[Process]:
    return [process for process in living if process.kind == kind]


def send(process: Process, number: signal.Signals) -> None:
    """Send `process` the signal, unless it has ended: it may end at any moment by itself."""
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive:
            os.kill(process.pid, number)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def reap(ours: list[int]) -> None:
    """Orphans that have ended, which are children of this process; `ours` are waited for elsewhere."""
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        if pid not in ours and start_time(pid) is None:
            os.waitpid(pid, os.WNOHANG)


def scratch() -> Path:
    return Path(os.environ["TMPDIR"])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def suffer(folder: Path, arguments: argparse.Namespace) -> int:
    """The whole course in a folder; the exit code."""
    shutil.copytree(arguments.model, folder / "model")
    run = RunDir(folder / "run")
    chaos = Chaos(run, Books(run, folder / "batches"), random.Random(arguments.seed), arguments.words)
    began = time.monotonic()
    chaos.launch("start", *chaos.configuration(100_000)).wait()
    while not chaos.progress and time.monotonic() < began + STILL_S:
        chaos.look()
        time.sleep(LOOK_S)
    chaos.storm(arguments.faults, arguments.minutes * 60)
    last = chaos.finish()
    left = chaos.leftovers()
    chaos.books.keep()
    config = existing.load(run)
    complaints = [*chaos.books.complaints(config), *chaos.still, *(f"left: {each}" for each in left)]
    told = [f"{chaos.faults} faults, {chaos.hits} processes hit, seed {arguments.seed}"]
    told += [f"{last} steps in {(time.monotonic() - began) / 60:.1f} minutes, {len(left)} leftovers"]
    told += [f"WRONG: {each}" for each in complaints] or ["all invariants hold"]
    print("\n".join(told))
    return 1 if complaints else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=60.0, help="over which the faults are spread")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--model", type=Path, required=True, help="one that calls the tools")
    parser.add_argument("--keep", type=Path, help="folder for the run, which then stays")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="what differs from configs/demo.toml")
    arguments = parser.parse_args()
    os.umask(0o077)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        root = (arguments.keep or Path(folder)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        os.environ |= {"TMPDIR": f"{folder}/tmp", "OMP_NUM_THREADS": "1"}
        scratch().mkdir()
        return suffer(root, arguments)


if __name__ == "__main__":
    sys.exit(main())
