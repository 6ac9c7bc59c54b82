"""Open sandboxes with Apptainer: one warm container per image, one set of namespaces per sandbox.

Starting Apptainer costs about a hundred milliseconds of CPU time, a sandbox inside a running container a
tenth of that. All files of a sandbox are in its own tmpfs and all its processes in its own process namespace,
so nothing needs to be cleaned up: when this process ends, by whatever signal, the container reads the end of
its socket and exits, and the kernel removes the rest.
"""

import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from hpc_swe.agents.sandboxes._inside.program import WARM_UP
from hpc_swe.agents.sandboxes._local import LocalImages
from hpc_swe.agents.sandboxes._session import Container, Limits
from hpc_swe.agents.sandboxes._start import apply_start
from hpc_swe.agents.sandboxes._warm import WarmContainers
from hpc_swe.agents.sandboxes.base import ImageSandboxes, Sandbox, add_files
from hpc_swe.base.errors import ConfigError, SandboxError, boundary
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task
from hpc_swe.cluster.processes import allow_open_files

_ISOLATION = ["--containall", "--no-home", "--cleanenv", "--no-mount=bind-paths", "--net", "--network=none"]
# Keyrings belong to the user id, which no namespace changes; the other calls would widen the attack surface.
_SECCOMP = Path(__file__).with_name("_seccomp.json")
# Maps one id to root inside, in the same way on hosts with and without /etc/subuid.
_AS_USER = ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]
_AS_ROOT = ["--userns"]
_pools: dict[tuple[int, "Apptainer"], WarmContainers] = {}
_pools_lock = threading.Lock()
TRIALS = 3
REMOVE_S = 60.0
_ABSENT = re.compile(r"(/[\w.*?+-]+){2,}")
_REMOVE = """
import fnmatch, functools, os, shutil, sys
@functools.lru_cache(None)  # patterns share folders, and a shell would list each of them again
def names(folder):
    try:
        return os.listdir(folder or "/")
    except OSError:
        return []
@functools.lru_cache(None)
def found(pattern):
    folder, _, last = pattern.rpartition("/")
    paths = []
    for place in found(folder) if folder else [""]:
        if "*" in last or "?" in last:
            fits = fnmatch.filter(names(place), last)
            paths += [place + "/" + name for name in fits if name[0] != "." or last[0] == "."]
        elif os.path.lexists(place + "/" + last):
            paths.append(place + "/" + last)
    return paths
gone = [path for pattern in PATTERNS for path in found(pattern)]
for path in gone:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.remove(path)
sys.exit(", ".join(filter(os.path.lexists, gone)) or None)
"""

log = logging.getLogger(__name__)


