"""Parse arguments, print errors and end in the same way for all commands, without tracebacks."""

import argparse
import difflib
import errno
import io
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TypeAlias

from hpc_swe.base.errors import REMEDIES, HpcSweError, StorageError, remedy

INTERRUPTED, BROKEN_PIPE = 130, 141  # the exit codes that shells use
WIDEST = 100
CONFIG = "TOML files, merged left to right, and overrides such as steps=10"
SAMPLE = "take so many of the tasks, selected by their ids: every command with --sample takes the same ones"


def command(main: Callable[[], int | None]) -> Callable[[], None]:
    """Wrap a command's `main`: print our errors and an interrupt as lines, and exit with the right code."""

    @wraps(main)
    def run() -> None:
        code: int | str | None = None
        _replace_closed_outputs()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="surrogateescape")  # as names of files are read
        try:
            code = _exit_code(main)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has closed the pipe; discard what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or BROKEN_PIPE
        sys.exit(code)

    return run


def _replace_closed_outputs() -> None:
    """Open /dev/null in place of what the shell has closed with `>&-` or `<&-`; Python has None there.

    A file that is opened later would get the free number, and then what C libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)


def _exit_code(main: Callable[[], int | None]) -> int | str | None:
    try:
        return main()
    except SystemExit as end:  # of argparse, after the help
        return end.code
    except HpcSweError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (OSError, UnicodeEncodeError) as error:
        if not (fault := _mendable(error)):
            raise
        print(f"error: {fault}", file=sys.stderr)
        return StorageError.exit_code


def _mendable(error: OSError | UnicodeEncodeError) -> str:
    """Return what is wrong, and its remedy, if the person who calls can mend it; else an empty text."""
    if isinstance(error, UnicodeEncodeError):
        is_record = error.encoding == "utf-8"  # else it was to be printed
        return f"{error.object!a}: the name is not UTF-8, as records are; rename it" if is_record else ""
    if error.errno == errno.ENOENT and not error.filename:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the current folder is gone; go to one that exists"
        return str(error.strerror)  # as of tempfile, which has names of its own in it
    where = error.filename2 or error.filename or "a file that this command writes"  # a copy has two
    return f"{where}: {error.strerror}{remedy(error)}" if error.errno in REMEDIES else ""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Write values in capitals, name each default, and keep lines short enough to read."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST) - 2
        super().__init__(prog, max_help_position=26, width=width)

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds = {"int": "N", "float": "NUMBER", "path": "PATH", "folder": "FOLDER"}
        seconds = action.dest.endswith("_s")
        return "SECONDS" if seconds else kinds.get(getattr(action.type, "__name__", ""), action.dest.upper())

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_known = action.default in (None, False, "", [], (), argparse.SUPPRESS) or "default:" in text
        return text if is_known or not action.option_strings else f"{text} (default: %(default)s)"


def parser(module: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m <module>`, without arguments yet; examples are what may follow it."""
    made = argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=_Help)
    return _with_examples(made, examples)


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def verb(verbs: Verbs, name: str, does: str, *examples: str) -> argparse.ArgumentParser:
    """Add a verb to a command, and return its parser; `does` is its description, without capital and stop."""
    description = f"{does[0].upper()}{does[1:]}."
    return _with_examples(
        verbs.add_parser(name, help=does, description=description, formatter_class=_Help), examples
    )


def _with_examples(made: argparse.ArgumentParser, examples: Sequence[str]) -> argparse.ArgumentParser:
    lines = [f"  {made.prog} {example}".rstrip() for example in examples]
    made.epilog = "\n".join(["examples:", *lines]) if lines else None
    return made


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse options and other arguments in any order; for an unknown option suggest the closest one."""
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        hints = (f"{word!r}{suggestion(word.partition('=')[0], options)}" for word in unknown)
        has_keys = any(CONFIG in (action.help or "") for action in parser._actions)
        keys = "; keys of the configuration have no dashes: steps=10" if has_keys else ""
        parser.error(f"unknown argument {'; '.join(hints)}{keys}")
    return arguments


def parse_verb(
    verbs: Mapping[str, argparse.ArgumentParser], words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[str, argparse.Namespace]:
    """Return the verb, wherever it stands among the words, and its parsed arguments.

    `parser` belongs to the whole command: it prints the help, and the error when no verb is given.
    """
    verb = next((word for word in words if word in verbs), "")
    if not verb:
        plain = [word for word in words if not word.startswith("-")]
        if plain and not {"-h", "--help"} & set(words):
            parser.error(f"{plain[0]!r} is not one of {', '.join(verbs)}{suggestion(plain[0], verbs)}")
        parser.parse_args(words)  # prints the help, or asks for a verb
    index = list(words).index(verb)
    return verb, parse(verbs[verb], [*words[:index], *words[index + 1 :]])


def path(text: str) -> Path:
    """Return a path as it is written, for `type=` of an argument; refuse an empty name."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the name is empty; name a folder or a file (is a shell variable unset?)"
        )
    return Path(text)


def folder(text: str) -> Path:
    """Return the absolute path of a folder, for `type=` of an argument; refuse an empty name."""
    return path(text).absolute()


def number(kind: type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return the function that reads a number within bounds, for `type=` of an argument."""

    def read(text: str) -> float:
        found = kind(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(
                f"{text} is not {f'{least:g} to {most:g}' if most < math.inf else f'at least {least:g}'}"
            )
        return found

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the closest known word; empty when none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)), "")


def quoted(path: Path) -> str:
    """Return a path as one types it in a shell."""
    return shlex.quote(str(path))


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the closest known word; empty when none is close."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""
