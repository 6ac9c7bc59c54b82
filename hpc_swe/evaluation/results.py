"""What an evaluation found: its numbers, its files, and how it stands beside another one."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import get_args
from urllib.parse import quote

import msgspec
from msgspec.structs import replace
from rich.box import ASCII
from rich.console import RenderableType
from rich.table import Table

from hpc_swe import intervals
from hpc_swe.errors import ConfigError, boundary
from hpc_swe.intervals import Estimate
from hpc_swe.plugins.graders.base import GradedPatch, Official
from hpc_swe.records import Outcome, Record, RunManifest, Sampling, Score, Task
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, evals, tasks
from hpc_swe.store.evals import Attempt

STAGES = ("episode", "sandbox", "engine", "tools", "grading", "queue")


class Decoding(Record, frozen=True, kw_only=True):
    """One way of sampling, over all tasks."""

    sampling: Sampling
    episodes: int
    pass_at: dict[int, Estimate]
    """k -> share of tasks that one of k episodes resolves, unbiased; k = 1 is the solve rate."""
    detectable: float
    """Smallest gain of another evaluation on these tasks that would be seen."""
    infra_failures: int
    """Episodes that infrastructure failed to the last; `pass_at` counts them as unresolved."""
    at_most: float
    """The solve rate if each of those had been resolved."""
    outcomes: dict[str, int]
    exits: dict[str, int]
    retries: int
    """Infrastructure failures that were made up for."""
    median_s: dict[str, float]
    """Seconds an episode, by stage."""
    median_tokens: float
    median_turns: float


class Summary(Record, frozen=True, kw_only=True):
    """One evaluation."""

    name: str
    model: str
    model_sha256: str
    """Of the folder's files, when the evaluation began."""
    url: str
    """Of somebody else's engine; empty when it was ours."""
    history: str
    """How a conversation's past was rendered."""
    versions: list[str]
    tasks: int
    trained_on: list[str]
    """Tasks that the model, or what it was trained from, has seen in training."""
    decodings: dict[str, Decoding]


@dataclass(frozen=True)
class Finished:
    """One evaluation as it is compared: what came of it, and what was asked."""

    attempts: Sequence[Attempt]
    tasks: Mapping[str, Task]
    decodings: Mapping[str, Sampling]


class Comparison(Record, frozen=True, kw_only=True):
    """One decoding of two evaluations, on the tasks of both."""

    tasks: int
    before: Estimate
    after: Estimate
    gain: Estimate
    detectable: float
    won: int
    """Tasks that are resolved more often than before."""
    lost: int
    infra_failures: list[int]
    """Episodes of these tasks that infrastructure failed to the last, before and after; unresolved here."""
    sampled_otherwise: list[str]
    """Settings that differ under the one name."""


def decoding(attempts: Sequence[Attempt], label: str, sampling: Sampling) -> Decoding:
    """The numbers of one decoding."""
    found = [attempt for attempt in attempts if attempt.sampling == label]
    outcomes = intervals.outcomes(found, label)
    at_most = [a if a.outcome != "infra_error" else replace(a, outcome="resolved") for a in found]
    came = [attempt for attempt in found if attempt.exit_status] or found
    samples = min(len(values) for values in outcomes.values())
    return Decoding(
        sampling=sampling,
        episodes=len(found),
        pass_at={k: intervals.pass_rate(outcomes, k) for k in range(1, samples + 1)},
        detectable=intervals.detectable(outcomes),
        infra_failures=sum(attempt.outcome == "infra_error" for attempt in found),
        at_most=intervals.solve_rate(intervals.outcomes(at_most, label)).mean,
        outcomes=dict(Counter(attempt.outcome for attempt in found)),
        exits=dict(Counter(attempt.exit_status or "none" for attempt in found)),
        retries=sum(attempt.retries for attempt in found),
        median_s={name: median(getattr(attempt, f"{name}_s") for attempt in came) for name in STAGES},
        median_tokens=median(attempt.sampled_tokens for attempt in came),
        median_turns=median(attempt.turns for attempt in came),
    )


