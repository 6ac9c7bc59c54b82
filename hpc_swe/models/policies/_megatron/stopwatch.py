"""Measure where the time of a step goes, without a wait for the GPU at each part."""

import time

import torch


class Stopwatch:
    """Measure seconds by part of a step; only `read` makes the host wait for the GPU."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", _now())]

    def lap(self, part: str) -> None:
        """Count the time since the last lap as time of `part`."""
        self._marks.append((part, _now()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each part."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            passed = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            seconds[part] = seconds.get(part, 0.0) + passed
        return seconds


def _now() -> float | torch.cuda.Event:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
