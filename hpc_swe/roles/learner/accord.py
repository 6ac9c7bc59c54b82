"""How ranks act as one: what one of them may not decide or survive alone is shared."""

from collections.abc import Callable
from typing import TypeVar

from hpc_swe.errors import HpcSweError
from hpc_swe.plugins.policies.base import Ranks

T = TypeVar("T")


def on_rank_zero(ranks: Ranks, act: Callable[[], T]) -> T:
    """Rank 0 acts; every rank gets what it returned, or raises what it raised."""
    answer, error = _try(act) if ranks.rank == 0 else (None, None)
    answer, error = ranks.broadcast((answer, error))
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def on_all_ranks(ranks: Ranks, act: Callable[[], T]) -> T:
    """Every rank acts and gets its own answer; if any raised, all raise."""
    answer, error = _try(act)
    for failure in ranks.gather(error):
        if failure is not None:
            raise failure
    return answer  # type: ignore[return-value]


def _try(act: Callable[[], T]) -> tuple[T | None, HpcSweError | None]:
    try:
        return act(), None
    except HpcSweError as error:
        return None, error
