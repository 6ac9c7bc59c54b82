"""Contain the parts of the megatron policy, which are imported late.

All but `settings` and `memory` import torch or megatron-core; `uncompiled` must surround the first import.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# These warnings advise the authors of megatron-core, at import and at each first call.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed|Please use DTensor")


@contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Import megatron-core without its compiled fusions, when `wanted`.

    megatron/core/jit.py decorates them with torch.compile at import. On a CPU that costs each rank 1.5 s to
    load Inductor, and the first call of a fusion (a mixture of experts has one) would need a C++ compiler.
    """
    import torch

    compile_function = torch.compile
    if wanted:
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        torch.compile = compile_function
