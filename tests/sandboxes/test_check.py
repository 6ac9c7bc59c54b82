"""A machine that cannot open sandboxes says so in one line, with the remedy."""

import os
from pathlib import Path

import pytest

from hpc_swe.errors import ConfigError, SandboxError
from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.processes import descendants


def test_no_apptainer(tmp_path: Path):
    with pytest.raises(ConfigError, match="no apptainer-9 on PATH: install Apptainer"):
        Apptainer(images=str(tmp_path), executable="apptainer-9").check()


def test_no_image(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no \.sif file in .*build_image\.sh"):
        Apptainer(images=str(tmp_path), executable="true").check()


def test_an_image_that_a_task_names_is_missing(tmp_path: Path, task):
    with (
        pytest.raises(ConfigError, match=r"no python-pytest\.sif in"),
        Apptainer(images=str(tmp_path)).open(task),
    ):
        pass


def test_an_apptainer_that_fails_tells_why(tmp_path: Path, task):
    (tmp_path / "python-pytest.sif").write_text("no image")
    with pytest.raises(ConfigError, match=r"python-pytest\.sif cannot be run here"):
        Apptainer(images=str(tmp_path), executable="false").check()
    broken = Apptainer(images=str(tmp_path), executable="false")
    with pytest.raises(SandboxError, match="did not start"), broken.open(task):
        pass


@pytest.mark.slow
def test_a_good_machine_passes_and_keeps_nothing_running(apptainer: Apptainer):
    before = set(descendants(os.getpid()))
    apptainer.check()
    assert set(descendants(os.getpid())) <= before, "the trial container still runs"


@pytest.mark.slow
def test_a_warm_up_that_fails_is_told(apptainer: Apptainer, task):
    broken = Apptainer(images=apptainer.images, warm_up="import nothing_like_this")
    with pytest.raises(SandboxError, match="No module named 'nothing_like_this'"), broken.open(task):
        pass
