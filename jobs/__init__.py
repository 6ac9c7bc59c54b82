"""Start what Slurm runs: each module wires one role from a run folder."""

import hpc_swe  # noqa: F401  (first, so that an interrupt of the imports that follow is no traceback)
