"""Deltas of a real learner: applied to the version before, they give every bit of the next one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.models.engines._vllm.files import Link, Wanted, build, check_chain, shapes  # noqa: E402
from hpc_swe.models.model_shape import ModelShape  # noqa: E402
from hpc_swe.models.policies._megatron.memory import learner_memory  # noqa: E402
from hpc_swe.models.policies.megatron import Megatron  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

BF16 = {"dtype": "bfloat16", "tensor_parallel": 2}
DO = [
    ("export", "v0:base"),
    ("train", 1),
    ("rest", None),
    ("export", "v1:delta"),
    ("train", 1),
    ("export", "v2:delta"),
    ("export", "v2-full:base"),
    ("export", "v2-again:delta"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("deltas")
    model = tiny.make_models(folder / "models")["moe"]
    sequences = tiny.make_sequences(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    case = {
        "model": str(model),
        "data": tiny.write_sequences(folder / "data", sequences),
        "packing": [[[0, 1], [2, 3]]],
        "do": DO,
    }
    small = case | {"name": "bf16", "policy": BF16, "optimizer": {"lr": 1e-6}}
    large = case | {
        "name": "fp32",
        "policy": BF16 | {"dtype": "float32", "delta_base": "gpu"},
        "optimizer": {"lr": 1e-3},
    }
    return folder / "out", launcher.run_cases(2, [small, large], folder / "out")


def chain(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The last version, built as an engine does."""
    digests = {
        name: info["digest"]
        for rank in (0, 1)
        for name, info in json.loads((folder / f"rank{rank}.json").read_text())[names[-1]].items()
    }
    wanted = Wanted(shapes(folder / names[0], is_tied=False), is_tied=False, digests=digests)
    links = [Link(folder / name, None) for name in names]
    check_chain(links, wanted)
    return dict(build(links, wanted))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_full_version_and_its_deltas_are_the_learners_weights(runs, name):
    folder = runs[0] / name
    found, expected, first = (
        chain(folder, ["v0", "v1", "v2"]),
        whole(folder / "v2-full"),
        whole(folder / "v0"),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert any(not torch.equal(first[key], tensor) for key, tensor in expected.items())
    for rank in runs[1][name]:
        assert rank["v2"] == rank["v2-full"] == rank["v2-again"], "digests added up are digests computed anew"


def test_a_delta_holds_only_what_changed(runs):
    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (runs[0] / "bf16" / name).glob("*.safetensors"))

    assert not any(whole(runs[0] / "bf16/v2-again"))
    assert sum(tensor.nbytes for tensor in whole(runs[0] / "bf16/v2").values()) < 0.1 * size("v2-full")


def test_what_deltas_start_from_is_counted_before_it_is_taken(runs):
    """In one piece of exactly its size, since torch pins powers of two; the estimate says how much it is."""
    shape = ModelShape.read(runs[0].parent / "models/moe")
    for rank in runs[1]["bf16"]:
        assert rank["kept"] <= rank["room"] < rank["kept"] + 64 * len(rank["tensors"]) + 1
    kept = sum(rank["kept"] for rank in runs[1]["bf16"])
    found = learner_memory(shape, Megatron(**BF16), 1, 64, ["last version"]).host
    assert [part.bytes for part in found if part.what.startswith("last version")] == [
        pytest.approx(kept / 2, rel=0.05)
    ]
    assert kept == 2 * shape.parameters.total
    assert [rank["room"] for rank in runs[1]["fp32"]] == [0, 0]


def test_a_delta_on_a_wrong_parent_is_refused_by_its_digests(runs):
    with pytest.raises(ValueError, match="its digest is not the manifest's"):
        chain(runs[0] / "bf16", ["v0", "v2"])
