"""A worker process whose agent never ends: python killed.py RUN MODEL."""

import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / beside) for beside in (".", "unit")]

from stage import Doing, company

from hpc_swe.records import ExitStatus


def forever(sandbox: object, chat: object) -> ExitStatus:
    time.sleep(600)
    return ExitStatus.SUBMITTED


made = company(Path(sys.argv[1]), Path(sys.argv[2]), Doing(forever))
with made.lease() as lease:
    made.worker(lease).work()
