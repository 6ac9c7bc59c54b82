"""Look at tests, at plugins and at how a test passed, without calling any code of theirs.

A text of the guard, see `guard`. What a class or an object holds is read by the slots of built-in types,
since its own `__getattribute__` or its metaclass could answer otherwise.
"""

import unittest
from hashlib import blake2b
from sys import modules
from types import FunctionType, GetSetDescriptorType, MethodType
from typing import Any

from hpc_swe.tasks.graders._inside.held import JUDGES
from hpc_swe.tasks.graders._inside.origins import (
    exact,
    files_of,
    get_mro,
    get_title,
    identity,
    is_written,
    knows,
    names_of_class,
    names_of_module,
    origin,
    place,
    plain_names,
    reachable,
    read_codes,
    text_of,
)
from hpc_swe.tasks.graders._inside.report import odd  # in a sandbox, texts above this one

TUNES = frozenset({"longMessage", "maxDiff", "_diffThreshold", "_testMethodDoc", "_testMethodName"})
TUNES |= {"_classSetupFailed", "setUp", "tearDown", "setUpClass", "tearDownClass", "debug"}
TUNES |= {"__module__", "__doc__", "__str__", "__repr__"}
ASKED = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__new__"})
Case, Outcome = unittest.TestCase, unittest.case._Outcome  # type: ignore[attr-defined]  # noqa: SLF001
OF_CASE, RUN = frozenset(vars(Case)), Case.run.__code__
OUTCOME_NAMES = frozenset(vars(Outcome())) | {"expecting_failure"}
COMPARES = dict(vars(Case("run"))["_type_equality_funcs"])
names_of_case, names_of_outcome = (vars(one)["__dict__"].__get__ for one in (Case, Outcome))


def hold_hooks(guard: Any, hooks: Any) -> None:
    """Remember plugins' hooks, once; report those that come from the work tree or from no file."""
    if guard.hooks is not None:
        odd(guard, "plugins are looked at twice")
    guard.hooks = hooks
    for name, _, function in hooks:
        found = reachable(function)
        file = origin(guard, found[0].__code__) if found else ""
        is_ours = type(function) is MethodType and function.__self__ is guard.listener
        if file[:1] != "/" and not (is_ours and identity(found[0].__code__) in guard.callers):
            odd(guard, "a plugin has " + name, file)


def look_at_hooks(guard: Any, now: Any) -> None:
    """Report that a plugin came, went or has another function."""
    pairs = zip(now, guard.hooks)  # noqa: B905
    if len(now) != len(guard.hooks) or any(a[1] is not b[1] or a[2] is not b[2] for a, b in pairs):
        odd(guard, "plugins change while tests run")


def look_at_test(guard: Any, label: str, name: str, function: Any, file: Any = None) -> None:
    """Report the file of the work tree that a test is from, or that the test differs from its file.

    A test whose name its file does not define was made by a loop, a wrapper or a plugin: only code of other
    files of the work tree, or of none, is reported then; a file that calls `exec` may make tests of no file.
    The file is named by `label`, if not by `file`.
    """
    for one in reachable(function):
        if exact(one.__code__.co_name) == exact(name) and is_written(guard, one.__code__):
            _look_at_function(guard, exact(label), one)
            return
    path = exact(file) or guard.root + "/" + exact(label).partition("::")[0]
    if _is_defined(guard, path, exact(name)):
        odd(guard, exact(label) + " differs from its file")
        return
    executes = any("exec" in code.co_names for code in read_codes(guard, place(guard, path)).values())
    for home in files_of(guard, function):
        if home[:1] != "/" and (home or not executes):
            odd(guard, exact(label) + " differs from its file", home)


def _look_at_function(guard: Any, label: str, function: Any) -> None:
    home = place(guard, function.__code__.co_filename)
    if home[:1] != "/":
        odd(guard, "a test is from " + home, home)
    if guard.bottom is not None and guard.tests.setdefault(label, function) is not function:
        odd(guard, label + " is another function")
    names = plain_names(function.__globals__)
    for module in guard.modules.keys() & set(JUDGES) & set(names) - guard.bound:
        if names[module] is not guard.modules[module]:
            odd(guard, "a test's module has another " + module)


