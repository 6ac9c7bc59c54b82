"""Choose the kernels of attention, and call those of the package flash-attn-4; nothing else imports it.

The package compiles a kernel when a process first calls it, in about 8 s, and keeps the result in a folder of
this user on this node. New lengths need no new kernel; a pack of more than 256 sequences does, once.
"""

import contextlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hpc_swe.cluster import scratch

Kernels = Literal["flash-attn-4", "cuDNN", "torch"]
"""flash-attn-4: one call for all sequences of a pack. cuDNN: one for each long sequence, and torch's varlen
attention for short neighbours. torch: one call for each sequence, of whatever kernel torch has for it."""
NEWEST = (9, 10)
"""Major compute capabilities for which flash-attn-4 has forward and backward: Hopper and Blackwell."""
HEAD_DIMS = (64, 128)
INSTALL = "pip install --no-deps -r containers/requirements-gpu.txt"
LEAST = 256
"""Lower bound of the longest length that kernels are told: packs of very short sequences get others."""


@dataclass(frozen=True)
class Facts:
    """Hold what the choice of kernels depends on."""

    capability: int
    """Major compute capability of the GPU; 0 without CUDA."""
    dtype: torch.dtype
    head_dim: int
    is_installed: bool
    """Whether the package flash-attn-4 is."""

    @classmethod
    def find(cls, dtype: torch.dtype, head_dim: int) -> "Facts":
        """Look at the GPU and the packages of this process."""
        capability, _ = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        return cls(capability, dtype, head_dim, is_installed())

    @property
    def is_helped(self) -> bool:
        """Return whether flash-attn-4 has kernels for this GPU and model."""
        return self.capability in NEWEST and self.dtype == torch.bfloat16 and self.head_dim in HEAD_DIMS


def is_installed() -> bool:
    """Return whether the package is; flash-attn, without the 4, has the same name of modules."""
    return any(metadata.distributions(name="flash-attn-4"))


def choose(facts: Facts) -> Kernels:
    """Return the fastest kernels that there are."""
    if facts.is_helped and facts.is_installed:
        return "flash-attn-4"
    return "cuDNN" if facts.capability and facts.dtype == torch.bfloat16 else "torch"


def describe(facts: Facts) -> str:
    """Return the name of the kernels, and what would bring faster ones."""
    missing = f"; {INSTALL} brings faster ones" if facts.is_helped and not facts.is_installed else ""
    return f"kernels of {choose(facts)}{missing}"


def attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Return causal attention within each sequence, [tokens, heads, d].

    `query` is [tokens, heads, d], `key` and `value` [tokens, groups, d], `ends` int32 [sequences + 1] with a
    0 before the ends of the sequences. `scale` is of the scores, 1 / sqrt(d) if it is None.
    """
    output, _ = _function()(
        query,
        key,
        value,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=max(longest, LEAST),
        max_seqlen_k=max(longest, LEAST),
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    found: Tensor = output
    return found


@cache
def _function() -> Callable[..., tuple[Tensor, Tensor]]:
    folder = kernel_folder(Path(tempfile.gettempdir()))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    warnings.filterwarnings("ignore", message="Argument aux_data")  # of the compiler, about no argument
    from flash_attn.cute import flash_attn_varlen_func  # reads both variables, and needs CUDA

    function: Callable[..., tuple[Tensor, Tensor]] = flash_attn_varlen_func
    return function


def kernel_folder(place: Path) -> Path:
    """Return the folder in `place` that keeps this user's compiled kernels, which processes run.

    Where another user could write to the folder of that name, return one that is removed with this process.
    It lies on a local disk, because the package locks files in it, which few shared file systems allow.
    """
    folder = place / f"hpc_swe-kernels-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_private else scratch.make([place])
