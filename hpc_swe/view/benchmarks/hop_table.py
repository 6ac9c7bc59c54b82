"""Show how new weights reached an engine: a row for each way, and the means of the deltas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from hpc_swe.base import tables

GB = 1e9
COLUMNS = ("first token s", "published s", "pause s", "lost s", "tokens again", "GB written", "% of all")


@dataclass(frozen=True)
class HopRow:
    """Hold the figures of one way to new weights."""

    first_s: float
    published_s: float
    pause_s: float
    lost_s: float
    """Seconds by which long answers that it interrupted came later."""
    tokens: float
    """Tokens whose keys and values were computed again."""
    written: int


def table(rows: dict[str, HopRow], whole: int) -> Table:
    """Return the table; means of the deltas, which leave out the first, stand in rows of their own."""
    shown = dict(rows)
    deltas = {name: row for name, row in list(rows.items())[1:] if name.startswith("delta")}
    for kv in ("recompute", "keep"):
        if found := [row for name, row in deltas.items() if name.endswith(kv)]:
            shown[f"mean of later deltas, {kv}"] = _mean(found)
    empty = tables.table(("new weights by",), COLUMNS)
    for name, row in shown.items():
        seconds = (f"{value:.3f}" for value in (row.first_s, row.published_s, row.pause_s, row.lost_s))
        bytes_written = f"{row.written / GB:.3f}", f"{100 * row.written / whole:.2f}"
        empty.add_row(name, *seconds, f"{row.tokens:.0f}", *bytes_written)
    return empty


def _mean(rows: Sequence[HopRow]) -> HopRow:
    def mean(values: Callable[[HopRow], float]) -> float:
        return fmean(map(values, rows))

    return HopRow(
        first_s=mean(lambda row: row.first_s),
        published_s=mean(lambda row: row.published_s),
        pause_s=mean(lambda row: row.pause_s),
        lost_s=mean(lambda row: row.lost_s),
        tokens=mean(lambda row: row.tokens),
        written=round(mean(lambda row: row.written)),
    )
