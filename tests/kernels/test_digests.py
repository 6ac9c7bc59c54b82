"""The kernel of digests gives what torch gives."""

import pytest
import torch

pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")

from hpc_swe.models.deltas.digest_kernels import RectangleSums, weighted_sums  # noqa: E402
from hpc_swe.models.deltas.tensor_delta import Digests, Rectangle, integers  # noqa: E402

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


def test_rectangles_of_all_sizes_are_added_up_at_once() -> None:
    """Aligned or not, longer than a tile, within wider rows, empty, and of any size of values."""
    torch.manual_seed(0)
    wide, long = torch.randn(40, 5000).bfloat16().to(DEVICE), torch.randn(33, 2049).to(DEVICE)
    parts = [
        (wide, Rectangle(0, 0, 40, 5000)),
        (wide[3:20, 8:3000], Rectangle(5, 7, 17, 2992)),
        (wide[3:20, 9:3001], Rectangle(5, 8, 17, 2992)),
        (long, Rectangle(1, 1, 33, 2049)),
        (long[:8, :6].t(), Rectangle(0, 0, 6, 8)),
        (long[:0], Rectangle(0, 0, 0, 2049)),
        (long[:, 5:6], Rectangle(9, 0, 33, 1)),
        (torch.randn(1, 9001).to(DEVICE), Rectangle(0, 100, 1, 9001)),
        (torch.randint(0, 256, (20, 48), dtype=torch.uint8, device=DEVICE), Rectangle(3, 0, 20, 48)),
    ]
    digests = Digests(torch.device("cpu"))
    sums = RectangleSums([(integers(part), (at.row, at.column)) for part, at in parts])
    rows, columns = digests.weights([Rectangle(0, 0, *sums.shape)])
    found = sums.add_up(rows.to(DEVICE), columns.to(DEVICE)).tolist()
    wanted = [int(digests.part(part.cpu(), at)) for part, at in parts]
    assert sums.left_out == [4]
    assert found == [0 if i == 4 else digest for i, digest in enumerate(wanted)]
