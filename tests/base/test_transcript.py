"""An episode is shown as text, whatever a policy wrote."""

import pytest

from hpc_swe.base.records import ToolCall
from hpc_swe.base.transcript import arguments


@pytest.mark.parametrize("depth", [10, 900, 990, 5_000, 200_000])
def test_arguments_of_any_depth_are_shown(depth):
    """Python reads some values that it cannot write: both have limits of their own."""
    for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        found = arguments(ToolCall(name="view", arguments=f'{{"path": {deep}}}'))
        assert found is None or len(found[0][1]) >= 2 * depth
