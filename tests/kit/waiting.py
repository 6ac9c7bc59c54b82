"""How tests wait: for what they name. The deadline only ends a hang, on a machine however slow."""

import time
from collections.abc import Callable

DEADLINE_S = 600.0


def until(condition: Callable[[], object], what: str = "it", seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to pass in {seconds:g} s"
        time.sleep(0.01)
