"""A worker process whose agent never ends: python -m tests.kit.killed_worker RUN MODEL."""

import sys
import time
from pathlib import Path

from hpc_swe.base.records import ExitStatus
from tests.kit.stage import Doing, rig


def forever(sandbox: object, chat: object) -> ExitStatus:
    time.sleep(600)
    return ExitStatus.SUBMITTED


made = rig(Path(sys.argv[1]), Path(sys.argv[2]), Doing(forever))
with made.lease() as lease:
    made.worker(lease).work()