def _is_defined(guard: Any, path: str, name: str) -> bool:
    """Return whether a file has a function of this name; without a file, whether any file of tests has."""
    found = place(guard, path)
    return any(one == name for one, _ in read_codes(guard, found)) if found else name in guard.defined


def look_at_parts(guard: Any, *parts: Any) -> None:
    """Report objects of pytest's in which a name hides a function of their class."""
    for part in parts:
        kind = type(part)
        if identity(kind) not in guard.kinds:
            items = [item for one in get_mro(kind) for item in plain_names(names_of_class(one)).items()]
            slots = [value for _, value in items if type(value) is GetSetDescriptorType]
            own = [slot for slot in slots if slot.__name__ == "__dict__"]
            functions = {name for name, value in items if type(value) is FunctionType}
            guard.kinds[identity(kind)] = (kind, functions, own[-1].__get__)
        _, functions, names_of_part = guard.kinds[identity(kind)]
        for name in functions.intersection(plain_names(names_of_part(part))):
            odd(guard, "a part of pytest hides its " + name)


def look_at_names(guard: Any, module: Any, names: Any) -> None:
    """Report a test module in which one of these names stands for another value."""
    found = plain_names(names_of_module(module))
    for name, value in names.items():
        if found.get(name, value) is not value and name not in guard.bound:
            odd(guard, "a test module has another " + name)


def look_at_case(guard: Any, test: Any) -> None:
    """Report names of TestCase that a test, its class or the bases of its class override."""
    own = plain_names(names_of_case(test))
    for name in set(own) & OF_CASE - TUNES:
        codes = [one.__code__ for one in reachable(own[name])]
        is_same = codes and all(knows(guard, one) and exact(one.co_name) == name for one in codes)
        if name.startswith(("assert", "_", "fail", "run")) and not is_same:
            files = [file for file in files_of(guard, own[name]) if file[:1] != "/"]
            odd(guard, "a test hides its " + name, *files)
    for kind in get_mro(type(test)):
        if kind is Case:
            return
        if identity(kind) not in guard.looked_at:
            guard.looked_at[identity(kind)] = kind
            names = plain_names(names_of_class(kind))
            for name in set(names) & (OF_CASE | ASKED) - TUNES:
                _overrides(guard, kind, name, names)


def _overrides(guard: Any, kind: Any, name: str, names: Any) -> None:
    codes = [one.__code__ for one in reachable(names[name])][:3]
    digest = blake2b(b"".join(map(text_of, codes)), digest_size=4).hexdigest()
    module = plain_names(modules).get(exact(names.get("__module__")))
    file = plain_names(names_of_module(module)).get("__file__") if module else None
    files = {origin(guard, code) for code in codes} | {place(guard, file)}
    odd(guard, " ".join([exact(get_title(kind)), "overrides", name, digest]), *sorted(files))


def look_at_pass(guard: Any, test: Any, result: Any, caller: Any) -> None:
    """Check who reports that a test passed, its outcome object, and how the test compares values."""
    if caller is not RUN:
        odd(guard, "addSuccess is called by another", origin(guard, caller))
    names = plain_names(names_of_case(test))
    outcome = names.get("_outcome")
    if type(outcome) is Outcome:
        kept = plain_names(names_of_outcome(outcome))
        if kept.get("result") is not result or kept.get("expectedFailure") is not None:
            odd(guard, "the outcome of a test has another result")
        for name in kept:
            if name not in OUTCOME_NAMES or (name == "errors" and type(kept[name]) is not list):
                odd(guard, "the outcome of a test has another " + name)
    else:
        odd(guard, "a test has another outcome")
    for kind, compare in list(dict.items(names.get("_type_equality_funcs", {}))):
        if not any(kind is one and exact(compare) == COMPARES[one] for one in COMPARES):
            files = {origin(guard, one.__code__) for one in reachable(compare)[:3]} or {""}
            odd(guard, "a test compares " + exact(get_title(kind)) + " in its own way", *sorted(files))
