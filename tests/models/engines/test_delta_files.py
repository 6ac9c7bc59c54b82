"""Deltas as a learner spreads them over files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpc_swe.base.records import Manifest, WeightVersion
from hpc_swe.base.store import folders
from hpc_swe.models.deltas.tensor_delta import Digests, Rectangle, encode, text
from hpc_swe.models.engines._vllm.copies import Copy, LoaderCopies
from hpc_swe.models.engines._vllm.files import CPU, Delta, KnownModel, Link, Wanted, parts_of, with_files
from hpc_swe.models.engines._vllm.update import describe
from hpc_swe.models.engines.base import Weights

OLD = torch.linspace(-1, 1, 4000, dtype=torch.bfloat16).view(40, 100)
WANTED = Wanted({"a": [40, 100]}, is_tied=False, dtypes={"a": "bfloat16"})


def written(folder: Path) -> torch.Tensor:
    new = OLD.clone()
    new[::7, ::9] *= 3
    changes = encode(OLD, new)
    assert changes is not None
    save_file({"a:codes": changes.codes}, folder / "delta-00001-of-00002.safetensors")
    save_file({"a:others": changes.others}, folder / "delta-00002-of-00002.safetensors")
    return new


def test_the_two_parts_of_a_tensor_may_lie_in_two_files(tmp_path: Path) -> None:
    new, found = written(tmp_path), OLD.clone()
    Delta.read(tmp_path, WANTED).apply("a", found)
    assert torch.equal(found, new)


def test_half_of_a_tensor_s_changes_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "delta-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="a:others is missing"):
        Delta.read(tmp_path, WANTED)


def test_a_file_read_as_one_piece_has_the_same_tensors(tmp_path: Path) -> None:
    tensors = {
        "a:codes": torch.arange(7, dtype=torch.uint8),
        "a:others": torch.arange(-3, 4, dtype=torch.int16),
        "b": OLD,
        "c": torch.ones(3, 0),
        "d": torch.tensor(2.0),
    }
    file = tmp_path / "delta.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    found = dict(parts_of(file, torch.device("cpu")))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="and the file has"):
        dict(parts_of(file, torch.device("cpu")))


@pytest.mark.parametrize("entry", [{"shape": [41, 100]}, {"dtype": "F32"}, {"dtype": None}])
def test_bytes_that_are_not_those_of_the_shape_are_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    whole = {"dtype": "BF16", "shape": [40, 100], "data_offsets": [0, 8000]} | entry
    words = json.dumps({"a": {key: value for key, value in whole.items() if value}}).encode()
    file = tmp_path / "delta.safetensors"
    file.write_bytes(len(words).to_bytes(8, "little") + words + bytes(8000))
    with pytest.raises(ValueError, match="delta.safetensors: a (is|has no)"):
        dict(parts_of(file, CPU))


def adapters(folder: Path) -> torch.Tensor:
    """The merged matrix, written down apart from the product."""
    a, b = (
        torch.sin(torch.arange(n * 3.0).view(shape)).bfloat16()
        for n, shape in ((100, (3, 100)), (40, (40, 3)))
    )
    save_file(
        {"base_model.model.a.lora_A.weight": a, "base_model.model.a.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 6}')
    return (OLD.double() + 2 * (b.double() @ a.double())).bfloat16()


def test_adapters_are_merged_into_whatever_part_a_worker_holds(tmp_path: Path) -> None:
    expected = adapters(tmp_path)
    wanted = Wanted({"a.weight": [40, 100]}, is_tied=False)
    delta, whole = Delta.read(tmp_path, wanted), OLD.clone()
    delta.apply("a.weight", whole)
    assert torch.equal(whole, expected)
    memory = OLD.clone()
    parts = [Rectangle(0, 0, 30, 40), Rectangle(0, 40, 30, 60), Rectangle(30, 0, 10, 100)]
    views = [memory[at.row : at.row + at.rows, at.column : at.column + at.columns] for at in parts]
    copies = LoaderCopies(wanted.shapes, {"a.weight": list(map(Copy, parts, views))})
    assert copies.patches(delta) == []
    copies.merge(delta)
    assert torch.equal(memory, expected)


def test_adapters_of_each_expert_are_merged_into_a_tensor_of_all(tmp_path: Path) -> None:
    """A gate has the rows before those of an up projection, and a worker of two has a half of both."""
    experts, width, hidden = 3, 4, 8
    old = torch.cos(torch.arange(experts * 2.0 * width * hidden)).view(experts, 2 * width, hidden).bfloat16()
    stored, expected = {}, old.double()
    for number in range(experts):
        for half, kind in enumerate(("gate", "up")):
            seed = number + half / 2 + 1
            a = torch.sin(seed * torch.arange(2.0 * hidden)).view(2, hidden).bfloat16()
            b = torch.cos(seed * torch.arange(2.0 * width)).view(width, 2).bfloat16()
            name = f"base_model.model.m.experts.{number}.{kind}_proj"
            stored |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            rows = expected[number, half * width : (half + 1) * width]
            rows += 3 * (b.double() @ a.double())
    save_file(stored, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6}')
    name = "m.experts.gate_up_proj"
    wanted = Wanted({name: [experts, 2 * width, hidden]}, is_tied=False)
    delta, whole, memory = Delta.read(tmp_path, wanted), old.clone(), old.clone()
    delta.apply(name, whole)
    assert torch.equal(whole, expected.bfloat16())
    places = [Rectangle(row, 0, 2, hidden) for row in range(0, 2 * experts * width, 2)]
    rows = memory.view(-1, hidden)
    copies = LoaderCopies(wanted.shapes, {name: [Copy(at, rows[at.row : at.row + 2]) for at in places]})
    copies.merge(delta)
    assert torch.equal(memory, expected.bfloat16())
    beyond = {key.replace("experts.2.", "experts.3."): factor for key, factor in stored.items()}
    for wrong in (beyond, {key: factor for key, factor in stored.items() if "experts.1.up" not in key}):
        save_file(wrong, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match="m.experts.gate_up_proj has adapters of some experts only"):
            Delta.read(tmp_path, wanted)


def test_adapters_of_a_matrix_that_experts_do_not_have_are_refused(tmp_path: Path) -> None:
    """Otherwise they would be merged into the rows of another one."""
    stems = [f"base_model.model.m.experts.0.{kind}" for kind in ("w1", "up_proj")]
    factors = {f"{stem}.lora_A.weight": torch.ones(2, 8) for stem in stems}
    factors |= {f"{stem}.lora_B.weight": torch.ones(2, 2) for stem in stems}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6}')
    with pytest.raises(ValueError, match=r"the adapters of m.experts.0.w1.weight do not fit the model"):
        Delta.read(tmp_path, Wanted({"m.experts.gate_up_proj": [1, 4, 8]}, is_tied=False))


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    adapters(tmp_path)
    with pytest.raises(ValueError, match=r"the adapters of a.weight do not fit the model"):
        Delta.read(tmp_path, Wanted({"a.weight": [40, 99]}, is_tied=False))


def link(folder: Path) -> Link:
    """A folder as a supervisor has verified it, and as an engine is told."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    listed = Manifest(writer="test", files={name: folders.describe(folder / name) for name in names})
    files = folders.verify(folder, listed, lambda: False)
    return Link(folder, describe(Weights(WeightVersion(), folder, files=files))["files"])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_adapters_that_changed_after_its_check_is_named(tmp_path: Path, name: str) -> None:
    adapters(tmp_path)
    found = link(tmp_path)
    found.check()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b" ")
    with pytest.raises(ValueError, match=f"{name}: it is no longer the file"):
        found.check()
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: it was not verified, or is missing|no .*safetensors file"):
        found.check()


