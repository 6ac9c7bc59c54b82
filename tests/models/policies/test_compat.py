"""Every mend of compat.py is still needed; one that is not must go."""

import json

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from tests.kit.ranks import launcher, tiny  # noqa: E402

DEFECTS = [
    "undefined name in the router",
    "helper process",
    "no marks on shards",
    "no state before a step",
    "one step count for all",
    "many copies of the state",
    "last files fail on rank 0 alone",
    "writers clone parts",
    "all tensors go to the host first",
    "writers are forked",
    "norms of many values are wrong on a CPU",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model = tiny.make_models(tmp_path_factory.mktemp("models"))["dense"]
    (output,) = launcher.launch(1, "defects", str(model))
    return json.loads(output.rpartition("FOUND ")[2])


@pytest.mark.parametrize("defect", DEFECTS)
def test_megatron_core_still_has(found, defect):
    assert found[defect], f"megatron-core no longer has: {defect}; remove its mend from compat.py"


def test_no_defect_is_forgotten(found):
    assert found.keys() == set(DEFECTS)
