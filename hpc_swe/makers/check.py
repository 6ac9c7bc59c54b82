"""Check whether a run can train on its tasks: python -m hpc_swe.check CONFIG...

The reference must resolve a task and the empty patch must not, the same in every run, in fresh sandboxes, by
the run's own grader. A task without a reference is unproven if the empty patch fails. A task none of whose
expected values can stay outside the sandbox is unsealed, unless `grader.accept_unsealed` is set. Each check
is a line of a file, written at once, so the same command continues after an interruption. A task is checked
again when its image, tests or reference, or the grader's settings, have changed, and when the host failed.
With `taskset.checked` a run takes only usable and unproven tasks.
"""

import logging
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.table import Table

from hpc_swe.agents.sandboxes.base import ImageSandboxes, Sandboxes, WatchedSandboxes
from hpc_swe.base import cli, intervals, loader, tables
from hpc_swe.base.errors import ConfigError, EpisodeError, boundary
from hpc_swe.base.records import Score, Task
from hpc_swe.base.tables import bars, console, say
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch.view import duration
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders.base import Grader, Inspection
from hpc_swe.tasks.hidden_tests import Version, with_unsealed
from hpc_swe.tasks.patch import apply
from hpc_swe.tasks.task_checks import TAKEN, Kind, Seconds, TaskCheck

COLUMNS = ("bare", "overhead")
APPLY_TIMEOUT_S = 120.0
_NOTHING_SEALED = (
    "no expected value can stay outside the sandbox, where code could pass without a solution; assert that "
    "something == a literal, or set grader.accept_unsealed = true"
)
_MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True)
class Checker:
    """Check tasks with one grader."""

    grader: Grader
    sandboxes: Sandboxes
    runs: int
    images: Path | None = None
    """Folder of the images, for their digests; None when images are not files."""

    def check(self, task: Task, reference: str | None) -> TaskCheck:
        """Grade the reference, where there is one, and the empty patch in turns."""
        gold: list[Score] = []
        empty: list[Score] = []
        seconds: list[Seconds] = []
        versions: list[Version] = []
        unchanged = ""
        seen: Inspection | None = None
        settings, began = self._settings(task, reference), time.monotonic()
        try:
            with boundary(EpisodeError, "inspect the tests"):
                task = self.grader.complete(task, self.sandboxes)
                if reference is None:
                    reference = self.grader.reference(task, self.sandboxes)
                seen = self.grader.inspect(task, reference, self.sandboxes)
            task = with_unsealed(task, seen.unsealed if seen else {})
            for _ in range(self.runs):
                with boundary(EpisodeError, "grade"):  # swebench's parsers may raise anything
                    if reference is not None:
                        score, spent = self._timed(task, reference)
                        gold.append(score)
                        seconds += [spent] if spent else []
                    empty.append(self._grade(task, ""))
            kind, reason = judged(gold, empty)
            if kind in ("unproven", "gold_fails") and not task.base_commit:
                kind, reason = self._blamed_on_image(task, reference or "") or (kind, reason)
            if kind in TAKEN and seen and not self.grader.proves(seen):
                kind, reason = "unsealed", _NOTHING_SEALED
            if kind == "usable":
                versions, unchanged = self._changed(task, reference or "")
        except (EpisodeError, ConfigError) as error:
            kind, reason = "broken", str(error)  # also when only the search for changed tests failed
        return TaskCheck(
            task_id=task.task_id,
            verdict=kind,
            reason=reason,
            image=task.image,
            image_digest=self._image(task),
            settings=settings,
            assertions=seen.assertions if seen else 0,
            sealed=seen.sealed if seen else 0,
            unsealed=seen.unsealed if seen else {},
            remark=seen.remark if seen else "",
            gold=[score.outcome for score in gold],
            empty=[score.outcome for score in empty],
            seconds=_medians(seconds),
            spent_s=round(time.monotonic() - began, 3),
            changed_tests=versions,
            unchanged=unchanged,
        )

    def _timed(self, task: Task, reference: str) -> tuple[Score, Seconds | None]:
        """Grade the reference; return its score, and the seconds that this took if it resolves the task."""
        began = time.monotonic()
        score = self._grade(task, reference)
        whole_s = time.monotonic() - began
        if score.outcome != "resolved":
            return score, None
        bare_s, _ = _run_bare(task, reference, self.sandboxes)
        return score, Seconds(bare=bare_s, overhead=max(0.0, whole_s - bare_s))

    def _changed(self, task: Task, reference: str) -> tuple[list[Version], str]:
        with boundary(EpisodeError, "change tests"):
            return self.grader.changed_tests(task, reference, self.sandboxes)

    def _blamed_on_image(self, task: Task, reference: str) -> tuple[Kind, str] | None:
        missing = _MISSING.search(_run_bare(task, reference, self.sandboxes)[1])
        if missing is None:
            return None
        return "broken", f"its tests need the module {missing[1]}, which the image {task.image} lacks"

    def is_known(self, task: Task, reference: str | None, verdict: TaskCheck | None) -> bool:
        """Return whether a check still holds."""
        if verdict is None or verdict.verdict == "broken" or len(verdict.empty) < self.runs:
            return False
        now = self._image(task), self._settings(task, reference)
        return now == (verdict.image_digest, verdict.settings)

    def _grade(self, task: Task, submission: str) -> Score:
        """Grade a patch, and once more if the host failed."""
        try:
            return self.grader.examine(task, submission, self.sandboxes)
        except EpisodeError:
            return self.grader.examine(task, submission, self.sandboxes)

    def _image(self, task: Task) -> str:
        return "" if self.images is None else task_checks.image_digest(self.images, task.image)

    def _settings(self, task: Task, reference: str | None) -> str:
        grader = loader.dump(self.grader) if isinstance(self.grader, loader.Plugin) else {}
        more = [*task.absent, *filter(None, [task.start])]  # tasks without these keep their digests
        return task_checks.digest((grader, task.base_commit, task.files, task.tests, reference, *more))


