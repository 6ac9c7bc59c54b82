"""python -m hpc_swe.status RUN: what a run is doing, read from its folder alone."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from hpc_swe.errors import HpcSweError
from hpc_swe.records import StatusReport
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

BARS = " _.-=*#@"
HEADLINES = (
    "reward/mean",
    "solve/train",
    "groups/signal_rate",
    "staleness/mean",
    "rate/sampled_tokens",
    "episodes/turns",
    "episodes/infra_rate",
    "seconds/engine",
    "seconds/grading",
)  # TensorBoard has all


def spark(values: list[float]) -> str:
    """Values as one line of characters, low to high."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def render(report: StatusReport, silent_s: float) -> RenderableType:
    """One screen."""
    roles = Table("role", "desired", "alive", title="roles")
    for role in report.roles:
        roles.add_row(role.role, str(role.desired), str(role.alive))
    spools = Table("spool", "ready", "claimed", "dead", title="spools")
    for name, depth in report.spools.items():
        spools.add_row(name, *(str(depth.get(state, 0)) for state in ("ready", "claimed", "dead")))
    recent = Table("metric", "last", "recent", title="last steps")
    for name in HEADLINES:
        values = report.recent.get(name, [])
        recent.add_row(name, f"{values[-1]:.4g}" if values else "-", spark(values))
    head = f"step {report.step}, weights {report.newest.name}, waits for {report.waits_for}"
    silence = f"coordinator silent for {silent_s:.0f} s\n" if silent_s > 60 else ""
    return Group(silence + head, roles, spools, recent, *(f"error: {line}" for line in report.errors))


def read(run: RunDir) -> RenderableType:
    """The screen of a run as it stands."""
    try:
        report = atomic.get(run.status, StatusReport)
    except FileNotFoundError:
        return f"{run.root}: the coordinator has not reported yet; its log is under {run.logs('coordinator')}"
    if run.finished.exists():
        return Group(render(report, 0.0), "the run has finished")
    return render(report, time.time() - run.status.stat().st_mtime)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hpc_swe.status", description="Show what a run is doing.")
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--watch", action="store_true", help="redraw every two seconds until the run has finished"
    )
    arguments = parser.parse_args()
    run = RunDir(arguments.run.absolute())
    try:
        if not arguments.watch:
            Console().print(read(run))
            return
        with Live(read(run), auto_refresh=False) as live:
            while not run.finished.exists():
                time.sleep(2.0)
                live.update(read(run), refresh=True)
    except (HpcSweError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    main()
