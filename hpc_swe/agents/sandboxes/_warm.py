"""Keep the containers of one process: one per image in use, and a few idle ones for the next sandboxes.

A task set has hundreds of images, and a container costs forty megabytes. So the number of idle containers is
bounded, and the one that has been idle longest ends first. A container in use never ends, and starting one
does not delay sandboxes of other images.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from hpc_swe.agents.sandboxes._session import Container
from hpc_swe.base.errors import SandboxError


@dataclass
class _Slot:
    """Hold the container of one image, once it has started."""

    stack: ExitStack = field(default_factory=ExitStack)
    container: Container | None = None
    users: int = 0
    starting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_warm(self) -> bool:
        return self.container is not None and self.container.is_alive


@dataclass
class WarmContainers:
    """Share containers between sandboxes, by image."""

    run: Callable[[str], AbstractContextManager[Container]]
    """Starts the container of an image, and ends it at exit."""
    idle: int
    """Largest number of idle containers."""
    start_timeout_s: float
    _slots: dict[str, _Slot] = field(default_factory=dict, init=False)
    """By image, in the order in which their last use began or ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def container(self, image: str) -> Iterator[Container]:
        """Return a running container that does not end before exit."""
        with self._lock:
            slot = self._slots[image] = self._slots.pop(image, _Slot())
            slot.users += 1
        try:
            yield self._running(slot, image)
        finally:
            for surplus in self._release(slot, image):
                _end(surplus)

    def _running(self, slot: _Slot, image: str) -> Container:
        if not slot.starting.acquire(timeout=self.start_timeout_s):
            raise SandboxError(
                f"another thread has not started the container of {image} in {self.start_timeout_s:.0f} s"
            )
        try:
            if slot.container is None or not slot.is_warm:
                _end(slot)
                slot.container = slot.stack.enter_context(self.run(image))
            return slot.container
        finally:
            slot.starting.release()

    def _release(self, slot: _Slot, image: str) -> list[_Slot]:
        """Count one user less; remove and return the idle slots above the bound, for the caller to end."""
        with self._lock:
            slot.users -= 1
            self._slots[image] = self._slots.pop(image)
            unused = [name for name, each in self._slots.items() if not each.users]
            warm = [name for name in unused if self._slots[name].is_warm]
            dead = [name for name in unused if name not in warm]
            return [self._slots.pop(name) for name in [*dead, *warm[: max(0, len(warm) - self.idle)]]]


def _end(slot: _Slot) -> None:
    slot.container = None
    slot.stack.close()
