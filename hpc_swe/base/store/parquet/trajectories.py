"""Store the conversations of an SFT run as token ids: one parquet file, written once, when the run is made.

It has a line for every row that was read, also for those that are not trained, with the reason.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Ids, Record, Split
from hpc_swe.base.store import atomic


class Trajectory(Record, frozen=True, kw_only=True):
    """A trajectory is one conversation to train on, or to validate with when its split is ``eval``."""

    name: str
    """File and row that it was read from."""
    task_id: str = ""
    split: Split = "train"
    fate: Literal["whole", "cut", "dropped"] = "whole"
    """cut: shortened to its last turn that fits; dropped: not used."""
    why: str = ""
    """Reason of a drop."""
    token_ids: Ids = b""
    mask: bytes = b""
    """uint8 [tokens], 1 where the token has a loss."""

    @property
    def is_used(self) -> bool:
        """Return whether it is trained or validated with."""
        return self.fate != "dropped"


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Publish the table: columns for people, and the whole record beside them."""
    import pyarrow as pa

    rows = [
        {
            "name": each.name,
            "task_id": each.task_id,
            "split": each.split,
            "fate": each.fate,
            "why": each.why,
            "tokens": len(each.mask),
            "trained_tokens": sum(each.mask),
            "record": msgspec.msgpack.encode(each),
        }
        for each in trajectories
    ]
    atomic.put_table(path, pa.Table.from_pylist(rows), atomic.write_secret)


def read(path: Path) -> list[Trajectory]:
    """Read what `write` published; raise CorruptRecord if the file is missing, or is something else."""
    try:
        column = atomic.get_table(path, ["record"])["record"].to_pylist()
        return [msgspec.msgpack.decode(data, type=Trajectory) for data in column]
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptRecord(f"{path}: not the trajectories of a run: {error}") from error
