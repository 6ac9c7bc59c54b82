"""A run under random faults: at the end every ticket is closed exactly once, and nothing is left. Needs root.

    python -m tests.bench.soak [--minutes N] [--seed S]

Cron's ticks go on all the time, and some of them die too. At last all jobs are cancelled at once, the
cluster is mended, the run is told its last step by `launch start`, and nobody does anything but tick.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.cluster import run_kit
from tests.kit.cluster.configuration import ORDINARY
from tests.kit.cluster.hosts import PATIENCE_S
from tests.kit.cluster.run_kit import Books, Run

PAUSE_S = (4.0, 16.0)
LEARNER_S = 90.0
"""The learner takes half a minute to start; if it were hit more often, nothing would be trained."""
LAST_STEPS = 4
LEAST_KINDS = 4
MOST_TIMES = 10
"""The minutes asked for: by then so many kinds were met, or something is wrong with the faults."""


@dataclass
class Chaos:
    """Breaks something, and knows when it is to be mended."""

    run: Run
    rng: random.Random
    told: Counter[str] = field(default_factory=Counter)
    """Faults so far, by kind."""
    _mends: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)
    _spared_until: float = 0.0

    def strike(self) -> None:
        kind = self.rng.choice(KINDS)
        if what := getattr(self, f"_{kind}")():
            self.told[kind] += 1
            print(f"{time.strftime('%H:%M:%S')} {kind} {what}", flush=True)

    def mend(self, *, all_of_it: bool = False) -> None:
        """What is due, or everything."""
        due = [mend for mend in self._mends if all_of_it or mend[0] <= time.monotonic()]
        self._mends = [mend for mend in self._mends if mend not in due]
        for _, _, act in due:
            act()
        self.run.cluster.resume()

    def _later(self, what: str, most_s: float, act: Callable[[], object]) -> None:
        self._mends.append((time.monotonic() + self.rng.uniform(1.0, most_s), what, act))

    def _is_broken(self, what: str) -> bool:
        return any(name == what for _, name, _ in self._mends)

    def _job(self) -> run_kit.Job | None:
        """Any job, the learner not too often."""
        if self._is_broken("slurmctld"):
            return None
        jobs = [job for job in self.run.jobs() if job.state == "RUNNING" and self._may(job.role == "learner")]
        found = self.rng.choice(jobs) if jobs else None
        self._spare(found is not None and found.role == "learner")
        return found

    def _node(self) -> str:
        """A node that is well; empty when there is none."""
        nodes = [
            node
            for node in self.run.cluster.layout.nodes
            if not self._is_broken(node) and self._may(node.startswith("g"))
        ]
        if sum(self._is_broken(node) for node in self.run.cluster.layout.nodes) > 1:
            return ""
        node = self.rng.choice(nodes)
        self._spare(node.startswith("g"))
        return node

    def _may(self, hits_learner: bool) -> bool:
        return not hits_learner or time.monotonic() > self._spared_until

    def _spare(self, hits_learner: bool) -> None:
        if hits_learner:
            self._spared_until = time.monotonic() + LEARNER_S

    # kinds; each returns what it hit, or nothing when there was nothing to hit

    def _requeue(self) -> str:
        if job := self._job():
            self.run.cluster.run("scontrol", "requeue", job.name, user="root", check=False)
        return f"{job.role} {job.name}" if job else ""

    def _scancel(self) -> str:
        if job := self._job():
            self.run.cluster.run("scancel", job.name, check=False)
        return f"{job.role} {job.name}" if job else ""

    def _preempt(self) -> str:
        if self._is_broken("slurmctld") or not self._may(True):
            return ""
        gpus = self.rng.random() < 0.3
        self._spare(gpus)
        words = ("--nodes=2", "--partition=gpu") if gpus else ("--partition=cpu", "--cpus-per-task=7")
        command = ("sbatch", *words, "--mem=100", "--wrap=sleep 2", "--output=/dev/null")
        exclusive = ("--exclusive",) if gpus else ()
        self.run.cluster.run(*command, *exclusive, user="bob", check=False)
        return "the learner" if gpus else "rollout jobs"

    def _poweroff(self) -> str:
        if node := self._node():
            self.run.cluster.cut(node)
            self.run.cluster.node_poweroff(node)
            most_s = 60.0 if node.startswith("c") else 50.0
            self._mends.append(
                (time.monotonic() + self.rng.uniform(40.0, most_s), node, lambda: self._start(node))
            )
        return node

    def _start(self, node: str) -> None:
        if not self._is_broken("slurmctld"):
            self.run.cluster.node_start(node)
        else:
            self._later(node, 5.0, lambda: self._start(node))

    def _cut(self) -> str:
        if node := self._node():
            self.run.cluster.cut(node)
            self._later(node, 50.0, lambda: self.run.cluster.heal(node))
        return node

    def _slurmd(self) -> str:
        if node := self._node():
            name = f"slurmd@{node}"
            self.run.cluster.daemon_kill(name, signal.SIGKILL)
            self._later(node, 8.0, lambda: self.run.cluster.daemon_start(name))
        return node

    def _slurmctld(self) -> str:
        return self._daemon("slurmctld", 6.0)

    def _slurmdbd(self) -> str:
        return self._daemon("slurmdbd", 20.0)

    def _daemon(self, name: str, most_s: float) -> str:
        if self._is_broken(name):
            return ""
        self.run.cluster.daemon_kill(name, signal.SIGKILL)
        self._later(name, most_s, lambda: self.run.cluster.daemon_start(name))
        return name

    def _process(self) -> str:
        """One process of the run, any; the kernel's out-of-memory killer is no choosier."""
        node = self.rng.choice(self.run.cluster.layout.nodes)
        if not self._may(node.startswith("g")):
            return ""
        found = [p for p in self.run.cluster.processes(node) if p.uid in ORDINARY]
        if not found:
            return ""
        self._spare(node.startswith("g"))
        victim = self.rng.choice(found)
        victim.kill()
        return f"{' '.join(victim.arguments)[:60]} on {node}"

    def _login(self) -> str:
        """It dies in the middle of a tick."""
        command = [sys.executable, "-m", "hpc_swe.launch", "tick", self.run.dir.root]
        options = {"cwd": run_kit.ROOT, "env": run_kit.ENVIRONMENT, "stdout": -3, "stderr": -3}
        with self.run.cluster.popen(*command, **options):
            time.sleep(self.rng.uniform(0.5, 3.0))
            self.run.cluster.login_poweroff()
        return "node, in a tick"


