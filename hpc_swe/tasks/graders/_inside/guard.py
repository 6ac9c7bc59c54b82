"""Detect changes to the code that runs and judges tests, from inside the process that runs them.

The texts of the guard (`report`, `origins`, `held`, `look` and this one) go into the sandbox together with
that of `reporter` or `runner`, which say when to check. Each finding is reported at once, as an `odd` entry
with the files that it comes from. The grader outside decides what it means, since a run of the base commit
may do the same. The texts run under Python 3.6 and later (audit events: 3.8).

Code under test could switch the guard off if it got hold of anything of the guard's. So nothing leads there:
there is no class, which a base class would list, but a namespace and functions on it, whose globals no module
has (`apart`). An audit hook of the interpreter holds them. They call no method of an object of others, and
of the library only what is written in C and was looked up at first. While code under test runs, none of their
frames is below it, and no exception leaves them.
"""

import gc
import os
import sys
from functools import partial
from itertools import repeat
from operator import is_
from random import SystemRandom
from stat import S_ISDIR
from sys import _getframe
from types import FunctionType, ModuleType
from typing import Any

from hpc_swe.tasks.graders._inside.held import (
    JUDGES,
    check,
    check_functions,
    hold_class,
    hold_function,
    learn,
    learn_again,
    listen,
)
from hpc_swe.tasks.graders._inside.look import (
    hold_hooks,
    look_at_case,
    look_at_hooks,
    look_at_names,
    look_at_parts,
    look_at_pass,
    look_at_test,
)

# In a sandbox, these are in the texts above this one.
from hpc_swe.tasks.graders._inside.origins import (
    called_as,
    exact,
    get_mro,
    get_title,
    identity,
    is_installed,
    knows,
    names_ctypes,
    names_of_class,
    names_of_module,
    nested,
    origin,
    place,
    plain_names,
    read_codes,
    read_names,
    resolved,
)
from hpc_swe.tasks.graders._inside.report import odd, open_report

REACHES = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.settrace"})
REACHES |= {"sys.setprofile", "sys.addaudithook", "sys._current_frames", "sys._current_exceptions"}
REACHES |= {"ctypes.cdata", "ctypes.PyObj_FromPtr"}
REACHES |= {"sys.monitoring.register_callback", "cpython.PyInterpreterState_New"}
FILES = frozenset({"open", "os.symlink"})
SETS = frozenset({"object.__setattr__", "object.__delattr__"})
# Event -> what the code has among its names that causes it; for all others, the event's own last name.
NAMES: Any = {"ctypes.cdata": ("from_address",), "cpython.PyInterpreterState_New": ("create",)}
NAMES["open"] = ("open", "FileIO")
NAMES["sys.setprofile"] = ("setprofile", "enable", "disable")  # as cProfile calls it
SEEN = REACHES | FILES | SETS | {"import", "exec"}
SETS_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
CTYPES = os.path.realpath(os.path.dirname(os.__file__)) + "/ctypes/"  # noqa: PTH120
MOST_ANSWERS = 400_000  # characters of the lines with answers of one assertion
MOST_OF_ALL = 700_000  # the same, of all assertions: `READ_BYTES` of sandboxes are always read
LINE = 60  # characters that a line of the report has beside an answer and the name of its test
FROZEN = "<frozen importlib"
list_names, stat_file = os.listdir, os.fstat
collects, stop_collecting, go_on_collecting = gc.isenabled, gc.disable, gc.enable
OWN = _getframe().f_code  # of all texts of the guard, since they run as one


