"""Publish weight versions and checkpoints: all ranks write into one staging folder, and rank 0 commits it.

Checksums are divided among the ranks: each file is read by one of them.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

from hpc_swe.base.errors import CorruptRecord, LostRace
from hpc_swe.base.records import (
    CheckpointManifest,
    FileInfo,
    Manifest,
    ProbeScore,
    TensorInfo,
    WeightManifest,
    WeightVersion,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, skipped, weights
from hpc_swe.models.policies.base import Carrier, ExportingLearner, Learner, Ranks
from hpc_swe.roles.learner.collective import on_all_ranks, on_rank_zero
from hpc_swe.roles.learner.probe import FIRST_IDS

INCARNATION = re.compile("[0-9]{2}|[1-9][0-9]{2,3}")

L = TypeVar("L", bound=ExportingLearner)
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshots:
    """Decide which versions are full snapshots, which a user can open, and which are deltas."""

    every: int = 1
    """A version is full when so many minus one before it were deltas; 1 makes all full."""
    multiples: Sequence[int] = ()
    """Versions of steps that are multiples of one of these are full."""
    last: int = -1
    """The version of this step is full."""

    def carrier(self, step: int, deltas: int | None) -> Carrier:
        """Return how to export `step` after so many deltas in a row; None: there is no parent."""
        if self.every == 1:
            return "full"
        is_kept = step == self.last or any(step % multiple == 0 for multiple in self.multiples if multiple)
        return "base" if deltas is None or deltas + 1 >= self.every or is_kept else "delta"


class Publisher(Generic[L]):
    """Publish the weights and checkpoints of one incarnation, each step at most once."""

    def __init__(
        self,
        run: RunDir,
        learner: L,
        incarnation: int,
        writer: str,
        snapshots: Snapshots,
        probe_ids: Sequence[int] = FIRST_IDS,
    ) -> None:
        self._run, self._learner, self._ranks = run, learner, learner.ranks
        self._probe_ids = probe_ids
        self._incarnation, self._writer, self._snapshots = incarnation, writer, snapshots
        self._parent: WeightVersion | None = None
        """The version whose values the learner keeps."""
        self._deltas = 0
        self._exported: int | None = None
        self._saved: int | None = None
        self.saving_s = 0.0
        """Seconds that the last checkpoint took, even one of an earlier start; 0 before any."""

    def restore(self: "Publisher[Learner]") -> None:
        """Load the newest undamaged checkpoint; keep the initial weights when there is none.

        Raise CorruptRecord if no checkpoint is intact and the batches to repeat are deleted.
        """
        for folder, manifest in on_rank_zero(self._ranks, lambda: _checkpoints(self._run)):
            damaged = _damaged(folder, manifest.files, self._ranks)
            if damaged:
                log.error("skipped checkpoint %s: damaged %s", folder, ", ".join(damaged))
                continue
            self._learner.load(folder)
            self._saved, self.saving_s = self._learner.step, manifest.saving_s
            log.info("resumed %s at step %d", folder, self._learner.step)
            return
        on_rank_zero(self._ranks, lambda: _require_first_batch(self._run))

    def publish_weights(self) -> None:
        """Publish the current weights as a version."""
        if self._exported == self._learner.step:
            return
        version = WeightVersion(incarnation=self._incarnation, step=self._learner.step)
        is_alone = self._parent is None or on_rank_zero(
            self._ranks, lambda: weights.is_full_wanted(self._run)
        )
        carrier = self._snapshots.carrier(version.step, None if is_alone else self._deltas)
        parent, self._parent = self._parent if carrier == "delta" else None, None  # should this one fail
        learner = self._learner
        if parent is not None and learner.deltas_of_model:
            parent = WeightVersion()
        times = [time.monotonic()]
        with self._stage(self._run.weight(version)) as (stage, final):
            parts = self._export(stage, carrier)
            times.append(time.monotonic())
            scores: list[ProbeScore] = []
            files = self._describe(stage, lambda: scores.append(self._probe()))
            times.append(time.monotonic())
            manifest = WeightManifest(
                writer=self._writer,
                files=files,
                version=version,
                tensors={name: tensor for part in parts for name, tensor in part.items()},
                probe=scores[0],
                parent=parent,
            )
            self._commit(stage, final, manifest)
        times.append(time.monotonic())
        self._exported = self._learner.step
        self._parent, self._deltas = version, 0 if parent is None else self._deltas + 1
        size = sum(info.size for info in manifest.files.values())
        if self._ranks.rank == 0:
            kind, spent = "full" if parent is None else "delta", [b - a for a, b in pairwise(times)]
            line = "exported %s: %s, %d bytes; %.2f s to write, %.2f to verify, %.2f to commit"
            log.info(line, version.name, kind, size, *spent)

    @property
    def ends_in_delta(self) -> bool:
        """Whether the last version is a delta, which no other program opens."""
        return self._deltas > 0

    def republish_weights(self) -> None:
        """Publish the current weights as a full version, under the next incarnation: no folder changes."""
        self._incarnation = on_rank_zero(self._ranks, lambda: _take_next(self._run, self._incarnation))
        self._exported = self._parent = None
        self.publish_weights()

    def require_newest(self) -> None:
        """Raise LostRace on all ranks when another learner has started since."""
        on_rank_zero(self._ranks, self.check_newest)

    def check_newest(self) -> None:
        """Raise LostRace when another learner has started since: this one's node was taken for dead."""
        if (newest := _newest_incarnation(self._run)) > self._incarnation:
            raise _lost(self._run, newest, self._incarnation)

    def _export(self, stage: Path, carrier: Carrier) -> list[dict[str, TensorInfo]]:
        """Return what each rank has exported; weights that are not finite end the learner."""
        try:
            mine = on_all_ranks(self._ranks, lambda: self._learner.export(stage, carrier))
            return self._ranks.gather(mine)
        except FloatingPointError as error:  # on every rank
            why, step = str(error), self._learner.step
            check = self.check_newest
            on_rank_zero(self._ranks, lambda: skipped.refuse_weights(self._run, step, why, check))
            raise

    def publish_checkpoint(self: "Publisher[Learner]") -> None:
        """Publish the current training state."""
        step = self._learner.step
        if self._saved == step:
            return
        began = time.monotonic()
        with self._stage(self._run.checkpoint(step, self._incarnation)) as (stage, final):
            self._learner.save(stage)
            manifest = CheckpointManifest(
                writer=self._writer,
                files=self._describe(stage),
                saving_s=time.monotonic() - began,
                step=step,
                incarnation=self._incarnation,
                tensor_parallel=self._learner.tensor_parallel,
            )
            self._commit(stage, final, manifest)
        self._saved, self.saving_s = step, time.monotonic() - began
        if self._ranks.rank == 0:
            log.info("saved step %d", step)

    def publish_last(self: "Publisher[Learner]") -> None:
        """Publish the last weights, and a checkpoint of the same incarnation; both together end training."""
        self.publish_weights()
        self._saved = None  # one that an earlier start saved does not count
        self.publish_checkpoint()

    @contextmanager
    def _stage(self, final: Path) -> Iterator[tuple[Path, Path]]:
        self.require_newest()
        stage = on_rank_zero(self._ranks, lambda: folders.staging(final))
        try:
            # One rank writes the first, small files while the others wait: it must not fail for lack of room.
            on_rank_zero(self._ranks, lambda: folders.require_room(stage))
            yield stage, final
        except BaseException:
            folders.discard(stage)
            raise

    def _commit(self, stage: Path, final: Path, manifest: Manifest) -> None:
        """Publish a stage, unless another learner has started while it was filled."""
        on_rank_zero(self._ranks, lambda: folders.commit(stage, final, manifest, self.check_newest))

    def _describe(self, stage: Path, meanwhile: Callable[[], None] = lambda: None) -> dict[str, FileInfo]:
        names = on_rank_zero(self._ranks, lambda: _files(stage))
        return _divide(self._ranks, names, lambda name: folders.describe(stage / name), meanwhile)

    def _probe(self) -> ProbeScore:
        learner, ids = self._learner, list(self._probe_ids)
        return ProbeScore(token_ids=ids, logprobs=learner.logprobs(ids), tolerance=learner.tolerance)


