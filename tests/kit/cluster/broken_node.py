"""python broken_node.py FAULT ARGUMENT...: python with these arguments, on a node that is broken on purpose.

Only the node `c2` is. Where the kernel can be made to misbehave for one process and its children, it is.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODE = "c2"


def no_user_namespaces() -> None:
    """A namespace that may have none below it, as sysctl user.max_user_namespaces=0 makes of a node."""
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        inside,
        "sh",
        sys.executable,
        *sys.argv[2:],
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


def no_apptainer() -> None:
    os.environ["PATH"] = "/var/empty"


def no_tensorboard() -> None:
    """The same packages, but one, seen by an interpreter without packages of its own."""
    packages = Path(tempfile.mkdtemp())
    sites = [Path(folder) for folder in sys.path if folder.endswith("site-packages")]
    for entry in (entry for site in sites for entry in site.iterdir()):
        if not entry.name.startswith("tensorboard") and not (packages / entry.name).is_symlink():
            (packages / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", *sys.argv[2:]]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{packages}:{Path.cwd()}"}, check=False)
    shutil.rmtree(packages)
    sys.exit(done.returncode)


def hangs() -> None:
    time.sleep(600)


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        no_user_namespaces,
        no_apptainer,
        no_tensorboard,
        hangs,
    )
}

if __name__ == "__main__":
    if socket.gethostname() == NODE:
        FAULTS[sys.argv[1]]()
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
