"""The script of routing replay, at the sizes of a CPU."""

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.bench import routing_gap  # noqa: E402


def test_replay_takes_the_other_choices_of_routers_out_of_the_gap(tmp_path):
    found = {name: (replayed, free) for name, replayed, free in routing_gap.measure(tmp_path)}
    print(found)
    for name in ("gap/max", "gap/k3"):
        replayed, free = found[name]
        assert 0 < replayed < free / 1.5
