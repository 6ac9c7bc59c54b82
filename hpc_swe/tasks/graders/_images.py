"""Return whether the host or its image, and not the patch, is why a grading went wrong.

The guard believes no file that is younger than itself (`origins`). Such a file is the patch's work, unless
somebody makes or removes unpacked images meanwhile that share their files with this one: the kernel notes a
new link as it notes a change. A fresh sandbox shows which, since no sandbox can change the files of an image.
"""

import time
from collections.abc import Sequence

import msgspec

from hpc_swe.agents.sandboxes.base import ImageSandboxes, Sandboxes, WatchedSandboxes
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Task
from hpc_swe.tasks.graders._inside.origins import MOST_YOUNG
from hpc_swe.tasks.graders.base import ending

_CLOCK_REALTIME_COARSE = 5  # Linux gives files the time of this clock
_LOOK_S = 120.0
# The names come from a report, and may be any text: only a file of the image itself may count.
_LOOK = """
import errno, os
for path in FILES:
    try:
        is_young = os.lstat(path).st_ctime_ns > SINCE and os.path.realpath(path) == path
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE):
            raise
        continue
    if is_young and not path.startswith(("/dev/", "/proc/", "/sys/")):
        print(ascii(path))
        break
"""


_with_pytest: set[str] = set()
"""Images in which pytest was found to start."""


def require_pytest(task: Task, sandboxes: Sandboxes) -> None:
    """Raise SandboxError if no test could run in the task's image, whatever was submitted; look once."""
    if task.image in _with_pytest:
        return
    with sandboxes.open(msgspec.structs.replace(task, files={})) as sandbox:
        result = sandbox.python("import pytest", _LOOK_S)
    if result.timed_out or result.exit_code:
        raise SandboxError(f"no test of {task.task_id} can run, as pytest does not start: {ending(result)}")
    _with_pytest.add(task.image)


def file_time_ns() -> int:
    """Return the time that a file which is made now gets."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def require_unchanged(task: Task, sandboxes: Sandboxes, young: Sequence[str], since_ns: int) -> None:
    """Raise SandboxError if the host has changed one of these files of the task's image, or cannot tell.

    `young` are the files that the guard of a run found younger than itself. `since_ns` is a `file_time_ns`
    between the opening of the run's sandbox, for which a node may have unpacked the image, and the first code
    of the patch. Call this while that sandbox is open: until it closes, the image is not unpacked anew.
    """
    inner = sandboxes.sandboxes if isinstance(sandboxes, WatchedSandboxes) else sandboxes
    if not young or not isinstance(inner, ImageSandboxes):  # without images a patch can change any file
        return
    program = _LOOK.replace("SINCE", str(since_ns)).replace("FILES", ascii(list(young[:MOST_YOUNG])))
    with sandboxes.open(msgspec.structs.replace(task, files={}, absent=[], start=None)) as sandbox:
        result = sandbox.python(program, _LOOK_S)
    if result.timed_out or result.exit_code:
        raise SandboxError(
            f"nobody can tell whether the image of {task.task_id} was changed while its tests ran: "
            f"the look at its files failed: {ending(result)}"
        )
    if changed := result.output.strip():
        raise SandboxError(
            f"the image of {task.task_id} was changed while its tests ran: {changed}; make and remove images "
            "only while no run uses them"
        )
