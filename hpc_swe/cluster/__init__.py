"""Start jobs, by Slurm or here, and handle processes, GPUs and memory of the node they run on."""
