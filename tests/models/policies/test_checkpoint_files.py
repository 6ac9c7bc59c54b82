"""Files of a checkpoint whose values are written after them."""

import io
import queue

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType  # noqa: E402

from hpc_swe.base.errors import ProtocolError  # noqa: E402
from hpc_swe.models.policies._megatron.state.checkpoint_files import CheckpointFiles  # noqa: E402
from hpc_swe.models.policies._megatron.state.gathered import ByParameter  # noqa: E402
from hpc_swe.models.policies._megatron.weights.tensor_writer import BUFFER, TensorWriter  # noqa: E402


def bucket(path, tensors):
    items = [WriteItem(MetadataIndex(str(n)), WriteItemType.TENSOR) for n in range(len(tensors))]
    return str(path), path.name, ([], list(zip(items, tensors, strict=True)))


def test_values_of_any_form_and_of_any_pieces_arrive_in_their_places(tmp_path):
    """Beside tensors of this rank stand parts of a buffer, with gaps between them, that ranks gather."""
    large = torch.arange(BUFFER // 4 + 9, dtype=torch.int32)  # written in two pieces
    values, matrix = torch.arange(40.0), torch.arange(12.0).view(3, 4)
    buffer = ByParameter(40, {3, 11, 20})
    parts = [buffer[slice(3, 9)].view(2, 3), buffer[slice(11, 12)], *buffer[slice(20, 40)].chunk(2)]
    others = [
        large,
        matrix,
        matrix.t(),
        torch.zeros(0),
        torch.tensor(5, dtype=torch.int16),
        matrix[1:].bfloat16(),
    ]
    expected = [values[3:9].view(2, 3), values[11:12], values[20:30], values[30:], *others]
    results, path = queue.Queue(), tmp_path / "file"
    with CheckpointFiles() as files, TensorWriter(64) as writer:
        files.write_files([], False, 0, [bucket(path, [*parts, *others])], results)
        shared = files.shared(buffer.whole)
        for first in range(0, 40, 7):
            piece = values[first : first + 7].clone()
            shared.write(first, piece, writer)
            piece.fill_(-1)  # as the next pieces overwrite it
        files.write_own(writer)
        files.finish(writer)
    data, places = path.read_bytes(), [each.storage_data for each in results.get()[0]]
    found = [torch.load(io.BytesIO(data[each.offset : each.offset + each.length])) for each in places]
    for tensor, wanted in zip(found, expected, strict=True):
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)


def test_scattered_values_of_a_buffer_are_refused(tmp_path):
    part, results = ByParameter(12, {0})[slice(0, 12)].view(3, 4).t(), queue.Queue()
    with CheckpointFiles() as files:
        files.write_files([], False, 0, [bucket(tmp_path / "file", [part])], results)
    assert isinstance(error := results.get(), ProtocolError)
    assert "48 bytes" in str(error)


def test_values_that_no_rank_gathered_are_missed(tmp_path):
    """Zeros would stand in their place."""
    buffer = ByParameter(40, {3, 20})
    parts = [buffer[slice(3, 9)], buffer[slice(20, 40)]]
    with CheckpointFiles() as files, TensorWriter(64) as writer:
        files.write_files([], False, 0, [bucket(tmp_path / "file", parts)], queue.Queue())
        files.shared(buffer.whole).write(0, torch.zeros(39), writer)
        with pytest.raises(ProtocolError, match="100 bytes of 104"):
            files.finish(writer)
