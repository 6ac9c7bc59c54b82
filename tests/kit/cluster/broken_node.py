"""python broken_node.py FAULT ARGUMENT...: python with these arguments, on a node that is broken on purpose.

Only the node `c2` is. Where the kernel can be made to misbehave for one process and its children, it is.
"""

import os
import socket
import subprocess
import sys
import time

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


def hangs() -> None:
    time.sleep(600)


FAULTS = {fault.__name__: fault for fault in (no_user_namespaces, hangs)}

if __name__ == "__main__":
    if socket.gethostname() == NODE:
        FAULTS[sys.argv[1]]()
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
