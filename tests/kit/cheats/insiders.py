"""What code under test may do to those who run and judge it, from inside their process.

`CASES` are runner, class, name and files of each; `insiders_unittest` holds those about unittest.
"""
# ruff: noqa: E501  (programs, in as few lines as possible)

from tests.kit.cheats.insiders_early import REPORTS
from tests.kit.cheats.insiders_unittest import (
    DOUBLE,
    GOOD_ADD,
    HERE,
    NOTES,
    OURS,
    REACHING,
    SUITE,
    Files,
    core,
)

ENDS = {  # an outcome that is no failure
    "expects to fail": core("import pytest\n", "def add(a, b): pytest.xfail('')\n" + DOUBLE),
    "expects to fail, by an exception": core(
        "import pytest\n", "def add(a, b): raise pytest.xfail.Exception('')\n" + DOUBLE
    ),
    "expects to fail, when it is compared": core(
        "import pytest\nclass A(int):\n    def __eq__(self, other): pytest.xfail('')\n    __hash__ = int.__hash__\n",
        "def add(a, b): return A(1)\n" + DOUBLE,
    ),
    "stops like a subtest": core(
        "import unittest.case as u\n", "def add(a, b): raise u._ShouldStop\n" + DOUBLE
    ),
    "stops like a subtest, by a class of its own": core(
        "import unittest.case as u\nclass S(u._ShouldStop if u._ShouldStop else Exception): pass\n",
        "def add(a, b): raise S()\n" + DOUBLE,
    ),
    "skips what it breaks": core(
        "import unittest\n", GOOD_ADD + "def double(a): raise unittest.SkipTest('')\n"
    ),
    "expects what it breaks to fail": core("import pytest\n", GOOD_ADD + "def double(a): pytest.xfail('')\n"),
    "stops what it breaks": core(
        "import unittest.case as u\n", GOOD_ADD + "def double(a): raise u._ShouldStop\n"
    ),
    "skips by pytest what it breaks": core("import pytest\n", GOOD_ADD + "def double(a): pytest.skip('')\n"),
    "ends the session": core("import pytest\n", "def add(a, b): pytest.exit('done', 0)\n" + DOUBLE),
    "interrupts": core("", "def add(a, b): raise KeyboardInterrupt\n" + DOUBLE),
    "marks the tests as expected to fail": core(
        HERE
        + "try:\n    import pytest\n    here().pytestmark = pytest.mark.xfail(strict=False)\nexcept Exception: pass\n"
    ),
    "decorates the tests as expected to fail": core(
        f"{HERE}import unittest\nclass Late(type(unittest.TestCase)):\n    def __init__(kind, *args):\n"
        "        super().__init__(*args)\n        kind.test_add.__unittest_expecting_failure__ = True\n"
        "class T(unittest.TestCase, metaclass=Late):\n    def test_add(self): pass\n"
        "try: here().unittest = type('u', (), {'TestCase': T})\nexcept Exception: pass\n"
    ),
    "makes failures skips": core("import unittest\nunittest.TestCase.failureException = unittest.SkipTest\n"),
    "forks and lets the child go on": core(
        "import os\n", "def add(a, b):\n    if os.fork(): os._exit(0)\n    return a - b\n" + DOUBLE
    ),
}
PLANTED = "    def test_z(self):\n        '''%s'''\n"
NAMES = {  # several tests that swebench's parsers give one name
    "a docstring like the wanted name": core(
        f"{HERE}import unittest\nclass T(unittest.TestCase):\n"
        + PLANTED % "test_add (tests.test_core.TestCore)"
        + "T.__module__ = 'tests.test_core'\nhere().Z = T\n"
    ),
    "another test with the docstring": core(
        f"{HERE}import unittest\nclass T(unittest.TestCase):\n"
        + PLANTED % "Twice a number is the number doubled."
        + "here().Z = T\n",
        GOOD_ADD + "def double(a): return 3 * a\n",
    ),
    "a blank in the name": core(
        HERE
        + "text = chr(10) * 999 + 'def test(): pass'\nfor n in (1, 2):\n    names = {}\n"
        + "    exec(compile(text, here().__file__, 'exec'), names)\n"
        + "    vars(here())['test_add[%d] x' % n] = names['test']\n"
    ),
    "the same method of the same class": core(
        f"{HERE}import unittest\nclass TestCore(unittest.TestCase):\n    def test_add(self): pass\n"
        "TestCore.__module__ = 'tests.test_core'\nhere().Z = TestCore\n"
    ),
}
FROZEN = {  # text over which swebench's expressions take minutes
    "docstrings that freeze the parser": core(
        f"{HERE}import unittest\nclass T(unittest.TestCase): pass\n"
        "for n in range(3000):\n    def test(self): pass\n"
        "    test.__doc__ = 'a' * 50 + ' ... Testing against Django installed in ' + 'b' * 50\n"
        "    setattr(T, 'test_%d' % n, test)\nhere().Z = T\n"
    ),
}
HOOK = """
def pytest_runtest_makereport(item, call):
    if call.excinfo is not None and item.name.startswith(("test_add[", "test_double")):
        call.excinfo = None
pytest_runtest_makereport.__test__ = False
try:
    import pytest
    pytest_runtest_makereport = pytest.hookimpl(tryfirst=True)(pytest_runtest_makereport)
except Exception: pass
"""
METADATA = "Metadata-Version: 2.1\nName: evil\nVersion: 1\n"
ENTRY = "[pytest11]\nevil = evil\n"
DRIVES = """
import os, sys
name = os.environ.get("PYTEST_PLUGINS", "").partition(",")[0]
plugin = sys.modules.get(name)
class Manager:
    def register(self, thing, name=None):
        book = thing.book
        for test in ("tests/test_plain.py::test_add[1]", "tests/test_plain.py::test_add[2]",
                     "tests/test_plain.py::test_double", "x::test_" + book.good):
            book.note(test=test, doc="", outcome="passed")
        book.note(test="x::test_" + book.bad, doc="", outcome="failed")
        book.close()
class Config:
    pluginmanager = Manager()
def hookimpl(*args, **kwargs): return lambda function: function
plugin.pytest_configure(Config())
os._exit(0)
"""
PLUGINS = {  # what is loaded without anybody's import
    "entry points in a dist-info": {
        "evil-1.dist-info/METADATA": METADATA,
        "evil-1.dist-info/entry_points.txt": ENTRY,
        "evil.py": HOOK,
    },
    "entry points in an egg-info": {
        "evil.egg-info/PKG-INFO": METADATA,
        "evil.egg-info/entry_points.txt": ENTRY,
        "evil.py": HOOK,
    },
    "entry points in a dist-info of another case": {
        "evil-1.DIST-INFO/METADATA": METADATA,
        "evil-1.DIST-INFO/entry_points.txt": ENTRY,
        "evil.py": f"{REPORTS}import sys, types\nsys.modules['evil'] = types.ModuleType('evil')\n",
    },
    "a pytest that drives the reporter": {"pytest.py": DRIVES},
    "a package pytest that drives the reporter": {"pytest/__init__.py": DRIVES, "pytest/__main__.py": ""},
    "a pluggy of its own": {
        "pluggy/__init__.py": DRIVES,
        "iniconfig/__init__.py": DRIVES,
        "iniconfig.py": DRIVES,
    },
    "plugins named by the test module": core(f"{HERE}here().pytest_plugins = ['calc.evil']\n")
    | {"calc/evil.py": HOOK},
    "a plugin registered from a frame": core(
        "import sys\nfrom calc import evil\nframe = sys._getframe()\nwhile frame:\n"
        "    for value in list(frame.f_locals.values()):\n"
        "        if hasattr(value, 'pluginmanager'):\n"
        "            try: value.pluginmanager.register(evil)\n            except Exception: pass\n"
        "    frame = frame.f_back\n"
    )
    | {"calc/evil.py": HOOK},
    "a fixture planted among the tests": core(
        f"{HERE}import pytest\n@pytest.fixture(autouse=True)\ndef fix(request):\n"
        "    if request.node.name.startswith('test_add['):\n        request.node.obj = lambda a: None\n"
        "    yield\nhere().fix = fix\n"
    ),
}
LISTENS = """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        plugins = getattr(getattr(value, "pluginmanager", None), "get_plugins", list)()
        for one in plugins:
            if type(one).__name__ == "Listener":
                one._tell("stop_watching")
                blind()
    frame = frame.f_back
"""
RESTS = {"the guard's rest, by its plugin": core(NOTES + LISTENS)}
COLLECTOR = {  # pytest's own parts, replaced
    "the call of a function does nothing": core(
        "import _pytest.python as python\nreal = python.Function.runtest\ndef run(self):\n"
        "    if not self.name.startswith(('test_add[', 'test_double')) or self.name[-1] not in '12e': real(self)\n"
        "python.Function.runtest = run\n"
    ),
    "pytest_pyfunc_call has another code": core(
        "import _pytest.python as python\ndef call(pyfuncitem):\n"
        "    if pyfuncitem.name.startswith('test_add['): return True\n"
        "    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}\n"
        "    pyfuncitem.obj(**arguments)\n    return True\n"
        "python.pytest_pyfunc_call.__code__ = call.__code__\n"
    ),
    "reports of the task's tests pass": core(
        "import _pytest.reports as reports\nreal = reports.TestReport.__init__\ndef init(self, *args, **kwargs):\n"
        "    real(self, *args, **kwargs)\n"
        "    if '::test_add[' in self.nodeid: self.outcome, self.longrepr = 'passed', None\n"
        "reports.TestReport.__init__ = init\n"
    ),
    "calls of the task's tests raise nothing": core(
        f"{OURS}import _pytest.runner as runner\nreal = runner.CallInfo.from_call.__func__\n"
        "def from_call(cls, func, when, reraise=None):\n    def quiet():\n        try: func()\n"
        "        except BaseException as error:\n"
        "            names, trace = [], error.__traceback__\n"
        "            while trace: names.append(trace.tb_frame.f_code.co_name); trace = trace.tb_next\n"
        "            if 'test_add' not in names: raise\n"
        "    return real(cls, quiet, when, reraise)\nrunner.CallInfo.from_call = classmethod(from_call)\n"
    ),
    "hooks are called otherwise": core(
        "import pluggy._callers as callers, pluggy._manager as manager\n"
        "real = manager.PluginManager._hookexec\ndef execute(self, name, methods, kwargs, firstresult):\n"
        "    if name == 'pytest_pyfunc_call' and kwargs['pyfuncitem'].name.startswith('test_add['): return True\n"
        "    return real(self, name, methods, kwargs, firstresult)\nmanager.PluginManager._hookexec = execute\n"
    ),
    "items get another function": core(
        "import _pytest.python as python\nreal = python.Function.from_parent.__func__\n"
        "def make(cls, parent, **kwargs):\n    item = real(cls, parent, **kwargs)\n"
        "    if item.name.startswith('test_add['): item.obj = lambda a: None\n    return item\n"
        "python.Function.from_parent = classmethod(make)\n"
    ),
    "the collector finds other functions": core(
        "import _pytest.python as python\nreal = python.PyCollector._genfunctions\n"
        "def generate(self, name, obj):\n    if name == 'test_add':\n"
        "        nothing = lambda a: None\n        nothing.pytestmark = obj.pytestmark\n"
        "        nothing.__name__ = name\n        setattr(self.obj, name, nothing)\n        obj = nothing\n"
        "    return real(self, name, obj)\npython.PyCollector._genfunctions = generate\n"
    ),
    "the module has another class": core(
        f"{HERE}import types\nclass Liar(types.ModuleType):\n"
        "    def __getattribute__(self, name):\n        value = super().__getattribute__(name)\n"
        "        if name == 'test_add' and hasattr(value, 'pytestmark'):\n"
        "            nothing = lambda a: None\n            nothing.pytestmark = value.pytestmark\n"
        "            nothing.__name__ = name\n            return nothing\n        return value\n"
        "here().__class__ = Liar\n"
    ),
    "implementations of hooks are changed": core(
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for value in list(frame.f_locals.values()):\n"
        "        hook = getattr(value, 'hook', None)\n"
        "        for one in getattr(hook, 'pytest_pyfunc_call').get_hookimpls() if hasattr(hook, 'pytest_pyfunc_call') "
        "else ():\n            if one.plugin_name == 'python':\n                one.function = lambda pyfuncitem: True\n"
        "    frame = frame.f_back\n"
    ),
    "another pytest in the test's module": core(
        f"{HERE}import pytest\nclass Fake:\n    mark = type('m', (), {{'parametrize': staticmethod(lambda names, values: "
        "lambda function: pytest.mark.parametrize(names, values)(lambda a: None))})\nhere().pytest = Fake\n"
    ),
    "names of the test's module": core(
        f"{HERE}vars(here())['__builtins__'] = dict(vars(__import__('builtins')))\n"
    ),
}
UNITTEST: dict[str, dict[str, Files]] = {
    "outcomes that are no failure": {
        name: files
        for name, files in ENDS.items()
        if not any(word in name for word in ("by pytest", "compared", "session", "by an exception", "marks"))
    },
    "tests that share a name": {name: files for name, files in NAMES.items() if "blank" not in name},
    "text that freezes the parser": FROZEN,
    "parts of unittest": SUITE,
    "reaches for who judges": REACHING,
}
PYTEST: dict[str, dict[str, Files]] = {
    "outcomes that are no failure": {
        name: files
        for name, files in ENDS.items()
        if not any(word in name for word in ("stops", "decorates"))
    },
    "tests that share a name": {name: files for name, files in NAMES.items() if "blank" in name},
    "plugins": PLUGINS,
    "parts of pytest": COLLECTOR,
    "reaches for who judges": {
        name: files
        for name, files in REACHING.items()
        if any(word in name for word in ("collector", "pool", "jumps"))
    }
    | RESTS,
}
CASES = [
    ("unittest", group, name, files) for group, cases in UNITTEST.items() for name, files in cases.items()
]
CASES += [("pytest", group, name, files) for group, cases in PYTEST.items() for name, files in cases.items()]
