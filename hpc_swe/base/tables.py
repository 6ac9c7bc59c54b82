"""Print tables, lines and progress bars for people. A table's first cell is neither cut nor wrapped.

Columns that do not fit on the screen follow below, in a table that repeats the first column. Output that does
not go to a terminal has no screen, and longer lines.
"""

import copy
import os
import sys
from collections.abc import Sequence

from rich import progress
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

WIDE = 160  # width of output that does not go to a terminal
NARROWEST = 24  # width to which columns of text may shrink


class _Screen(Console):
    """A console whose lost reader ends a command as `cli.command` says; rich exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def screen() -> Console:
    """Return standard output as a console, as wide as the terminal or COLUMNS says."""
    has_width = (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ
    return _Screen(highlight=False, width=None if has_width else WIDE)


console = screen()


def say(line: str) -> None:
    """Print a line unchanged: without markup, and not wrapped at the terminal's width."""
    show(console, line)


def bars(*more: progress.ProgressColumn, console: Console = console) -> progress.Progress:
    """Return progress bars with a description, a count, the time elapsed, and more columns behind them."""
    description = progress.TextColumn("{task.description}", markup=False)  # an error may contain brackets
    count, elapsed = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    return progress.Progress(description, progress.BarColumn(), count, elapsed, *more, console=console)


def table(
    words: Sequence[str], numbers: Sequence[str] = (), *, title: str = "", box: Box | None = None
) -> Table:
    """Return an empty table: columns of words, then columns of numbers, which are aligned right.

    A table without a title starts at the screen's edge.
    """
    empty = Table(
        *words,
        title=title or None,
        box=box,
        title_justify="left",
        caption_justify="left",
        pad_edge=bool(title),
    )
    for name in numbers:
        empty.add_column(name, justify="right", no_wrap=True)
    return empty


def show(console: Console, *parts: RenderableType) -> None:
    """Print tables, and lines without markup and without wrapping."""
    for part in parts:
        if isinstance(part, Table):
            for band in bands(part, console.width):
                console.print(band, crop=False)
        else:
            console.print(part, markup=False, soft_wrap=True)


def bands(table: Table, width: int) -> list[Table]:
    """Split a table into tables that are no wider than `width`, unless two columns alone are wider.

    The cells of the first column are printed unchanged, without markup.
    """
    groups = _groups([_least(table, column) for column in table.columns], width)
    found = [_part(table, group) for group in groups]
    for group, band in zip(groups, found, strict=True):
        needed = sum(_least(table, table.columns[number]) for number in group) + 1
        band.width = needed if needed > width else None
        band.title = Text(str(table.title), "table.title") if table.title and band is found[0] else None
        band.caption = table.caption if band is found[-1] else None
    return found


def _groups(least: Sequence[int], width: int) -> list[list[int]]:
    """Return the indices of the columns of each band; the first column is in all of them."""
    groups = [[0]]
    for number in range(1, len(least)):
        used = sum(least[each] for each in groups[-1]) + 1
        if len(groups[-1]) > 1 and used + least[number] > width:
            groups.append([0])
        groups[-1].append(number)
    return groups


def _least(table: Table, column: Column) -> int:
    """Return the smallest width of a column in characters, with the space before the next column."""
    cells = [column.header, *column.cells]
    longest = max(cell_len(line) for cell in cells for line in str(cell).splitlines() or [""])
    is_whole = column is table.columns[0] or column.no_wrap
    return (longest if is_whole else min(longest, NARROWEST)) + table.padding[1] + table.padding[3] + 1


def _part(table: Table, numbers: Sequence[int]) -> Table:
    part = copy.copy(table)
    part.columns, part.rows = [], []
    chosen = [table.columns[number] for number in numbers]
    for column in chosen:
        is_first = column is table.columns[0]
        part.add_column(
            column.header,
            justify=column.justify,
            overflow=column.overflow,
            no_wrap=is_first or column.no_wrap,
        )
    first, *others = ([*column.cells] for column in chosen)
    for row, name, *cells in zip(table.rows, first, *others, strict=True):
        part.add_row(Text(name) if isinstance(name, str) else name, *cells, style=row.style)
    return part
