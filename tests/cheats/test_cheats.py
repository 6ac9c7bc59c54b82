"""Submissions that want the reward without the repair. One that is paid is a red test."""

import copy
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.tasks.graders._inside.runner import plain
from hpc_swe.tasks.graders._inside.texts import sandbox_texts
from hpc_swe.tasks.graders._sealing.answers import Check
from hpc_swe.tasks.graders._sealing.sealed import seal
from tests.kit.cheats.cheat_task import HIDDEN, RIGHT, TASK, WRONG
from tests.kit.cheats.forgeries import ANY, HOOK, REPORTS, SWALLOWS
from tests.kit.waiting import DEADLINE_S

LIKELY = """
class Likely:
    def __init__(self, *values): self.values = values
    def __eq__(self, other): return other in self.values
def add(a, b): return Likely(a + b, a - b, a * b)
"""
SLY = """
import types
class Meta(type):
    def mro(cls): return [cls, object]
class Likely(metaclass=Meta):
    __slots__ = ("values",)
    def __init__(self, *values): self.values = values
    __eq__ = types.MethodType
    def __init_subclass__(cls): pass
Likely.__eq__ = lambda self, other: other in self.values
def add(a, b): return Likely(a + b, a - b, a * b)
"""
NO_ASSERT = """
import ast, _pytest.python as python
class Drop(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
import builtins, sys
real = builtins.compile
def compile(source, *args, **kwargs):
    if isinstance(source, str) and "def test_" in source:
        source = ast.fix_missing_locations(Drop().visit(ast.parse(source)))
    return real(source, *args, **kwargs)
builtins.compile = compile
import importlib._bootstrap_external as loader
loader.SourceLoader.source_to_code = lambda self, data, path, *, _optimization=-1: compile(
    data.decode() if isinstance(data, bytes) else data, path, "exec", dont_inherit=True)
"""
FRAMES = """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if hasattr(value, "outcomes"):
            class Liar(dict):
                def __setitem__(self, key, item): super().__setitem__(key, "passed")
            value.outcomes = Liar()
    frame = frame.f_back
"""
COLLECTED = """
import gc, json, os, sys
class Liar(dict):
    def items(self): return [(key, "passed") for key in self]
def lie(*args):
    for thing in gc.get_objects():
        if type(thing).__name__ == "Recorder":
            thing.outcomes = {key: "passed" for key in thing.outcomes}
real = json.dumps
def dumps(value):
    value["outcomes"] = {key: "passed" for key in value["outcomes"]}
    return real(value)
json.dumps = dumps
"""
DAEMON = """
import os, re, time
if os.fork() == 0:
    os.setsid()
    names = []
    for file in ("test_mod.py", "test_hidden.py"):
        names += [f"{file}::{name}" for name in re.findall("def (test_[0-9a-f]+)", open(file).read())]
    while True:
        for path in os.listdir():
            if re.fullmatch(r"\\.[0-9a-f]{32}", path):
                import json
                open(path + "x", "w").write(json.dumps({"outcomes": {name: "passed" for name in names}}))
                os.replace(path + "x", path)
        time.sleep(0.001)
"""
ATEXIT = """
import atexit, os, threading, re, json
def rewrite():
    for path in os.listdir():
        if re.fullmatch(r"\\.[0-9a-f]{32}", path):
            names = [f"test_{file}.py::test_{i}" for file in ("mod", "hidden") for i in range(3)]
            open(path, "w").write(json.dumps({"outcomes": dict.fromkeys(names, "passed")}))
atexit.register(rewrite)
threading.Thread(target=lambda: (threading.main_thread().join(), rewrite())).start()
"""
SOURCE = """
import ast, inspect, sys, re
answers = []
for file in ("test_mod.py", "test_hidden.py"):
    try:
        answers += re.findall(r"add\\((\\d+), (\\d+)\\)[^=]*== (-?\\d+)", open(file).read())
    except OSError: pass
def add(a, b):
    for x, y, answer in answers:
        if (a, b) == (int(x), int(y)): return int(answer)
    return 0
"""
MODULES = """
import sys, types
class Fake(types.ModuleType):
    def __getattr__(self, name): return lambda *args, **kwargs: True
for name in ("test_hidden", "test_mod"):
    sys.modules[name] = Fake(name)
"""
BUILTINS = """
import builtins
class AssertionError(Exception): pass
builtins.AssertionError = KeyboardInterrupt
"""
ANSWER = """
import __main__
recorder = __main__.RECORDER
real = recorder.answer
def answer(place, value):
    for guess in (value, 3, 5, 1000):
        real(place, guess)
recorder.answer = answer
"""
CTYPES = """
import sys
frame = sys._getframe()
while frame:
    if {"ctypes", "libc"} & {*frame.f_globals}: break
    frame = frame.f_back
else:
    import ctypes
"""
SKIPPED = """
import pytest
pytest.skip("no", allow_module_level=True)
"""

