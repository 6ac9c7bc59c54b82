"""What a test cluster consists of, as values: its layout, its hosts' views of the machine, its files' texts.

Nothing here acts. Each cluster has a network of its own, so all have the same names, addresses and ports.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

NODES = ("c1", "c2", "c3", "c4", "g1", "g2")
LOGIN = "login"
USERS = {"alice": 2001, "bob": 2002}
ORDINARY = frozenset(USERS.values())
PREFIX = "10.77.0."
LOGIN_ADDRESS = f"{PREFIX}1"
GPUS = 4
DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld")
PRIVATE = {
    "/tmp": "mode=1777,size=2g",
    "/dev/shm": "mode=1777,size=2g",
    "/var/spool/cron/crontabs": "mode=1730,gid=crontab",
    "/etc/cron.d": "mode=755",  # the machine's own jobs are not the cluster's
}
PASSWORD = "slurm"  # of a database that only the cluster's own login host can reach


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All that distinguishes one cluster from another."""

    state: str
    """Its folder, outside of every private folder."""
    nodes: tuple[str, ...] = NODES
    expose: dict[str, str] = {}
    """What all hosts see at a path: target to source. Most are themselves."""
    closed: tuple[str, ...] = ()
    """Folders which others than root cannot enter, and in which something that is exposed lies."""
    controllers: tuple[str, ...] = ()
    """Mount points of the machine's cgroup v1 controllers; empty where it has none."""
    gpu_major: int = 0
    """Number of a device driver that does not exist; opening such a device says ENXIO."""
    machine_gpus: tuple[str, ...] = ()
    """Device files of the machine's own GPUs, which no job can open: they are not the cluster's."""

    @property
    def name(self) -> str:
        """Of its control groups, too."""
        return Path(self.state).name


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Orders to the PID 1 of a host: how it shall see the machine."""

    name: str
    private: dict[str, str]
    """Folder to options of the tmpfs over it."""
    expose: dict[str, str]
    """Target to source."""
    bind: dict[str, str]
    """Target to source."""
    controllers: tuple[str, ...]
    group: str
    interface: str
    network: str


class Daemon(msgspec.Struct, frozen=True, kw_only=True):
    """How one is started, and a command that succeeds once it serves."""

    command: tuple[str, ...]
    ready: tuple[str, ...] = ("true",)


def address(layout: Layout, host: str) -> str:
    return LOGIN_ADDRESS if host == LOGIN else f"{PREFIX}{11 + layout.nodes.index(host)}"


def has_gpus(node: str) -> bool:
    return node.startswith("g")


def login_host(layout: Layout) -> Host:
    files = {name: f"/etc/{name}" for name in ("passwd", "group", "shadow", "hosts", "slurm", "crontab")}
    closed = dict.fromkeys(layout.machine_gpus, f"{layout.state}/etc/closed")
    return Host(
        name=LOGIN,
        private={**PRIVATE, "/run": "mode=755", **dict.fromkeys(layout.closed, "mode=755")},
        expose=hidden(layout),
        bind={target: f"{layout.state}/etc/{name}" for name, target in files.items()} | closed,
        controllers=layout.controllers,
        group=layout.name,
        interface="lo",
        network="link set lo up\nlink add cluster type bridge\nlink set cluster up\n"
        f"addr add {LOGIN_ADDRESS}/24 dev cluster\n",
    )


def node_host(layout: Layout, node: str) -> Host:
    """It is nested in the login host, and sees what that sees."""
    return Host(
        name=node,
        private={**PRIVATE, **dict.fromkeys(layout.closed, "mode=755")},
        expose=hidden(layout),
        bind={},
        controllers=layout.controllers,
        group=node,
        interface="eth0",
        network=f"link set lo up\naddr add {address(layout, node)}/24 dev eth0\nlink set eth0 up\n"
        f"route add default via {LOGIN_ADDRESS}\n",
    )


def hidden(layout: Layout) -> dict[str, str]:
    """What a private folder would hide, without what comes along with another."""
    found: dict[str, str] = {}
    for path, source in sorted(layout.expose.items()):
        whole = [each for each, origin in found.items() if each == origin]
        comes_along = path == source and any(Path(path).is_relative_to(each) for each in whole)
        above = [*PRIVATE, "/run", *layout.closed]
        if not comes_along and any(Path(path).is_relative_to(folder) for folder in above):
            found[path] = source
    return found


def daemons(layout: Layout) -> dict[str, Daemon]:
    """By name; a node's slurmd is `slurmd@<node>`."""
    state = layout.state
    places = (f"--{name}-file={state}/munge/{name}" for name in ("key", "log", "seed"))
    munged = ("/usr/sbin/munged", "--foreground", "--force", *places)
    found = {
        "munged": Daemon(command=munged, ready=("munge", "--no-input")),
        "mariadbd": Daemon(command=("sh", "-c", database(state)), ready=listens("127.0.0.1", 3306)),
        "slurmdbd": Daemon(command=("/usr/sbin/slurmdbd", "-D"), ready=listens(LOGIN_ADDRESS, 6819)),
        "slurmctld": Daemon(
            command=("/usr/sbin/slurmctld", "-D"), ready=("sh", "-c", "scontrol ping | grep -q UP")
        ),
        "cron": Daemon(command=("/usr/sbin/cron", "-f")),
    }
    for node in layout.nodes:
        found[f"slurmd@{node}"] = Daemon(command=("/usr/sbin/slurmd", "-D", "-N", node))
    return found


