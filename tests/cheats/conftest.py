"""Where cheats are graded."""

from collections.abc import Callable

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.records import Score, Task
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.cheat_task import TASK
from tests.kit.checkout import IMAGES
from tests.kit.images import require_apptainer

Grade = Callable[..., Score]


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.slow)])
def sandboxes(request: pytest.FixtureRequest) -> Sandboxes:
    if request.param == "process":
        return Process()
    require_apptainer()
    return Apptainer(images=str(IMAGES))


@pytest.fixture
def grade(sandboxes: Sandboxes) -> Grade:
    def grade(task: Task = TASK, grader: Pytest | None = None, **files: str | None) -> Score:
        """Score the task with these files changed; double underscores in names are dots."""
        changes = {name.replace("__", "."): text for name, text in files.items()}
        parts = [difference(path, task.files.get(path), text) for path, text in sorted(changes.items())]
        return (grader or Pytest()).grade(task, "".join(parts), sandboxes)

    return grade
