"""Gated delta nets: states end where sequences end, and a wrapped model's other parts stay as they are."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.autograd import grad  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs  # noqa: E402

from hpc_swe.base.errors import ConfigError  # noqa: E402
from hpc_swe.models import builds  # noqa: E402
from hpc_swe.models.policies._megatron.kernels.delta_rule import (  # noqa: E402
    CHUNK,
    Borders,
    convolved,
    delta_rule,
)
from hpc_swe.models.policies.megatron import Megatron  # noqa: E402
from tests.kit.random_model import save_wrapped  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(75)]
TP2 = {"dtype": "float32", "tensor_parallel": 2}
RANK = 4


def test_no_state_passes_a_border_at_any_place_of_a_chunk():
    """As transformers computes each sequence alone; of packs, its plain code would let the states through."""
    torch.manual_seed(0)
    lengths = [*range(1, CHUNK + 2), 2 * CHUNK + 1]
    tokens, heads, channels = sum(lengths), 2, 6
    sizes = [(tokens, heads, 8), (tokens, heads, 8), (tokens, heads, 4), (tokens, heads), (tokens, heads)]
    states = [torch.randn(size, requires_grad=True) for size in sizes]
    query, key, value, decay, rate = states
    found = delta_rule(query, key, value, -0.1 * decay.exp(), rate.sigmoid(), Borders(lengths))
    parts = zip(*(each.split(lengths) for each in states), strict=True)
    alone = [
        theirs.torch_chunk_gated_delta_rule(
            q[None], k[None], v[None], -0.1 * d[None].exp(), r[None].sigmoid(), use_qk_l2norm_in_kernel=True
        )[0][0]
        for q, k, v, d, r in parts
    ]
    assert (found - torch.cat(alone)).abs().max() < 1e-6
    weights = torch.randn_like(found)
    mine = grad((found * weights).sum(), states)
    other = grad((torch.cat(alone) * weights).sum(), states)
    assert max((one - two).abs().max() for one, two in zip(mine, other, strict=True)) < 2e-5

    inputs, kernel = torch.randn(tokens, channels), torch.randn(channels, 4)
    alone = [
        theirs.causal_conv1d_fn(each.t()[None], kernel, activation="silu")[0].t()
        for each in inputs.split(lengths)
    ]
    assert (convolved(inputs, kernel[:, None], Borders(lengths)) - torch.cat(alone)).abs().max() < 1e-6


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory) -> Path:
    text = tiny.SIZES | tiny.HYBRID | {"tie_word_embeddings": True}
    return save_wrapped(tmp_path_factory.mktemp("wrapped"), "Qwen3_5", text, tiny.move)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, wrapped) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs")
    model = AutoModelForCausalLM.from_pretrained(wrapped, dtype=torch.float32)
    base = {
        "model": str(wrapped),
        "data": tiny.write_sequences(folder / "data", tiny.make_sequences(model)),
        "packing": [[[0, 1], [2, 3]]],
        "optimizer": {"lr": 1e-3},
    }
    saved = str(folder / "saved")
    do = [
        ("score", TEXT), ("export", "before"), ("train", 1), ("save", saved),
        ("train", 1), ("export", "after"),
    ]  # fmt: skip
    adapted = {"policy": TP2 | {"lora_rank": RANK}, "do": [("train", 1), ("export", "after")]}
    cases = [base | {"name": "two", "policy": TP2, "do": do}, base | {"name": "adapted"} | adapted]
    found = launcher.run_cases(2, cases, folder)
    do = [("load", saved), ("train", 1), ("export", "after")]
    alone = base | {"name": "one", "policy": {"dtype": "float32"}, "do": do}
    return folder, found | launcher.run_cases(1, [alone], folder)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def test_a_wrapped_model_is_trained_inside_its_wrapper(runs, wrapped):
    folder, answers = runs
    model = AutoModelForCausalLM.from_pretrained(wrapped, dtype=torch.float32)
    scores = tiny.score(model, torch.tensor(TEXT))[1:]
    assert (torch.tensor(answers["two"][0]["scores"]) - scores).abs().max() < 1e-5
    source = load_file(wrapped / "model.safetensors")
    before, after = tensors(folder / "two" / "before"), tensors(folder / "two" / "after")
    assert source.keys() == before.keys() == after.keys()
    assert all(torch.equal(before[name], each) for name, each in source.items())
    kept = {name for name, each in source.items() if torch.equal(after[name], each)}
    assert kept == {name for name in source if name.startswith(("model.visual.", "mtp."))}
    assert after["mtp.norm.weight"].dtype == torch.bfloat16
    told = {name for rank in answers["two"] for name in rank["tensors"]}
    assert told == source.keys()


def test_adapters_of_a_wrapped_model_fit_the_tensors_of_its_folder(runs, wrapped):
    folder, source = runs[0] / "adapted" / "after", load_file(wrapped / "model.safetensors")
    after, factors = tensors(folder), load_file(folder / "adapter" / "adapter_model.safetensors")
    scale = json.loads((folder / "adapter" / "adapter_config.json").read_text())["lora_alpha"] / RANK
    stems = {name.rpartition(".lora_")[0] for name in factors}
    for stem in stems:
        name = f"{stem.removeprefix('base_model.model.')}.weight"
        a, b = (factors[f"{stem}.lora_{factor}.weight"].double() for factor in "AB")
        assert torch.equal(after.pop(name), (source[name].double() + scale * b @ a).float())
    assert len(stems) == 3 * 3 + 4 + 4 * 3, "three matrices of each delta net and MLP, four of attention"
    assert all(torch.equal(each, source[name]) for name, each in after.items())


def test_a_checkpoint_of_two_ranks_continues_on_one(runs):
    folder, answers = runs
    (last,), (_, same) = answers["one"][0]["metrics"], answers["two"][0]["metrics"]
    assert last["policy/grad_norm"] == pytest.approx(same["policy/grad_norm"], rel=1e-4)
    found, expected = (tensors(folder / name / "after") for name in ("one", "two"))
    errors = torch.cat([(found[name] - each).abs().flatten().float() for name, each in expected.items()])
    assert (errors > 1e-4).sum() <= len(errors) / 10_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["linear_attention"] * 4 + ["full_attention"]}, "layer_types"),
        ({"linear_conv_kernel_dim": None}, "has no linear_conv_kernel_dim"),
        (
            {"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e4}},
            "partial_rotary_factor of 1 ",
        ),
        ({"linear_num_value_heads": 3}, "no multiple of linear_num_key_heads"),
        ({"model_type": "qwen3_5_moe_text"}, "'qwen3_5' and text_config.model_type 'qwen3_5_moe_text' and"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings and text_config.tie_word_embeddings, which"),
    ],
)
def test_what_a_hybrid_model_lacks_is_named(wrapped, tmp_path, changes, message):
    config = json.loads((wrapped / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        Megatron(device="cpu").check_model(tmp_path, data_parallel=1)


def test_a_wrapped_model_whose_keys_are_not_in_a_text_config_is_refused(wrapped, tmp_path):
    config = json.loads((wrapped / "config.json").read_text())
    flat = config.pop("text_config") | config
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with pytest.raises(ConfigError, match=r"config.json has no text_config; add"):
        Megatron(device="cpu").check_model(tmp_path, data_parallel=1)


@pytest.mark.parametrize("key", ["pipeline_parallel", "context_parallel"])
def test_what_delta_nets_do_not_support_is_named(wrapped, key):
    with pytest.raises(ConfigError, match=rf"\[policy\] {key}: not supported for a model with gated delta"):
        Megatron(device="cpu", **{key: 2}).check_model(wrapped, data_parallel=1)
    with pytest.raises(ConfigError, match=r"\[policy\] deterministic: not supported"):
        Megatron(deterministic=True).check_model(wrapped, data_parallel=1)


@pytest.mark.skipif(find_spec("fla") is not None, reason="fla-core is installed")
def test_a_gpu_needs_the_package_with_kernels_of_delta_nets(wrapped):
    remedy = "install it" if builds.installed().torch_cuda else r"start the run with \.venv-gpu/bin/python"
    with pytest.raises(ConfigError, match=rf"needs the package fla-core on GPUs; {remedy}"):
        Megatron().check_model(wrapped, data_parallel=1)
    Megatron(dtype="float32").check_model(wrapped, data_parallel=1)  # plain torch computes it


def test_a_wrapped_model_without_its_model_of_images_is_refused(wrapped, tmp_path):
    (tmp_path / "config.json").write_text((wrapped / "config.json").read_text())
    found = load_file(wrapped / "model.safetensors")
    text = {name: each for name, each in found.items() if not name.startswith("model.visual.")}
    save_file(text, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors has no tensor model.visual"):
        Megatron(device="cpu").check_model(tmp_path, data_parallel=1)
