"""python -m hpc_swe.status RUN: what a run is doing, on one screen.

All of it is read in the run folder, but for what waits in the queue, which one question to the scheduler
tells. When the scheduler is silent, the screen says so and shows the rest.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_swe import cli
from hpc_swe.errors import HpcSweError, StorageError, boundary
from hpc_swe.plugins.executors.base import Job
from hpc_swe.records import RoleStatus, StatusReport
from hpc_swe.rundir import RunDir
from hpc_swe.runs import existing
from hpc_swe.runs.view import ASK_S, RunReader, RunView, duration

BARS = " _.-=*#@"
WIDE, BAR, NAME = 20, 16, 24
REDRAW_S = 2.0
LINES = 8  # of errors: all else fits above them on a screen of 40
HEADLINES = (
    "reward/mean",
    "solve/train",
    "solve/eval",
    "infra/eval",
    "evaluation",
    "groups/signal_rate",
    "staleness/mean",
    "staleness/max",
    "rate/sampled_tokens",
    "episodes/turns",
    "episodes/infra_rate",
    "batch/tokens",
)
"""Curves and families of curves; TensorBoard has all."""
MEANINGS = {
    "DRAIN": "nothing new is begun",
    "STOP": "all processes exit",
    "FINISHED": "the run has done all its steps",
}


def render(view: RunView, width: int = 80) -> RenderableType:
    """One screen of at most 40 lines, of plain ASCII."""
    report = view.report
    told: list[str | Table] = [*_head(view), "", _roles(view, width), *_engines(view)]
    told += ["", _spools(report)] if report else []
    told += ["", _curves(report)] if report and report.recent else []
    errors = [view.queue.silence, *view.queue.failures, *(report.errors[-LINES // 2 :] if report else [])]
    told += _folded([f"error: {line}" for line in errors if line], width)
    return Group(*(part if isinstance(part, Table) else Text(part[:width]) for part in told))


def spark(values: Sequence[float]) -> str:
    """Values as one line of characters, low to high."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return BARS[3] * len(values)
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _head(view: RunView) -> list[str]:
    report = view.report
    orders = [f"order: {name} stands: {MEANINGS.get(name, 'unknown')}" for name in view.orders]
    if report is None:
        return [view.name, *orders, "waits for the coordinator, which has not reported yet"]
    waits = [f"waits for {report.waits_for}"] if report.waits_for else []
    return [_progress(view, report), *orders, *waits, *_age(view)]


def _age(view: RunView) -> list[str]:
    """What to think of a report that nobody renews."""
    if "FINISHED" in view.orders or view.silent_s <= ASK_S:
        return []
    is_known = view.desired.get("coordinator", 0) > 0 and not view.queue.silence
    running = {job.role for job in view.queue.jobs if job.state == "running"}
    if is_known and "coordinator" not in running:
        return [f"no coordinator runs: what follows is {duration(view.silent_s)} old"]
    silence = f"the coordinator is silent for {duration(view.silent_s)}: what follows is old"
    return [silence] if view.silent_s > 60 else []


def _progress(view: RunView, report: StatusReport) -> str:
    if not view.steps:
        return view.name
    share = min(1.0, report.step / view.steps)
    left = (view.steps - report.step) * report.step_s
    bar = ("#" * round(share * BAR)).ljust(BAR, ".")
    when = f", {duration(left)} left at {report.step_s:.3g} s a step" if left > 0 else ""
    return f"{view.name[:NAME]}  step {report.step}/{view.steps} [{bar}] {share:.0%}{when}"


