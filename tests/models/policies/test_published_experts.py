"""Qwen3.5-MoE as it is published: wrapped, and with all experts of a layer in one tensor."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.models.weight_files import UNTRAINED  # noqa: E402
from tests.kit.random_model import save_wrapped  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402
from tests.models.policies.test_deltas import chain, whole  # noqa: E402

TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(75)]
SHARED = {"shared_expert_intermediate_size": 48, "tie_word_embeddings": False}
DO = [
    ("score", TEXT),
    ("export", "v0:base"),
    ("train", 1),
    ("export", "v1:delta"),
    ("train", 1),
    ("export", "v2:delta"),
    ("export", "v2-full:base"),
]
POLICIES = {"tp2": {"tensor_parallel": 2}, "ep2": {"expert_parallel": 2}}
PACKINGS = {"tp2": [[[0, 1], [2, 3]]], "ep2": [[[0, 1]], [[2, 3]]]}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    text = tiny.SIZES | tiny.HYBRID | tiny.EXPERTS | SHARED
    return save_wrapped(tmp_path_factory.mktemp("published"), "Qwen3_5Moe", text, tiny.move)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, published) -> tuple[Path, dict]:
    """Two steps on ranks that divide each expert, and on ranks that have other experts."""
    folder = tmp_path_factory.mktemp("runs")
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    data = tiny.write_sequences(folder / "data", tiny.make_sequences(model))
    common = {"model": str(published), "data": data, "optimizer": {"lr": 1e-3}, "do": DO}
    cases = [
        common | {"name": name, "policy": {"dtype": "float32"} | policy, "packing": PACKINGS[name]}
        for name, policy in POLICIES.items()
    ]
    return folder, launcher.run_cases(2, cases, folder)


@pytest.mark.parametrize("name", POLICIES)
def test_a_published_folder_is_read_and_written_in_its_own_form(runs, published, name):
    folder, answers = runs
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    scores = tiny.score(model, torch.tensor(TEXT))[1:]
    assert (torch.tensor(answers[name][0]["scores"]) - scores).abs().max() < 1e-5
    source, found = load_file(published / "model.safetensors"), whole(folder / name / "v0")
    assert "model.language_model.layers.3.mlp.experts.down_proj" in source
    assert source.keys() == found.keys()
    assert all(torch.equal(found[key], each) for key, each in source.items())


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_makes_the_experts_of_a_version_from_deltas(runs, name):
    """By the names and the digests of the tensors of all experts; it loads no model of images."""
    folder = runs[0] / name
    found, expected = chain(folder, ["v0", "v1", "v2"]), whole(folder / "v2-full")
    assert found.keys() == {key for key in expected if not key.startswith(UNTRAINED)}
    assert all(torch.equal(each, expected[key]) for key, each in found.items())
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    changed = (found[experts] != whole(folder / "v0")[experts]).flatten(1).any(1)
    assert changed.all(), "experts of both ranks were trained"
