"""FP8 numbers and wrapped models, written anew: the bits of transformers, and refusals that name the file."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from hpc_swe.base.errors import ConfigError  # noqa: E402
from hpc_swe.models.model_shape import ModelShape  # noqa: E402
from hpc_swe.models.unpacked import E4M3, bfloat16, unpack  # noqa: E402
from hpc_swe.models.weight_files import require_tensors  # noqa: E402
from tests.kit.random_model import save_wrapped  # noqa: E402
from tests.kit.ranks import tiny  # noqa: E402

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4, "model_type": "pixtral"}
LEFT_OUT = ("params.json", "consolidated.safetensors.index.json", "processor_config.json")
LEFT_OUT += ("video_preprocessor_config.json",)
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def quantized(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 numbers, and the factors of blocks of them."""
    rows, columns = weight.shape[0] // block[0], weight.shape[1] // block[1]
    blocks = weight.view(rows, block[0], columns, block[1])
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).view_as(weight).to(torch.float8_e4m3fn), scale.view(rows, columns)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small Devstral Small 2: wrapped, with one scale of each linear layer, in the names of files."""
    text = tiny.SIZES | tiny.NO_TOKENS | {key: tiny.MINISTRAL[key] for key in ("head_dim", "rope_parameters")}
    text |= {"model_type": "ministral3"}
    config = transformers.Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("published")
    model = transformers.Mistral3ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(folder)
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor
        if name.startswith("language_model.model.layers.") and tensor.dim() == 2:
            stored[name], scale = quantized(tensor.float(), tuple(tensor.shape))
            stored[f"{name}_scale_inv"] = scale.view(()).bfloat16()
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": STATIC}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for name in LEFT_OUT:
        (folder / name).write_text("{}")
    return folder


def test_each_fp8_number_and_each_rounding_are_those_of_torch():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, numbers, equal_nan=True)
    values = torch.cat((torch.randn(1 << 16), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0])))
    assert torch.equal(
        torch.from_numpy(bfloat16(values.numpy()).view(np.int16)), values.bfloat16().view(torch.int16)
    )


def test_a_published_devstral_becomes_a_text_model_that_all_read_alike(published, tmp_path):
    """Weights are the bits of FP8 times scale, and a policy, transformers and vLLM find what each reads."""
    target = tmp_path / "text"
    assert unpack(published, target) == 4 * 7
    found, source = load_file(target / "model.safetensors"), load_file(published / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    stored, scale = source[f"language_model.{name}"], source[f"language_model.{name}_scale_inv"]
    assert torch.equal(found[name], (stored.float() * scale.float()).bfloat16())
    assert torch.equal(found["lm_head.weight"], source["language_model.lm_head.weight"])
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    shape = ModelShape.read(target)
    require_tensors(target, shape)
    assert found.keys() == shape.tensors.keys()
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Ministral3ForCausalLM"]
    assert config["llama_4_scaling"] == tiny.SCALED
    assert config["rope_parameters"]["apply_yarn_scaling"] is False, "whose mscale vLLM 0.26 does not read"
    assert {path.name for path in target.iterdir()} >= {"tokenizer.json"}
    assert not any((target / name).exists() for name in LEFT_OUT)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    whole = transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config.from_pretrained(published)
    ).float()
    named = {f"model.language_model.{key.removeprefix('model.')}": each for key, each in found.items()}
    named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    assert not whole.load_state_dict(named, strict=False).unexpected_keys
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole.eval()(tokens).logits)


def test_blocks_with_scales_of_their_own_are_unpacked_in_any_family(tmp_path):
    """Also where a wrapper stays, experts are one tensor, and the last block of another tensor is smaller."""
    text = tiny.SIZES | tiny.HYBRID | tiny.EXPERTS | {"tie_word_embeddings": False}
    text |= {"shared_expert_intermediate_size": 48}
    folder = save_wrapped(tmp_path / "m", "Qwen3_5Moe", text, tiny.move)
    stored = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.1."
    names = {f"{layer}mlp.experts.down_proj": 0, f"{layer}mlp.shared_expert.up_proj.weight": 16}
    for name, missing in names.items():
        weight = torch.nn.functional.pad(stored[name].flatten(0, -2), (0, 0, 0, missing))
        found, scale = quantized(weight, (32, 16))
        stored[name] = found[: len(weight) - missing].reshape(stored[name].shape).contiguous()
        stored[f"{name}_scale_inv"] = scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert unpack(folder, tmp_path / "new") == len(names)
    found = load_file(tmp_path / "new/model.safetensors")
    for name in names:
        factors = stored[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(16, 1)
        numbers = stored[name].float().flatten(0, -2)
        assert torch.equal(found[name].flatten(0, -2), (numbers * factors[: len(numbers)]).bfloat16())
    assert json.loads((tmp_path / "new/config.json").read_text()) == config | {"dtype": "bfloat16"}
    require_tensors(tmp_path / "new", ModelShape.read(tmp_path / "new"))


@pytest.mark.parametrize(
    ("config", "lost", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "", "quantization_config is not of FP8"),
        ({"model_type": "qwen3", "quantization_config": None}, "", "neither in FP8 nor beside"),
        ({}, "language_model.model.layers.0.mlp.up_proj.weight_scale_inv", "in FP8, but no language_model"),
        ({"quantization_config": STATIC | {"weight_block_size": [8, 8]}}, "", r"_scale_inv of \[\] in BF16"),
        (
            {"text_config": {"model_type": "gemma3"}},
            "",
            "text_config.model_type = 'gemma3' is none of mistral",
        ),
        ({"quantization_config": "fp8"}, "", r"m/config.json: Expected .*`\$.quantization_config`; copy"),
        ({"model_type": None}, "", "m/config.json: .*required field `model_type`"),
        ({"quantization_config": STATIC | {"weight_block_size": [4]}}, "", "length 2, .*weight_block_size`"),
        ({"text_config": {"model_type": "ministral3"}}, "", "rope_parameters lacks llama_4_scaling_beta"),
    ],
)
def test_a_folder_that_cannot_be_unpacked_is_refused(published, tmp_path, config, lost, message):
    folder = tmp_path / "m"
    folder.mkdir()
    found = json.loads((published / "config.json").read_text()) | config
    (folder / "config.json").write_text(
        json.dumps({key: each for key, each in found.items() if each is not None})
    )
    stored = load_file(published / "model.safetensors")
    stored.pop(lost, None)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        unpack(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float8_e5m2, "has w in F8_E5M2; get the model in F8_E4M3, BF16"),
        (torch.int8, "has w in I8; get the model in F8"),
        (torch.bfloat16, "m/config.json has quantization_config, but no tensor is in F8_E4M3"),
    ],
)
def test_numbers_that_would_be_copied_as_they_are_are_refused(tmp_path, dtype, message):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": STATIC}))
    save_file({"w": torch.ones(4, 4).to(dtype)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        unpack(folder, tmp_path / "new")
