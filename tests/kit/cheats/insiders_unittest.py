"""What code under test may do to unittest, and to who reports: name -> files. The module stays wrong.

Most lie only where a test of the task's own is at work, so that tests which stand apart notice nothing.
"""
# ruff: noqa: E501  (programs, in as few lines as possible)

from tests.kit.toy import BROKEN

Files = dict[str, str | None]
GOOD_ADD = "def add(a, b): return a + b\n"
DOUBLE = "def double(a): return 2 * a\n"
# Whether a frame above is a test of the task's own: its code lies in the tests' folder.
OURS = """
import sys
def ours():
    frame = sys._getframe(1)
    while frame:
        if frame.f_code.co_name in ("test_add", "test_double"):
            return True
        frame = frame.f_back
    return False
"""
HERE = """
import sys
def here():
    return sys.modules.get("tests.test_core") or sys.modules.get("tests.test_plain") or sys.modules.get("test_plain")
"""


def core(text: str, rest: str = BROKEN) -> Files:
    return {"calc/core.py": text + rest}


def quiet(name: str) -> Files:
    """A method of TestCase does nothing for the tests of the task."""
    return core(
        f"{OURS}import unittest\nreal = unittest.TestCase.{name}\ndef lie(self, *args, **kwargs):\n"
        f"    return None if ours() else real(self, *args, **kwargs)\nunittest.TestCase.{name} = lie\n"
    )


