"""A real Slurm of several nodes on this machine, for tests and for trying things out. Needs root.

Slurm's own daemons run in Linux namespaces: a login host, which is the controller too, and in it the nodes,
each with its own address, name, processes, /tmp and /dev/shm. The folder `shared` is the same everywhere.
Nothing else of the machine is touched: its users, its /etc and its network stay as they are, and when the
login host's PID 1 ends, all ends. `python -m tests.kit.cluster` is a shell on one.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec

from hpc_swe.cluster.processes import start_time
from tests.kit.checkout import ROOT
from tests.kit.cluster import configuration, hosts
from tests.kit.cluster.configuration import LOGIN, NODES, ORDINARY, USERS, Layout
from tests.kit.cluster.hosts import PATIENCE_S, Inside, Process, wait_for
from tests.kit.cluster.machine import (
    check_machine,
    closed_above,
    environment,
    fill,
    living,
    new_state,
    readable,
    remove,
    sweep,
)

UMASK = 0o022  # what is written here others read; tests beside these have one of their own
JOB_FIELDS = "JobArrayID,Name,UserName,Partition,State,Reason,NodeList,RestartCnt"


class StartFailed(RuntimeError):
    """The cluster did not come up; the message ends with the log of what failed."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One line of squeue; elements of an array are jobs of their own."""

    id: str
    name: str
    user: str
    partition: str
    state: str
    reason: str
    nodes: str
    restarts: int


