"""python -m jobs.build_images CONFIG...: the sandbox images of a run's SWE-bench tasks, without any registry.

An image is the base image, a virtual environment of Python wheels where the official eval scripts expect
theirs, and the repository at the task's base commit, in which nothing younger can be found: no remote, no
tag, no reflog, no object that the base commit does not reach. Images that are there already are left alone,
so the same command goes on after an interruption. It knows no registries and no archives.
"""

import argparse
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpc_swe import config as configuration
from hpc_swe.errors import ConfigError, HpcSweError
from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.plugins.tasksets.swebench import Swebench
from hpc_swe.records import Task

ENVIRONMENT = "opt/miniconda3/envs/testbed"
ACTIVATE = """export VIRTUAL_ENV=/{environment} PATH="/{environment}/bin:$PATH"
"""
# What official eval scripts source: they expect conda, and get a virtual environment of the same name.
CONDA = """conda() { case "$1" in activate) . "/opt/miniconda3/envs/$2/bin/activate";; esac; }
"""
# An image is copied, which changes all times but that of the last change.
GIT_CONFIG = {"core.checkStat": "minimal", "core.trustctime": "false", "gc.auto": "0"}
EDITION = 1
"""Raised when an image would come out differently, so that those of before are built again."""

console = Console()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an image was made of; it lies beside it, and was written after it."""

    image: str
    base_commit: str
    environment: str
    """Digest of what the environment was made of."""
    sif_sha256: str


@dataclass(frozen=True)
class Recipe:
    """What all images of one call have in common."""

    images: Path
    base: Path
    """An unpacked image with python3 and git."""
    repository: Path
    """A git repository that holds all base commits."""
    requirements: Path
    """What pip installs into the environment."""
    wheels: Path | None = None
    """Folder that pip takes them from; None is where pip is configured to look."""

    def digest(self) -> str:
        """Of all that the environment depends on; wheels by name."""
        wheels = sorted(path.name for path in self.wheels.iterdir()) if self.wheels else []
        requirements = self.requirements.read_text(encoding="utf-8")
        told = repr((EDITION, str(self.base), self.base.stat().st_mtime_ns, requirements, wheels))
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def build(recipe: Recipe, task: Task) -> bool:
    """Put a task's image in place, packed and unpacked; False when it is there already.

    Raises:
        HpcSweError: A command failed; its words are the message.
    """
    digest = recipe.digest()
    manifest = recipe.images / f"{task.image}.json"
    if _is_built(manifest, task, digest):
        return False
    with _scratch(recipe.images) as work:
        tree, sif = work / "tree", work / "image.sif"
        _copy(_environment(recipe, digest, task.workdir), tree)
        stage(recipe.repository, task.base_commit, tree / task.workdir.lstrip("/"))
        _pack(tree, sif)
        done = Manifest(
            image=task.image, base_commit=task.base_commit, environment=digest, sif_sha256=_sha256(sif)
        )
        manifest.unlink(missing_ok=True)
        shutil.rmtree(recipe.images / task.image, ignore_errors=True)
        sif.rename(recipe.images / f"{task.image}.sif")
        tree.rename(recipe.images / task.image)
        (work / "manifest").write_bytes(msgspec.json.format(msgspec.json.encode(done)))
        (work / "manifest").rename(manifest)
    return True


def stage(repository: Path, commit: str, folder: Path) -> None:
    """Check a commit out into a new repository that holds this one commit and no other.

    Raises:
        HpcSweError: The commit is missing, or something younger came along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(folder), "-c", "core.logAllRefUpdates=false", "-c", "advice.detachedHead=false"]
    _run("git", "init", "--quiet", "--template=", str(folder))
    for name, value in GIT_CONFIG.items():
        _run(*git, "config", name, value)
    upload = "--upload-pack=git -c uploadpack.allowAnySHA1InWant=true upload-pack"
    _run(*git, "fetch", "--quiet", "--depth=1", "--no-tags", upload, repository.absolute().as_uri(), commit)
    _run(*git, "update-ref", "refs/heads/main", commit)
    _run(*git, "symbolic-ref", "HEAD", "refs/heads/main")
    _run(*git, "reset", "--quiet", "--hard")
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (folder / ".git" / name).unlink(missing_ok=True)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    found = strangers(folder, commit)
    if found:
        raise HpcSweError(f"{folder}: {len(found)} things are there that {commit} does not hold: {found[:5]}")