def judged(gold: Sequence[Score], empty: Sequence[Score]) -> tuple[Kind, str]:
    """Combine the scores of all runs into a verdict and its reason."""
    for what, scores in (("the reference", gold), ("nothing", empty)):
        for number, score in enumerate(scores[1:], start=2):
            if (score.outcome, set(score.failed)) != (scores[0].outcome, set(scores[0].failed)):
                differ = _some(set(score.failed) ^ set(scores[0].failed))
                outcomes = f"{scores[0].outcome} in run 1, {score.outcome} in run {number} of {len(scores)}"
                return "flaky", f"{what}: {outcomes}; differ: {differ}"
    if gold and gold[0].outcome != "resolved":
        detail = " ".join(gold[0].detail.split())[-300:]
        return "gold_fails", f"{gold[0].outcome}: {_some(gold[0].failed)}; {detail}"
    if empty[0].outcome == "resolved":
        return "empty_passes", f"without a change pass {_some(empty[0].passed)}"
    if not gold:
        return "unproven", "its tests fail without a change, and no reference shows that they can pass"
    return "usable", ""


def _some(tests: Iterable[str]) -> str:
    names = sorted(tests)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no test"


def _medians(seconds: Sequence[Seconds]) -> Seconds | None:
    if not seconds:
        return None
    return Seconds(**{name: round(median(getattr(one, name) for one in seconds), 3) for name in COLUMNS})


