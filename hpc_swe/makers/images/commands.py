"""Run commands of this machine; a full disk is an error of its own."""

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE

from hpc_swe.base.errors import HpcSweError, StorageError
from hpc_swe.cluster.processes import completed, die_with_parent

TIMEOUT_S = 4 * 3600.0  # a large image from a slow registry
FULL = re.compile(r"No space left on device|disk quota exceeded", re.IGNORECASE)
"""What commands say of a full disk, in English."""


def run(
    *command: str, ok: Collection[int] = (0,), stdin: str = "", settings: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its output; `settings` are added to its environment.

    The command ends with the builder. Its own children may not, but they hold the builder's lock, so that
    nobody removes files that they still write. Raise StorageError if the disk is full, and HpcSweError with
    the output if the command failed otherwise.
    """
    try:
        job = subprocess.Popen(
            command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            text=True,
            errors="replace",
            close_fds=False,
            preexec_fn=die_with_parent,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(settings or {})},
        )
        done = completed(job, TIMEOUT_S, stdin)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcSweError(f"{command[0]}: {error}") from None
    if done.returncode in ok:
        return done.stdout
    message = f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}"
    raise (StorageError if FULL.search(done.stderr) else HpcSweError)(message)


def remove(tree: Path) -> None:
    """Remove a tree, also where an image has taken away the permission."""
    if tree.exists():
        run("chmod", "-R", "u+rwX", str(tree), ok=(0, 1))
        run("rm", "-rf", str(tree))


def git(folder: Path, *settings: str) -> Sequence[str]:
    """Return the beginning of a git command in a folder; it writes no reflog."""
    quiet = ("core.logAllRefUpdates=false", "advice.detachedHead=false", "safe.directory=*", *settings)
    return ["git", "-C", str(folder), *(word for setting in quiet for word in ("-c", setting))]