def listens(host: str, port: int) -> tuple[str, ...]:
    return ("bash", "-c", f": </dev/tcp/{host}/{port}")


def database(state: str) -> str:
    """The first start fills the data folder."""
    common = f"--no-defaults --user=mysql --datadir={state}/mysql/data --skip-name-resolve"
    install = f"mariadb-install-db {common} --skip-test-db --auth-root-authentication-method=normal"
    # the caches are small, and a commit need not survive the machine
    lean = "--innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-flush-log-at-trx-commit=2"
    lean += " --innodb-lock-wait-timeout=900 --performance-schema=OFF"
    places = f"--socket={state}/mysql/sock --pid-file={state}/mysql/pid --init-file={state}/mysql/init.sql"
    run = f"exec /usr/sbin/mariadbd {common} {places} --port=3306 --bind-address=127.0.0.1 {lean}"
    return f"[ -d {state}/mysql/data/mysql ] || {install} && {run}"


def files(layout: Layout, settings: Mapping[str, str]) -> dict[str, str]:
    """Texts of the files below the state folder that do not depend on the machine's own."""
    return {
        "etc/slurm/slurm.conf": slurm_conf(layout, settings),
        "etc/slurm/gres.conf": gres_conf(layout),
        "etc/slurm/cgroup.conf": CGROUP_CONF,
        "etc/slurm/slurmdbd.conf": SLURMDBD_CONF.format(state=layout.state),
        "etc/hosts": "127.0.0.1 localhost\n"
        + "".join(f"{address(layout, host)} {host}\n" for host in (LOGIN, *layout.nodes)),
        "etc/crontab": "",
        "mysql/init.sql": DATABASE_SQL,
        "accounts": ACCOUNTS,
    }


def passwd(text: str, state: str) -> str:
    """The machine's users, and the cluster's."""
    own = [
        f"{user}:x:{uid}:{uid}:{user}:{state}/home/{user}:/bin/bash" for user, uid in sorted(USERS.items())
    ]
    return with_own(text, own)


def group(text: str) -> str:
    return with_own(text, [f"{user}:x:{uid}:" for user, uid in sorted(USERS.items())])


def shadow(passwd_text: str) -> str:
    """Nobody has a password; the machine's own are not copied."""
    return "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in passwd_text.splitlines())


def with_own(text: str, own: list[str]) -> str:
    """Without lines of the machine that have a name or number of the cluster's."""
    taken = {*USERS, *map(str, USERS.values())}
    kept = [line for line in text.splitlines() if not taken & set(line.split(":")[:3:2])]
    return "\n".join([*kept, *own, ""])


def unused_major(devices: str) -> int:
    """A number of no driver in /proc/devices; a real GPU's would be opened in earnest."""
    taken = set(map(int, re.findall(r"^ *(\d+) ", devices, re.MULTILINE)))
    return next(number for number in range(240, 120, -1) if number not in taken)


def controllers(mounts: str) -> tuple[str, ...]:
    """Mount points in /proc/mounts of cgroup v1; none unless Slurm would find all that it needs."""
    found = [line.split()[1:4] for line in mounts.splitlines() if line.split()[2] == "cgroup"]
    usable = {point: set(options.split(",")) for point, _, options in found if "name=" not in options}
    writable = {point: options for point, options in usable.items() if "rw" in options}
    enough = {"memory", "devices", "freezer", "cpuset", "cpuacct"} <= set().union(*writable.values())
    return tuple(sorted(writable)) if enough else ()


def slurm_conf(layout: Layout, settings: Mapping[str, str]) -> str:
    """Settings replace lines by what they begin with; an empty value removes the line.

    Example: {"JobRequeue": "0", "PartitionName=short": "Nodes=c1 MaxTime=1", "SlurmctldParameters": ""}
    """
    lines = {**SLURM_CONF, **track(layout), **dict(nodes(layout)), **dict(partitions(layout)), **settings}
    lines.update({"SlurmdSpoolDir": f"{layout.state}/spool/%n", "StateSaveLocation": f"{layout.state}/ctld"})
    lines["SlurmctldLogFile"] = f"{layout.state}/log/slurmctld.log"
    lines["SlurmdLogFile"] = f"{layout.state}/log/slurmd@%n.log"
    order = sorted(lines, key=lambda key: (key.startswith("PartitionName"), key.startswith("NodeName")))
    return "".join(f"{key}{' ' if '=' in key else '='}{lines[key]}\n" for key in order if lines[key])


