"""The sandbox that isolates nothing still keeps the seam's promises."""

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes import _interpreter, process
from hpc_swe.agents.sandboxes._inside.program import WARM_UP, thread_variables
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.cluster.processes import with_variable
from tests.kit import debugging
from tests.kit.checkout import ROOT, environment
from tests.kit.constants import varied
from tests.kit.waiting import until


def test_it_says_once_and_loudly_that_it_isolates_nothing(task, caplog):
    process._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with Process().open(task):
                pass
    assert [r.message.partition(":")[0] for r in caplog.records] == ["unisolated"]


def test_commands_programs_and_files(task, tmp_path):
    with varied(Process, scratch=str(tmp_path))().open(task) as sandbox:
        assert sandbox.run("cat mod.py; echo err >&2; exit 3", 10).output == "x = 1\nerr\n"
        assert sandbox.run("exit 3", 10).exit_code == 3
        assert sandbox.run("kill -9 $$", 10).exit_code == 137
        ended = sandbox.python("import sys; print(sys.flags.isolated, __name__); sys.exit(4)", 10)
        assert (ended.exit_code, ended.output) == (4, "1 __main__\n")
        sandbox.write("a/b", b"1")
        assert sandbox.run("cat a/b; chmod 000 a", 10).output == "1"
    assert list(tmp_path.iterdir()) == []


def test_its_processes_yield_to_the_engine_beside_them(task):
    """In one session, since Linux may compare niceness only within a session."""
    yielding = os.nice(0) + 10
    with Process().open(task) as sandbox:
        assert sandbox.run("nice", 10).output == f"{yielding}\n"
        [session] = {int(sandbox.run("ps -o sid= $$", 10).output) for _ in range(2)}
        assert session != os.getsid(0)
        assert sandbox.python("import os; print(os.nice(0))", 10).output == f"{yielding}\n"
    with debugging.session(Process(), debugging.task(prog="x = 1\n")) as debug:
        debug.start("prog.py")
        assert f"{yielding}" == debug("p __import__('os').nice(0)").strip()


def test_a_command_that_kills_the_group_of_its_session_ends_no_other(task):
    """That is the group of the interpreter, which is replaced for the next command."""
    with Process().open(task) as one, Process().open(task) as two, ThreadPoolExecutor(1) as pool:
        other = pool.submit(two.run, "touch begun; while [ ! -e go ]; do sleep 0.1; done; echo done", 60)
        until(lambda: "begun" in two.paths())
        one.run("kill -9 -- -$(ps -o sid= $$ | tr -d ' ')", 10)
        two.write("go", b"")
        assert other.result().output == "done\n"
        assert one.run("echo on", 10).output == "on\n"


def test_time_ends_a_command_and_what_it_left_running(task):
    with Process().open(task) as sandbox:
        began = time.monotonic()
        result = sandbox.run("trap '' TERM; sleep 600 & sleep 600", 0.3)
        assert (result.timed_out, result.exit_code) == (True, 137)
        sandbox.run("setsid sh -c 'trap \"\" TERM HUP; sleep 1; touch late' & echo", 10)
        assert time.monotonic() - began < 300
        time.sleep(1.2)
        assert "late" not in sandbox.paths()


@pytest.mark.parametrize("kind", ["process", "apptainer"])
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no such time")
def test_the_time_of_tests_leaves_out_how_long_a_busy_host_lets_them_wait(task, kind, request):
    sandboxes = Process() if kind == "process" else request.getfixturevalue(kind)
    spins = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    took = []
    with ExitStack() as stack:
        for _ in range(3):  # in sessions of their own, of which the kernel may give each an equal share
            busy = subprocess.Popen([sys.executable, "-c", spins], start_new_session=True)
            stack.callback(stack.enter_context(busy).kill)
        sandbox = stack.enter_context(sandboxes.open(task))
        for program in (spins, "import time; time.sleep(60)"):
            began = time.monotonic()
            assert sandbox.python(program, 0.5, 5.0).timed_out
            took.append(time.monotonic() - began)
    assert took[0] > max(1, took[1])


