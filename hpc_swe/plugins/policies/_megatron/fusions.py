"""Choose whether megatron-core compiles its fused functions; it decides that when it is imported."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Import megatron-core without its compiled fusions, when `wanted`.

    megatron/core/jit.py decorates them with torch.compile at import. On a CPU that costs each rank 1.5 s to
    load Inductor, and the first call of a fusion (a mixture of experts has one) would need a C++ compiler.
    """
    compile_function = torch.compile
    if wanted:
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        torch.compile = compile_function
