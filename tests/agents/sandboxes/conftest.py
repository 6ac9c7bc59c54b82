"""What every test of the real sandbox starts from."""

import shutil

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.records import Task, TestPlan
from tests.kit.checkout import IMAGES


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        task_id="t",
        taskset="tests",
        prompt="",
        image="python-pytest",
        workdir="/testbed/here",
        files={"mod.py": "x = 1\n", "deep/er/data.txt": "data\n"},
        tests=TestPlan(command="python -m pytest", fail_to_pass=[], timeout_s=60.0),
    )


@pytest.fixture(scope="session")
def apptainer() -> Apptainer:
    if shutil.which("apptainer") is None:
        pytest.skip("Apptainer is not installed: containers/install_apptainer.sh")
    if not (IMAGES / "python-pytest.sif").exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    return Apptainer(images=str(IMAGES))


@pytest.fixture(scope="session", params=["folder", "sif"])
def images(apptainer: Apptainer, tmp_path_factory: pytest.TempPathFactory, request) -> str:
    """An unpacked image, and one file that a FUSE daemon serves."""
    folder = tmp_path_factory.mktemp("images")
    name = "python-pytest.sif" if request.param == "sif" else "python-pytest"
    if not (IMAGES / name).exists():
        pytest.skip(f"there is no {name} in {IMAGES}")
    (folder / name).symlink_to(IMAGES / name)
    return str(folder)