def save_model(folder: Path, tensor: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"a.weight": tensor}, folder / "model.safetensors")


@pytest.mark.parametrize("change", ["values", "shape", "cut", "gone"])
def test_a_model_that_is_not_the_learner_s_is_named_with_the_remedy(tmp_path: Path, change: str) -> None:
    """No manifest lists the files of the model below adapters."""
    model, folder = tmp_path / "model", tmp_path / "v000003-i01"
    folder.mkdir()
    digest = text(int(Digests(CPU).tensor(adapters(folder))))
    save_model(model, OLD)
    wanted = Wanted({"a.weight": [40, 100]}, False, {"a.weight": "bfloat16"}, {"a.weight": digest})
    chain, known = [Link(model, None), link(folder)], KnownModel()
    known.require(chain, wanted, CPU)
    whole = (model / "model.safetensors").read_bytes()
    if change in ("values", "shape"):
        save_model(model, OLD * 2 if change == "values" else OLD[:39])
    else:
        (model / "model.safetensors").unlink()
        if change == "cut":
            (model / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{model}.*; restore the files of `model` as they were"):
        known.require(chain, wanted, CPU)
    (model / "model.safetensors").write_bytes(whole)
    known.require(chain, wanted, CPU)


def test_model_that_changes_between_two_reads_is_noticed(tmp_path: Path) -> None:
    """An engine whose layers are reloaded reads the model while it serves, and again in the pause."""
    model, folder = tmp_path / "model", tmp_path / "v000003-i01"
    folder.mkdir()
    adapters(folder)
    save_model(model, OLD)
    first, last = with_files([Link(model, None), link(folder)])
    first.check()
    assert with_files([first, last]) == (first, last)
    (model / "model.safetensors").unlink()
    save_model(model, OLD * 2)
    with pytest.raises(ValueError, match="it is no longer the file that was verified"):
        first.check()
