"""Write the results of an evaluation as numbers and files, and compare two evaluations task by task."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args
from urllib.parse import quote

import msgspec
from msgspec.structs import replace
from rich.box import ASCII
from rich.console import RenderableType

from hpc_swe.base import intervals, tables
from hpc_swe.base.errors import ConfigError, boundary
from hpc_swe.base.intervals import Estimate
from hpc_swe.base.records import Outcome, Record, RunManifest, Sampling, Score, Task
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import evals, tasks
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config.settings import RunConfig
from hpc_swe.tasks.graders.base import GradedPatch

_by_decoding = partial(tables.table, ["decoding"], box=ASCII)
STAGES = ("episode", "sandbox", "engine", "tools", "grading", "queue")


class Decoding(Record, frozen=True, kw_only=True):
    """A decoding is one way of sampling; its numbers are over all tasks and episodes."""

    sampling: Sampling
    episodes: int
    pass_at: dict[int, Estimate]
    """k -> share of tasks that one of k episodes resolves, unbiased; k = 1 is the solve rate."""
    detectable: float
    """Smallest gain of another evaluation on these tasks that would be detected."""
    infra_failures: int
    """Episodes whose attempts all failed on infrastructure; `pass_at` counts them as unresolved."""
    at_most: float
    """The solve rate if each of those had been resolved."""
    outcomes: dict[str, int]
    exits: dict[str, int]
    retries: int
    """Infrastructure failures after which the episode was attempted again."""
    median_s: dict[str, float]
    """Stage -> median seconds per episode."""
    median_tokens: float
    median_turns: float
    calls: dict[str, float] = {}
    """Tool -> mean number of calls per episode."""


class Summary(Record, frozen=True, kw_only=True):
    """A summary is one evaluation in numbers, as written to summary.json."""

    name: str
    model: str
    model_sha256: str
    """Checksum of the model's folder when the evaluation started."""
    url: str
    """Address of an engine of somebody else; empty when it was ours."""
    history: str
    """How earlier messages were rendered into prompts: the key rollout.history."""
    versions: list[str]
    tasks: int
    trained_on: list[str]
    """Tasks that the model, or a model that it was trained from, has seen in training."""
    decodings: dict[str, Decoding]


@dataclass(frozen=True)
class Finished:
    """Hold what a finished evaluation is compared by: its attempts, tasks and sampling settings."""

    attempts: Sequence[Attempt]
    tasks: Mapping[str, Task]
    decodings: Mapping[str, Sampling]


class Comparison(Record, frozen=True, kw_only=True):
    """A comparison is one decoding of two evaluations, on the tasks that both have."""

    tasks: int
    before: Estimate
    after: Estimate
    gain: Estimate
    detectable: float
    won: int
    """Tasks that are resolved more often than before."""
    lost: int
    """Tasks that are resolved less often than before."""
    infra_failures: list[int]
    """Episodes of these tasks that failed on infrastructure, before and after; they count as unresolved."""
    sampled_otherwise: list[str]
    """Sampling settings that differ although the decodings have one name."""


def decoding(attempts: Sequence[Attempt], label: str, sampling: Sampling) -> Decoding:
    """Sum up the attempts of one decoding."""
    found = [attempt for attempt in attempts if attempt.sampling == label]
    outcomes = intervals.outcomes(found, label)
    at_most = [a if a.outcome != "infra_error" else replace(a, outcome="resolved") for a in found]
    measured = [attempt for attempt in found if attempt.exit_status] or found
    samples = min(len(values) for values in outcomes.values())
    calls = [name for attempt in measured for name in attempt.calls]
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
        median_s={name: median(getattr(attempt, f"{name}_s") for attempt in measured) for name in STAGES},
        median_tokens=median(attempt.sampled_tokens for attempt in measured),
        median_turns=median(attempt.turns for attempt in measured),
        calls={name: n / len(measured) for name, n in sorted(Counter(calls).items())},
    )


def write(run: RunDir, config: RunConfig) -> Summary:
    """Write all results of a finished evaluation again; they depend only on its table."""
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
    _write_predictions(run, config, attempts, {task.task_id: task for task in held_out})
    return summary


