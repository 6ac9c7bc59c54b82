"""Translate a Dockerfile into a script that Apptainer runs, without root, in the image that the file names.

Only steps are read that mean the same in one script: there are no layers, users or stages.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_FROM = re.compile(r"([\w.:/@-]+)(\s+AS\s+[\w.-]+)?", re.IGNORECASE)
_PAIR = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*$")
_HOME = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(~)""", re.DOTALL)
"""What a shell leaves as it is, or else a tilde, in whose place it may put a folder; Docker never does."""
_CHANGES_NOTHING = {"CMD", "EXPOSE", "LABEL"}


@dataclass
class Build:
    """A build is what a Dockerfile says."""

    context: Path
    """Folder of the file, and of all that it copies."""
    base: str = ""
    """Reference of the image that it starts from."""
    workdir: str = ""
    """Its last WORKDIR; empty if it has none."""
    variables: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=lambda: ["set -ef", "IFS="])

    @property
    def script(self) -> str:
        """Return the script of all steps for a POSIX shell; it finds the context in /.build/context."""
        names = "|".join(["", *self.variables])
        kept = f"export -p | grep -E '^export ({names})=' > /.singularity.d/env/95-steps.sh || true"
        return "\n".join([*self.lines, kept, ""])

    def add(self, name: str, words: str) -> None:
        """Add a step; raise ValueError, with the reason, for one that is not read."""
        steps = {"RUN": self._run, "WORKDIR": self._enter, "ENV": self._set, "COPY": self._copy}
        if name == "FROM" and not self.base and (found := _FROM.fullmatch(words)):
            self.base = found[1]
        elif not self.base:
            raise ValueError("the file must begin with FROM and the reference of an image")
        elif name in steps:
            if words.startswith(("--", "[", "<<")):
                raise ValueError("options, lists and texts of several lines are not read")
            steps[name](words)
        elif name not in _CHANGES_NOTHING:
            raise ValueError("only one FROM, RUN, WORKDIR, ENV and COPY are read")

    def _run(self, words: str) -> None:
        self.lines.append(f"/bin/sh -c {shlex.quote(words)}")

    def _enter(self, words: str) -> None:
        self.workdir = str(PurePosixPath(self.workdir, *_plain(words)))
        self._require_absolute(self.workdir)
        self.lines.append(f"mkdir -p {shlex.quote(self.workdir)} && cd {shlex.quote(self.workdir)}")

    def _set(self, words: str) -> None:
        parts = shlex.shlex(words, posix=True, punctuation_chars=";&|<>()")  # they end words of a shell alone
        parts.whitespace_split, parts.commenters = True, ""
        pairs = [_PAIR.fullmatch(pair) for pair in parts]
        if not all(pairs) or "`" in words or "$(" in words:
            raise ValueError("it must be NAME=VALUE, with quotes around ; & | < > ( )")
        self.variables += [pair[1] for pair in pairs if pair]
        literal = _HOME.sub(lambda found: r"\~" if found[1] else found[0], words)
        self.lines.append(f"export {literal}")

    def _copy(self, words: str) -> None:
        *patterns, to = _plain(words)
        if not patterns:
            raise ValueError("it must be a file and its destination")
        self._require_absolute(self.workdir or to)
        sources = [path for pattern in patterns for path in self._found(pattern)]
        is_folder = to.endswith("/") or to == "." or len(sources) > 1
        for path in sources:
            source = shlex.quote(f"/.build/context/{path.relative_to(self.context)}")
            folder = to if is_folder or path.is_dir() else str(PurePosixPath(to).parent)
            copy = (
                f"cp -R {source}/. {shlex.quote(to)}" if path.is_dir() else f"cp {source} {shlex.quote(to)}"
            )
            self.lines.append(f"mkdir -p {shlex.quote(folder)} && {copy}")

    def _require_absolute(self, path: str) -> None:
        if not path.startswith("/"):
            raise ValueError(f"{path} depends on the image's own directory: write an absolute WORKDIR before")

    def _found(self, pattern: str) -> list[Path]:
        name = str(PurePosixPath(pattern.lstrip("/")))
        found = [self.context] if name == "." else sorted(self.context.glob(name))
        if ".." in name.split("/") or not found:
            raise ValueError(f"{pattern} is not in the folder of the Dockerfile")
        return found


def read(dockerfile: Path, image: str = "") -> Build:
    """Read a Dockerfile; raise ValueError, which names line and step, if a step is not read.

    If an `image` was made of it already, only its WORKDIR is read.
    """
    build = Build(dockerfile.parent, base=image)
    if not image and dockerfile.with_name(".dockerignore").exists():
        raise ValueError(".dockerignore is not read: remove it, and the files that it names")
    for number, text in _steps(dockerfile.read_text(encoding="utf-8")):
        name, words = [*text.split(None, 1), ""][:2]
        if image and name.upper() != "WORKDIR":
            continue
        try:
            build.add(name.upper(), words.strip())
        except ValueError as error:
            raise ValueError(f"{dockerfile.name}: line {number}: {name}: {error}") from None
    if not build.base:
        raise ValueError(f"{dockerfile.name}: no FROM")
    return build


def _steps(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line at which each step begins, and the step on one line."""
    first, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):  # such lines may also stand within a step
            first = first if parts else number
            parts.append(_CONTINUED.sub("", line))
            if not _CONTINUED.search(line):
                yield first, "".join(parts)
                parts = []
    if parts:
        yield first, "".join(parts)


def _plain(words: str) -> list[str]:
    if "$" in words:
        raise ValueError("a path with a variable is not read")
    return shlex.split(words)
