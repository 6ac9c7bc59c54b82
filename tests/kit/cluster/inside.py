"""PID 1 of one host of the test cluster: makes the host's own view of the machine, says so, and lives on.

`python -I -S inside.py ORDERS`, in fresh namespaces; ORDERS is the JSON of configuration.Host. Everything
that is done here is seen by this host and those nested in it, and is gone when this process ends. Where
standard input is a pipe, its end is the end of the host: so a cluster never outlives a killed test session.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ASIDE = "/mnt"
NETWORK_S = 300.0


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def make_private(folders: dict[str, str], exposed: dict[str, str]) -> None:
    """Empty folders over the machine's own; what is exposed shows through, target to source."""
    mount("-t", "tmpfs", "-o", "mode=700", "aside", ASIDE)
    for number, source in enumerate(exposed.values()):
        Path(f"{ASIDE}/{number}").mkdir()
        mount("--bind", source, f"{ASIDE}/{number}")
    for folder, options in folders.items():
        mount("-t", "tmpfs", "-o", options, "private", folder)
    for number, path in enumerate(exposed):
        Path(path).mkdir(parents=True, exist_ok=True)
        mount("--bind", f"{ASIDE}/{number}", path)
    subprocess.run(["umount", "--recursive", ASIDE], check=True)


def take_control_group(controller: str, name: str) -> None:
    """This host sees its own group where the machine has the root of the hierarchy."""
    folder = Path(controller) / name
    folder.mkdir(exist_ok=True)
    for limit in ("cpuset.cpus", "cpuset.mems"):  # a new group has none, and takes no process until it has
        if (folder / limit).exists():
            (folder / limit).write_text((Path(controller) / limit).read_text())
    mount("--bind", str(folder), controller)


def configure_network(commands: str, interface: str) -> None:
    """A node's interface is put into its namespace from outside, a moment after it has begun."""
    deadline = time.monotonic() + NETWORK_S
    while interface not in [name for _, name in socket.if_nameindex()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster gave this host no interface {interface} in {NETWORK_S} s")
        time.sleep(0.01)
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)


def set_up(host: dict[str, Any]) -> None:
    socket.sethostname(host["name"])
    make_private(host["private"], host["expose"])
    for target, source in host["bind"].items():
        mount("--bind", source, target)
    for controller in host["controllers"]:
        take_control_group(controller, host["group"])
    configure_network(host["network"], host["interface"])


def live() -> None:
    """Orphans become children of PID 1; who ignores SIGCHLD has them reaped by the kernel."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        os.read(0, 1)
        return
    while True:
        signal.pause()


def main() -> None:
    host = json.loads(sys.argv[1])
    set_up(host)
    Path("/proc/self/comm").write_text("ready")
    live()


main()
