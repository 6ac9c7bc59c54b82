"""hpc-swe COMMAND ..., or python -m hpc_swe COMMAND ...: one name for all commands of people.

Each is a module that is run as `python -m` runs it, so that both ways of calling it do the same.
"""

import runpy
import sys

from hpc_swe import __version__

COMMANDS = {
    "launch": ("hpc_swe.launch", "start, keep and end a run"),
    "status": ("hpc_swe.status", "what a run is doing"),
    "show": ("hpc_swe.show", "any record of a run as JSON"),
    "evaluate": ("hpc_swe.evaluate", "what a model solves"),
    "doctor": ("hpc_swe.doctor", "what a cluster lacks"),
    "demo": ("hpc_swe.demo", "the whole loop on this machine"),
    "make-model": ("hpc_swe.demo.model", "a tiny model and its tokenizer"),
    "prepare-tasks": ("hpc_swe.tasks.prepare", "rows of tasks"),
    "build-images": ("hpc_swe.tasks.build_images", "sandbox images of tasks"),
    "check-tasks": ("hpc_swe.tasks.check", "which tasks can be graded"),
}


def main() -> None:
    """The command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--version", "-V"):
        print(f"hpc_swe {__version__}")
    elif name in ("--help", "-h"):
        print(_usage())
    elif name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    else:
        print(f"error: {name}: no command\n{_usage()}", file=sys.stderr)
        sys.exit(2)


def _usage() -> str:
    lines = [f"  {name:14} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: hpc-swe COMMAND [WORDS...], or --version; COMMAND --help says more", *lines])


if __name__ == "__main__":
    main()
