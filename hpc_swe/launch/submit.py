"""Submit the jobs that a run lacks: desired minus alive. `decide` is pure, and `tick` acts on it.

launch/ is read before the queue, so the queue can only be newer; and mkdir reserves a submission. So two
ticks at once submit once. A third tick may void what a slow one is about to submit, which wastes one
submission.
"""

import logging
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, checkpoints, orders, skipped, submissions, supervision, weights
from hpc_swe.base.store.submissions import ConfirmedSubmission, LatestSubmission, Submitted
from hpc_swe.cluster.executors.base import INTERPRETER, Job, Submission, own_environment
from hpc_swe.config.job_counts import desired, processes
from hpc_swe.config.settings import RunConfig

log = logging.getLogger(__name__)

GENERATIONS = 3
"""Submissions of a role that may fail one after another before it counts as stuck on a cluster."""
FAILED = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL")
OPEN = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING")
"""States that accounting may still have for jobs that have left the queue."""
REST_S = 600.0  # seconds for which nothing is submitted for a role that is stuck
FRESH_S = 300.0  # longest life of what a tick knows of the queue; one question to Slurm may take a minute


@dataclass(frozen=True)
class Decision:
    """Describe what a tick does for one role."""

    missing: int = 0
    """Jobs to submit."""
    cancel: list[str] = field(default_factory=list)
    """Surplus jobs that still wait, and jobs that will never start."""
    close: str = ""
    """Id of a job that shows that the open submission succeeded; it is noted."""
    doubt: bool = False
    """The open submission shows no job; the next tick voids it."""
    void: bool = False
    """Jobs of the open submission that turn up later must end."""


@dataclass(frozen=True)
class TickResult:
    """Describe what a tick did."""

    submit: dict[Role, int] = field(default_factory=dict)
    cancel: list[str] = field(default_factory=list)
    stuck: dict[Role, str] = field(default_factory=dict)
    """Role -> the reason why nothing is submitted, or why its jobs wait for a person."""
    lost: list[Role] = field(default_factory=list)
    """Stuck roles without a live job."""
    refused: list[Role] = field(default_factory=list)
    """Stuck roles whose jobs a cluster's scheduler refused just now; it may accept them later."""
    running: list[str] = field(default_factory=list)
    """Ids of the jobs that run."""
    orders: list[str] = field(default_factory=list)
    """Those that stand, so that nothing is submitted."""

    def reasons(self, roles: Iterable[Role]) -> str:
        """Say why some of the stuck roles are stuck, each reason once, after its roles."""
        found: dict[str, list[Role]] = {}
        for role in roles:
            found.setdefault(self.stuck[role], []).append(role)
        return "; ".join(f"{', '.join(roles)}: {why}" for why, roles in found.items())


def decide(wanted: int, jobs: Sequence[Job], newest: LatestSubmission) -> Decision:
    """Decide for one role from its jobs in the queue and its newest submission."""
    living = [job for job in jobs if job.state != "broken" and job.submission not in newest.voided]
    broken = [job.job for job in jobs if job not in living]
    shown = [job.job for job in jobs if job.submission == newest.number]
    if newest.is_open and not shown and not newest.is_doubted:
        return Decision(cancel=broken, doubt=True)
    waiting = sorted((job.submission, job.job) for job in living if job.state == "waiting")
    surplus = waiting[len(waiting) - max(0, min(len(waiting), len(living) - wanted)) :]
    return Decision(
        missing=max(0, wanted - len(living)),
        cancel=broken + [job for _, job in surplus],
        close=shown[0].partition("_")[0] if newest.is_open and shown else "",
        void=newest.is_open and not shown,
    )


def failures(
    histories: Sequence[ConfirmedSubmission], endings: Mapping[str, str] | None, living: Collection[int]
) -> list[ConfirmedSubmission]:
    """List the failed ones of the last submissions, newest first, back to the last one that did not fail.

    A submission that has left the queue without a note is skipped while accounting may still report it: on a
    busy cluster accounting is minutes behind the queue. Without accounting it has failed: nothing else tells
    of jobs that die before `jobs.run`, and a wrong guess costs one rest.

    `histories` begin with the oldest one. `endings` are accounting's record of submissions that did not note
    their end, None without accounting. The submissions `living` have, or may have, a job in the queue.
    """
    found: list[ConfirmedSubmission] = []
    for history in reversed(histories):
        has_failed = history.number not in living and _has_failed(history, endings)
        if has_failed is False:
            break
        if has_failed:
            found.append(history)
    return found


