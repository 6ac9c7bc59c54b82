"""Compare, outside the sandbox, what tests computed with what they expect, as Python itself would.

An answer is the JSON of `_runner.plain`. It comes from a process that runs hostile code, so nothing in it is
trusted but that who writes the right answer knows it.
"""

import cmath
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final

import msgspec

from hpc_swe.tasks.graders._inside.runner import MOST_CHARACTERS, plain, shortened

OPAQUE: Final = '["?",'
"""Begins the answer for a value that only the process itself could compare."""
_LONG: Final = '["#",'
"""Begins the digest of a long answer, which can only be compared for equality."""
_RATIO = re.compile(r"(-?[0-9a-f]+)(?:/([0-9a-f]+))?")
_Tolerance = Callable[[complex, complex], float]


@dataclass(frozen=True)
class Check:
    """A check says how an answer must relate to the expected values, which stay outside the sandbox."""

    how: str
    """A key of `_RELATIONS`."""
    expected: tuple[object, ...]

    def accepts(self, answer: str) -> bool:
        """Return whether an answer is right; one that cannot be compared is wrong."""
        if self.how == "==":
            return answer == shortened(plain(self.expected[0]))
        if len(answer) > MOST_CHARACTERS or answer.startswith((OPAQUE, _LONG)):
            return False
        try:
            return bool(_RELATIONS[self.how](msgspec.json.decode(answer), *self.expected))
        except (msgspec.MsgspecError, ValueError, TypeError, IndexError, ArithmeticError, RecursionError):
            return False

    def is_opaque(self, answer: str) -> bool:
        """Return whether only the process itself could compare what is answered."""
        is_long = answer.startswith(_LONG) and self.how != "=="
        return (OPAQUE in answer or is_long) and not self.accepts(answer)


def is_plain(value: object) -> bool:
    """Return whether a value can be compared outside the sandbox; no number that equals nothing can."""
    text = plain(value)
    return OPAQUE not in text and '"nan"' not in text


def _json(value: object) -> object:
    return msgspec.json.decode(plain(value))


def _number(found: object) -> Fraction | float:
    """Decode a real number; raise ValueError for any other value."""
    match found:
        case ["=", ("inf" | "-inf" | "nan") as text]:
            return float(text)
        case ["=", str(text)] if ratio := _RATIO.fullmatch(text):
            return Fraction(int(ratio[1], 16), int(ratio[2] or "1", 16))
    raise ValueError("not a real number")


def _scalar(found: object) -> complex:
    match found:
        case ["j", real, imaginary]:
            return complex(float(_number(real)), float(_number(imaginary)))
    return float(_number(found))


def _ordered(found: object) -> object:
    """Decode a value that has an order: a number, a text, or a list or tuple of such."""
    match found:
        case str():
            return found
        case ["l" | "t", *members]:
            return [_ordered(one) for one in members]
    return _number(found)


def _members(found: object) -> Sequence[object]:
    match found:
        case str():
            return [*found]
        case ["l" | "t" | "s", *members]:
            return members
        case ["d", *pairs]:
            return pairs[::2]
    raise ValueError("no container")


def _has(found: object, part: object) -> bool:
    if isinstance(found, str):
        return isinstance(part, str) and part in found
    match found:
        case ["b", str(text)] if isinstance(part, bytes):
            return part in bytes.fromhex(text)
    return _json(part) in _members(found)


def _in(found: object, container: object) -> bool:
    if isinstance(container, str):
        return isinstance(found, str) and found in container
    return found in _members(_json(container))


def _differs(found: object, other: object) -> bool:
    match found:
        case ["?", _]:
            return False
    return found != _json(other)


def _same_members(found: object, expected: object) -> bool:
    def count(members: Sequence[object]) -> Counter[bytes]:
        return Counter(msgspec.json.encode(one) for one in members)

    return count(_members(found)) == count(_members(_json(expected)))


def _compares(compare: Callable[[object, object], bool]) -> Callable[[object, object], bool]:
    return lambda found, limit: compare(_ordered(found), _ordered(_json(limit)))


def _near(found: object, expected: object, tolerance: _Tolerance) -> bool:
    """Compare numbers, alone or in lists or dictionaries, as `pytest.approx` does."""
    match expected:
        case list() | tuple():
            members = _members(found)
            pairs = zip(members, expected, strict=False)
            return len(members) == len(expected) and all(_near(one, other, tolerance) for one, other in pairs)
        case dict():
            _, *flat = found if isinstance(found, list) and found[:1] == ["d"] else [None, None]
            values = {msgspec.json.encode(key): one for key, one in zip(flat[::2], flat[1::2], strict=True)}
            keys = {msgspec.json.encode(_json(key)): one for key, one in expected.items()}
            return values.keys() == keys.keys() and all(
                _near(values[key], one, tolerance) for key, one in keys.items()
            )
        case int() | float() | complex() | Decimal() | Fraction():
            return _is_near(_scalar(found), _scalar(_json(expected)), tolerance)
    return found == _json(expected)


def _is_near(one: complex, other: complex, tolerance: _Tolerance) -> bool:
    is_finite = cmath.isfinite(one) and cmath.isfinite(other)  # else each tolerance would be infinite
    return one == other or (is_finite and abs(one - other) <= tolerance(one, other))


def _approx(found: object, expected: object, rel: object, abs_: object) -> bool:
    """Compare as `pytest.approx`: an absolute tolerance alone switches the relative one off."""
    least = float(_number(_json(abs_))) if abs_ is not None else 1e-12
    share = float(_number(_json(rel))) if rel is not None else 1e-6 if abs_ is None else 0.0
    return _near(found, expected, lambda _, other: max(share * abs(other), least))


def _isclose(found: object, expected: object, rel: object, abs_: object) -> bool:
    share, least = (float(_number(_json(one))) for one in (rel, abs_))
    return _near(found, expected, lambda one, other: max(share * max(abs(one), abs(other)), least))


def _almost(found: object, expected: object, places: object, delta: object) -> bool:
    number, right = _scalar(found), _scalar(_json(expected))
    if delta is not None:
        return abs(number - right) <= float(_number(_json(delta)))
    return number == right or round(abs(number - right), int(_number(_json(places)))) == 0


def _both(found: object, first: str, low: object, second: str, high: object) -> bool:
    return bool(_RELATIONS[first](found, low) and _RELATIONS[second](found, high))


def _within(found: object, expected: object, distance: object, how: str) -> bool:
    away, most = abs(_scalar(found) - _scalar(_json(expected))), float(_number(_json(distance)))
    return away < most or (how == "<=" and away == most)


_RELATIONS: Mapping[str, Callable[..., object]] = {
    "!=": _differs,
    "in": _in,
    "not in": lambda found, container: not _in(found, container),
    "has": _has,
    "has not": lambda found, part: not _has(found, part),
    "<": _compares(operator.lt),  # type: ignore[arg-type]
    "<=": _compares(operator.le),  # type: ignore[arg-type]
    ">": _compares(operator.gt),  # type: ignore[arg-type]
    ">=": _compares(operator.ge),  # type: ignore[arg-type]
    "counts": _same_members,
    "approx": _approx,
    "isclose": _isclose,
    "almost": _almost,
    "within": _within,
    "both": _both,
}
"""Relation -> function of a decoded answer and the expected values."""
