"""What a wheel brings, installed where there is no checkout."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpc_swe.base.rundir import RunDir
from tests.kit.checkout import ROOT, environment
from tests.kit.constants import NOBODY, empty_model
from tests.kit.runtime import make_environment

pytestmark = pytest.mark.slow
FILLED_BY = ["requirements-cpu.txt", "vllm-name", "requirements-gpu.txt"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of packages with the wheel of this checkout in it."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"  # a build leaves files in its checkout
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", root, source]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True, timeout=300)
    with zipfile.ZipFile(next(root.glob("hpc_swe-*.whl"))) as wheel:
        wheel.extractall(root / "site")
    return root / "site"


def hpc_swe(
    site: Path, folder: Path, *words: str, python: str = sys.executable
) -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    line = [python, "-m", "hpc_swe", *words]
    environ = environment(PYTHONPATH=str(site))
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


def test_no_package_of_the_wheel_has_a_name_of_others(site: Path) -> None:
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"hpc_swe"}


@pytest.mark.parametrize(
    ("folder", "place"), [("configs", "hpc_swe"), ("containers", "hpc_swe"), ("hpc_swe", "")]
)
def test_every_file_of_the_checkout_is_there(site: Path, folder: str, place: str) -> None:
    """Without what setuptools is told by name, a wheel would have the Python alone."""
    names = subprocess.check_output(["git", "ls-files", folder], cwd=ROOT, text=True).split()
    assert len(names) > 5
    assert [name for name in names if not (site / place / name).is_file()] == []


def test_a_run_starts_in_an_empty_folder_with_the_jobs_of_the_wheel(site: Path, tmp_path: Path) -> None:
    model = empty_model(tmp_path / "model")
    words = ["start", "configs/demo.toml", f'model="{model}"', 'sandbox={type="process"}', "--run", "run"]
    done = hpc_swe(site, tmp_path / "empty", "launch", *words, *NOBODY)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "empty/run")
    assert sorted(path.name for path in run.code.iterdir()) == ["code.tar", "hpc_swe", "jobs"]
    environ = environment(PYTHONPATH=str(run.code))
    line = [sys.executable, "-P", "-m", "jobs.run", "--help"]
    told = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert "Keep the processes of one job" in told.stdout, told.stderr


def test_the_demo_names_what_the_packages_of_a_login_node_lack(site: Path, tmp_path: Path) -> None:
    make_environment(tmp_path / "login")
    done = hpc_swe(site, tmp_path / "empty", "demo", python=str(tmp_path / "login/bin/python"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    named = re.findall(rf"{site}[^\s,]+", done.stderr)
    assert [Path(path).name for path in named if Path(path).exists()] == FILLED_BY
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_file_of_ones_own_goes_before_the_one_that_ships(site: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/demo.toml").write_text("bogus = 1\n")
    done = hpc_swe(site, tmp_path, "launch", "start", "configs/demo.toml", "--run", "run", "--dry-run")
    assert "configs/demo.toml: unknown key bogus" in done.stderr