def generations(run: RunDir, config: RunConfig) -> int:
    """Return how many failed submissions make a role stuck: on one machine no other node may do better.

    A verdict that gives up ends jobs itself, and the coordinator then orders STOP.
    """
    return 1 if config.executor.is_here and not supervision.read(run).gave_up else GENERATIONS


def submission(run: RunDir, config: RunConfig, role: Role, number: int, count: int) -> Submission:
    """Describe some jobs of a role, in the environment of the run's start; that of cron has no modules.

    Before the run is made, its name for the scheduler is that of the folder.
    """
    run_id, environment = run.root.name, own_environment()
    if run.manifest.exists():
        made = atomic.get(run.manifest, RunManifest)
        run_id, environment = made.run_id, made.environment
    words = [environment.get(INTERPRETER, sys.executable), "-P"]  # import nothing from the working folder
    words += ["-m", "jobs.run", role, str(run.root), f"--submission={number}"]
    return Submission(
        run_id=run_id,
        role=role,
        number=number,
        count=count,
        processes=processes(role, config),
        command=words,
        environment=environment,
        code=str(run.code),
    )


def tick(run: RunDir, config: RunConfig, *, rests: bool = True, fresh_s: float = FRESH_S) -> TickResult:
    """Submit missing jobs; under an order, such as that of a finished run, cancel those that do not run yet.

    A role whose submissions fail pauses if this tick `rests`. Raise SchedulerError, and submit nothing, when
    the scheduler does not answer, or its answer is older than `fresh_s` because this process was frozen.
    """
    began = time.monotonic()
    if orders.active(run):
        return _cancel_waiting(run, config, fresh_s)
    wanted, refusal = _wanted(run, config)
    newest, queue, decided = _decide_all(run, config, wanted)
    if orders.active(run):  # an order that emptied the queue was written before
        return _cancel_waiting(run, config, fresh_s)
    _require_fresh(began, fresh_s)
    for role, decision in decided.items():
        _settle(run, role, newest[role].number, decision)
    cancel = [job for decision in decided.values() for job in decision.cancel]
    config.executor.cancel(cancel)
    missing = {role: decision.missing for role, decision in decided.items() if decision.missing}
    stuck = _stuck(run, config, {role: newest[role] for role in missing}, queue) if rests else {}
    submit: dict[Role, int] = {}
    refused: list[Role] = []
    for role in (role for role in missing if role not in stuck):
        try:
            submit[role] = _submit(run, config, role, newest[role].number, missing[role])
        except ConfigError as error:
            stuck[role] = str(error)
            if not config.executor.is_here:  # on this machine nothing passes by itself
                refused.append(role)
    stuck |= {"learner": refusal} if refusal else {}
    stuck |= {job.role: f"job {job.job} is held: {job.reason}" for job in queue if job.state == "held"}
    lost = [role for role in stuck if all(job.role != role for job in queue)]
    submitted = {role: submit[role] for role in decided if submit.get(role)}
    running = [job.job for job in queue if job.state == "running"]
    return TickResult(submitted, cancel, stuck, lost, refused, running)


def _cancel_waiting(run: RunDir, config: RunConfig, fresh_s: float) -> TickResult:
    """Cancel the jobs that do not run: each would wait for its turn, start, read the order and end."""
    began = time.monotonic()
    queue = config.executor.queue(run)
    running = [job.job for job in queue if job.state == "running"]
    waiting = [job.job for job in queue if job.state != "running"]
    _require_fresh(began, fresh_s)
    if found := orders.active(run):  # no start has removed the order meanwhile
        config.executor.cancel(waiting)
    return TickResult(cancel=waiting if found else [], running=running, orders=found)


def _require_fresh(began: float, fresh_s: float) -> None:
    if (age_s := time.monotonic() - began) > fresh_s:  # others have submitted, and waiting jobs run by now
        raise SchedulerError(f"the queue was read {age_s:.0f} s ago; the next tick looks again")


