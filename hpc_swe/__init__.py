"""hpc_swe trains software-engineering agents with GRPO on a Slurm cluster."""

__version__ = "0.1.0"
