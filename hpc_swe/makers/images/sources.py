"""Make the files of images: by a recipe that needs no registry, or from anything that Apptainer can build."""

import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from hpc_swe.agents.sandboxes.base import ImageSandboxes, Sandbox
from hpc_swe.agents.sif import squashfs_offset
from hpc_swe.base.errors import ConfigError, EpisodeError, HpcSweError, boundary
from hpc_swe.base.records import Task
from hpc_swe.base.tables import say
from hpc_swe.makers.images import links
from hpc_swe.makers.images.commands import remove, run
from hpc_swe.makers.images.repository import begin, restage, stage

EDITION = 1
"""Increase this when the same recipe makes another image, so that existing images are built again."""
ENVIRONMENT = "opt/miniconda3/envs/testbed"
_ACTIVATE = f'export VIRTUAL_ENV=/{ENVIRONMENT} PATH="/{ENVIRONMENT}/bin:$PATH"\n'
# What official eval scripts source: they expect conda, and get a virtual environment of the same name.
_CONDA = 'conda() { case "$1" in activate) . "/opt/miniconda3/envs/$2/bin/activate";; esac; }\n'
_FILE = re.compile("^(docker-archive|oci-archive|oci):")
_TRIAL_S = 120.0
_INCOMPLETE = 2  # exit code of unsquashfs that cannot make devices, which no sandbox takes from its image
_SET_UP_S = 1800.0
_MADE = ".git/made"
_LIMITED = re.compile(r"\bstatus\D{0,10}429\b|toomanyrequests|too many requests|rate limit", re.IGNORECASE)
_LIMIT_S, _LONGEST_WAIT_S = 7 * 3600.0, 1800.0  # registries count the pulls of about six hours
_LOGIN = "a login raises the limit: set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD"
_CHECK_VERSION = "import sys; sys.exit(sys.version_info < (3, 10))"
_HOST_PYTHON = (
    "for images without one run containers/build_python.sh and add configs/sandboxes/host_python.toml"
)
_environment_lock = threading.Lock()


@dataclass(frozen=True)
class Built:
    """Combine a base image, an environment of Python wheels where eval scripts expect it, and a clone."""

    images: Path
    """Folder that keeps the environment."""
    base: Path
    """An unpacked image with python3 and git."""
    repository: Path
    """A git repository that holds all base commits."""
    requirements: Path
    """Requirements file that pip installs into the environment."""
    wheels: Path | None = None
    """Folder that pip installs from; None is where pip is configured to look."""
    set_up: tuple[str, ...] = ()
    """Shell lines that run in the repository when an image is made; the files that they add there stay."""
    sandbox: ImageSandboxes | None = None
    """Sandboxes in which `set_up` runs; they must be given with it."""

    def origin(self, task: Task) -> str:
        """Name the origin of a task's image, for people: the base image, which all images share."""
        return str(self.base)

    def digest(self, task: Task) -> str:
        """Return a digest of all that the image depends on but the base commit; wheels count by name."""
        if not (self.base / "usr/bin").is_dir():
            raise ConfigError(f"--base {self.base} is not an unpacked image: run containers/build_image.sh")
        with boundary(ConfigError, "read --requirements and --wheels"):
            wheels = sorted(path.name for path in self.wheels.iterdir()) if self.wheels else []
            requirements = self.requirements.read_text(encoding="utf-8")
        values = (EDITION, str(self.base), self.base.stat().st_mtime_ns, requirements, wheels)
        return _digest(*values, self.set_up) if self.set_up else _digest(*values)

    def lay_out(self, task: Task, exact: Collection[str], work: Path) -> list[str]:
        """Make work/tree of links to a common environment and a new repository; none of its files differ."""
        tree, environment = work / "tree", self.images / f".environment-{self.digest(task)}"
        with _environment_lock:
            if not environment.exists():
                made = work / "environment"
                _require_readable(self.base)
                # Not by links: sandboxes of a run may use the base, and a new link looks to a grading like a
                # change of the file, since the kernel notes the time of both alike.
                run("cp", "--archive", "--reflink=auto", str(self.base.resolve()), str(made))
                self._install(made, task.workdir)
                made.rename(environment)
        _copy(environment, tree)
        stage(self.repository, task.base_commit, _repository(tree, task))
        if self.set_up and self.sandbox:
            _add_made_files(self.sandbox, msgspec.structs.replace(task, image=tree.name), self.set_up, work)
        return []

    def _install(self, tree: Path, workdir: str) -> None:
        """Install with the pip of this interpreter, so that nothing of the image runs."""
        python = _python(tree)
        version = python.name.removeprefix("python")
        environment = tree / ENVIRONMENT
        packages = environment / f"lib/python{version}/site-packages"
        packages.mkdir(parents=True)
        places = ["--no-index", f"--find-links={self.wheels.absolute()}"] if self.wheels else []
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--only-binary=:all:"]
        options += [f"--python-version={version}", "--implementation=cp", f"--target={packages}"]
        pip = (sys.executable, "-m", "pip", "install")
        run(*pip, *options, *places, f"--requirement={self.requirements}")
        # The repository can be imported from its folder, as after an editable install.
        (packages / "testbed.pth").write_text(f"{workdir}\n{workdir}/src\n")
        (environment / "bin").mkdir()
        for name in ("python", "python3", f"python{version}"):
            (environment / "bin" / name).symlink_to(python)
        (environment / "pyvenv.cfg").write_text(f"home = {python.parent}\nversion = {version}\n")
        (environment / "bin/activate").write_text(_ACTIVATE)
        (tree / "opt/miniconda3/bin").mkdir(parents=True)
        (tree / "opt/miniconda3/bin/activate").write_text(_CONDA)
        (tree / "etc/gitconfig").write_text("[safe]\n\tdirectory = *\n")
        zones = packages / "tzdata/zoneinfo"
        if zones.is_dir() and not (tree / "usr/share/zoneinfo").exists():  # the C library needs it
            (tree / "usr/share/zoneinfo").symlink_to(f"/{zones.relative_to(tree)}")