class Apptainer(Plugin, ImageSandboxes, frozen=True, kw_only=True):
    """Give each sandbox namespaces of its own, from user to network, and no capabilities."""

    images: str = ".cache/images"
    """Folder of ``<image>.sif`` files; an unpacked folder ``<image>`` that this user owns is preferred."""
    limits: Limits = Limits()
    local: str = ""
    """Folder on the node's own disk, such as ``$TMPDIR``, where each .sif is unpacked once per node."""
    local_gb: float = 50.0
    """Space for unpacked images there; the least recently used image is removed first."""
    mounts: tuple[str, ...] = ()
    """Folders, or squashfs files, that sandboxes see read-only: ``.cache/agents/qwen-code:/opt/agent``."""
    python: str = "python3"
    """Interpreter in the image that serves the host and runs `Sandbox.python`."""
    warm_up: ClassVar[str] = WARM_UP  # runs once per container; every sandbox starts with its imports done
    executable: ClassVar[str] = "apptainer"
    start_timeout_s: ClassVar[float] = 120.0  # of a container
    warm_containers: ClassVar[int] = 8  # idle ones that a process keeps for their image, at 40 MB each
    shares_containers: ClassVar[bool] = True  # all sandboxes of one image are in one container

    def check(self) -> None:
        """Raise ConfigError, with the remedy, when this machine cannot open sandboxes."""
        if shutil.which(self.executable) is None:
            raise ConfigError(
                f"[sandbox] no {self.executable} on PATH: install Apptainer, or set type = 'process'"
            )
        images = sorted(Path(self.images).glob("*.sif"))
        if not images:
            raise ConfigError(
                f"[sandbox] images: no .sif file in {self.images}: run containers/build_image.sh"
            )
        for trial in range(TRIALS):  # one failure may have another cause than the configuration
            try:
                with self._running(images[0].stem) as container, container.open("/trial"):
                    return
            except SandboxError as error:
                log.warning("trial %d of %d failed: %s", trial + 1, TRIALS, error)
                last = error
        raise ConfigError(
            f"[sandbox] {images[0].name} cannot be run here: {last}; "
            f"try 'apptainer exec {images[0]} true': user namespaces and /dev/fuse must be allowed"
        ) from last

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """Open a fresh sandbox of the task's image with the task's files in its work directory."""
        containers = self._containers().container if self.shares_containers else self._running
        with containers(task.image) as container, container.open(task.workdir) as sandbox:
            if task.absent:  # before a patch is laid out, which could be what cannot be removed
                _remove(sandbox, task)
            add_files(sandbox, task.files, f"lay out the files of {task.task_id}")
            apply_start(sandbox, task)
            yield sandbox

    def for_trial(self, images: Path) -> "Apptainer":
        """Return the same sandboxes for another folder of images, with one container per sandbox."""
        return Apart(**msgspec.structs.asdict(self) | {"images": str(images), "local": ""})

    def image(self, name: str) -> Path:
        """Return file or folder of an image; raise ConfigError if there is none or others may change it."""
        folder, file = Path(self.images, name), Path(self.images, f"{name}.sif")
        # Files of other users have no owner inside a container, and nothing could be written beside them.
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():
            return folder
        if file.exists():
            _require_ours(file)
            return file
        raise ConfigError(
            f"[sandbox] images: no {name}.sif in {self.images}: run python -m hpc_swe.build_images "
            "for SWE-bench and published sets, or containers/build_image.sh for python-pytest"
        )

    def _containers(self) -> WarmContainers:
        with _pools_lock:
            key = (os.getpid(), self)
            if key not in _pools:
                _pools[key] = WarmContainers(self._running, self.warm_containers, 2 * self.start_timeout_s)
            return _pools[key]

    @contextmanager
    def _running(self, name: str) -> Iterator[Container]:
        sif = Path(self.images, f"{name}.sif")
        with ExitStack() as life:
            local = LocalImages(self.local, self.local_gb, self.start_timeout_s, self.executable)
            tree = life.enter_context(local.unpacked(sif)) if self.local and sif.exists() else None
            try:
                container = self._start(tree or self.image(name))
            except SandboxError:
                if tree is None:
                    raise
                container = self._start(self.image(name))
                life.close()
                local.forget(tree)
            yield life.enter_context(closing(container))

    def _start(self, image: Path) -> Container:
        rights = _AS_USER if os.getuid() else _AS_ROOT
        options = [*_ISOLATION, *rights, "--security", f"seccomp:{_SECCOMP}"]
        shown = [self._mount(mount) for mount in self.mounts]
        options += [word for option, _ in shown for word in ("--bind", option)]
        command = [self.executable, "-q", "exec", *options, str(image), self.python]
        targets = [target for _, target in shown]
        allow_open_files()
        with boundary(SandboxError, f"start {self.executable}"):
            return Container(command, self.limits, self.warm_up, self.start_timeout_s, targets)

    def _mount(self, mount: str) -> tuple[str, str]:
        source, _, target = mount.rpartition(":")
        path = Path(source).resolve()
        if not source or not path.exists() or not target.startswith("/"):
            raise ConfigError(
                f"[sandbox] mounts: {mount!r} must be FOLDER:/WHERE, and the folder must exist; "
                "containers/build_agents.sh makes those of the agents that ship"
            )
        return f"{path}:{target}:ro" if path.is_dir() else f"{path}:{target}:image-src=/,ro", target


class Apart(Apptainer, frozen=True, kw_only=True):
    """Give each sandbox a container of its own, which costs ten times as much."""

    shares_containers: ClassVar[bool] = False


def _remove(sandbox: Sandbox, task: Task) -> None:
    """Remove what must be absent from the sandbox's own layer; the image below stays as it is.

    Raise SandboxError if something is still there.
    """
    if wrong := [pattern for pattern in task.absent if not _ABSENT.fullmatch(pattern)]:
        raise SandboxError(f"{task.task_id}: absent: {wrong[0]!r} is no pattern of an absolute path")
    result = sandbox.python(_REMOVE.replace("PATTERNS", repr(task.absent)), REMOVE_S)
    if result.exit_code:
        raise SandboxError(f"{task.task_id}: cannot remove {task.absent}: {result.output[-500:]}")


def _require_ours(file: Path) -> None:
    """Refuse an image that other users may change: what runs in it decides rewards."""
    for path in (file.resolve(), file.resolve().parent):
        found = path.stat()
        # In a folder with the sticky bit, users cannot rename files of others.
        is_shared = path.is_dir() and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"[sandbox] images: {path} belongs to user {found.st_uid}; copy it to a folder of yours"
            )
        if found.st_mode & 0o022 and not is_shared:
            raise ConfigError(f"[sandbox] images: others may write {path}: run chmod go-w {path}")
