"""Show what a run is doing on one screen: python -m hpc_swe.status RUN.

Everything is read from the run folder, except for the jobs in the queue, which one question to the scheduler
tells. When the scheduler does not answer, the screen says so and shows the rest.
"""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import StorageError, boundary
from hpc_swe.base.records import RoleStatus, StatusReport
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.base import Job
from hpc_swe.launch import existing
from hpc_swe.launch.view import ASK_S, RunReader, RunView, duration

BARS = " _.-=*#@"
BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))
"""Bars of a terminal that shows more than ASCII."""
WIDE, BAR, NAME = 20, 16, 24
REDRAW_S = 2.0
LINES = 7  # of errors; everything else fits above them on a screen of 40
HEADLINES = (
    *("reward/mean", "solve/train", "solve/eval", "infra/eval", "evaluation", "groups/signal_rate"),
    *("staleness/mean", "staleness/max", "groups/dropped_old", "rate/sampled_tokens"),
    *("episodes/turns", "episodes/infra_rate"),
)
"""Curves and families of curves on the screen; TensorBoard has all."""
MEANINGS = {
    "DRAIN": "nothing new is started",
    "STOP": "all processes exit",
    "FINISHED": "the run has done all its steps",
}


def render(view: RunView, width: int = 80, bars: str = BARS) -> RenderableType:
    """Render one screen of at most 40 lines, in plain ASCII but for the bars of curves, the lowest first."""
    report = view.report
    parts: list[str | Table] = [*_head(view, width), "", _roles(view, width), *_engines(view)]
    parts += ["", _spools(report)] if report else []
    parts += ["", _curves(report, bars)] if report and report.recent else []
    errors = [view.stuck, view.queue.silence, *view.queue.failures]
    errors += [f"{owner}: {text}" for owner, text in report.troubles.items()][:2] if report else []
    errors += report.errors[-LINES // 2 :] if report else []
    parts += [row for line in errors if line for row in _rows(f"error: {line}", width)][:LINES]
    return Group(*(part if isinstance(part, Table) else Text(part[:width]) for part in parts))


def _rows(line: str, width: int) -> list[str]:
    """Cut a text into at most two lines of the screen, whatever breaks of lines it has."""
    line = " ".join(line.split())
    return [row for row in (line[:width], line[width : 2 * width]) if row]


def spark(values: Sequence[float], bars: str = BARS) -> str:
    """Draw values as one line of characters, from low to high."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return bars[3] * len(values)
    scale = (len(bars) - 1) / (high - low)
    return "".join(bars[round((value - low) * scale)] for value in values)


def _head(view: RunView, width: int) -> list[str]:
    orders = [f"order {name}: {MEANINGS.get(name, 'unknown')}" for name in view.orders]
    if view.report is None:
        return [view.name, *orders, "waits for the first report of the coordinator"]
    orders += _rows(f"ended early: {view.ended}", width) if view.ended else []
    waits = _rows(f"waits for {view.report.waits_for}", width) if view.report.waits_for else []
    return [_progress(view, view.report), *orders, *waits, *_age(view)]


def _age(view: RunView) -> list[str]:
    if "FINISHED" in view.orders or view.silent_s <= ASK_S:
        return []
    is_known = view.desired.get("coordinator", 0) > 0 and not view.queue.silence
    running = {job.role for job in view.queue.jobs if job.state == "running"}
    if is_known and "coordinator" not in running:
        return [f"no coordinator is running: everything below is {duration(view.silent_s)} old"]
    if view.silent_s > 60:
        return [f"the coordinator has not reported for {duration(view.silent_s)}: everything below is old"]
    return []


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
        queued = ["?", "?"] if view.queue.silence else [str(count) for count in known]
        since = view.queue.submitted_s.get(role)
        leases = ["-" if since is None else f"{duration(since)} ago"]
        if view.report:
            status = reported.get(role, RoleStatus(role=role, desired=desired, alive=0))
            leases = [str(status.alive), str(status.silent)]
        _add(table, role, str(desired), *queued, *leases, _reasons(jobs))
    return table


def _reasons(jobs: Sequence[Job]) -> str:
    marks = {"waiting": "", "held": " (held)", "broken": " (never starts)"}
    counts = Counter(f"{job.reason}{marks[job.state]}" for job in jobs if job.state != "running")
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def _engines(view: RunView) -> list[str]:
    if view.report is None:
        return []
    counts = Counter(
        ("asleep at " if e.sleeping else "at ") + (" > ".join(v.name for v in e.versions) or "nothing")
        for e in view.engines
    )
    serve = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    engines = f"; engines: {serve or 'none serves'}" if "inference" in view.desired else ""
    return ["", f"newest weights {view.report.newest.name}{engines}"]


def _spools(report: StatusReport) -> Table:
    table = _table("spool", "ready", "claimed", "dead", "oldest age")
    for name, depth in report.spools.items():
        counts = [str(depth.get(state, 0)) for state in ("ready", "claimed", "dead")]
        oldest = report.oldest_s.get(name)
        _add(table, name, *counts, "-" if oldest is None else duration(oldest))
    return table


def _curves(report: StatusReport, bars: str) -> Table:
    table = _table("curve", "last", "lowest", "highest")
    table.add_column(_cell("last steps"))
    names = [n for head in HEADLINES for n in sorted(report.recent) if n == head or n.startswith(head + "/")]
    for name in names[: len(HEADLINES)]:
        values = report.recent[name][-WIDE:]
        numbers = (values[-1], min(values), max(values))
        _add(table, name, *(f"{number:.4g}" for number in numbers), spark(values, bars))
    return table


def _table(first: str, *columns: str) -> Table:
    """Return a table that keeps names and numbers whole; a narrow screen cuts it at its right edge."""
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


def _watch(reader: RunReader, run: RunDir, console: Console) -> None:
    with Live(_screen(reader, console), console=console, auto_refresh=False) as live:
        has_finished = False
        while not has_finished:
            time.sleep(REDRAW_S)
            has_finished = run.finished.exists()  # checked first, so that the last screen shows the end
            live.update(_screen(reader, console), refresh=True)


def _screen(reader: RunReader, console: Console) -> RenderableType:
    view = reader.read()
    return _drawn(view, console) if isinstance(view, RunView) else Text(f"error: {view}; trying again")


def _drawn(view: RunView, console: Console) -> RenderableType:
    return render(view, console.width, BLOCKS if console.encoding.startswith("utf") else BARS)


@cli.command
def main() -> None:
    """Show the screen once, or until the run has finished."""
    examples = ("runs/demo-0/grpo", "runs/demo-0/grpo --watch")
    parser = cli.parser("hpc_swe.status", "Show what a run is doing.", *examples)
    parser.add_argument("run", type=cli.folder, help="folder of a run or of an evaluation")
    watch = "redraw every two seconds until the run has finished"
    parser.add_argument("--watch", action="store_true", help=watch)
    arguments = cli.parse(parser)
    run, console = RunDir(arguments.run), tables.screen()
    with boundary(StorageError, f"reading {run.root}"):
        reader = RunReader(run, existing.load(run, reads=True))
        if arguments.watch:
            _watch(reader, run, console)
        else:
            console.print(_drawn(reader.look_twice(), console))


if __name__ == "__main__":
    main()
