"""What an agent did to a repository: its work directory compared with an untouched one, as git's difference.

The host walks the two directories side by side and starts nothing in the agent's sandbox. A folder that is
new is not looked into before git, in the untouched sandbox, has said that the base commit does not ignore
it, so products of a build cost nothing whatever their number. All that grows with what the agent left has a
bound, and beyond it nothing is handed in; so a step that is not done in time is the host's failure.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpc_swe.errors import SandboxError, boundary
from hpc_swe.plugins.sandboxes.base import CommandResult, Sandbox, TreeEntry
from hpc_swe.records import Task

MOST_CHANGED = 2_000
"""Files of a repository that may differ; more are too large a change to hand in."""
MOST_READ = 50_000_000
"""Bytes of all of them, before git makes a difference of it."""
MOST_ASKED = 20_000
"""Names that git is asked about, and `MOST_NAMED` characters of them."""
MOST_NAMED = 4_000_000
DEEPEST = 64
"""Folders of a new folder, one in the other, that are looked into."""
MOST_REFUSALS = 200
"""Calls of git that may fail because it refuses a name; beyond that the rest is no part of the work."""
IGNORED = {"__pycache__", ".git", ".pytest_cache"}
_STEP_S = 120.0
_AT_ONCE, _AT_ONCE_CHARS = 2_000, 300_000  # of names, so that any answer fits into what a sandbox gives out
# What an image or its user may have set otherwise. The attributes make git compare byte for byte.
_GIT = "git -c core.fileMode=true -c core.symlinks=true -c core.ignoreCase=false -c core.quotePath=true"
_DIFF = "diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color"
_DIFF += " --src-prefix=a/ --dst-prefix=b/ -U3 --inter-hunk-context=0 --diff-algorithm=myers"
_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !diff"
# Paths are given up before others are made: a folder may have become a link, or a file a folder.
_CLEAR = """
import json, os
for path in json.load(open(NAME)):
    os.unlink(path)
    while (path := os.path.dirname(path)) and not os.listdir(path):
        os.rmdir(path)
"""
_FINISH = """
import json, os
for path, kind, target in json.load(open(NAME)):
    if kind == "link":
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)
    else:
        os.chmod(path, 0o755 if kind == "executable" else 0o644)
