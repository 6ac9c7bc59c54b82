"""A real Slurm of several nodes on this machine."""
