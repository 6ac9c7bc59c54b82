"""Run swebench's own parsers and report on a log, in a child process with limits.

The log holds text that a patch chose, and a regular expression of swebench's can take minutes over some
texts, during which no other thread of a process runs. So the parsers run in a child with limits of processor
time and memory. A patch that makes the child reach a limit is unresolved. A child that is late without having
used its processor time, or that was killed, is the host's failure.
"""

import json
import os
import resource
import signal
import sys
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from hpc_swe.base.errors import SandboxError, boundary
from hpc_swe.base.records import Task
from hpc_swe.cluster.processes import completed
from hpc_swe.tasks.swebench_package import official

_WALL_S = 300.0


def report(task: Task, patch: str, log: str, cpu_s: int = 20, memory: int = 2 << 30) -> dict[str, Any]:
    """Return swebench's report on a log; ``complaint`` says why there is none.

    The parsers may use `cpu_s` seconds of processor time and `memory` bytes of address space. Raise
    LookupError if swebench has no such parser, and SandboxError if the host did not let the child end.
    """
    extra = task.tests.extra
    if extra["log_parser"] not in official("harness.log_parsers").PARSER_REGISTRY:
        raise LookupError(f"task {task.task_id}: swebench has no log_parser {extra['log_parser']}")
    request = {
        "spec": {
            "instance_id": task.task_id,
            "image": task.image,
            "eval_script_list": task.tests.command.split("\n"),
            "FAIL_TO_PASS": task.tests.fail_to_pass,
            "PASS_TO_PASS": task.tests.pass_to_pass,
            **{name: extra[name] for name in ("repo", "version", "log_parser", "eval_type")},
        },
        "prediction": {"instance_id": task.task_id, "model_patch": patch, "model_name_or_path": "policy"},
        "log": log,
        "limits": {"cpu_s": cpu_s, "memory": memory},
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
    command, stdin = [sys.executable, "-P", "-m", __name__], json.dumps(request).encode()
    try:
        with boundary(SandboxError, "start swebench's parser"):
            child = Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)
            ended = completed(child, _WALL_S, stdin)
    except TimeoutExpired:
        raise SandboxError(
            f"swebench's parser got less than {cpu_s} s of processor time in {_WALL_S:g} s"
        ) from None
    if ended.returncode == -signal.SIGKILL:
        raise SandboxError("swebench's parser was killed")
    if ended.returncode:
        is_slow = ended.returncode == -signal.SIGXCPU
        why = "ran out of processor time" if is_slow else "ran out of memory or could not read the log"
        errors = ended.stderr.decode(errors="replace")[-300:]
        return {"resolved": False, "complaint": f"swebench's parser {why}: {errors}"}
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _main() -> None:
    grading, types = official("harness.grading"), official("types")
    request = json.load(sys.stdin)
    cpu_s, memory = request["limits"]["cpu_s"], request["limits"]["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 60))
    file = os.memfd_create("log")  # swebench reads a file
    with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as log:  # noqa: PTH123
        log.write(request["log"])
    spec, prediction = types.TestSpec(**request["spec"]), request["prediction"]
    reports = grading.get_eval_report(spec, prediction, f"/proc/self/fd/{file}", True)
    json.dump(reports[spec.instance_id], sys.stdout)


if __name__ == "__main__":
    _main()
