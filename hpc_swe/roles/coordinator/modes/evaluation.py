"""Evaluate on held-out tasks: during training every `every` steps, or as a run of its own.

An evaluation is a set of groups of split eval, one per task, whose members are all decodings and samples.
They go through the same spools and ledger as training groups, and sort before them. Infrastructure failures
are retried as in training; an attempt that fails to the end counts as not resolved.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from hpc_swe.base import intervals
from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import Outcome, RolloutRequest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, weights
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config.settings import EvalConfig
from hpc_swe.roles.coordinator.batching.groups import Group, Key, Ledger, Member, failure_cause
from hpc_swe.roles.coordinator.batching.samples import sampled_tokens
from hpc_swe.roles.coordinator.collect import ResultCollector
from hpc_swe.roles.coordinator.dispatch import request
from hpc_swe.roles.coordinator.selection import EvalRate, rate_of, select, steps_of
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot

SHARE = 4  # during training, evaluation uses at most one slot in four
OUTSTANDING = 512  # open requests in a run of its own: no folder should contain thousands

log = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Run evaluation rounds, each named by the step of its weights; with every = 0 there is one, ``eval``.

    The groups of step n have the numbers from n times the number of tasks on, so a change of `eval.every`
    cannot give results of one round to another.
    """

    run: RunDir
    tasks: Sequence[str]
    config: EvalConfig
    seed: int
    metrics_log: Log
    every: int = 0
    export_every: int = 1
    """Steps between two versions of the weights."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Task -> part of a mixture."""
    _done: set[str] = field(default_factory=set, init=False)
    """Labels of the tables that exist."""
    _read: set[str] = field(default_factory=set, init=False)
    """Labels of the tables that were read."""
    _rates: dict[int, EvalRate] = field(default_factory=dict, init=False)
    """Step -> what the decoding says that selects the best weights."""

    def __post_init__(self) -> None:
        self._list_done()
        last = max(self._rates, default=0)
        if self.label(last) in self._done:  # the coordinator before may have died before it logged the round
            with suppress(CorruptRecord):
                self._report(last, evals.read(self.run.eval_table(self.label(last))))

    def label(self, step: int) -> str:
        """Return the name of a round's table."""
        return f"step_{step:06d}" if self.every else "eval"

    def step(self, key: Key) -> int:
        """Return the step at which the round of a group is due."""
        return key[1] // max(1, len(self.tasks))

    @property
    def has_lost_patience(self) -> bool:
        """Return whether so many evaluations in a row were no better that training should end."""
        best = select(self._rates)
        return bool(self.config.patience and best and best.rounds_since >= self.config.patience)

    def kept_steps(self, ledger: Ledger) -> set[int]:
        """Return the step of the best weights so far, and that of the round under way."""
        best, steps = select(self._rates), self._under_way(ledger)[:1] if self.every else []
        return {*steps, *([best.step] if best else [])}

    def expects(self, key: Key) -> list[RolloutRequest] | None:
        """Return the requests of one task of a round; None when its table exists, and for other splits."""
        step, place = divmod(key[1], max(1, len(self.tasks)))
        is_round = key[0] == "eval" and bool(self.tasks) and (step % self.every if self.every else step) == 0
        if not is_round or self.label(step) in self._done:
            return None
        return [
            request(self.seed, "eval", key[1], index, self.tasks[place], self.config.decodings[label])
            for index, (label, _) in enumerate(self.config.attempts)
        ]

    def progress(self, ledger: Ledger) -> dict[str, list[float]]:
        """Return the progress of the current round, for the status."""
        groups = [group for key, group in ledger.groups.items() if key[0] == "eval"]
        closed = [member for group in groups for member in group.members if member.state != "open"]
        return {
            "evaluation/done": [float(len(closed))],
            "evaluation/resolved": [float(sum(_outcome(member) == "resolved" for member in closed))],
            "evaluation/infra": [float(sum(_outcome(member) == "infra_error" for member in closed))],
        }

    def iterate(self, collector: ResultCollector, snapshot: RunSnapshot) -> str:
        """Request as many episodes as the limits allow, and write the table when all are done.

        Returns:
            What the round waits for; empty when no round is unfinished.
        """
        self._list_done()
        self._forget(collector)  # of rounds that another coordinator finished
        step = self._current(collector.ledger, snapshot)
        if step is None:
            return ""
        keys: list[Key] = [("eval", step * len(self.tasks) + place) for place in range(len(self.tasks))]
        if snapshot.has_room:
            self._request(keys, collector, snapshot)
        groups = [collector.ledger.groups[key] for key in keys if key in collector.ledger.groups]
        waiting = len(keys) - sum(not group.is_open for group in groups)
        if waiting:
            return f"evaluation {self.label(step)}: {waiting} of {len(keys)} tasks"
        self._write(step, groups)
        self._forget(collector)
        # The learner may have ended meanwhile: then the last round is due.
        return self.iterate(collector, snapshot)

    def _list_done(self) -> None:
        self._done = {name.removesuffix(".parquet") for name in atomic.names(self.run.evals)}
        if not self.every:
            return
        for label, step in steps_of(self._done - self._read).items():
            self._read.add(label)
            self._enter(step, label)

    def _enter(self, step: int, label: str) -> None:
        try:
            self._rates[step] = rate_of(evals.read(self.run.eval_table(label)), self.config)
        except CorruptRecord as error:
            log.warning("no solve rate of step %d: %s", step, error)

    def _forget(self, collector: ResultCollector) -> None:
        collector.forget(collector.ledger.drop(lambda key: key[0] == "eval" and self.expects(key) is None))

    def _current(self, ledger: Ledger, snapshot: RunSnapshot) -> int | None:
        """Return the step of the oldest unfinished round, else of the one that is due now."""
        if not self.tasks or not self.config.decodings:
            return None
        if under_way := self._under_way(ledger):
            return under_way[0]
        newest, nodes = snapshot.newest, snapshot.endpoints if self.every else []
        others = [v for node in nodes for v in weights.recent(node.versions, newest) if v != newest]
        if others or self.has_lost_patience:  # engines keep later weights while a learner repeats steps
            return None
        step = due(newest.step, self.every, self.export_every)
        return None if step is None or self.label(step) in self._done else step

    def _under_way(self, ledger: Ledger) -> list[int]:
        return sorted({group // len(self.tasks) for split, group in ledger.groups if split == "eval"})

    def _request(self, keys: Sequence[Key], collector: ResultCollector, snapshot: RunSnapshot) -> None:
        members = len(self.config.attempts)
        limit = max(members, snapshot.slots // SHARE) if self.every else OUTSTANDING
        groups = collector.ledger.groups
        taken = sum(m.state == "open" for key in keys if key in groups for m in groups[key].members)
        for key in keys:
            if key not in groups and taken + members <= limit:
                collector.request(key, snapshot)
                taken += members

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        labels = self.config.attempts
        rows = [_attempt(m, *labels[m.request.index]) for group in groups for m in group.members]
        table = self.run.eval_table(self.label(step))
        try:
            evals.write(table, rows, publish=atomic.write_new)
        except FileExistsError:  # another coordinator's, which decides alike for all readers
            rows = evals.read(table)
        self._list_done()
        self._report(step, rows)

    def _report(self, step: int, rows: Sequence[Attempt]) -> None:
        best = select(self._rates)
        values = {"solve/best": best.rate, "solve/best_step": float(best.step)} if best else {}
        for label in self.config.decodings.keys() & {row.sampling for row in rows}:
            values |= summary(label, rows)
            values |= self._by_part(label, rows)
        log.info("evaluation %s: %s", self.label(step), values)
        if self.has_lost_patience:
            log.info("early end: no better evaluation in %d rounds (eval.patience)", self.config.patience)
        self.metrics_log.write(step, values)

    def _by_part(self, label: str, rows: Sequence[Attempt]) -> dict[str, float]:
        parts = sorted(set(self.parts.values()))
        own = {part: [row for row in rows if self.parts.get(row.task_id) == part] for part in parts}
        return {
            f"solve/eval_part/{part}/{label}": intervals.solve_rate(intervals.outcomes(own[part], label)).mean
            for part in parts
            if len(parts) > 1 and own[part]
        }


def due(newest: int, every: int, export_every: int) -> int | None:
    """Return the step of the round that begins with the weights of step `newest`; None when none does.

    It begins with the first exported weights at or after its step. A round that did not begin with them is
    left out: later weights would be evaluated under its name.
    """
    step = newest - newest % every if every else 0
    first = -(-step // export_every) * export_every
    return step if newest == first or not every else None


class Evaluating:
    """Do the work of a run that only evaluates."""

    def __init__(self, run: RunDir, evaluator: Evaluator, max_attempts: int) -> None:
        self._evaluator = evaluator
        self._collector = ResultCollector(run, Ledger(max_attempts), evaluator.expects)

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Do what can be done now, without waiting."""
        self._collector.collect(snapshot)
        waits_for = self._evaluator.iterate(self._collector, snapshot)
        recent = self._evaluator.metrics_log.recent | self._evaluator.progress(self._collector.ledger)
        return Progress(waits_for, 0, recent, self._collector.errors)


def summary(label: str, rows: Sequence[Attempt]) -> dict[str, float]:
    """Return the metrics of one decoding: its solve rate with the 95 % interval over tasks, and others."""
    outcomes = intervals.outcomes(rows, label)
    rate = intervals.solve_rate(outcomes)
    return {
        f"solve/eval/{label}": rate.mean,
        f"solve/eval_low/{label}": rate.low,
        f"solve/eval_high/{label}": rate.high,
        f"solve/eval_any/{label}": fmean(max(solved) for solved in outcomes.values()),
        f"infra/eval/{label}": fmean(row.outcome == "infra_error" for row in rows if row.sampling == label),
    }


def _attempt(member: Member, label: str, sample: int) -> Attempt:
    request, scored = member.request, member.scored
    attempt = Attempt(
        task_id=request.task_id,
        index=request.index,
        sampling=label,
        sample=sample,
        retries=request.attempt,
        outcome=_outcome(member),
        reward=scored.score.reward if scored and member.state == "done" else None,
    )
    if scored is None:
        return attempt
    episode, score, timing = scored.episode, scored.score, scored.episode.timing
    return msgspec.structs.replace(
        attempt,
        exit_status=episode.exit_status.value,
        turns=len(episode.turns),
        sampled_tokens=sampled_tokens(episode),
        sandbox_s=timing.sandbox_s,
        engine_s=timing.engine_s,
        tools_s=timing.tools_s,
        episode_s=timing.total_s,
        grading_s=score.seconds,
        queue_s=member.queue_s,
        calls=[call.name for message in episode.messages for call in message.tool_calls],
        versions=sorted({v.name for t in episode.turns for s in t.spans for v in (s.oldest, s.newest)}),
        submission=episode.submission,
        passed=score.passed,
        failed=score.failed,
        detail=(failure_cause(scored) if member.state == "failed" else "") or score.detail,
        messages=episode.messages,
        record=msgspec.msgpack.encode(scored),
    )


def _outcome(member: Member) -> Outcome:
    """Return the outcome; attempts that always failed on infrastructure count as infra_error.

    That holds whatever the grader said about the last of them.
    """
    if member.state != "done" or member.scored is None:
        return "infra_error"
    return member.scored.score.outcome
