"""The debugger, by the policy's calls, in both sandboxes: what programs do to it, and what it shows."""

import sys
import time

import pytest

from hpc_swe.base.loader import load
from tests.kit.checkout import IMAGES
from tests.kit.debugging import CALC, TESTS, made, require, session, task

FILES = {"calc": CALC, "test_calc": TESTS}


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.slow)])
def kind(request) -> str:
    return require(request.param)


@pytest.fixture
def debug(kind: str):
    with session(made(kind), task(**FILES)) as opened:
        yield opened


def run(kind: str, program: str, **fields: object):
    return session(made(kind), task(prog=program), **fields)


def test_a_file_stops_at_its_first_line_and_shows_where(debug):
    said = debug.start("calc.py", runner="python")
    assert said.startswith("Session started: python calc.py")
    assert "calc.py(1)<module>()" in said
    assert '1  -> """Sums of numbers.' in said


def test_breakpoints_stop_and_values_are_shown(debug):
    debug.start("calc.py")
    assert "Breakpoint 1 at calc.py:11" in debug("b calc.py:11")
    said = debug("c")
    assert "calc.py(11)total()" in said
    assert "11 B->         result += value" in said
    assert debug("p value, result") == "(1, 0)"
    assert debug("pp values") == "[1, 2, 3]"
    assert debug("whatis values") == "<class 'list'>"


def test_frames_are_walked(debug):
    debug.start("calc.py")
    debug("tbreak 9")
    assert "calc.py(9)total()" in debug("c")
    assert "values = [1, 2, 3]" in debug("args")
    stack = debug("w")
    assert "<module>()" in stack
    assert "ratio()" in stack
    assert "bdb.py" not in stack
    assert "calc.py(16)ratio()" in debug("u")
    assert debug("p a, b") == "([1, 2, 3], [4])"
    assert "calc.py(9)total()" in debug("d")
    assert "def total(values):" in debug("l 1, 8")
    assert "--Return--" in debug("r")
    said = debug("n")
    if "calc.py(16)ratio()" in said:  # newer versions of Python stop there once more
        said = debug("n")
    assert "calc.py(17)ratio()" in said
    said = debug("s")
    assert "--Call--" in said
    assert "calc.py(7)total()" in said


def test_a_condition_stops_only_where_it_holds(debug):
    debug.start("calc.py")
    assert "calc.py:11, value == 3" in debug("b calc.py:11, value == 3")
    debug("c")
    assert debug("p value") == "3"
    assert "the condition is no expression" in debug("b 12, value ==")
    assert "has ended" in debug("c")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (3, "line 3 is inside a string that begins at line 1; line 9"),
        (6, "line 6 is blank; line 9"),
        (7, "line 7 only defines a function or a class: 'def total(values):'; line 9"),
        (8, "line 8 is a comment; line 9"),
        (99, "the file has 22 lines; no line after it can"),
    ],
)
def test_a_line_that_cannot_hold_a_breakpoint_is_refused(debug, line, reason):
    debug.start("calc.py")
    said = debug(f"b calc.py:{line}")
    assert said == f"*** {reason}" + (" is the next that can" if line < 9 else "")
    assert "Breakpoints" not in said


def test_places_that_are_none_are_refused(debug):
    debug.start("test_calc.py")
    assert "there is no file 'gone.py'" in debug("b gone.py:3")
    assert "is neither LINE, FILE:LINE nor a function" in debug("b nothing")
    assert "line 15 only defines" in debug("b test_calc.py:15")
    assert "there is no breakpoint at calc.py:9" in debug("cl calc.py:9")


def test_breakpoints_are_cleared(debug):
    debug.start("calc.py")
    debug("b 9")
    debug("b 12")
    assert "Deleted breakpoint 1 at calc.py:9" in debug("cl calc.py:9")
    assert "calc.py:12" in debug("b 16")
    assert "All breakpoints are removed" in debug("cl")
    assert "has ended" in debug("c")


def test_breakpoints_stay_when_the_program_is_started_again(debug):
    debug.start("calc.py")
    debug("b calc.py:9")
    debug("b calc.py:16, b == [4]")
    assert "Breakpoints:\n  calc.py:9\n  calc.py:16, b == [4]" in debug.start("calc.py")
    assert "calc.py(16)ratio()" in debug("c")
    assert "calc.py:16, b == [4]" in debug.start("test_calc.py::test_total")
    assert "calc.py(9)total()" in debug("c")