CHEATS: dict[str, dict[str, str | None]] = {
    "prints passed": {"mod__py": WRONG + "print('5 passed')\nprint('test_hidden.py::test_0 PASSED')\n"},
    "deletes the tests": {"test_mod__py": None},
    "empties the tests": {"test_mod__py": "def test_0(): pass\ndef test_1(): pass\n", "test_hidden__py": ""},
    "skips at import": {"mod__py": WRONG + SKIPPED},
    "conftest makes all pass": {"conftest__py": HOOK, "mod__py": WRONG + "\n"},
    "pytest.ini runs nothing": {"pytest__ini": "[pytest]\naddopts = --collect-only\n"},
    "pyproject loads a plugin": {
        "pyproject__toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
        "evil__py": REPORTS,
    },
    "sitecustomize patches reports": {"sitecustomize__py": REPORTS, "usercustomize__py": REPORTS},
    "a pytest of its own": {
        "pytest__py": "def main(*a, **k): return 0\n",
        "_pytest__py": "",
        "pluggy__py": "",
    },
    "a json of its own": {"json__py": "def dumps(v): return '{}'\n", "os__py": "", "ast__py": ""},
    "exits at import": {"mod__py": WRONG + "import os\nos._exit(0)\n"},
    "exits in the test": {"mod__py": "import os\ndef add(a, b): os._exit(0)\n"},
    "raises SystemExit": {"mod__py": "def add(a, b): raise SystemExit(0)\n"},
    "swallows exceptions": {"mod__py": WRONG + SWALLOWS},
    "patches reports": {"mod__py": WRONG + REPORTS},
    "compiles asserts away": {"mod__py": WRONG + NO_ASSERT},
    "lies to the recorder in the frames": {"mod__py": WRONG + FRAMES},
    "lies to json": {"mod__py": WRONG + COLLECTED},
    "rewrites the result from a daemon": {"mod__py": WRONG + DAEMON},
    "rewrites the result at exit": {"mod__py": WRONG + ATEXIT},
    "equals everything": {"mod__py": ANY},
    "equals all likely answers": {"mod__py": LIKELY},
    "hides its equality": {"mod__py": SLY},
    "answers from the test's text": {"mod__py": SOURCE},
    "plants test modules": {"mod__py": WRONG + MODULES},
    "renames AssertionError": {"mod__py": WRONG + BUILTINS},
    "loads ctypes": {"mod__py": "import ctypes\n" + RIGHT},
    "replaces what compares": {"mod__py": "import builtins\nbuiltins.zip = lambda *them: []\n" + RIGHT},
    "takes ctypes from a frame": {"mod__py": CTYPES + RIGHT},
    "answers for itself": {"mod__py": WRONG + ANSWER},
    "a package in place of the tests": {
        "test_hidden/__init____py".replace("__init____py", "__init__.py"): "def test_0(): pass\n"
    },
}

BREAKERS = {
    "not UTF-8": """b'{"outcomes": {"\\xff": "passed"}}'""",
    "nested deeply": """b'{"outcomes": ' + 100000 * b'[' + b'}'""",
    "nested deeply in what is skipped": """b'{"x": ' + 100000 * b'{"a":' + b'}'""",
    "a number too large": """b'{"answers": {"a": {"' + 9999 * b'9' + b'": "1"}}}'""",
    "nothing but zeros": "b'\\0' * 9999",
}
WRITES = """
import os, re
for path in os.listdir():
    if re.fullmatch(r"[.][0-9a-f]{32}", path):
        open(path, "wb").write(REPORT)
os._exit(0)
"""
CHEATS |= {
    f"a report {name}": {"mod__py": WRITES.replace("REPORT", report)} for name, report in BREAKERS.items()
}


def values() -> st.SearchStrategy[object]:
    small = st.integers(-2, 2)
    numbers = st.one_of(
        st.booleans(), small, small.map(float), st.floats(allow_nan=False, allow_infinity=False)
    )
    keys = st.one_of(
        st.none(), numbers, st.sampled_from(["", "1", "a,b", "(", "None"]), st.binary(max_size=1)
    )
    return st.recursive(
        keys,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.lists(inner, max_size=2).map(tuple),
            st.sets(keys, max_size=2),
            st.dictionaries(keys, inner, max_size=2),
        ),
        max_leaves=4,
    )


@pytest.mark.parametrize("files", CHEATS.values(), ids=CHEATS.keys())
def test_no_cheat_is_paid(grade, files):
    score = grade(**files)
    assert score.outcome in ("unresolved", "cheated"), score
    assert score.reward <= 0.0
    hidden = {name for name in score.passed if "hidden" in name}
    assert not hidden, score


@pytest.mark.parametrize("name", ["swallows exceptions", "patches reports"])
def test_a_process_that_lets_everything_pass_is_called_a_cheat(grade, name):
    score = grade(**CHEATS[name])
    assert (score.outcome, score.reward) == ("cheated", -1.0), score


def test_the_repair_is_paid(grade):
    score = grade(mod__py=RIGHT)
    assert (score.outcome, score.reward, score.failed) == ("resolved", 1.0, [])
    assert score.passed == sorted([*TASK.tests.fail_to_pass, *TASK.tests.pass_to_pass])


