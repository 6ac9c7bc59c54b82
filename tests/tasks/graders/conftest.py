"""The toy repository's tasks."""

from pathlib import Path

import pytest

from hpc_swe.base.records import Task
from tests.kit.toy import task


@pytest.fixture(params=["unittest", "pytest"])
def toy_task(request: pytest.FixtureRequest, repository: tuple[Path, str], tmp_path: Path) -> Task:
    return task(tmp_path, request.param, repository[1])
