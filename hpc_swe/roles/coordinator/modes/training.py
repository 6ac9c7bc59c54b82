"""Do the coordinator's work in GRPO: dispatch groups, collect results, publish batches.

consumes      scored/, weights/ (only which is newest)
produces      requests/, batches/step_n, archive/episodes/step_n.parquet
waits for     results of open groups; the learner, when AHEAD batches are published beyond its step
unblocked by  rollout and reward workers; a new weight version; the time limit of stragglers

A batch is published in four steps: commit the batch, write its archive, remove its messages, log its metrics.
A crash after the first leaves messages of consumed groups in scored/. The coordinator that starts next writes
the archive from them if it is missing, without those that can never be read, and then removes them. It logs
what the manifest of the newest batch says: a line that is there twice is one point of a curve.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from math import ceil

from hpc_swe.base.metrics import Log
from hpc_swe.base.records import CoordinatorState, RolloutRequest, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import checkpoints, stop_signs, task_history
from hpc_swe.base.store.spool import Spool
from hpc_swe.base.store.task_history import RunHistory
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching import batch_metrics, batches
from hpc_swe.roles.coordinator.batching.batches import BatchPlan, BatchSettings, GroupDecision
from hpc_swe.roles.coordinator.batching.groups import Group, Key, Ledger
from hpc_swe.roles.coordinator.batching.samples import add_routing, sampled_tokens
from hpc_swe.roles.coordinator.collect import ResultCollector
from hpc_swe.roles.coordinator.curriculum import TaskPlan
from hpc_swe.roles.coordinator.dispatch import RATE_FLOOR, dispatch_end
from hpc_swe.roles.coordinator.modes.evaluation import Evaluator
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot

AHEAD = 1
"""Number of batches that may be published beyond the learner's step."""

log = logging.getLogger(__name__)


