"""Detect changes to the code that runs and judges tests, from inside the process that runs them.

This text goes into the sandbox together with `_reporter` or `_runner`, which say when to check. Each finding
is reported as an `odd` entry with the files that it comes from. The grader outside decides what it means,
since a run of the base commit may do the same. The text runs under Python 3.6 and later (audit events: 3.8).
"""

import builtins
import hashlib
import operator
import os
import sys
import types
import unittest
from typing import Any

JUDGES = ("unittest", "_pytest", "pytest", "pluggy")
LOADERS = ("builtins", "_frozen_importlib", "_frozen_importlib_external")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
WRAPPED = (classmethod, staticmethod)
GROWS = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__", "__annotate__", "_abc_cache"})
GROWS |= {"__abstractmethods__", "_abc_impl", "_abc_registry", "_abc_negative_cache"}
GROWS |= {"_classSetupFailed", "tearDown_exceptions"}  # of unittest's class for modules that fail to import
GROWS |= {"_abc_negative_cache_version", "_pytest_diamond_inheritance_warning_shown"}
TUNES = frozenset({"longMessage", "maxDiff", "_diffThreshold", "_testMethodDoc", "_testMethodName"})
TUNES |= {"_classSetupFailed", "setUp", "tearDown", "setUpClass", "tearDownClass", "debug"}
TUNES |= {"__module__", "__doc__", "__str__", "__repr__"}
ASKED = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__new__"})
REACHES = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.settrace"})
REACHES |= {"sys.setprofile", "sys.addaudithook", "ctypes.cdata", "ctypes.PyObj_FromPtr"}
REACHES |= {"sys.monitoring.register_callback", "cpython.PyInterpreterState_New"}
WRITES = os.O_WRONLY | os.O_RDWR
UNHELD = frozenset({"__doc__", "__dict__", "__weakref__"})
MOST_STEPS = 60


