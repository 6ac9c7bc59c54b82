"""Parse arguments, print errors and end in the same way for all commands, without tracebacks."""

import argparse
import difflib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path

from hpc_swe.errors import HpcSweError, StorageError

INTERRUPTED, BROKEN_PIPE = 130, 141  # the exit codes that shells use
MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}  # by the person who calls


def command(main: Callable[[], int | None]) -> Callable[[], None]:
    """Wrap a command's `main`: print our errors and an interrupt as lines, and exit with the right code."""

    @wraps(main)
    def run() -> None:
        try:
            code = main()
            sys.stdout.flush()
        except HpcSweError as error:
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        except BrokenPipeError:  # `| head` has closed the pipe; discard what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        except OSError as error:
            if error.errno not in MENDABLE:
                raise
            where = error.filename or "a file that this command writes"
            print(
                f"error: {where}: {error.strerror}; free space there, or name a folder you own",
                file=sys.stderr,
            )
            code = StorageError.exit_code
        sys.exit(code)

    return run


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command, `python -m hpc_swe.<command>`, without arguments yet."""
    return argparse.ArgumentParser(prog=f"python -m hpc_swe.{command}", description=description)


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse options and other arguments in any order; for an unknown option suggest the closest one."""
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        hints = (f"{word!r}{suggestion(word.partition('=')[0], options)}" for word in unknown)
        parser.error(f"unknown argument {'; '.join(hints)}")
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


def folder(text: str) -> Path:
    """Return the absolute path of a folder, for `type=` of an argument; refuse an empty name."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; name a folder (is a shell variable unset?)")
    return Path(text).absolute()


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


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the closest known word; empty when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
