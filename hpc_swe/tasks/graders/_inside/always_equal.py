"""Find classes whose values equal nearly anything, from inside the process that ran the tests.

This text goes into the sandbox together with `reporter`. It runs under Python 3.6 and later.
"""

import gc
import os
import sys
import types
from typing import Any

HEAP = 1 << 9  # the flag of classes that no C source lists
MOST = 2  # of five probes that an honest value may equal


def always_equal_classes(root: str) -> Any:
    """Find classes whose values equal nearly anything, so that any test would pass: name -> its files.

    Paths in the work tree are relative to it; an empty path stands for code that is in no file. Classes that
    come only from files outside the work tree are skipped.
    """
    found = {}
    # Not isinstance: it would ask proxies what they stand for, and so make them.
    for kind in [thing for thing in gc.get_objects() if issubclass(type(thing), type)]:
        try:
            owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
            if not owner.__flags__ & HEAP or all(place[:1] == "/" for place in _places(kind, owner, root)):
                continue
            always_equal = next((one for one in (owner, kind) if _equals_most(one)), None)
            if always_equal is not None:
                name = str(vars(always_equal)["__module__"]) + ":" + always_equal.__qualname__
                found[name] = _places(always_equal, owner, root)
        except Exception:  # noqa: BLE001, S112  (it is not an ordinary class)
            continue
    return sorted(found.items())


def _places(kind: Any, owner: Any, root: str) -> Any:
    code = getattr(vars(owner)["__eq__"], "__code__", None)
    module = sys.modules.get(vars(kind)["__module__"])
    places = {getattr(module, "__file__", None) or ""} | ({code.co_filename} if code else set())
    paths = {os.path.realpath(place) if os.path.isfile(place) else "" for place in places}  # noqa: PTH113
    return sorted(path[len(root) + 1 :] if path.startswith(root + "/") else path for path in paths)


def _equals_most(kind: Any) -> bool:
    """Return whether a value of this class, not made by the class's own code, equals most probes."""
    news = (vars(base).get("__new__") for base in kind.__mro__)
    value = next(new for new in news if type(new) is types.BuiltinFunctionType)(kind)
    if hasattr(value, "__dict__"):
        value.__dict__["another probe"] = 0  # else it could equal values without attributes
    number = int.from_bytes(os.urandom(4), "big")
    equal = 0
    for probe in (object(), number, str(number), [number], type("Probe", (), {"number": number})()):
        try:
            equal += bool(value == probe)
        except Exception:  # noqa: BLE001, S112  (it read the value, as it should)
            continue
    return equal > MOST
