"""Print lines and progress bars of the jobs that a person starts."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpc_swe import tables

console = tables.screen()


def say(line: str) -> None:
    """Print a line unchanged: without markup, and not wrapped at the terminal's width."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def bars() -> Progress:
    """Return progress bars with a description, a count and the time elapsed."""
    description = TextColumn("{task.description}", markup=False)
    return Progress(description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
