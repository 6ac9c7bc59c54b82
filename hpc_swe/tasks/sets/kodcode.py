"""Load programs with tests, as the type programs does; only the name of the taskset differs.

Of the columns of KodCode for debugging, `task_id`, `problem_statement` and `extra_info.files` make the task.
`prompt` is not read: it repeats the problem statement in the form of a chat, and the agent opens the
conversation itself.
Of `extra_info.entrypoint` only the test files count, since its other words are options that shape the output;
`extra_info.task_name` repeats the task's id.
"""

from typing import ClassVar

from hpc_swe.tasks.sets.programs import Programs


class Kodcode(Programs, frozen=True, kw_only=True):
    """Each program of a split's folder or file becomes a task."""

    taskset: ClassVar[str] = "kodcode"
    train: str = ""
    """Training programs, in the forms of the type programs."""
    eval: str = ""
    """Held-out programs, in the same forms."""
