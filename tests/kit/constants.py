"""Classes of plugins with other constants than they ship with."""

from typing import TypeVar

T = TypeVar("T")


def varied(kind: type[T], **constants: object) -> type[T]:
    """Return a plugin's class of the same name with other class variables."""
    unknown = [name for name in constants if name not in vars(kind)]
    assert not unknown, f"{kind.__name__} has no {unknown}"
    return type(kind)(kind.__name__, (kind,), constants, frozen=True, kw_only=True)