def strangers(folder: Path, commit: str) -> list[str]:
    """Objects, references and remotes of a repository by which more than one commit could be read."""
    git = ["git", "-C", str(folder)]
    held = {line.split()[0] for line in _run(*git, "rev-list", "--objects", commit).splitlines()}
    there = _run(*git, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    refs = _run(*git, "for-each-ref", "--format=%(refname)").split()
    found = [name for name in there if name not in held]
    found += [ref for ref in refs if ref != "refs/heads/main"]
    found += _run(*git, "remote").split()
    for name in ("logs", "FETCH_HEAD", "ORIG_HEAD", "packed-refs", "objects/info/alternates"):
        found += [name] if (folder / ".git" / name).exists() else []
    return found


def _environment(recipe: Recipe, digest: str, workdir: str) -> Path:
    """The base image with the environment in it, made once for all images."""
    done = recipe.images / f".environment-{digest}"
    if done.exists():
        return done
    if not (recipe.base / "usr/bin").is_dir():
        raise ConfigError(f"--base {recipe.base} is no unpacked image: run containers/build_image.sh")
    with _scratch(recipe.images) as work:
        tree = work / "tree"
        _copy(recipe.base, tree)
        _install(recipe, tree, workdir)
        tree.rename(done)
    return done


def _install(recipe: Recipe, tree: Path, workdir: str) -> None:
    """By the pip of this interpreter, for that of the image: nothing of the image runs."""
    version = _python(tree)
    environment = tree / ENVIRONMENT
    packages = environment / f"lib/python{version}/site-packages"
    packages.mkdir(parents=True)
    places = ["--no-index", f"--find-links={recipe.wheels.absolute()}"] if recipe.wheels else []
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--only-binary=:all:"]
    options += [f"--python-version={version}", "--implementation=cp", f"--target={packages}"]
    _run(sys.executable, "-m", "pip", "install", *options, *places, f"--requirement={recipe.requirements}")
    # The repository is importable from where it lies, as after an editable install.
    (packages / "testbed.pth").write_text(f"{workdir}\n{workdir}/src\n")
    (environment / "bin").mkdir()
    for name in ("python", "python3", f"python{version}"):
        (environment / "bin" / name).symlink_to(f"/usr/bin/python{version}")
    (environment / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
    (environment / "bin/activate").write_text(ACTIVATE.format(environment=ENVIRONMENT))
    (tree / "opt/miniconda3/bin").mkdir(parents=True)
    (tree / "opt/miniconda3/bin/activate").write_text(CONDA)
    (tree / "etc/gitconfig").write_text("[safe]\n\tdirectory = *\n")
    zones = packages / "tzdata/zoneinfo"
    if zones.is_dir() and not (tree / "usr/share/zoneinfo").exists():  # which the C library asks for
        (tree / "usr/share/zoneinfo").symlink_to(f"/{zones.relative_to(tree)}")


def _python(tree: Path) -> str:
    found = [re.fullmatch(r"python(3\.\d+)", path.name) for path in (tree / "usr/bin").glob("python3.*")]
    versions = [match[1] for match in found if match]
    if len(versions) != 1:
        raise ConfigError(f"--base {tree}: one Python is needed in usr/bin, there are {versions}")
    return versions[0]


def _pack(tree: Path, sif: Path) -> None:
    """As containers/build_image.sh does, and for the same reasons."""
    os.environ.setdefault("APPTAINER_DROP_CAPS", "CAP_SYS_RESOURCE")
    zstd = "-comp zstd -Xcompression-level 3"
    _run("apptainer", "--quiet", "build", "--mksquashfs-args", zstd, str(sif), str(tree))


def _copy(tree: Path, to: Path) -> None:
    """Files that nobody changes are shared between images, where the file system lets us."""
    try:
        _run("cp", "--archive", "--link", str(tree), str(to))
    except HpcSweError:
        shutil.rmtree(to, ignore_errors=True)
        _run("cp", "--archive", "--reflink=auto", str(tree), str(to))


def _is_built(manifest: Path, task: Task, digest: str) -> bool:
    try:
        made = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return False
    return (made.base_commit, made.environment) == (task.base_commit, digest)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _scratch(images: Path) -> Iterator[Path]:
    """On the images' own file system, so that renames put things in place at once."""
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".work.", dir=images, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise HpcSweError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def wanted(config: configuration.RunConfig) -> tuple[Path, list[Task]]:
    """The folder of images, and the tasks that a run would take, one for each image."""
    if not isinstance(config.taskset, Swebench) or not isinstance(config.sandbox, Apptainer):
        raise ConfigError("images are built for taskset.type = 'swebench' with sandbox.type = 'apptainer'")
    train = itertools.islice(config.taskset.load("train"), config.tasks.train)
    held_out = itertools.islice(config.taskset.load("eval"), config.tasks.eval_from + config.tasks.eval)
    tasks = {task.image: task for task in (*train, *held_out)}
    return Path(config.sandbox.images), list(tasks.values())


def run(recipe: Recipe, tasks: list[Task]) -> int:
    """Build what is missing, under a progress bar; the number of images that failed."""
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("images", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=task.image)
            try:
                build(recipe, task)
            except HpcSweError as error:
                failed += 1
                progress.console.print(f"{task.task_id}: {error}")
            progress.advance(bar)
    return failed


def main() -> None:
    """The command line."""
    os.umask(0o022)
    parser = argparse.ArgumentParser(prog="python -m jobs.build_images", description="Sandbox images.")
    parser.add_argument("words", nargs="+", help="TOML files, then overrides such as tasks.train=5")
    parser.add_argument("--repository", type=Path, required=True, help="git repository with the base commits")
    parser.add_argument("--requirements", type=Path, required=True, help="packages of the environment")
    parser.add_argument("--wheels", type=Path, help="folder of wheels; without it pip looks where it does")
    parser.add_argument("--base", type=Path, help="unpacked base image (default: python-pytest beside them)")
    arguments = parser.parse_args()
    try:
        files = [Path(word) for word in arguments.words if "=" not in word]
        config = configuration.read(*files, overrides=[word for word in arguments.words if "=" in word])
        images, tasks = wanted(config)
        base = arguments.base or images / "python-pytest"
        recipe = Recipe(images, base, arguments.repository, arguments.requirements, arguments.wheels)
        failed = run(recipe, tasks)
    except HpcSweError as error:
        console.print(f"error: {error}")
        sys.exit(error.exit_code)
    console.print(f"{len(tasks) - failed} of {len(tasks)} images are in {images}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
