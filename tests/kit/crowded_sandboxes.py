"""Run commands in a sandbox while others of the same user leave descriptors unread: crowded_sandboxes IMAGES

Linux limits the descriptors in flight of ordinary users only. It prints what befell whom, as JSON.
"""

import array
import json
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox
from hpc_swe.base.errors import SandboxError
from tests.kit.scripted import SMALL
from tests.kit.waiting import until

MOST = 4096
FILES = array.array("i", [1] * 250)
# Each thread passes the check of the limit while little is in flight, then waits for room at its receiver.
CROWD = """
import array, os, socket, sys, threading, time
files = array.array("i", [1] * 250)
receivers = []
for number in range(10):
    receivers.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    receivers[-1].bind(f"/tmp/{number}")
    receivers[-1].setblocking(False)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    try:
        while sender.sendto(b"x", f"/tmp/{number}"):
            pass
    except BlockingIOError:
        pass

def send(number):
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.sendmsg([b"files"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], 0, f"/tmp/{number}")

for number in range(100):
    threading.Thread(target=send, args=(number % 10,), daemon=True).start()
time.sleep(2)
for receiver in receivers:
    try:
        while receiver.recv(5, socket.MSG_PEEK) == b"x":
            receiver.recv(5)
    except BlockingIOError:
        pass
time.sleep(10)
"""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, MOST))
    sandboxes = Apptainer(images=sys.argv[1])
    said: dict[str, object] = {}
    with (
        sandboxes.open(SMALL) as one,
        sandboxes.open(SMALL) as other,
        sandboxes.open(SMALL) as quiet,
        ThreadPoolExecutor(2) as pool,
    ):
        crowds = [pool.submit(each.python, CROWD, 120.0) for each in (one, other)]
        answers = []
        while not all(crowd.done() for crowd in crowds):
            answers.append(outcome(quiet.run("echo quiet", 60)))
            with sandboxes.open(SMALL) as fresh:
                answers.append(outcome(fresh.run("echo quiet", 60)))
        said["quiet"] = sorted(set(answers))
        said["crowds"] = [outcome(crowd.result()) for crowd in crowds]
        said["host"] = crowded_by_host(quiet, pool)
    print(json.dumps(said))


def crowded_by_host(quiet: Sandbox, pool: ThreadPoolExecutor) -> list[str]:
    """Let a process outside all sandboxes take what there is: it costs none of them anything but time."""
    running = pool.submit(quiet.run, "touch begun; sleep 4; echo quiet", 60)
    until(lambda: "begun" in quiet.paths(), "the beginning of a command")
    ends = []
    with suppress(OSError):  # the limit
        while True:
            ends.append(socket.socketpair())
            ends[-1][0].setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    socket.send_fds(ends[-1][0], [b"x"], list(FILES))
    found = [outcome(running.result())]
    try:
        quiet.run("echo quiet", 60)
    except SandboxError as error:
        found.append(str(error))
    for pair in ends:
        for end in pair:
            end.close()
    return [*found, outcome(quiet.run("echo quiet", 60))]


def outcome(result: CommandResult) -> str:
    return f"{result.exit_code} {result.output.strip()}{' broken' if result.broke_sandbox else ''}"


if __name__ == "__main__":
    main()