def _wanted(run: RunDir, config: RunConfig) -> tuple[dict[Role, int], str]:
    """Return how many jobs of each role should run, and why there can be no learner; empty when it can be."""
    wanted = desired(config)
    if "learner" in wanted and checkpoints.is_trained(run, weights.newest(run), config.steps):
        wanted["learner"] = 0  # it has finished before the others
    refusal = skipped.refusal(run, config.learner.max_skipped) if wanted.get("learner") else ""
    return (dict.fromkeys(wanted, 0) if refusal else wanted), refusal  # the others would work for nothing


def _decide_all(
    run: RunDir, config: RunConfig, wanted: Mapping[Role, int]
) -> tuple[dict[Role, LatestSubmission], list[Job], dict[Role, Decision]]:
    newest = {role: submissions.newest(run, role) for role in wanted}
    queue = config.executor.queue(run)
    decided = {
        role: decide(count, [job for job in queue if job.role == role], newest[role])
        for role, count in wanted.items()
    }
    return newest, queue, decided


def _has_failed(submission: ConfirmedSubmission, endings: Mapping[str, str] | None) -> bool | None:
    """Return None while accounting does not know."""
    started = submission.started
    if started and all(job.seconds >= 0 for job in started):
        return all(job.code for job in started)  # jobs.run gives up only after its retries
    if endings is None:
        return not started
    ending = endings.get(submission.note.job, "RUNNING")
    return None if ending.startswith(OPEN) else ending.startswith(FAILED)


def _stuck(
    run: RunDir, config: RunConfig, newest: Mapping[Role, LatestSubmission], queue: Sequence[Job]
) -> dict[Role, str]:
    known = {role: submissions.history(run, role, 2 * GENERATIONS) for role in newest}
    needed = generations(run, config)
    histories = {role: history for role, history in known.items() if len(history) >= needed}
    silent = [
        each.note.job
        for history in histories.values()
        for each in history
        if not each.started or any(job.seconds < 0 for job in each.started)
    ]
    endings = config.executor.endings(silent)
    stuck: dict[Role, str] = {}
    for role, history in histories.items():
        failed = failures(history, endings, _living(role, history, newest[role], queue))
        last = history[-1].number  # also when accounting does not know yet what has become of it
        if len(failed) >= needed and submissions.rested_s(run, role, last) < REST_S:
            codes = ", ".join(f"exit code {job.code} on {job.host}" for job in failed[0].started[:3])
            why = (endings or {}).get(failed[0].note.job) or codes or "no job reported its start"
            which = f"its last {needed} submissions failed" if needed > 1 else "its last submission failed"
            stuck[role] = f"{which} ({why}); see {run.logs(role)}"
    return stuck


def _living(
    role: Role, history: Sequence[ConfirmedSubmission], newest: LatestSubmission, queue: Sequence[Job]
) -> set[int]:
    """Return the submissions that have a job in the queue, or may have one.

    The history is read after the queue, so another tick may have submitted, or confirmed, what it did not
    show yet. Jobs of a void submission end without a note.
    """
    seen = newest.number - newest.is_open
    unseen = {each.number for each in history if each.number > seen}
    return {job.submission for job in queue if job.role == role} | unseen | newest.voided


def _settle(run: RunDir, role: Role, number: int, decision: Decision) -> None:
    if decision.close:
        _note(run, role, number, decision.close, 0)
    if decision.doubt:
        submissions.mark(run, role, number, submissions.DOUBTED)
    if decision.void:
        submissions.mark(run, role, number, submissions.VOID)


def _submit(run: RunDir, config: RunConfig, role: Role, last: int, missing: int) -> int:
    """Submit jobs and return their number: 0 when another tick does so."""
    submitted = 0
    while submitted < missing:
        last, count = last + 1, min(missing - submitted, config.executor.array_size)
        if not submissions.take(run, role, last):
            break
        try:
            with atomic.storage(run.logs(role)):  # the next ticks find out what has become of it
                job = config.executor.submit(run, submission(run, config, role, last, count))
        except ConfigError:
            submissions.release(run, role, last)
            raise
        _note(run, role, last, job, count)
        log.info("submitted %d %s as job %s", count, role, job)
        submitted += count
    return submitted


def _note(run: RunDir, role: Role, number: int, job: str, count: int) -> None:
    noted = Submitted(job=job, count=count, host=socket.gethostname(), at=time.time())
    atomic.put(run.submitted(role, number), noted)