def take_incarnation(run: RunDir) -> int:
    """Reserve a number that no earlier start of this run's learner had."""
    number = _newest_incarnation(run) + 1
    while True:
        try:
            with atomic.storage(run.incarnations):
                (run.incarnations / f"{number:02d}").mkdir()
            return number
        except FileExistsError:
            number += 1


def _take_next(run: RunDir, incarnation: int) -> int:
    """Reserve the number after one's own; raise LostRace when another learner has it."""
    try:
        with atomic.storage(run.incarnations):
            (run.incarnations / f"{incarnation + 1:02d}").mkdir()
    except FileExistsError:
        raise _lost(run, incarnation + 1, incarnation) from None
    return incarnation + 1


def _lost(run: RunDir, other: int, own: int) -> LostRace:
    return LostRace(f"{run.incarnations}: a learner has started as {other:02d}, and this one is {own:02d}")


def _newest_incarnation(run: RunDir) -> int:
    taken = (name for name in atomic.names(run.incarnations) if INCARNATION.fullmatch(name))
    return max(map(int, taken), default=0)


def _files(stage: Path) -> list[str]:
    return sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())


def _checkpoints(run: RunDir) -> list[tuple[Path, CheckpointManifest]]:
    """List the checkpoints with readable manifests, the last written first.

    When the weights of a later step were not finite, those after the last export may not be either, and come
    last; but one whose next batch is gone would wait for it in vain.
    """
    found = []
    for name in atomic.names(run.checkpoints):
        folder = run.checkpoints / name
        try:
            manifest = folders.manifest(folder, CheckpointManifest)
        except (CorruptRecord, FileNotFoundError) as error:
            log.error("skipped checkpoint %s: %s", folder, error)
            continue
        found.append((folder, manifest))
    found.sort(key=lambda pair: (pair[1].incarnation, pair[1].step), reverse=True)
    exported = (weights.newest(run) or WeightVersion()).step
    if skipped.read(run).broken > exported:
        found.sort(key=lambda pair: pair[1].step > exported or not run.batch(pair[1].step).exists())
    return found


