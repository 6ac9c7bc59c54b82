"""A task that a reward worker can know."""

import pytest

from hpc_swe.base.records import Task, TestPlan


@pytest.fixture(scope="session")
def task() -> Task:
    plan = TestPlan(command="true", fail_to_pass=[], timeout_s=60.0)
    return Task(task_id="t", taskset="tests", prompt="", image="none", workdir="/", tests=plan)
