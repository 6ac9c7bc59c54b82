"""Make buggy programs from code that works: python -m hpc_swe.make_bugs SOURCE... --out FOLDER.

A source is `stdlib`, a module of the standard library, `module.py:test_module.py`, or a folder with tests.
Functions are changed in one place each. A change is kept if it makes tests fail that pass for the original,
judged by the run's own grader in its own sandbox. Every attempt is a line of a file, so the same command
continues after an interruption.
"""

import argparse
import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from rich.table import Table

from hpc_swe.agents.sandboxes.base import ImageSandboxes, WatchedSandboxes
from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError, StorageError, boundary
from hpc_swe.base.store import atomic
from hpc_swe.base.tables import bars, console, say
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.makers.bugs import statements
from hpc_swe.makers.bugs.attempts import VALID
from hpc_swe.makers.bugs.mutations import Module, Mutant, chosen
from hpc_swe.makers.bugs.originals import with_copies
from hpc_swe.makers.bugs.sources import CodeSource, Search
from hpc_swe.makers.bugs.surveys import Survey, needed, survey
from hpc_swe.makers.bugs.trials import TrialPlace
from hpc_swe.makers.bugs.workers import Attempted, TrierWorkers, attempt
from hpc_swe.tasks import task_checks

SPLITS = ("train", "validation", "test")
TRIED, SURVEYS = "tried.jsonl", "surveys.jsonl"
TIMEOUT_S = 30.0
ROWS = 4
"""Changes when rows of an earlier release must not stand beside new ones: they hide less, for example."""
REMEDY = "delete the file, or choose another --out"


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of trying a mutant."""

    task_id: str
    source: str
    kind: str
    verdict: str
    """``valid``, or why the mutant was rejected."""
    split: str = ""
    row: dict[str, Any] = {}


@dataclass(frozen=True)
class UntriedBug:
    """Hold a candidate: a mutant of a source that may be tried."""

    source: CodeSource
    survey: Survey
    mutant: Mutant

    @property
    def task_id(self) -> str:
        """Name the task by its module and its change."""
        return f"{self.source.name.replace('/', '.').removesuffix('.py')}-{self.mutant.digest[:12]}"

    def split(self, seed: int, by: Literal["function", "module"]) -> str:
        """Return the split of a function, which its copies share: 80, 10 and 10 in a hundred."""
        key = self.mutant.function.digest if by == "function" else self.source.name
        number = int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest(), 16) % 10
        return SPLITS[max(0, number - 7)]


def surveyed(place: TrialPlace, sources: Sequence[CodeSource], out: Path, jobs: int) -> list[Survey]:
    """Return a survey of each source, under a progress bar; those on disk are not made again."""
    path = out / SURVEYS
    task_checks.create(path)
    known = {one.name: one for one in task_checks.journal(path, Survey, REMEDY)}
    todo = [source for source in sources if source.name not in known]
    kept = needed(place) if todo else None
    with bars() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("sources", total=len(sources), completed=len(sources) - len(todo))
        for source in [each for each in todo if kept and kept.has(each)]:
            todo.remove(source)
            known[source.name] = Survey(name=source.name, reason="pytest or the debugger needs the original")
            task_checks.append(path, known[source.name])
            progress.advance(bar)
        futures = [pool.submit(survey, place, source) for source in todo]
        try:
            for future in as_completed(futures):
                one = future.result()
                known[one.name] = one
                task_checks.append(path, one)
                progress.update(bar, description=one.name, advance=1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [known[source.name] for source in sources]


def candidates(
    pairs: Iterable[tuple[CodeSource, Survey]], per_function: int, seed: int
) -> tuple[list[UntriedBug], Counter[str]]:
    """Return the mutants to try, in an order that the seed decides, and how many were left out and why."""
    left_out: Counter[str] = Counter()
    found: dict[str, UntriedBug] = {}
    for source, one in pairs:
        module = Module(source.files[source.target])
        for function in module.functions:
            if {part.lstrip("_") for part in function.name.split(".")[:1]} & source.twins:
                left_out["functions that an extension module has too"] += 1
                continue
            if function.name.rpartition(".")[2] in source.copied:
                left_out["functions that the image has in another file, too"] += 1
                continue
            if not any(test.ran(function.first_line, function.last_line) for test in one.tests.values()):
                left_out["functions that no usable test runs"] += 1
                continue
            mutants = list(module.mutants(function))
            taken = chosen(mutants, per_function, seed)
            left_out["mutants beyond --per-function"] += len(mutants) - len(taken)
            for mutant in taken:
                left_out["mutants equal to one of another source"] += mutant.digest in found
                found.setdefault(mutant.digest, UntriedBug(source, one, mutant))
    order = sorted(found, key=lambda digest: hashlib.sha256(f"{seed} {digest}".encode()).digest())
    return [found[digest] for digest in order], left_out


@dataclass(frozen=True)
class Maker:
    """Try candidates and write each result down."""

    workers: TrierWorkers
    out: Path
    seed: int
    split_by: Literal["function", "module"]

    def run(self, found: Sequence[UntriedBug], limit: int) -> list[Tried]:
        """Try what was not tried, until `limit` tasks are valid (0: all), under a progress bar."""
        path = self.out / TRIED
        task_checks.create(path)
        tried = {one.task_id: one for one in task_checks.journal(path, Tried, REMEDY)}
        todo = [each for each in found if each.task_id not in tried]
        valid = sum(one.verdict == VALID for one in tried.values())
        with bars() as progress, self.workers.pool() as pool:
            bar = progress.add_task("mutants", total=len(found), completed=len(found) - len(todo))
            waiting = iter(todo)
            running = {self._submit(pool, each): each for each in islice(waiting, 2 * self.workers.jobs)}
            while running and not (limit and valid >= limit):
                future = next(as_completed(running))
                one = self._tried(running.pop(future), *future.result())
                tried[one.task_id] = one
                task_checks.append(path, one)
                valid += one.verdict == VALID
                progress.update(bar, description=f"{valid} valid tasks", advance=1)
                running |= {self._submit(pool, each): each for each in islice(waiting, 1)}
        return [tried[each.task_id] for each in found if each.task_id in tried]

    @staticmethod
    def _submit(pool: Executor, one: UntriedBug) -> Future[Attempted]:
        return pool.submit(attempt, one.source, one.survey, one.mutant, one.task_id)

    def _tried(self, candidate: UntriedBug, verdict: str, row: dict[str, Any]) -> Tried:
        return Tried(
            task_id=candidate.task_id,
            source=candidate.source.name,
            kind=candidate.mutant.kind,
            verdict=verdict,
            split=candidate.split(self.seed, self.split_by),
            row=row if verdict == VALID else {},
        )


def write(tried: Iterable[Tried], out: Path, limit: int) -> dict[str, int]:
    """Write one parquet file for each split; return the number of tasks of each."""
    import pyarrow as pa

    valid = [one for one in tried if one.verdict == VALID]
    counts = {}
    for split in SPLITS:
        rows = [one.row for one in valid[: limit or None] if one.split == split]
        counts[split] = len(rows)
        if rows:
            atomic.put_table(out / f"{split}.parquet", pa.Table.from_pylist(rows), atomic.write_secret)
        else:
            (out / f"{split}.parquet").unlink(missing_ok=True)
    return counts


def overview(tried: Sequence[Tried], left_out: Counter[str], reasons: Counter[str]) -> Iterator[Table]:
    """Yield tables of what was made and what was left out, with the reasons."""
    shown = tables.table(("sources",), ("count",))
    for reason, count in reasons.most_common():
        shown.add_row(reason, str(count))
    yield shown
    shown = tables.table(("mutants that were tried",), ("count", "share"))
    for verdict, count in Counter(one.verdict for one in tried).most_common():
        shown.add_row(verdict, str(count), f"{count / len(tried):.0%}")
    shown.add_row("all", str(len(tried)), "")
    yield shown
    shown = tables.table(("left out before a trial",), ("count",))
    for reason, count in (+left_out).most_common():
        shown.add_row(reason, str(count))
    yield shown
    shown = tables.table(("kind of change",), ("tried", "valid"))
    kinds = Counter(one.kind for one in tried)
    good = Counter(one.kind for one in tried if one.verdict == VALID)
    for kind, count in kinds.most_common():
        shown.add_row(kind, str(count), str(good[kind]))
    yield shown


def _require_same(out: Path, settings: object) -> None:
    """Refuse a folder that was begun with other sources or options: its tasks would not fit together."""
    data = msgspec.json.format(msgspec.json.encode(settings))
    path = out / "settings.json"
    with boundary(StorageError, f"{out} must be a folder that can be written"):
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} has files that are not of this command; choose another --out")
        known = path.read_bytes() if path.exists() else data
        if known == data:
            atomic.write(path, data)
            return
    raise ConfigError(
        f"{out} was begun with other sources or options, or by another release: {path} says which; choose "
        "another --out"
    )


def _read(arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration; raise ConfigError if tasks cannot be made with the options."""
    if not 0 <= arguments.hidden < 1:
        raise ConfigError(f"--hidden {arguments.hidden:g}: it must be at least 0 and below 1")
    return configuration.from_words(arguments.config)