@dataclass
class PullLimit:
    """A command has this limit for all of its pulls, which wait together."""

    until: float = field(default_factory=lambda: time.monotonic() + _LIMIT_S)
    """Deadline of all waits; each pull that succeeds sets a new one."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the command ends; then nobody waits."""


@dataclass(frozen=True)
class Pulled:
    """Take an existing image, such as an official one: replace its repository, and keep the rest."""

    template: str
    """Source that Apptainer builds from; {image} is replaced by the image's name here, {reference} by that on
    a registry, with its tag."""
    sandbox: ImageSandboxes
    """Sandboxes that must be able to open the image."""
    wait_s: float = 60.0
    """Seconds before the second pull where a registry limits them; each further wait is twice as long."""
    limit: PullLimit = field(default_factory=PullLimit)

    def __post_init__(self) -> None:
        unknown = set(re.findall(r"\{(.*?)\}", self.template)) - {"image", "reference"}
        if unknown:
            known = "only {image} and {reference} are filled in"
            raise ConfigError(f"--from {self.template}: {known}, not {sorted(unknown)}")

    def origin(self, task: Task) -> str:
        """Return the source as Apptainer reads it."""
        reference = task.tests.extra.get("image", f"swebench/{task.image}")
        if "{image}" in self.template and "://" in self.template and "+" in task.image:
            raise ConfigError(
                f"--from {self.template}: the image of {task.task_id} has a tag, {reference}: write docker://"
                + ("{reference}" if "steps" in task.tests.extra else "HOST/{reference}")
            )
        name = self.template.replace("{image}", task.image).replace("{reference}", reference)
        found = _FILE.match(name)
        return found[0] + str(Path(name[found.end() :]).absolute()) if found else name

    def digest(self, task: Task) -> str:
        """Return a digest of a file's size and age; images of a registry count as unchanging."""
        file = self._file(task)
        if file is None:
            return _digest(EDITION, self.origin(task))
        try:
            about = file.stat()
        except OSError as error:
            raise HpcSweError(f"--from: {file}: {error.strerror}") from None
        return _digest(EDITION, self.origin(task), about.st_size, about.st_mtime_ns)

    def lay_out(self, task: Task, exact: Collection[str], work: Path) -> list[str]:
        """Make work/tree of an image that opens, with a new repository; return what its maker changed."""
        tree = work / "tree"
        self._unpack(task, tree, work)
        if steps := task.tests.extra.get("steps"):
            _run_steps(steps, Path(task.tests.extra["context"]), tree, work)
        repository = _repository(tree, task)
        if not (repository / ".git").exists() and "steps" in task.tests.extra:
            if not repository.is_dir():
                where = f"{self.origin(task)} has no work directory {task.workdir}"
                raise HpcSweError(f"{where}: set taskset.default_workdir, or WORKDIR in the Dockerfile")
            begin(repository)
        if not (repository / ".git").exists():
            raise HpcSweError(f"{self.origin(task)} has no git repository in {task.workdir}")
        of_another = "of_another_commit" in task.tests.extra
        set_up = restage(repository, task.base_commit, work, None if of_another else exact)
        self._try(msgspec.structs.replace(task, image=tree.name), work)
        return set_up

    def _unpack(self, task: Task, tree: Path, work: Path) -> None:
        """Unpack with unsquashfs: Apptainer would need all capabilities, which not every root has."""
        file = self._file(task)
        if file is not None and file.suffix == ".sif":
            offset = squashfs_offset(run("apptainer", "sif", "list", str(file)))
            if offset is not None:
                options = ("-quiet", "-no-progress", "-no-xattrs", "-offset", str(offset), "-dest", str(tree))
                run("unsquashfs", *options, str(file), ok=(0, _INCOMPLETE))
                run("chmod", "-R", "u+rwX", str(tree))
                return
        cache = ["--disable-cache"] if file else []
        words = ("build", "--fix-perms", *cache, "--sandbox", str(tree), self.origin(task))
        wait_s, limit = self.wait_s, self.limit
        while True:
            try:
                apptainer(*words, work=work)
                limit.until = time.monotonic() + _LIMIT_S
                return
            except HpcSweError as error:
                said = str(error).partition(": exit code ")[2]  # an image's name in the command may have 429
                if file or not _LIMITED.search(said):
                    raise
                if time.monotonic() + wait_s > limit.until:
                    raise HpcSweError(
                        f"{self.origin(task)}: the registry still limits pulls; {_LOGIN}"
                    ) from None
            say(f"{task.image}: the registry limits pulls; the next one is in {wait_s:.0f} s; {_LOGIN}")
            remove(tree)
            if limit.ended.wait(wait_s):
                raise HpcSweError(f"{self.origin(task)}: not pulled, since the command ends")
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _file(self, task: Task) -> Path | None:
        origin = self.origin(task)
        return None if "://" in origin else Path(_FILE.sub("", origin))

    def _try(self, task: Task, work: Path) -> None:
        """Use the image as a worker will, so that no node is the first to find a fault."""
        try:
            with self.sandbox.for_trial(work).open(msgspec.structs.replace(task, start=None)) as sandbox:
                version = sandbox.python(_CHECK_VERSION, _TRIAL_S)
                status = sandbox.run("git rev-parse --verify HEAD && git status --porcelain -uno", _TRIAL_S)
        except EpisodeError as error:
            remedy = f"it needs Python 3.10 or newer, by the name that [sandbox] python gives; {_HOST_PYTHON}"
            raise HpcSweError(f"the image does not open as a sandbox; {remedy}: {error}") from None
        if version.exit_code:
            raise HpcSweError(f"the image's python3 is older than 3.10; {_HOST_PYTHON}")
        if status.exit_code or len(status.output.split()) > 1:
            raise HpcSweError(f"git in the image does not see a clean {task.workdir}: {status.output[-500:]}")


