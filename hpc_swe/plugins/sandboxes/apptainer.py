"""Sandboxes by Apptainer: one warm container per process and image, one set of namespaces per sandbox.

Starting Apptainer costs about a hundred milliseconds of CPU, a sandbox inside a running container a
tenth of that. Everything a sandbox writes lies in its own tmpfs and every process of it in its own
process namespace, so there is nothing to sweep up: when this process ends, by whatever signal, the
container reads the end of its socket and exits, and the kernel takes the rest.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hpc_swe.errors import ConfigError, SandboxError, boundary
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes._session import Container, Limits
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

_shared: dict[tuple[int, "Apptainer", Path], Container] = {}
_starting = threading.Lock()


class Apptainer(Plugin, frozen=True, kw_only=True):
    """User, process, mount, network, IPC and host-name namespaces of its own; no capabilities."""

    images: str = ".cache/images"
    """Folder of ``<image>.sif`` files; a folder ``<image>`` of ours beside one, unpacked, is preferred."""
    limits: Limits = Limits()
    start_timeout_s: float = 120.0
    shared_container: bool = True
    """False: one container per sandbox, at ten times the cost."""
    python: str = "python3"
    """The image's interpreter that serves the host and runs `Sandbox.python`."""
    warm_up: str = _WARM_UP
    """Program run once per container; every sandbox starts with its imports done."""
    executable: str = "apptainer"

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
        try:
            with closing(self._start(self.image(images[0].stem))) as container, container.open("/trial"):
                return
        except SandboxError as error:
            raise ConfigError(
                f"[sandbox] {images[0].name} cannot be run here: {error}; "
                f"try 'apptainer exec {images[0]} true': user namespaces and /dev/fuse must be allowed"
            ) from error

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """A fresh sandbox of the task's image with the task's files in its work directory."""
        image = self.image(task.image)
        container = self._container(image) if self.shared_container else self._start(image)
        try:
            with container.open(task.workdir) as sandbox:
                with boundary(SandboxError, f"lay out the files of {task.task_id}"):
                    for path, text in task.files.items():
                        sandbox.write(path, text.encode())
                yield sandbox
        finally:
            if not self.shared_container:
                container.close()

    def image(self, name: str) -> Path:
        """The file or folder that an image name stands for."""
        folder, file = Path(self.images, name), Path(self.images, f"{name}.sif")
        # Somebody else's files have no owner inside, and nothing could be written beside them.
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():
            return folder
        if file.exists():
            return file
        raise ConfigError(f"[sandbox] images: no {name}.sif in {self.images}: run containers/build_image.sh")

    def _container(self, image: Path) -> Container:
        key = (os.getpid(), self, image)
        with _starting:
            container = _shared.get(key)
            if container is None or not container.is_alive:
                container = _shared[key] = self._start(image)
            return container

    def _start(self, image: Path) -> Container:
        rights = _AS_USER if os.getuid() else _AS_ROOT
        options = [*_ISOLATION, *rights, "--security", f"seccomp:{_SECCOMP}"]
        command = [self.executable, "-q", "exec", *options, str(image), self.python]
        with boundary(SandboxError, f"start {self.executable}"):
            return Container(command, self.limits, self.warm_up, self.start_timeout_s)
