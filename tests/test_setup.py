"""containers/setup.sh: which environment it fills, with which Python, and when it changes nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_swe.base.rundir import RunDir
from tests.kit.checkout import ROOT

PYTHON = """#!/bin/sh
echo "$0 $*" >> {log}
case "$*" in
  *version_info*) exit {wrong} ;;
  *base_prefix*) echo {version} ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip" ;;
esac
"""
FILES = ("containers/setup.sh", "containers/requirements-cpu.txt", "containers/requirements-gpu.txt")
FILES += ("containers/vllm-name/pyproject.toml", "pyproject.toml")
VENV = {"cpu": ".venv", "gpu": ".venv-gpu"}


class Clone:
    """A checkout whose Python notes what it is asked for, and installs nothing."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self.python = root / "clone", root / "log", root / "python"
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.have_python()
        tools = root / "bin"  # without uv
        tools.mkdir()
        for name in ("apptainer", "mmdebstrap", "apt-get"):
            (tools / name).write_text("#!/bin/sh\n")
            (tools / name).chmod(0o755)
        self.path = f"{tools}:/usr/bin:/bin"

    def have_python(self, version: str = "3.12", *, wrong: bool = False) -> None:
        self.python.write_text(PYTHON.format(log=self.log, version=version, wrong=int(wrong)))
        self.python.chmod(0o755)

    def setup(self, kind: str) -> "subprocess.CompletedProcess[str]":
        self.log.write_text("")
        environ = {**os.environ, "PATH": self.path, "PYTHON": str(self.python)}
        line = [self.root / "containers/setup.sh", kind]
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)

    def files(self, venv: str) -> dict[str, bytes]:
        found = [path for path in (self.root / venv).rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found}

    def outdate(self, kind: str) -> None:
        with (self.root / f"containers/requirements-{kind}.txt").open("a") as file:
            file.write("another==1\n")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize(("kind", "other"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_one_verb_changes_nothing_in_the_environment_of_the_other(
    clone: Clone, kind: str, other: str
) -> None:
    venv, other_venv = VENV[kind], VENV[other]
    assert clone.setup(other).returncode == 0
    before = clone.files(other_venv)
    assert before
    done = clone.setup(kind)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"setup: ready: type source {venv}/bin/activate\n")
    assert f"{venv}/bin/python -m pip" in clone.log.read_text()
    assert f"requirements-{kind}.txt" in clone.log.read_text()
    assert f"{other_venv}/" not in clone.log.read_text()
    assert clone.files(other_venv) == before
    clone.setup(kind)
    assert "-m pip" not in clone.log.read_text(), "what is there is found, and left alone"


def test_wheels_that_were_brought_need_no_archive_of_packages(clone: Clone, tmp_path: Path) -> None:
    """What root lacks there, the image of the demo alone needs."""
    (tmp_path / "bin/apt-get").write_text("#!/bin/sh\nexit 100\n")
    for tool in {*Path("/usr/bin").iterdir()} - {Path("/usr/bin/mmdebstrap")}:
        if not (tmp_path / "bin" / tool.name).exists():
            (tmp_path / "bin" / tool.name).symlink_to(tool)
    (tmp_path / "bin/mmdebstrap").unlink()
    clone.path = f"{tmp_path}/bin"
    done = clone.setup("gpu")
    assert done.returncode == 0, done.stderr
    assert (clone.root / ".venv-gpu/setup.stamp").exists()


def test_a_python_that_does_not_serve_is_refused(clone: Clone) -> None:
    clone.have_python(wrong=True)
    done = clone.setup("gpu")
    assert done.returncode == 1
    assert "3.11 to 3.13" in done.stderr
    assert str(clone.python) in done.stderr


def test_another_python_than_that_of_the_environment_is_taken(clone: Clone) -> None:
    """Where an index has no wheels for the first one, the user names the next."""
    assert clone.setup("cpu").returncode == 0
    clone.have_python("3.11")
    assert clone.setup("cpu").returncode == 0
    assert "-m venv .venv" in clone.log.read_text()
    assert (clone.root / ".venv/bin/python").read_bytes() == clone.python.read_bytes()
    assert clone.setup("cpu").returncode == 0
    assert "-m venv" not in clone.log.read_text()


def test_a_filling_that_failed_leaves_no_sign_of_a_filled_environment(clone: Clone) -> None:
    assert clone.setup("gpu").returncode == 0
    clone.outdate("gpu")
    pip = clone.root / ".venv-gpu/bin/python"
    pip.write_text('#!/bin/sh\ncase "$*" in *base_prefix*) echo 3.12 ;; *) exit 1 ;; esac\n')
    assert clone.setup("gpu").returncode == 1
    assert not (clone.root / ".venv-gpu/setup.stamp").exists()


def test_an_environment_that_a_run_uses_is_not_changed(clone: Clone, tmp_path: Path) -> None:
    assert clone.setup("gpu").returncode == 0
    run = RunDir(tmp_path / "run")
    run.control.mkdir(parents=True)
    run.config.write_text("{}")
    (clone.root / ".venv-gpu/runs").mkdir()
    (clone.root / ".venv-gpu/runs/demo-1").symlink_to(run.root)
    assert clone.setup("gpu").returncode == 0, "nothing is to be changed"
    clone.outdate("gpu")
    before = clone.files(".venv-gpu")
    done = clone.setup("gpu")
    assert done.returncode == 1
    assert f"launch stop {run.root}" in done.stderr
    assert clone.files(".venv-gpu") == before
    run.finished.touch()
    assert clone.setup("gpu").returncode == 0
