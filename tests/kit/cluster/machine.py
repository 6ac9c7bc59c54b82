"""What a test cluster asks of the machine, and what it has there: one folder and some control groups."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_swe.cluster.processes import start_time
from tests.kit.checkout import ROOT
from tests.kit.cluster import configuration
from tests.kit.cluster.configuration import GPUS, USERS, Layout
from tests.kit.cluster.hosts import NAMESPACES, PATH, PATIENCE_S

UNAVAILABLE = ROOT / ".cache" / "cluster-unavailable"  # written by install.sh
KEPT = (".venv", ".cache")  # of a checkout; `make setup` leaves them readable for all
STATES, STATE = Path("/var/tmp"), "hpc_swe-cluster-"
FOLDERS = ("dev", "etc/slurm", "home", "log", "munge", "mysql", "pids", "shared", "spool", "ctld")
MODES = {
    ".": ("root", 0o755),
    "ctld": ("slurm", 0o755),
    "log": ("slurm", 0o755),
    "munge": ("root", 0o700),
    "munge/key": ("root", 0o400),
    "mysql": ("mysql", 0o700),
    "mysql/init.sql": ("mysql", 0o400),
    "etc/closed": ("root", 0o000),
    "etc/shadow": ("root", 0o600),
    "etc/slurm/slurmdbd.conf": ("slurm", 0o600),
}
PROGRAMS = "slurmctld slurmd slurmdbd sbatch sacctmgr munged munge mariadbd mariadb-install-db cron crontab"
PROGRAMS += " ip unshare nsenter setpriv setsid"


class Unfit(RuntimeError):
    """This machine cannot have a cluster; says what it lacks."""


def check_machine() -> None:
    if os.geteuid() != 0:
        raise Unfit("a test cluster needs root, for namespaces and for jobs of several users")
    if missing := missing_programs():
        raise Unfit(f"this machine lacks {' '.join(missing)}; run tests/kit/cluster/install.sh")


def why_not() -> str | None:
    """Why a test may be skipped here: the machine forbids it, or its packages could not be installed.

    A package that merely is not installed is no such reason, since `make test` installs them.
    """
    if os.geteuid() != 0:
        return "run the tests as root: it needs namespaces, and has jobs of several users"
    namespaces = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "mount", "-t", "tmpfs", "none", "/mnt"]
    if (tried := subprocess.run(namespaces, capture_output=True, text=True, check=False)).returncode:
        return f"this machine forbids namespaces to root: {tried.stderr.strip()}"
    if missing_programs() and (shutil.which("apt-get") is None or UNAVAILABLE.exists()):
        said = UNAVAILABLE.read_text().strip() if UNAVAILABLE.exists() else "it has no apt-get"
        return f"lacks {' '.join(missing_programs())}: {said}"
    return None


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS.split() if shutil.which(program, path=PATH) is None]


def environment() -> list[Path]:
    """Folders of this interpreter and of its packages."""
    packages = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return [Path(sys.prefix), Path(sys.base_prefix), *packages]


def closed_above(path: Path) -> list[str]:
    """The uppermost folder over it that only its owner enters; jobs are ordinary users'."""
    found = [each for each in reversed(path.parents) if not each.stat().st_mode & stat.S_IXOTH]
    return [str(each) for each in found[:1]]


def readable(checkout: Path, copy: Path) -> dict[str, str]:
    """Target to source: the checkout, or a copy that all can read where a umask keeps others out of it."""
    folders = [Path(folder) for folder, *_ in _walk(checkout)]
    if all(folder.stat().st_mode & 0o5 == 0o5 for folder in folders):
        return {str(checkout): str(checkout)}
    for folder in folders:
        (copy / folder.relative_to(checkout)).mkdir()
        for each in folder.iterdir():
            if each.is_file() and not each.is_symlink():
                made = shutil.copy2(each, copy / each.relative_to(checkout))
                Path(made).chmod(each.stat().st_mode | (0o555 if os.access(each, os.X_OK) else 0o444))
    kept = [checkout / name for name in KEPT if (checkout / name).is_dir()]
    return {str(checkout): str(copy)} | {str(each): str(each.resolve()) for each in kept}


def _walk(checkout: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, names, files in os.walk(checkout):
        if Path(folder) == checkout:
            names[:] = [name for name in names if name not in (*KEPT, ".git", "runs")]
        yield folder, names, files


def new_state() -> Path:
    """Its folder belongs to this process until the login host's PID 1 is known."""
    state = Path(tempfile.mkdtemp(prefix=STATE, dir=STATES))
    (state / "owner.new").write_text(f"{os.getpid()} {start_time(os.getpid())}")
    (state / "owner.new").rename(state / "owner")  # a sweeper never sees it empty
    return state


def fill(layout: Layout, settings: Mapping[str, str]) -> None:
    """All that the daemons and users find in the state folder when they begin."""
    state, accounts = Path(layout.state), Path("/etc/passwd").read_text()
    for folder in FOLDERS:
        (state / folder).mkdir(parents=True)
    texts = configuration.files(layout, settings)
    texts["etc/passwd"] = configuration.passwd(accounts, layout.state)
    texts["etc/group"] = configuration.group(Path("/etc/group").read_text())
    texts["etc/shadow"] = configuration.shadow(texts["etc/passwd"])
    texts["etc/closed"] = ""
    for name, text in texts.items():
        (state / name).write_text(text)
    (state / "munge/key").write_bytes(os.urandom(128))
    for user, uid in USERS.items():
        (state / "home" / user).mkdir()
        os.chown(state / "home" / user, uid, uid)
    os.chown(state / "shared", USERS["alice"], USERS["alice"])
    make_gpus(state / "dev", layout.gpu_major)
    for name, (user, mode) in MODES.items():
        shutil.chown(state / name, user)
        (state / name).chmod(mode)


def make_gpus(folder: Path, major: int) -> None:
    """Slurmd takes no regular file for a GPU, and the kernel keeps devices apart."""
    for number in range(GPUS):
        device = folder / f"gpu{number}"
        os.mknod(device, stat.S_IFCHR, os.makedev(major, number))
        device.chmod(0o666)


def living(file: Path) -> int | None:
    """The process whose number and start are in a file, if it lives."""
    try:
        pid, started = file.read_text().split()
    except (FileNotFoundError, ValueError):  # not written yet
        return None
    return int(pid) if start_time(int(pid)) == started else None


def sweep() -> None:
    """Removes what is left of clusters that were killed together with who started them."""
    for state in STATES.glob(f"{STATE}*"):
        owned = living(state / "owner") or living(state / "pids" / configuration.LOGIN)
        if not owned and (state / "owner").exists():
            remove(state)


def remove(state: Path) -> None:
    """A dead cluster's folder and control groups; a group is busy until its last process is reaped."""
    deadline = time.monotonic() + PATIENCE_S
    while groups := [
        folder for top in Path("/sys/fs/cgroup").glob(f"*/{state.name}") for folder in deepest_first(top)
    ]:
        for folder in groups:
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.02)
    shutil.rmtree(state, ignore_errors=True)


def deepest_first(top: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
