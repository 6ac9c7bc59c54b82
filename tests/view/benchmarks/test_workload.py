"""All ranks of a benchmark train the same packs, and the mask has the share that was asked for."""

import numpy as np
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.view.benchmarks.workload import Workload, parse_lengths


def test_lengths_are_read():
    assert parse_lengths("8192x2, 1024,1024") == [8192, 8192, 1024, 1024]


@pytest.mark.parametrize("text", ["", "8k", "64x0", "1", "64,,32", "-5"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="--lengths"):
        parse_lengths(text)


def work(**changes) -> Workload:
    return Workload(**{"lengths": [1024, 512], "mask_share": 0.25, "packs": 4, "vocab": 100} | changes)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_the_mask_has_its_share_and_no_first_token(share):
    mask = work(mask_share=share).mask([1024, 512])
    assert mask.mean() == pytest.approx(share, abs=0.003)
    assert not mask[[0, 1024]].any()


@pytest.mark.parametrize("vary", [False, True])
def test_any_number_of_data_ranks_trains_the_same_packs(vary):
    alone = work(vary=vary).batch(3, 0, 1).microbatches
    pairs = [work(vary=vary).batch(3, rank, 2).microbatches for rank in range(2)]
    assert [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]] == alone
    weights = sum(np.frombuffer(micro.weights, "<f4").sum() for micro in alone)
    assert weights == pytest.approx(1.0, abs=1e-4)
