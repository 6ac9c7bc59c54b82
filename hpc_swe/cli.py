"""What all commands have in common: words in any order, one line an error, and Ctrl-C without a traceback."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path

from hpc_swe.errors import HpcSweError

INTERRUPTED, BROKEN_PIPE = 130, 141  # as shells count them


def command(main: Callable[[], int | None]) -> Callable[[], None]:
    """A command's `main`: our errors become lines and an exit code, and an interrupt one line."""

    @wraps(main)
    def framed() -> None:
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
        except BrokenPipeError:  # `| head`; what is still buffered has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        sys.exit(code)

    return framed


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options and other words in any order; who misspells an option is told the one that is alike."""
    arguments, left = parser.parse_known_intermixed_args(words)
    if left:
        options = [option for action in parser._actions for option in action.option_strings]
        parser.error(
            "; ".join(f"{word!r} is not known here{like(word.partition('=')[0], options)}" for word in left)
        )
    return arguments


def parse_verb(
    verbs: Mapping[str, argparse.ArgumentParser], words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[str, argparse.Namespace]:
    """The verb, wherever it stands, and its arguments; `parser` is the whole command's."""
    verb = next((word for word in words if word in verbs), "")
    if not verb:
        plain = [word for word in words if not word.startswith("-")]
        if plain and not {"-h", "--help"} & set(words):
            parser.error(f"{plain[0]!r} is none of {', '.join(verbs)}{like(plain[0], verbs)}")
        parser.parse_args(words)  # prints the help, or asks for a verb
    where = list(words).index(verb)
    return verb, parse(verbs[verb], [*words[:where], *words[where + 1 :]])


def folder(text: str) -> Path:
    """For `type=` of an argument: a folder's path, absolute; an empty one is no folder, and not this one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name; name a folder (is a variable of the shell unset?)")
    return Path(text).absolute()


def like(word: str, known: Iterable[str]) -> str:
    """A question for the end of an error: which of the known words is meant; empty when none is alike."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
