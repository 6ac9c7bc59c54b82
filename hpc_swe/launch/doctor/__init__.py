"""Check whether a cluster provides what a run needs: python -m hpc_swe.doctor."""
