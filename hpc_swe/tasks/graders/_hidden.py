"""Take a task's hidden tests from its image, as a patch that adds them to what its start leaves."""

import shlex
import threading

import msgspec
from msgspec.structs import replace

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.errors import SandboxError, boundary
from hpc_swe.base.records import Task
from hpc_swe.tasks.patch_text import HIDDEN, normalised, without_digests
from hpc_swe.tasks.swebench_rows import added

_STEP_S = 120.0
_FOUND = ".git/hidden"
_MOST = 256
_known: dict[tuple[str, str, tuple[str, ...]], str] = {}
"""Image, commit and hidden paths -> patch."""
_lock = threading.Lock()


def completed(task: Task, sandboxes: Sandboxes) -> Task:
    """Return the task with the test patch that its image gives, where the task does not hold it.

    Raise SandboxError if the image lacks the tests, or if the host failed.
    """
    if task.tests.extra.get("test_patch") != HIDDEN or not task.start:
        return task
    key = (task.image, task.base_commit, task.start.hidden)
    with _lock:
        patch = _known.get(key, "")
    if not patch:
        patch = _patch(task, sandboxes)
        with _lock:
            while len(_known) >= _MOST:
                del _known[next(iter(_known))]
            _known[key] = patch
    files = msgspec.json.encode([path for path, _ in added(patch)]).decode()
    extra = task.tests.extra | {"test_patch": patch, "test_files": files}
    command = task.tests.command.replace(HIDDEN.rstrip(), patch.rstrip("\n"))
    return replace(task, tests=replace(task.tests, command=command, extra=extra))


def _patch(task: Task, sandboxes: Sandboxes) -> str:
    assert task.start
    inside, names = task.start.inside, task.start.names
    lines = ["set -e"]
    if inside:
        lines.append(f"git rm -rq --cached -- {shlex.join(inside)}")
    lines.append("left=$(git write-tree)")
    for path, name in zip(task.start.hidden, names, strict=True):
        if path not in inside:
            lines.append(f"rm -rf {shlex.quote(name)} && cp -rL {shlex.quote(path)} {shlex.quote(name)}")
    lines.append(f"find {shlex.join(names)} -name __pycache__ -prune -exec rm -rf {{}} +")
    lines.append(f"git add -f -- {shlex.join(names)}")
    options = "--cached --binary --no-color --no-ext-diff --no-renames"
    lines.append(f"git -c core.quotePath=false diff {options} $left > {_FOUND}")
    with sandboxes.open(replace(task, start=None)) as sandbox:
        made = sandbox.run("\n".join(lines), _STEP_S)
        if made.exit_code:
            why = f"image {task.image} lacks the hidden tests of {task.task_id}"
            raise SandboxError(f"{why}: {made.output[-500:]}")
        with boundary(SandboxError, f"read the hidden tests of {task.task_id}"):
            return without_digests(normalised(sandbox.read(_FOUND).decode()))