def _parser() -> argparse.ArgumentParser:
    examples = (
        "src/mypackage --out tasks/bugs",
        "stdlib --library /usr/lib/python3.11 --out tasks/stdlib --limit 500",
    )
    parser = cli.parser("hpc_swe.make_bugs", "Make buggy programs from code that works.", *examples)
    add, count = parser.add_argument, cli.number(int, 1)
    add(
        "sources",
        nargs="+",
        help="stdlib, a module of it, module.py:test.py,.., or a folder with tests",
    )
    add("--out", type=cli.folder, required=True, help="folder of the tasks, and of what was tried")
    add(
        "--config",
        nargs="+",
        default=["configs/swepdb.toml"],
        help=f"{cli.CONFIG}, for sandbox and grader (default: configs/swepdb.toml)",
    )
    add("--image", default="python-pytest", help="image of the sandbox")
    add("--workdir", default="/work", help="folder of the files in the sandbox")
    add("--library", type=cli.path, help="standard library with its tests (default: this interpreter's)")
    add("--per-function", type=count, default=6, help="try so many mutants of each function")
    add("--hidden", type=float, default=0.5, help="share of a task's tests that the agent does not see")
    statement = "what the problem statement says: that the program has a fault, or also in which function"
    add("--statement", choices=get_args(statements.Kind), default="program", help=statement)
    add(
        "--split-by",
        choices=("function", "module"),
        default="function",
        help="what is kept whole in one split",
    )
    add("--limit", type=cli.number(int, 0), default=0, help="stop after so many valid tasks; 0 is no limit")
    add("--seed", type=int, default=0, help="decides the mutants, their order and their split")
    add(
        "--jobs",
        type=count,
        default=len(os.sched_getaffinity(0)),
        help="open so many sandboxes at a time (default: cores)",
    )
    return parser


