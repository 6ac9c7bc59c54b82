"""Compare an agent's repository with a clean copy of it, and return git's diff.

The host walks the two work directories side by side and starts no program in the agent's sandbox. A new
folder is not listed before git, in the clean sandbox, has answered that the base commit does not ignore it,
so products of a build cost nothing whatever their number. Every amount that the agent can make grow has a
limit. Beyond a limit nothing is handed in, so a step that is not done in time is the host's failure.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox, TreeEntry
from hpc_swe.base.errors import SandboxError, boundary
from hpc_swe.base.records import Task

MOST_CHANGED = 2_000
"""Files of a repository that may differ; a larger change is not handed in."""
MOST_READ = 50_000_000
"""Bytes of all these files together, before git makes a diff of them."""
MOST_ASKED = 20_000
"""Names that git is asked about."""
MOST_NAMED = 4_000_000
"""Characters of all these names together."""
DEEPEST = 64
"""Levels of folders in a new folder that are listed."""
MOST_REFUSALS = 200
"""Calls of git that may fail because it refuses a name; after these the remaining names are left out."""
IGNORED = {"__pycache__", ".git", ".pytest_cache"}
_STEP_S = 120.0
_AT_ONCE, _AT_ONCE_CHARS = 2_000, 300_000  # names a call, so that the answer fits into what a sandbox returns
# An image or its user may have set these options otherwise. The attributes make git compare byte for byte.
_GIT = "git -c core.fileMode=true -c core.symlinks=true -c core.ignoreCase=false -c core.quotePath=true"
_DIFF = "diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color"
_DIFF += " --src-prefix=a/ --dst-prefix=b/ -U3 --inter-hunk-context=0 --diff-algorithm=myers"
_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !diff"
# Paths are removed before others are made: a folder may have become a link, or a file a folder.
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


def difference(task: Task, sandbox: Sandbox, clean: Sandbox) -> str:
    """Return the agent's changes as git's diff, without what the base commit ignores, like build products.

    Raise OSError if they are too large to hand in or the sandbox broke, SandboxError if the host failed.
    """
    found = _Comparison(sandbox, clean, _skipped(task, clean))
    found.walk()
    kept = found.kept()
    # Files that an image holds beside its commit do not count.
    tracked = "xargs -0 -r git --literal-pathspecs ls-files -z --"
    gone = _by_parts(lambda paths: _ask(clean, tracked, paths), found.gone)
    if len(kept) + len(gone) > MOST_CHANGED:
        raise OSError(f"more than {MOST_CHANGED} files were changed")
    if not kept and not gone:
        return ""
    base = _base_tree(clean, [*gone, *(path for path in kept if path in found.known)])
    _run(clean, _CLEAR, found.gone)
    copied = _copy(sandbox, clean, {path: found.changed[path] for path in kept})
    return _diff(clean, base, gone, copied)


@dataclass
class _Comparison:
    """A comparison collects the differences between the agent's work directory and the clean one."""

    sandbox: Sandbox
    clean: Sandbox
    skipped: set[str]
    """Paths that are not compared: files and folders that the base commit ignores, and submodules."""
    changed: dict[str, TreeEntry] = field(default_factory=dict)
    """Files and links that are new or differ; the ignored ones are still among them."""
    known: set[str] = field(default_factory=set)
    """Those of `changed` that are files or links of the clean directory, too."""
    folders: list[str] = field(default_factory=list)
    """New folders."""
    gone: list[str] = field(default_factory=list)
    """Files and links that the agent's directory lacks."""
    replacing: set[str] = field(default_factory=set)
    """New folders in place of a link or file of the clean directory: git refuses paths in them."""

    def walk(self) -> None:
        """Compare every folder that both directories have."""
        pending = [""]
        for folder in pending:  # the loop extends the list
            theirs = self._theirs(folder)
            with boundary(SandboxError, f"list {folder or 'the work directory'} of the image"):
                ours = self.clean.entries(folder)
            for name in sorted(theirs.keys() | ours.keys()) if theirs is not None else ():
                path = f"{folder}/{name}" if folder else name
                if _is_work(name) and path not in self.skipped:
                    new, old = (theirs or {}).get(name), ours.get(name)
                    if new and old and new.kind == old.kind == "folder":
                        pending.append(path)
                    else:
                        self._compare(path, new, old)
            if len(self.changed) + len(self.folders) + len(self.gone) > MOST_ASKED:
                raise OSError(f"more than {MOST_ASKED} names differ")

    def kept(self) -> list[str]:
        """Return changed files and links that the base commit does not ignore, those in new folders too."""
        kept: list[str] = []
        files, folders, budget = list(self.changed), self.folders, [MOST_ASKED, MOST_NAMED]
        for _ in range(DEEPEST):
            kept += self._unignored(files, "", budget)
            folders = self._unignored(folders, "/", budget)
            if len(kept) > MOST_CHANGED:
                raise OSError(f"more than {MOST_CHANGED} files were changed")
            inside: dict[str, TreeEntry] = {}
            for folder in folders:
                entries = self._theirs(folder) or {}
                inside |= {f"{folder}/{name}": entry for name, entry in entries.items() if _is_work(name)}
                if len(inside) > MOST_ASKED:
                    raise OSError(f"more than {MOST_ASKED} names are new")
            files = [path for path, entry in inside.items() if entry.is_file_or_link]
            folders = [path for path, entry in inside.items() if entry.kind == "folder"]
            self.changed |= {path: inside[path] for path in files}
            if not files and not folders:
                break
        return kept

    def _theirs(self, folder: str) -> dict[str, TreeEntry] | None:
        """List a folder of the agent; return None if even the agent may not read it."""
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
        if old is not None and old.kind == "folder":
            self.gone += self._below(path)
        if new is not None and new.kind == "folder":
            self.folders.append(path)
            self.replacing |= {path} if old is not None else set()

    def _is_same(self, path: str, new: TreeEntry, old: TreeEntry | None) -> bool:
        """Return whether a file was only rewritten with equal bytes, as formatters and `sed -i` often do."""
        if old is None or new[:2] != old[:2]:
            return False
        try:
            if new.kind == "link":
                return self.sandbox.target(path) == self.clean.target(path)
            return self.sandbox.read(path) == self.clean.read(path)
        except OSError:  # too large to be handed in
            return False

    def _below(self, folder: str) -> Iterator[str]:
        with boundary(SandboxError, f"list {folder} of the image"):
            entries = self.clean.entries(folder)
        for name, entry in entries.items():
            path = f"{folder}/{name}"
            if entry.kind == "folder" and path not in self.skipped:
                yield from self._below(path)
            elif entry.is_file_or_link:
                yield path

    def _unignored(self, paths: list[str], end: str, budget: list[int]) -> list[str]:
        """Return the paths that the base commit does not ignore; tracked files are never ignored."""
        budget[0] -= len(paths)
        budget[1] -= sum(map(len, paths))
        if min(budget) < 0:
            raise OSError(f"more than {MOST_ASKED} names, or {MOST_NAMED} characters of them, are new")
        inside = tuple(f"{folder}/" for folder in self.replacing)
        # The clean sandbox has the base commit's rules. Git refuses names like ``:(top)x`` without ``./``.
        names = [f"./{path}{end}" for path in paths if not f"{path}/".startswith(inside)]
        check = "git check-ignore -z --stdin"
        ignored = set(_by_parts(lambda part: _ask(self.clean, check, part, (0, 1)), names))
        return [path for path in paths if f"./{path}{end}" not in ignored]


