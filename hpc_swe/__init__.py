"""Train software-engineering agents with GRPO on a Slurm cluster."""

import sys
from types import TracebackType

__path__ += [f"{__path__[0]}/{room}" for room in ("view", "launch", "makers")]  # python -m hpc_swe.status
__version__ = "0.2.0"


def _print_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"] or sys.argv[0].endswith("/hpc-swe"):  # until `cli.command` does it
    sys.excepthook = _print_interrupted