def make_guard(guard: Any, code: Any, path: str, root: str, files: Any, bound: Any = None) -> Any:
    """Return a callable that takes an action's name and values; FileExistsError: the report exists already.

    `guard` is what `remember` returned, `code` that of the text that may call the callable, and `path` that
    of the report; `files` are the tests', and `bound` has `bound_names` of some of them.
    """
    guard.note, guard.root, guard.began_ns = open_report(path), root, os.stat(path).st_ctime_ns  # noqa: PTH116
    guard.found, guard.young, guard.failure = set(), set(), None
    own, callers = nested([OWN]), nested([code])
    paths = {os.path.realpath(one) + "/" for one in sys.path if type(one) is str and one}
    guard.installed = tuple(one for one in paths if not (root + "/").startswith(one))
    guard.own, guard.callers = {identity(one) for one in own}, {identity(one) for one in callers}
    guard.known.update((identity(one), one) for one in (*own, *callers))
    guard.files, guard.looked_at, guard.kinds, guard.tests = {}, {}, {}, {}
    guard.must_compare, guard.is_pure = not hasattr(sys, "addaudithook"), True
    guard.is_watching, guard.bottom, guard.phase, guard.test, guard.hooks = True, None, None, "", None
    guard.judged = frozenset(place(guard, root + "/" + file) for file in files) - {""}
    guard.defined, guard.bound, guard.answers, guard.used = set(), set(), set(), {}
    for file in guard.judged:
        guard.defined.update(name for name, _ in read_codes(guard, file))
        names = bound.get(file) if bound else None
        guard.bound.update(read_names(root + "/" + file) if names is None else names)
    actions: Any = {name: partial(action, guard) for name, action in ACTIONS.items()}
    if guard.must_compare:
        return lambda action, *values: actions[action](*values)
    secret = str(SystemRandom().getrandbits(128))
    sys.addaudithook(_make_hook(guard, secret, actions))
    return partial(sys.audit, secret)  # written in C: it leads to the secret, and to nothing else


def _make_hook(guard: Any, secret: str, actions: Any) -> Any:
    """Return the audit hook: an event with a secret name calls an action, all others are looked at."""

    def hook(event: str, arguments: Any) -> None:
        if event in SEEN or event == secret or event[:7] == "ctypes.":
            did_collect = False
            try:  # a collection of garbage would call what others have registered below this frame
                did_collect = collects()
                stop_collecting()
                if event == secret:
                    _act(guard, actions, *arguments)
                elif guard.is_watching:
                    _see(guard, event, *arguments)
            except BaseException as error:  # noqa: BLE001  (its traceback would show our frames)
                if guard.failure is None:  # without a call, for which the stack could be too deep
                    guard.failure = error
            if did_collect:
                go_on_collecting()

    return hook


def _act(guard: Any, actions: Any, action: Any, *values: Any) -> None:
    code = code_below(guard)
    # A function written in C could have the caller call it, but not with an action that this writes down.
    if identity(code) in guard.callers and type(action) is str and action in code.co_consts:
        actions[action](*values)
    else:
        odd(guard, "other code than the reporter calls the guard")


def below(guard: Any) -> Any:
    """Return the innermost frame that is not the guard's; None if a thread has no other."""
    frame: Any = _getframe(1)
    while frame is not None and identity(frame.f_code) in guard.own:
        frame = frame.f_back
    return frame


def code_below(guard: Any) -> Any:
    frame = below(guard)
    return frame and frame.f_code


def _see(guard: Any, event: str, first: Any = None, second: Any = None, third: Any = None, *_: Any) -> None:
    """Report what code under test needs to find us, and tests hardly ever do."""
    if event in REACHES:
        odd(guard, "calls " + event, _user(guard, event))
    elif event == "exec":
        guard.is_pure = guard.is_pure and is_installed(guard, first)
    elif event in FILES:
        _sees_files(guard, event, path_of(first), third)
    elif event in SETS:
        _sets(guard, first, exact(second))
    elif event != "import":
        odd(guard, "calls " + event, _user_of_ctypes(guard))
    elif exact(first).rpartition(".")[2] in ("ctypes", "_ctypes"):
        odd(guard, "imports ctypes", _user_of_ctypes(guard))


