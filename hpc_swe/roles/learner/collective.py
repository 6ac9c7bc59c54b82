"""Let ranks act together: an answer or an error that all of them must share is shared."""

from collections.abc import Callable
from typing import TypeVar

from hpc_swe.base.errors import HpcSweError
from hpc_swe.models.policies.base import Ranks

T = TypeVar("T")


def on_rank_zero(ranks: Ranks, act: Callable[[], T]) -> T:
    """Call `act` on rank 0; return its answer on every rank, or raise its error on every rank."""
    answer, error = _try(act) if ranks.rank == 0 else (None, None)
    answer, error = ranks.broadcast((answer, error))
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def on_all_ranks(ranks: Ranks, act: Callable[[], T]) -> T:
    """Call `act` on every rank and return each rank its own answer; if any rank raised, all raise."""
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