"""


class TooMuch(OSError):
    """More than is handed in."""


def difference(task: Task, sandbox: Sandbox, clean: Sandbox) -> str:
    """All but what the base commit itself ignores: products of a build are no work of the agent's.

    Raises:
        OSError: It is too large to hand in, or the sandbox broke.
        SandboxError: The host failed.
    """
    left = _Comparison(sandbox, clean, _aside(task, clean))
    left.walk()
    kept = left.kept()
    gone = _tracked(clean, left.gone)
    if len(kept) + len(gone) > MOST_CHANGED:
        raise TooMuch(f"more than {MOST_CHANGED} files were changed")
    if not kept and not gone:
        return ""
    base = _base(clean, [*gone, *(path for path in kept if path in left.known)])
    _run(clean, _CLEAR, left.gone)
    laid = _laid(sandbox, clean, {path: left.changed[path] for path in kept})
    return _compared(clean, base, gone, laid)


@dataclass
class _Comparison:
    """Where the agent's work directory differs from the untouched one."""

    sandbox: Sandbox
    clean: Sandbox
    skipped: set[str]
    """Paths that are not looked at: what the base commit ignores as a whole, and submodules."""
    changed: dict[str, TreeEntry] = field(default_factory=dict)
    """Files and links that are new or other, before anybody asked whether they are ignored."""
    known: set[str] = field(default_factory=set)
    """Those of them that are files or links of the untouched directory, too."""
    folders: list[str] = field(default_factory=list)
    """New ones."""
    gone: list[str] = field(default_factory=list)
    behind: set[str] = field(default_factory=set)
    """New folders where the untouched directory has a link: git answers nothing about what is in them."""

    def walk(self) -> None:
        """Look into every folder that both have."""
        pending = [""]
        while pending:
            folder = pending.pop()
            theirs = self._theirs(folder)
            with boundary(SandboxError, f"list {folder or 'the work directory'} of the image"):
                ours = self.clean.entries(folder)
            for name in sorted(theirs.keys() | ours.keys()) if theirs is not None else ():
                path = f"{folder}/{name}" if folder else name
                if _is_work(name) and path not in self.skipped:
                    new, old = (theirs or {}).get(name), ours.get(name)
                    if new and old and new.is_folder and old.is_folder:
                        pending.append(path)
                    else:
                        self._compare(path, new, old)
            if len(self.changed) + len(self.folders) + len(self.gone) > MOST_ASKED:
                raise TooMuch(f"more than {MOST_ASKED} names differ")

    def kept(self) -> list[str]:
        """Files and links that the base commit does not ignore; of a new folder only if it is not ignored."""
        kept: list[str] = []
        files, folders, budget = list(self.changed), self.folders, [MOST_ASKED, MOST_NAMED]
        for _ in range(DEEPEST):
            kept += self._unignored(files, "", budget)
            folders = self._unignored(folders, "/", budget)
            if len(kept) > MOST_CHANGED:
                raise TooMuch(f"more than {MOST_CHANGED} files were changed")
            inside: dict[str, TreeEntry] = {}
            for folder in folders:
                entries = self._theirs(folder) or {}
                inside |= {f"{folder}/{name}": entry for name, entry in entries.items() if _is_work(name)}
                if len(inside) > MOST_ASKED:
                    raise TooMuch(f"more than {MOST_ASKED} names are new")
            files = [path for path, entry in inside.items() if entry.is_file_or_link]
            folders = [path for path, entry in inside.items() if entry.is_folder]
            self.changed |= {path: inside[path] for path in files}
            if not files and not folders:
                break
        return kept

    def _theirs(self, folder: str) -> dict[str, TreeEntry] | None:
        """None where the agent has closed a folder, even to itself: nothing in it can be handed in."""
        try:
            return self.sandbox.entries(folder)
        except PermissionError:
            return None

    def _compare(self, path: str, new: TreeEntry | None, old: TreeEntry | None) -> None:
        is_old = old is not None and old.is_file_or_link
        if new is not None and new.is_file_or_link:
            if new != old and not (is_old and self._is_same(path, new, old)):
                self.changed[path] = new
                self.known |= {path} if is_old else set()
        elif is_old:
            self.gone.append(path)
        if old is not None and old.is_folder:
            self.gone += self._below(path)
        if new is not None and new.is_folder:
            self.folders.append(path)
            self.behind |= {path} if old is not None else set()

    def _is_same(self, path: str, new: TreeEntry, old: TreeEntry | None) -> bool:
        """Written anew with the bytes it had: formatters and `sed -i` do so to every file they look at."""
        if old is None or new[:2] != old[:2]:
            return False
        try:
            if new.kind == "link":
                return self.sandbox.target(path) == self.clean.target(path)
            return self.sandbox.read(path) == self.clean.read(path)
        except OSError:  # too large to be handed in
            return False

    def _below(self, folder: str) -> Iterator[str]:
        """Files and links of the untouched directory."""
        with boundary(SandboxError, f"list {folder} of the image"):
            entries = self.clean.entries(folder)
        for name, entry in entries.items():
            path = f"{folder}/{name}"
            if entry.is_folder and path not in self.skipped:
                yield from self._below(path)
            elif entry.is_file_or_link:
                yield path

    def _unignored(self, paths: list[str], end: str, budget: list[int]) -> list[str]:
        """Asked of the untouched sandbox: its rules are the base commit's. Tracked files are never ignored.

        Git refuses names like ``:(top)x`` unless they begin otherwise.
        """
        budget[0] -= len(paths)
        budget[1] -= sum(map(len, paths))
        if min(budget) < 0:
            raise TooMuch(f"more than {MOST_ASKED} names, or {MOST_NAMED} characters of them, are new")
        asked = [path for path in paths if not _is_in(path, self.behind)]
        names = [f"./{path}{end}" for path in asked]
        ignored = set(_by_parts(lambda part: _ignored(self.clean, part), names))
        return [path for path in paths if f"./{path}{end}" not in ignored]


def _is_work(name: str) -> bool:
    return name not in IGNORED and name.isprintable()


