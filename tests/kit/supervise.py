"""A supervisor as a process that tests may kill: python -m tests.kit.supervise JSON."""

import json
import logging
import sys
from pathlib import Path

import msgspec

from hpc_swe.base import loader
from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.lease import Lease
from hpc_swe.cluster.gpu_turns import EngineTurn
from hpc_swe.config.settings import InferenceConfig, LeaseConfig
from hpc_swe.roles.inference.supervisor import Supervisor

logging.basicConfig(level=logging.INFO, format="%(message)s")
settings = json.loads(sys.argv[1])
run = RunDir(Path(settings["run"]))
InferenceConfig.hang_s = settings["inference"].pop("hang_s", InferenceConfig.hang_s)
poll_s = settings["inference"].pop("poll_s", 0.1)
leases = LeaseConfig(ttl_s=60.0)  # nobody here dies by silence
try:
    with Lease(run, "inference", "test", beat_s=0.1) as lease:
        Supervisor(
            run=run,
            lease=lease,
            engine=loader.load("engines", settings["engine"]),
            config=msgspec.convert(settings["inference"], InferenceConfig),
            max_restarts=settings["max_restarts"],
            poll_s=poll_s,
            leases=leases,
            model=Path(settings["model"]),
            context=settings["context"],
            host="127.0.0.1",
            turn=EngineTurn(Path(settings["turns"]), ranks=1) if settings["turns"] else None,
        ).serve()
except HpcSweError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
