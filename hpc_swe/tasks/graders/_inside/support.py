"""Find the modules of a repository that only its tests import, in the sandbox of the base commit.

A submission that changes such a module, for example one with the repository's own assertions, changes what
its tests mean. The text of this module is a program that runs in a sandbox before any patch is there. Imports
are read by their form, not by Python: what may be used by code counts as code.
"""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from posixpath import dirname

_FROM = re.compile(
    r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n#;\\]|\\\n)*)", re.MULTILINE
)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n#;]+)", re.MULTILINE)
_QUOTED = re.compile(r"[\"']([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)[\"':]")
_SHOWN = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:[./][A-Za-z_]\w*)+|(?:import|from|-m)[ \t]+\w+")
_PLUGIN = re.compile(r"(?<![\w-])-p[ \t\"',=]+([A-Za-z_][\w.]*)")
_PLUGINS = re.compile(r"^[ \t]*pytest_plugins[ \t]*=[ \t]*(\[[^\]]*\]|\([^)]*\)|[^\n]*)", re.MULTILINE)
_LOOKS = re.compile(
    r"AssertionError|self\.(?:fail|assert[A-Z]\w*)\(|^[ \t]+(?:async )?def test"
    r"|^[ \t]*(?:import|from)[ \t]+(?:unittest|pytest|nose|hypothesis)\b"
    r"|^def _*(?:assert|check|expect|verify|compare|same|equal|require)",
    re.MULTILINE,
)
_SCRIPT = re.compile(r"^if[ \t]+__name__[ \t]*==", re.MULTILINE)
_ROOTS = ("", "src/", "lib/")
_WORDS = (".md", ".rst", ".txt", ".toml", ".cfg", ".ini", ".in", ".yml", ".yaml")


def support_files(
    files: Mapping[str, str], words: Iterable[str], tests: Collection[str], solved: Collection[str]
) -> list[str]:
    """Return the modules that only tests import: path -> text of `files` in Python, `words` of others.

    `tests` are patterns of the tests' paths, and `solved` the files that the reference changes. What they
    import is code. So is a module that nothing imports, or that a text names. A module of a package with code
    is taken for code, which something may load by its name, unless it makes assertions.
    """
    index = _Index(files)
    imported = {path: index.imported(path, text, _is_test(path, tests)) for path, text in files.items()}
    of_tests = {path for path in files if _is_test(path, tests)}
    plugins = {name for text in words for name in _PLUGIN.findall(text)}
    given = set().union(*(index.found("", name.split(".")) for name in plugins))
    used = given.union(*imported.values())
    code = {path for path in files if path not in used or path in solved or _SCRIPT.search(files[path])}
    for text in words:
        shown = _SHOWN.findall(_PLUGIN.sub("", text))
        code.update(*(index.found("", re.split("[./]", one.split()[-1])) for one in shown))
    code = _reached(code - of_tests, imported, of_tests)
    found = _reached(given.union(*(imported[path] for path in of_tests)), imported, of_tests) - code
    of_code = {_top(path) for path in (*code, *solved) if files.get(path, "").strip()}
    return sorted(path for path in found if _top(path) not in of_code or _asserts(files[path]))


def _reached(start: Iterable[str], imported: Mapping[str, set[str]], apart: set[str]) -> set[str]:
    """Return the modules, none of those that are kept apart, that these and what they import import."""
    reached, left = set(), {*start} - apart
    while left:
        path = left.pop()
        reached.add(path)
        left |= imported[path] - reached - apart
    return reached


def _top(path: str) -> str:
    parts = path.split("/")[:-1]
    return next((part for part in parts if f"{part}/" not in _ROOTS), "")


def _asserts(text: str) -> bool:
    """Return whether a module looks like one of assertions: by its names, or a function that makes some."""
    top = ""
    for line in text.split("\n"):
        if line[:1].strip():
            top = line
        elif top.startswith("def ") and line.lstrip().startswith("assert "):
            return True
    return bool(_LOOKS.search(text))


def _is_test(path: str, tests: Collection[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in tests)


class _Index:
    """An index knows the files that a name of a module may mean."""

    def __init__(self, files: Iterable[str]) -> None:
        self._by_path: dict[str, str] = {}
        self._by_end: dict[str, set[str]] = {}
        for path in files:
            name = path.removesuffix(".py").removesuffix("/__init__")
            self._by_path[name] = path
            parts = name.split("/")
            for start in range(len(parts)):
                self._by_end.setdefault("/".join(parts[start:]), set()).add(path)
        self._tops = {start for name in self._by_path for start in _starts(name.split("/"))}
        """Modules, packages and folders with some."""

    def imported(self, path: str, text: str, is_test: bool) -> set[str]:
        """Return the files that a module's text imports, or names in a quoted text."""
        found = set()
        for level, names in _names(text):
            if level:
                parts = [*path.split("/")[:-level], *names]
                found |= self._under("", parts)
            else:
                found |= self.found(f"{dirname(path)}/" if is_test and "/" in path else "", names)
        return found - {path}

    def found(self, folder: str, names: list[str]) -> set[str]:
        """Return the files of a module and the packages around it; its folder comes first."""
        for root in dict.fromkeys((folder, *_ROOTS)):
            if root + names[0] in self._tops:
                return self._under(root, names)
        if names[0] in sys.stdlib_module_names:
            return set()
        return set().union(*(self._by_end.get(name, set()) for name in _starts(names)))

    def _under(self, root: str, names: list[str]) -> set[str]:
        return {self._by_path[root + name] for name in _starts(names) if root + name in self._by_path}


def _starts(names: list[str]) -> Iterator[str]:
    return accumulate(names, lambda before, name: f"{before}/{name}")


def _names(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the modules that a text names: the dots before a relative name, and the parts of the name."""
    for dots, module, names in _FROM.findall(text):
        parts = [part for part in module.split(".") if part]
        for name in re.findall(r"(\w+)(?:\s+as\s+\w+)?", names) or [""]:
            if parts or name:
                yield len(dots), [*parts, *([name] if name else [])]
    for line in _IMPORT.findall(text):
        yield from ((0, one.split()[0].split(".")) for one in line.split(",") if one.strip())
    plugins = (name for given in _PLUGINS.findall(text) for name in re.findall(r"[\"']([\w.]+)", given))
    yield from ((0, one.split(".")) for one in (*_QUOTED.findall(text), *plugins))


def main(listed: str, hidden: dict[str, str], tests: list[str], solved: list[str]) -> None:
    """Replace a file's list of files by the modules that only tests import, in JSON.

    `hidden` is what hidden tests add.
    """
    import glob
    import json
    from pathlib import Path

    files, words = {}, []
    for name in Path(listed).read_bytes().decode(errors="replace").split("\0"):
        if name.endswith((".py", *_WORDS)) and Path(name).is_file():
            text = Path(name).read_bytes()[:1_000_000].decode(errors="replace")
            if name.endswith(".py"):
                files[name] = text
            else:
                words.append(text)
    files |= {path: f"{files.get(path, '')}\n{text}" for path, text in hidden.items()}
    found = support_files(files, words, [*tests, *map(glob.escape, hidden)], solved)
    Path(listed).write_text(json.dumps(found), encoding="utf-8")
