"""Find code that works and its tests: a module of the standard library, a module with tests, or a folder."""

import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.syntax import parse, require_shallow

STDLIB = "stdlib"
MOST_BYTES = 500_000
"""Size of all files of a source together."""
PREFIXES = (
    *("/usr/lib*/python3*", "/*/*/lib*/python3*", "/opt/*/*/*/lib*/python3*"),
    "/*/.pyenv/versions/*/lib*/python3*",
)
"""Folders in which an image may have a standard library: conda's and pyenv's, too."""


@dataclass(frozen=True)
class CodeSource:
    """A source is a module to mutate, with all files that its tests need."""

    name: str
    origin: Path
    """File of the module on this machine."""
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
    copied: frozenset[str] = frozenset()
    """Names of functions whose text stands in other files of the image."""


class _Unusable(Exception):
    """A file cannot be used; the text says why."""


@dataclass(frozen=True)
class Search:
    """Find sources, and note the files that cannot be used."""

    library: Path | None = None
    """Standard library with its tests; None is this interpreter's."""
    left_out: dict[Path, str] = field(default_factory=dict)
    """File -> reason why it is used neither as code nor as tests."""

    def find(self, words: Sequence[str]) -> list[CodeSource]:
        """Return the sources that the words of the command line name.

        Raise ConfigError if a word names nothing that can be used, or two sources have one name.
        """
        found: dict[str, CodeSource] = {}
        for source in (source for word in words for source in self._of_word(word)):
            other = found.setdefault(source.name, source)
            if other is not source:
                raise ConfigError(
                    f"{other.origin} and {source.origin} are both called {source.name}, and so would their "
                    "tasks be; name one of them, or call the command for each with an --out of its own"
                )
        return [*found.values()]

    def _of_word(self, word: str) -> Iterator[CodeSource]:
        folder = self.library or Path(sysconfig.get_paths()["stdlib"])
        path, _, tests = word.partition(":")
        if word == STDLIB:
            yield from self._of_stdlib(folder)
        elif path and Path(path).is_dir():
            yield from self._of_folder(Path(path).resolve())
        elif path.endswith(".py"):
            others = [Path(each).resolve() for each in tests.split(",") if each]
            try:
                yield self._of_module(Path(path).resolve(), others)
            except _Unusable as error:
                raise ConfigError(str(error)) from None
        elif "/" in word or not word:
            raise ConfigError(f"{word!r} is neither a folder nor a file whose name ends in .py")
        else:
            yield self._named(folder, word)

    def _of_stdlib(self, folder: Path) -> Iterator[CodeSource]:
        names = sorted(file.stem for file in folder.glob("*.py") if _test_of(folder, file.stem).exists())
        if not names:
            raise ConfigError(
                f"{folder} has no tests, which some distributions leave out; name with --library a standard "
                "library that has a folder test"
            )
        for name in names:
            try:
                yield _of_library(folder, name)
            except _Unusable as error:
                self.left_out[folder / f"{name}.py"] = str(error)

    def _named(self, folder: Path, name: str) -> CodeSource:
        for path in (folder / f"{name}.py", _test_of(folder, name)):
            if not path.is_file():
                raise ConfigError(
                    f"{name}: there is no {path}; name a module in one file, and with --library a standard "
                    "library with its tests, which some distributions leave out"
                )
        try:
            return _of_library(folder, name)
        except _Unusable as error:
            raise ConfigError(str(error)) from None

    def _of_module(self, module: Path, tests: Sequence[Path]) -> CodeSource:
        root = _root(module)
        _code(module)
        target = module.relative_to(root).as_posix()
        if not tests:
            raise _Unusable(f"{module}: name its tests as {module.name}:test_{module.name}")
        files, paths = self._package(module, root), []
        for test_file in tests:
            own = root if test_file.is_relative_to(root) else _root(test_file)
            paths.append(test_file.relative_to(own).as_posix())
            files |= self._package(test_file, own) | {paths[-1]: _code(test_file)}
        return CodeSource(module.stem, module, target, files, tuple(paths))

    def _of_folder(self, folder: Path) -> Iterator[CodeSource]:
        root = _root(folder / "__init__.py") if (folder / "__init__.py").exists() else folder
        places = [folder, *(place for place in (root / "tests", root / "test") if place.is_dir())]
        texts = self._texts({path for place in places for path in place.rglob("*.py")}, root)
        code = [path for path in texts if self._is_code(root / path, texts[path])]
        tests = tuple(path for path in code if _is_test(path))
        if not tests:
            raise ConfigError(
                f"{folder}: no test_*.py in it can be used{self._reasons()}; name module.py:test_module.py "
                "for tests elsewhere"
            )
        for path in code:
            is_helper = {"tests", "test"} & {*path.split("/")[:-1]}
            if not (_is_test(path) or is_helper or Path(path).name in ("conftest.py", "setup.py")):
                yield CodeSource(path, root / path, path, texts, tests)

    def _package(self, module: Path, root: Path) -> dict[str, str]:
        top = root / module.relative_to(root).parts[0]
        return self._texts({*top.rglob("*.py")} if top.is_dir() else {module}, root)

    def _texts(self, paths: set[Path], root: Path) -> dict[str, str]:
        found = {}
        for path in sorted(path for path in paths if not _is_hidden(path, root) and not path.is_dir()):
            try:
                found[path.relative_to(root).as_posix()] = _text(path)
            except _Unusable as error:
                self.left_out[path] = str(error)
        return found

    def _is_code(self, path: Path, text: str) -> bool:
        try:
            _require_python(path, text)
        except _Unusable as error:
            self.left_out[path] = str(error)
            return False
        return True

    def _reasons(self) -> str:
        return f" ({next(iter(self.left_out.values()))})" if self.left_out else ""


