"""Set up the process of a role, and turn its errors into exit codes."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_swe.base import cli
from hpc_swe.base.errors import HpcSweError, LostRace
from hpc_swe.base.records import Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.lease import Lease
from hpc_swe.cluster.executors.base import own_job_id
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import existing
from jobs import heartbeat, stacks

log = logging.getLogger(__name__)


def lease(run: RunDir, config: RunConfig, role: Role) -> Lease:
    """Make this process's lease."""
    return Lease(run, role, own_job_id(), config.lease.beat_s)


def run_role(work: Callable[[RunDir, RunConfig], None]) -> None:
    """Run `work` on the run named on the command line; our errors become one line and an exit code."""
    module = f"jobs.{Path(sys.argv[0]).stem}"
    parser = cli.parser(module, "Run one process of a role; `jobs.run` restarts it when it dies.")
    parser.add_argument("run", type=Path, help="folder of the run")
    root: Path = parser.parse_known_args()[0].run
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it logs its whole configuration
    heartbeat.start()
    stacks.register()
    run = RunDir(root.absolute())
    try:
        work(run, existing.load(run, trains=True))
    except LostRace as error:
        log.error("%s; that process continues", error)
        sys.exit(0)
    except HpcSweError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted")
        sys.exit(cli.INTERRUPTED)
