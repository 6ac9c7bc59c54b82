"""Debug in some episodes, end a part of them by force, and count what is left: debug_soak EPISODES KILLED

Eight episodes run at a time in one worker, as in a rollout job: `tool_agent`, the real container, the real
debugger, and scripted replies. Programs hang, fork daemons, flood, crash and are tested by pytest. A fate
befalls an episode at a random moment: its program, process 1 of its sandbox, its container or its worker is
killed, which also ends what the other threads of that worker do; another worker then takes the rest.
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hpc_swe.agents.loops.base import Reply
from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.agents.sandboxes._session import end_namespace, namespace_pids
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Message, Task
from hpc_swe.cluster.processes import descendants, start_time
from hpc_swe.tasks import patch
from tests.kit.checkout import environment
from tests.kit.debugging import CALC, TESTS, made, task
from tests.kit.scripted import call

LANES = 8
FATES = ["program"] * 6 + ["first"] * 3 + ["container"]
PATIENCE_S = 120.0
PR_SET_CHILD_SUBREAPER = 36
PROGRAMS = {
    "ends": "print('begun')\nfor n in range(100):\n    x = n\nprint('ended')\n",
    "hangs": "n = 0\nwhile True:\n    n += 1\n",
    "leaves": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
    "time.sleep(1000)\n    os._exit(0)\nos.wait()\nx = 1\n",
    "floods": "print('x' * 2_000_000)\nx = 1\n",
    "crashes": "def f(x):\n    return 1 / x\n\n\nf(0)\n",
}
AGENT = ToolAgent(
    tools=({"type": "pdb", "timeout_s": 1.0, "grace_s": 2.0}, "rewrite", "evaluate", "submit"), max_turns=20
)


def replies(number: int) -> list[Reply]:
    """What the policy does in an episode."""
    if number % 6 == 5:
        calls = [
            ("start", "test_calc.py::test_total"),
            ("b calc.py:12", ""),
            ("c", ""),
            ("p result", ""),
            ("c", ""),
        ]
    else:
        name = list(PROGRAMS)[number % 6]
        calls = [
            ("start", f"{name}.py"),
            ("b 2", ""),
            ("c", ""),
            ("n", ""),
            ("w", ""),
            ("c", ""),
            ("p 1", ""),
        ]
    made = [call("pdb", command=command, file=file or None) for command, file in calls]
    edit = call("rewrite", path="calc.py", start=1, end=0, new_code="# new\n")
    return [*made, *([call("evaluate"), edit] if number % 12 == 5 else [edit]), *made[1:3], call("submit")]


class Script:
    """The policy; at one of its turns a fate is set off, which befalls the episode a moment later."""

    def __init__(self, number: int, fate: str, sandbox: Sandbox) -> None:
        self.left, self.fate, self.sandbox = replies(number), fate, sandbox
        self.turn = random.randrange(1, len(self.left)) if fate else -1
        self.timer = threading.Timer(random.uniform(0.0, 0.5), self.befall)

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        self.turn -= 1
        if self.turn == 0:
            self.timer.start()
        return self.left.pop(0)

    def befall(self) -> None:
        if self.fate == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        container = self.sandbox._container._process.pid
        inside = {pid: numbers for pid in descendants(container) if len(numbers := namespace_pids(pid)) == 3}
        # A pid in the sandbox's own namespace ends the list; 1 is that namespace's first.
        theirs = [pid for pid, numbers in inside.items() if (numbers[-1] == "1") == (self.fate == "first")]
        if self.fate == "container":
            end_namespace(container)
        elif theirs:
            with suppress(ProcessLookupError):
                os.kill(random.choice(theirs), signal.SIGKILL)


def play(number: int, fate: str, of: Task) -> str:
    try:
        sandboxes = made("apptainer")
        with sandboxes.open(of) as sandbox:
            script = Script(number, fate, sandbox)
            result = AGENT.solve(of, sandbox, script)
            if script.timer.is_alive():
                script.timer.join()
            patch.take(of, sandbox, sandboxes)
            return str(result.exit_status)
    except SandboxError:
        return "host"


def work(words: list[str]) -> None:
    """Be a worker: play the episodes NUMBER or NUMBER:FATE, LANES at a time, and say how they go."""
    of = task(calc=CALC, test_calc=TESTS, **PROGRAMS)

    def one(word: str) -> None:
        number, _, fate = word.partition(":")
        say(f"begun {word}")
        say(f"ended {number} {play(int(number), fate, of)}")

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(one, words))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Left:
    """What is on this machine that was not there before."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.before = self.now()

    def now(self) -> set[str]:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found = {line for line in mounts if "apptainer" in line or "fuse" in line or "/tmp/root" in line}
        found |= {str(path) for path in self.scratch.rglob("*")}
        alive = [pid for pid in descendants(os.getpid()) if start_time(pid)]
        for pid in alive:
            with suppress(OSError):
                found.add(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:100]!r}")
        return found

    def wait(self) -> set[str]:
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.now() - self.before) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def drawn(episodes: int, killed: int) -> dict[int, str]:
    """Return which episodes have a fate."""
    chosen = sorted(random.sample(range(episodes), killed))
    fates = dict.fromkeys(chosen[: killed // 10], "worker")
    return fates | {number: random.choice(FATES) for number in chosen[killed // 10 :]}


def run_workers(fates: dict[int, str], episodes: int, scratch: str) -> dict[str, str]:
    """Let one worker after the other take the episodes that have not begun; return how each ended."""
    words = {str(n): f"{n}:{fates[n]}" if n in fates else str(n) for n in range(episodes)}
    outcomes: dict[str, str] = {}
    while words:
        line = [sys.executable, "-m", "tests.bench.debug_soak", "work", *words.values()]
        worker = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment(TMPDIR=scratch), text=True)
        assert worker.stdout is not None
        for said in worker.stdout:
            verb, word, *outcome = said.split()
            number = word.partition(":")[0]
            if verb == "begun":
                del words[number]
            outcomes[number] = " ".join(outcome) or "ended with its worker"
        worker.wait()
    return outcomes


def soak(episodes: int, killed: int) -> bool:
    """Run all, print what happened, and return whether nothing is left."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    fates = drawn(episodes, killed)
    with tempfile.TemporaryDirectory() as name:
        left = Left(Path(name))
        outcomes = run_workers(fates, episodes, name)
        found = left.wait()
    others = Counter(outcome for number, outcome in outcomes.items() if int(number) not in fates)
    print(f"fates: {dict(Counter(fates.values()))}")
    print(f"outcomes: {dict(Counter(outcomes.values()))}; of those without a fate: {dict(others)}")
    print(f"left: {sorted(found) or 'nothing'}")
    return not found and len(outcomes) == episodes


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(sys.argv[2:])
    else:
        sys.exit(not soak(*map(int, sys.argv[1:])))
