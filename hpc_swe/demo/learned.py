"""Show what models have learned: a table of evaluations on the same tasks, and the curves of several runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from hpc_swe.base import intervals, tables
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.demo.stages import curve
from hpc_swe.tasks.swebench_rows import columns, read_records

CURVES = {
    "reward/mean": "mean reward",
    "groups/all_solved": "groups all solved",
    "policy/entropy": "entropy, nats a token",
    "episodes/tokens": "sampled tokens an episode",
    "recorder/parse_errors": "parse errors an episode",
    "gap/k3": "divergence of learner and sampler",
}


@dataclass(frozen=True)
class ModelResult:
    """Hold what is known about one model."""

    name: str
    steps: int = 0
    gpu_hours: float = 0.0
    """Of its training."""
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    """Decoding -> the attempts of its evaluation."""

    @property
    def outcomes(self) -> dict[str, intervals.Outcomes]:
        """Return decoding -> task -> one number per attempt, 1 where it was resolved."""
        return {label: intervals.outcomes(each, label) for label, each in self.attempts.items()}


def functions(rows_file: Path) -> dict[str, str]:
    """Return task id -> module and function of a made bug, for the rows that name them."""
    rows = (columns(record) for _, record in read_records(rows_file))
    names = {row.get("task_id", ""): (row.get("extra_info") or {}).get("task_name") for row in rows}
    return {task: name.rpartition(": ")[0] for task, name in names.items() if name}


def table(base: ModelResult, trained: Sequence[ModelResult], groups: Mapping[str, str]) -> Table:
    """Return the table of results, a line for each model and decoding; gains are over the base model.

    Args:
        base: The model before training.
        trained: Models after training.
        groups: Task id -> source function; other tasks are groups of their own.
    """
    groups = {task: groups.get(task, task) for outcomes in base.outcomes.values() for task in outcomes}
    title = f"{len(groups)} held-out tasks in {len({*groups.values()})} functions [95 % interval]"
    numbers = ("steps", "solved", "gain, over tasks", "gain, over functions", "pass@k", "no patch", "infra")
    found = tables.table(("model", "decoding"), (*numbers, "GPU-hours"), title=title)
    for model in (base, *trained):
        for label, outcomes in model.outcomes.items():
            gains = ["", ""]
            if model is not base:
                gains = [str(intervals.gain(base.outcomes[label], outcomes, by)) for by in (None, groups)]
            k, attempts = min(map(len, outcomes.values())), model.attempts[label]
            pass_at = f"{intervals.pass_rate(outcomes, k).mean:.3f} @{k}" if k > 1 else ""
            without = [not one.submission for one in attempts], [one.reward is None for one in attempts]
            shares = [f"{sum(each) / len(attempts):.3f}" for each in without]
            rates = [str(intervals.solve_rate(outcomes)), *gains, pass_at, *shares]
            found.add_row(model.name, label, str(model.steps), *rates, f"{model.gpu_hours:.2f}")
    return found


def draw(runs: Sequence[RunDir], path: Path) -> None:
    """Draw the curves of all runs, one chart a metric."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True)
    for chart, (name, title) in zip(axes.flat, CURVES.items(), strict=True):
        for run in runs:
            points = curve(run, name)
            chart.plot([step for step, _ in points], [value for _, value in points], label=run.root.name)
        chart.set(title=title, xlabel="step")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