def _run_steps(steps: str, context: Path, tree: Path, work: Path) -> None:
    """Run the steps of a task's Dockerfile in an unpacked image, as its root, on this host's network."""
    build = tree / ".build"
    shutil.copytree(context, build / "context", symlinks=True)
    (build / "steps").write_text(steps, encoding="utf-8")
    root = ["--fakeroot"] if os.getuid() else []
    options = ["--writable", *root, "--no-home", "--no-mount=cwd,tmp", "--cleanenv", "--pwd=/"]
    apptainer("exec", *options, str(tree), "/bin/sh", "/.build/steps", work=work)
    remove(build)


ImageSource = Built | Pulled


def apptainer(*words: str, work: Path) -> None:
    """Run Apptainer with its temporary files in `work`, unless the environment names another folder."""
    place = os.environ.get("APPTAINER_TMPDIR", str(work))
    # Root in a container may lack a capability that Apptainer would ask for.
    rights = os.environ.get("APPTAINER_DROP_CAPS", "CAP_SYS_RESOURCE")
    run("apptainer", "--quiet", *words, settings={"APPTAINER_TMPDIR": place, "APPTAINER_DROP_CAPS": rights})


def _repository(tree: Path, task: Task) -> Path:
    """Return the folder of a task's repository in an unpacked image; its links must not lead out of it."""
    folder = tree / task.workdir.lstrip("/")
    if not (folder / ".git").resolve().is_relative_to(tree.resolve()):
        raise HpcSweError(f"{task.task_id}: its workdir {task.workdir!r} leads out of the image")
    return folder


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _require_readable(base: Path) -> None:
    """Raise ConfigError, before anything is copied, if this user cannot read all of a base image."""
    closed = "-type f ! -readable -o -type d ! -readable -o -type d ! -executable"
    if path := run("find", str(base.resolve()), "(", *closed.split(), ")", "-print", "-quit").strip():
        raise ConfigError(
            f"--base {base}: permission to read {path} is denied: run chmod -R u+rX {base} if it is yours, "
            "and otherwise unpack the image as yourself"
        )


