"""The heavy half of the megatron policy.

shape      what a model's config.json says; without torch
hf         what a Hugging Face folder holds
parallel   joins the process group; ranks and groups
compat     defects of megatron-core, mended
cpu        what differs without CUDA
stopwatch  seconds by part
spec       the model: norms, attention, log-probabilities in place of logits
experts    its mixture-of-experts layers
logprobs   fused output layer and log-probability
packing    a microbatch as tensors
convert    Hugging Face tensors <-> Megatron shards
optimizer  gradient buffers, AdamW, schedule
reference  the initial weights, swapped in
export     Hugging Face files
checkpoint distributed checkpoints
learner    the seam: train, export, save, load
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Advice to megatron-core's authors, at import and at each first call.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed|Please use DTensor")


@contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Import megatron-core without its compiled fusions, when `wanted`.

    megatron/core/jit.py decorates them with torch.compile at import, which loads Inductor: 1.5 s of CPU time
    for each rank. Our models call none of them on a CPU.
    """
    compile_function = torch.compile
    if wanted:
        torch.compile = _leave_as_it_is
    try:
        yield
    finally:
        torch.compile = compile_function


def _leave_as_it_is(function: Callable[..., object] | None = None, **_: object) -> object:
    return function or (lambda decorated: decorated)
