"""A taskset provides the tasks of a run."""
