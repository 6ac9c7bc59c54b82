"""Measure what the hardware can do at best: python -m hpc_swe.benchmarks.limits.

No step can multiply matrices faster than one large product, and none can move bytes faster than one copy. On
a machine without a GPU the same is measured with small sizes.
"""

import time
from collections.abc import Callable

from hpc_swe.base import cli, tables
from hpc_swe.base.records import Record

REPEATS = 10
GB = 1e9


class Rates(Record, frozen=True, kw_only=True):
    """Hold the best rates of one device, as measured."""

    device: str
    versions: str
    product_flops: float
    """FLOP/s of a product of two square matrices, bfloat16 on a GPU."""
    copy_bytes: float
    """Bytes a second that a copy on the device reads and writes."""
    upload_bytes: float
    """Bytes a second from page-locked host memory to the device."""


def measure_limits() -> Rates:
    """Measure the rates of the first device that this process sees."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    width, count = (8192, 2**31) if on_gpu else (512, 2**24)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in "ab")
    product = _seconds(lambda: left @ right)
    source = torch.randint(0, 255, (count,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    host = torch.zeros(count // 4, dtype=torch.uint8, pin_memory=on_gpu)
    upload = _seconds(lambda: target[: count // 4].copy_(host, non_blocking=True))
    return Rates(
        device=torch.cuda.get_device_name(0) if on_gpu else "CPU",
        versions=f"torch {torch.__version__}",
        product_flops=2 * width**3 / product,
        copy_bytes=2 * count / copy,
        upload_bytes=count / 4 / upload,
    )


def _seconds(work: Callable[[], object]) -> float:
    """Return the mean seconds of the work after a warm-up."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    wait()
    return (time.perf_counter() - start) / REPEATS


def describe(limits: Rates) -> str:
    """Return the limits as one line."""
    return (
        f"limits of {limits.device}, {limits.versions}: matrix product "
        f"{limits.product_flops / 1e12:,.1f} TFLOP/s, copy {limits.copy_bytes / GB:,.0f} GB/s, from the host "
        f"{limits.upload_bytes / GB:,.1f} GB/s"
    )


@cli.command
def main() -> None:
    """Print the limits of this machine."""
    cli.parse(
        cli.parser("hpc_swe.benchmarks.limits", "Measure the best rates of this machine's first device.")
    )
    tables.say(describe(measure_limits()))


if __name__ == "__main__":
    main()