def _write_predictions(
    run: RunDir, config: RunConfig, attempts: Sequence[Attempt], known: dict[str, Task]
) -> None:
    """Write the patches as swebench reads them, and the benchmark's own report: one file per sample."""
    for label, sample in config.eval.attempts:
        found = [a for a in attempts if (a.sampling, a.sample) == (label, sample)]
        scores = [Score(outcome=a.outcome, reward=a.reward, passed=a.passed, failed=a.failed) for a in found]
        pairs = zip(found, scores, strict=True)
        verdicts = [GradedPatch(known[a.task_id], a.submission, score) for a, score in pairs]
        name = f"{quote(label, safe='')}-{sample}"
        rows = [
            {"instance_id": v.task.task_id, "model_name_or_path": run.root.name, "model_patch": v.patch}
            for v in verdicts
            if v.is_prediction
        ]
        atomic.write(run.predictions(name), msgspec.json.Encoder().encode_lines(rows))
        config.grader.report(run.root, name, run.root.name, verdicts)


def trained_on(model: Path, held_out: Sequence[Task]) -> list[str]:
    """Return the ids of held-out tasks that an ancestor of the model was trained on, by id or by content.

    Raise HpcSweError when a file of such a run cannot be read.
    """
    seen: set[object] = set()
    for run in ancestry(model):
        if run.tasks.exists():
            seen |= {key for task in tasks.read(run.tasks)["train"] for key in _keys(task)}
    return [task.task_id for task in held_out if seen & _keys(task)]


class _InitialModel(msgspec.Struct, frozen=True):
    """The one key that is read from run.json files of any age."""

    model: str


def ancestry(model: Path) -> Iterator[RunDir]:
    """Yield the runs that made a model's weights, the last first, as far back as their folders exist."""
    while model.parent.name == RunDir.weights.name and RunDir(model.parents[1]).config.exists():
        run = RunDir(model.parents[1])
        yield run
        with boundary(ConfigError, f"{run.config}, which says what {model} was trained from"):
            initial = msgspec.json.decode(atomic.read(run.config), type=_InitialModel).model
            model = Path(atomic.get(run.manifest, RunManifest).folder, initial)


def _keys(task: Task) -> set[object]:
    return {task.task_id, tasks.content(task)}


class _EvalTable(msgspec.Struct, frozen=True):
    decodings: dict[str, Sampling]


class _EvalConfig(msgspec.Struct, frozen=True):
    """The one table that is read from the run.json of an evaluation of any age."""

    eval: _EvalTable


def read(run: RunDir) -> Finished:
    """Read an evaluation; raise HpcSweError when the folder is none, or when it has not finished."""
    attempts = evals.read(run.eval_table("eval"))
    with boundary(ConfigError, f"{run.root}: not the folder of an evaluation"):
        decodings = msgspec.json.decode(atomic.read(run.config), type=_EvalConfig).eval.decodings
        return Finished(attempts, {task.task_id: task for task in tasks.read(run.tasks)["eval"]}, decodings)


def compare(before: Finished, after: Finished, *, common: bool = False) -> dict[str, Comparison]:
    """Return decoding -> what changed, paired by task.

    Raise ConfigError when the tasks differ, by id or by content, and `common` is false, or when there are no
    common tasks, or no common decodings.
    """
    ours, theirs = ({attempt.task_id for attempt in one.attempts} for one in (after, before))
    changed = sorted(t for t in ours & theirs if _content(after.tasks[t]) != _content(before.tasks[t]))
    shared = (ours & theirs).difference(changed)
    if not shared or ((ours != theirs or changed) and not common):
        renamed = f" ({len(changed)} more by id only, such as {changed[0]})" if changed else ""
        remedy = "; --common compares on those" if shared else ""
        raise ConfigError(
            f"the tasks differ: {len(theirs)} there, {len(ours)} here, {len(shared)} in both{renamed}{remedy}"
        )
    labels = [label for label in _labels(after.attempts) if label in _labels(before.attempts)]
    if not labels:
        there, here = (", ".join(_labels(one.attempts)) for one in (before, after))
        raise ConfigError(f"no common decoding: {there} there, {here} here; give one of them the same name")
    return {label: _comparison(label, before, after, shared=shared) for label in labels}


