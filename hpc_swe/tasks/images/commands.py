"""Commands of this machine; that the disk is full is told apart from all else they may say."""

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpc_swe.errors import HpcSweError, StorageError
from hpc_swe.processes import die_with_parent

LONGEST_S = 4 * 3600.0  # a large image from a slow registry
_FULL = re.compile(r"No space left on device|disk quota exceeded", re.IGNORECASE)


def run(
    *command: str, ok: Collection[int] = (0,), stdin: str = "", settings: Mapping[str, str] | None = None
) -> str:
    """What it prints; `settings` are for its environment.

    It ends with the builder. What it started itself may not, but keeps the builder's lock, so that nobody
    sweeps up what is still written to.

    Raises:
        StorageError: The disk is full.
        HpcSweError: It failed otherwise; its words are the message.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            close_fds=False,
            preexec_fn=die_with_parent,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(settings or {})},
            timeout=LONGEST_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcSweError(f"{command[0]}: {error}") from None
    if done.returncode in ok:
        return done.stdout
    told = f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}"
    raise (StorageError if _FULL.search(done.stderr) else HpcSweError)(told)


def remove(tree: Path) -> None:
    """Also where an image took the right to it away."""
    if tree.exists():
        run("chmod", "-R", "u+rwX", str(tree), ok=(0, 1))
        run("rm", "-rf", str(tree))


def git(folder: Path, *settings: str) -> Sequence[str]:
    """The start of a git command there, whose doings leave no log."""
    quiet = ("core.logAllRefUpdates=false", "advice.detachedHead=false", "safe.directory=*", *settings)
    return ["git", "-C", str(folder), *(word for setting in quiet for word in ("-c", setting))]
