"""Sandboxes by Apptainer: warm containers by image, one set of namespaces per sandbox.

Starting Apptainer costs about a hundred milliseconds of CPU, a sandbox inside a running container a
tenth of that. Everything a sandbox writes lies in its own tmpfs and every process of it in its own
process namespace, so there is nothing to sweep up: when this process ends, by whatever signal, the
container reads the end of its socket and exits, and the kernel takes the rest.
"""

import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from hpc_swe.errors import ConfigError, SandboxError, boundary
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes._local import LocalImages
from hpc_swe.plugins.sandboxes._session import Container, Limits
from hpc_swe.plugins.sandboxes._warm import Warm
from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.records import Task

_ISOLATION = ["--containall", "--no-home", "--cleanenv", "--no-mount=bind-paths", "--net", "--network=none"]
# Keyrings belong to the user id, which no namespace changes; the other calls only widen what can be attacked.
_SECCOMP = Path(__file__).with_name("_seccomp.json")
# One id, mapped to root inside: the same on hosts with and without /etc/subuid.
_AS_USER = ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]
_AS_ROOT = ["--userns"]
_WARM_UP = """
try:
    import importlib, pytest, _pytest.config
    for name in _pytest.config.default_plugins:
        importlib.import_module(f"_pytest.{name}")
except ImportError:
    print("no pytest in this image")
"""

_warm: dict[tuple[int, "Apptainer"], Warm] = {}
_warming = threading.Lock()
TRIALS = 3

log = logging.getLogger(__name__)


class Apptainer(Plugin, frozen=True, kw_only=True):
    """User, process, mount, network, IPC and host-name namespaces of its own; no capabilities."""

    images: str = ".cache/images"
    """Folder of ``<image>.sif`` files; a folder ``<image>`` of ours beside one, unpacked, is preferred."""
    limits: Limits = Limits()
    start_timeout_s: float = 120.0
    """Seconds that a container may take to start."""
    shared_container: bool = True
    """False: one container per sandbox, at ten times the cost."""
    warm_containers: int = 8
    """Containers of a process that idle until their image is wanted again, at 40 MB each."""
    local: str = ""
    """A folder on the node's own disk, as ``$TMPDIR``: a .sif is unpacked there once per node, then run."""
    local_gb: float = 50.0
    """What unpacked images may take there; whose use is longest ago goes first."""
    mounts: tuple[str, ...] = ()
    """Folders, or squashfs files, that sandboxes see read-only: ``.cache/agents/qwen-code:/opt/agent``."""
    python: str = "python3"
    """The image's interpreter that serves the host and runs `Sandbox.python`."""
    warm_up: str = _WARM_UP
    """Program run once per container; every sandbox starts with its imports done."""
    executable: str = "apptainer"
    """Name or path of Apptainer."""

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
        for trial in range(TRIALS):  # a container that somebody kills says nothing about the configuration
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
        """A fresh sandbox of the task's image with the task's files in its work directory."""
        containers = self._containers().container if self.shared_container else self._running
        with containers(task.image) as container, container.open(task.workdir) as sandbox:
            with boundary(SandboxError, f"lay out the files of {task.task_id}"):
                for path, text in task.files.items():
                    sandbox.write(path, text.encode())
            yield sandbox

    def image(self, name: str) -> Path:
        """The file or folder that an image name stands for."""
        folder, file = Path(self.images, name), Path(self.images, f"{name}.sif")
        # Somebody else's files have no owner inside, and nothing could be written beside them.
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():
            return folder
        if file.exists():
            _require_ours(file)
            return file
        raise ConfigError(
            f"[sandbox] images: no {name}.sif in {self.images}: run containers/build_image.sh, "
            "or python -m hpc_swe.tasks.build_images for tasks of SWE-bench"
        )

    def _containers(self) -> Warm:
        with _warming:
            key = (os.getpid(), self)
            if key not in _warm:
                _warm[key] = Warm(self._running, self.warm_containers, 2 * self.start_timeout_s)
            return _warm[key]

    @contextmanager
    def _running(self, name: str) -> Iterator[Container]:
        """A container of an image, ended at exit."""
        sif = Path(self.images, f"{name}.sif")
        with ExitStack() as life:
            tree = None
            local = LocalImages(self.local, self.local_gb, self.start_timeout_s, self.executable)
            if self.local and sif.exists():
                tree = life.enter_context(local.unpacked(sif))
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
        with boundary(SandboxError, f"start {self.executable}"):
            targets = [target for _, target in shown]
            return Container(command, self.limits, self.warm_up, self.start_timeout_s, targets)

    def _mount(self, mount: str) -> tuple[str, str]:
        """Apptainer's option, and where it appears."""
        source, _, target = mount.rpartition(":")
        path = Path(source).resolve()
        if not source or not path.exists() or not target.startswith("/"):
            raise ConfigError(
                f"[sandbox] mounts: {mount!r} must be FOLDER:/WHERE, and the folder must be there; "
                "containers/build_agents.sh makes those of the agents that ship"
            )
        return f"{path}:{target}:ro" if path.is_dir() else f"{path}:{target}:image-src=/,ro", target


def _require_ours(file: Path) -> None:
    """Refuse an image that somebody else may change: what runs in it is what rewards are made of."""
    for path in (file.resolve(), file.resolve().parent):
        found = path.stat()
        is_shared = path.is_dir() and found.st_mode & stat.S_ISVTX  # where nobody renames another's files
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"[sandbox] images: {path} belongs to user {found.st_uid}; copy it to a folder of yours"
            )
        if found.st_mode & 0o022 and not is_shared:
            raise ConfigError(f"[sandbox] images: others may write {path}: run chmod go-w {path}")
