"""Remember the signs of a failing training that its steps have shown, and why they have ended the run.

The learner enters each step. The coordinator publishes no more batches once there is a reason.
"""

from msgspec.structs import replace

from hpc_swe.base.records import Record
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

BATCHES = 3  # in a row that show the same sign end a run


class StepSigns(Record, frozen=True, kw_only=True):
    """Hold what one step has shown."""

    step: int
    values: dict[str, float]
    """Curve -> its value, where it is finite."""


class SignRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the first and the last steps of a run, in order.

    What is empty is not written: a run that keeps the code of an older release knows no `bounds`.
    """

    steps: list[StepSigns] = []
    reason: str = ""
    """Why the run ends before its last step; empty when it does not."""
    bounds: dict[str, float] = {}
    """`[stop]` as the learner had it; empty in records of older releases."""


def read(run: RunDir) -> SignRecord:
    """Read the record of a run; raise CorruptRecord when it does not decode."""
    try:
        return atomic.get(run.stop_signs, SignRecord)
    except FileNotFoundError:
        return SignRecord()


def forgive(run: RunDir) -> None:
    """Forget the reason and the steps that led to it, but not the first steps, with which others compare."""
    known = read(run)
    first = known.steps[:BATCHES]
    if not known.bounds:
        first = [each for place, each in enumerate(known.steps) if each.step == place]
    if known.reason:
        atomic.put(run.stop_signs, replace(known, steps=first, reason=""))
