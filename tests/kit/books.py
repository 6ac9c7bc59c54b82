"""What a run's folder must say at its end, however often its processes were killed.

Batches go by retention, so `Books.keep` copies them while the run is under way.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpc_swe.base.records import Batch, BatchManifest, ScoredEpisode, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.config.settings import RunConfig
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching.samples import make_samples

Tokens = Counter[tuple[bytes, bytes, bytes]]
"""How often each sequence is there: its ids, the mask of those that are trained, their log-probabilities."""


@dataclass
class Books:
    """One run, and the batches and versions that were seen of it."""

    run: RunDir
    kept: Path
    versions: list[WeightVersion] = field(default_factory=list)
    """The newest version, each time that it was another."""

    def keep(self) -> None:
        """Copy new batches, and note the newest version."""
        self.kept.mkdir(exist_ok=True)
        for name in atomic.names(self.run.batches):
            if not (self.kept / name).exists():
                partial = self.kept / f".{name}"
                shutil.rmtree(partial, ignore_errors=True)
                with contextlib.suppress(shutil.Error, FileNotFoundError):  # retention has just taken it
                    shutil.copytree(self.run.batches / name, partial)
                    partial.rename(self.kept / name)
        newest = weights.newest(self.run)
        if newest is not None and newest not in self.versions[-1:]:
            self.versions.append(newest)

    @cached_property
    def batches(self) -> list[tuple[BatchManifest, list[Batch]]]:
        """Manifest and ranks' shares of every step."""
        return [self._batch(name) for name in atomic.names(self.kept)]

    def _batch(self, name: str) -> tuple[BatchManifest, list[Batch]]:
        folder = self.kept / name
        manifest = folders.manifest(folder, BatchManifest)
        shares = [
            atomic.decode(folder / file, folders.read(folder, file, manifest), Batch)
            for file in sorted(manifest.files)
            if file.startswith("rank_")
        ]
        return manifest, shares

    @cached_property
    def archived(self) -> list[ScoredEpisode]:
        """All episodes of all archives."""
        return [s for name in atomic.names(self.run.archives) for s in archive.read(self.run.archives / name)]

    @cached_property
    def episodes(self) -> dict[str, ScoredEpisode]:
        """By identity; of evaluations nothing is archived."""
        return {scored.episode.request.name: scored for scored in self.archived}

    def complaints(self, config: RunConfig) -> list[str]:
        """Everything that is not as docs/protocol.md promises; empty when all is well."""
        found = [
            *self.unfinished(config.steps),
            *self.misclosed(),
            *self.misarchived(config.groups.group_size),
            *self.unsampled(config),
            *self.disordered(),
            *torn(self.run),
        ]
        return list(found)

    def unfinished(self, steps: int) -> Iterator[str]:
        """The run has ended, and every step has its batch and its weights."""
        if not self.run.finished.exists():
            yield "the run has not finished"
        if (numbers := [manifest.step for manifest, _ in self.batches]) != list(range(len(numbers))):
            yield f"batches of steps {numbers} are not one for each step"
        newest = weights.newest(self.run)
        if newest is None or newest.step != steps:
            yield f"the newest weights are {newest.name if newest else 'none'}, not of step {steps}"

    def misclosed(self) -> Iterator[str]:
        """Groups 0 .. n are closed exactly once each."""
        closed = [group for manifest, _ in self.batches for group in (*manifest.groups, *manifest.closed)]
        if sorted(closed) != list(range(len(closed))):
            twice = [group for group, count in Counter(closed).items() if count > 1]
            never = sorted(set(range(max(closed, default=0))) - set(closed))
            yield f"groups closed twice: {twice}, never: {never}"
        if closed and self.batches[-1][0].after.next_group != len(closed):
            yield f"{len(closed)} groups closed, and the next is {self.batches[-1][0].after.next_group}"

    def misarchived(self, group_size: int) -> Iterator[str]:
        """Each member of each trained group is in the archive exactly once."""
        count = Counter(scored.episode.request.name for scored in self.archived)
        for manifest, _ in self.batches:
            for group in manifest.groups:
                names = [f"train-{group:06d}-{index:02d}" for index in range(group_size)]
                if wrong := {name: count[name] for name in names if count[name] != 1}:
                    yield f"step {manifest.step}: members of group {group} in the archive: {wrong}"
        if twice := [name for name, times in count.items() if times > 1]:
            yield f"archived more than once: {twice}"

    def unsampled(self, config: RunConfig) -> Iterator[str]:
        """What is trained is what was sampled, as bytes, and all of it; nothing is trained in two steps."""
        trained: Counter[int] = Counter(group for manifest, _ in self.batches for group in manifest.groups)
        if twice := [group for group, times in trained.items() if times > 1]:
            yield f"groups trained in two steps: {twice}"
        for manifest, shares in self.batches:
            members = [s for s in self.episodes.values() if s.episode.request.group_id in manifest.groups]
            expected, found = sampled(members, config), sequences(shares)
            if found != expected:
                more, less = (found - expected).total(), (expected - found).total()
                yield f"step {manifest.step}: {more} sequences that nobody sampled, {less} left out"

    def disordered(self) -> Iterator[str]:
        """Versions only ever grow: those published, and those of the tokens of one completion."""
        if self.versions != sorted(self.versions):
            yield f"the newest version went back: {[version.name for version in self.versions]}"
        starts = [int(name) for name in atomic.names(self.run.incarnations)]
        if sorted(starts) != list(range(1, len(starts) + 1)):
            yield f"incarnations {sorted(starts)} are not 1 .. n"
        for scored in self.archived:
            for turn in scored.episode.turns:
                stamps = [version for span in turn.spans for version in (span.oldest, span.newest)]
                if stamps != sorted(stamps):
                    yield f"{scored.episode.request.name}: versions of one completion went back"


def sampled(members: Iterable[ScoredEpisode], config: RunConfig) -> Tokens:
    """What a step has to train of some episodes."""
    found: Tokens = Counter()
    batches = config.batches
    for scored in members:
        if scored.score.reward is None or (
            batches.overlong != "train" and scored.episode.exit_status.is_overlong
        ):
            continue
        for sample in make_samples(scored.episode, 1.0, batches.train_chains, 0).samples:
            found[sample.token_ids, sample.mask, sample.logprobs] += 1
    return found


def sequences(shares: Iterable[Batch]) -> Tokens:
    """What a batch trains; fillers, which train nothing, apart."""
    found: Tokens = Counter()
    for micro in (micro for share in shares for micro in share.microbatches):
        at = 0
        for length in micro.sequence_lengths:
            words, mask = slice(4 * at, 4 * (at + length)), micro.mask[at : at + length]
            if any(mask):
                found[micro.token_ids[words], mask, micro.logprobs[words]] += 1
            at += length
    return found


def torn(run: RunDir) -> Iterator[str]:
    """Lines of metrics that cannot be read."""
    for path in sorted(run.metrics.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                json.loads(line)
            except ValueError:
                yield f"{path.name}: line {number} is torn: {line[:80]!r}"
