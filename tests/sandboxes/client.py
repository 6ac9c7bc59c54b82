"""python client.py IMAGES: keeps four sandboxes open at a time, twenty in all, some of which misbehave."""

import sys
from concurrent.futures import ThreadPoolExecutor

from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.records import Task, TestPlan

COMMANDS = [
    "python3 -c 'print(1)'",
    "(setsid sleep 1000 &); trap '' TERM; setsid sleep 1000 & sleep 0.2",
    "kill -9 -1",
    "kill -STOP -1; sleep 0.2",
    "python3 -c 'import os, time\nwhile os.fork() == 0: pass\ntime.sleep(0.2)'",
]


def play(number: int) -> None:
    task = Task(
        task_id="t",
        taskset="tests",
        prompt="",
        image="python-pytest",
        workdir="/testbed",
        files={"a": "b"},
        tests=TestPlan(command="", fail_to_pass=[], timeout_s=1.0),
    )
    with Apptainer(images=sys.argv[1]).open(task) as sandbox:
        print(number, sandbox.run(COMMANDS[number % len(COMMANDS)], 5).exit_code, flush=True)


with ThreadPoolExecutor(4) as pool:
    list(pool.map(play, range(20)))
