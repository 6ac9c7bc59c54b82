"""A supervisor as a process that tests may kill: python -m tests.kit.supervise JSON."""

import json
import logging
import sys
from pathlib import Path

import msgspec

from hpc_swe import plugins
from hpc_swe.errors import HpcSweError
from hpc_swe.gpu_turns import EngineTurn
from hpc_swe.roles.inference.supervisor import Supervisor
from hpc_swe.rundir import RunDir
from hpc_swe.settings import InferenceConfig, LeaseConfig
from hpc_swe.store.lease import Lease

logging.basicConfig(level=logging.INFO, format="%(message)s")
settings = json.loads(sys.argv[1])
run = RunDir(Path(settings["run"]))
leases = LeaseConfig(beat_s=0.1, ttl_s=60.0)  # nobody here dies by silence
try:
    with Lease(run, "inference", "test", leases.beat_s) as lease:
        Supervisor(
            run=run,
            lease=lease,
            engine=plugins.load("engines", settings["engine"]),
            config=msgspec.convert(settings["inference"], InferenceConfig),
            leases=leases,
            model=Path(settings["model"]),
            host="127.0.0.1",
            turn=EngineTurn(Path(settings["turns"]), ranks=1) if settings["turns"] else None,
        ).serve()
except HpcSweError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