def _is_work(name: str) -> bool:
    return name not in IGNORED and name.isprintable()


def _skipped(task: Task, clean: Sandbox) -> set[str]:
    """Return the paths in which work does not count: ignored ones, and submodules, which git cannot diff."""
    head = clean.run("git rev-parse --quiet --verify HEAD", _STEP_S)
    if head.exit_code:
        raise SandboxError(f"image {task.image} holds no repository in {task.workdir}: {head.output[-200:]}")
    name = _new_name()
    ignored = "git ls-files -z --others --ignored --exclude-standard --directory"
    modules = "git ls-files -z --stage | grep -z '^160000 '"
    with boundary(SandboxError, f"ask git about image {task.image}"):
        command = f"{ignored} > {name}.ignored; {modules} > {name}.modules; true"
        asked = _require_end(clean.run(command, _STEP_S))
        if asked.exit_code:
            raise SandboxError(f"image {task.image}: {asked.output[-500:]}")
        submodules = {line.partition("\t")[2] for line in _names(clean, f"{name}.modules")}
        try:
            return submodules | {path.rstrip("/") for path in _names(clean, f"{name}.ignored")}
        except OSError:  # larger than a sandbox returns; then git is asked about each path
            return submodules


def _ask(clean: Sandbox, command: str, paths: list[str], ended: Collection[int] = (0,)) -> list[str] | None:
    """Return the paths that a command of git prints; None if its exit code is none of `ended`."""
    result, output = _feed(clean, command, paths)
    return _names(clean, output) if result.exit_code in ended else None