class Training:
    """Train with GRPO. The object is built from the run folder at every start, and after a refused write."""

    def __init__(
        self,
        run: RunDir,
        plan_tasks: Callable[[RunHistory], TaskPlan],
        settings: BatchSettings,
        steps: int,
        evaluator: Evaluator,
        metrics_log: Log,
    ) -> None:
        self._run, self._settings, self._steps = run, settings, steps
        self._evaluator, self._log = evaluator, metrics_log
        self._decisions: dict[int, tuple[int, GroupDecision]] = {}
        self._published_at: float | None = None
        self._sign = ""
        """Why the run ends early, as the learner says."""
        limits = settings.groups
        self._farthest = ceil((limits.max_staleness + AHEAD + 1) * limits.groups_per_step / RATE_FLOOR)
        """Groups are dispatched in order of their numbers; a message of one this far ahead is foreign."""
        last = batches.newest(run)
        self.step = last.step + 1 if last else 0
        self.state = last.after if last else CoordinatorState()
        known = task_history.read(run, last.step, self.state.next_group) if last else RunHistory()
        self._tasks = plan_tasks(known)
        self._ledger = Ledger(settings.groups.max_attempts, settings.routing_bytes)
        self._unarchived = last if last and not run.archive(last.step).exists() else None
        """The newest batch, until its archive is written; no batch is published before."""
        consumed = (*last.groups, *last.closed) if last and self._unarchived else ()
        leftovers: set[Key] = {("train", group) for group in consumed}
        self._collector = ResultCollector(run, self._ledger, self._expects, leftovers)
        if last is not None:
            metrics_log.write(last.step, last.stats)

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Do what can be done now, without waiting.

        Raise LostRace if another coordinator published the batch that this one would publish next, and
        StorageError if the file system refuses a write; the caller then builds a new object.
        """
        batches.require_newest(self._run, self.step)
        self._look_for_signs()
        self._collector.collect(snapshot)
        self._ledger.close_stragglers(snapshot.worked_s, self._settings.straggler_s)
        if self._is_archived(snapshot):
            self._advance(snapshot)
        evaluating = self._evaluator.iterate(self._collector, snapshot)
        if snapshot.has_room:
            self._dispatch(snapshot)
        waits_for = self._waits_for(snapshot)
        awaits_learner = self.step > snapshot.learner_step or (self.step >= self._end and waits_for != "")
        kept, errors = self._evaluator.kept_steps(self._ledger), self._collector.errors
        return Progress(waits_for or evaluating, self.step, self._log.recent, errors, kept, awaits_learner)

    def _look_for_signs(self) -> None:
        known, self._sign = self._sign, stop_signs.read(self._run).reason
        if self._sign and not known:
            log.warning("early end: %s", self._sign)

    def _expects(self, key: Key) -> list[RolloutRequest] | None:
        split, group = key
        if split == "eval":
            return self._evaluator.expects(key) if self._evaluator.step(key) <= self._steps else None
        first = self.state.next_group
        last = max((number for kind, number in self._ledger.groups if kind == "train"), default=first - 1)
        return self._tasks.requests(group) if first <= group <= last + self._farthest else None

    def _is_archived(self, snapshot: RunSnapshot) -> bool:
        """Write the archive that the coordinator before has not written, once all results for it are read."""
        if self._unarchived and (found := self._collector.leftovers(snapshot)) is not None:
            last = self._unarchived
            archive.write(self._run.archive(last.step), found, last.groups)
            self._collector.forget_leftovers()
            self._unarchived = None
        return self._unarchived is None

    def _advance(self, snapshot: RunSnapshot) -> None:
        """Publish the next batch if its groups are closed and the learner is close enough."""
        if self.step < min(self._end, snapshot.learner_step + AHEAD + 1):
            limit = self._settings.groups.groups_per_step
            batch_plan = batches.plan_batch(self._decision, self.state, self.step, limit)
            if batch_plan is not None:
                self._publish(batch_plan, snapshot)

    def _publish(self, batch_plan: BatchPlan, snapshot: RunSnapshot) -> None:
        groups = [self._ledger.groups[("train", number)] for number in batch_plan.decisions]
        packed = batches.build_batches(self._with_routing(batch_plan), self._settings)
        values = {
            **batch_metrics.of_batch(groups, batch_plan),
            **batch_metrics.of_sources(groups, batch_plan, self._tasks.source_of),
            **batch_metrics.of_packing(packed, self._settings.batches.microbatch_tokens),
        }
        passed_over = self._tasks.passed_over
        history = self._tasks.consume(groups, batch_plan.after.next_group)
        batches.commit(self._run, batch_plan, packed, values, history=history)
        log.info("published batch %d from groups %s", batch_plan.step, batch_plan.groups)
        episodes = [m.scored for g in groups for m in g.members if m.scored is not None]
        archive.write(self._run.archive(batch_plan.step), episodes, batch_plan.groups)
        self.step, self.state = batch_plan.step + 1, batch_plan.after
        self._decisions.clear()
        consumed = self._ledger.drop(lambda key: key[0] == "train" and key[1] < self.state.next_group)
        self._collector.forget(consumed)
        values["reward/shaped"] = batch_metrics.mean_shaped(groups, self._settings.shaping)
        values |= {"curriculum/passed_over": passed_over, "curriculum/settled": self._tasks.settled_share}
        self._report(batch_plan.step, consumed, values, snapshot)

    def _with_routing(self, batch_plan: BatchPlan) -> BatchPlan:
        """Read the routing of trained episodes, which stayed in their messages because of its size."""
        chains, decisions = self._settings.batches.train_chains, dict(batch_plan.decisions)
        spool = Spool(self._run.scored, ScoredEpisode)
        for number in batch_plan.groups:
            members = self._ledger.groups[("train", number)].members
            places = {m.request.name: m.address for m in members if m.is_routed and m.address}
            episodes = []
            for cut in decisions[number].episodes:
                place = places.get(cut.episode.request.name)
                scored = spool.read(place) if place else None
                episodes.append(add_routing(cut, scored.episode, chains) if scored else cut)
            decisions[number] = replace(decisions[number], episodes=episodes)
        return replace(batch_plan, decisions=decisions)

    def _report(
        self, step: int, groups: list[Group], values: dict[str, float], snapshot: RunSnapshot
    ) -> None:
        counts = self._ledger.counts
        tokens = sum(sampled_tokens(s.episode) for group in groups for s in group.results)
        read = counts["episodes/infra"] + sum(len(group.results) for group in groups)
        values |= batch_metrics.of_queue(groups, snapshot.depths)
        values |= batch_metrics.of_collected(counts)
        values |= {name: float(counts[name]) for name in COUNTED}
        values["episodes/infra_rate"] = counts["episodes/infra"] / max(1, read)
        values["groups/open"] = float(len(self._ledger.groups))
        if self._published_at is not None:
            values["rate/sampled_tokens"] = tokens / max(1e-9, snapshot.now - self._published_at)
        self._published_at = snapshot.now
        counts.clear()
        self._log.write(step, values)

    def _dispatch(self, snapshot: RunSnapshot) -> None:
        limits = self._settings.groups
        last = min(snapshot.newest.step + limits.max_staleness, self._end - 1)
        batches, first, rate = last + 1 - self.step, self.state.next_group, self.state.signal_rate
        end = dispatch_end(first, self._has_signal, batches, limits.groups_per_step, rate)
        for group in range(first, end):
            self._collector.request(("train", group), snapshot)

    def _decision(self, number: int) -> GroupDecision | None:
        group = self._ledger.groups.get(("train", number))
        if group is None or group.is_open:
            return None
        results = len(group.results)
        if self._decisions.get(number, (-1, None))[0] != results:  # a late result may have been entered
            self._decisions[number] = (results, batches.decide(group, self.step, self._settings))
        return self._decisions[number][1]

    def _has_signal(self, number: int) -> bool | None:
        decision = self._decision(number)
        return None if decision is None else decision.status == "trained"

    @property
    def _end(self) -> int:
        """Return the number of batches of the run, which ends early when evaluations get no better."""
        return self.step if self._ends_early else self._steps

    @property
    def _ends_early(self) -> bool:
        return bool(self._sign) or self._evaluator.has_lost_patience

    def _waits_for(self, snapshot: RunSnapshot) -> str:
        """Return what the next batch waits for first; empty when training is finished."""
        if self._unarchived:
            return f"results of step {self._unarchived.step} that cannot be read, for its archive"
        if self._ends_early and snapshot.learner_step >= self.step:
            return ""
        if self.step >= self._steps and checkpoints.is_trained(self._run, snapshot.newest, self._steps):
            return ""
        if self.step >= min(self._end, snapshot.learner_step + AHEAD + 1):
            return f"the learner: step {snapshot.learner_step} of {self._end}"
        if snapshot.refusals:
            return f"{snapshot.newest.name}: {snapshot.why_refused}"
        number = self.state.next_group
        while (group := self._ledger.groups.get(("train", number))) and not group.is_open:
            number += 1
        if group is None:
            return f"newer weights than {snapshot.newest.name}, to dispatch group {number}"
        names = [m.request.name for m in group.members if m.state == "open"]
        results = f"results of {', '.join(names[:3])}{' ..' if len(names) > 3 else ''}"
        away = "the engines sleep in the learner's turn" if snapshot.endpoints else "no engine serves"
        return results if snapshot.engines else f"{results}; {away}"


COUNTED = ("episodes/infra", "episodes/duplicates", "episodes/absent", "groups/straggled")