def _is_in(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _aside(task: Task, clean: Sandbox) -> set[str]:
    """What no work can be in; no agent answers for what is wrong here.

    Git cannot hand in what lies in a submodule, and refuses to answer about it.
    """
    looked = clean.run("git rev-parse --quiet --verify HEAD", _STEP_S)
    if looked.exit_code:
        raise SandboxError(
            f"image {task.image} holds no repository in {task.workdir}: {looked.output[-200:]}"
        )
    name = _name()
    ignored = "git ls-files -z --others --ignored --exclude-standard --directory"
    modules = "git ls-files -z --stage | grep -z '^160000 '"
    with boundary(SandboxError, f"ask git about image {task.image}"):
        asked = _ours(clean.run(f"{ignored} > {name}.ignored; {modules} > {name}.modules; true", _STEP_S))
        if asked.exit_code:
            raise SandboxError(f"image {task.image}: {asked.output[-500:]}")
        submodules = {line.partition("\t")[2] for line in _names(clean, f"{name}.modules")}
        try:
            return submodules | {path.rstrip("/") for path in _names(clean, f"{name}.ignored")}
        except OSError:  # more than a sandbox gives out; then they are asked about one by one
            return submodules


def _ignored(clean: Sandbox, paths: list[str]) -> list[str] | None:
    name = _name()
    clean.write(name, _bytes(paths))
    result = _ours(clean.run(f"git check-ignore -z --stdin < {name} > {name}.out", _STEP_S))
    return _names(clean, f"{name}.out") if result.exit_code in (0, 1) else None


def _tracked(clean: Sandbox, gone: list[str]) -> list[str]:
    """Files whose loss git can express; what an image holds beside its commit is no part of the work."""

    def ask(paths: list[str]) -> list[str] | None:
        name = _name()
        clean.write(name, _bytes(paths))
        command = f"xargs -0 -r git --literal-pathspecs ls-files -z -- < {name} > {name}.out"
        return None if _ours(clean.run(command, _STEP_S)).exit_code else _names(clean, f"{name}.out")

    return _by_parts(ask, gone)


def _by_parts(ask: Callable[[list[str]], list[str] | None], paths: list[str]) -> list[str]:
    """All answers about the paths. What git refuses is asked for by halves, until it is one name alone."""
    answers: list[str] = []
    pending, refusals = list(_parts(paths)), 0
    while pending and refusals < MOST_REFUSALS:
        part = pending.pop()
        found = ask(part)
        if found is not None:
            answers += found
            continue
        refusals += 1
        middle = len(part) // 2
        pending += [half for half in (part[middle:], part[:middle]) if half and len(part) > 1]
    return answers


def _parts(paths: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for path in paths:
        if len(part) == _AT_ONCE or size > _AT_ONCE_CHARS:
            yield part
            part, size = [], 0
        part.append(path)
        size += len(path)
    if part:
        yield part


def _base(clean: Sandbox, paths: list[str]) -> str:
    """A tree that holds the files in question as the image has them.

    Where that is not what the commit has, a difference from the commit would not apply to the image.
    """
    name = _name()
    clean.write(".git/info/attributes", f"{_ATTRIBUTES}\n".encode())
    clean.write(name, _bytes(paths))
    command = f"{_GIT} update-index --add -z --stdin < {name} && git write-tree > {name}.tree"
    result = _ours(clean.run(command, _STEP_S))
    if result.exit_code:
        raise SandboxError(f"git cannot take what the image holds: {result.output[-500:]}")
    return clean.read(f"{name}.tree").decode().strip()


def _laid(sandbox: Sandbox, clean: Sandbox, entries: dict[str, TreeEntry]) -> list[str]:
    """Lay the changes into the untouched directory. A file too large is lost, not the work beside it."""
    laid: list[tuple[str, str, str]] = []
    total = 0
    for path, entry in entries.items():
        target = ""
        try:
            if entry.kind == "link":
                target = sandbox.target(path)
                total += len(target)
            else:
                data = sandbox.read(path)
                total += len(data)
        except OSError:
            continue
        if total > MOST_READ:
            raise TooMuch(f"more than {MOST_READ} bytes were changed")
        if entry.kind != "link":
            clean.write(path, data)
        laid.append((path, entry.kind, target))
    _run(clean, _FINISH, laid)
    return [path for path, _, _ in laid]


def _compared(clean: Sandbox, base: str, gone: list[str], there: list[str]) -> str:
    """Byte for byte, whatever attributes the agent set; with a file that is not UTF-8, all goes in binary."""
    _by_parts(lambda part: _fed(clean, "--force-remove", part), gone)
    _by_parts(lambda part: _fed(clean, "--add --replace", part), there)
    for more in ("", " -diff"):
        name = _name()
        clean.write(".git/info/attributes", f"{_ATTRIBUTES}{more}\n".encode())
        result = _ours(clean.run(f"{_GIT} {_DIFF} {base} > {name}.patch", _STEP_S))
        if result.exit_code:
            raise OSError(f"git: {result.output[-500:]}")
        try:
            return clean.read(f"{name}.patch").decode()
        except UnicodeDecodeError:
            continue
    raise OSError("the difference is no text")


def _fed(clean: Sandbox, options: str, paths: list[str]) -> list[str] | None:
    """Names such as ``.GIT`` or ``git~1`` are refused, and then none of the call's are taken."""
    name = _name()
    clean.write(name, _bytes(paths))
    result = _ours(clean.run(f"{_GIT} update-index {options} -z --stdin < {name}", _STEP_S))
    return None if result.exit_code else paths


def _ours(result: CommandResult) -> CommandResult:
    """No policy runs in the untouched sandbox; a name that git refuses is one that it chose, all the same."""
    if result.timed_out or result.broke_sandbox:
        raise SandboxError(f"the sandbox that compares with the base commit failed: {result.output[-200:]}")
    return result


def _run(clean: Sandbox, program: str, argument: object) -> None:
    name = _name()
    clean.write(name, json.dumps(argument).encode())
    result = _ours(clean.python(f"NAME = {name!r}\n{program}", _STEP_S))
    if result.exit_code:
        raise OSError(f"cannot lay out the changes: {result.output[-500:]}")


def _name() -> str:
    """Of a file of ours, where no patch can write and git lists nothing."""
    return f".git/{secrets.token_hex(8)}"


def _bytes(paths: list[str]) -> bytes:
    return b"".join(f"{path}\0".encode() for path in paths)


def _names(clean: Sandbox, file: str) -> list[str]:
    return [name for name in clean.read(file).decode(errors="replace").split("\0") if name]