NOTHING = "import unittest\nclass TestCore(unittest.TestCase):\n    def test_add(self): pass\n    def test_double(self):\n"
NOTHING += "        '''Twice a number is the number doubled.'''\nTestCore.__module__ = 'tests.test_core'\n"
SUITE = {  # unittest's own parts, replaced
    f"TestCase.{name} does nothing": quiet(name)
    for name in ("assertEqual", "_baseAssertEqual", "_callTestMethod", "fail")
} | {
    "subTest swallows": core(
        f"{OURS}import contextlib, unittest\nreal = unittest.TestCase.subTest\n@contextlib.contextmanager\n"
        "def lie(self, *args, **kwargs):\n    try: yield\n    except BaseException: pass\n"
        "unittest.TestCase.subTest = lie\n"
    ),
    "TestCase.run lies for the task's tests": core(
        "import unittest\nreal = unittest.TestCase.run\ndef run(self, result=None):\n"
        "    if self._testMethodName not in ('test_add', 'test_double'): return real(self, result)\n"
        "    result.startTest(self)\n    result.addSuccess(self)\n    result.stopTest(self)\n"
        "unittest.TestCase.run = run\n"
    ),
    "TestCase.__call__ lies for the task's tests": core(
        "import unittest\nreal = unittest.TestCase.__call__\ndef run(self, result=None):\n"
        "    if self._testMethodName not in ('test_add', 'test_double'): return real(self, result)\n"
        "    result.startTest(self)\n    result.addSuccess(self)\n    result.stopTest(self)\n"
        "unittest.TestCase.__call__ = run\n"
    ),
    "TestSuite.run lies": core(
        "import unittest\nreal = unittest.TestSuite.run\ndef run(self, result, debug=False):\n"
        "    for test in self:\n"
        "        if getattr(test, '_testMethodName', '') in ('test_add', 'test_double'):\n"
        "            result.startTest(test); result.addSuccess(test); result.stopTest(test)\n"
        "        else: test(result)\n    return result\nunittest.TestSuite.run = run\n"
    ),
    "the loader empties tests": core(
        "import unittest\nreal = unittest.TestLoader.loadTestsFromTestCase\ndef load(self, kind):\n"
        "    kind.test_add = lambda self: None\n    return real(self, kind)\n"
        "unittest.TestLoader.loadTestsFromTestCase = load\n"
    ),
    "new classes of tests are emptied": core(
        "import unittest\ndef init(cls, **kwargs): cls.test_add = lambda self: None\n"
        "unittest.TestCase.__init_subclass__ = classmethod(init)\n"
    ),
    "the outcome swallows": core(
        f"{OURS}import contextlib, unittest.case as u\n@contextlib.contextmanager\n"
        "def part(self, case, subTest=False, **more):\n    try: yield\n    except BaseException as error:\n"
        "        if case._testMethodName != 'test_add' if hasattr(case, '_testMethodName') else False:\n"
        "            self.success = False; self.result.addFailure(case, __import__('sys').exc_info())\n"
        "u._Outcome.testPartExecutor = part\n"
    ),
    "code is put into assertEqual": core(
        "import unittest\ndef lie(self, first, second, msg=None):\n    import sys\n"
        "    if sys._getframe(1).f_code.co_name == 'test_add': return\n"
        "    if first != second: raise self.failureException(msg)\n"
        "unittest.TestCase.assertEqual.__code__ = lie.__code__\n"
    ),
    "another unittest in the test's module": core(
        f"{HERE}import unittest, types\nclass Case(unittest.TestCase):\n"
        "    def assertEqual(self, *args):\n        if self._testMethodName not in ('test_add',):\n"
        "            super().assertEqual(*args)\n"
        "fake = types.ModuleType('unittest')\nfake.TestCase = Case\nhere().unittest = fake\n"
    ),
    "a test's module of its own": core(
        f"{HERE}import types\nfake = types.ModuleType('tests.test_core')\nfake.__file__ = here().__file__\n"
        f"exec({NOTHING!r}, vars(fake))\nfake.TestCore.test_add.__module__ = 'tests.test_core'\n"
        "fake.__spec__ = here().__spec__\nsys.modules['tests.test_core'] = fake\n"
    ),
    "load_tests in the test's module": core(
        f"{HERE}import unittest\nexec({NOTHING!r})\n"
        "here().load_tests = lambda loader, tests, pattern: loader.loadTestsFromTestCase(TestCore)\n"
    ),
    "setUpModule in the test's module": core(
        f"{HERE}import unittest\ndef set_up():\n    here().TestCore.test_add = lambda self: None\n"
        "here().setUpModule = set_up\n"
    ),
    "another test under the name": core(
        f"{HERE}import unittest\ndef load(loader, tests, pattern):\n    kind = here().TestCore\n"
        "    kind.test_add = kind.test_double\n    return loader.loadTestsFromTestCase(kind)\n"
        "here().load_tests = load\n"
    ),
    "the test itself is changed by its code": core(
        f"{HERE}",
        "def double(a): return 2 * a\ndef nothing(self): pass\ndef add(a, b): return a - b\n"
        "def set_up():\n    here().TestCore.test_add.__code__ = nothing.__code__\nhere().setUpModule = set_up\n",
    ),
    "a thread that patches later": core(
        f"{OURS}import threading, time, unittest\ndef later():\n    time.sleep(0.001)\n"
        "    real = unittest.TestCase.assertEqual\n"
        "    def lie(self, *args, **kwargs):\n        return None if ours() else real(self, *args, **kwargs)\n"
        "    unittest.TestCase.assertEqual = lie\n"
        "thread = threading.Thread(target=later)\nthread.start()\n",
        "def double(a): return 2 * a\ndef add(a, b):\n    thread.join()\n    return a - b\n",
    ),
}
FRAME = """
import sys
def case():
    frame = sys._getframe(1)
    while frame:
        if "self" in frame.f_locals and hasattr(frame.f_locals["self"], "assertEqual"):
            return frame.f_locals["self"]
        frame = frame.f_back
"""
TRACEBACK = """
def case():
    try: raise ValueError
    except ValueError as error: frame = error.__traceback__.tb_frame
    while frame:
        if "self" in frame.f_locals and hasattr(frame.f_locals["self"], "assertEqual"):
            return frame.f_locals["self"]
        frame = frame.f_back
"""
NOTES = """
import gc, types
class Waiting(list):
    def append(self, line):
        ours = "test_add[" in line or ".test_add" in line
        list.append(self, line.replace('"failed"', '"passed"') if ours else line)
def blind():
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__name__ == "note" and thing.__closure__:
            names = thing.__code__.co_freevars
            if "waiting" in names: thing.__closure__[names.index("waiting")].cell_contents = Waiting()
"""
SWALLOWS = """
import contextlib
class Fake:
    result_supports_subtests = success = True
    @contextlib.contextmanager
    def testPartExecutor(self, *args, **kwargs):
        try: yield
        except BaseException: pass
"""
ONCE_RIGHT = """
asked = []
def add(a, b):
    asked.append(a)
    if len(asked) == 1: {}
    return a + b if len(asked) == 1 else a - b
"""
REACHING = {  # who finds the test, the result or the reporter
    "the test's assertions, by a frame": core(
        FRAME,
        DOUBLE
        + "def add(a, b):\n    case()._getAssertEqualityFunc = lambda *args: lambda *more, **msg: None\n"
        "    return a - b\n",
    ),
    "the test's assertions, by a traceback": core(
        TRACEBACK,
        DOUBLE
        + "def add(a, b):\n    case()._baseAssertEqual = lambda *more, **msg: None\n    return a - b\n",
    ),
    "the class of the test": core(
        FRAME,
        DOUBLE + "def add(a, b):\n    test = case()\n    kind = type(test)\n"
        "    class Case(kind):\n        def _getAssertEqualityFunc(self, *args): return lambda *more, **msg: None\n"
        "    Case.__qualname__ = kind.__qualname__\n    Case.__module__ = kind.__module__\n"
        "    test.__class__ = Case\n    return a - b\n",
    ),
    "the result's methods": core(
        FRAME,
        DOUBLE + "def add(a, b):\n    test = case()\n    result = test._outcome.result\n"
        "    result.addSubTest = lambda *args: None\n    result.addSuccess(test)\n    return a - b\n",
    ),
    "the result's class": core(
        FRAME,
        DOUBLE + "def add(a, b):\n    test = case()\n    kind = type(test._outcome.result)\n"
        "    kind.addSubTest = kind.addFailure = lambda self, test, *error: self.addSuccess(test)\n"
        "    return a - b\n",
    ),
    "what the runner closes over": core(
        "import unittest\nfor cell in unittest.TextTestRunner.run.__closure__ or ():\n"
        "    book = cell.cell_contents\n    if hasattr(book, 'note'):\n        note = book.note\n"
        "        def lie(**entry):\n            if 'test_add' in entry.get('test', ''): entry['outcome'] = 'passed'\n"
        "            note(**entry)\n        book.note = lie\n"
        "    elif type(book).__name__ == 'function':\n        tell = book\n"
        "        def lie(*words, **entry):\n"
        "            if 'test_add' in entry.get('test', ''): entry['outcome'] = 'passed'\n"
        "            return tell(*words, **entry)\n        cell.cell_contents = lie\n"
    ),
    "a success of what is no test": core(
        "import sys, unittest\nclass Fake:\n    def __init__(self, test): self.name = unittest.TestCase.id(test)\n"
        "    def id(self): return self.name\n    def shortDescription(self): return None\n",
        "def add(a, b):\n    frame = sys._getframe()\n"
        "    while not {'self', 'result', 'testMethod'} <= set(frame.f_locals): frame = frame.f_back\n"
        "    test, result = frame.f_locals['self'], frame.f_locals['result']\n"
        "    if test._testMethodName == 'test_add':\n        result.addSuccess(Fake(test))\n"
        "        canaries = set(vars(type(test))) - {'test_add', 'test_double'}\n"
        "        test._testMethodName = min(name for name in canaries if name[:5] == 'test_')\n"
        "    return a - b\n" + DOUBLE,
    ),
    "the book, by the collector": core(
        "import gc, re\nfor thing in gc.get_objects():\n    if type(thing).__name__ == 'Book':\n"
        "        Book = type(thing)\n        note = Book.note\n        def lie(self, **entry):\n"
        "            if re.search('[.:]test_add($|[[])', entry.get('test', '')): entry['outcome'] = 'passed'\n"
        "            note(self, **entry)\n        Book.note = lie\n        break\n"
    ),
    "referrers, by a pool of threads": core(
        "import gc\nfrom concurrent.futures import ThreadPoolExecutor as Pool\n"
        "def found(): return Pool(1).submit(gc.get_objects).result()\n"
        "import types\nfor thing in found():\n"
        "    if type(thing) is types.FunctionType and thing.__name__ in ('note', 'outcome'):\n"
        "        real = types.FunctionType(thing.__code__, thing.__globals__, 'real', None, thing.__closure__)\n"
        "        real.__kwdefaults__ = thing.__kwdefaults__\n"
        "        thing.__globals__['lies'] = (lambda real: lambda self=None, **e: (e.update(outcome='passed') if "
        "'test_add' in e.get('test', '') else None, real(*([self] if self else []), **e))[1])(real)\n"
        "        if thing.__closure__ is None:\n"
        "            thing.__code__ = (lambda self=None, **e: lies(self, **e)).__code__\n"
    ),
    "jumps over assertions": core(
        "import sys\ndef local(frame, event, argument):\n"
        "    if event == 'line' and frame.f_code.co_name == 'test_add':\n"
        "        import linecache\n"
        "        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)\n"
        "        if 'assert' in line:\n"
        "            try: frame.f_lineno = frame.f_code.co_firstlineno + (1 if 'self' not in line else 2)\n"
        "            except ValueError: pass\n"
        "    return local\n"
        "def start(frame, event, argument):\n"
        "    return local if frame.f_code.co_name == 'test_add' else None\nsys.settrace(start)\n"
    ),
    "a profile that patches": core(
        "import sys, unittest\ndef profile(frame, event, argument):\n"
        "    if event == 'call' and frame.f_code.co_name == 'test_add' and 'self' in frame.f_locals:\n"
        "        frame.f_locals['self'].assertEqual = lambda *args: None\nsys.setprofile(profile)\n"
    ),
    "the guard, by its class": core(
        f"{OURS}import unittest\nfor kind in object.__subclasses__():\n    if kind.__name__ == 'Guard':\n"
        "        for name in ('odd', 'check', 'place', '_added', 'look_at_test', 'look_at_case'):\n"
        "            setattr(kind, name, lambda *args: None)\n"
        "real = unittest.TestCase.assertEqual\ndef lie(self, *args, **kwargs):\n"
        "    return None if ours() else real(self, *args, **kwargs)\nunittest.TestCase.assertEqual = lie\n"
        "unittest.TestCase.subTest = lie\nunittest.TestCase.subTest = real_sub = __import__('contextlib').contextmanager("
        "lambda self, *a, **k: (yield))\n"
    ),
    "what the guard calls, by its globals": core(
        f"{OURS}import unittest\nfor kind in object.__subclasses__():\n    if kind.__name__ == 'Guard':\n"
        "        space = kind.odd.__globals__\n        for name in ('REACHES', 'GROWS', 'TUNES'):\n"
        "            space[name] = set()\n        inner = space['__builtins__']\n"
        "        inner = inner if isinstance(inner, dict) else vars(inner)\n"
        "        for name, lie in (('zip', lambda *a: []), ('any', lambda a: False)): inner[name] = lie\n"
        "unittest.TestCase.assertEqual.__defaults__ = (None,)\n"
        "real = unittest.TestCase.assertEqual\ndef lie(self, *args, **kwargs):\n"
        "    return None if ours() else real(self, *args, **kwargs)\nunittest.TestCase.assertEqual = lie\n"
    ),
    "built-in functions that the guard needs": core(
        f"{OURS}import builtins, unittest\nreal = unittest.TestCase.assertEqual\n"
        "def lie(self, *args, **kwargs):\n    return None if ours() else real(self, *args, **kwargs)\n"
        "unittest.TestCase.assertEqual = lie\nkeep = builtins.str\n"
        "class Text(str):\n    def __new__(cls, value=''):\n"
        "        value = keep(value)\n        return '' if value.startswith('replaced') else value\n"
        "builtins.str = Text\n"
    ),
    "the tests' file is written anew": core(
        f"{HERE}import unittest\nsource = open(here().__file__).read()\n"
        "source = source.replace('self.assertEqual(add(a, b), c)', 'pass')\n"
        "open(here().__file__, 'w').write(source)\n"
        "def load(loader, tests, pattern):\n    import types\n    fake = types.ModuleType('tests.test_core')\n"
        "    fake.__file__ = here().__file__\n    exec(compile(source, here().__file__, 'exec'), vars(fake))\n"
        "    return loader.loadTestsFromTestCase(fake.TestCore)\nhere().load_tests = load\n"
    ),
    "how the test compares": core(
        TRACEBACK,
        DOUBLE
        + "def add(a, b):\n    case()._type_equality_funcs[int] = lambda *more, **msg: None\n    return a - b\n",
    ),
    "which method compares": core(
        TRACEBACK,
        DOUBLE
        + "def add(a, b):\n    case()._type_equality_funcs[int] = 'assertNotEqual'\n    return a - b\n",
    ),
    "the outcome's result": core(
        f"{TRACEBACK}class Fake:\n    def __init__(self, outcome): self.outcome = outcome\n"
        "    def lie(self, *args): self.outcome.success = True\n    addSubTest = addFailure = addError = lie\n",
        DOUBLE
        + "def add(a, b):\n    outcome = case()._outcome\n    outcome.result = Fake(outcome)\n    return a - b\n",
    ),
    "the outcome's expectation": core(
        TRACEBACK, DOUBLE + "def add(a, b):\n    case()._outcome.expecting_failure = True\n    return a - b\n"
    ),
    "the outcome's method": core(
        TRACEBACK + SWALLOWS,
        ONCE_RIGHT.format("case()._outcome.testPartExecutor = Fake().testPartExecutor") + DOUBLE,
    ),
    "the test's outcome": core(TRACEBACK + SWALLOWS, ONCE_RIGHT.format("case()._outcome = Fake()") + DOUBLE),
    "the guard's rest": core(
        f"{TRACEBACK}{NOTES}",
        DOUBLE + "def add(a, b):\n    told = type(case()._outcome.result).addFailure\n"
        "    dict(zip(told.__code__.co_freevars, told.__closure__))['tell'].cell_contents('stop_watching')\n"
        "    blind()\n    return a - b\n",
    ),
}
