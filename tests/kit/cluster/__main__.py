"""The test cluster by hand: python -m tests.kit.cluster up, shell, run, node, daemon, down."""

import argparse
import os
import sys
from pathlib import Path
from signal import SIGKILL, SIGTERM

from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster
from tests.kit.cluster.configuration import NODES

HERE = ROOT / ".cache" / "cluster"
TRY = """\
You are alice on the login node of a Slurm cluster. Try:
  sinfo; squeue; sacct                    what there is, what runs, what ran
  srun -N2 hostname                       two nodes; -p gpu --gres=gpu:1 for a GPU without a driver
  sbatch -p preemptible --wrap 'sleep 99' a job that others push aside
  cd {root}     the checkout; {shared} is shared by all nodes
From another terminal, as root:
  python -m tests.kit.cluster node c1 poweroff    (or start, cut, heal)
  python -m tests.kit.cluster daemon slurmctld kill    (or stop, start)
"""


def main() -> int:
    arguments = parser().parse_args()
    verbs = {"up": up, "down": down, "shell": shell, "node": node, "daemon": daemon, "run": run}
    return verbs[arguments.verb](arguments)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.kit.cluster", description=__doc__)
    top.add_argument("--state", type=Path, default=HERE, help="the file that says where the cluster is")
    verbs = top.add_subparsers(dest="verb", required=True)
    for name, text in (
        ("up", "start one that stays until `down`"),
        ("shell", "be alice on its login node; starts one for as long as the shell lasts if none is up"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument(
            "--nodes", type=lambda text: text.split(","), default=NODES, help="c1,c2,g1; g* have GPUs"
        )
        verb.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf"
        )
        verb.add_argument(
            "--expose", action="append", default=[], help="a path below /tmp that nodes shall see"
        )
    verbs.add_parser("down", help="end it and remove all of it")
    verb = verbs.add_parser("node", help="what happens to nodes")
    verb.add_argument("name")
    verb.add_argument("what", choices=("poweroff", "start", "cut", "heal"))
    verb = verbs.add_parser(
        "daemon", help="what happens to slurmctld, slurmdbd, mariadbd, cron, slurmd@<node>"
    )
    verb.add_argument("name")
    verb.add_argument("what", choices=("kill", "stop", "start"))
    verb = verbs.add_parser("run", help="run -- COMMAND: on the login node or another")
    verb.add_argument("--user", default="alice")
    verb.add_argument("--node")
    verb.add_argument("command", nargs=argparse.REMAINDER)
    return top


def found(state: Path) -> Cluster | None:
    if not state.exists():
        return None
    folder = Path(state.read_text().strip())
    cluster = Cluster.attach(folder) if folder.exists() else None
    return cluster if cluster and cluster.is_up else None


def attached(arguments: argparse.Namespace) -> Cluster:
    if cluster := found(arguments.state):
        return cluster
    sys.exit(f"no cluster is up by {arguments.state}; start one: python -m tests.kit.cluster up")


def start(arguments: argparse.Namespace, lifeline: bool) -> Cluster:
    settings = dict(setting.split("=", 1) for setting in arguments.set)
    cluster = Cluster.start(arguments.nodes, settings, arguments.expose, lifeline)
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    arguments.state.write_text(f"{cluster.state}\n")
    return cluster


def up(arguments: argparse.Namespace) -> int:
    if cluster := found(arguments.state):
        print(f"a cluster is up already: {cluster.state}")
        return 0
    cluster = start(arguments, lifeline=False)
    print(f"up after {cluster.seconds['idle']} s; shared folder {cluster.shared}; logs {cluster.state}/log")
    return 0


def down(arguments: argparse.Namespace) -> int:
    if cluster := found(arguments.state):
        cluster.stop()
    arguments.state.unlink(missing_ok=True)
    return 0


def shell(arguments: argparse.Namespace) -> int:
    cluster, ours = found(arguments.state), False
    if cluster is None:
        cluster, ours = start(arguments, lifeline=True), True
    print(TRY.format(root=ROOT, shared=cluster.shared))
    try:
        return interactive(cluster, ["bash", "--login"], "alice", None)
    finally:
        if ours:
            down(arguments)


def interactive(cluster: Cluster, command: list[str], user: str, node: str | None) -> int:
    terminal = {"TERM": os.environ.get("TERM", "dumb")}
    with cluster.popen(*command, user=user, node=node, env=terminal, stdin=None) as process:
        return process.wait()


def node(arguments: argparse.Namespace) -> int:
    cluster = attached(arguments)
    acts = {
        "poweroff": cluster.node_poweroff,
        "start": cluster.node_start,
        "cut": cluster.cut,
        "heal": cluster.heal,
    }
    acts[arguments.what](arguments.name)
    return 0


def daemon(arguments: argparse.Namespace) -> int:
    cluster = attached(arguments)
    if arguments.what == "start":
        cluster.daemon_start(arguments.name)
    else:
        cluster.daemon_kill(arguments.name, SIGKILL if arguments.what == "kill" else SIGTERM)
    return 0


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    return interactive(attached(arguments), command or ["bash"], arguments.user, arguments.node)


if __name__ == "__main__":
    sys.exit(main())
