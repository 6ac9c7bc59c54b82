"""Make tasks of a git history: python -m hpc_swe.mine_history REPOSITORY --out FOLDER.

Commits that change code and tests become rows in the form of SWE-bench, so that the taskset, the grader and
the checks of SWE-bench work for them. Each candidate is tried in a sandbox of its own image. A verdict is
written as soon as it is known, so the same command continues after an interruption.
"""

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_swe.agents.sandboxes.base import ImageSandboxes, WatchedSandboxes
from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError, StorageError, boundary
from hpc_swe.base.tables import bars, console, say
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.makers import history
from hpc_swe.makers.build_images import add_recipe, recipe
from hpc_swe.makers.history import REFUSALS, Candidate, Commit, RefusedCommit
from hpc_swe.makers.images.store import ImageStore
from hpc_swe.makers.mining import VERDICTS, ImageBuilder, Trial, TriedCommit
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.swebench_rows import TESTS

COMMAND = "python -m pytest -rA --tb=short --continue-on-collection-errors"
TRIALS, MADE = "trials.jsonl", ("train.txt", "eval.txt", "rows.jsonl", "taskset.toml")
"""Files of the folder: the verdicts, and what is made of them."""
EVAL_SHARE = 8
"""One task in so many is held out; these are the youngest ones."""
PROMPT = """The repository in {workdir} needs the change that is described below.

<change>
{problem_statement}
</change>

Make this change. Hidden tests decide: those of the change must pass, and those that pass today must go on
passing. Changes to tests and to the set-up of the test runner are not counted. A command that begins with
`. /opt/miniconda3/bin/activate; conda activate testbed;` finds the Python and the packages of the tests.
"""
"""Prompt of the tasks, written into their configuration."""


@dataclass(frozen=True)
class Sifting:
    """A sifting decides which commits are candidates, before any trial."""

    repository: Path
    tests: Sequence[str]
    """Patterns of the paths that are tests."""
    texts: dict[str, str]
    """Commit -> description that replaces its message."""

    def sift(
        self, commits: Iterable[Commit], limit: int | None = None
    ) -> tuple[list[Candidate], dict[str, str]]:
        """Return the first candidates, and the name of the rule that refused each commit before the last."""
        found: list[Candidate] = []
        refused: dict[str, str] = {}
        for commit in commits:
            if len(found) == limit:
                break
            try:
                parts = history.split(commit, self.tests)
                text = self.texts.get(commit.sha, "")
                found.append(history.candidate(self.repository, commit, parts, text))
            except RefusedCommit as error:
                refused[commit.sha] = error.why
        return found, refused