def _test_of(folder: Path, name: str) -> Path:
    return folder / f"test/test_{name}.py"


def _usual_places(name: str) -> tuple[str, ...]:
    """Return patterns of the paths at which interpreters have a library module and its tests."""
    found = []
    for place in PREFIXES:
        for folder, module in ((place, name), (f"{place}/test", f"test_{name}")):
            found += [f"{folder}/{module}.py", f"{folder}/{module}.pyc", f"{folder}/__pycache__/{module}.*"]
    return tuple(found)


def _of_library(folder: Path, name: str) -> CodeSource:
    module, tests = f"{name}.py", f"test_{name}.py"
    files = {module: _code(folder / module), tests: _code(_test_of(folder, name))}
    return CodeSource(
        name, folder / module, module, files, (tests,), absent=_usual_places(name), twins=_twins(name)
    )


def _twins(name: str) -> frozenset[str]:
    """Return what the extension module that speeds a module up defines: ``_heapq`` for ``heapq``."""
    spec = importlib.util.find_spec("_" + name.removeprefix("_py").lstrip("_"))
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    if spec is None or not (spec.origin == "built-in" or str(spec.origin).endswith(suffixes)):
        return frozenset()
    return frozenset(each.lstrip("_") for each in dir(importlib.import_module(spec.name)))


def _is_test(path: str) -> bool:
    name = Path(path).name
    return name.startswith("test_") or name.endswith("_test.py")


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)


def _root(module: Path) -> Path:
    """Return the folder from which a module is imported: above its packages."""
    folder = module.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _code(path: Path) -> str:
    text = _text(path)
    _require_python(path, text)
    return text


def _require_python(path: Path, text: str) -> None:
    try:
        require_shallow(parse(text.encode()))
    except (SyntaxError, ValueError) as error:
        raise _Unusable(f"{path}: it is no Python that can be used: {error}") from None


def _text(path: Path) -> str:
    """Return a file of UTF-8 with the line ends that positions in a syntax tree count."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _Unusable(f"{path}: it has more than {MOST_BYTES} bytes")
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _Unusable(f"{path}: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