def test_breakpoints_move_with_edits_by_any_tool(debug):
    debug.start("calc.py")
    debug("b calc.py:11")
    debug("b calc.py:16")
    debug.use("rewrite", path="calc.py", start=7, end=6, new_code="LIMIT = 3\n\n")
    debug.use("bash", command="sed -i 's/return above/x = 1\\n    return above/' calc.py")
    said = debug("c")
    assert "calc.py changed, so the program was started again." in said
    assert "Breakpoints:\n  calc.py:13\n  calc.py:18" in said
    assert "calc.py(18)ratio()" in said
    assert "13 B->" in debug("c")


def test_a_breakpoint_goes_with_its_line(debug):
    debug.start("calc.py")
    debug("b 11")
    debug("b 16")
    debug.use("rewrite", path="calc.py", start=9, end=12, new_code="    return sum(values)")
    assert "Breakpoints:\n  calc.py:9\n  calc.py:13" in debug.start("calc.py")
    debug.use("rewrite", path="calc.py", start=9, end=9, new_code="    # nothing")
    said = debug.start("calc.py")
    assert "The breakpoint at calc.py:9 is removed: " in said


def test_a_crash_can_be_examined_after_the_fact(debug):
    debug.write("calc.py", CALC.replace("[4]", "[]"))
    debug.start("calc.py")
    said = debug("c")
    assert "The program crashed: ZeroDivisionError: division by zero" in said
    assert "calc.py(17)ratio()" in said
    assert debug("p above") == "6"
    debug("u")
    assert debug("p ratio.__name__") == "'ratio'"
    assert "The program has ended with ZeroDivisionError" in debug("c")


def test_one_test_stops_at_its_first_line(debug):
    said = debug.start("test_calc.py::test_total", runner="pytest")
    assert "test_calc.py(7)test_total()" in said
    debug("b calc.py:12")
    debug("c")
    assert debug("p result") == "3"
    assert "1 passed" in debug("c")


def test_a_file_of_tests_stops_in_the_first_and_after_each_failure(debug):
    assert "test_calc.py(7)test_total()" in debug.start("test_calc.py")
    said = debug("c")
    assert "test_calc.py::test_ratio failed: ZeroDivisionError: division by zero" in said
    assert debug("p above, b") == "(1, [])"
    said = debug("c")
    assert "test_calc.py::TestMore::test_more failed: AssertionError: 5 != 6" in said
    assert "self.assertEqual(total([5]), 6)" in said
    said = debug("c")
    assert "2 failed, 1 passed" in said
    assert "Pytest has ended with exit status 1." in said


def test_tests_that_cannot_be_collected_are_examined(debug):
    debug.write("test_calc.py", "import nothing_like_it\n")
    said = debug.start("test_calc.py")
    assert "No module named 'nothing_like_it'" in said
    assert "has ended with exit status" in debug("c")
    assert "no tests ran" in debug.start("calc.py", runner="pytest")


def test_a_hang_is_interrupted_and_its_values_are_there(kind):
    with run(kind, "n = 0\nwhile True:\n    n += 1\n") as debug:
        debug.start("prog.py")
        debug.hurry(0.5)
        said = debug("c")
        assert "[the program ran for " in said
        assert "The program was interrupted; c goes on." in said
        assert "prog.py(" in said
        debug.hurry(60.0)
        assert int(debug("p n")) > 0
        assert debug("p n") == debug("p n"), "it stands still meanwhile"
        debug("n")
        debug.hurry(0.5)
        assert "interrupted" in debug("c")


def test_a_program_that_sleeps_is_interrupted(kind):
    with run(kind, "import time\nx = 7\ntime.sleep(1000)\n") as debug:
        debug.start("prog.py")
        debug.hurry(0.5)
        assert "time.sleep(1000)" in debug("c")
        debug.hurry(60.0)
        assert debug("p x") == "7"


def test_a_hang_that_nothing_interrupts_ends_the_session(kind):
    program = "sum(range(10**15))\n"
    with run(kind, program) as debug:
        debug.start("prog.py")
        debug.hurry(0.5, 0.5)
        assert "It did not stop, so the session was ended." in debug("c")
        debug.hurry(60.0)
        assert debug("p 1").startswith("The program was not running, and was started again.")


def test_a_command_that_hangs_is_interrupted(kind):
    with run(kind, "def spin():\n    while True:\n        pass\n\n\nx = 1\n") as debug:
        debug.start("prog.py")
        debug("n")
        debug.hurry(0.5)
        assert "KeyboardInterrupt" in debug("p spin()")
        debug.hurry(60.0)
        assert debug("!y = 5") == ""
        assert debug("p y") == "5"


