"""The program that runs tests in a sandbox and writes down how they ended.

It is sent there as text, with a call of `main` at its end. What it writes decides nothing by itself:
the grader alone knows which of the names it holds must fail.
"""

import json
import os
import sys

import pytest

Outcomes = dict[str, str]


class Recorder:
    """Pytest plugin: the outcome of every test, failures of its setup and teardown included."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = {}

    def pytest_sessionstart(self) -> None:
        """Only now that pytest is complete may modules of the work directory be found."""
        sys.path.insert(0, os.getcwd())  # noqa: PTH109

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passed when its call passed and nothing around it failed."""
        if report.when == "call" or not report.passed:
            known = self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = report.outcome if known == "passed" else known


def main(result: str, arguments: list[str]) -> None:
    """Run pytest; nothing is written unless it comes to its end."""
    sys.dont_write_bytecode = True
    recorder = Recorder()
    file = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    pytest.main(arguments, plugins=[recorder])
    os.write(file, json.dumps(recorder.outcomes).encode())
    sys.stdout.flush()
    os._exit(0)  # no code of the submission runs from here on
