"""Publish the batches of another run once more, for a learner alone: nothing is sampled.

consumes      archive/episodes/ of that run
produces      batches/step_n
waits for     the learner, when AHEAD batches are published beyond its step
unblocked by  the learner's steps

A run keeps its batches only for a while, and its archive for ever. Batch n is a function of the archive of
step n and of the settings, by the rule that made the first one, so the only state is which batches exist.
With the settings of that run each byte of a batch is the same; only the routing of experts is not archived.
"""

from itertools import groupby

import msgspec

from hpc_swe.base.errors import ConfigError, CorruptRecord
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import CoordinatorState, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.roles.coordinator.batching import batch_metrics, batches
from hpc_swe.roles.coordinator.batching.batches import BatchPlan, BatchSettings
from hpc_swe.roles.coordinator.batching.groups import Group, Member, failure_cause
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot, awaited_learner

AHEAD = 2
"""Number of batches that may be published beyond the learner's step."""


def archived_steps(source: RunDir) -> int:
    """Count the steps from 0 on whose episodes a run has archived."""
    step = 0
    while source.archive(step).exists():
        step += 1
    return step


def read_groups(source: RunDir, step: int) -> list[Group]:
    """Return the groups that a batch of a run closed, in order.

    Raise CorruptRecord if its archive is missing, or cannot be read.
    """
    path = source.archive(step)
    try:
        rows = atomic.get_table(path, ["group_id", "index", "record"]).to_pylist()
        rows.sort(key=lambda row: (row["group_id"], row["index"]))
        found = list[Group]()
        for number, members in groupby(rows, lambda row: int(row["group_id"])):
            group = Group(("train", number), [])
            for row in members:
                group.members.append(as_member(msgspec.msgpack.decode(row["record"], type=ScoredEpisode)))
            found.append(group)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not an archive of episodes: {error}; put it back") from None
    if not found:
        raise CorruptRecord(f"{path}: it holds no episode, but each batch has some; put it back")
    return found


def as_member(scored: ScoredEpisode) -> Member:
    """Return an archived episode as the member of its group that it was."""
    return Member(scored.episode.request, 0.0, scored, state="failed" if failure_cause(scored) else "done")


class ArchiveReplay:
    """Publish `steps` batches of the `source`, made by the `settings`."""

    def __init__(
        self, run: RunDir, source: RunDir, settings: BatchSettings, steps: int, metrics_log: Log
    ) -> None:
        self._run, self._source, self._settings = run, source, settings
        self._steps, self._log = steps, metrics_log
        self.step = max(batches.published_steps(run), default=-1) + 1

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Publish the batches that the learner needs next.

        Raise LostRace if another coordinator published the batch that this one would publish next.
        """
        batches.require_newest(self._run, self.step)
        while self.step < min(self._steps, snapshot.learner_step + AHEAD) and snapshot.has_room:
            self._publish()
        return awaited_learner(self._run, snapshot, self.step, self._steps, self._log.recent)

    def _publish(self) -> None:
        groups = read_groups(self._source, self.step)
        numbers = [group.key[1] for group in groups]
        decisions = {
            number: batches.decide(group, self.step, self._settings)
            for number, group in zip(numbers, groups, strict=True)
        }
        trained = [number for number in numbers if decisions[number].status == "trained"]
        if not trained:
            causes = ", ".join(sorted({each.status for each in decisions.values()}))
            raise ConfigError(
                f"{self._source.archive(self.step)}: this replay trains none of its groups "
                f"({causes}); start another with [groups] and [batches] as in {self._source.config}"
            )
        closed = [number for number in numbers if number not in trained]
        plan = BatchPlan(self.step, trained, closed, decisions, CoordinatorState(next_group=numbers[-1] + 1))
        packed = batches.build_batches(plan, self._settings)
        values = {
            **batch_metrics.of_batch(groups, plan),
            **batch_metrics.of_packing(packed, self._settings.batches.microbatch_tokens),
        }
        batches.commit(self._run, plan, packed, values)
        self._log.write(self.step, values)
        self.step += 1
