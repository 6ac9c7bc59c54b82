"""Find the GPUs of this machine, choose those of a job, and count GPUs in Slurm's options."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from subprocess import PIPE, Popen, TimeoutExpired

from hpc_swe.base.errors import NodeError
from hpc_swe.cluster.processes import completed

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
"""With 1, NCCL 2.30 and newer let processes of one group share a GPU: for correctness only, it is slow."""
LIST_TIMEOUT_S = 60.0
_LISTED = re.compile(r"^GPU (\d+):.*\(UUID: ([^)]+)\)", re.MULTILINE)
_IN_GRES = re.compile(r"(?:^|,)(?:gres/)?gpu(?::[^:,(]*[^\d:,(][^:,(]*)*(?::(\d+))?(?=$|[,(])")


def usable(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process of this machine can use, by the names in its CUDA_VISIBLE_DEVICES.

    Without that variable in `environment` these are all GPUs of the machine. A name that no GPU has is left
    out together with all names after it, as CUDA does.
    """
    machine = _machine_gpus()
    if VISIBLE not in environment:
        return [number for number, _ in machine]
    found = []
    for word in filter(None, (word.strip() for word in environment[VISIBLE].split(","))):
        if not _exists(word, machine):
            break
        found.append(word)
    return found


def memory_gib() -> float:
    """Return the memory of this machine's smallest GPU in GiB; 0 where that is unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = completed(Popen(command, text=True, stdout=PIPE, stderr=PIPE), LIST_TIMEOUT_S)
    except (OSError, TimeoutExpired):
        return 0.0
    return min((int(word) for word in done.stdout.split() if word.isdecimal()), default=0) / 1024


def choose(available: Sequence[str], taken: Sequence[str], count: int, *, share: bool) -> list[str] | None:
    """Choose the `count` available GPUs that the fewest jobs have; return None where there are too few.

    `taken` has the GPUs of live jobs, each as often as jobs have it; with `share` they may be chosen, too.

    Example:
        >>> choose(["0", "1", "2"], ["0"], 2, share=False)
        ['1', '2']
    """
    uses = Counter(taken)
    free = sorted((gpu for gpu in available if share or not uses[gpu]), key=lambda gpu: uses[gpu])
    return free[:count] if len(free) >= count else None


def require(role: str, count: int, environment: Mapping[str, str]) -> None:
    """Raise NodeError unless a role that was configured for GPUs finds `count` of them on this node."""
    found = usable(environment)
    if len(found) < count:
        visible = f", {VISIBLE} = {environment[VISIBLE]!r}" if VISIBLE in environment else ""
        raise NodeError(
            f"{role}: the configuration expects {count} GPUs on this node, and {len(found)} can be used"
            f"{visible}; ask for GPUs in [executor], or set policy.device or engine.device to 'cpu'"
        )


def needed(ranks: int, environment: Mapping[str, str]) -> int:
    """Return how many GPUs so many ranks of a node need at least."""
    return min(ranks, 1) if environment.get(SHARED) == "1" else ranks


def of_rank(rank: int, count: int, environment: Mapping[str, str]) -> int:
    """Return which of a node's `count` GPUs a rank of this node uses: its own, unless ranks share them.

    Example:
        >>> of_rank(3, 2, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        1
    """
    return rank % count if environment.get(SHARED) == "1" else rank


def in_gres(gres: str) -> int:
    """Count the GPUs in a value of Slurm's --gres, or in a node's Gres.

    Example:
        >>> in_gres("gpu:h100:4(S:0-1),shard:8")
        4
    """
    return sum(int(count or 1) for count in _IN_GRES.findall(gres))


def in_options(options: Mapping[str, object]) -> int:
    """Count the GPUs of each node that options of sbatch give with their number.

    Names may have dashes or underscores. False leaves an option out.

    Example:
        >>> in_options({"gpus-per-node": "h100:4", "qos": "long"})
        4
    """
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not False}
    return max(in_gres(str(given.get("gres", ""))), in_gres(f"gpu:{given.get('gpus-per-node', 0)}"))


def _exists(word: str, machine: Sequence[tuple[str, str]]) -> bool:
    if word.startswith("MIG-"):  # a part of a GPU, which the listing does not show
        return bool(machine)
    return any(word == number or uuid.startswith(word) for number, uuid in machine)


def _machine_gpus() -> list[tuple[str, str]]:
    """Return the number and UUID of each GPU; none where there is no driver."""
    command = ["nvidia-smi", "-L"]
    try:
        done = completed(Popen(command, text=True, stdout=PIPE, stderr=PIPE), LIST_TIMEOUT_S)
    except FileNotFoundError:
        return []
    except (OSError, TimeoutExpired) as error:
        raise NodeError(f"nvidia-smi -L: {error}; it is needed to find this machine's GPUs") from None
    return _LISTED.findall(done.stdout) if done.returncode == 0 else []
