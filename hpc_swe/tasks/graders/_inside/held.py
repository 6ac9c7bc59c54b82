"""Remember the parts of pytest, unittest and the built-in functions, and find what has changed.

A text of the guard, see `guard`. A dictionary is compared with what it held, one by one and in order: that
calls no `__eq__` and looks up no key, so that neither a value nor a key can take part.
"""

import builtins
import sys
import unittest
from itertools import chain
from operator import attrgetter
from operator import is_not as differs
from sys import modules
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from hpc_swe.tasks.graders._inside.origins import (
    cells,
    exact,
    files_of,
    get_title,
    identity,
    know,
    knows,
    names_of_class,
    names_of_module,
    nested,
    place,
    plain_names,
)
from hpc_swe.tasks.graders._inside.report import odd  # in a sandbox, texts above this one

JUDGES = ("unittest", "_pytest", "pytest", "pluggy")
LIBRARY = ("contextlib", "functools", "inspect", "math", "operator")  # what those rely on
LOADERS = ("_frozen_importlib", "_frozen_importlib_external")
WATCHED = JUDGES + LIBRARY + LOADERS
FUNCTIONS = (FunctionType, BuiltinFunctionType)
BODIES = (FunctionType, classmethod, staticmethod, property)
GROWS = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__", "__annotate__", "_abc_cache"})
GROWS |= {"__abstractmethods__", "_abc_impl", "_abc_registry", "_abc_negative_cache"}
GROWS |= {"_classSetupFailed", "tearDown_exceptions"}  # of unittest's class for modules that fail to import
GROWS |= {"_abc_negative_cache_version", "_pytest_diamond_inheritance_warning_shown"}
GROWS |= {"__doc__", "__dict__", "__weakref__", "_epoch", "maxDiff", "longMessage", "_diffThreshold"}
FREE = frozenset({"open", "input", "print", "exit", "quit", "help", "breakpoint", "copyright", "credits"})
OF_CASE = frozenset(vars(unittest.TestCase))
HIDING = frozenset(vars(builtins))
get_module = vars(type)["__module__"].__get__
get_cell = attrgetter("cell_contents")
missing = object()


def remember() -> Any:
    """Return the memory of a guard, with the modules that are loaded now.

    A warm interpreter makes it once for all its forks, since this takes longer than most tests do.
    """
    guard = SimpleNamespace(known={}, outer=[], reporter=None, listener=None)
    _forget(guard)
    _hold_modules(guard)
    knows(guard, None)  # which looks for the codes within functions
    guard.packages = {name: (one, _codes_of(one)) for name, one in list(modules.items()) if _is_package(name)}
    return guard


def _is_package(name: str) -> bool:
    """Return whether a module may be a plugin's."""
    return name.partition(".")[0] not in (*JUDGES, "__main__", *getattr(sys, "stdlib_module_names", ()))


def _codes_of(module: Any) -> Any:
    """Return the codes of a module's functions, and those within them, by their identity."""
    found: Any = []
    for value in list(names_of_module(module).values()) if issubclass(type(module), ModuleType) else ():
        for one in list(vars(value).values()) if type(value) is type else (value,):
            if type(one) is FunctionType:
                found.append(one.__code__)
    return {identity(one): one for one in nested(found)}


def _forget(guard: Any) -> None:
    guard.spaces, guard.functions, guard.codes, guard.bodies = [], [], [], []
    guard.cells, guard.values, guard.held, guard.modules = [], [], set(), {}


