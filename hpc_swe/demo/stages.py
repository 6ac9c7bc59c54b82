"""Watch a stage of a demo, and read what it has left: its newest weights and its curves."""

import logging
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from rich.progress import Progress, TaskID

from hpc_swe.base import shipped
from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.metrics import decode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import weights
from hpc_swe.base.tables import bars
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import watch
from hpc_swe.launch.view import RunView
from hpc_swe.view.evaluation.progress import episodes

log = logging.getLogger(__name__)


def of_stage(overrides: Sequence[str], files: Sequence[str]) -> Iterator[str]:
    """Yield the overrides of a stage, whose own files are named like demo_sft.

    After an override my.toml the file my_sft.toml beside it is read, if there is one.
    """
    for word in overrides:
        yield word
        path = Path(word)
        for name in files if path.suffix == ".toml" else ():
            beside = path.with_stem(f"{path.stem}_{name.removeprefix('demo_')}")
            if shipped.config(beside).exists():
                yield str(beside)


def newest(run: RunDir) -> Path:
    """Return the folder of a run's last full weights; raise HpcSweError when it published none."""
    version = weights.newest_full(run)
    if version is None:
        raise HpcSweError(f"{run.weights}: the run has ended, but published no weights")
    if version != (last := weights.newest(run)):
        log.warning(
            "%s: taking %s; %s holds only what changed", run.weights, version.name, last and last.name
        )
    return run.weight(version)


def curve(run: RunDir, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of one metric; a later line of the same step replaces an earlier one."""
    logs = sorted(run.metrics.glob("*.jsonl"))
    lines = [line for path in logs for line in decode(path.read_bytes())[0] if name in line.values]
    lines.sort(key=attrgetter("time"))
    return sorted({line.step: line.values[name] for line in lines}.items())


def watched(
    name: str, run: RunDir, config: RunConfig, timeout_s: float, each: Callable[[], None] = lambda: None
) -> None:
    """Watch a stage to its end under a progress bar, and call `each` after every look.

    Raise DeadlineError when it takes longer than `timeout_s`; then its jobs are stopped.
    """
    with bars() as progress:
        total = episodes(run, config) if config.mode == "eval" else config.steps
        bar = progress.add_task(f"{name:10}", total=total)

        def show(view: RunView | str) -> None:
            each()
            _advance(progress, bar, name, view)

        watch.watch(run, config, timeout_s, show, stop_on="error")
        progress.update(bar, completed=total)


def _advance(progress: Progress, bar: TaskID, name: str, view: RunView | str) -> None:
    report = view.report if isinstance(view, RunView) else None
    if report is None:
        return
    rewards = report.recent.get("reward/mean", [])
    state = f"reward {rewards[-1]:.2f}" if rewards else report.waits_for[:40]
    done = report.recent.get("evaluation/done", [report.step])[-1]  # episodes; else steps
    progress.update(bar, completed=done, description=f"{name:10} {state}")