class Cluster:
    """Use it as a context manager, or call `stop`."""

    def __init__(self, layout: Layout, settings: Mapping[str, str]) -> None:
        self.layout, self.settings = layout, settings
        self.state = Path(layout.state)
        self.shared = self.state / "shared"
        self._created: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def start(
        cls, nodes: Sequence[str] = NODES, settings: Mapping[str, str] = MappingProxyType({})
    ) -> "Cluster":
        """Ends with this process."""
        os.umask(UMASK)
        check_machine()
        sweep()
        state = new_state()
        shown = {str(each): str(each) for each in environment()} | readable(ROOT, state / "checkout")
        layout = Layout(
            state=str(state),
            nodes=tuple(nodes),
            expose=shown,
            closed=tuple({folder for path in shown for folder in closed_above(Path(path))}),
            controllers=configuration.controllers(Path("/proc/mounts").read_text()),
            gpu_major=configuration.unused_major(Path("/proc/devices").read_text()),
            machine_gpus=tuple(map(str, Path("/dev").glob("nvidia[0-9]*"))),
        )
        cluster = cls(layout, settings)
        try:
            cluster._boot()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # commands

    def run(
        self,
        *command: str | Path,
        user: str = "alice",
        node: str | None = None,
        check: bool = True,
        timeout: float = PATIENCE_S,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs to its end on the login host or a node; options are those of `popen`."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        with self.popen(*command, user=user, node=node, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(command, process.returncode, output, errors)
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(map(str, command))} ended with {done.returncode}\n{errors}{output}"
            )
        return done

    def popen(
        self,
        *command: str | Path,
        user: str = "alice",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **options: Any,
    ) -> Inside:
        """Starts it in a fresh login's environment, and `env`. Dies when the caller's handle is killed."""
        home = f"{self.state}/home/{user}" if user in USERS else "/"
        environment = {**hosts.login_environment(user, home), **(env or {})}
        entered = hosts.enter(
            self._first(node or LOGIN), list(map(str, command)), environment, str(cwd or home)
        )
        return Inside(entered, **{"text": True, "umask": UMASK, "stdin": subprocess.DEVNULL, **options})

    def jobs(self) -> list[Job]:
        """What squeue shows to root."""
        fields = ",".join(f"{field}:\t" for field in JOB_FIELDS.split(","))
        lines = self.run("squeue", "-h", "-a", "-r", "-O", fields, user="root").stdout.splitlines()
        rows = [[value.strip() for value in line.split("\t")] for line in lines]
        return [
            msgspec.convert(dict(zip(Job.__struct_fields__, r, strict=False)), Job, strict=False)
            for r in rows
        ]

    def processes(self, node: str | None = None) -> list[Process]:
        """What runs on the login host or a node, without its PID 1."""
        first = self._find(node or LOGIN)
        return hosts.processes(first) if first else []

    def log(self, name: str) -> str:
        """Of a daemon: what it logged and what it printed."""
        found = [self.state / "log" / f"{name}{end}" for end in (".out", ".log")]
        return "".join(path.read_text(errors="replace") for path in found if path.exists())

    wait_for = staticmethod(wait_for)

    # faults

    def node_poweroff(self, node: str) -> None:
        """Everything on it dies at once."""
        if first := self._find(node):
            os.kill(first, signal.SIGKILL)
            wait_for(f"the end of {node}", lambda: not self._find(node), every=0.01)

    def node_start(self, node: str) -> None:
        """Also puts its slurmd to work."""
        self._create_node(node)
        self._link_node(node)
        self.daemon_start(f"slurmd@{node}")

    def cut(self, node: str) -> None:
        """Its network cable is pulled; jobs on it run on."""
        self._as_root("ip", "link", "set", node, "down")

    def heal(self, node: str) -> None:
        """The cable is back."""
        self._as_root("ip", "link", "set", node, "up")

    def daemon_kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Slurmctld, slurmdbd, mariadbd, munged, cron, or slurmd@<node>; returns when it has ended."""
        for process in self._daemon(name):
            process.kill(sig)
        wait_for(f"the end of {name}", lambda: not self._daemon(name), every=0.02)

    def daemon_start(self, name: str) -> None:
        """Returns when it serves."""
        daemon, host = configuration.daemons(self.layout)[name], name.partition("@")[2] or LOGIN
        environment = hosts.login_environment("root", "/")
        command = hosts.enter(self._first(host), ["setsid", "--fork", *daemon.command], environment)
        with (self.state / "log" / f"{name}.out").open("ab") as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, umask=UMASK)
        with self._blamed_on(name):
            wait_for(f"{name} to serve", lambda: self._serves(name, daemon), every=0.02)

    def resume(self, reason: str = "") -> None:
        """An administrator resumes nodes that drained themselves, for one reason or any."""
        listing = self._as_root("sinfo", "-h", "-a", "-N", "-o", "%N|%T|%E", check=False).stdout
        for node, state, why in {tuple(line.split("|", 2)) for line in listing.splitlines()}:
            if state.startswith("drain") and reason in why:
                self._as_root("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def reconfigure(self, settings: Mapping[str, str]) -> None:
        """Changes slurm.conf as `settings` of `start` do, on top of them, until `repair`."""
        text = configuration.slurm_conf(self.layout, {**self.settings, **settings})
        (self.state / "etc/slurm/slurm.conf").write_text(text)
        self._as_root("scontrol", "reconfigure")

    def repair(self) -> None:
        """Everything is up and idle again: no jobs, no processes of users, the settings of the start."""
        os.umask(UMASK)
        self._end_users_of(LOGIN)
        self.daemon_kill("cron")
        for user in USERS:
            self._as_root("crontab", "-u", user, "-r", check=False)
        for name in configuration.DAEMONS:
            if not self._daemon(name):
                self.daemon_start(name)
        for node in self.layout.nodes:
            self._repair_node(node)
        original = configuration.slurm_conf(self.layout, self.settings)
        if original != (self.state / "etc/slurm/slurm.conf").read_text():
            self.reconfigure({})
        wait_for("all nodes to be idle, with no job left", self._settle)
        for node in self.layout.nodes:
            self._end_users_of(node)

    def stop(self) -> None:
        """Leaves nothing behind. Safe to repeat."""
        if first := self._find(LOGIN):
            os.kill(first, signal.SIGKILL)
            wait_for("the end of the login host", lambda: not self._find(LOGIN), every=0.01)
        for process in self._created.values():
            process.wait(PATIENCE_S)
        remove(self.state)

    # how it starts

    def _boot(self) -> None:
        fill(self.layout, self.settings)
        self._create(LOGIN, configuration.login_host(self.layout), (), True)
        self._prepare_run()
        for node in self.layout.nodes:
            self._create_node(node)
        self.daemon_start("munged")
        self.daemon_start("mariadbd")
        for node in self.layout.nodes:
            self._link_node(node)
        self.daemon_start("slurmdbd")
        self._as_root("sacctmgr", "-i", "load", f"file={self.state}/accounts")
        self.daemon_start("slurmctld")
        for node in self.layout.nodes:
            self.daemon_start(f"slurmd@{node}")
        with self._blamed_on("slurmctld"):
            wait_for("all nodes to be idle", self._settle)

    def _create(self, name: str, host: configuration.Host, prefix: Sequence[str], lifeline: bool) -> None:
        created = hosts.create(host, self.state / "log" / f"{name}.out", prefix, lifeline)
        self._created[name] = created
        with self._blamed_on(name):
            first = hosts.first_process(created)
        (self.state / "pids" / name).write_text(f"{first} {start_time(first)}")

    def _prepare_run(self) -> None:
        """Folders that packages and init scripts make on other machines."""
        self._until_ready(LOGIN)
        self._as_root("install", "--directory", "--owner=slurm", "/run/slurm")
        self._as_root("install", "--directory", "/run/munge", "/run/lock")

    def _create_node(self, node: str) -> None:
        (self.state / "spool" / node).mkdir(exist_ok=True)
        prefix = hosts.enter(self._first(LOGIN), [], hosts.login_environment("root", "/"))
        self._create(node, configuration.node_host(self.layout, node), prefix, False)

    def _link_node(self, node: str) -> None:
        """The cable. `ip` runs in the login host's network alone, so that it takes the machine's pids."""
        within = ["nsenter", f"--target={self._first(LOGIN)}", "--net", "ip"]
        subprocess.run([*within, "link", "delete", node], check=False, capture_output=True)
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self._first(node))]
        subprocess.run([*within, "link", "add", node, *peer], check=True)
        subprocess.run([*within, "link", "set", node, "master", "cluster", "up"], check=True)
        self._until_ready(node)

    def _until_ready(self, name: str) -> None:
        with self._blamed_on(name):
            hosts.until_ready(self._created[name], self._first(name))

    def _repair_node(self, node: str) -> None:
        if not self._find(node):
            self.node_start(node)
            return
        self.heal(node)
        if not self._daemon(f"slurmd@{node}"):
            self.daemon_start(f"slurmd@{node}")

    def _settle(self) -> bool:
        """Whether all is idle; else does what helps. A job may put itself back when it is cancelled."""
        lines = self._as_root("sinfo", "-h", "-a", "-N", "-o", "%N %T").stdout.splitlines()
        states = dict(line.split() for line in lines)
        for node, state in states.items():
            if state.startswith(("down", "drain", "fail")):
                self._as_root("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        owners = {job.user for job in self.jobs()}
        for user in owners:
            self._as_root("scancel", f"--user={user}", check=False)
        return not owners and set(states.values()) == {"idle"}

    def _serves(self, name: str, daemon: configuration.Daemon) -> bool:
        if not self._may_become(name):
            raise ChildProcessError(f"{name} ended")
        return self._as_root(*daemon.ready, check=False).returncode == 0

    # who is where

    def _as_root(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(*command, user="root", check=check)

    def _find(self, name: str) -> int | None:
        """The machine's number of a host's PID 1, if it lives."""
        return living(self.state / "pids" / name)

    def _first(self, name: str) -> int:
        if first := self._find(name):
            return first
        raise ProcessLookupError(f"the host {name} of the cluster {self.state} is off")

    def _daemon(self, name: str) -> list[Process]:
        program, _, node = name.partition("@")
        return [process for process in self.processes(node or None) if process.program == program]

    def _may_become(self, name: str) -> bool:
        """Whether it lives, or a shell that will be it, or one that is just turning into it."""
        program, _, node = name.partition("@")
        commands = [process.arguments for process in self.processes(node or None)]
        return any(not words or f"/{program}" in " ".join(words) for words in commands)

    def _end_users_of(self, host: str) -> None:
        def left() -> list[Process]:
            return [p for p in self.processes(host) if p.uid in ORDINARY]

        def end() -> bool:
            for process in left():
                process.kill()
            return not left()

        wait_for(f"the end of users' processes on {host}", end)

    @contextlib.contextmanager
    def _blamed_on(self, name: str) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, ChildProcessError) as error:
            last = "\n".join(self.log(name).splitlines()[-15:])
            raise StartFailed(f"{error}. The last lines of {name}'s log:\n{last}") from error