def track(layout: Layout) -> dict[str, str]:
    """Without cgroups a job's daemons outlive it, memory is not limited, and GPUs are not kept apart."""
    if layout.controllers:
        kinds = {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"}
        return {**kinds, "JobAcctGatherType": "jobacct_gather/cgroup"}
    kinds = {"ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none"}
    return {**kinds, "JobAcctGatherType": "jobacct_gather/linux"}


def nodes(layout: Layout) -> Iterable[tuple[str, str]]:
    size = "CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000"
    for node in layout.nodes:
        kind = f"Feature=gpu,h100 Gres=gpu:h100:{GPUS}" if has_gpus(node) else "Feature=cpu"
        yield f"NodeName={node}", f"NodeAddr={address(layout, node)} {size} {kind}"


def partitions(layout: Layout) -> Iterable[tuple[str, str]]:
    every = ",".join(layout.nodes)
    cpu = ",".join(node for node in layout.nodes if not has_gpus(node))
    gpu = ",".join(node for node in layout.nodes if has_gpus(node))
    first = "PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE"
    second = "PriorityTier=1 GraceTime=10 MaxTime=INFINITE"
    if cpu:
        yield "PartitionName=cpu", f"Nodes={cpu} {first} Default=YES"
        yield "PartitionName=short", f"Nodes={cpu} {first}"
    if gpu:
        yield "PartitionName=gpu", f"Nodes={gpu} {first}"
    yield "PartitionName=preemptible", f"Nodes={every} {second} PreemptMode=REQUEUE"
    yield "PartitionName=preemptcancel", f"Nodes={every} {second} PreemptMode=CANCEL"


def gres_conf(layout: Layout) -> str:
    files = f"{layout.state}/dev/gpu[0-{GPUS - 1}]"
    gpus = [node for node in layout.nodes if has_gpus(node)]
    return "".join(f"NodeName={node} Name=gpu Type=h100 File={files}\n" for node in gpus)


SLURM_CONF = {
    "ClusterName": "hpc",
    "SlurmctldHost": f"{LOGIN}({LOGIN_ADDRESS})",
    "SlurmUser": "slurm",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd-%n.pid",
    "AuthType": "auth/munge",
    # a requeued job waits this long and a second more; the default is 120
    "AuthInfo": "cred_expire=5",
    "LogTimeFormat": "iso8601_ms",
    "MailProg": "/bin/true",
    "JobAcctGatherFrequency": "task=2",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_Memory",
    "DefMemPerCPU": "100",
    "GresTypes": "gpu",
    # nodes have more CPUs and memory than the machine
    "SlurmdParameters": "config_overrides",
    "SchedulerParameters": "batch_sched_delay=0,bf_interval=1,sched_interval=2,bf_continue",
    "PriorityType": "priority/basic",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SlurmctldParameters": "preempt_send_user_signal",
    "JobRequeue": "1",
    "ReturnToService": "2",
    "SlurmctldTimeout": "10",
    "SlurmdTimeout": "10",
    "TCPTimeout": "2",
    "MessageTimeout": "10",
    "KillWait": "5",
    "MinJobAge": "60",
    # a machine under load starts and ends processes late
    "BatchStartTimeout": "60",
    "UnkillableStepTimeout": "120",
    "MaxArraySize": "2001",
    # without it a job that can never run is accepted, and waits for ever
    "EnforcePartLimits": "ALL",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": LOGIN_ADDRESS,
    "AccountingStorageEnforce": "associations,limits,qos",
    "AccountingStorageTRES": "gres/gpu",
    "AccountingStoreFlags": "job_comment,job_script",
}

CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainDevices=yes
ConstrainCores=no
"""

SLURMDBD_CONF = f"""\
AuthType=auth/munge
DbdHost={LOGIN}
DbdAddr={LOGIN_ADDRESS}
SlurmUser=slurm
LogFile={{state}}/log/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass={PASSWORD}
StorageLoc=slurm
CommitDelay=1
"""

DATABASE_SQL = f"""\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';
"""

ACCOUNTS = "Cluster - 'hpc'\nParent - 'root'\nAccount - 'lab'\nParent - 'lab'\n" + "".join(
    f"User - '{user}':DefaultAccount='lab'\n" for user in USERS
)