def _require_first_batch(run: RunDir) -> None:
    """Refuse to start at step 0 when retention has deleted the first batch: it would never come."""
    left = [name for name in atomic.names(run.batches) if name.startswith("step_")]
    if left and not run.batch(0).exists():
        raise CorruptRecord(
            f"{run.checkpoints}: no checkpoint is intact, and the batches before {left[0]} are gone; "
            f"put a checkpoint back, or start another run from the newest of {run.weights}"
        )


def _damaged(folder: Path, files: dict[str, FileInfo], ranks: Ranks) -> list[str]:
    def is_intact(name: str) -> bool:
        path, info = folder / name, files[name]
        with atomic.storage(path):
            return path.exists() and path.stat().st_size == info.size and folders.describe(path) == info

    return [name for name, intact in _divide(ranks, sorted(files), is_intact).items() if not intact]


def _divide(
    ranks: Ranks,
    names: Sequence[str],
    act: Callable[[str], T],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, T]:
    """Call `act` for each name in a thread of one of the ranks; return all answers on every rank.

    This thread calls `meanwhile`, which may let the ranks act together.
    """
    share = names[ranks.rank :: ranks.size]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = pool.map(act, share)
        meanwhile()
        answers = on_all_ranks(ranks, lambda: dict(zip(share, found, strict=True)))
    return {name: answer for part in ranks.gather(answers) for name, answer in part.items()}
