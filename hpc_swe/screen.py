"""What the jobs that a person starts show: lines as they are, and bars."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpc_swe import tables

console = tables.screen()


def say(line: str) -> None:
    """A line as it is: brackets in it are no markup, and it goes on where the terminal ends."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def bars() -> Progress:
    """Bars that count, with room for a word."""
    told = TextColumn("{task.description}", markup=False)
    columns = (told, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
