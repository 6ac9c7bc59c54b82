"""What the demo reads for each of its stages."""

import pytest

from hpc_swe.demo.__main__ import of_stage
from tests.kit.checkout import ROOT

GIVEN = str(ROOT / "configs/demo_two_gpus.toml")


def test_a_file_of_overrides_has_another_beside_it_for_one_stage():
    assert list(of_stage([GIVEN, "seed=3"], ["demo_sft"])) == [
        GIVEN,
        str(ROOT / "configs/demo_two_gpus_sft.toml"),
        "seed=3",
    ]


@pytest.mark.parametrize("files", [[], ["demo_eval"]])
def test_a_stage_without_a_file_of_its_own_takes_the_overrides_as_they_are(files):
    assert list(of_stage([GIVEN, "seed=3"], files)) == [GIVEN, "seed=3"]