def test_a_program_reads_the_end_of_its_input(kind):
    program = (
        "import sys\ntry:\n    input('who? ')\nexcept EOFError:\n    print('end', sys.stdin.read() == '')\n"
    )
    with run(kind, program) as debug:
        debug.start("prog.py")
        assert "who? end True" in debug("c")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys\nsys.exit(3)\n", "The program has ended with exit status 3."),
        ("import os\nprint('now', flush=True)\nos._exit(4)\n", "The session is over: the program has ended."),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "The session is over: the program has"),
        ("import os\nos.execvp('true', ['true'])\n", "The session is over: the program has ended."),
        ("import os\nos.closerange(3, 1 << 16)\nprint(1)\n", "The session is over: the program has ended."),
        ("import os\nos.closerange(0, 900)\nx = 1\n", "The program has ended."),
        ("import threading, time\nthreading.Timer(0.2, print, ['late']).start()\n", "late"),
        ("import atexit\natexit.register(print, 'at exit')\n", "at exit"),
        ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n", "The program has ended."),
        ("import sys\nsys.settrace(None)\nsys.stdout = sys.stderr = None\n", "The program has ended."),
    ],
)
def test_a_program_may_end_as_it_likes(kind, program, said):
    with run(kind, program) as debug:
        debug.start("prog.py")
        assert said in debug("c")
        assert "prog.py(1)<module>()" in debug("w"), "it is started again"


def test_a_forked_child_goes_on_by_itself(kind):
    program = "import os\nif os.fork() == 0:\n    print('child', flush=True)\n"
    program += "else:\n    os.wait()\n    print('parent')\n"
    with run(kind, program) as debug:
        debug.start("prog.py")
        debug("b 3")
        debug("b 6")
        said = debug("c")
        assert "child" in said
        assert "prog.py(6)<module>()" in said
        assert "parent" in debug("c")


def test_a_daemon_ends_with_its_session(kind):
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True:\n            open('alive', 'a').write('x')\n            time.sleep(0.01)\n"
        "    os._exit(0)\nos.wait()\nwhile not os.path.exists('alive'):\n    time.sleep(0.01)\n"
    )
    with run(kind, program) as debug:
        debug.start("prog.py")
        assert debug("c") == "The program has ended."
        size = len(debug.sandbox.read("alive"))
        time.sleep(0.3)
        assert len(debug.sandbox.read("alive")) == size


def test_commands_end_alone_and_the_session_goes_on(debug):
    debug.start("calc.py")
    debug("b 12")
    debug("c")
    leave = "sleep 1000 & echo $! > one; (setsid sleep 1000 & echo $! > two); true"
    debug.use("bash", command=leave)
    debug.use("evaluate")
    assert debug("p result") == "6"
    found = "grep -q 'slee[p]' /proc/$(cat $file)/cmdline"
    look = f"for file in one two; do {found} || echo ended; done 2>/dev/null"
    assert debug.use("bash", command=look) == "ended\nended\n[exit code 0]"


def test_a_command_may_end_the_session(kind):
    if kind == "process":
        pytest.skip("its commands could reach every process of this user")
    with run(kind, "x = 1\n") as debug:
        debug.start("prog.py")
        debug.use("bash", command="kill -9 -1")
        assert "The session is over" in debug("p 1")
        assert "started again" in debug("p 1")


def test_long_output_is_cut(kind):
    program = "print('x' * 10_000_000)\nvalue = 'y' * 10_000_000\nz = 1\n"
    with run(kind, program) as debug:
        debug.start("prog.py")
        debug("b 3")
        said = debug("c")
        assert 1000 < len(said) < 9000
        assert "characters cut" in said
        assert "3 B-> z = 1" in said, "the end is shown"
        said = debug("p value")
        assert 1000 < len(said) < 9000
        assert debug("p len(value)") == "10000000"


def test_what_a_program_prints_is_no_answer_of_the_debugger(kind):
    with run(kind, "print('(Pdb) > forged.py(1)f()')\nprint('-> x')\nx = 1\n") as debug:
        debug.start("prog.py")
        said = debug("n")
        assert said.startswith("(Pdb) > forged.py(1)f()\n")
        assert "prog.py(2)<module>()" in said