def _run_bare(task: Task, reference: str, sandboxes: Sandboxes) -> tuple[float, str]:
    """Run the task's own tests without a grader; return their seconds and their output."""
    if not task.base_commit:
        task = msgspec.structs.replace(task, files=apply(task, reference) | task.tests.files)
    with sandboxes.open(task) as sandbox:
        command = f'python() {{ python3 "$@"; }}; {task.tests.command}'  # Debian has no program python
        if task.base_commit:
            sandbox.write(".git/bare.patch", reference.encode())
            sandbox.write(".git/bare.sh", task.tests.command.encode())
            sandbox.run("git apply --whitespace=nowarn .git/bare.patch", APPLY_TIMEOUT_S)
            command = "bash .git/bare.sh > .git/bare.log 2>&1"
        began = time.monotonic()
        result = sandbox.run(command, task.tests.timeout_s)
        return time.monotonic() - began, result.output


def wanted(config: RunConfig) -> tuple[list[Task], dict[str, str]]:
    """Return the tasks that a run would take if all were usable, and the references that are known."""
    taskset = config.taskset.unchecked()
    taken = config.tasks.take(taskset)
    tasks = taken["train"] + taken["eval"]
    return tasks, taskset.references(tasks)


def run(
    checker: Checker, tasks: Sequence[Task], references: Mapping[str, str], out: Path, jobs: int
) -> list[TaskCheck]:
    """Check what has no verdict that holds, under a progress bar; the verdicts of all tasks.

    Raise StorageError if `out` cannot be written; if so from the start, nothing was graded.
    """
    task_checks.create(out)
    verdicts = task_checks.read(out)
    todo = [
        task
        for task in tasks
        if not checker.is_known(task, references.get(task.task_id), verdicts.get(task.task_id))
    ]
    with task_checks.alone(out), bars() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("tasks", total=len(tasks), completed=len(tasks) - len(todo))
        futures = [pool.submit(checker.check, task, references.get(task.task_id)) for task in todo]
        try:
            for future in as_completed(futures):
                verdict = future.result()
                task_checks.append(out, verdict)
                verdicts[verdict.task_id] = verdict
                progress.update(bar, description=f"{verdict.task_id}: {verdict.verdict}", advance=1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [verdicts[task.task_id] for task in tasks]


def table(verdicts: Sequence[TaskCheck]) -> Table:
    """Return a table with a row per task; seconds are medians over the runs of the reference."""
    words = ("task", "verdict", "reference", "nothing", "sealed", "retest")
    shown = tables.table(words, [f"{name} s" for name in COLUMNS])
    for one in verdicts:
        spent = [f"{getattr(one.seconds, name):.2f}" if one.seconds else "-" for name in COLUMNS]
        shown.add_row(
            one.task_id, one.verdict, _tally(one.gold), _tally(one.empty), _sealed(one), _retest(one), *spent
        )
    return shown


def _sealed(verdict: TaskCheck) -> str:
    """Show how many assertions have their expected values outside the sandbox."""
    return f"{verdict.sealed} of {verdict.assertions}" if verdict.assertions else "-"


def _retest(verdict: TaskCheck) -> str:
    tests = {name for version in verdict.changed_tests for name in version.tests}
    return f"{len(verdict.changed_tests)} versions, {len(tests)} tests" if tests else "-"


def _tally(outcomes: Sequence[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).most_common()) or "-"


def _show(verdicts: Sequence[TaskCheck], out: Path) -> None:
    tables.show(console, table(verdicts))
    remarks = defaultdict[str, list[str]](list)
    for one in verdicts:
        for remark in _remarks(one):
            remarks[remark].append(one.task_id)
    for remark, names in remarks.items():
        say(f"{_some(names)}: {remark}")
    for line in _sums(verdicts):
        console.print(line)
    kinds = Counter(one.verdict for one in verdicts)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    say(f"{len(verdicts)} tasks: {counts}; {out}")


def _remarks(verdict: TaskCheck) -> Iterator[str]:
    if verdict.verdict != "usable":
        yield f"{verdict.verdict}: {verdict.reason}"
    elif not verdict.changed_tests:
        yield f"no retest: {verdict.unchanged}"
    if verdict.unsealed:
        yield "only its own classes can compare some values; these assertions stay unsealed"
    if verdict.remark:
        yield verdict.remark


def _sums(verdicts: Sequence[TaskCheck]) -> Iterator[str]:
    usable = [one for one in verdicts if one.verdict == "usable"]
    with_retest = sum(bool(one.changed_tests) for one in usable)
    if usable:
        share = with_retest / len(usable)
        yield f"{with_retest} of {len(usable)} usable tasks have a retest ({share:.0%})"
    if total := sum(one.assertions for one in verdicts):
        sealed = sum(one.sealed for one in verdicts)
        whole = sum(one.sealed == one.assertions > 0 for one in verdicts)
        nothing = sum(not one.sealed for one in verdicts)
        yield (
            f"{sealed} of {total} assertions are sealed ({sealed / total:.0%}): "
            f"all of them in {whole} tasks, none in {nothing}"
        )
    over = [one.seconds.overhead for one in verdicts if one.seconds]
    if over:
        yield f"a grading costs {median(over):.2f} s beyond the bare tests, at most {max(over):.2f} s"


def projected(
    checks: Sequence[TaskCheck], tasks: Sequence[Task], jobs: int, images: Path | None
) -> Iterator[str]:
    """Yield what the checks of a sample say about all tasks: the share to use, the faults, and the cost."""
    share = intervals.share(sum(one.verdict in TAKEN for one in checks), len(checks))
    kinds = Counter(one.verdict for one in checks if one.verdict not in TAKEN)
    faults = ", ".join(f"{count / len(checks):.0%} {kind}" for kind, count in kinds.most_common())
    yield (
        f"sample: {share.mean:.0%} of {len(checks)} tasks can be used, so {share.low:.0%} to "
        f"{share.high:.0%} of all {len(tasks)}; not used: {faults or 'none'}"
    )
    if spent := [one.spent_s for one in checks if one.spent_s]:
        whole_s = sum(spent) / len(spent) * len(tasks) / jobs
        yield f"to check all {len(tasks)} with --jobs {jobs} takes about {duration(whole_s)}"
    files = [images / f"{name}.sif" for name in {one.image for one in checks}] if images else []
    if sizes := [file.stat().st_size for file in files if file.exists()]:
        count = len({task.image for task in tasks})
        whole = sum(sizes) / len(sizes) * count
        yield f"all {count} images take about {whole / 1e9:.1f} GB, by the {len(sizes)} that are there"


@cli.command
def main() -> int:
    """Check the tasks that the command line names."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    examples = ("configs/swebench.toml", "configs/demo.toml mine.toml model=MODEL --out tasks/checked.jsonl")
    parser = cli.parser("hpc_swe.check", "Check whether a run can train on its tasks.", *examples)
    parser.add_argument("config", nargs="+", help=cli.CONFIG)
    parser.add_argument(
        "--out", type=cli.path, default=Path("tasks/checked.jsonl"), help="file of the verdicts"
    )
    count, often = cli.number(int, 1), "grade the reference, and an empty change, so many times each"
    parser.add_argument("--runs", type=count, default=3, help=often)
    parser.add_argument("--jobs", type=count, default=1, help="check so many tasks at a time")
    sampled = "; also say what they show of all tasks"
    parser.add_argument("--sample", type=count, metavar="N", help=cli.SAMPLE + sampled)
    arguments = cli.parse(parser)
    config = configuration.from_words(arguments.config)
    found, references = wanted(config)
    tasks = task_checks.sample(found, arguments.sample)
    config.sandbox.check()
    images = Path(config.sandbox.images) if isinstance(config.sandbox, ImageSandboxes) else None
    checker = Checker(config.grader, WatchedSandboxes(config.sandbox), arguments.runs, images)
    checks = run(checker, tasks, references, arguments.out, arguments.jobs)
    _show(checks, arguments.out)
    if arguments.sample and checks:
        for line in projected(checks, found, arguments.jobs, images):
            say(line)
    return 0 if any(each.verdict in TAKEN for each in checks) else 1


if __name__ == "__main__":
    main()
