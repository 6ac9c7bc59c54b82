"""Honest test modules of unusual shapes, for a module `MOD` with a function `one`: name -> text.

A grading may hold several of them: `MOD` then stands for a different name in each. Each has a test `test_it`.
"""
# ruff: noqa: E501  (programs, in as few lines as possible)

MODULE = '"""Numbers.\n\n>>> 1 + 1\n2\n"""\n\n\ndef one():\n    return 1\n'
SUITES = {
    "doctest": (
        "import doctest, MOD\ndef test_it():\n    assert doctest.testmod(MOD).failed == 0\n"
        "    runner = doctest.DocTestRunner()\n    for one in doctest.DocTestFinder().find(MOD): runner.run(one)\n"
        "    assert MOD.one() == 1\n"
    ),
    "cProfile": (
        "import cProfile, io, pstats, MOD\ndef test_it():\n    profile = cProfile.Profile()\n"
        "    assert profile.runcall(MOD.one) == 1\n    profile.enable()\n    MOD.one()\n    profile.disable()\n"
        "    assert pstats.Stats(profile, stream=io.StringIO()).total_calls >= 2\n"
    ),
    "settrace": (
        "import sys, MOD\ndef test_it():\n    seen = []\n"
        "    def trace(frame, event, value): seen.append(frame.f_code.co_name)\n    before = sys.gettrace()\n"
        "    sys.settrace(trace)\n    MOD.one()\n    sys.settrace(before)\n    assert 'one' in seen\n"
    ),
    "the collector": (
        "import gc, sys, MOD\nclass Node: pass\ndef test_it():\n    kept = Node()\n    gc.collect()\n"
        "    assert [one for one in gc.get_objects() if type(one) is Node] == [kept]\n"
        "    assert gc.get_referrers(kept) is not None and sys.getrefcount(kept) > 1 and MOD.one() == 1\n"
    ),
    "built-in functions patched for a module": (
        "import builtins, io, MOD\nbefore = {}\n"
        "FAKES = {'open': lambda name: io.StringIO(name), 'input': lambda *a: '1', 'print': lambda *a, **k: None}\n"
        "def setup_module():\n    for name, fake in FAKES.items():\n"
        "        before[name] = getattr(builtins, name)\n        setattr(builtins, name, fake)\n"
        "def teardown_module():\n    for name, real in before.items(): setattr(builtins, name, real)\n"
        "def test_it():\n    assert (open('x').read(), input(), MOD.one()) == ('x', '1', 1)\n"
    ),
    "built-in functions patched for a class": (
        "import unittest\nfrom unittest import mock\nimport MOD\nclass TestIt(unittest.TestCase):\n"
        "    @classmethod\n    def setUpClass(cls):\n        cls.patches = [mock.patch('builtins.print'),"
        " mock.patch('builtins.open', mock.mock_open(read_data='x')), mock.patch('builtins.input')]\n"
        "        cls.shown = [one.start() for one in cls.patches]\n    @classmethod\n    def tearDownClass(cls):\n"
        "        for one in cls.patches: one.stop()\n    def test_it(self):\n        print(1)\n"
        "        self.assertEqual((open('y').read(), MOD.one()), ('x', 1))\n        self.shown[0].assert_called()\n"
    ),
    "tests that a loop makes": (
        "import unittest, MOD\nclass TestIt(unittest.TestCase): pass\ndef make(number):\n"
        "    def check(self): self.assertEqual(MOD.one(), number)\n    return check\n"
        "for name in ('test_it', 'test_again'): setattr(TestIt, name, make(1))\n"
    ),
    "tests that are lambdas and partials": (
        "import functools, MOD\ndef check(number): assert MOD.one() == number\n"
        "test_lambda = lambda: check(1)\ntest_part = functools.partial(check, 1)\n"
        "class Call:\n    def __call__(self): check(1)\ntest_it = lambda: check(1)\n"
    ),
    "tests made of text": (
        "import MOD\nexec('def test_it():\\n    assert MOD.one() == 1\\n')\n"
        "exec('def test_again():\\n    assert MOD.one() == 1\\n')\n"
    ),
    "tests in wrappers without names": (
        "import MOD\ndef twice(function):\n    def run():\n        function()\n        function()\n    return run\n"
        "@twice\ndef test_it(): assert MOD.one() == 1\n"
    ),
    "a raises of its own": (
        "import contextlib, MOD\n@contextlib.contextmanager\ndef raises(kind):\n    try: yield\n"
        "    except kind: return\n    raise AssertionError(kind)\n"
        "def approx(a): return a\ndef test_it():\n    with raises(TypeError): MOD.one(1)\n"
        "    assert MOD.one() == approx(1)\n"
    ),
    "another unittest": (
        "import types, MOD\nimport unittest as real\nunittest = types.SimpleNamespace(TestCase=real.TestCase)\n"
        "class TestIt(unittest.TestCase):\n    def test_it(self): self.assertEqual(MOD.one(), 1)\n"
    ),
    "comparisons of a type": (
        "import unittest, MOD\nclass TestIt(unittest.TestCase):\n    def setUp(self):\n"
        "        self.addTypeEqualityFunc(complex, lambda a, b, msg=None: self.assertEqual(str(a), str(b)))\n"
        "        self.addTypeEqualityFunc(str, 'assertMultiLineEqual')\n    def test_it(self):\n"
        "        self.assertEqual(complex(1), complex(MOD.one()))\n        self.assertEqual('a', 'a')\n"
    ),
    "assertions that a class overrides": (
        "import unittest, MOD\nclass Case(unittest.TestCase):\n    def assertEqual(self, a, b, msg=None):\n"
        "        super().assertEqual(repr(a), repr(b), msg)\n    def run(self, result=None):\n"
        "        return super().run(result)\n    def _quiet(self): pass\nclass TestIt(Case):\n"
        "    def test_it(self): self.assertEqual(MOD.one(), 1)\n"
    ),
    "assertions that an instance hides": (
        "import functools, unittest, MOD\nclass TestIt(unittest.TestCase):\n    def setUp(self):\n"
        "        self.assertEqual = functools.partial(super().assertEqual, msg='differs')\n"
        "    def test_it(self): self.assertEqual(MOD.one(), 1)\n"
    ),
    "a test module with a class of its own": (
        "import sys, types, MOD\nclass Module(types.ModuleType):\n    @property\n    def base(self): return 1\n"
        "sys.modules[__name__].__class__ = Module\n"
        "def test_it(): assert MOD.one() == sys.modules[__name__].base\n"
    ),
    "modules that a test writes": (
        "import importlib, pathlib, sys, MOD\ndef test_it(tmp_path):\n    sys.path.insert(0, str(tmp_path))\n"
        "    for number in (1, 2):\n        (tmp_path / 'MOD_made.py').write_text(f'value = {number}')\n"
        "        pathlib.Path('MOD_here.py').write_text('x = 1')\n        importlib.invalidate_caches()\n"
        "    assert importlib.import_module('MOD_made').value == 2 and MOD.one() == 1\n"
    ),
    "audit hooks and frames of threads": (
        "import sys, threading, MOD\nseen = []\n"
        "def test_it():\n    is_on = [True]\n"
        "    sys.addaudithook(lambda event, values: seen.append(event) if is_on else None)\n"
        "    sys.audit('MOD.event')\n    is_on.clear()\n    assert 'MOD.event' in seen and MOD.one() == 1\n"
        "    assert threading.get_ident() in sys._current_frames()\n"
    ),
    "settings of all test cases": (
        "import unittest, MOD\nunittest.TestCase.maxDiff = None\nunittest.TestCase.longMessage = True\n"
        "unittest.TestCase.assertItemsEqual = unittest.TestCase.assertCountEqual\n"
        "class TestIt(unittest.TestCase):\n    def test_it(self): self.assertItemsEqual([MOD.one()], [1])\n"
    ),
    "asynchronous cases": (
        "import asyncio, unittest, MOD\nclass TestIt(unittest.IsolatedAsyncioTestCase):\n"
        "    async def asyncSetUp(self): await asyncio.sleep(0)\n"
        "    async def test_it(self): self.assertEqual(MOD.one(), 1)\n"
    ),
    "ctypes": (
        "import ctypes, MOD\ndef test_it():\n    text = ctypes.create_string_buffer(b'ab')\n"
        "    assert (ctypes.sizeof(text), ctypes.c_uint8(257).value) == (3, MOD.one())\n"
    ),
    "modules that are loaded anew": (
        "import importlib, sys, MOD\ndef test_it(monkeypatch):\n    changes = monkeypatch\n    assert importlib.reload(MOD).one() == 1\n"
        "    changes.delitem(sys.modules, 'MOD')\n    assert importlib.import_module('MOD') is not MOD\n"
        "    changes.setitem(sys.modules, 'json', None)\n"
    ),
    "code of a function that a test replaces": (
        "import MOD\ndef test_it():\n    before = MOD.one.__code__\n    MOD.one.__code__ = (lambda: 2).__code__\n"
        "    assert MOD.one() == 2\n    MOD.one.__code__ = before\n    assert MOD.one() == 1\n"
    ),
    "parts of pytest that a test replaces": (
        "import pytest, MOD\ndef test_it(monkeypatch, request):\n    with monkeypatch.context() as changes:\n"
        "        changes.setattr(pytest, 'importorskip', lambda name: name)\n"
        "        assert pytest.importorskip('x') == 'x'\n    request.node.user_properties.append(('a', 1))\n"
        "    request.addfinalizer(lambda: None)\n    assert MOD.one() == 1\n"
    ),
    "fixtures, parameters and marks": (
        "import pytest, MOD\npytestmark = pytest.mark.filterwarnings('ignore')\n"
        "@pytest.fixture(params=[1, 2], ids=['a b', '[x]'])\ndef number(request): return request.param\n"
        "@pytest.fixture(autouse=True, scope='module')\ndef around(): yield\n"
        "@pytest.mark.parametrize('text', ['', 'a::b', 'c d'])\ndef test_each(text, number): assert MOD.one() == 1\n"
        "def test_it(request, capsys, recwarn):\n    print('x')\n    assert capsys.readouterr().out == 'x\\n'\n"
        "    assert request.getfixturevalue('tmp_path').exists() and MOD.one() == 1\n"
    ),
}