def learn(guard: Any, reporter: Any, packages: str = "", phase: Any = None) -> None:
    """Accept what is loaded now, and what has changed since `remember`.

    `reporter` has the names of the module that reports. `packages` are those of plugins, one a line, of which
    the codes suffice; `phase` is the code by which pytest runs each part of a test.
    """
    if guard.reporter is not None:
        odd(guard, "the guard learns twice")
        return
    guard.phase, guard.reporter = phase, reporter
    if guard.must_compare:  # a function may have changed
        _forget(guard)
    for number in _changed(guard):
        _hold_again(guard, number)
    guard.values = list(map(get_cell, guard.cells))
    guard.modules = {name: one for name, one in guard.modules.items() if modules.get(name) is one}
    _hold_modules(guard)
    # No judge prints, asks or opens by these, and tests often replace them.
    hold(guard, "", vars(builtins), lambda key, value: key not in FREE, frozenset())
    _hold_module(guard, "the reporter", reporter)
    plugins = set(packages.split("\n")).difference(JUDGES)
    for name, module in list(modules.items()):
        if name.partition(".")[0] in plugins:
            same, codes = guard.packages.get(name, (None, {}))
            guard.known.update(codes if same is module else _codes_of(module))


def _hold_modules(guard: Any) -> None:
    for name, module in list(modules.items()):
        is_judge = name.partition(".")[0] in JUDGES or name in LIBRARY or name in LOADERS
        if is_judge and guard.modules.get(name) is not module:
            guard.modules[name] = module
            _hold_module(guard, name, names_of_module(module))


def _hold_again(guard: Any, number: int) -> None:
    prefix, names, _, _, is_held, adds = guard.spaces[number]
    now = (*names, *names.values())
    guard.spaces[number] = (prefix, names, now, now, is_held, adds)
    _hold_parts(guard, prefix, names)


def listen(guard: Any, listener: Any) -> None:
    """Take an object as the only one of the reporter's that is a plugin of pytest, and hold it."""
    if guard.listener is not None:
        odd(guard, "the reporter is registered twice")
        return
    guard.listener = listener
    hold_class(guard, type(listener))
    hold_values(guard, vars(listener))


def learn_again(guard: Any) -> None:
    """Accept what installed plugins have changed in pytest, once, unless code of the work tree has run."""
    spaces = [names_of_module(one) for one in list(modules.values()) if issubclass(type(one), ModuleType)]
    files = [plain_names(names).get("__file__") for names in spaces]
    is_pure, guard.is_pure = guard.is_pure, False
    if is_pure and all(place(guard, file, not guard.must_compare)[:1] == "/" for file in files if file):
        _forget(guard)
        reporter, guard.reporter = guard.reporter, None
        listener, guard.listener = guard.listener, None
        learn(guard, reporter)
        listen(guard, listener)


def _hold_module(guard: Any, name: str, names: Any) -> None:
    hold(guard, name + ":", names, _is_part, HIDING)
    _hold_parts(guard, name + ":", names)


def _hold_parts(guard: Any, prefix: str, names: Any) -> None:
    """Remember the functions and the judges' classes that a module or a class names."""
    for key, value in list(names.items()):
        if type(value) in BODIES:
            hold_body(guard, prefix + key, value)
        elif issubclass(type(value), type) and exact(get_module(value)).partition(".")[0] in WATCHED:
            hold_class(guard, value)


def _is_part(key: str, value: Any) -> bool:
    return type(value) in FUNCTIONS or issubclass(type(value), type) or key == "__builtins__"


def hold_function(guard: Any, function: Any) -> None:
    """Remember a function of the reporter, with the values that it closes over."""
    hold_body(guard, function.__name__, function)
    for cell, value in cells(function):
        _hold_cell(guard, cell, value)


def hold_values(guard: Any, names: Any) -> None:
    """Remember all values of a dictionary."""
    if type(names) is dict:
        hold(guard, "", names, lambda key, value: True, frozenset())


def hold_class(guard: Any, kind: Any) -> None:
    """Remember everything that a class defines itself."""
    if identity(kind) not in guard.held:
        guard.held.add(identity(kind))
        prefix, names = exact(get_title(kind)) + ".", names_of_class(kind)
        hold(guard, prefix, names, lambda key, value: key not in GROWS, None)
        _hold_parts(guard, prefix, names)