def write(run: RunDir, config: RunConfig) -> Summary:
    """Write all results of a finished evaluation anew; only its table is read."""
    attempts = evals.read(run.eval_table("eval"))
    held_out = tasks.read(run.tasks)["eval"]
    manifest = atomic.get(run.manifest, RunManifest)
    summary = Summary(
        name=run.root.name,
        model=config.model,
        model_sha256=manifest.model_sha256,
        url=config.inference.url,
        history=config.rollout.history,
        versions=sorted({version for attempt in attempts for version in attempt.versions}),
        tasks=len({attempt.task_id for attempt in attempts}),
        trained_on=trained_on(Path(manifest.folder, config.model), held_out),
        decodings={label: decoding(attempts, label, s) for label, s in config.eval.decodings.items()},
    )
    evals.write(run.results, attempts, without=evals.LONG_COLUMNS)
    atomic.write(run.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    _hand_in(run, config, attempts, {task.task_id: task for task in held_out})
    return summary


def _hand_in(run: RunDir, config: RunConfig, attempts: Sequence[Attempt], known: dict[str, Task]) -> None:
    """Predictions, as swebench reads them, and the benchmark's own report, a file for each sample."""
    for label, sample in itertools.product(config.eval.decodings, range(config.eval.samples)):
        verdicts = [
            GradedPatch(known[attempt.task_id], attempt.submission, _score(attempt))
            for attempt in attempts
            if (attempt.sampling, attempt.sample) == (label, sample)
        ]
        name = f"{quote(label, safe='')}-{sample}"
        rows = [
            {"instance_id": v.task.task_id, "model_name_or_path": run.root.name, "model_patch": v.patch}
            for v in verdicts
            if v.is_prediction
        ]
        atomic.write(run.predictions(name), msgspec.json.Encoder().encode_lines(rows))
        if isinstance(config.grader, Official):
            config.grader.report(run.root, name, run.root.name, verdicts)


def _score(attempt: Attempt) -> Score:
    return Score(outcome=attempt.outcome, reward=attempt.reward, passed=attempt.passed, failed=attempt.failed)


def trained_on(model: Path, held_out: Sequence[Task]) -> list[str]:
    """Tasks that a run in the model's ancestry has trained, by id or by content.

    Raises:
        HpcSweError: A file of such a run cannot be read.
    """
    seen: set[object] = set()
    for run in ancestry(model):
        if run.tasks.exists():
            seen |= {key for task in tasks.read(run.tasks)["train"] for key in _keys(task)}
    return [task.task_id for task in held_out if seen & _keys(task)]


class _Begun(msgspec.Struct, frozen=True):
    """What is asked of the run.json of any age."""

    model: str


def ancestry(model: Path) -> Iterator[RunDir]:
    """The runs that made a model's weights, the last first, as far as their folders are there."""
    while model.parent.name == RunDir.weights.name and RunDir(model.parents[1]).config.exists():
        run = RunDir(model.parents[1])
        yield run
        with boundary(ConfigError, f"{run.config}, which says what {model} was trained from"):
            begun = msgspec.json.decode(run.config.read_bytes(), type=_Begun)
            model = Path(atomic.get(run.manifest, RunManifest).folder, begun.model)


def _keys(task: Task) -> set[object]:
    return {task.task_id, (task.prompt, task.base_commit, *sorted(task.files.items()))}


class _Ways(msgspec.Struct, frozen=True):
    decodings: dict[str, Sampling]


class _Asked(msgspec.Struct, frozen=True):
    """What is asked of the run.json of an evaluation of any age."""

    eval: _Ways


def read(run: RunDir) -> Finished:
    """A finished evaluation.

    Raises:
        HpcSweError: It has not finished, or is none.
    """
    attempts = evals.read(run.eval_table("eval"))
    with boundary(ConfigError, f"{run.root}: not the folder of an evaluation"):
        asked = msgspec.json.decode(run.config.read_bytes(), type=_Asked).eval.decodings
        return Finished(attempts, {task.task_id: task for task in tasks.read(run.tasks)["eval"]}, asked)


def compare(before: Finished, after: Finished, *, common: bool = False) -> dict[str, Comparison]:
    """Decoding -> what changed, paired by task.

    Raises:
        ConfigError: The tasks differ, by name or by content, and it was not said that the common ones are
            meant, or no decoding of the one is in the other.
    """
    ours, theirs = ({attempt.task_id for attempt in one.attempts} for one in (after, before))
    changed = sorted(t for t in ours & theirs if _content(after.tasks[t]) != _content(before.tasks[t]))
    shared = (ours & theirs).difference(changed)
    if not shared or ((ours != theirs or changed) and not common):
        alike = f" ({len(changed)} by name only, such as {changed[0]})" if changed else ""
        remedy = "; --common compares on those" if shared else ""
        raise ConfigError(
            f"other tasks: {len(theirs)} there, {len(ours)} here, {len(shared)} in both{alike}{remedy}"
        )
    labels = [label for label in _labels(after.attempts) if label in _labels(before.attempts)]
    if not labels:
        told = (", ".join(_labels(one.attempts)) for one in (before, after))
        raise ConfigError("no decoding in both: {} there, {} here; name one alike".format(*told))
    return {label: _comparison(label, before, after, shared=shared) for label in labels}


def _content(task: Task) -> object:
    """What makes it the task that it is: not how long its tests may take, nor how they are called."""
    files = (sorted(task.files.items()), sorted(task.tests.files.items()))
    return task.prompt, task.base_commit, files, task.tests.fail_to_pass, task.tests.pass_to_pass


def _labels(attempts: Sequence[Attempt]) -> list[str]:
    return list(dict.fromkeys(attempt.sampling for attempt in attempts))


def _comparison(label: str, *both: Finished, shared: set[str]) -> Comparison:
    solved = (intervals.outcomes(one.attempts, label) for one in both)
    before, after = ({task: one[task] for task in one if task in shared} for one in solved)
    was, now = (msgspec.structs.asdict(one.decodings[label]) for one in both)
    changes = [math.fsum(after[t]) / len(after[t]) - math.fsum(before[t]) / len(before[t]) for t in before]
    return Comparison(
        tasks=len(before),
        before=intervals.solve_rate(before),
        after=intervals.solve_rate(after),
        gain=intervals.gain(before, after),
        detectable=intervals.detectable_gain(before, after),
        won=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
        infra_failures=[_infra_failures(one.attempts, label, shared) for one in both],
        sampled_otherwise=[f"{key} {was[key]} -> {now[key]}" for key in now if was[key] != now[key]],
    )


def _infra_failures(attempts: Sequence[Attempt], label: str, shared: set[str]) -> int:
    return sum(
        (attempt.sampling, attempt.outcome) == (label, "infra_error") and attempt.task_id in shared
        for attempt in attempts
    )


def shown(summary: Summary) -> Iterator[RenderableType]:
    """For people."""
    ways = summary.decodings
    told = (found.pass_at for found in ways.values())
    shares = sorted({k for pass_at in told for k in pass_at if k.bit_count() == 1 or k == max(pass_at)})
    columns = [*(f"pass@{k}" for k in shares), "infra failures", "pass@1 at most", "detectable gain"]
    rates = _table(f"{summary.name}: {summary.tasks} tasks [95 % interval over tasks]", columns)
    kinds = [kind for kind in get_args(Outcome) if any(kind in found.outcomes for found in ways.values())]
    outcomes = _table("episodes, by outcome", [*kinds, "retried"])
    medians = _table("median of an episode: seconds by stage, tokens, turns", [*STAGES, "tokens", "turns"])
    for label, found in ways.items():
        solved = (str(found.pass_at[k]) if k in found.pass_at else "" for k in shares)
        failed = (f"{found.infra_failures} of {found.episodes}", f"{found.at_most:.3f}")
        rates.add_row(label, *solved, *failed, f"{found.detectable:.3f}")
        outcomes.add_row(label, *(str(found.outcomes.get(kind, 0)) for kind in kinds), str(found.retries))
        seconds = (f"{found.median_s[stage]:.1f}" for stage in STAGES)
        medians.add_row(label, *seconds, f"{found.median_tokens:.0f}", f"{found.median_turns:g}")
    yield from (rates, outcomes, medians)
    if summary.trained_on:
        some = ", ".join(summary.trained_on[:5])
        yield f"not held out: the model was trained on {len(summary.trained_on)} of these tasks: {some}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table("decoding", title=title, box=ASCII, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def shown_beside(other: str, found: dict[str, Comparison]) -> Iterator[RenderableType]:
    """A comparison, for people."""
    columns = ("tasks", "before", "after", "gain", "detectable gain", "won", "lost", "infra failures")
    table = _table(f"since {other} [95 % interval, paired by task]", columns)
    for label, one in found.items():
        rates = (f"{one.before.mean:.3f}", f"{one.after.mean:.3f}", str(one.gain), f"{one.detectable:.3f}")
        failed = " and ".join(map(str, one.infra_failures))
        table.add_row(label, str(one.tasks), *rates, str(one.won), str(one.lost), failed)
    yield table
    for label, one in found.items():
        if one.sampled_otherwise:
            yield f"{label} was sampled otherwise: {', '.join(one.sampled_otherwise)}"
