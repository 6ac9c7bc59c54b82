"""Seconds by part of a step, without making the host wait for the GPU."""

import time

import torch


class Stopwatch:
    """Each `lap` books the time since the last one; `read` waits once, at the end."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", _now())]

    def lap(self, part: str) -> None:
        """Book the time since the last lap to `part`."""
        self._marks.append((part, _now()))

    def read(self) -> dict[str, float]:
        """Seconds by part."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[part] = seconds.get(part, 0.0) + _between(start, end)
        return seconds


def _now() -> float | torch.cuda.Event:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000
