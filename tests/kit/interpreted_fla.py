"""Let Triton's interpreter run the kernels of fla-core, which try several ways and count loops in tensors."""

import builtins
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.runtime.autotuner import Autotuner


def prepare() -> None:
    """Take the first way of each kernel, since nothing is timed here, and let loops count in tensors."""
    from fla.ops.common import chunk_delta_h

    Autotuner.run = _run_first
    chunk_delta_h.range = _range


def _run_first(self: Autotuner, *args: Any, **keys: Any) -> Any:
    return self.fn.run(*args, **keys, **self.configs[0].all_kwargs())


def _range(*ends: Any) -> Iterator[tl.tensor]:
    for number in builtins.range(*(int(end) for end in ends)):
        yield tl.full((), number, tl.int32)
