"""List the weight versions on disk, find the newest, and choose which ones retention removes.

A supervisor whose engine cannot load a delta says so here, and the learner reads it.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Literal

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders

by_step = attrgetter("step", "incarnation")
"""Sort versions by training: a learner that went back repeats the steps up to an earlier start's last."""


def published(run: RunDir) -> list[WeightVersion]:
    """List all published versions, oldest first; those of the live incarnation come last."""
    return sorted(folders.published(run.weights, WeightManifest, lambda m: m.version, run.weight))


def newest(run: RunDir) -> WeightVersion | None:
    """Return the highest version, which is the live incarnation's newest; None before any is published."""
    return max(published(run), default=None)


def newest_full(run: RunDir) -> WeightVersion | None:
    """Return the newest version that other programs open; None before any is published."""
    return max((each for each in published(run) if _kind(run, each) == "full"), default=None)


def recent(versions: Iterable[WeightVersion], newest: WeightVersion, lag: int = 0) -> list[WeightVersion]:
    """List the versions that are at most `lag` steps behind the newest, whatever their incarnation.

    While a learner that went back repeats steps, engines keep versions of more steps than the newest.
    """
    return [version for version in versions if version.step >= newest.step - lag]


def superseded(
    versions: Collection[WeightVersion], in_use: Collection[str], keep_last: int, keep_every: int
) -> list[WeightVersion]:
    """List the versions to remove: neither among the last, nor a milestone, nor named by a live lease.

    The newest is never among them, whatever the limits, nor the one of the most steps.
    """
    ordered = sorted(versions)
    kept = {*ordered[-max(1, keep_last) :], *sorted(ordered, key=by_step)[-1:]}
    return [
        version
        for version in ordered
        if version not in kept
        and version.name not in in_use
        and not (keep_every and version.step % keep_every == 0)
    ]


def report_refused(run: RunDir, version: WeightVersion) -> None:
    """Name a delta that an engine could not load, unless a newer one is named.

    A full version is not named: the engine may be at fault, and the next version loads without this one. Nor
    is a version that is gone: there is a newer one, which the supervisor loads or names next.
    """
    named = _refused(run)
    if (named is None or named < version) and _kind(run, version) == "delta":
        atomic.put(run.refused, version)


def is_full_wanted(run: RunDir) -> bool:
    """Return whether an engine could not load a delta, and no full version was published after it."""
    named = _refused(run)
    return named is not None and not any(
        version >= named and _kind(run, version) == "full" for version in published(run)
    )


def _refused(run: RunDir) -> WeightVersion | None:
    with suppress(FileNotFoundError, CorruptRecord):
        return atomic.get(run.refused, WeightVersion)
    return None


def _kind(run: RunDir, version: WeightVersion) -> Literal["full", "delta", "gone"]:
    try:
        parent = folders.manifest(run.weight(version), WeightManifest).parent
    except FileNotFoundError:  # retention has removed it
        return "gone"
    except CorruptRecord:
        return "delta"
    return "full" if parent is None else "delta"
