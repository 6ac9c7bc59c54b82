"""Whole runs of the demo's configuration on this machine, made small; empty runs, and the toy repository."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import weights
from hpc_swe.config import config as configuration
from hpc_swe.launch import control, watch
from tests.kit.checkout import ROOT
from tests.kit.toy import Checkout, make_repository
from tests.kit.waiting import until

# The same examples each time, and none is timed: a slow machine finds no fault that a quick one does not.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=UNCHECKED)
settings.load_profile("suite")
# What a shell starts in the background ignores interrupts, and so would all programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Who types a command seldom has it, and where it is set a line that nobody flushes is seen all the same.
os.environ.pop("PYTHONUNBUFFERED", None)
SMALL = [
    "tasks.train=64",
    "tasks.eval=6",
    "eval.every=3",
    "groups.group_size=4",
    "groups.groups_per_step=4",
    "groups.resample=true",  # every batch has signal, or nothing would be shown of its training
    "advantage.scale_by_std=false",
    "batches.overlong=train",
    "rollout.slots=8",
    "lease.ttl_s=8.0",
    "poll_s=0.2",
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of slow tests alone, which may load PyTorch, where no slow test is wanted."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = .*\bslow\b", collection_path.read_text(), re.MULTILINE)) or None


@pytest.fixture(scope="session", autouse=True)
def _leave_no_link(tmp_path_factory):
    """What tests have started keeps no `make setup` from filling their environment."""
    yield
    for link in Path(sys.prefix, "runs").glob("*"):
        if tmp_path_factory.getbasetemp().resolve() in link.resolve().parents:
            link.unlink()


@pytest.fixture(scope="session")
def small_words() -> list[str]:
    """What makes the demo's configuration small."""
    return SMALL


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Starts runs; ends what is left of them at the end of the session."""
    os.umask(0o077)
    os.chdir(ROOT)
    if shutil.which("apptainer") is None or not Path(".cache/images/python-pytest.sif").exists():
        pytest.skip("Apptainer or its task image is missing: run `make image` as root once")
    folder, started = tmp_path_factory.mktemp("runs"), []

    def start(name: str, *words: str, seconds: float = 1500, each=lambda run: None) -> RunDir:
        files = [Path("configs/demo.toml"), *(Path(f"configs/{w}.toml") for w in words if "=" not in w)]
        config = configuration.read(*files, overrides=[*SMALL, *(w for w in words if "=" in w)])
        run = RunDir(folder / name)
        control.start(run, config)
        started.append((run, config))
        watch.watch(run, config, seconds, lambda _: each(run), stop_on="error")
        return run

    yield start
    for run, config in started:
        control.stop(run, config, now=True)


@pytest.fixture(scope="session")
def warm_model(small_run, tmp_path_factory):
    """A model that calls the tools, and repairs at random; made once for all parts of a test run."""
    shared = Path(os.environ.get("HPC_SWE_TEST_SHARED") or tmp_path_factory.mktemp("shared"))
    with (shared / "model.lock").open("w") as lock:
        until(lambda: _is_mine(lock), "another part to have made its model", 1500)
        if not (shared / "model").exists():
            made = _make_warm(small_run, tmp_path_factory.mktemp("cold") / "model")
            shutil.copytree(made, shared / "copy", dirs_exist_ok=True)
            (shared / "copy").rename(shared / "model")
    return shared / "model"


def _is_mine(lock) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_warm(small_run, cold: Path) -> Path:
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", cold, "--seed", "3"], check=True)
    run = small_run("sft", "demo_sft", f"model={cold}")
    version = weights.newest(run)
    assert version is not None
    return run.weight(version)


@pytest.fixture
def tmpfs():
    """Mounts a small file system on a folder, with options such as size=64k; again, it changes them."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> Path:
        folder.mkdir(exist_ok=True)
        words = f"remount,{options}" if folder in mounted else options
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", words, "tmpfs", folder], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"needs the right to mount a small tmpfs: {made.stderr.strip()}")
        mounted.extend([folder] if folder not in mounted else [])
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder without a run."""
    made = RunDir(tmp_path / "run")
    made.make()
    return made


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The toy repository, and its base commit."""
    folder = tmp_path_factory.mktemp("toy") / "calc"
    return folder, make_repository(folder)


@pytest.fixture
def sandboxes(repository: tuple[Path, str]) -> Checkout:
    """Where tasks of the toy repository are graded without an image."""
    return Checkout(repository=str(repository[0]))
