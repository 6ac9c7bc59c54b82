"""Whether a cluster gives what a run needs: python -m hpc_swe.doctor."""
