"""Four episodes at a time, whose agents leave what they can: sandbox_client IMAGES MARK NUMBER[:FATE] ...

Each says when it begins and how it ended. A fate befalls an episode in the midst of its command, out of the
agent's reach: `worker` kills this process, and whoever else is at work in it, but not while another fate has
killed Apptainer: that one case is left to the scheduler.
"""

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

from msgspec.structs import replace

from hpc_swe.agents.sandboxes._session import end_namespace, namespace_pids
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import SandboxError
from hpc_swe.cluster.processes import descendants, start_time
from tests.kit.scripted import SMALL

AGENT = """
import ctypes, os, socket, subprocess, time
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/testbed"):
    with open(f"{folder}/MARK", "w") as file:
        file.write("left behind")
ctypes.CDLL(None).shmget(sum(b"MARK") << 16, 4096, 0o1600)
kept = [socket.create_server(("127.0.0.1", 0))]
for name in ("/tmp/MARK.socket", chr(0) + "MARK"):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(name)
    kept[-1].listen()
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
subprocess.Popen(["setsid", "sleep", "1000"])
open("/testbed/begun", "w").close()
time.sleep(SECONDS)
"""
COMMANDS = [
    "python3 -c 'print(1)'",
    "(setsid sleep 1000 &); trap '' TERM; setsid sleep 1000 & sleep 0.1",
    "kill -9 -1",
    "kill -STOP -1; sleep 0.1",
    "python3 -c 'import os, time\nwhile os.fork() == 0: pass\ntime.sleep(0.1)'",
]
SANDBOXES = Apptainer(images=sys.argv[1], local=os.environ.get("LOCAL", ""))
IMAGES = sorted({path.name.removesuffix(".sif") for path in Path(sys.argv[1]).iterdir()})
FATED_S = 5.0
PATIENCE_S = 180.0
FATED: set[int] = set()
ENDING: dict[int, str | None] = {}
"""FUSE daemons of Apptainers that were killed, with their start times."""
NOT_AT_ONCE = ("worker", "apptainer", "daemon")
ONE = threading.Lock()


def play(number: int, fate: str) -> str:
    task = replace(SMALL, image=IMAGES[number // 4 % len(IMAGES)], files={"a": "b"})
    program = AGENT.replace("MARK", sys.argv[2]).replace("SECONDS", str(FATED_S) if fate else "0.05")
    try:
        with SANDBOXES.open(task) as sandbox, ThreadPoolExecutor(1) as agent:
            running = agent.submit(sandbox.python, program, PATIENCE_S)
            if fate:
                deadline = time.monotonic() + PATIENCE_S
                while "begun" not in sandbox.paths() and not running.done():
                    assert time.monotonic() < deadline, "the agent did not begin"
                    time.sleep(0.01)
                if running.done():
                    return "host"
                FATED.add(number)
                say(f"fated {number} {fate}")
                befall(fate, sandbox)
            done = running.result()
            if not done.broke_sandbox:
                done = sandbox.run(COMMANDS[number % len(COMMANDS)], 30)
            return "broken" if done.broke_sandbox else str(done.exit_code)
    except SandboxError:
        return "host"


def befall(fate: str, sandbox) -> None:
    apptainer = sandbox._container._process.pid
    depth = {pid: numbers for pid in descendants(apptainer) if (numbers := namespace_pids(pid))}
    inside = [pid for pid, numbers in depth.items() if len(numbers) == 3]
    outside = [pid for pid, numbers in depth.items() if len(numbers) == 1]
    before = {pid: start_time(pid) for pid in outside}
    first = [pid for pid in inside if depth[pid][-1] == "1"]
    match fate:
        case "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        case "container":
            end_namespace(apptainer)
        case "apptainer":
            end([apptainer])
            ENDING.update(before)
        case "daemon":
            end(outside or [apptainer])
            ENDING.update(before)
        case "first":
            end(first)
        case "process":
            end(inside)
        case "socket":
            sandbox._host.shutdown(socket.SHUT_RDWR)


def end(processes: list[int]) -> None:
    """One of them, unless another fate was faster."""
    for process in random.sample(processes, min(1, len(processes))):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def work(word: str) -> None:
    number, _, fate = word.partition(":")
    say(f"begun {number}")
    with ONE if fate in NOT_AT_ONCE else nullcontext():
        outcome = play(int(number), fate)
        while fate and int(number) not in FATED:  # another one's fate was faster
            outcome = play(int(number), fate)
        deadline = time.monotonic() + 4 * FATED_S
        while time.monotonic() < deadline and any(start_time(pid) == at for pid, at in dict(ENDING).items()):
            time.sleep(0.01)
        ENDING.clear()
    say(f"ended {number} {outcome}")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, whoever else speaks


def main() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, sys.argv[3:]))
    gc.collect()
    say(f"files {len(os.listdir('/proc/self/fd')) - before}")


if __name__ == "__main__":
    main()