def _content(task: Task) -> object:
    """Return what identifies a task; the time limit and the command of its tests do not."""
    files = (sorted(task.files.items()), sorted(task.tests.files.items()))
    start = (task.base_commit, task.start)
    return task.prompt, start, files, task.tests.fail_to_pass, task.tests.pass_to_pass


def _labels(attempts: Sequence[Attempt]) -> list[str]:
    return list(dict.fromkeys(attempt.sampling for attempt in attempts))


def _comparison(label: str, *both: Finished, shared: set[str]) -> Comparison:
    compared = [[a for a in one.attempts if a.sampling == label and a.task_id in shared] for one in both]
    before, after = (intervals.outcomes(attempts, label) for attempts in compared)
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
        infra_failures=[sum(a.outcome == "infra_error" for a in attempts) for attempts in compared],
        sampled_otherwise=[f"{key} {was[key]} -> {now[key]}" for key in now if was[key] != now[key]],
    )


def summary_parts(summary: Summary) -> Iterator[RenderableType]:
    """Yield tables and lines that show an evaluation to people."""
    found_by_label = summary.decodings
    rates_at = [found.pass_at for found in found_by_label.values()]
    shares = sorted({k for rates in rates_at for k in rates if k.bit_count() == 1 or k == max(rates)})
    columns = [*(f"pass@{k}" for k in shares), "infra failures", "pass@1 at most", "detectable gain"]
    rates = _by_decoding(columns, title=f"{summary.name}: {summary.tasks} tasks [95 % interval over tasks]")
    seen = {kind for found in found_by_label.values() for kind in found.outcomes}
    kinds = [kind for kind in get_args(Outcome) if kind in seen]
    outcomes = _by_decoding([*kinds, "retried"], title="episodes, by outcome")
    title = "median of an episode: seconds by stage, tokens, turns"
    medians = _by_decoding([*STAGES, "tokens", "turns"], title=title)
    for label, found in found_by_label.items():
        solved = (str(found.pass_at[k]) if k in found.pass_at else "" for k in shares)
        failed = (f"{found.infra_failures} of {found.episodes}", f"{found.at_most:.3f}")
        rates.add_row(label, *solved, *failed, f"{found.detectable:.3f}")
        outcomes.add_row(label, *(str(found.outcomes.get(kind, 0)) for kind in kinds), str(found.retries))
        seconds = (f"{found.median_s[stage]:.1f}" for stage in STAGES)
        medians.add_row(label, *seconds, f"{found.median_tokens:.0f}", f"{found.median_turns:g}")
    yield from (rates, outcomes, medians)
    if tools := sorted({name for found in found_by_label.values() for name in found.calls}):
        calls = _by_decoding(tools, title="calls of tools in an episode, mean")
        for label, found in found_by_label.items():
            calls.add_row(label, *(f"{found.calls.get(name, 0.0):.1f}" for name in tools))
        yield calls
    if summary.trained_on:
        some = ", ".join(summary.trained_on[:5])
        yield f"not held out: the model was trained on {len(summary.trained_on)} of these tasks: {some}"


def comparison_parts(other: str, found: dict[str, Comparison]) -> Iterator[RenderableType]:
    """Yield a table and lines that show a comparison with the evaluation `other` to people."""
    columns = ("tasks", "before", "after", "gain", "detectable gain", "won", "lost", "infra failures")
    table = _by_decoding(columns, title=f"since {other} [95 % interval, paired by task]")
    for label, one in found.items():
        rates = (f"{one.before.mean:.3f}", f"{one.after.mean:.3f}", str(one.gain), f"{one.detectable:.3f}")
        failed = " and ".join(map(str, one.infra_failures))
        table.add_row(label, str(one.tasks), *rates, str(one.won), str(one.lost), failed)
    yield table
    for label, one in found.items():
        if one.sampled_otherwise:
            yield f"{label} was sampled with other settings: {', '.join(one.sampled_otherwise)}"
