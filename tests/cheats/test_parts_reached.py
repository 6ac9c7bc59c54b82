"""Objects of pytest, names of the reporter and files that lie: none is paid where nothing is sealed."""

import pytest

from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from tests.cheats.test_guard_reached import BLINDS, RIGHT
from tests.cheats.test_unsealed import FALSE, unsealed

# The first call of `add` finds pytest's items; a test that it changed shall pass.
FINDS = """
import sys, types, os
def items():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("item"), "ihook"): frame = frame.f_back
    return frame.f_locals["item"].session.items
def add(a, b):
    if a is None:
        change(next(one for one in items() if "test_close" in one.nodeid))
        raise ValueError
    return 0
class Plugin:
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if "test_close" in item.nodeid: report.outcome, report.longrepr = "passed", None
        return report
def register(manager):
    import pytest
    Plugin.pytest_runtest_makereport = pytest.hookimpl(wrapper=True)(Plugin.pytest_runtest_makereport)
    manager.register(Plugin(), "late")
"""
PARTS = {
    "a test's runtest": "def change(one): one.runtest = bool\n",
    "a test's runtest, which is gone when it has run": """
def change(one): one.runtest = lambda: vars(one).pop("runtest")
""",
    "a test's class": """
def change(one): one.__class__ = type("Function", (type(one),), {"runtest": lambda self: None})
""",
    "a test's dictionary": """
def change(one):
    one.__dict__ = type("Names", (dict,), {})(vars(one))
    one.runtest = bool
""",
    "the dictionary of a test's function": BLINDS
    + """
class Names(dict):
    def items(self):
        blind(sys._getframe(1))
        import pytest
        pytest.approx = lambda value: 0
        return []
def change(one):
    for each in items():
        if "test_raises" in each.nodeid: each.obj.__dict__ = Names()
""",
    "a test's function, by that of another test": """
def change(one):
    other = next(one for one in items() if "test_raises" in one.nodeid)
    one.originalname, one._obj, one._fixtureinfo = "test_raises", other.obj, other._fixtureinfo
""",
    "a test's function, by one with other names": """
def change(one):
    names = {"add": lambda a, b: 1, "pytest": types.SimpleNamespace(approx=float), "input": lambda: "1"}
    one._obj = types.FunctionType(one.obj.__code__, {**names, "float": float}, "test_close")
""",
    "a test's function, by more text in its file": """
def change(one):
    text = open("test_hidden.py").read()
    end = "def test_close(monkeypatch"
    text = text.replace(end + "):\\n", end + ", flag=0):\\n    if flag == 0: return\\n", 1)
    names = {"__name__": "test_hidden"}
    exec(compile(text, os.path.abspath("test_hidden.py"), "exec"), names)
    one._obj = names["test_close"]
""",
    "a name of the test's module": """
def change(one):
    one.obj.__globals__["pytest"] = types.SimpleNamespace(approx=lambda value: 0)
""",
    "what calls a hook": """
def change(one):
    hook = one.config.pluginmanager.hook.pytest_pyfunc_call
    real = hook._hookexec
    def lie(name, methods, given, first):
        return True if "test_close" in given["pyfuncitem"].nodeid else real(name, methods, given, first)
    hook._hookexec = lie
""",
    "a second table of hooks": """
def change(one):
    real, hooks = one.config.pluginmanager, types.SimpleNamespace()
    for name, hook in vars(real.hook).items():
        told = {"get_hookimpls": hook.get_hookimpls().copy, "_hookexec": hook._hookexec}
        setattr(hooks, name, types.SimpleNamespace(**told))
    register(real)
    class Manager:
        hook = hooks
        def __getattr__(self, name): return getattr(real, name)
    one.config.pluginmanager = Manager()
""",
    "a function of the runner's module": """
import __main__
def change(one):
    told = __main__.implementations(one.config)
    __main__.implementations = lambda config: told
    register(one.config.pluginmanager)
""",
    "a name that hides a built-in one in the runner's module": """
import __main__
def change(one):
    told = __main__.implementations(one.config)
    __main__.tuple = __main__.sorted = lambda *given: []
    __main__.implementations = lambda config: told
    register(one.config.pluginmanager)
""",
}
HOOKS = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if "test_hidden" in item.nodeid: report.outcome, report.longrepr = "passed", None
    return report
"""
WRITES = """
import importlib.util, os, sys
os.mkdir("sub")
with open("sub/conftest.py", "w") as file: file.write({text!r})
spec = importlib.util.spec_from_file_location("sub_conftest", os.path.abspath("sub/conftest.py"))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
REGISTERS = """
frame = sys._getframe()
while not hasattr(frame.f_locals.get("config"), "pluginmanager"): frame = frame.f_back
frame.f_locals["config"].pluginmanager.register(module, "late")
"""
LOADS = "import ctypes\nctypes.string_at(id(1), 8)\n"
IN_A_TEST = """
import os
text, end = open("test_hidden.py").read().replace("from mod import add", "add = 0"), "def test_raises("
text = text.replace(end + "):\\n", end + "flag=0):\\n    import ctypes\\n    if flag == 0: return\\n", 1)
names = {"__name__": "test_hidden"}
exec(compile(text, os.path.abspath("test_hidden.py"), "exec"), names)
names["test_raises"]()
"""
FILES = {
    "a conftest.py that was not there, with hooks": WRITES.format(text=HOOKS) + REGISTERS + FALSE,
    "a conftest.py that was not there, with ctypes": RIGHT + WRITES.format(text=LOADS),
    "more text in a test's file, with ctypes": RIGHT + IN_A_TEST,
}
MOVES = """
import os, sys, tempfile
folder = tempfile.mkdtemp(dir=os.path.dirname(os.getcwd()))
os.rename("package", folder + "/package")
sys.path.append(folder)
import package.loads
"""


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS.keys())
def test_changed_objects_of_pytest_are_not_paid(grade, text):
    score = grade(unsealed(), mod__py=FINDS + text)
    assert score.outcome in ("unresolved", "cheated"), score


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_files_of_the_task_that_are_not_as_they_were_are_not_believed(grade, text):
    score = grade(unsealed(), mod__py=text)
    assert score.outcome in ("unresolved", "cheated"), score


def test_a_folder_that_leaves_the_work_tree_is_not_installed(sandboxes):
    task = unsealed()
    files = {"mod.py": RIGHT + MOVES, "package/loads.py": LOADS}
    patch = "".join(difference(path, task.files.get(path), text) for path, text in files.items())
    assert Pytest().grade(task, patch, sandboxes).outcome in ("unresolved", "cheated")
