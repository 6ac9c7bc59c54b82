"""Tasks of SWE-bench before a run takes them: rows, sandbox images, and checks."""
