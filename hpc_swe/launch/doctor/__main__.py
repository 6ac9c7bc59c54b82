"""Check whether this cluster provides what a run needs: python -m hpc_swe.doctor [CONFIG...].

The doctor asks Slurm three questions. Then it starts one job of a few seconds per partition, whose nodes
measure themselves and each other. It changes nothing, and removes the one folder that it makes.
"""

import argparse
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hpc_swe.agents.sandboxes.base import ImageSandboxes
from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError, HpcSweError
from hpc_swe.cluster import gpus
from hpc_swe.config import config as configuration
from hpc_swe.launch.doctor import examine, srun
from hpc_swe.launch.doctor.examine import ask_slurm, computing, resolve, table, wanted
from hpc_swe.launch.doctor.findings import Finding, PartitionNeeds
from hpc_swe.launch.doctor.srun import ProbeSetup


def diagnose(arguments: argparse.Namespace) -> list[Finding]:
    """Return all findings for the parsed arguments."""
    has_files = any("=" not in word for word in arguments.config)
    config = configuration.from_words(arguments.config) if has_files else None
    executor = configuration.dump(config)["executor"] if config else {}
    sandbox = ""
    if config and isinstance(config.sandbox, ImageSandboxes):
        trial = config.sandbox.for_trial(Path(config.sandbox.images).absolute())
        tree = configuration.dump(msgspec.structs.replace(config, sandbox=trial))
        sandbox = msgspec.json.encode(tree["sandbox"]).decode()
    work = computing(config) if config else {}
    needs = [PartitionNeeds(name, gpus=arguments.gpus) for name in arguments.partition]
    needs = needs or wanted(executor, work, examine.job_needs(config) if config else {})
    token = secrets.token_hex(4)
    folder = _shared(arguments.shared) / f".doctor-{token}"
    os.environ.pop("SLURM_CLUSTERS", None)
    if named := executor.get("cluster", ""):
        os.environ["SLURM_CLUSTERS"] = named  # for scontrol and srun
    found = list(examine.cores(config)) if config else []
    setup = ProbeSetup(folder, token, arguments.python, sandbox, arguments.timeout)
    try:
        cluster = ask_slurm()
    except HpcSweError as error:
        remedy = "run this where sbatch works; all other findings are about this machine only"
        finding = Finding("Slurm", "warning", str(error), remedy, "this machine")
        return [finding, *found, *_unchecked(needs), *srun.probe_this_machine(setup, sum(work.values(), ()))]
    else:
        jobs = min(max(config.counts.values(), default=1), config.executor.array_size) if config else 0
        probed = resolve(cluster, needs, arguments.nodes)
        return [*found, *examine.examine(cluster, probed, jobs, setup)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unchecked(needs: Sequence[PartitionNeeds]) -> Iterator[Finding]:
    """Say that GPUs are wanted, and that this machine has none to look at."""
    wants = any(need.gpus or any(part.least_gib for part in need.computing) for need in needs)
    if wants and not gpus.memory_gib():
        says = "not checked: nvidia-smi finds none on this machine"
        remedy = "run this where sbatch works, or on a machine with GPUs"
        yield Finding("GPU", "warning", says, remedy, "this machine")


def _shared(given: Path | None) -> Path:
    """Return the folder in which nodes meet; raise ConfigError if a named one does not exist.

    The default, runs/, is made by the first start, so until then its place is examined.
    """
    named = given or Path(os.environ.get("HPC_SWE_RUNS") or "")
    if named != Path() and not named.is_dir():
        option = "--shared" if given else "$HPC_SWE_RUNS"
        raise ConfigError(f"{option} = {named}: no such folder, and the doctor makes none; correct it")
    if named == Path():
        named = Path("runs") if Path("runs").is_dir() else Path()
    return named.absolute()


EXAMPLES = ("--shared /shared/me", "configs/demo.toml configs/slurm.toml --shared /shared/me")


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("hpc_swe.doctor", "Check a cluster; print each fault with its remedy.", *EXAMPLES)
    add = parser.add_argument
    add("config", nargs="*", help="as for `launch start`: its partitions, GPUs and images are checked")
    add("--shared", type=cli.path, help="shared folder of the runs (default: $HPC_SWE_RUNS or runs/)")
    add(
        "--partition",
        action="append",
        default=[],
        help="check this partition; repeatable (default: the configuration's)",
    )
    asked = "GPUs per node to request from each --partition"
    add("--gpus", type=cli.number(int, 0), default=0, help=asked)
    add("--nodes", type=cli.number(int, 1), default=2, help="nodes to probe in each partition")
    wait = "wait so long for a partition's nodes"
    add("--timeout", metavar="SECONDS", type=cli.number(float, 1), default=120.0, help=wait)
    add("--python", default=sys.executable, help="interpreter of jobs (default: this one)")
    add("--json", action="store_true", help="print the findings as JSON, for programs")
    return parser


@cli.command
def main() -> int:
    """Print the findings; return 1 when there is a fault."""
    os.umask(0o077)
    started = time.monotonic()
    arguments = cli.parse(_parser())
    findings = diagnose(arguments)
    verdicts = [finding.verdict for finding in findings]
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
        return "fault" in verdicts
    console = tables.screen()
    tables.show(console, table(findings))
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warning", "fault"))
    console.print(f"{counts}, in {time.monotonic() - started:.0f} s")
    return "fault" in verdicts


if __name__ == "__main__":
    main()
