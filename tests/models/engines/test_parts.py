"""Digests of parts that several workers hold."""

import pytest

from hpc_swe.models.deltas.tensor_delta import Rectangle, text
from hpc_swe.models.engines._vllm.parts import JoinedParts

WHOLES = {"split": Rectangle(0, 0, 4, 6), "replicated": Rectangle(0, 0, 1, 6)}
NORM = ("replicated", WHOLES["replicated"])
PARTS = [[("split", Rectangle(0, 0, 4, 2)), NORM], [NORM, ("split", Rectangle(0, 2, 4, 4)), NORM]]


def test_parts_are_added_and_replicas_count_once() -> None:
    joined = JoinedParts(WHOLES, PARTS)
    assert joined.add_up([[3, 7], [7, -5, 7]]) == {"split": -2, "replicated": 7}
    largest = (1 << 63) - 1
    found = joined.add_up([[largest, 0], [0, largest, 0]])
    assert text(found["split"]) == text(2 * largest)


def test_replicas_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="replicated: two copies of the same part differ"):
        JoinedParts(WHOLES, PARTS).add_up([[3, 7], [7, -5, 8]])


@pytest.mark.parametrize("parts", [PARTS[:1], [*PARTS, [("split", Rectangle(1, 0, 1, 6))]]])
def test_workers_that_hold_less_or_more_than_a_tensor_are_refused(parts: list) -> None:
    with pytest.raises(ValueError, match="split: workers do not hold each of its values exactly once"):
        JoinedParts(WHOLES, parts)