def run(trial: Trial, candidates: Sequence[Candidate], out: Path, jobs: int) -> list[TriedCommit]:
    """Try every candidate without a verdict that holds, under a progress bar; return all verdicts.

    Where this machine failed, a candidate is tried once more, after all others.
    Raise StorageError if the file cannot be written, or the disk is full.
    """
    task_checks.create(out)
    remedy = "delete the line to try its commit again"
    known = {tried.commit: tried for tried in task_checks.journal(out, TriedCommit, remedy)}
    todo = [one for one in candidates if not trial.is_known(one, known.get(one.commit.sha))]
    with task_checks.alone(out), bars() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("commits", total=len(candidates), completed=len(candidates) - len(todo))

        def note(tried: TriedCommit) -> None:
            task_checks.append(out, tried)
            known[tried.commit] = tried
            progress.update(bar, description=f"{tried.commit[:12]}: {tried.verdict}", advance=1)

        futures = [pool.submit(trial.run, one) for one in todo]
        try:
            for future in as_completed(futures):
                note(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        again = [one for one in todo if known[one.commit.sha].verdict == "host"]
        progress.update(bar, total=len(candidates) + len(again))
        for one in again:  # alone: too many jobs may have been its trouble
            note(trial.run(one))
    return [known[one.commit.sha] for one in candidates]


def write(folder: Path, tried: Sequence[TriedCommit], timeout_s: float) -> tuple[int, int]:
    """Write rows, lists of ids and a configuration, oldest task first; return the numbers of both splits.

    Without a task nothing is written, and what an earlier call wrote is removed, since it holds no longer.
    Raise StorageError if a file cannot be written.
    """
    made = [(one, one.row) for one in reversed(tried) if one.row is not None]
    rows = [{**msgspec.to_builtins(row), "commit": one.commit, "created_at": one.date} for one, row in made]
    ids = [row.instance_id for _, row in made]
    if not ids:
        with boundary(StorageError, f"remove the rows in {folder}"):
            for name in MADE:
                (folder / name).unlink(missing_ok=True)
        return 0, 0
    held_out = max(len(ids) // EVAL_SHARE, len(ids) > 1)
    splits = {"train": ids[: len(ids) - held_out], "eval": ids[len(ids) - held_out :]}
    tree = {
        "tasks": {split: len(names) for split, names in splits.items()},
        "taskset": {
            "type": "swebench",
            "prompt": PROMPT,
            "timeout_s": timeout_s,
            **{split: {"rows": f"{folder}/rows.jsonl", "ids": f"{folder}/{split}.txt"} for split in splits},
        },
    }
    texts = {f"{split}.txt": "".join(f"{name}\n" for name in names) for split, names in splits.items()}
    texts["rows.jsonl"] = "".join(f"{json.dumps(row)}\n" for row in rows)
    texts["taskset.toml"] = "\n".join(configuration.toml(tree)).lstrip() + "\n"
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        with boundary(StorageError, f"write {folder / name}"):
            temporary.write_text(text, encoding="utf-8")
            temporary.rename(folder / name)
    return len(splits["train"]), len(splits["eval"])


def show_candidates(commits: Sequence[Commit], refused: dict[str, str]) -> None:
    """Print each commit with what is known of it before any trial."""
    shown = tables.table(("commit", "date", "is", "files", "subject"))
    for commit in commits:
        what = refused.get(commit.sha, "a candidate")
        shown.add_row(commit.sha[:12], commit.date[:10], what, str(len(commit.paths)), commit.subject[:60])
    tables.show(console, shown)


def show_counts(counts: Counter[str]) -> None:
    """Print how many commits became tasks, or were refused, and why."""
    shown = tables.table(("verdict", "means"), ("commits",))
    for verdict, means in (*VERDICTS.items(), *REFUSALS.items()):
        if counts[verdict]:
            shown.add_row(verdict, means, str(counts[verdict]))
    tables.show(console, shown)


def _trial(arguments: argparse.Namespace, config: RunConfig) -> Trial:
    if not config.grader.reports_outcomes:
        raise ConfigError("[grader] must be one that reports every test: grader.type = 'swebench'")
    images = None
    config.sandbox.check()
    if isinstance(config.sandbox, ImageSandboxes):
        if arguments.requirements is None:
            raise ConfigError(
                "name the packages that the tests need: --requirements FILE; pytest is one of them"
            )
        source = recipe(arguments, arguments.repository, config.sandbox)
        images = ImageBuilder(ImageStore(Path(config.sandbox.images), arguments.keep_leaks), source)
    return Trial(
        name=arguments.repository.resolve().name.removesuffix(".git"),
        command=arguments.command,
        timeout_s=arguments.timeout_s,
        runs=arguments.runs,
        grader=config.grader,
        sandboxes=WatchedSandboxes(config.sandbox),
        images=images,
        tests=arguments.tests or TESTS,
    )


def _require_own(folder: Path) -> None:
    """Raise ConfigError if a folder has files, and none of an earlier call."""
    with boundary(StorageError, f"read {folder}"):
        if folder.exists() and not (folder / TRIALS).exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} has files that are not of this command; choose another --out")


def _parser() -> argparse.ArgumentParser:
    what = "Make tasks of the commits of a git history that change code and tests."
    examples = (
        "REPOSITORY --out own/tasks --dry-run",
        "REPOSITORY --out own/tasks --requirements requirements.txt",
    )
    parser = cli.parser("hpc_swe.mine_history", what, *examples)
    add, count = parser.add_argument, cli.number(int, 1)
    add("repository", type=cli.path, help="git repository, of which HEAD's history is read")
    add("config", nargs="*", help=f"{cli.CONFIG}, for sandbox and grader (default: configs/swebench.toml)")
    add("--out", type=cli.folder, required=True, help="folder for rows, verdicts and a configuration")
    add("--keep-leaks", action="store_true", help="keep commits whose image shows the solution, too")
    add("--since", default="", metavar="DATE", help="take only younger commits, as git log understands it")
    add("--limit", type=count, metavar="N", help="take only the N youngest candidates")
    add(
        "--tests",
        action="append",
        metavar="PATTERN",
        help="paths of tests, where a star also matches slashes; repeatable",
    )
    add(
        "--issues",
        type=cli.path,
        metavar="FILE",
        help='a line {"commit": ID, "text": TEXT} for each description',
    )
    add(
        "--command",
        default=COMMAND,
        help="run pytest in this way on the modules of tests that follow",
    )
    add(
        "--timeout-s",
        type=cli.number(float, 1),
        default=300.0,
        help="end the tests of a task after so long (default: %(default)g)",
    )
    add("--runs", type=count, default=3, help="run the tests so many times without the change, and with it")
    add("--jobs", type=count, default=1, help="try so many candidates at a time")
    add("--dry-run", action="store_true", help="list the commits and run nothing")
    add_recipe(parser)
    return parser


@cli.command
def main() -> int:
    """Make the tasks that the command line describes."""
    os.umask(0o022)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    arguments = cli.parse(_parser())
    commits = history.commits(arguments.repository, arguments.since)
    texts = history.described(arguments.issues, commits) if arguments.issues else {}
    sifting = Sifting(arguments.repository, arguments.tests or TESTS, texts)
    with bars() as progress:
        read = progress.track(commits, description="commits read")
        candidates, refused = sifting.sift(read, arguments.limit)
    looked = f"{len(candidates) + len(refused)} of {len(commits)} commits were looked at"
    if arguments.dry_run:
        show_candidates(commits[: len(candidates) + len(refused)], refused)
        say(f"{looked}: {len(candidates)} candidates; nothing was run")
        return 0
    if not candidates:
        show_counts(Counter(refused.values()))
        say(f"{looked}: there is no candidate; nothing was run or written")
        return 1
    _require_own(arguments.out)
    config = configuration.from_words(arguments.config or ["configs/swebench.toml"])
    trial, folder = _trial(arguments, config), arguments.out
    with trial.images.store.locked() if trial.images else nullcontext():
        tried = run(trial, candidates, folder / TRIALS, arguments.jobs)
    for one in tried:
        left_out = f"left out, since their runs differ: {', '.join(one.flaky)}" if one.flaky else ""
        if one.verdict != "task" or left_out:
            say(": ".join(filter(None, (one.commit[:12], one.verdict, one.reason or left_out))))
    show_counts(Counter([*refused.values(), *(one.verdict for one in tried)]))
    train, held_out = write(folder, tried, trial.timeout_s)
    where = f"in {folder}" if train else f"so no rows were written; {folder / TRIALS} says why"
    say(f"{looked}: {train} tasks for training and {held_out} held out, {where}")
    return 0 if train else 1


if __name__ == "__main__":
    main()
