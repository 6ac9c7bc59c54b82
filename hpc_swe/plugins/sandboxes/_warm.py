"""The warm containers of one process: one per image in use, and a few that wait for the next sandbox.

A task set has hundreds of images, and a container costs forty megabytes. So those that idle are bounded,
and whoever has idled longest is ended first. One that a sandbox uses is never ended, and starting one keeps
nobody waiting who wants another image.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from hpc_swe.errors import SandboxError
from hpc_swe.plugins.sandboxes._session import Container


@dataclass
class _Slot:
    """The container of one image, or the place for it."""

    life: ExitStack = field(default_factory=ExitStack)
    container: Container | None = None
    users: int = 0
    starting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_warm(self) -> bool:
        return self.container is not None and self.container.is_alive


@dataclass
class Warm:
    """Containers by image."""

    run: Callable[[str], AbstractContextManager[Container]]
    """Starts the container of an image, and ends it at exit."""
    idle: int
    start_timeout_s: float
    _slots: dict[str, _Slot] = field(default_factory=dict, init=False)
    """Whose use began or ended last comes last."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def container(self, image: str) -> Iterator[Container]:
        """A running container, not ended before exit."""
        with self._lock:
            slot = self._slots[image] = self._slots.pop(image, _Slot())
            slot.users += 1
        try:
            yield self._running(slot, image)
        finally:
            for surplus in self._give_back(slot, image):
                _end(surplus)

    def _running(self, slot: _Slot, image: str) -> Container:
        if not slot.starting.acquire(timeout=self.start_timeout_s):
            raise SandboxError(
                f"awaited the container of {image}, which another thread starts, {self.start_timeout_s:.0f} s"
            )
        try:
            if slot.container is None or not slot.is_warm:
                _end(slot)
                slot.container = slot.life.enter_context(self.run(image))
            return slot.container
        finally:
            slot.starting.release()

    def _give_back(self, slot: _Slot, image: str) -> list[_Slot]:
        """Count a user less; who idles beyond the bound is no longer known, and is to be ended."""
        with self._lock:
            slot.users -= 1
            self._slots[image] = self._slots.pop(image)
            unused = [name for name, known in self._slots.items() if not known.users]
            warm = [name for name in unused if self._slots[name].is_warm]
            dead = [name for name in unused if name not in warm]
            return [self._slots.pop(name) for name in [*dead, *warm[: max(0, len(warm) - self.idle)]]]


def _end(slot: _Slot) -> None:
    slot.container = None
    slot.life.close()
