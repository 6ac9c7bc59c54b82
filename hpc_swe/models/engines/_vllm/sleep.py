"""Put vLLM to sleep, so that another process can use its GPUs, and wake it."""

import msgspec
from msgspec import Struct

from hpc_swe.base.errors import NoAnswer
from hpc_swe.models.costs import GIB
from hpc_swe.models.engines import _http
from hpc_swe.models.engines._answers import decode

SLEEP = "/sleep?level=1&mode=keep"
"""Requests are kept, weights move to host memory, and the KV cache is freed."""


class SleepState(Struct):
    """Hold the answer of /is_sleeping."""

    is_sleeping: bool


class GpuMemory(Struct):
    """Hold how many bytes of a worker's GPU are in use; 0 without a GPU."""

    bytes: int


class UsedMemory(Struct):
    """Hold the answers of all workers."""

    results: list[GpuMemory]


def sleep(url: str, token: str, timeout_s: float) -> float | None:
    """Return the GiB that all processes together still use of the fullest GPU; None without a GPU.

    Raise NoAnswer if an answer takes longer than `timeout_s`, or if vLLM says that it is awake.
    """
    _http.call(url, token, SLEEP, b"{}", timeout_s)
    _require(url, token, timeout_s, is_sleeping=True)
    body = msgspec.json.encode({"method": "used_gpu_memory"})
    data = _http.call(url, token, "/collective_rpc", body, timeout_s)
    used = max(worker.bytes for worker in decode(UsedMemory, url, data).results)
    return used / GIB if used else None


def wake(url: str, token: str, timeout_s: float) -> None:
    """Wake vLLM; raise NoAnswer if that takes longer than `timeout_s`, or if it sleeps on."""
    _http.call(url, token, "/wake_up", b"{}", timeout_s)
    _require(url, token, timeout_s, is_sleeping=False)  # some releases answer /wake_up and sleep on


def _require(url: str, token: str, timeout_s: float, *, is_sleeping: bool) -> None:
    data = _http.call(url, token, "/is_sleeping", None, timeout_s)
    if decode(SleepState, url, data).is_sleeping != is_sleeping:
        raise NoAnswer(
            f"{url}: it {'does not sleep' if is_sleeping else 'sleeps on'} although it was told to"
        )
