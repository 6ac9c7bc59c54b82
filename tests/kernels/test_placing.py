"""Kernels that change all parts of all tensors at once, and add up digests, give what torch gives."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="tests/kit/install_packages.sh installs it")

from hpc_swe.models.deltas import delta_kernels  # noqa: E402
from hpc_swe.models.deltas.placing_kernels import MemoryTables, moved, place_all  # noqa: E402
from hpc_swe.models.deltas.tensor_delta import Changes, Rectangle, encode, integers  # noqa: E402
from hpc_swe.models.engines._vllm.copies import Copy, LoaderCopies  # noqa: E402
from hpc_swe.models.engines._vllm.files import Delta  # noqa: E402
from tests.kernels.test_deltas import cases, stepped  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = delta_kernels.BLOCK = 128
types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
Tensors = dict[str, Tensor]
Copies = dict[str, list[Copy]]


def rectangle(tensor: Tensor, at: Rectangle) -> Tensor:
    rows = tensor.view(-1, tensor.shape[-1])
    return rows[at.row : at.row + at.rows, at.column : at.column + at.columns]


def checkpoint(*dtypes: torch.dtype, experts: int = 5) -> Tensors:
    torch.manual_seed(0)
    shapes = {"norm": (130,), "embedding": (60, 40), "query": (12, 40), "key": (4, 40), "output": (40, 24)}
    shapes |= {f"up.{i}": (12, 40) for i in range(experts)} | {f"down.{i}": (40, 12) for i in range(experts)}
    return {f"{n}.{dtype}": torch.randn(shape).to(dtype) for dtype in dtypes for n, shape in shapes.items()}


def places(experts: int, dtype: torch.dtype) -> dict[str, list[tuple[Rectangle, Tensor]]]:
    """Memory as loaders fill it: parts, replicas, fused and stacked tensors, and one that is transposed."""
    fused = torch.zeros(21, 40, dtype=dtype, device=DEVICE)
    ups, downs, wide = (fused.new_zeros(s) for s in ((experts, 24, 40), (experts, 40, 12), (40, 31)))
    found = {
        "norm": [(Rectangle(0, 0, 1, 130), fused.new_zeros(1, 130)), (Rectangle(0, 3, 1, 9), wide[:1, 7:16])],
        "embedding": [(Rectangle(20, 0, 40, 40), fused.new_zeros(40, 40))],
        "query": [(Rectangle(0, 0, 12, 40), fused[:12])],
        "key": [(Rectangle(0, 0, 4, 40), fused[12:16]), (Rectangle(0, 0, 4, 40), fused[17:21])],
        "output": [
            (Rectangle(0, 5, 40, 13), wide[:, 18:]),
            (Rectangle(2, 0, 33, 24), wide.new_zeros(24, 33).t()),
        ],
    }
    found |= {f"up.{i}": [(Rectangle(0, 0, 12, 40), ups[i, 12:])] for i in range(experts)}
    return found | {f"down.{i}": [(Rectangle(0, 4, 40, 8), downs[i, :, :8])] for i in range(experts)}


def laid_out(tensors: Tensors) -> Copies:
    dtypes = list(dict.fromkeys(each.dtype for each in tensors.values()))
    experts = sum(name.startswith("up") for name in tensors) // len(dtypes)
    copies = {
        f"{name}.{dtype}": [Copy(at, view) for at, view in parts]
        for dtype in dtypes
        for name, parts in places(experts, dtype).items()
    }
    for name, copy in ((name, copy) for name, several in copies.items() for copy in several):
        copy.target.copy_(rectangle(tensors[name], copy.source))
    return copies


def loader(tensors: Tensors, copies: Copies, has_kernels: bool) -> LoaderCopies:
    return LoaderCopies({name: list(each.shape) for name, each in tensors.items()}, copies, has_kernels)


def trained(tensors: Tensors, share: float) -> Tensors:
    """Another version, of which the values of some tensors are all the same, and others get larger ones."""
    changed = {}
    for i, (name, each) in enumerate(tensors.items()):
        places = (torch.rand(each.numel()) < (0, share, share / 50)[i % 3]).nonzero().view(-1)
        changed[name] = stepped(each, places.tolist())
    return changed


def delta(old: Tensors, new: Tensors) -> Delta:
    found = {name: encode(old[name], new[name]) for name in old}
    changes = {name: each.to(DEVICE) for name, each in found.items() if each is not None}
    return Delta(changes, {name: new[name] for name, each in found.items() if each is None})


def bits_of_memory(copies: Copies) -> list[list[int]]:
    """All of what copies lie in, also what belongs to none."""
    storages = [copy.target.untyped_storage() for several in copies.values() for copy in several]
    return [torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(each).tolist() for each in storages]


def require_same(tensors: Tensors, versions: list[Tensors]) -> None:
    """Load versions one after another, with kernels and without."""
    memories = laid_out(tensors), laid_out(tensors)
    loaders = [loader(tensors, each, has) for each, has in zip(memories, (True, False), strict=True)]
    old = tensors
    for new in versions:
        before = bits_of_memory(memories[0])
        several = [each.patches(delta(old, new)) for each in loaders]
        assert bits_of_memory(memories[0]) == before, "a delta is staged while the engine serves"
        for patch in (patch for patches in several for patch in patches):
            patch.write()
        assert bits_of_memory(memories[0]) == bits_of_memory(memories[1])
        for name, copies in memories[0].items():
            for copy in copies:
                wanted = rectangle(new[name], copy.source).to(DEVICE)
                assert torch.equal(integers(copy.target), integers(wanted)), name
        assert loaders[0].shares() == loaders[1].shares()
        old = new


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float32], [torch.bfloat16, torch.float32]])
def test_all_parts_get_the_values_and_digests_of_torch(dtypes: list[torch.dtype]) -> None:
    first = checkpoint(*dtypes)
    second = trained(first, 0.3)
    require_same(first, [second, trained(second, 0.05), first, first])


@types
def test_differences_are_added_in_whatever_part_a_worker_holds(dtype: torch.dtype) -> None:
    encoded = {n: (a.to(DEVICE), b.to(DEVICE), encode(a, b)) for n, (a, b) in cases(dtype).items()}
    named = {n: (a, b, c.to(DEVICE)) for n, (a, b, c) in encoded.items() if c is not None}
    parts, wanted = [], []
    wholes = {name: Rectangle.whole(old.shape) for name, (old, _, _) in named.items()}
    for name, (old, new, _) in named.items():
        at = wholes[name]
        before, after = (integers(tensor).view(at.rows, at.columns) for tensor in (old, new))
        inner = Rectangle(
            at.rows // 3, at.columns // 4, at.rows - at.rows // 3, at.columns // 2 - at.columns // 4
        )
        memory = before.new_zeros(at.rows + 1, at.columns + 3)
        memory[: inner.rows, 1 : 1 + inner.columns] = rectangle(before, inner)
        expected = memory.clone()
        expected[: inner.rows, 1 : 1 + inner.columns] = rectangle(after, inner)
        across = before.t().clone(memory_format=torch.contiguous_format)
        parts += [(name, memory[: inner.rows, 1 : 1 + inner.columns], inner), (name, before.clone(), at)]
        parts += [(name, across.t(), at)]
        wanted += [(memory, expected), (parts[-2][1], after), (across.t(), after)]
    placed = MemoryTables(parts, wholes).place({name: changes for name, (_, _, changes) in named.items()})
    placed.write()
    for (name, _, _), (found, expected) in zip(parts, wanted, strict=True):
        assert torch.equal(found, expected), name


def test_changes_that_do_not_fit_are_refused_by_kernels() -> None:
    old, new = cases(torch.bfloat16)["some"]
    changes = encode(old, new)
    assert changes is not None
    fitting, wide = changes.to(DEVICE), integers(new.float())
    wrong = [(Changes(changes.codes, changes.others[:-1]), old.numel()), (changes, old.numel() - BLOCK)]
    for each, count in wrong:
        with pytest.raises(ValueError, match=f"^bad: changes that do not fit {count} elements"):
            place_all(["good", "bad"], [fitting, each.to(DEVICE)], [old.numel(), count])
    with pytest.raises(ValueError, match="^bad: codes and others are of torch.int16 and torch.int16"):
        place_all(["bad"], [Changes(fitting.others, fitting.others)], [old.numel()])
    with pytest.raises(ValueError, match="^bad: codes and others are no vectors"):
        place_all(["bad"], [Changes(fitting.codes[None], fitting.others)], [old.numel()])
    whole = Rectangle.whole(old.shape)
    tables = MemoryTables([("wide", wide.to(DEVICE), whole)], {"wide": whole})
    with pytest.raises(ValueError, match="^wide: changes of values of 2 bytes, where values have 4"):
        tables.place({"wide": changes})


def test_positions_beyond_two_to_the_31_are_reached() -> None:
    """Codes that skip most of a tensor, of which this worker holds the last values."""
    count = (1 << 31) + 1000
    codes = torch.full((count // 85 + 1,), 255, dtype=torch.uint8)
    codes[-1] = 85 + count % 85 - 1
    changes = Changes(codes, torch.empty(0, dtype=torch.int16))
    if DEVICE.type == "cpu":
        delta_kernels.BLOCK = 1 << 20  # the interpreter takes long for each block, the compiler for long ones
    for width in (count, count // 8):
        values = torch.zeros(1, 10, dtype=torch.int16, device=DEVICE)
        at = Rectangle(count // width - 1, width - 10, 1, 10)
        tables = MemoryTables([("long", values, at)], {"long": Rectangle(0, 0, count // width, width)})
        tables.place({"long": changes}).write()
        assert values.tolist() == [[0] * 9 + [-1]]
    delta_kernels.BLOCK = BLOCK


def test_vectors_that_come_to_a_device_together_keep_their_values() -> None:
    sizes = (3, 0, 5, 1, 0)
    vectors = [torch.arange(n, dtype=(torch.int16, torch.int32)[i % 2]) - i for i, n in enumerate(sizes)]
    found = moved(vectors, DEVICE)
    assert {each.device.type for each in found} == {DEVICE.type}
    assert [each.dtype for each in found] == [each.dtype for each in vectors]
    assert [each.tolist() for each in found] == [each.tolist() for each in vectors]


class Operations(TorchDispatchMode):
    """Count operations of torch; on a CPU those of kernels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_pause_is_as_short_for_many_tensors_as_for_few() -> None:
    counts = []
    for experts in (2, 20):
        old = checkpoint(torch.bfloat16, experts=experts)
        copies = loader(old, laid_out(old), has_kernels=True)
        copies.shares()
        [patch] = copies.patches(delta(old, trained(old, 0.1)))
        with Operations() as operations:
            patch.write()
            copies.shares()
        counts.append(operations.count)
    assert counts[0] == counts[1]
