"""Define what all records have in common: their base, their names of roles and versions, and token arrays.

Token arrays are little-endian bytes, int32 or float32: `ids` and `floats` pack them, `id_array` and
`float_array` view them.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

Ids = Annotated[bytes, Meta(description="int32, little endian")]
Floats = Annotated[bytes, Meta(description="float32, little endian")]
Routing = Annotated[bytes, Meta(description="uint8 [tokens, layers * k], the experts of each token")]
FREE = 255  # in a Routing: the learner's own router decides, as it does for all where a Routing is empty
Split = Literal["eval", "train"]
Role = Literal["coordinator", "rollout", "reward", "inference", "learner"]
Outcome = Literal["resolved", "unresolved", "no_submission", "cheated", "infra_error"]
IdArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


def ids(values: Iterable[int] | IdArray) -> Ids:
    """Pack token ids as little-endian int32."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<i4").tobytes()


def floats(values: Iterable[float] | FloatArray) -> Floats:
    """Pack log-probabilities, advantages or weights as little-endian float32."""
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<f4").tobytes()


def id_array(data: Ids) -> IdArray:
    """Return packed ids as a read-only int32 view [tokens]."""
    return np.frombuffer(data, dtype="<i4")


def float_array(data: Floats) -> FloatArray:
    """Return packed numbers as a read-only float32 view [tokens]."""
    return np.frombuffer(data, dtype="<f4")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This is the base of all records; each repeats ``frozen, kw_only`` for type checkers."""


class WeightVersion(Record, frozen=True, kw_only=True, order=True):
    """Name a version of the weights: the learner's incarnation, which each start increases, then its step."""

    incarnation: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        """Return the name of the folder in weights/, which engines report too: ``v000012-i01``."""
        return f"v{self.step:06d}-i{self.incarnation:02d}"

    @classmethod
    def parse(cls, name: str) -> "WeightVersion":
        """Parse a `name`; raise ValueError if it is not the name of a version."""
        step, _, incarnation = name.removeprefix("v").partition("-i")
        if step.isdecimal() and incarnation.isdecimal():
            version = cls(step=int(step), incarnation=int(incarnation))
            if version.name == name:
                return version
        raise ValueError(f"{name!r} is not a weight version such as v000012-i01")
