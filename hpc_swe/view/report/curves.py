"""Read a run's curves, and arrange them in the charts that TensorBoard shows under "Custom Scalars"."""

import re
from collections.abc import Mapping

from hpc_swe.base.metrics import LAYOUT, decode, meaning
from hpc_swe.base.records import MetricLine
from hpc_swe.base.rundir import RunDir

RATE, LOW, HIGH = "solve/eval/", "solve/eval_low/", "solve/eval_high/"
Points = Mapping[str, Mapping[int, float]]
"""Curve -> step -> value."""


def read(run: RunDir) -> tuple[Points, list[str]]:
    """Return all curves, and a note for each log with broken lines; the later line of a step counts."""
    lines: list[MetricLine] = []
    notes = []
    for path in sorted(run.metrics.glob("*.jsonl")):
        found, torn = decode(path.read_bytes().rpartition(b"\n")[0])  # the rest is still being written
        lines += found
        notes += [f"{path}: {torn} lines cannot be read; the rest is shown"] if torn else []
    points: dict[str, dict[int, float]] = {}
    for line in sorted(lines, key=lambda line: line.time):
        for name, value in line.values.items():
            points.setdefault(name, {})[line.step] = value
    return points, notes


def charts(points: Points) -> list[Mapping[str, object]]:
    """Return the charts that have points, in TensorBoard's order and under its titles."""
    found: list[Mapping[str, object]] = []
    for category, titles in LAYOUT.items():
        for title, patterns in titles.items():
            names = [n for p in patterns for n in sorted(points) if re.fullmatch(p, n)]
            shown = [_curve(points, name) for name in names if not name.startswith((LOW, HIGH))]
            if shown:
                found.append({"category": category, "title": title, "curves": shown})
    return found


def _curve(points: Points, name: str) -> Mapping[str, object]:
    """Return one curve; that of an evaluation has the ends of its interval, too."""
    curve: dict[str, object] = {"name": name, "meaning": meaning(name), "points": _pairs(points[name])}
    label = name.removeprefix(RATE)
    low, high = points.get(LOW + label, {}), points.get(HIGH + label, {})
    if name.startswith(RATE) and low and high:
        ends = [[step, low[step], high[step]] for step in sorted(low.keys() & high.keys())]
        curve["interval"] = ends
    return curve


def _pairs(values: Mapping[int, float]) -> list[list[float]]:
    return [[step, float(f"{values[step]:.6g}")] for step in sorted(values)]
