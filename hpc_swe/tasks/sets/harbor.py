"""Load tasks from folders of Harbor.

Each has `task.toml`, `instruction.md`, `environment/Dockerfile` and `tests/test.sh`, perhaps
`solution/solve.sh`. The script of the tests alone decides what an attempt is worth.
"""

import base64
import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Split, Task, TestPlan
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.image_rows import HEAD
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.sets import _dockerfile
from hpc_swe.tasks.sets.base import Taskset
from hpc_swe.tasks.swebench_rows import IMAGE_NAME, WORKDIR

_PROMPT = "{}\n\nThe work directory is {}. Only what you change there counts.\n"
_MOST_BYTES = 4_000_000
_NOT_READ = ("steps", "environment/docker-compose.yaml", "tests/Dockerfile")


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str = ""


class _About(msgspec.Struct, frozen=True):
    """Of a task.toml these keys are used."""

    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()


class Harbor(Plugin, Taskset, frozen=True, kw_only=True):
    """Each folder with a task.toml becomes a task of that folder's name."""

    train: str = ""
    """Folder of the training tasks; empty has none."""
    eval: str = ""
    """Folder of the held-out tasks; empty has none."""
    checked: str = ""
    """File of hpc_swe/makers/check.py: only tasks that it calls usable are taken; empty takes all."""
    default_workdir: str = "/app"
    """Work directory of tasks whose Dockerfile names none."""

    def load(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of one split, sorted by folder; raise ConfigError, which names file and line."""
        tasks = self._tasks(split)
        for name in tasks.keys() & self._tasks("eval" if split == "train" else "train").keys():
            raise ConfigError(f"[taskset] {name} is in train and in eval: rename one of the folders")
        if self.checked:
            images = {name: (where, task.image) for name, (where, task) in tasks.items()}
            usable = task_checks.usable(self.checked, split, images)
            tasks = {name: found for name, found in tasks.items() if name in usable}
        yield from (task for _, task in tasks.values())

    def unchecked(self) -> "Harbor":
        """Return the taskset of all tasks, checked or not."""
        return msgspec.structs.replace(self, checked="")

    def _tasks(self, split: Split) -> dict[str, tuple[str, Task]]:
        source = self.train if split == "train" else self.eval
        found: dict[str, tuple[str, Task]] = {}
        for folder in sorted(path.parent for path in Path(source).glob("**/task.toml")) if source else ():
            if folder.name in found:
                raise ConfigError(f"{folder}: another folder has this name: {found[folder.name][0]}")
            try:
                found[folder.name] = str(folder), self._task(folder)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                raise ConfigError(f"{folder}: as a task of Harbor: {error}") from None
        if source and not found:
            raise ConfigError(f"[taskset] {split}: no folder in {source} holds a task.toml")
        return found

    def _task(self, folder: Path) -> Task:
        if not IMAGE_NAME.fullmatch(folder.name):
            raise ValueError("an image cannot have the folder's name: rename the folder")
        about = msgspec.toml.decode((folder / "task.toml").read_bytes(), type=_About)
        if wrong := [name for name in _NOT_READ if (folder / name).exists()]:
            raise ValueError(f"{wrong[0]} is not read: a task has one image, in which its tests run")
        if about.verifier.env:
            raise ValueError(f"task.toml: verifier.env is not read: {', '.join(about.verifier.env)}")
        context = (folder / "environment").resolve()
        dockerfile, published = context / "Dockerfile", about.environment.docker_image
        build = _dockerfile.Build(context, base=published)
        if not published or dockerfile.exists():
            build = _dockerfile.read(dockerfile, published)
        tests, copied = _files(folder / "tests"), {} if published else _files(context)
        made_of = [build.base, "" if published else build.script]
        for path, data in copied.items():
            if data.strip() and data in tests.values():
                raise ValueError(f"environment/{path} is one of the tests: an agent may see it")
            is_program = (context / path).stat().st_mode & 0o111
            made_of.append(f"{path} {is_program} {hashlib.sha256(data).hexdigest()}")
        workdir = build.workdir or self.default_workdir
        if not WORKDIR.fullmatch(workdir):
            raise ValueError(f"the work directory {workdir!r} is no folder of an image, such as '/app'")
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        solution = _files(folder / "solution")
        return Task(
            task_id=folder.name,
            taskset="harbor",
            prompt=_PROMPT.format(instruction.strip(), workdir),
            image=f"{folder.name}+{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}",
            workdir=workdir,
            base_commit=HEAD,
            tests=TestPlan(
                command=_script("tests/test.sh", tests),
                fail_to_pass=["test.sh"],
                timeout_s=about.verifier.timeout_sec,
                extra={
                    "image": build.base,
                    "context": str(context),
                    "steps": "" if published else build.script,
                    "solution": _script("solution/solve.sh", solution) if solution else "",
                    "test_patch": _as_patch(tests),  # what no image may show
                    "test_files": "[]",
                    "set_up": "",
                },
            ),
        )


def _files(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder by their paths in it; raise ValueError if a link leads out of it."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path.relative_to(folder.parent)} leads out of {folder.name}")
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def _script(entry: str, files: dict[str, bytes]) -> str:
    """Return a script that writes these files below a folder of the root, and runs one of them."""
    folder, _, name = entry.partition("/")
    if name not in files:
        raise ValueError(f"{entry} is missing")
    if sum(map(len, files.values())) > _MOST_BYTES:
        raise ValueError(f"the files of {folder} have more than {_MOST_BYTES} bytes")
    lines = [f"rm -rf /{folder} /logs/verifier", f"mkdir -p /{folder} /logs/verifier"]
    for path, data in files.items():
        place = shlex.quote(f"/{folder}/{path}")
        lines.append(f'mkdir -p "$(dirname {place})"')
        lines.append(f"base64 -d > {place} <<'END'\n{base64.encodebytes(data).decode()}END")
    run = f"bash -c '. /{entry}' /{entry}"  # read whole at first: code of a patch may append to the file
    return "\n".join([*lines, f"chmod -R a+rx /{folder}", run, ""])


def _as_patch(files: dict[str, bytes]) -> str:
    texts = {path: data.decode(errors="ignore") for path, data in files.items() if b"\0" not in data}
    return "".join(difference(f"tests/{path}", None, text) for path, text in texts.items() if text)
