"""Start, list and end the jobs of a run."""