def hold(guard: Any, prefix: str, names: Any, is_held: Any, adds: Any) -> None:
    """Remember the values of a dictionary; `adds` are the names that must not be added, or None for all."""
    seen = (*names, *names.values())
    guard.spaces.append((prefix, names, seen, seen, is_held, adds))


def hold_body(guard: Any, label: str, function: Any) -> None:
    """Remember the code and the defaults of a function, and of the functions that it binds or closes over."""
    queue = [function]
    for one in queue:
        kind = type(one)
        if kind is classmethod or kind is staticmethod:
            queue.append(one.__func__)
        elif kind is property:
            queue += [one.fget, one.fset]
        elif kind is FunctionType and one not in guard.held:
            guard.held.add(one)
            code, named = one.__code__, one.__kwdefaults__
            know(guard, code)
            guard.functions.append(one)
            guard.codes.append(code)
            guard.bodies.append((label, one.__defaults__, named))
            if named:
                hold_values(guard, named)
            for cell, value in cells(one) if one.__closure__ else ():
                if type(value) is FunctionType:
                    _hold_cell(guard, cell, value)
                    queue.append(value)


def _hold_cell(guard: Any, cell: Any, value: Any) -> None:
    guard.cells.append(cell)
    guard.values.append(value)


def check(guard: Any) -> None:
    """Report what is not as it was; functions are compared if an event told of a change, or was missed."""
    for number in _changed(guard):
        _examine(guard, number)
    _check_modules(guard)
    if guard.must_compare or guard.failure is not None:
        check_functions(guard)
    if any(map(differs, map(get_cell, guard.cells), guard.values)):
        odd(guard, "rewritten cells")


def _changed(guard: Any) -> Any:
    """Return the numbers of the dictionaries that have changed."""
    return [
        number
        for number, (_, names, _, seen, _, _) in enumerate(guard.spaces)
        if 2 * len(names) != len(seen) or any(map(differs, chain(names, names.values()), seen))
    ]


def _examine(guard: Any, number: int) -> None:
    """Report what a dictionary that has changed holds otherwise; if all is well, this is what it held."""
    prefix, names, first, _, is_held, adds = guard.spaces[number]
    found, now, size = plain_names(names), (*names, *names.values()), len(first) // 2
    known = dict(zip(first[:size], first[size:]))  # noqa: B905
    faults = [
        ("replaced " + prefix + key, *(() if prefix else _tests_of(guard, found.get(key))))
        for key, value in known.items()
        if is_held(key, value) and found.get(key, missing) is not value
    ]
    if 2 * len(found) != len(now):
        faults.append(("a key that is no string in " + (prefix or "names"),))
    for key in set(found).difference(known):
        is_check = key.startswith("assert") and key not in OF_CASE  # hides nothing
        if key not in GROWS and not is_check if adds is None else key in adds:
            faults.append(("added " + prefix + key,))
    for fault in faults:
        odd(guard, *fault)
    if not faults:
        guard.spaces[number] = (prefix, names, first, now, is_held, adds)


def _tests_of(guard: Any, function: Any) -> Any:
    files = files_of(guard, function)
    return files if guard.judged.issuperset(files) else ()


def _check_modules(guard: Any) -> None:
    found = plain_names(modules)
    if len(found) != len(modules):
        odd(guard, "a key that is no string in sys.modules")
    for name in [name for name, module in guard.modules.items() if found.get(name) is not module]:
        odd(guard, "replaced " + name)


def check_functions(guard: Any) -> None:
    """Compare the code and the defaults of all functions.

    Reading them causes an event each, which takes longer than all else that is compared when a test ends. So
    without an event of a change it is done once, at the end.
    """
    for function, code, (label, defaults, named) in zip(guard.functions, guard.codes, guard.bodies):  # noqa: B905
        is_same = function.__code__ is code and function.__defaults__ is defaults
        if not is_same or function.__kwdefaults__ is not named:
            odd(guard, "rewritten " + label)
