"""Load programming tasks from rows of KodCode, as published, or for debugging: some files, one is test.py.

Of the columns for debugging, `task_id`, `problem_statement` and `extra_info.files` make the task. `prompt` is
not read: it repeats the problem statement in the form of a chat, and the agent opens the conversation itself.
Of `extra_info.entrypoint` only the test files count, since its other words are options that shape the output;
`extra_info.task_name` repeats the task's id.
"""

from typing import ClassVar

from hpc_swe.tasks.sets.programs import Programs


class Kodcode(Programs, frozen=True, kw_only=True):
    """Each row of a split's parquet file becomes a task."""

    taskset: ClassVar[str] = "kodcode"
    train: str = ""
    """Parquet file of the training rows."""
    eval: str = ""
    """Parquet file of the held-out rows."""