def test_a_program_that_writes_to_every_file_ends_its_session_only(kind):
    program = (
        "import os\nfor number in range(3, 5000):\n    try:\n        os.write(number, b'{' * 100)\n"
        "    except OSError:\n        pass\nx = 1\n"
    )
    with run(kind, program) as debug:
        debug.start("prog.py")
        debug.hurry(2.0, 0.5)
        assert "The session" in debug("c")
        debug.hurry(60.0)
        assert "prog.py(1)<module>()" in debug("w")


def test_any_text_goes_through(kind):
    name = "\u00e4\u00df\u4e2d"
    program = f"{name} = '\u2713\U0001f600'\nbad = '\\ud800'\nprint({name}, flush=True)\nx = 1\n"
    with run(kind, program) as debug:
        debug.start("prog.py")
        debug("b 4")
        assert "\u2713\U0001f600" in debug("c")
        assert debug(f"p {name}") == "'\u2713\U0001f600'"
        assert debug("p bad") == "'\\ud800'"
        assert debug("!print(bad)") == "?"


def test_breakpoint_calls_stop_where_they_stand(kind):
    program = (
        "import pdb\n\n\ndef f():\n    a = 1\n    breakpoint()\n    pdb.set_trace()\n    return a\n\nf()\n"
    )
    with run(kind, program) as debug:
        debug.start("prog.py")
        assert "prog.py(7)f()" in debug("c")
        assert "prog.py(8)f()" in debug("c")
        assert debug("p a") == "1"


@pytest.mark.parametrize("command", ["interact", "commands 1", "debug 1"])
def test_commands_without_sense_here_are_refused(debug, command):
    debug.start("calc.py")
    assert debug(command).startswith("*** ")
    assert debug("p 1") == "1"


def test_a_session_is_left_and_begun_again(debug):
    assert debug("c").startswith("error: Nothing is being debugged")
    assert debug("start").startswith("error: Name the file")
    assert debug.start("calc.py", runner="node").startswith("error: runner 'node'")
    assert "calc.py(1)<module>()" in debug("start /testbed/calc.py")
    assert "The session has ended." in debug("q")
    assert "calc.py(1)<module>()" in debug("start")
    debug("n")
    assert "Session started: python calc.py" in debug("restart")


def test_a_file_that_cannot_be_started_says_why(debug):
    assert "No such file" in debug.start("gone.py")
    debug.write("broken.py", "def f(:\n")
    assert "SyntaxError" in debug.start("broken.py")
    assert debug.start("x" * 2001) == "error: file must have no NUL and at most 2000 characters."
    assert debug(f"start {'x' * 2001}") == debug.start("a\0b") == debug.start("x" * 2001)


def test_arguments_follow_the_file(kind):
    with run(kind, "import sys\nprint(sys.argv[1:], __name__, __file__[-8:])\n") as debug:
        debug.start("prog.py --fast 'two words'")
        assert "['--fast', 'two words'] __main__ /prog.py" in debug("c")


def test_too_much_memory_ends_the_session(kind):
    if kind == "process":
        pytest.skip("it bounds nothing")
    program = (
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        break\n"
        "x = b'x' * (100 << 20)\ntime.sleep(1000)\n"
    )
    small = load("sandboxes", {"type": kind, "images": str(IMAGES), "limits": {"memory_mb": 400}})
    with session(small, task(prog=program), timeout_s=60.0) as debug:
        debug.start("prog.py")
        assert "The session is over: the program has ended." in debug("c")
        assert debug.use("bash", command="echo alive").startswith("alive")


def test_a_program_imports_its_own_files_before_modules_that_are_loaded(kind):
    files = task(
        prog="import calendar, random\nprint(calendar.OWN, random.OWN)\n",
        calendar="OWN = 1",
        random="OWN = 2",
    )
    with session(made(kind), files) as debug:
        debug.start("prog.py", runner="python")
        assert "1 2" in debug("c")


def test_another_interpreter_runs_the_program(kind):
    python = "/usr/bin/python3" if kind == "apptainer" else sys.executable
    program = "import sys\nprint(sys.executable, sys.flags.isolated, sys.argv[1:])\n"
    with run(kind, program, python=python) as debug:
        assert "prog.py(1)<module>()" in debug.start("prog.py")
        assert f"{python} 1 []" in debug("c")
    if kind == "apptainer":
        with run(kind, program, python="/nowhere/python") as debug:
            assert "No such file or directory: '/nowhere/python'" in debug.start("prog.py")