@cli.command
def main() -> int:
    """Make the tasks that the command line asks for."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    warnings.simplefilter("ignore", SyntaxWarning)  # about code that others wrote
    arguments = cli.parse(_parser())
    config = _read(arguments)
    search = Search(arguments.library)
    sources = search.find(arguments.sources)
    chosen_settings = {
        name: value for name, value in vars(arguments).items() if name not in ("out", "limit", "jobs")
    }
    digest = hashlib.sha256(repr([(source.name, source.files) for source in sources]).encode()).hexdigest()
    made_of = {"rows": ROWS, "sources_sha256": digest}
    _require_same(arguments.out, made_of | {name: str(value) for name, value in chosen_settings.items()})
    config.sandbox.check()
    with task_checks.alone(arguments.out):
        return _make(arguments, config, search, sources)


def _make(
    arguments: argparse.Namespace,
    config: RunConfig,
    search: Search,
    sources: Sequence[CodeSource],
) -> int:
    place = TrialPlace(WatchedSandboxes(config.sandbox), arguments.image, arguments.workdir)
    if isinstance(config.sandbox, ImageSandboxes):
        sources = with_copies(place, sources)
    surveys = surveyed(place, sources, arguments.out, arguments.jobs)
    usable = [(source, one) for source, one in zip(sources, surveys, strict=True) if not one.reason]
    found, left_out = candidates(usable, arguments.per_function, arguments.seed)
    how = arguments.image, arguments.workdir, arguments.hidden, TIMEOUT_S, arguments.statement
    workers = TrierWorkers(arguments.jobs, config, *how)
    maker = Maker(workers, arguments.out, arguments.seed, arguments.split_by)
    tried = maker.run(found, arguments.limit)
    counts = write(tried, arguments.out, arguments.limit)
    for reason in search.left_out.values():
        say(f"left out: {reason}")
    reasons = Counter(one.reason or "used" for one in surveys)
    reasons["files that were left out"] = len(search.left_out)
    tables.show(console, *overview(tried, left_out, +reasons))
    files = ", ".join(
        f"{count} in {arguments.out / split}.parquet" for split, count in counts.items() if count
    )
    say(f"{sum(counts.values())} valid tasks: {files or 'none'}")
    return 0 if any(counts.values()) else 1


if __name__ == "__main__":
    main()