class Guard:
    """A guard remembers what was loaded before any code of the work tree, and reports when that changes."""

    def __init__(self, tell: Any, root: str, own: str, files: Any = ()) -> None:
        """Call `tell` with each finding and its places; `own` is this text's file, `files` are the tests'."""
        self._tell, self._root, self._own = tell, root, own
        self._is_watching = True
        self._found: Any = set()
        self._parts: Any = []
        self._functions: Any = []
        self._bodies: Any = ([], [])  # the functions alone, and their codes
        self._cells: Any = []
        self._names: Any = []
        self._seen: Any = set()
        self._codes: Any = {}
        self._known = 0
        self._ours: Any = set()
        self._inner: Any = set()
        self._kept: Any = []  # keeps codes alive, since the id of a deleted one could be given to another
        self._own_codes = [one.__code__ for one in globals().values() if type(one) is types.FunctionType]
        self._compile, self._open, self._frame = builtins.compile, builtins.open, sys._getframe  # noqa: SLF001
        self._any, self._map, self._zip, self._differs = any, map, zip, operator.is_not
        self._code = operator.attrgetter("__code__")
        self._must_compare = not hasattr(sys, "addaudithook")
        self._is_file, self._real = os.path.isfile, os.path.realpath  # noqa: PTH113
        self._case, self._namespace = unittest.TestCase, unittest.TestCase.__mro__[0].__dict__
        self._run = unittest.TestCase.run.__code__
        self._outcome = unittest.case._Outcome  # type: ignore[attr-defined]  # noqa: SLF001
        self._compares = vars(unittest.TestCase("run"))["_type_equality_funcs"]
        self._outcome_names = set(vars(self._outcome())) | {"expecting_failure"}
        for name in dir(self):  # bound to the object, so that changes to the class have no effect on it
            if name[:2] != "__" and isinstance(getattr(self, name), types.MethodType):
                setattr(self, name, getattr(self, name))
        for file in files:
            self._is_written(None, os.path.join(root, file))  # noqa: PTH118

    def learn(self) -> None:
        """Remember the parts of unittest and pytest that are loaded now, in addition to earlier ones."""
        self.hold_values(globals())
        self.hold_values(vars(builtins) if __builtins__ is builtins else __builtins__)
        for name, module in list(sys.modules.items()):
            is_judge = name.partition(".")[0] in JUDGES
            if (is_judge or name in LOADERS) and name not in self._seen:
                self._seen.add(name)
                self._hold("", sys.modules, {name: module})
                found = list(vars(module).items())
                kinds = {key: value for key, value in found if issubclass(type(value), type)}
                others = {key: value for key, value in found if type(value) in FUNCTIONS}
                self._hold(name + ":", vars(module), {**kinds, **others})
                for key, value in others.items():
                    if type(value) is types.FunctionType:
                        self._hold_body(name + ":" + key, value)
                for kind in kinds.values():
                    if str(kind.__module__).partition(".")[0] in JUDGES:
                        self.hold_class(kind)

    def learn_again(self) -> None:
        """Accept what installed plugins have changed in pytest, unless code of the work tree is loaded."""
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        if all(self.place(file)[:1] == "/" for file in files if file):
            self._parts, self._functions, self._names, self._bodies = [], [], [], ([], [])
            self._seen = set()
            self.learn()

    def hold_function(self, function: Any) -> None:
        """Remember a function of the reporter, with the values that it closes over."""
        self._hold_body(function.__name__, function)
        for cell in function.__closure__ or ():
            self._cells.append((function.__name__, cell, cell.cell_contents))

    def hold_values(self, namespace: Any) -> None:
        self._hold("", namespace, dict(namespace))

    def hold_class(self, kind: Any) -> None:
        """Remember everything that a class defines itself."""
        if kind in self._seen:
            return
        self._seen.add(kind)
        space, prefix = vars(kind), kind.__qualname__ + "."
        names = set(space) - GROWS
        self._names.append((kind, names, len(space)))
        held = {key: space[key] for key in names - UNHELD}
        self._hold(prefix, space, held)
        for key, value in held.items():
            value = value.__func__ if type(value) in WRAPPED else value
            for function in (value.fget, value.fset) if type(value) is property else (value,):
                if type(function) is types.FunctionType:
                    self._hold_body(prefix + key, function)

    def _hold(self, prefix: str, namespace: Any, held: Any) -> None:
        self._parts.append((prefix, namespace, tuple(held), tuple(held.values())))

    def _hold_body(self, label: str, function: Any) -> None:
        code = function.__code__
        self._functions.append((label, function, code, function.__defaults__, function.__kwdefaults__))
        for held, value in zip(self._bodies, (function, code)):  # noqa: B905
            held.append(value)

    def check(self) -> None:
        """Compare what is there with what was remembered, by identity: no `__eq__` is called.

        Where an audit event tells that a function is rewritten, defaults are compared only after one.
        """
        functions, codes = self._bodies
        for prefix, owner, keys, values in self._parts:
            if self._any(self._map(self._differs, self._map(owner.get, keys), values)):
                for key in [key for key, value in self._zip(keys, values) if owner.get(key) is not value]:
                    self.odd("replaced " + prefix + key)
        if self._must_compare or self._any(self._map(self._differs, self._map(self._code, functions), codes)):
            self.check_functions()
        for label in [label for label, cell, value in self._cells if cell.cell_contents is not value]:
            self.odd("rewritten " + label)
        for kind, names, size in self._names:
            for name in set(vars(kind)) - names - GROWS if len(vars(kind)) != size else ():
                self.odd("added " + kind.__qualname__ + "." + name)

    def check_functions(self) -> None:
        """Compare the code and the defaults of all functions; without any event, this is due at the end."""
        for label, function, code, defaults, named in self._functions:
            is_same = function.__code__ is code and function.__defaults__ is defaults
            if not is_same or function.__kwdefaults__ is not named:
                self.odd("rewritten " + label)

    def stop_watching(self) -> None:
        """Ignore audit events from now on, since the reporter itself causes them."""
        self._is_watching = False

    def require_judges(self, until: Any) -> None:
        """Check that between here and a frame of ours only the reporter and pytest are on the stack."""
        # Other code could call everything that they call.
        frame: Any = self._frame(1)
        while frame is not until and frame is not None and self._knows(frame.f_code):
            frame = frame.f_back
        if frame is not until:
            self.odd("other code than pytest reports")

    def _knows(self, code: Any) -> bool:
        """Tell whether a code is the reporter's, a remembered one, or of a file outside the work tree."""
        known = self._bodies[1]
        if self._known != len(known):  # it has learned since
            self._known, self._inner = len(known), set()
            self._ours = {id(one) for one in (*self._own_codes, *known)}
        if id(code) in self._ours:
            return True
        if not self._inner:  # also those of functions within functions, which are seldom on the stack
            self._inner = {id(one) for one in _nested([*self._own_codes, *known])}
        if id(code) not in self._inner:
            path = code.co_filename  # not trusted, since code can be compiled under any name
            if self.place(path)[:1] != "/" or path == self._own or not self._is_written(code, path):
                return False
            self._kept.append(code)
        self._ours.add(id(code))
        return True

    def odd(self, what: str, *places: str) -> None:
        """Report a finding once, with the files that it comes from; without any it counts for every patch."""
        key = (what, *places)
        if key not in self._found:
            self._found.add(key)
            self._tell(what, "\n".join(places))

    def event(self, event: str, arguments: Any) -> None:
        """Handle an audit event: report what code under test needs to find us, and tests hardly ever do."""
        if not self._is_watching:
            return
        if event in REACHES:
            self.odd("calls " + event)
        elif event[:7] == "ctypes.":
            self.odd("calls " + event, self._caller("ctypes"))
        elif event == "import" and str.rpartition(arguments[0], ".")[2] in ("ctypes", "_ctypes"):
            self.odd("imports ctypes", self._caller())
        elif event == "open":
            self._opens(*arguments)
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._opens(arguments[0], "", 0)
            self._opens(arguments[1], "", WRITES)
        elif event in ("object.__setattr__", "object.__delattr__"):
            self._must_compare = True
            self._sets(arguments[0], arguments[1])

    def _sets(self, owner: Any, name: str) -> None:
        if name in ("__code__", "__class__", "__bases__"):
            kind = type(owner)
            if kind is types.FunctionType or issubclass(kind, (type, self._case, types.ModuleType)):
                self.odd("sets " + name, self._caller())

    def _opens(self, path: Any, _: Any, flags: int) -> None:
        if issubclass(type(path), bytes):
            path = bytes.decode(path, "utf-8", "replace")
        path = str.__str__(path) if issubclass(type(path), str) else ""
        if path.endswith("/mem") or path == "mem":
            self.odd("opens the memory of a process")
        elif path.endswith(".py") and flags & WRITES:
            place = self.place(path)
            if place and place[0] != "/":
                self.odd("writes " + place)

    def _caller(self, *below: str) -> str:
        """Return the file of the code that caused the audit event, outside of the modules `below`."""
        frame = self._frame(2)
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(("<frozen", self._own))
            or frame.f_globals.get("__name__") in below
        ):
            frame = frame.f_back
        return self.place(frame.f_code.co_filename)

    def place(self, path: str) -> str:
        """Return a path relative to the work tree if it is in there; an empty one if it is not a file."""
        if path == self._own:
            return "/"
        if not self._is_file(path):
            return ""
        path = self._real(path)
        return path[len(self._root) + 1 :] if path.startswith(self._root + "/") else path

    def look_at_function(self, label: str, function: Any) -> None:
        """Report a plugin's hook that comes from the work tree or from no file."""
        codes = self._reachable(function)
        place = self.place(codes[0].co_filename) if codes else ""
        if place[:1] != "/":
            self.odd(label, place)

    def look_at_test(self, label: str, name: str, function: Any) -> None:
        """Report the file of the work tree that a test is from, or that the test differs from its file."""
        for code in self._reachable(function):
            if code.co_name == name and self._is_written(code, code.co_filename):
                place = self.place(code.co_filename)
                if place[:1] != "/":
                    self.odd("a test is from " + place, place)
                return
        self.odd(label + " differs from its file")

    def _reachable(self, function: Any) -> Any:
        """Return the code of a function, and of the functions that it wraps or closes over."""
        codes: Any = []
        queue = [function]
        for _ in range(MOST_STEPS):
            if not queue:
                break
            one = queue.pop(0)
            one = getattr(one, "__func__", one)
            if type(one) is types.FunctionType:
                codes.append(one.__code__)
                queue += [vars(one)["__wrapped__"]] if "__wrapped__" in vars(one) else []
                queue += self._contents(one)
            elif type(one).__name__ in ("partial", "partialmethod"):
                queue.append(one.func)
        return codes

    @staticmethod
    def _contents(function: Any) -> Any:
        found = []
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # empty
                continue
        return found

    def _is_written(self, code: Any, path: str) -> bool:
        """Tell whether a code is that of a file's text, apart from what pytest adds to assertions."""
        path = self._real(path)
        if path not in self._codes:
            self._codes[path] = {}
            try:
                with self._open(path, "rb") as file:
                    queue = [self._compile(file.read(), path, "exec", 0, True)]
            except (OSError, SyntaxError, ValueError):
                queue = []
            while queue:
                one = queue.pop()
                self._codes[path][one.co_name, one.co_firstlineno] = one
                queue += [const for const in one.co_consts if type(const) is types.CodeType]
        plain = self._codes[path].get((code.co_name, code.co_firstlineno)) if code else None
        if plain is None:
            return False
        # Rewritten assertions add to a code, but take nothing away and leave it at its line.
        return (
            set(plain.co_names) <= set(code.co_names)
            and set(plain.co_varnames) <= set(code.co_varnames)
            and set(map(repr, plain_consts(plain))) <= set(map(repr, code.co_consts))
            and len(code.co_code) >= len(plain.co_code)
        )

    def look_at_case(self, test: Any) -> None:
        """Report names of TestCase that a test, its class or the bases of its class override."""
        for name in set(vars(test)) & set(self._namespace) - TUNES:
            if name.startswith(("assert", "_", "fail", "run")):
                self.odd("a test hides its " + name)
        for kind in type(test).__mro__:
            if kind is self._case:
                return
            if kind in self._seen:
                continue
            self._seen.add(kind)
            for name in set(vars(kind)) & (set(self._namespace) | ASKED) - TUNES:
                self._overrides(kind, name, vars(kind)[name])

    def look_at_pass(self, test: Any, result: Any, caller: Any) -> None:
        """Check who reports that a test passed, its outcome object, and how the test compares values."""
        if caller is not self._run:
            self.odd("addSuccess is called by another", self.place(caller.co_filename))
        outcome = vars(test).get("_outcome")
        if type(outcome) is self._outcome:
            kept = vars(outcome)
            if kept.get("result") is not result or kept.get("expectedFailure") is not None:
                self.odd("the outcome of a test has another result")
            for name in kept:
                if name not in self._outcome_names or (name == "errors" and type(kept[name]) is not list):
                    self.odd("the outcome of a test has another " + name)
        else:
            self.odd("a test has another outcome")
        for kind, compare in list(vars(test).get("_type_equality_funcs", {}).items()):
            if type(compare) is not str or compare != self._compares.get(kind):
                codes = self._reachable(compare)
                places = {self.place(code.co_filename) for code in codes[:3]} or {""}
                self.odd("a test compares " + kind.__name__ + " in its own way", *sorted(places))

    def _overrides(self, kind: Any, name: str, value: Any) -> None:
        codes = self._reachable(value)
        digest = hashlib.blake2b(b"".join(map(text_of, codes[:3])), digest_size=4).hexdigest()
        files = [code.co_filename if self._is_written(code, code.co_filename) else "" for code in codes[:3]]
        files.append(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
        places = {self.place(path) for path in files}
        self.odd(" ".join([kind.__qualname__, "overrides", name, digest]), *sorted(places))

    def look_at_names(self, module: Any, names: Any) -> None:
        """Report a test module in which one of these names stands for another value."""
        for name, value in names.items():
            if vars(module).get(name, value) is not value:
                self.odd("a test module has another " + name)


def _nested(codes: Any) -> Any:
    for code in codes:  # the loop extends the list
        codes += [const for const in code.co_consts if type(const) is types.CodeType]
    return codes


def plain_consts(code: Any) -> Any:
    """Return the constants of a code whose texts are equal in every process."""
    return [const for const in code.co_consts if type(const) in (int, str, float, bytes)]


def text_of(code: Any) -> bytes:
    """Return a text of a code's instructions, names and plain constants, equal in every process."""
    return bytes(code.co_code + repr((code.co_names, plain_consts(code))).encode())