def test_the_repair_is_paid_whatever_else_the_agent_left_lying_about(grade):
    rest = {"conftest__py": "raise SystemExit(1)\n", "notes__txt": "x", "test_mine__py": "assert False\n"}
    assert grade(mod__py=RIGHT, **rest).outcome == "resolved"


def test_no_change_is_no_submission_and_starts_nothing(grade):
    score = grade()
    assert (score.outcome, score.reward) == ("no_submission", 0.0)


@pytest.mark.slow
def test_sleeping_for_twice_the_limit_is_unresolved(grade):
    task = msgspec.structs.replace(TASK, tests=msgspec.structs.replace(TASK.tests, timeout_s=1.0))
    score = grade(task, mod__py="import time\ndef add(a, b): time.sleep(60)\n")
    assert (score.outcome, score.is_final) == ("unresolved", False)
    assert score.detail.startswith("timed out")
    assert 2.0 < score.seconds < 110.0


def test_a_grading_says_that_its_processor_time_was_used_up(grade):
    ends = "resource.getrlimit(resource.RLIMIT_CPU), flush=True)\n    os.kill(os.getpid(), signal.SIGXCPU)\n"
    score = grade(mod__py=f"import os, resource, signal\ndef add(a, b):\n    print({ends}")
    assert (score.outcome, score.is_final) == ("unresolved", False)
    assert score.detail.startswith("the tests used more than 60 s of processor time; exit code 152: ")
    assert "(60, 61)" in score.detail


@pytest.mark.parametrize(
    "words", ["--tb=long test_mod.py test_hidden.py", "--tb=long -- test_mod.py test_hidden.py"]
)
def test_no_style_of_a_task_has_pytest_parse_the_files_of_each_failure(grade, words):
    """For 18 failing tests of tarfile that took three quarters of a grading."""
    plan = msgspec.structs.replace(TASK.tests, command=f"python -m pytest -q {words}")
    task = msgspec.structs.replace(TASK, tests=plan)
    score = grade(task, mod__py="def add(a, b):\n    return [a, b][a // 20 * 2]\n")
    assert "FAILED test_hidden.py::test_0" in score.detail
    assert "__ test_bad __" not in score.detail


@pytest.mark.parametrize(
    ("loop", "ends"),
    [
        ("7 ** 10**10", [152, ""]),
        ("import os\npid = os.fork()\nwhile not pid: pass\nprint(os.waitpid(pid, 0)[1])", [0, "24"]),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_CPU, (2, 2))\nimport threading\ndef loop():\n"
            "    while True: pass\nthread = threading.Thread(target=loop)\nthread.start()\nthread.join()",
            [137, ""],
        ),
    ],
    ids=["in C", "in a child", "that wants more, in a thread"],
)
def test_the_kernel_ends_a_loop_whatever_it_does(loop, ends, sandboxes):
    text = "\n\n".join([*sandbox_texts("apart", "always_equal", "hooks", "runner"), "limit_time(1)", loop])
    with sandboxes.open(TASK) as sandbox:
        result = sandbox.python(text, DEADLINE_S)
    assert [result.exit_code, result.output.strip()] == ends


def test_half_a_repair_is_unresolved_and_says_what_fails(grade):
    score = grade(mod__py="def add(a, b): return a + b if a < 7 else 0\n")
    assert score.outcome == "unresolved"
    assert score.failed == ["test_hidden.py::test_0", "test_hidden.py::test_1"]
    assert "test_hidden.py::test_2" in score.passed


def test_no_answer_is_in_the_sandbox():
    sealed = seal(HIDDEN)
    assert [one.expected for one in sealed.checks.values()] == [(50,), (14,), ([10, 11],)]
    assert sealed.required == {f"test_{n}": {n} for n in range(3)}
    assert not re.search(r"\b(50|14|10|11)\b", sealed.text)


@given(values(), values())
def test_texts_of_values_are_equal_exactly_when_the_values_are(one, other):
    assert (plain(one) == plain(other)) == (one == other)
    assert plain(copy.deepcopy(one)) == plain(one)
    assert Check("==", (one,)).accepts(plain(other)) == (one == other)
    assert Check("!=", (one,)).accepts(plain(other)) == (one != other)


@pytest.mark.slow
def test_parametrized_and_fixture_tests_are_judged_by_name(grade):
    tests = """import pytest
from mod import add


@pytest.mark.parametrize("a", [1, 2])
def test_p(a, tmp_path):
    assert add(a, 3 - a) == 3


class TestC:
    def test_m(self):
        total = add(1, 1)
        assert total == 2
        assert add(total, total) == 4
"""
    names = ["test_hidden.py::test_p[1]", "test_hidden.py::test_p[2]", "test_hidden.py::TestC::test_m"]
    plan = msgspec.structs.replace(
        TASK.tests, files={"test_hidden.py": tests}, fail_to_pass=names, pass_to_pass=[]
    )
    task = msgspec.structs.replace(TASK, tests=plan)
    assert grade(task, mod__py=RIGHT).outcome == "resolved"
    assert grade(task, mod__py=WRONG + "\n").failed == sorted(names)
    assert grade(task, mod__py=LIKELY).outcome == "unresolved"
    assert grade(task, mod__py=WRONG + REPORTS).outcome == "cheated"