def _roles(view: RunView, width: int) -> Table:
    columns = ("desired", "running", "waiting")
    table = _table("role", *columns, *(("alive", "silent") if view.report else ("submitted",)))
    table.add_column(_cell("why not running"), max_width=max(10, width - 58))
    reported = {status.role: status for status in view.report.roles} if view.report else {}
    for role, desired in view.desired.items():
        jobs = [job for job in view.queue.jobs if job.role == role]
        counts = Counter(job.state for job in jobs)
        known = [counts["running"], len(jobs) - counts["running"]]
        told = ["?", "?"] if view.queue.silence else [str(count) for count in known]
        since = view.queue.submitted_s.get(role)
        leases = ["-" if since is None else f"{duration(since)} ago"]
        if view.report:
            status = reported.get(role, RoleStatus(role=role, desired=desired, alive=0))
            leases = [str(status.alive), str(status.silent)]
        _add(table, role, str(desired), *told, *leases, _reasons(jobs))
    return table


def _reasons(jobs: Sequence[Job]) -> str:
    marks = {"waiting": "", "held": " (held)", "broken": " (never starts)"}
    counts = Counter(f"{job.reason}{marks[job.state]}" for job in jobs if job.state != "running")
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def _engines(view: RunView) -> list[str]:
    if view.report is None:
        return []
    counts = Counter(" > ".join(v.name for v in e.versions) for e in view.engines)
    serve = ", ".join(f"{count} at {name or 'nothing'}" for name, count in sorted(counts.items()))
    engines = f"; engines: {serve or 'none serves'}" if "inference" in view.desired else ""
    return ["", f"newest weights {view.report.newest.name}{engines}"]


def _spools(report: StatusReport) -> Table:
    table = _table("spool", "ready", "claimed", "dead", "oldest lies")
    for name, depth in report.spools.items():
        counts = [str(depth.get(state, 0)) for state in ("ready", "claimed", "dead")]
        oldest = report.oldest_s.get(name)
        _add(table, name, *counts, "-" if oldest is None else duration(oldest))
    return table


def _curves(report: StatusReport) -> Table:
    table = _table("curve", "last", "lowest", "highest")
    table.add_column(_cell("last steps"))
    names = [n for head in HEADLINES for n in sorted(report.recent) if n == head or n.startswith(head + "/")]
    for name in names[: len(HEADLINES)]:
        values = report.recent[name][-WIDE:]
        numbers = (values[-1], min(values), max(values))
        _add(table, name, *(f"{number:.4g}" for number in numbers), spark(values))
    return table


def _table(first: str, *columns: str) -> Table:
    """Names and numbers stay whole at any width; what a screen has no room for is cut at its right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column(first, no_wrap=True, overflow="crop")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, overflow="crop")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(_cell, cells))
    for column, cell in zip(table.columns, cells, strict=True):
        if column.no_wrap:
            column.min_width = max(column.min_width or len(str(column.header)), len(cell))


def _cell(text: str) -> Text:
    return Text(text, overflow="crop", no_wrap=True)


def _folded(lines: Sequence[str], width: int) -> list[str]:
    """Long lines go on below, as far as the screen reaches."""
    return [line[i : i + width] for line in lines for i in range(0, min(len(line), 2 * width), width)][:LINES]


def _watch(reader: RunReader, run: RunDir, console: Console) -> None:
    with Live(_screen(reader, console), console=console, auto_refresh=False) as live:
        is_over = False
        while not is_over:
            time.sleep(REDRAW_S)
            is_over = run.finished.exists()  # before the look, so that the last screen is of the end
            live.update(_screen(reader, console), refresh=True)


def _screen(reader: RunReader, console: Console) -> RenderableType:
    try:
        return render(reader.look(), console.width)
    except (HpcSweError, OSError) as error:  # a file half gone, or a file system away for a while
        return Text(f"error: {error}; looking again")


@cli.command
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hpc_swe.status", description="Show what a run is doing.")
    parser.add_argument("run", type=cli.folder)
    parser.add_argument(
        "--watch", action="store_true", help="redraw every two seconds until the run has finished"
    )
    arguments = cli.parse(parser)
    run, console = RunDir(arguments.run), Console(highlight=False)
    with boundary(StorageError, f"look at {run.root}"):
        reader = RunReader(run, existing.load(run))
        if arguments.watch:
            _watch(reader, run, console)
        else:
            console.print(render(reader.look(), console.width))


if __name__ == "__main__":
    main()
