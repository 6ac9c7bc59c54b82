"""The kernel of digests gives what torch gives."""

import pytest
import torch

pytest.importorskip("triton", reason="tests/kit/install_triton.sh installs it")

from hpc_swe.plugins.digest_kernels import weighted_sums  # noqa: E402
from hpc_swe.plugins.tensor_delta import Digests, Rectangle, integers  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (9, 1024), (4, 2100)])
def test_the_sums_of_rows_make_up_the_digest(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensor, digests = torch.randn(shape).to(dtype), Digests(torch.device("cpu"))
    at = Rectangle(11, 7, *shape)
    rows, columns = (
        each.get(first, count).to(DEVICE)
        for each, first, count in (
            (digests._rows, at.row, at.rows),
            (digests._columns, at.column, at.columns),
        )
    )
    found = weighted_sums(integers(tensor.to(DEVICE)), rows, columns).sum()
    assert int(found) == int(digests.part(tensor, at))


def test_a_part_of_a_wider_tensor_has_the_digest_of_its_values() -> None:
    wide, digests = torch.randn(6, 40), Digests(torch.device("cpu"))
    part, at = wide[1:4, 8:30], Rectangle(0, 0, 3, 22)
    rows, columns = digests._rows.get(0, 3).to(DEVICE), digests._columns.get(0, 22).to(DEVICE)
    found = weighted_sums(integers(wide.to(DEVICE))[1:4, 8:30], rows, columns).sum()
    assert int(found) == int(digests.part(part.contiguous(), at))
