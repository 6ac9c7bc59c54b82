"""Small records for the tests of the store."""

from pathlib import Path

from hpc_swe.base.records import Manifest, RolloutRequest, Sampling
from hpc_swe.base.store import folders
from hpc_swe.base.store.spool import STATES, Spool

FILES = {"rank_0000.msgpack": b"zero" * 100, "rank_0001.msgpack": b"one" * 100}


def request(index: int = 0, attempt: int = 0) -> RolloutRequest:
    return RolloutRequest(
        group_id=index // 8, index=index % 8, task_id="t", seed=index, sampling=Sampling(), attempt=attempt
    )


def spool(root: Path, messages: int = 0) -> Spool[RolloutRequest]:
    for state in STATES:
        (root / state).mkdir(parents=True, exist_ok=True)
    made = Spool(root, RolloutRequest)
    for index in range(messages):
        made.put(request(index).name, request(index))
    return made


def publish(final: Path, writer: str = "w") -> None:
    def fill(stage: Path) -> Manifest:
        return Manifest(
            writer=writer, files={name: folders.write(stage, name, FILES[name]) for name in FILES}
        )

    folders.publish(final, fill)


def shown(root: Path) -> list[str]:
    """Paths below a folder that exist for a reader: no part begins with a dot."""
    paths = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir())
    return sorted(str(path) for path in paths if not any(part.startswith(".") for part in path.parts))