def _user(guard: Any, event: str, *names: str) -> str:
    """Return the file of the innermost code that is not installed; nothing if that is in no file.

    An installed function may be called in a thread of its own, so that no caller is to be seen. A function
    written in C has no frame: where a test goes through an iterator of a patch, it seems to do what that
    does. So there is nothing to return either unless the code names what it calls: that which causes the
    event, or the installed function that does so.
    """
    frame = below(guard)
    names = names or NAMES.get(event, (event.rpartition(".")[2],))
    if frame is None or not _has_name(frame.f_code, names):
        return ""
    while frame is not None:
        code = frame.f_code
        if identity(code) in guard.callers:  # only pytest and plugins are between here and the runner
            return CTYPES if _has_name(code, names) else ""
        file = origin(guard, code)
        is_frozen = exact(code.co_filename).startswith(FROZEN) and knows(guard, code)
        if file[:1] != "/" and not is_frozen:
            return file if _has_name(code, names) else ""
        names = ("",) if is_frozen else called_as(guard, code)
        frame = frame.f_back
    return ""


def _has_name(code: Any, names: Any) -> bool:
    return any(type(one) is str and name in one for one in code.co_names for name in names)


def _sets(guard: Any, owner: Any, name: str) -> None:
    guard.must_compare = guard.must_compare or name in SETS_OF_FUNCTIONS
    is_learned = guard.reporter is not None  # before, a plugin or a `conftest.py` may do so
    if name in SETS_OF_FUNCTIONS and is_learned and any(map(is_, guard.functions, repeat(owner))):
        odd(guard, "sets " + name)
    elif name in ("__code__", "__class__", "__bases__") and _is_judged(guard, owner):
        odd(guard, "sets " + name, _user(guard, "", name, "setattr", "delattr"))


def _is_judged(guard: Any, owner: Any) -> bool:
    """Return whether an object is of unittest or pytest, or is a test, or holds code of a test's file."""
    kind = type(owner)
    if issubclass(kind, FunctionType):
        return knows(guard, owner.__code__) or _is_judged_file(guard, owner.__code__.co_filename)
    if issubclass(kind, ModuleType):
        held = plain_names(names_of_module(owner))
        if any(map(is_, guard.modules.values(), repeat(owner))):
            return True
        if place(guard, held.get("__file__")) in guard.judged:
            return True
    else:
        homes = get_mro(owner) if issubclass(kind, type) else get_mro(kind)
        for home in (*homes, *get_mro(kind)):
            if exact(plain_names(names_of_class(home)).get("__module__")).partition(".")[0] in JUDGES:
                return True
        held = plain_names(names_of_class(owner)) if issubclass(kind, type) else {}
    functions = [one for one in held.values() if type(one) is FunctionType]
    return any(place(guard, one.__code__.co_filename) in guard.judged for one in functions)


def _is_judged_file(guard: Any, path: str) -> bool:
    found = place(guard, path)
    return found in guard.judged or found[:1] == "/"


def path_of(value: Any) -> str:
    return bytes.decode(value, "utf-8", "replace") if issubclass(type(value), bytes) else exact(value)


def _sees_files(guard: Any, event: str, path: str, flags: Any) -> None:
    """Report that a process's memory is opened, or gets another name."""
    is_memory = path.rpartition("/")[2] == "mem"
    if event == "open":
        if type(flags) is int and flags & os.O_PATH:  # opens nothing but a name, as the guard itself does
            return
        real = resolved(path) if path else ""
        # The name may be one in a folder that is open, which no event tells.
        is_memory = is_memory and _holds_folder() or real.startswith("/proc/") and real.endswith("/mem")
    if is_memory:
        odd(guard, "opens the memory of a process", _user(guard, event))


def _holds_folder() -> bool:
    """Return whether this process has a folder open, so that a path may begin elsewhere than it seems."""
    for number in list_names("/proc/self/fd"):
        try:
            if S_ISDIR(stat_file(int(number)).st_mode):
                return True
        except OSError:  # the folder of this list
            continue
    return False