KINDS = (
    "requeue",
    "scancel",
    "preempt",
    "poweroff",
    "cut",
    "slurmd",
    "slurmctld",
    "slurmdbd",
    "process",
    "login",
)


@dataclass(frozen=True)
class Report:
    """What the run's books say at the end."""

    faults: Counter[str]
    seconds: float
    steps: int
    repeated: int
    groups: list[int]
    """As the batches closed them, in their order."""
    books: Books
    ticks: int
    submissions: int
    requeues: int
    counted: Counter[str]
    """Sums of the coordinator's curves."""
    dead: int

    def __str__(self) -> str:
        rows = [
            *((f"fault: {kind}", count) for kind, count in sorted(self.faults.items())),
            ("faults", self.faults.total()),
            ("minutes", f"{self.seconds / 60:.1f}"),
            ("optimizer steps", self.steps),
            ("steps taken again", self.repeated),
            ("groups closed", len(self.groups)),
            (
                "groups closed twice or never",
                len(self.groups) - len(set(self.groups) & set(range(len(self.groups)))),
            ),
            ("episodes", self.books.episodes),
            ("episodes lost", self.books.lost),
            ("episodes trained twice", self.books.twice),
            ("ticks", self.ticks),
            ("submissions", self.submissions),
            ("requeues by Slurm", self.requeues),
            *((name, round(count)) for name, count in sorted(self.counted.items())),
            ("messages in dead/", self.dead),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def soak(run: Run, minutes: float, seed: int) -> Report:
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    chaos = Chaos(run, random.Random(seed))
    deadline = time.monotonic() + minutes * 60
    while time.monotonic() < deadline or len(chaos.told) < LEAST_KINDS:
        if time.monotonic() > deadline + (MOST_TIMES - 1) * minutes * 60:
            raise TimeoutError(
                f"{MOST_TIMES * minutes:g} minutes, and no {LEAST_KINDS} kinds of faults found anything "
                f"to hit: {dict(chaos.told)}\n{run.state()}"
            )
        chaos.strike()
        run.watch(chaos.rng.uniform(*PAUSE_S))
        chaos.mend()
    finish(run, chaos)
    return report(run, chaos, time.monotonic() - began)


def finish(run: Run, chaos: Chaos) -> None:
    """The last fault, and then nothing but ticks."""
    run.cluster.run("scancel", "--me", check=False)
    chaos.told["scancel of all"] += 1
    chaos.mend(all_of_it=True)
    last = max(run.manifests) + 1 + LAST_STEPS
    print(f"{time.strftime('%H:%M:%S')} mended; step {run.newest}, to be ended at {last}", flush=True)
    run.start(f"steps={last}")
    run.until("the run's end", run.dir.finished.exists, most_s=3 * PATIENCE_S)
    run.require_nothing_left()


def report(run: Run, chaos: Chaos, seconds: float) -> Report:
    steps = len({step for _, step in run.steps})
    started = [json.loads(path.read_text()) for path in run.dir.launches.glob("*/*/job_*.json")]
    counted: Counter[str] = Counter()
    for path in run.dir.metrics.glob("coordinator-*.jsonl"):
        for line in path.read_text().splitlines():
            values = json.loads(line)["values"]
            counted.update({name: values[name] for name in values if name in COUNTED})
    groups = [
        g
        for step in sorted(run.manifests)
        for g in (*run.manifests[step].groups, *run.manifests[step].closed)
    ]
    return Report(
        faults=chaos.told,
        seconds=seconds,
        steps=steps,
        repeated=run.repeated,
        groups=groups,
        books=run.books(0, steps),
        ticks=run.ticks,
        submissions=len(run.submissions()),
        requeues=sum(each["restarts"] for each in started),
        counted=counted,
        dead=len(list(run.dir.root.glob("*/dead/*"))),
    )


COUNTED = ("episodes/infra", "episodes/duplicates", "episodes/absent")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    with run_kit.running() as run:
        found = soak(run, arguments.minutes, arguments.seed)
    print(found)
    if arguments.out:
        arguments.out.write_text(f"{found}\n")
    return 0 if found.books.lost == found.books.twice == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
