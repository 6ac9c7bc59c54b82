"""A toy repository, its tasks, and where they are graded without any image."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cheats"))  # what is tried there is tried here, quickly

from toy import Checkout, make_repository, task

from hpc_swe.records import Task


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("toy") / "calc"
    return folder, make_repository(folder)


@pytest.fixture
def sandboxes(repository: tuple[Path, str]) -> Checkout:
    return Checkout(repository=str(repository[0]))


@pytest.fixture(params=["unittest", "pytest"])
def toy_task(request: pytest.FixtureRequest, repository: tuple[Path, str], tmp_path: Path) -> Task:
    return task(tmp_path, request.param, repository[1])
