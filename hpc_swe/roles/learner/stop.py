"""Decide by the signs of `[stop]` whether a training that fails ends before its last step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, stop_signs
from hpc_swe.base.store.stop_signs import SignRecord, StepSigns
from hpc_swe.config.settings import StopConfig

CURVES = ("policy/entropy", "gap/k3", "episodes/tokens", "groups/all_solved")


def enter(
    run: RunDir, step: int, values: Mapping[str, float], config: StopConfig, check: Callable[[], None]
) -> str:
    """Enter what a step has shown, and return why the run ends; empty when it goes on.

    A step that is trained again replaces itself and what came after it. Without bounds only the first steps
    are entered, with whose length a bound that is set later compares. `check` is called just before the
    record is written, and prevents it by an error. Raise StorageError when it cannot be written.
    """
    known, count = stop_signs.read(run), stop_signs.BATCHES
    if config == StopConfig() and len(known.steps) >= count:
        return ""
    own = {curve: values[curve] for curve in CURVES if math.isfinite(values.get(curve, math.nan))}
    steps = [*(each for each in known.steps if each.step < step), StepSigns(step=step, values=own)]
    kept = steps[:count] + [each for each in steps[count:] if each.step > step - count]
    reason = known.reason or reason_of(kept, config)
    record = SignRecord(steps=kept, reason=reason, bounds=msgspec.to_builtins(config))
    atomic.put(run.stop_signs, record, check=check)
    return reason


def reason_of(steps: Sequence[StepSigns], config: StopConfig) -> str:
    """Return the first sign that each of the last three steps shows; empty when there is none."""
    last = steps[-stop_signs.BATCHES :]
    if last[-1].step - last[0].step != stop_signs.BATCHES - 1:
        return ""
    for key, curve, side, limit in _bounds(steps, config):
        values = [each.values.get(curve, math.nan) for each in last]
        if all(side * value > side * limit for value in values):
            numbers, word = " ".join(f"{value:.3g}" for value in values), "above" if side > 0 else "below"
            where = f"in steps {last[0].step} to {last[-1].step}"
            return f"{curve} was {word} {limit:.3g} {where}: {numbers} (stop.{key})"
    return ""


def _bounds(steps: Sequence[StepSigns], config: StopConfig) -> Iterator[tuple[str, str, int, float]]:
    """Yield key, curve, 1 or -1 for an upper or a lower bound, and the bound of each sign that is on."""
    if config.entropy_low:
        yield "entropy_low", "policy/entropy", -1, config.entropy_low
    if config.entropy_high:
        yield "entropy_high", "policy/entropy", 1, config.entropy_high
    if config.gap:
        yield "gap", "gap/k3", 1, config.gap
    if config.all_solved:
        yield "all_solved", "groups/all_solved", 1, config.all_solved
    row = [each for n, each in enumerate(steps[: stop_signs.BATCHES]) if each.step == steps[0].step + n]
    first = [each.values["episodes/tokens"] for each in row if "episodes/tokens" in each.values]
    if config.length_growth and first:
        yield "length_growth", "episodes/tokens", 1, config.length_growth * fmean(first)
