"""Hold what is asked and who judges it: task sets, graders, their tests and patches."""

__path__ += [__path__[0].removesuffix("tasks") + "makers"]  # for python -m hpc_swe.tasks.check, and its like
