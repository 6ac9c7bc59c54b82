"""Run any command of people by one name: hpc-swe COMMAND ..., or python -m hpc_swe COMMAND ...

Each command is a module, run as `python -m` runs it, so that both ways of calling it do the same.
"""

import runpy
import sys
from pathlib import Path

from hpc_swe import __version__
from hpc_swe.base import cli

COMMANDS = {
    "launch": "start, continue and stop a run",
    "status": "show what a run is doing",
    "show": "print any part of a run as text",
    "report": "write a run as pages for a browser",
    "evaluate": "measure how many tasks a model solves",
    "doctor": "check whether a cluster can run hpc_swe",
    "engine": "print the command of an engine that a run can attach to",
    "demo": "run the whole loop on this machine",
    "demo.model": "write a tiny model and its tokenizer",
    "demo.repair": "measure what a model learns, with controls",
    "prepare": "check rows of tasks, and write them",
    "build_images": "build the sandbox images of tasks",
    "check": "check which tasks a run can train on",
    "mine_history": "make tasks of the history of a git repository",
    "make_bugs": "make buggy programs from code that works",
    "select_rows": "keep the tasks that a model sometimes solves",
    "export_episodes": "write rewarded episodes as rows to train on",
    "unpack_model": "write a model in bfloat16, from FP8 or out of a wrapper of Mistral's",
    "benchmarks.learner": "measure steps of the learner",
    "benchmarks.loop": "compare runs over equally many samples",
}
"""Module below hpc_swe -> what it does."""


@cli.command
def main() -> int:
    """Run the command that the first argument names, or print the list of commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--version", "-V"):
        print(f"hpc_swe {__version__}")
    elif name in ("--help", "-h"):
        print(_usage())
    elif name in COMMANDS or _is_former_name(name):
        del sys.argv[1]
        runpy.run_module(f"hpc_swe.{name}", run_name="__main__", alter_sys=True)
    else:
        print(f"error: {name}: unknown command\n{_usage()}", file=sys.stderr)
        return 2
    return 0


def _is_former_name(name: str) -> bool:
    """Return whether it names a command of makers/ as before 0.2: ``tasks.prepare``."""
    package, _, rest = name.partition(".")
    return package == "tasks" and rest in COMMANDS and (Path(__file__).parent / f"makers/{rest}.py").exists()


def _usage() -> str:
    lines = [f"  {name:22} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: hpc-swe COMMAND [ARGUMENTS...] (or --version); see COMMAND --help", *lines])


if __name__ == "__main__":
    main()
