"""Cheats that tests and benchmarks try on the graders."""
