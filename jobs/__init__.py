"""What Slurm runs: each module wires one role from a run folder."""
