"""Select the environment variables that a run keeps for its jobs."""

import os

from hpc_swe.plugins.executors.base import is_secret

KEPT = (
    *("PATH", "LD_", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
    *("MODULE", "LOADEDMODULES", "_LMFILES_", "LMOD_", "APPTAINER_", "SINGULARITY_", "HF_", "OMP_", "MKL_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "UCX_", "FI_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_"),
)
"""Prefixes of the variables that a run keeps; a tick of cron has none of them."""


def own_environment() -> dict[str, str]:
    """Return the variables of this process that say where programs are and how they are set up; no secret."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(KEPT) and "\n" not in text and not is_secret(name, text)
    }