def _by_parts(ask: Callable[[list[str]], list[str] | None], paths: list[str]) -> list[str]:
    """Return what `ask` answers for parts of the paths; halve a part that is too large or refused (None)."""
    answers: list[str] = []
    pending, refusals = [paths], 0
    while pending and refusals < MOST_REFUSALS:
        part = pending.pop()
        is_small = len(part) <= _AT_ONCE and sum(map(len, part)) <= _AT_ONCE_CHARS
        found = ask(part) if part and is_small else None
        if found is not None:
            answers += found
            continue
        refusals += is_small
        middle = len(part) // 2
        pending += [part[middle:], part[:middle]] if len(part) > 1 else []
    return answers


def _base_tree(clean: Sandbox, paths: list[str]) -> str:
    """Return the id of a git tree of these files as in the image: a diff from the commit might not fit it."""
    clean.write(".git/info/attributes", f"{_ATTRIBUTES}\n".encode())
    result, output = _feed(clean, f"{_GIT} update-index --add -z --stdin && git write-tree", paths)
    if result.exit_code:
        raise SandboxError(f"git cannot add files of the image: {result.output[-500:]}")
    return clean.read(output).decode().strip()


def _copy(sandbox: Sandbox, clean: Sandbox, entries: dict[str, TreeEntry]) -> list[str]:
    """Copy the changes into the clean directory and return their paths; files too large are left out."""
    copied: list[tuple[str, str, str]] = []
    total = 0
    for path, entry in entries.items():
        is_link = entry.kind == "link"
        try:
            target = sandbox.target(path) if is_link else ""
            data = b"" if is_link else sandbox.read(path)
        except OSError:
            continue
        total += len(target) + len(data)
        if total > MOST_READ:
            raise OSError(f"more than {MOST_READ} bytes were changed")
        if not is_link:
            clean.write(path, data)
        copied.append((path, entry.kind, target))
    _run(clean, _FINISH, copied)
    return [path for path, _, _ in copied]


def _diff(clean: Sandbox, base: str, gone: list[str], copied: list[str]) -> str:
    """Return git's diff between the base tree and the copied files, whatever attributes the agent set."""
    # Git refuses names such as ``.GIT`` or ``git~1``, and then takes none.
    _by_parts(lambda part: _ask(clean, f"{_GIT} update-index --force-remove -z --stdin", part), gone)
    _by_parts(lambda part: _ask(clean, f"{_GIT} update-index --add --replace -z --stdin", part), copied)
    for more in ("", " -diff"):  # if some file is not UTF-8, all files are compared as binary ones
        name = _new_name()
        clean.write(".git/info/attributes", f"{_ATTRIBUTES}{more}\n".encode())
        result = _require_end(clean.run(f"{_GIT} {_DIFF} {base} > {name}.patch", _STEP_S))
        if result.exit_code:
            raise OSError(f"git: {result.output[-500:]}")
        try:
            return clean.read(f"{name}.patch").decode()
        except UnicodeDecodeError:
            continue
    raise OSError("the diff is not text")


def _feed(clean: Sandbox, command: str, paths: list[str]) -> tuple[CommandResult, str]:
    """Give a command these paths, which git may refuse, as input; return its result and its output's file."""
    name = _new_name()
    clean.write(name, b"".join(f"{path}\0".encode() for path in paths))
    result = clean.run(f"{{ {command}; }} < {name} > {name}.out", _STEP_S)
    return _require_end(result), f"{name}.out"


def _require_end(result: CommandResult) -> CommandResult:
    """Return the result of a command that ended; else raise SandboxError, since no agent acts here."""
    if result.timed_out or result.broke_sandbox:
        raise SandboxError(f"the sandbox that compares with the base commit failed: {result.output[-200:]}")
    return result


def _run(clean: Sandbox, program: str, argument: object) -> None:
    name = _new_name()
    clean.write(name, json.dumps(argument).encode())
    result = _require_end(clean.python(f"NAME = {name!r}\n{program}", _STEP_S))
    if result.exit_code:
        raise OSError(f"cannot copy the changes: {result.output[-500:]}")


def _new_name() -> str:
    """Return a new file's name in a place where no patch can write and whose contents git does not list."""
    return f".git/{secrets.token_hex(8)}"


def _names(clean: Sandbox, file: str) -> list[str]:
    return [name for name in clean.read(file).decode(errors="replace").split("\0") if name]
