"""Files of tensors that several threads write."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from safetensors.torch import load_file  # noqa: E402

from hpc_swe.models.policies._megatron.weights.tensor_file import TOGETHER, TensorFiles  # noqa: E402
from hpc_swe.models.policies._megatron.weights.tensor_writer import joined  # noqa: E402


def test_small_tensors_that_share_a_write_are_read_back_one_by_one(tmp_path):
    """Beside ones without values and large ones, in files that each have a part of the bytes."""
    torch.manual_seed(0)
    sizes = [3, 0, 5, TOGETHER // 2, 7, TOGETHER, 1, 11] * 3
    tensors = {
        f"{i}": torch.randint(0, 100, (size,), dtype=(torch.uint8, torch.int16)[i % 2])
        for i, size in enumerate(sizes)
    }
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    files = TensorFiles(paths, list(tensors))
    files.add(dict(list(tensors.items())[:10]))
    files.add(dict(list(tensors.items())[10:]))
    files.finish()
    found = [load_file(path) for path in paths]
    assert {name: path.name for path, part in zip(paths, found, strict=True) for name in part} == files.where
    read = found[0] | found[1]
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert files.size == sum(tensor.nbytes for tensor in tensors.values())
    assert min(sum(tensor.nbytes for tensor in part.values()) for part in found) > files.size / 4


@pytest.mark.parametrize("room", [1, 4, 7, 100])
def test_parts_of_a_buffer_hold_all_bytes_after_copies_have_ended(room):
    tensors = [torch.arange(n, dtype=torch.uint8) for n in (3, 0, 20, 4, 1)]
    waits = []
    parts = [
        part.tolist()
        for part in joined(tensors, torch.zeros(room, dtype=torch.uint8), lambda: waits.append(1))
    ]
    assert sum(parts, []) == torch.cat(tensors).tolist()
    assert len(parts) == len(waits) <= -(-28 // room) + len(tensors)
