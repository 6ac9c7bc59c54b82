"""Measure where the time of a step goes: seconds by class of kernel, from torch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

from hpc_swe.base.records import Record

IDLE, OTHER, COMMUNICATION = "idle", "elementwise and other", "communication"
CLASSES = (
    (COMMUNICATION, r"nccl|c10d::|gloo"),
    ("optimizer", r"adam|multi_tensor_apply|foreach"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    (
        "matrix products",
        r"gemm|nvjet|cutlass|xmma|cublas|aten::(?:add|b|grouped_)?mm\b|grouped_mm|splitkreduce",
    ),
    ("copies", r"^memcpy|^memset|direct_copy|catarray|aten::(?:cat|clone|contiguous|copy_|_to_copy)"),
)
"""Class -> what the names of its kernels contain; the first class that matches counts."""
LONGEST = 12
NAME_WIDTH = 60


class KernelTimes(Record, frozen=True, kw_only=True):
    """Hold the seconds of one step on one device."""

    seconds: dict[str, float]
    """Seconds by class; those in which no kernel runs are idle."""
    waiting: float
    """Seconds in which communication runs and nothing beside it."""
    longest: list[tuple[str, float, int]]
    """Name, seconds and calls of the kernels with most seconds."""


def class_of(name: str) -> str:
    """Return the class of a kernel, or of an operator on the CPU, by its name."""
    return next((kind for kind, words in CLASSES if re.search(words, name.lower())), OTHER)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end).

    Example:
        >>> covered([(0, 2), (5, 6), (1, 3)])
        4.0
    """
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def summarize(kernels: Iterable[tuple[str, float, float]], wall_s: float) -> KernelTimes:
    """Sum kernels, given as name, start and end in seconds, of a step that took `wall_s` seconds.

    Kernels that run at the same time count in full in their own classes; idle is what none of them covers.
    """
    listed = list(kernels)
    by_class, by_name, calls = Counter[str](), Counter[str](), Counter[str]()
    for name, start, end in listed:
        by_class[class_of(name)] += end - start  # type: ignore[assignment]
        by_name[name] += end - start  # type: ignore[assignment]
        calls[name] += 1
    busy = covered((start, end) for _, start, end in listed)
    computing = ((start, end) for name, start, end in listed if class_of(name) != COMMUNICATION)
    idle = max(0.0, wall_s - busy)
    return KernelTimes(
        seconds={kind: float(seconds) for kind, seconds in by_class.items()} | {IDLE: idle},
        waiting=busy - covered(computing),
        longest=[(name, float(seconds), calls[name]) for name, seconds in by_name.most_common(LONGEST)],
    )


def profile(step: Callable[[], object]) -> KernelTimes:
    """Run a step under the profiler, and return the times of its kernels; on a CPU, of its operators."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_gpu = torch.cuda.is_available()
    with torch_profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        step()
        wall = time.perf_counter() - start
    if on_gpu:
        events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        kernels = [event for event in events if not event.is_user_annotation]  # these surround kernels
        times = [(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6) for each in kernels]
    else:  # operators contain one another, so each counts its own time, as if one ran after another
        own = [(each.name, each.self_cpu_time_total / 1e6) for each in profiler.events()]
        ends = accumulate(seconds for _, seconds in own)
        times = [(name, end - seconds, end) for (name, seconds), end in zip(own, ends, strict=True)]
    return summarize(times, wall)
