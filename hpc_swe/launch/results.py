"""Give away what a run has learned, and delete what nobody needs any more."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hpc_swe.base import tables
from hpc_swe.base.errors import ConfigError, CorruptRecord
from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store import atomic, folders, sharing, weights
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import control
from hpc_swe.roles.coordinator import selection


def choose(run: RunDir, config: RunConfig, wanted: str) -> WeightVersion:
    """Return the version that a word names: best, newest, or its folder's name.

    An empty word names the best one, or the newest where no evaluation says which is best.
    Raise ConfigError if there is no such version, if the best one was deleted, or if the version is a delta,
    which no other program opens.
    """
    by_name = {version.name: version for version in weights.published(run)}
    if wanted in ("", "best"):
        best = selection.best(run, config.eval) if config.mode == "grpo" else None
        of_best = [version.name for version in by_name.values() if best and version.step == best.step]
        if not of_best and (best or wanted):
            why = f"the weights of step {best.step} are gone" if best else "the run has no evaluation"
            raise ConfigError(f"{run.evals}: {why}; name another version, for example --version newest")
        wanted = of_best[-1] if of_best else "newest"
    name = max(by_name, key=lambda each: by_name[each], default="") if wanted == "newest" else wanted
    full = [each for each in by_name if _parent(run, by_name[each]) is None]
    if name not in full:
        what = "only what changed since the version before" if name in by_name else "no such version"
        raise ConfigError(
            f"{run.weights / name}: {what}; name one of: {', '.join(full) or 'there is none yet'}"
        )
    return by_name[name]


def _parent(run: RunDir, version: WeightVersion) -> WeightVersion | None:
    """Return the version that a delta changes; None for a full one, and for the model of the run."""
    if not run.weight(version).exists():
        return None
    return folders.manifest(run.weight(version), WeightManifest).parent


def export(run: RunDir, version: WeightVersion, out: Path) -> None:
    """Copy a version to a new folder, all or nothing, and check what was copied.

    Raise ConfigError if the folder exists, and CorruptRecord if a file is not what the learner published.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists; name a folder that is not there yet with --out")
    source = run.weight(version)
    listed, stage = folders.manifest(source, WeightManifest), folders.staging(out)
    try:
        for name, info in listed.files.items():
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, stage / name)
            if folders.describe(stage / name) != info:
                raise CorruptRecord(
                    f"{source / name}: not what the learner published; export another version"
                )
        os.rename(stage, out)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: the run has deleted it meanwhile; export a newer one") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def serving(config: RunConfig, folder: Path, name: str) -> str:
    """Return the line for a shell that serves a folder of weights to other programs, without the run.

    Raise ConfigError if the run's engine serves no weights.
    """
    words = config.engine.serving(folder, name, config.rollout.context)
    if not words:
        raise ConfigError(f"[engine] {type(config.engine).__name__} has no weights to serve")
    words = [*words, "--enable-auto-tool-choice", "--tool-call-parser", config.rollout.tool_parser]
    if arguments := config.rollout.template_arguments:
        spelled = ", ".join(f'"{key}": {str(value).lower()}' for key, value in arguments.items())
        words += ["--default-chat-template-kwargs", f"{{{spelled}}}"]
    return shlex.join(words)


@dataclass(frozen=True)
class Leftover:
    """A leftover of a run is what one word of `launch clean` deletes."""

    name: str
    folders: Sequence[Path]
    loss: str
    """What can no longer be done without it."""


def leftovers(run: RunDir, config: RunConfig) -> list[Leftover]:
    """Return the parts of a run, those first that nobody misses."""
    state = [run.batches, run.checkpoints, *map(run.spool, SPOOLS)]
    return [
        Leftover("pages", [run.report, run.tensorboard], "nothing: both are drawn again"),
        Leftover(
            "traces", [run.stacks, run.skipped(0).parent], "what processes did that were stuck, bad batches"
        ),
        Leftover("versions", _other_versions(run, config), "weights other than the best and the newest"),
        Leftover("state", state, "the run cannot go on; status, show, report and export still work"),
    ]


def _other_versions(run: RunDir, config: RunConfig) -> list[Path]:
    """List the versions that are neither the newest, nor the best, nor what a delta among these builds on."""
    published = weights.published(run)
    best = selection.best(run, config.eval) if config.mode == "grpo" else None
    kept = set[WeightVersion]()
    for version in published:
        parent = version if version == published[-1] or (best and version.step == best.step) else None
        while parent is not None:
            kept.add(parent)
            parent = _parent(run, parent)
    return [run.weight(version) for version in published if version not in kept]


def overview(found: Sequence[Leftover]) -> Table:
    """Return a table of all parts with their sizes."""
    table = tables.table(["part", "folders", "lost with it"], ["files", "MB"])
    for part in found:
        files = [path for folder in part.folders for path in folder.rglob("*") if path.is_file()]
        names = ", ".join(folder.name for folder in part.folders)
        size = sum(path.stat().st_size for path in files) / 1e6
        names = f"{names.partition(',')[0]}, .." if len(part.folders) > 5 else names
        table.add_row(part.name, names, part.loss, f"{len(files):,}", f"{size:,.1f}")
    return table


def delete(run: RunDir, config: RunConfig, chosen: Sequence[Leftover]) -> None:
    """Delete parts of a run; without its state the run counts as finished.

    Raise ConfigError if processes of the run are left, which may need them.
    """
    if jobs := control.alive(run, config):
        raise ConfigError(f"{run.root}: {len(jobs)} of its jobs are left; `launch stop` it first")
    others = {"inference"} if config.inference.url else set()  # somebody else runs these engines
    by_hand = tuple(role for role, count in config.counts.items() if not count and role not in others)
    if cells := [name for name in atomic.names(run.nodes) if name.startswith(by_hand)]:
        raise ConfigError(
            f"{run.nodes}: processes that were started by hand may run: {', '.join(cells[:8])}; end them, "
            "and delete what the killed ones have left there"
        )
    for part in chosen:
        if part.name == "state":
            run.finished.touch()
        for folder in part.folders:
            folders.remove(folder)
    run.make_folders()
    sharing.share(run, sharing.is_shared(run))
