"""What clusters do to jobs, done to one run by tests/cluster/test_faults.py; the table says what it cost.

A row's clock starts with the fault, and stops when the jobs of the roles that were hit run again, beat, and
new optimizer steps were made. Where recovery is the run's own affair nobody ticks meanwhile; elsewhere one
tick is called every five seconds.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.kit.cluster.hosts import PATIENCE_S
from tests.kit.cluster.run_kit import Books, Job, Run

COLUMNS = (
    "fault",
    "recovered by",
    "seconds to recovery",
    "episodes lost",
    "trained twice",
    "learner steps lost",
)

DUPLICATE = "Duplicate jobid"
FRESH = 3
"""Steps after a recovery: of the first ones the batches may have been there before."""


@dataclass(frozen=True)
class Hit:
    roles: tuple[str, ...]
    victims: set[str] = field(default_factory=set)
    """Owners that must end."""
    mend: Callable[[], object] = lambda: None
    """What is put right once the run has recovered without it."""
    began: float = 0.0
    """On the monotonic clock; 0 is when the row began."""


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[Run], Hit]
    by: str = "itself"


@dataclass(frozen=True)
class Row:
    fault: str
    by: str
    seconds: float
    episodes: int
    lost: int
    twice: int
    steps_lost: int


# who is hit


def victims(run: Run, *jobs: Job) -> set[str]:
    """Owners of the processes of some jobs."""
    starts = tuple(f"{job.role}-{job.name}-" for job in jobs)
    found = lambda: {owner for owner in living(run) if owner.startswith(starts)}  # noqa: E731
    return set(run.until(f"a beat of {jobs}", found, ticks=False))


def living(run: Run) -> set[str]:
    """Owners of all processes that beat."""
    return {node.owner for role in run.counts for node in run.alive(role)}


def some(run: Run, role: str, count: int = 1) -> list[Job]:
    return [job for job in run.jobs(role) if job.state == "RUNNING"][:count]


def on(run: Run, node: str) -> list[Job]:
    return [job for job in run.jobs() if job.node == node and job.state == "RUNNING"]


def node_of(run: Run, wanted: str, unwanted: str = "") -> str:
    """A node where one role runs and another does not."""
    avoided = {job.node for job in run.jobs(unwanted)} if unwanted else set()
    nodes = [job.node for job in run.jobs(wanted) if job.state == "RUNNING"]
    return next((node for node in nodes if node not in avoided), nodes[0])


# faults


def cancel(role: str) -> Callable[[Run], Hit]:
    def strike(run: Run) -> Hit:
        job = some(run, role)[0]
        hit = Hit((role,), victims(run, job))
        run.cluster.run("scancel", job.name)
        return hit

    return strike


def preempt_learner(run: Run) -> Hit:
    """Somebody takes both nodes for a moment."""
    hit = Hit(("learner",), victims(run, *some(run, "learner")))
    words = ("--partition=gpu", "--nodes=2", "--exclusive", "--wrap=sleep 1", "--output=/dev/null")
    run.cluster.run("sbatch", *words, user="bob")
    return hit


def preempt_rollout(run: Run) -> Hit:
    """Somebody needs all cores of a node that higher jobs have left."""
    node = node_of(run, "rollout")
    struck = [job for job in on(run, node) if job.role == "rollout"]
    hit = Hit(("rollout",), victims(run, *struck))
    cores = 8 - len(on(run, node)) + len(struck)
    words = ("--partition=cpu", f"--nodelist={node}", f"--cpus-per-task={cores}", "--output=/dev/null")
    run.cluster.run("sbatch", *words, "--mem=100", "--wrap=sleep 1", user="bob")
    return hit


def walltime(run: Run) -> Hit:
    """Two minutes are the least that a notice of 20 s allows; the clock starts when one is warned."""
    alive = lambda: {node.owner for node in run.alive("reward")}  # noqa: E731
    before = run.until("a reward worker", alive, ticks=False)  # all may have been warned just now

    def warned() -> set[str]:
        return {o for o in before if run.sights[o].node.state == "draining" or not run.dir.node(o).exists()}

    return Hit(("reward",), run.until("a walltime", warned, ticks=False), began=time.monotonic())


def lose_power(run: Run, node: str) -> None:
    """Its network goes first: without power nobody says goodbye to who is connected."""
    run.cluster.cut(node)
    run.cluster.node_poweroff(node)


def poweroff_of_learners_node(run: Run) -> Hit:
    """It comes back when the controller has given it up; there is no other node for the learner."""
    hit = Hit(("learner",), victims(run, *some(run, "learner")))
    lose_power(run, "g2")
    run.until(
        "the controller to notice",
        lambda: all(job.state != "RUNNING" for job in run.jobs("learner")),
        ticks=False,
    )
    run.cluster.node_start("g2")
    return hit


def poweroff(run: Run) -> Hit:
    """It stays off. An engine is there, too: others wait for its answers."""
    node = node_of(run, "inference")
    hit = Hit(("rollout",), victims(run, *on(run, node)), lambda: run.cluster.node_start(node))
    lose_power(run, node)
    return hit


def cut(run: Run) -> Hit:
    """What runs behind the cut link runs on, and writes on: its view of the run folder is not cut."""
    node = node_of(run, "coordinator")
    struck = on(run, node)
    old = victims(run, *struck)
    run.cluster.cut(node)

    def both() -> bool:
        new = {n.owner for job in run.jobs() if job.restarts for n in run.alive(job.role)}
        again = {name for name in new if any(name.startswith(f"{job.role}-{job.name}-") for job in struck)}
        return bool(again - old) and bool(old & living(run))

    run.until("two incarnations of a job", both, ticks=False)
    run.cluster.heal(node)
    return Hit(tuple({job.role for job in struck}), old)


def controller_killed_after_start(run: Run) -> Hit:
    """The controller starts the job again. The node has it already, and drains itself; the job is held."""
    job = some(run, "rollout")[0]
    hit = Hit(("rollout",), victims(run, job), lambda: run.cluster.resume(DUPLICATE))
    run.cluster.run("scontrol", "requeue", job.name, user="root")

    def is_started() -> bool:
        return any(job.name == now.name and job.restarts < now.restarts for now in some(run, "rollout", 99))

    run.until("another start", is_started, ticks=False)
    run.cluster.daemon_kill("slurmctld", signal.SIGKILL)
    run.cluster.daemon_start("slurmctld")
    return hit


def controller_killed_after_submission(run: Run) -> Hit:
    """The controller forgets the submission, or only that it has started the jobs."""
    struck = some(run, "rollout", 2)
    hit = Hit(("rollout",), victims(run, *struck), lambda: run.cluster.resume(DUPLICATE))
    run.cluster.run("scancel", *(job.name for job in struck))
    run.until("the jobs' end", lambda: len(run.jobs("rollout")) == run.counts["rollout"] - 2, ticks=False)
    run.tick()
    run.cluster.daemon_kill("slurmctld", signal.SIGKILL)
    run.cluster.daemon_start("slurmctld")
    return hit


def book_closed(run: Run) -> Hit:
    run.cluster.daemon_kill("slurmdbd", signal.SIGKILL)
    return Hit(("rollout",), cancel("rollout")(run).victims, lambda: run.cluster.daemon_start("slurmdbd"))


FAULTS = {
    "walltime": Fault("walltime of reward jobs", walltime),
    "preempt-requeue": Fault("preemption, REQUEUE: the learner", preempt_learner),
    "preempt-cancel": Fault("preemption, CANCEL: rollout jobs", preempt_rollout),
    "poweroff-learner": Fault("power-off of a learner's node, which comes back", poweroff_of_learners_node),
    "poweroff": Fault("power-off of a node with a rollout job and an engine", poweroff),
    "cut": Fault("link cut and healed, two incarnations alive", cut, "next tick"),
    "slurmctld-start": Fault(
        "slurmctld killed right after a job's start", controller_killed_after_start, "next tick"
    ),
    "slurmctld-submission": Fault(
        "slurmctld killed right after a submission", controller_killed_after_submission, "next tick"
    ),
    "slurmdbd": Fault("slurmdbd down, and scancel of one array member", book_closed, "next tick"),
}


# the table


def suffer(run: Run, fault: Fault, first: int) -> tuple[Row, int]:
    """One row, and the first batch of the next. It begins when nothing is left of the one before."""
    run.until("all jobs at work", run.is_all_whole)
    repeated, begun, at = run.repeated, time.monotonic(), run.newest
    hit = fault.strike(run)
    submissions, ticks = run.submissions(), fault.by != "itself"

    def restored() -> bool:
        return not hit.victims & living(run) and run.is_whole(*hit.roles)

    run.until(f"the recovery of {hit.roles}", restored, ticks=ticks)
    since = max(at, run.newest)
    run.until("new steps", lambda: run.newest >= since + FRESH, ticks=ticks)
    seconds = time.monotonic() - (hit.began or begun)
    by = "next tick" if run.submissions() - submissions else "itself"
    hit.mend()
    last = run.newest
    books = run.books(first, last)
    row = Row(fault.name, by, seconds, books.episodes, books.lost, books.twice, run.repeated - repeated)
    print(row, flush=True)
    return row, last


def measure(run: Run, names: list[str]) -> list[Row]:
    """Every fault in turn."""
    run.until("a step", lambda: run.newest > 0)
    rows, first = [], 0
    for name in names:
        row, first = suffer(run, FAULTS[name], first)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Ending:
    """What the run's books say at its end."""

    groups: list[int]
    """As the batches closed them, in their order."""
    books: Books
    dead: int
    """Messages that nobody could read."""


def end(run: Run) -> Ending:
    """Cancel all jobs at once; nothing but ticks follows until the last step, and nothing is left."""
    run.cluster.run("scancel", "--me", check=False)
    run.cluster.resume()
    last = max(run.manifests) + 1 + FRESH
    run.start(f"steps={last}")
    run.until("the run's end", run.dir.finished.exists, most_s=3 * PATIENCE_S)
    run.require_nothing_left()
    made = [run.manifests[step] for step in sorted(run.manifests)]
    groups = [group for each in made for group in (*each.groups, *each.closed)]
    return Ending(groups, run.books(0, last), len(list(run.dir.root.glob("*/dead/*"))))


def markdown(rows: list[Row]) -> str:
    cells = [(r.fault, r.by, f"{r.seconds:.0f}", str(r.lost), str(r.twice), str(r.steps_lost)) for r in rows]
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
