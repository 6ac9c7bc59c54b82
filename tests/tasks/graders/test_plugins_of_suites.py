"""Suites whose settings name plugins that run tests elsewhere, or report more than pytest does."""

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.cheat_task import RIGHT, TASK, WRONG
from tests.kit.toy import Checkout, gold, make_repository, task

WORKERS = """
def pytest_addoption(parser):
    parser.addoption("--numprocesses", type=int)
    parser.addoption("--dist", default="no")
    parser.addoption("--tx", action="append", default=[])


def pytest_configure(config):
    config.option.dist = "load" if config.option.numprocesses else "no"


def pytest_runtestloop(session):
    return True if session.config.option.dist != "no" else None  # workers would run them
"""
REPEATS = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    report = pytest.TestReport(item.nodeid, item.location, {}, "rerun", None, "call")
    item.ihook.pytest_runtest_logreport(report=report)
    yield


def pytest_report_teststatus(report):
    return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None
"""
SETTINGS = {
    "workers": (WORKERS, "[pytest]\naddopts = --numprocesses=2\n"),
    "repeats": (REPEATS, "[pytest]\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "settings"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_repository_that_names_such_a_plugin_can_be_graded(tmp_path, plugin, settings):
    base = make_repository(tmp_path / "calc", {"conftest.py": plugin, "pytest.ini": settings})
    one, sandboxes = task(tmp_path, "pytest", base), Checkout(repository=str(tmp_path / "calc"))
    score = Swebench().grade(one, gold(), sandboxes)
    assert (score.outcome, score.failed) == ("resolved", []), score
    score = Swebench().examine(one, "", sandboxes)
    assert (score.outcome, score.passed) == ("unresolved", one.tests.pass_to_pass), score


@pytest.mark.parametrize(("plugin", "settings"), SETTINGS.values(), ids=SETTINGS.keys())
def test_plain_files_that_name_such_a_plugin_can_be_graded(plugin, settings):
    one = msgspec.structs.replace(TASK, files=TASK.files | {"conftest.py": plugin, "pytest.ini": settings})
    score = Pytest().grade(one, difference("mod.py", WRONG, RIGHT), Process())
    assert (score.outcome, score.failed) == ("resolved", []), score
    score = Pytest().examine(one, "", Process())
    assert (score.outcome, score.passed) == ("unresolved", one.tests.pass_to_pass), score
