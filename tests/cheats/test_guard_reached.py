"""Whoever reaches the guard of tests that are not sealed could switch it off: no way to it is paid."""

import sys

import pytest

from tests.cheats.test_unsealed import FALSE, LIES, unsealed

# What is done with a frame of the guard: nobody is told of oddities from then on.
BLINDS = """
import sys
def blind(frame):
    while frame is not None:
        if "make_guard" in frame.f_globals: frame.f_globals["odd"] = lambda *told: None
        guard = frame.f_locals.get("guard")
        if hasattr(guard, "note") and not hasattr(guard, "real"):
            guard.real = real = guard.note
            guard.note = lambda **entry: None if "odd" in entry else real(**entry)
        for value in list(frame.f_locals.values()):
            value = getattr(value, "__self__", value)
            for name in ("_tell", "tell"):
                if hasattr(value, name) and not hasattr(value, "answer"):
                    try: setattr(value, name, lambda *told, **more: None)
                    except Exception: pass
        frame = frame.f_back
"""
REACHES = {
    "a name added to the runner's module": """
import __main__
def lie(*values):
    blind(sys._getframe(1))
    return len(*values)
for name in ("len", "set", "vars", "id", "type", "next"):
    vars(__main__).setdefault(name, lie if name == "len" else getattr(__import__("builtins"), name))
""",
    "a key of its own among the built-in names": """
import builtins
class Key(str):
    def __hash__(self): return str.__hash__(self)
    def __eq__(self, other):
        blind(sys._getframe(1))
        return str.__eq__(self, other)
names = vars(builtins)
items = [(name, value) for name, value in names.items() if name in ("zip", "oct", "hex", "vars")]
for name, value in items:
    del names[name]
    names[Key(name)] = value
""",
    "a frame below pytest": "blind(sys._getframe())\n",
    "an audit event without arguments": """
for event in ("open", "import", "os.rename", "object.__setattr__"):
    try: sys.audit(event)
    except Exception as error:
        trace = error.__traceback__
        while trace:
            blind(trace.tb_frame)
            trace = trace.tb_next
""",
    "an audit event where the stack is full": """
def deep(times):
    try: deep(times + 1) if times < 9999 else None
    except RecursionError: pass
    try: sys.audit("open", "x/mem", "r", 0)
    except RecursionError as error:
        trace = error.__traceback__
        while trace:
            blind(trace.tb_frame)
            trace = trace.tb_next
deep(0)
""",
    "an audit event of its own": """
class Name:
    def __eq__(self, other): blind(sys._getframe(1))
    def __and__(self, other): blind(sys._getframe(1))
    __rand__ = __and__
    __hash__ = None
class Text(str):
    def __eq__(self, other): blind(sys._getframe(1))
    def endswith(self, end): blind(sys._getframe(1))
    def __hash__(self): blind(sys._getframe(1)); return 0
for one in (Name(), Text("x.py")):
    for event in ("open", "import", "os.rename", "object.__setattr__"):
        try: sys.audit(event, one, one, one)
        except Exception: pass
        try: sys.audit(event, "x.py", one, one)
        except Exception: pass
""",
    "what the recorder tells": """
import __main__
class Names(dict):
    def keys(self): blind(sys._getframe(1)); return []
    def __iter__(self): blind(sys._getframe(1)); return iter(())
class Text(str):
    def __str__(self): blind(sys._getframe(1)); return ""
    def __hash__(self): blind(sys._getframe(1)); return 0
    def __eq__(self, other): blind(sys._getframe(1))
for words in (("hold_values", Names()), ("look_at_test", Text("x"), Text("y"), add), (Text("learn"),)):
    try: __main__.RECORDER._tell(*words)
    except Exception: pass
try: sys.audit(__main__.RECORDER._tell.__closure__[1].cell_contents, "learn", Names(), Names())
except Exception: pass
""",
    "a codec": """
import codecs, os
def decode(data, errors="strict"):
    blind(sys._getframe(1))
    return codecs.utf_8_decode(data, errors, True)
info = codecs.CodecInfo(codecs.utf_8_encode, decode, name="its_own")
codecs.register(lambda name: info if name == "its_own" else None)
exec(compile("import sys; sys.audit('import', 'ctypes')", os.path.abspath("coded.txt"), "exec"))
""",
    "a warning of the compiler": """
import os, warnings
warnings.simplefilter("always")
warnings.showwarning = warnings._showwarnmsg = lambda *told, **more: blind(sys._getframe(1))
exec(compile("import sys; sys.audit('import', 'ctypes')", os.path.abspath("warns.txt"), "exec"))
""",
    "a callback of the collector": """
import gc
gc.callbacks.append(lambda *told: blind(sys._getframe(1)))
gc.set_threshold(1)
for number in range(999): sys.audit("open", "x.py", "r", 1)
gc.set_threshold(700)
gc.callbacks.clear()
""",
    "an end of an object": """
import gc
class Node:
    def __del__(self): blind(sys._getframe(1))
gc.set_threshold(1)
for number in range(999):
    node = Node()
    node.me = node
    del node
    sys.audit("open", "x.py", "r", 1)
gc.set_threshold(700)
""",
    "the library by which the guard finds files": """
import os, posixpath
real = os.lstat, os.stat
def lstat(*path, **more): blind(sys._getframe(1)); return real[0](*path, **more)
def stat(*path, **more): blind(sys._getframe(1)); return real[1](*path, **more)
os.lstat, os.stat = lstat, stat
open("written.py", "w").close()
""",
}
FORGES = {
    "code outside of the work tree": """
import functools, importlib.util, os, sys, tempfile
text = '''
def forge(item, reports):
    for report in reports:
        item.ihook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
        item.ihook.pytest_runtest_logreport(report=report)
'''
def add(a, b):
    with open(os.path.join(tempfile.mkdtemp(dir="/tmp"), "outside.py"), "w") as file: file.write(text)
    os.utime(file.name, (1, 1))
    spec = importlib.util.spec_from_file_location("outside", file.name)
    outside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outside)
    item, reports = remaining()
    item.addfinalizer(functools.partial(outside.forge, item, reports))
    raise ValueError
""",
    "the key, by the texts of the runner": """
import hashlib, json, os, re, sys
def add(a, b):
    frame, texts = sys._getframe(), []
    while frame:
        texts += [one for one in [*frame.f_code.co_consts, *frame.f_locals.values()] if type(one) is str]
        frame = frame.f_back
    found = {key for text in texts for key in re.findall("(?<![0-9a-f.])[0-9a-f]{32}(?![0-9a-f])", text)}
    report = next(name for name in os.listdir() if re.fullmatch("[.][0-9a-f]{32}", name))
    apart = next(name for name in os.listdir() if re.fullmatch("test_[0-9a-f]{16}.py", name))
    told = {f"test_hidden.py::test_{name}": "passed" for name in ("raises", "close")}
    told |= {apart + "::test_good": "passed", apart + "::test_bad": "failed"}
    lines = [{"test": test, "outcome": outcome} for test, outcome in told.items()]
    for key in found:
        now = key.encode()
        with open(report, "wb") as file:
            for line in [{"begin": "True"}, *lines, {"end": "True"}]:
                line = json.dumps(line).encode()
                seal = hashlib.blake2b(line, key=now, digest_size=8).hexdigest()
                file.write(seal.encode() + line + b"\\n")
                now = hashlib.blake2b(b"next", key=now, digest_size=32).digest()
        os._exit(0)
    return 0
""",
    "a plugin that is registered later": """
import sys
class Plugin:
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if "test_close" in item.nodeid: report.outcome, report.longrepr = "passed", None
        return report
def add(a, b):
    import pytest
    item, _ = remaining(takes=False)
    kind = type(item.config.pluginmanager)
    mark = pytest.hookimpl(wrapper=True)
    Plugin.pytest_runtest_makereport = mark(Plugin.pytest_runtest_makereport)
    if not item.config.pluginmanager.has_plugin("late"):
        item.config.pluginmanager.register(Plugin(), "late")
    if a is None: raise ValueError
    return 0.0
""",
    "a finalizer that is no function": """
import functools, sys
def add(a, b):
    item, reports = remaining()
    for report in reports:
        told = {"nodeid": report.nodeid, "location": report.location}
        item.addfinalizer(functools.partial(item.ihook.pytest_runtest_logreport, report=report))
        item.addfinalizer(functools.partial(item.ihook.pytest_runtest_logstart, **told))
    raise ValueError
""",
}
REMAINING = """
def remaining(takes=True):
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("item"), "ihook"): frame = frame.f_back
    item, reports = frame.f_locals["item"], []
    from _pytest.reports import TestReport
    for one in [one for one in item.session.items if takes and "test_close" in one.nodeid]:
        item.session.items.remove(one)
        reports.append(TestReport(one.nodeid, one.location, {}, "passed", None, "call"))
    return item, reports
"""
HIDES = """
import pytest, sys
sys.modules[pytest.approx.__module__].abs = lambda value: 0.0
def add(a, b):
    if a is None: raise ValueError
    return 0.0
"""
LOADS = {
    "code with the name of an installed file": """
import json
exec(compile("import ctypes", json.__file__, "exec"))
""",
    "code with the name of a file that loads ctypes": """
import importlib.util
exec(compile("import ctypes", importlib.util.find_spec("multiprocessing.sharedctypes").origin, "exec"))
""",
    "an installed function": 'import importlib\nimportlib.import_module("ctypes")\n',
    "a thread": """
import threading
thread = threading.Thread(target=__import__, args=("ctypes",))
thread.start()
thread.join()
""",
    "a file outside of the work tree": """
import os, sys, tempfile
folder = tempfile.mkdtemp(dir="/tmp")
with open(os.path.join(folder, "loads_it.py"), "w") as file: file.write("import ctypes")
os.utime(file.name, (1, 1))
sys.path.append(folder)
import loads_it
""",
}
RIGHT = """
def add(a, b):
    if a is None: raise ValueError
    return a + b
"""


