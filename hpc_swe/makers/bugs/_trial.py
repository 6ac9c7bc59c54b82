"""Run tests in a sandbox and write down how each ended, and which lines of one file it ran.

The program is sent to the sandbox as text, with a call of `main` at its end, so it imports the standard
library and pytest only. Nothing is hostile here: the code under test is the source's own, with one mutation.
"""

import json
import os
import sys
import time
from typing import Any


class TestWatcher:
    """A pytest plugin that notes outcomes, places and traced lines of tests."""

    def __init__(self, wanted: set[str], traced: str) -> None:
        """Watch the tests with these ids, or all of them; trace the lines of one file, or none."""
        self._wanted, self._traced = wanted, traced
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the wanted tests, and note where their functions are."""
        items[:] = [item for item in items if not self._wanted or item.nodeid in self._wanted]
        for item in items:
            function = getattr(item, "function", None)
            name = getattr(function, "__qualname__", "")
            self.tests[item.nodeid] = {"name": name, "outcome": "", "seconds": 0.0, "lines": "0"}

    def pytest_runtest_setup(self, item: Any) -> None:
        """Begin to trace."""
        if not self._traced:
            return
        lines: set[int] = set()

        def in_function(frame: Any, event: str, _: object) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return in_function

        def at_call(frame: Any, event: str, _: object) -> Any:
            if event == "call" and frame.f_code.co_filename == self._traced:
                lines.add(frame.f_lineno)
                return in_function
            return None

        item.traced_lines = lines
        sys.settrace(at_call)

    def pytest_runtest_teardown(self, item: Any) -> None:
        """End the trace; the lines become the bits of a number."""
        sys.settrace(None)
        lines = getattr(item, "traced_lines", ())
        self.tests[item.nodeid]["lines"] = hex(sum(1 << line for line in lines))[2:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note an outcome: a test passed when its call passed and neither setup nor teardown failed."""
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        if report.when == "call" or not report.passed:
            passed = report.outcome == "passed" and test["outcome"] in ("", "passed")
            test["outcome"] = "passed" if passed else report.outcome


def main(out: str, arguments: list[str], wanted: list[str], traced: str) -> None:
    """Run pytest and write its results, with the modules that were loaded, to the file `out`."""
    import pytest

    sys.dont_write_bytecode = True
    root = os.getcwd()  # noqa: PTH109
    sys.path.insert(0, root)
    watcher = TestWatcher(set(wanted), os.path.join(root, traced) if traced else "")  # noqa: PTH118
    began = time.monotonic()
    code = pytest.main(
        [*arguments, "-q", "--tb=no", "--rootdir=.", "-p", "no:cacheprovider"], plugins=[watcher]
    )
    files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    loaded = sorted(os.path.relpath(file, root) for file in files if file.startswith(root + os.sep))
    found = {
        "code": int(code),
        "seconds": time.monotonic() - began,
        "tests": watcher.tests,
        "loaded": loaded,
        "imported": sorted(files - {""}),
        "modules": sorted(name for name in sys.modules if name.isidentifier()),
    }
    with open(out, "w") as file:  # noqa: PTH123
        json.dump(found, file)
    sys.stdout.flush()
    os._exit(0)  # threads that a test left behind must not hold the sandbox
