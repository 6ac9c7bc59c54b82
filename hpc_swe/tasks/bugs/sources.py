"""Find code that works and its tests: a module of the standard library, a module with tests, or a folder."""

import ast
import doctest
import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.errors import ConfigError
from hpc_swe.plugins.syntax import parse

STDLIB = "stdlib"
DOCTESTS = "test_docstrings.py"
MOST_BYTES = 500_000
PREFIXES = ("/usr/lib/python3*", "/usr/local/lib/python3*", "/opt/*/lib/python3*")
"""Folders in which an image may have a standard library."""


@dataclass(frozen=True)
class CodeSource:
    """A source is a module to mutate, with all files that its tests need."""

    name: str
    target: str
    """Path of the module in `files`."""
    files: dict[str, str]
    """Path below the work directory -> text."""
    tests: tuple[str, ...]
    """Paths of the test files in `files`."""
    absent: tuple[str, ...] = ()
    """`Task.absent`: where the original would be found."""
    twins: frozenset[str] = frozenset()
    """Names that an extension module of the interpreter has too, so that their original can be imported."""


def find(words: Sequence[str], library: Path | None) -> Iterator[CodeSource]:
    """Yield the sources that the words of the command line name.

    Raises:
        ConfigError: A word names nothing.
    """
    folder = library or Path(sysconfig.get_paths()["stdlib"])
    for word in words:
        path, _, tests = word.partition(":")
        if word == STDLIB:
            names = sorted(
                file.stem for file in folder.glob("*.py") if (folder / f"test/test_{file.name}").exists()
            )
            yield from (_of_library(folder, name) for name in names)
        elif Path(path).is_dir():
            yield from _of_folder(Path(path).resolve())
        elif path.endswith(".py"):
            yield _of_module(
                Path(path).resolve(), [Path(each).resolve() for each in tests.split(",") if each]
            )
        else:
            yield _of_library(folder, word)


def _of_library(folder: Path, name: str) -> CodeSource:
    module, tests = folder / f"{name}.py", folder / f"test/test_{name}.py"
    for path in (module, tests):
        if not path.is_file():
            raise ConfigError(
                f"{name}: there is no {path}; name a module in one file, and with --library a standard "
                "library with its tests, which some distributions leave out"
            )
    absent = []
    for place in PREFIXES:
        absent += [f"{place}/{name}.py", f"{place}/__pycache__/{name}.*"]
        absent += [f"{place}/test/test_{name}.py", f"{place}/test/__pycache__/test_{name}.*"]
    return CodeSource(
        name=name,
        target=f"{name}.py",
        files={f"{name}.py": _text(module), f"test_{name}.py": _text(tests)},
        tests=(f"test_{name}.py",),
        absent=tuple(absent),
        twins=_twins(name),
    )


def _twins(name: str) -> frozenset[str]:
    """Return what the extension module that speeds a module up defines: ``_heapq`` for ``heapq``."""
    spec = importlib.util.find_spec("_" + name.removeprefix("_py").lstrip("_"))
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    if spec is None or not (spec.origin == "built-in" or str(spec.origin).endswith(suffixes)):
        return frozenset()
    return frozenset(each.lstrip("_") for each in dir(importlib.import_module(spec.name)))


def _of_module(module: Path, tests: Sequence[Path]) -> CodeSource:
    """Return a module with its tests, or with those in its docstrings, and the packages that both are in."""
    root = _root(module)
    if not tests:
        name = ".".join(module.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        files = _package(module, root) | {DOCTESTS: _of_docstrings(_text(module), name)}
        return CodeSource(name, module.relative_to(root).as_posix(), files, (DOCTESTS,))
    files, paths = _package(module, root), []
    for test in tests:
        own = root if test.is_relative_to(root) else _root(test)
        files |= _package(test, own)
        paths.append(test.relative_to(own).as_posix())
    return CodeSource(module.stem, module.relative_to(root).as_posix(), files, tuple(paths))


def _of_folder(folder: Path) -> Iterator[CodeSource]:
    """Yield each module of a folder or package with all tests in it or beside it."""
    root = _root(folder / "__init__.py") if (folder / "__init__.py").exists() else folder
    places = [folder, *(place for place in (root / "tests", root / "test") if place.is_dir())]
    found = {path for place in places for path in place.rglob("*.py") if not _is_hidden(path, root)}
    tests = sorted(path for path in found if path.name.startswith("test_") or path.name.endswith("_test.py"))
    if not tests:
        raise ConfigError(f"{folder}: no test_*.py in it; name module.py:test_module.py for tests elsewhere")
    helpers = {path for path in found if {"tests", "test"} & set(path.relative_to(root).parts[:-1])}
    files = {path.relative_to(root).as_posix(): _text(path) for path in sorted(found)}
    for path in sorted(found - set(tests) - helpers):
        if path.name not in ("conftest.py", "setup.py"):
            name = path.relative_to(root).as_posix()
            yield CodeSource(name, name, files, tuple(test.relative_to(root).as_posix() for test in tests))


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)


def _root(module: Path) -> Path:
    """Return the folder from which a module is imported: above its packages."""
    folder = module.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _package(module: Path, root: Path) -> dict[str, str]:
    """Return the Python files of the top package that a module is in, or the module alone."""
    top = root / module.relative_to(root).parts[0]
    paths = sorted(top.rglob("*.py")) if top.is_dir() else [module]
    return {path.relative_to(root).as_posix(): _text(path) for path in paths if not _is_hidden(path, root)}


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _of_docstrings(text: str, name: str) -> str:
    """Write one test for each example of a docstring, which holds a copy of it and of those before it.

    Raises:
        ConfigError: There are no examples.
    """
    lines, parser = [_DOCTEST.format(name=name)], doctest.DocTestParser()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            before: list[str] = []
            for number, one in enumerate(parser.get_examples(ast.get_docstring(node) or "")):
                if one.exc_msg is None:
                    lines += [f"\n\ndef test_{node.name}_{node.lineno}_{number}():"] if one.want else []
                    lines += (
                        [f"    assert _run({before!r}, {one.source!r}) == {one.want!r}"] if one.want else []
                    )
                    before.append(one.source)
    if len(lines) == 1:
        raise ConfigError(
            f"{name}: its docstrings have no examples; name its tests as module.py:test_module.py"
        )
    return "\n".join(lines) + "\n"


_DOCTEST = """import contextlib
import io

import {name} as module


def _run(before, example):
    names = vars(module).copy()
    for source in (*before, example):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                code = compile(source.strip(), '<example>', 'eval')
            except SyntaxError:
                exec(source, names)
            else:
                value = eval(code, names)
                if value is not None:
                    print(repr(value))
    return output.getvalue()"""
