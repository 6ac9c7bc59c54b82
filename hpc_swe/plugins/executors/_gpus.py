"""The GPUs of this machine, and which of them a job is given."""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

from hpc_swe.errors import NodeError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ANSWER_S = 60.0
LINE = re.compile(r"^GPU (\d+):.*\(UUID: ([^)]+)\)", re.MULTILINE)


def usable(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process of this machine can use, as CUDA_VISIBLE_DEVICES of `environment` names them.

    Without that variable these are all GPUs of the machine. A name that no GPU has is left out, and so is
    what follows it: CUDA does the same.
    """
    machine = _of_machine()
    if VISIBLE not in environment:
        return [number for number, _ in machine]
    found = []
    for word in filter(None, (word.strip() for word in environment[VISIBLE].split(","))):
        if not _is_there(word, machine):
            break
        found.append(word)
    return found


def choose(here: Sequence[str], taken: Sequence[str], count: int, *, share: bool) -> list[str] | None:
    """`count` of the GPUs, those first that the fewest others have; None where there are too few.

    Args:
        here: The GPUs that may be handed out.
        taken: The GPUs of living jobs, each as often as it was handed out.
        share: Whether a GPU that is taken may be given again.

    Example:
        >>> choose(["0", "1", "2"], ["0"], 2, share=False)
        ['1', '2']
    """
    uses = Counter(taken)
    free = sorted((gpu for gpu in here if share or not uses[gpu]), key=lambda gpu: uses[gpu])
    return free[:count] if len(free) >= count else None


def require(role: str, count: int, environment: Mapping[str, str]) -> None:
    """Refuse to begin work that was configured for GPUs where there are too few.

    Raises:
        NodeError: The message says how many were found.
    """
    found = usable(environment)
    if len(found) < count:
        said = f", {VISIBLE} = {environment[VISIBLE]!r}" if VISIBLE in environment else ""
        raise NodeError(
            f"{role}: the configuration expects {count} GPUs on this node, and {len(found)} can be used"
            f"{said}; ask for GPUs in [executor], or set policy.device or engine.device to 'cpu'"
        )


def _is_there(word: str, machine: Sequence[tuple[str, str]]) -> bool:
    if word.startswith("MIG-"):  # a part of a GPU, which the listing does not show
        return bool(machine)
    return any(word == number or uuid.startswith(word) for number, uuid in machine)


def _of_machine() -> list[tuple[str, str]]:
    """Number and UUID of each GPU; nothing where there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeError(f"nvidia-smi -L: {error}; without it nobody knows this machine's GPUs") from None
    return LINE.findall(done.stdout) if done.returncode == 0 else []
