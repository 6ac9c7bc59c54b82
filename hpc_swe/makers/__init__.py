"""Prepare tasks of SWE-bench for runs: rows, sandbox images, and checks."""
