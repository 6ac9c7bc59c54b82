"""Run any command of people by one name: hpc-swe COMMAND ..., or python -m hpc_swe COMMAND ...

Each command is a module, run as `python -m` runs it, so that both ways of calling it do the same.
"""

import runpy
import sys

from hpc_swe import __version__

COMMANDS = {
    "launch": ("hpc_swe.launch", "start, continue and stop a run"),
    "status": ("hpc_swe.status", "show what a run is doing"),
    "show": ("hpc_swe.show", "print any part of a run as text"),
    "report": ("hpc_swe.report", "write a run as pages for a browser"),
    "evaluate": ("hpc_swe.evaluate", "measure how many tasks a model solves"),
    "doctor": ("hpc_swe.doctor", "check whether a cluster can run hpc_swe"),
    "demo": ("hpc_swe.demo", "run the whole loop on this machine"),
    "make-model": ("hpc_swe.demo.model", "write a tiny model and its tokenizer"),
    "prepare-tasks": ("hpc_swe.tasks.prepare", "convert tasks of SWE-bench's format to rows"),
    "build-images": ("hpc_swe.tasks.build_images", "build the sandbox images of tasks"),
    "check-tasks": ("hpc_swe.tasks.check", "check which tasks can be graded"),
}


def main() -> None:
    """Run the command that the first argument names, or print the list of commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--version", "-V"):
        print(f"hpc_swe {__version__}")
    elif name in ("--help", "-h"):
        print(_usage())
    elif name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    else:
        print(f"error: {name}: unknown command\n{_usage()}", file=sys.stderr)
        sys.exit(2)


def _usage() -> str:
    lines = [f"  {name:14} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: hpc-swe COMMAND [ARGUMENTS...] (or --version); see COMMAND --help", *lines])


if __name__ == "__main__":
    main()
