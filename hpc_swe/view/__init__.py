"""Hold the commands that only look: status, pages, evaluations and benchmarks."""