def _user_of_ctypes(guard: Any) -> str:
    """Return the file of the code that loads or calls ctypes; nothing if that only calls what it is given."""
    frame = below(guard)
    while frame is not None and _passes_on(guard, frame.f_code):
        frame = frame.f_back
    file = origin(guard, frame and frame.f_code)
    return file if names_ctypes(guard, file) else ""


def _passes_on(guard: Any, code: Any) -> bool:
    """Return whether a code is of the import system or of ctypes itself."""
    is_frozen = exact(code.co_filename).startswith(FROZEN)
    return knows(guard, code) if is_frozen else origin(guard, code).startswith(CTYPES)


def start(guard: Any) -> None:
    """Take the caller as the runner: below its frame, only pytest may report."""
    if guard.bottom is not None:
        odd(guard, "the runner runs twice")
    guard.bottom = guard.bottom or below(guard)


def begin(guard: Any, test: Any) -> None:
    """Note which test the next answers belong to."""
    if not _pytest_calls(guard):
        odd(guard, "other code than pytest begins a test")
    guard.test = exact(test)


def report(guard: Any, test: Any, outcome: Any) -> None:
    """Report an outcome; one that pytest does not report itself counts only if it is a failure."""
    if exact(outcome) != "passed" or _pytest_calls(guard):
        tell_outcome(guard, test, "", outcome)
    elif exact(test) != guard.test:  # else it is a part of the test that runs
        odd(guard, "other code than pytest reports")


def _pytest_calls(guard: Any) -> bool:
    """Return whether there are only pytest and the recorder between here and the runner, and no test runs."""
    # Other code could call everything that they call, and pytest itself calls what a test has registered.
    frame = below(guard)
    while frame is not None and frame is not guard.bottom:
        if frame.f_code is guard.phase or not knows(guard, frame.f_code):
            return False
        frame = frame.f_back
    return frame is not None


def answer(guard: Any, number: Any, value: Any) -> None:
    """Note an answer of a test once, and no more than fit into the report: others cannot be compared."""
    test, place, text = guard.test, int.__repr__(number), exact(value)
    if (test, place, text) in guard.answers:
        return
    used, total = guard.used.get(place, 0), guard.used.get("", 0)
    text = text if used < MOST_ANSWERS and total < MOST_OF_ALL else '["?","many"]'
    if (test, place, text) not in guard.answers:
        guard.answers.add((test, place, text))
        size = len(test) + len(text) + text.count('"') + LINE  # JSON escapes quotation marks
        guard.used[place], guard.used[""] = used + size, total + size
        guard.note(test=test, place=place, answer=text)


def tell_outcome(guard: Any, test: Any, doc: Any, outcome: Any) -> None:
    guard.note(test=exact(test), doc=exact(doc), outcome=exact(outcome))


def tell_canary(guard: Any, name: Any, owner: Any) -> None:
    guard.note(canary=exact(name), owner=exact(owner))


def tell_always_equal(guard: Any, name: Any, places: Any) -> None:
    guard.note(always_equal=exact(name), places=exact(places))


def finish(guard: Any) -> None:
    """Compare all functions, and ignore audit events from now on, since the reporter itself causes them."""
    check_functions(guard)
    guard.is_watching = False


def end(guard: Any) -> None:
    """Say that the run has come to its end."""
    if guard.bottom is not None and below(guard) is not guard.bottom:
        odd(guard, "other code than the runner ends the run")
    if guard.is_watching:
        finish(guard)
    if guard.failure is not None:
        odd(guard, "a call of the guard failed: " + exact(get_title(type(guard.failure))))
    guard.note(end=True)


ACTIONS: Any = {"always equal": tell_always_equal, "canary": tell_canary, "outcome": tell_outcome}
NAMED: Any = (answer, begin, check, end, finish, hold_class, hold_function, hold_hooks, learn, learn_again)
NAMED += (listen, look_at_case, look_at_hooks, look_at_names, look_at_parts, look_at_pass, look_at_test)
ACTIONS.update((one.__name__.replace("_", " "), one) for one in (*NAMED, odd, report, start))
