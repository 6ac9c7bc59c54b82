"""What every test of the real sandbox starts from."""

import msgspec
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.records import Task
from tests.kit.checkout import IMAGES
from tests.kit.images import require_apptainer
from tests.kit.scripted import SMALL


@pytest.fixture(scope="session")
def task() -> Task:
    files = {"mod.py": "x = 1\n", "deep/er/data.txt": "data\n"}
    return msgspec.structs.replace(SMALL, workdir="/testbed/here", files=files)


@pytest.fixture(scope="session")
def apptainer() -> Apptainer:
    require_apptainer()
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