def _python(tree: Path) -> PurePosixPath:
    """Return where an image has its Python, as its programs see it."""
    for folder in ("usr/local/bin", "usr/bin"):  # in the order in which they stand on the PATH
        found = [path.name for path in (tree / folder).glob("python3.*") if path.suffix[1:].isdecimal()]
        if len(found) > 1:
            raise ConfigError(f"--base {tree}: {folder} must have exactly one Python, and has {found}")
        if found:
            return PurePosixPath("/", folder, found[0])
    raise ConfigError(f"--base {tree}: there is no Python in usr/local/bin or usr/bin")


def _add_made_files(sandbox: ImageSandboxes, task: Task, lines: Sequence[str], work: Path) -> None:
    """Run shell lines in a sandbox of the image in `work`, and add the files that they make to the image.

    Tracked files stay as they are in the base commit. Links and empty folders are not added.
    """
    folder = (work / task.image / task.workdir.lstrip("/")).resolve()
    command = ["set -e", f". /{ENVIRONMENT}/bin/activate", *lines, "git reset --quiet --hard"]
    listing = f"git ls-files -z --others > {_MADE}"
    with boundary(HpcSweError, "run the set-up lines"), sandbox.for_trial(work).open(task) as opened:
        done = opened.run("\n".join([*command, listing]), _SET_UP_S)
        if done.exit_code:
            raise HpcSweError(f"the set-up lines failed: exit code {done.exit_code}: {done.output[-1000:]}")
        for name in opened.read(_MADE).decode().split("\0")[:-1]:
            _add(folder, name, opened)


def _add(folder: Path, name: str, sandbox: Sandbox) -> None:
    """Add a file of the sandbox to a folder of this host. Code of the repository may have chosen the name."""
    above, _, last = name.rpartition("/")
    entry = sandbox.entries(above).get(last)
    if entry is None or entry.kind not in ("file", "executable"):
        return
    path = folder / name
    if not path.parent.resolve().is_relative_to(folder):
        raise HpcSweError(f"the set-up lines made {name!r} outside the repository")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        created = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755)
    except FileExistsError:
        raise HpcSweError(f"the set-up lines made {name!r}, which the base commit has too") from None
    with os.fdopen(created, "wb") as file:
        file.write(sandbox.read(name))
        os.fchmod(file.fileno(), 0o755)


def _copy(tree: Path, to: Path) -> None:
    """Copy a tree by links, where the file system has them."""
    with links.changing():
        try:
            run("cp", "--archive", "--link", str(tree), str(to))
            return
        except HpcSweError:
            remove(to)
    run("cp", "--archive", "--reflink=auto", str(tree), str(to))