def test_a_file_that_cannot_be_laid_out_is_the_host_s_error(task):
    bad = msgspec.structs.replace(task, files={"../out": "x"})
    with pytest.raises(SandboxError, match="lay out the files of t"), Process().open(bad):
        pass


def test_a_program_runs_in_a_fork_that_has_loaded_pytest(task):
    shows = "import os, sys; print(*({'pytest', 'ctypes'} & {*sys.modules}), os.getcwd(), *os.environ)"
    with Process().open(task) as sandbox:
        loaded, where, *names = sandbox.python(shows, 10).output.split()
        assert (loaded, where) == ("pytest", sandbox.run("pwd", 10).output.strip())
        own = {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", process.MARK}
        assert set(names) == own | thread_variables(1).keys()
        shown = sandbox.python("print(open('/proc/self/environ').read())", 10).output
        assert f"{process.MARK}={where}\0" in shown
        assert sandbox.python("import sys; sys.modules['mine'] = 1", 10).exit_code == 0
        assert "False" in sandbox.python("import sys; print('mine' in sys.modules)", 10).output
    with debugging.session(Process(), debugging.task(prog="x = 1\n")) as debug:
        debug.start("prog.py")
        assert debug("p {'pytest', 'ctypes'} & {*__import__('sys').modules}").strip() == "{'pytest'}"


@pytest.mark.parametrize("kind", ["process", "apptainer"])
def test_a_prelude_runs_once_and_its_programs_find_no_other(task, kind, request):
    sandboxes = Process() if kind == "process" else request.getfixturevalue(kind)
    prelude = "import os, sys\nDRAWN, used = os.urandom(9).hex(), []"
    program = """
used.append(1)
frame = sys._getframe()
while "prepared" not in frame.f_globals: frame = frame.f_back
print(DRAWN, used, frame.f_globals["prepared"])
"""
    shown = []
    for _ in range(3):
        with sandboxes.open(task) as sandbox:
            assert "ValueError: mine" in sandbox.python("", 20, prelude="raise ValueError('mine')").output
            sandbox.python("", 20, prelude="OTHER = 1")
            shown.append(sandbox.python(program, 20, prelude=prelude).output)
    assert shown[1] == shown[2] == f"{shown[2].split()[0]} [1] {{}}\n"


def test_a_program_s_forks_and_open_files_end_with_it(task):
    leaves = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(1)\n    open('late', 'w')\n"
    opens = "import os; print(sorted(os.listdir('/proc/self/fd')))"
    with Process().open(task) as sandbox:
        assert sandbox.python(leaves, 10).exit_code == 0
        assert sandbox.python(opens, 10).output.strip() == "['0', '1', '2', '3']", "3 is the listing's own"
        time.sleep(1.2)
        assert "late" not in sandbox.paths()


def test_killing_its_reaper_ends_a_program_alone(task):
    kills = "import os, time; os.kill(os.getppid(), 9); time.sleep(600)"
    with Process().open(task) as sandbox:
        result = sandbox.python(kills, 60)
        assert (result.exit_code, result.timed_out) == (137, False)
        assert sandbox.python("print(1)", 60).output == "1\n"


@pytest.mark.slow
def test_a_reaper_that_its_command_has_stopped_ends_with_it(task):
    def ended(reaper: str) -> bool:
        return not Path(f"/proc/{reaper.strip()}").exists()

    with Process().open(task) as sandbox:
        for more in ("", "kill -9 $(ps -o sid= $$); "):  # the second also kills the interpreter
            result = sandbox.run(f"kill -STOP $PPID; {more}echo $PPID; sleep 600", 1.0)
            assert result.timed_out
            until(lambda result=result: ended(result.output), "the reaper's end")
    stops = "import os, time; print(os.getppid(), flush=True); os.kill(os.getppid(), 19); time.sleep(600)"
    said: list[str] = []
    with Process().open(task) as sandbox, suppress(KeyError), sandbox.session(stops) as session:
        until(lambda: said.append(session.printed()) or "\n" in said[-1], "the number of the reaper")
        raise KeyError
    until(lambda: ended(said[-1]), "the end of a reaper whose session is left by an exception")


def test_a_command_is_started_again_when_the_interpreter_dies(task, tmp_path):
    with varied(Process, scratch=str(tmp_path))().open(task) as sandbox, ThreadPoolExecutor() as pool:
        long = pool.submit(sandbox.run, "while [ ! -e done ]; do sleep 0.1; done", 600)
        until(lambda: _below(tmp_path), "a command whose reaper goes on")
        interpreter = _interpreter._interpreters[os.getpid()]._process
        interpreter.send_signal(signal.SIGSTOP)
        waiting = pool.submit(sandbox.run, "touch done; echo 1", 600)
        time.sleep(0.5)  # so that its request lies in the interpreter's queue
        interpreter.kill()
        assert waiting.result(60).output == "1\n"
        assert long.result(60).exit_code == 0


def test_a_plugin_that_cannot_be_loaded_spares_those_after_it(tmp_path):
    for name, text in (("broken", "raise OSError('no such library')"), ("useful", "")):
        (tmp_path / f"{name}_1.py").write_text(text)
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info/entry_points.txt").write_text(f"[pytest11]\n{name} = {name}_1\n")
        (tmp_path / f"{name}-1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    program = f"{WARM_UP}\nimport sys\nprint({{'broken_1', 'useful_1', 'hypothesis'}} & {{*sys.modules}})"
    line, environ = [sys.executable, "-c", program], environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
    assert "no such library" in done.stdout
    assert all(name in done.stdout.splitlines()[-1] for name in ("useful_1", "hypothesis"))


def test_what_the_interpreter_has_read_is_not_read_again_by_its_forks():
    program = (
        f"{WARM_UP}\n"
        + """
import os, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
names = [one.name for each in metadata.distributions() for one in each.entry_points]
os.path.realpath = opened.append  # which is asked for the file of each module
inspect.getmodule(compile("", "another", "exec"))
print("pytest" in names, [path for path in opened if "entry_points" in path or path.endswith(".py")])
"""
    )
    line = [sys.executable, "-I", "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True []"


def test_an_interpreter_that_has_ended_is_replaced(task):
    with Process().open(task) as sandbox:
        sandbox.python("", 60)
        for _ in range(2):
            before = _interpreter._interpreters[os.getpid()]
            os.kill(before._process.pid, signal.SIGKILL)
            assert sandbox.python("print(1)", 60).output == "1\n"
            assert _interpreter._interpreters[os.getpid()] is not before


@pytest.mark.parametrize("does", ["pass", "os.kill(os.getppid(), 19)"], ids=["goes on", "stops its reaper"])
def test_programs_end_when_the_process_of_their_sandbox_dies(task, tmp_path, does):
    starts = f"""
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.records import Task, TestPlan
plan = TestPlan(command="", fail_to_pass=[], timeout_s=60.0)
task = Task(task_id="t", taskset="b", prompt="", image="", workdir="/w", files={{}}, tests=plan)
with Process().open(task) as sandbox:
    sandbox.python("import os; {does}; os.fork(); print(1); import time; time.sleep(600)", 600)
"""
    holder = subprocess.Popen([sys.executable, "-c", starts], cwd=ROOT, env=environment(TMPDIR=str(tmp_path)))
    until(lambda: _below(tmp_path) == 2, "two programs")
    holder.kill()
    holder.wait()
    until(lambda: not _below(tmp_path), "their ends")


def _below(folder: Path) -> int:
    return sum(value.startswith(str(folder)) for value in with_variable(process.MARK).values())
