"""Print lines and progress bars of the jobs that a person starts."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from hpc_swe import tables

console = tables.screen()


def say(line: str) -> None:
    """Print a line unchanged: without markup, and not wrapped at the terminal's width."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def bars(*more: ProgressColumn, console: Console = console) -> Progress:
    """Return progress bars with a description, a count, the time elapsed, and more columns behind them."""
    description = TextColumn("{task.description}", markup=False)  # an error may contain brackets
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *more)
    return Progress(*columns, console=console)