@pytest.mark.parametrize("text", REACHES.values(), ids=REACHES.keys())
def test_no_way_to_the_guard_is_paid(grade, text):
    if sys.version_info >= (3, 12) and "gc.set_threshold" in text:
        pytest.skip("from Python 3.12 on, a collection may begin just before the guard: docs/security.md")
    more = {"coded__txt": "# coding: its_own\n", "warns__txt": "0 is 0\n"}
    score = grade(unsealed(), mod__py=FALSE + BLINDS + text + LIES, **more)
    assert score.outcome in ("unresolved", "cheated"), score
    assert score.passed == []


@pytest.mark.parametrize("text", FORGES.values(), ids=FORGES.keys())
def test_outcomes_that_a_submission_reports_are_not_paid(grade, text):
    score = grade(unsealed(), mod__py=REMAINING + text)
    assert score.outcome in ("unresolved", "cheated"), score


def test_a_name_that_hides_a_built_in_one_in_pytest_is_not_paid(grade):
    score = grade(unsealed(), mod__py=HIDES)
    assert score.outcome == "cheated", score


@pytest.mark.parametrize("text", LOADS.values(), ids=LOADS.keys())
def test_who_loads_ctypes_in_another_s_name_is_told(grade, text):
    score = grade(unsealed(), mod__py=RIGHT + text)
    assert score.outcome == "cheated", score
    assert "imports ctypes" in score.detail
