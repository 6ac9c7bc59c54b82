"""Find where an image has the originals of mutated modules, so that their tasks can remove them.

Patterns of paths name the usual folders of a library in interpreters. A search of the whole image by lines
of text finds the copies elsewhere: those of other interpreters, of environments and of caches, and those that
packages carry under other names.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.makers.bugs.sources import CodeSource
from hpc_swe.makers.bugs.trials import TrialPlace

SEARCH_TIMEOUT_S = 300.0
_PROGRAM = Path(__file__).with_name("_copies.py")
_PLAIN = re.compile(r"(/[\w.+-]+){2,}")


class Copies(msgspec.Struct, frozen=True):
    """List the files of an image that are copies of a text, and functions of it in other files."""

    files: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()


def copies(place: TrialPlace, texts: Mapping[str, str]) -> dict[str, Copies]:
    """Return what the image has of each text, by the text's label, which must be the name of a file.

    Raise ConfigError if the image could not be searched, and SandboxError if the host failed.
    """
    folder, out = f".{secrets.token_hex(8)}", f".{secrets.token_hex(8)}"
    task = place.task({f"{folder}/{label}": text for label, text in texts.items()}, ())
    call = f"main{(out, folder)!r}\n"
    with place.sandboxes.open(task) as sandbox:
        result = sandbox.python(f"{_PROGRAM.read_text(encoding='utf-8')}\n\n{call}", SEARCH_TIMEOUT_S)
        try:
            return msgspec.json.decode(sandbox.read(out), type=dict[str, Copies])
        except (OSError, msgspec.MsgspecError):
            raise ConfigError(
                f"the image {place.image} cannot be searched for originals: {result.output[-300:]}"
            ) from None


def removals(known: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return patterns that remove these files and what was compiled from them, unless known ones do.

    Raise ConfigError if the name of a file cannot be a pattern.
    """
    found = []
    for path in sorted(paths):
        name = PurePosixPath(path)
        if any(name.match(pattern) for pattern in known):
            continue
        if not _PLAIN.fullmatch(path):
            raise ConfigError(
                f"the image has a copy of a library module in {path!r}, whose name has signs other than "
                "letters, digits and ._+-; choose another --image or other sources"
            )
        found.append(path)
        if name.suffix == ".py":
            found += [f"{path}c", f"{name.parent}/__pycache__/{name.stem}.*"]
    return found


def with_copies(place: TrialPlace, sources: Sequence[CodeSource]) -> list[CodeSource]:
    """Return the sources; their tasks remove the image's copies of the module, and of a library's tests.

    A file that has only a function of the module may be needed, so it stays, and the function is not changed.

    Raise ConfigError if the image could not be searched, or the name of a copy cannot be a pattern, and
    SandboxError if the host failed.
    """
    modules = {f"{number}-0": source.files[source.target] for number, source in enumerate(sources)}
    tests = {
        f"{number}-{index}": source.files[path]
        for number, source in enumerate(sources)
        for index, path in enumerate(source.tests if source.absent else (), 1)
    }
    found = copies(place, modules | tests) if sources else {}
    return [
        replace(source, absent=(*source.absent, *removals(source.absent, files)), copied=own.functions)
        for number, source in enumerate(sources)
        for own in [found[f"{number}-0"]]
        for files in [
            {path for at, each in found.items() if at.startswith(f"{number}-") for path in each.files}
        ]
    ]


def is_loaded(absent: Iterable[str], imported: Collection[str]) -> bool:
    """Return whether one of the files that patterns name, or an archive with one, was imported."""
    return any(
        file == path or file.startswith(f"{path}/") for path in absent if "*" not in path for file in imported
    )
