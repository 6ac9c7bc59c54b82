"""What a policy refuses, and how it says so."""

import json
import re
import shutil

import msgspec
import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint import CheckpointException  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.base.errors import ConfigError, ProtocolError  # noqa: E402
from hpc_swe.base.records import MicroBatch, floats, ids  # noqa: E402
from hpc_swe.models.model_shape import ModelShape  # noqa: E402
from hpc_swe.models.policies._megatron.model.packing import trained_positions  # noqa: E402
from hpc_swe.models.policies._megatron.state import state  # noqa: E402
from hpc_swe.models.policies._megatron.weights.origins import Origin  # noqa: E402
from hpc_swe.models.policies._megatron.weights.weights import Snapshot  # noqa: E402
from hpc_swe.models.policies.megatron import Megatron  # noqa: E402
from hpc_swe.models.weight_files import INDEX  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

KL = {"loss": {"kl_coefficient": 0.1}}
LORA = {"dtype": "float32", "tensor_parallel": 2, "lora_rank": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny.make_models(tmp_path_factory.mktemp("models"))


def rewritten(folder, target, **changes):
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'; supported: granite, granitemoehybrid, llama, "),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_type 'linear'; supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "both rope_parameters and rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "no factor, low_freq_factor, high"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, "attention_bias, mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*unpack_model MODEL --out"),
        ({"model_type": "mistral3"}, "'mistral3'.*unpack_model MODEL --out NEW writes its text model"),
        (
            {"model_type": "ministral3"},
            "must have rope_parameters.llama_4_scaling_beta and .*llama_4_scaling =",
        ),
        ({"num_key_value_heads": None}, "has no num_key_value_heads"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "no embedding_multiplier, attention_mult"),
        ({"model_type": "granitemoehybrid"}, "no shared_intermediate_size, num_local_experts, embedding_mul"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias"),
    ],
)
def test_a_model_that_is_not_supported_is_named(models, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.read(rewritten(models["dense"], tmp_path / "m", **changes))


@pytest.mark.parametrize(
    ("name", "keys"),
    [("seed", ["attention_bias"]), ("smollm3", ["tie_word_embeddings", "no_rope_layers", "layer_types"])],
)
def test_a_missing_key_means_what_transformers_reads(models, tmp_path, name, keys):
    config = json.loads((models[name] / "config.json").read_text())
    assert {key: config.pop(key) for key in keys}["tie_word_embeddings" if name == "smollm3" else keys[0]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.read(tmp_path) == ModelShape.read(models[name])


def test_published_and_newly_written_configs_mean_the_same(models, tmp_path):
    old = rewritten(models["moe"], tmp_path / "m", rope_parameters=None, rope_theta=10000.0)
    assert ModelShape.read(old) == ModelShape.read(models["moe"])


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("dense", {"tensor_parallel": 3}, "tensor_parallel = 3 does not divide the model's heads, 8"),
        (
            "dense",
            {"tensor_parallel": 2, "context_parallel": 4},
            "tensor_parallel * context_parallel = 8 does not divide the model's groups, 4",
        ),
        ("dense", {"pipeline_parallel": 3}, "pipeline_parallel = 3 does not divide the model's layers, 4"),
        ("moe", {"expert_parallel": 3}, "expert_parallel = 3 does not divide the model's experts, 8"),
        ("moe", {"lora_rank": 4}, "lora_rank = 4: products of experts need a multiple of 8"),
        (
            "granite4",
            {"lora_rank": 8},
            'lora_rank = 8 needs lora_layers = "attention" for a model whose gate',
        ),
        ("dense", {"expert_parallel": 2}, "expert_parallel = 2, but the model has no experts"),
        (
            "moe",
            {"expert_parallel": 4, "tensor_parallel": 2},
            "expert_parallel = 4 does not divide the 2 processes of policy.tensor_parallel * "
            "policy.context_parallel * learner.data_parallel; set it to 2 or 1",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(models, model, keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Megatron(**keys).check_model(models[model], data_parallel=1)


YARN = {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("hybrid-moe", {"norm_topk_prob": False}, "norm_topk_prob, which is not supported"),
        ("hybrid-moe", {"shared_expert_intermediate_size": None}, "no shared_expert_intermediate_size"),
        ("hybrid-moe", {"shared_expert_intermediate_size": 47}, "shared_expert_intermediate_size, 47"),
        ("phi", {"rope_parameters": YARN}, "rope_type 'yarn', which is not supported"),
        ("phi", {"sliding_window": 64}, "sliding_window, which is not supported"),
    ],
)
def test_what_transformers_computes_otherwise_is_named(models, tmp_path, model, changes, message):
    folder = rewritten(models[model], tmp_path / "m", **changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Megatron(device="cpu", tensor_parallel=2).check_model(folder, data_parallel=1)


@pytest.mark.parametrize(
    ("lost", "size", "message"),
    [
        ("1.mlp.experts.gate_up_proj", None, "no tensor model.layers.1.mlp.experts.gate_up_proj"),
        ("1.mlp.experts.down_proj", [8, 32, 64], r"down_proj of \[8, 32, 64\], but config.json of the model"),
        ("0.mlp.experts.gate_up_proj", None, "no tensor model.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_a_folder_whose_experts_are_not_in_one_form_is_refused(models, tmp_path, lost, size, message):
    folder = rewritten(models["hybrid-fused"], tmp_path / "m")
    found = load_file(models["hybrid-fused"] / "model.safetensors")
    del found[f"model.layers.{lost}"]
    more = {f"model.layers.{lost}": torch.zeros(size)} if size else {}
    save_file(found | more, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        Megatron(device="cpu").check_model(folder, data_parallel=1)


def test_tensor_parallelism_need_not_divide_experts_that_stay_whole(models, tmp_path):
    odd = rewritten(models["moe"], tmp_path / "m", moe_intermediate_size=33)
    keys = {"tensor_parallel": 2}
    Megatron(**keys, expert_parallel=2).check_model(odd, data_parallel=1)
    with pytest.raises(ConfigError, match="tensor_parallel = 2 does not divide the model's ffn, 33"):
        Megatron(**keys).check_model(odd, data_parallel=1)


def test_a_missing_tensor_is_named(models):
    with pytest.raises(ConfigError, match="no tensor model.nowhere"):
        Snapshot(models["dense"])["model.nowhere"]


def micro(tokens=6, mask=(0, 1, 1, 0, 1, 1), lengths=(3, 3), logprobs=6) -> MicroBatch:
    zeros = floats([0.0] * tokens)
    return MicroBatch(
        token_ids=ids(range(tokens)),
        mask=bytes(mask),
        logprobs=floats([0.0] * logprobs),
        advantages=zeros,
        weights=zeros,
        sequence_lengths=list(lengths),
    )


def test_only_tokens_that_something_precedes_are_trained():
    assert trained_positions(micro(), "here").tolist() == [1, 2, 4, 5]
    with pytest.raises(ProtocolError, match="here: token 3 is the first of its sequence"):
        trained_positions(micro(mask=(0, 1, 1, 1, 1, 1)), "here")


@pytest.mark.parametrize("wrong", [{"logprobs": 5}, {"lengths": (3, 2)}, {"mask": (0, 1)}])
def test_arrays_of_unequal_length_are_refused(wrong):
    with pytest.raises(ProtocolError, match="here: arrays"):
        trained_positions(micro(**wrong), "here")


def test_a_refusal_is_one_even_when_there_is_room_again(tmp_path):
    """As Megatron passes it on: in words."""
    cause = RuntimeError("Worker failure: [Errno 28] No space left on device")
    refusal = state._refusal(tmp_path, CheckpointException("write", {1: (cause, None)}))
    assert "no space is left" in str(refusal)
    cause = RuntimeError("Worker failure: [Errno 22] Invalid argument")
    assert state._refusal(tmp_path, CheckpointException("write", {1: (cause, None)})) is None


@pytest.mark.parametrize(
    ("more", "key"),
    [(KL, "model"), (KL, "reference"), ({"policy": LORA}, "model"), (KL | {"policy": LORA}, "reference")],
)
def test_a_resume_with_other_files_below_is_refused_on_every_rank(models, tmp_path, more, key):
    """The reference, and the model below adapters; of that also weights that no adapter changes.

    A reference was the model at first, as a link can be that leads elsewhere now.
    """
    for name in ("model", "changed"):
        shutil.copytree(models["sharded"], tmp_path / name)
    shard = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]["model.norm.weight"]
    file = tmp_path / "changed" / shard
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, file)
    sequences = tiny.make_sequences(AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32))
    base = {
        "policy": {"dtype": "float32", "tensor_parallel": 2},
        "data": tiny.write_sequences(tmp_path / "data", sequences),
        "packing": [[[0, 1], [2, 3]]],
        "model": str(tmp_path / "model"),
    } | more
    saved = str(tmp_path / "saved")
    first = {"name": "first", "do": [("train", 1), ("save", saved)]}
    again = {"name": "again", "do": [("load", saved), ("train", 1)]}
    other = {"name": "other", key: str(tmp_path / "changed"), "do": [("resume", saved)]}
    found = launcher.run_cases(2, [base | each for each in (first, again, other)], tmp_path / "out")
    assert [rank["step"] for rank in found["again"]] == [2, 2]
    (said,) = {rank["refused"] for rank in found["other"]}
    assert said == (
        f"{file}: model.norm.weight (1 tensors in all) is not what it was when {saved} was saved; "
        f"restore the files of `{key}` as they were when the run started, or start another run"
    )


def test_a_checkpoint_of_a_run_without_a_reference_is_refused(tmp_path):
    origin = Origin("reference", "model", tmp_path / "model", {"a": "1"})
    origin.require({"reference": {"a": "1"}}, tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved: the run had no weights as reference .* those of `model`"):
        origin.require({"model": {"a": "1"}}, tmp_path / "saved")


def test_a_step_that_is_not_finite_is_left_out_on_every_rank(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
    sequences = tiny.make_sequences(model)
    bad = np.frombuffer(sequences[3].advantages, dtype="<f4") * np.float32("nan")
    sequences[3] = msgspec.structs.replace(sequences[3], advantages=floats(bad))
    case = {
        "name": "bad",
        "model": str(models["dense"]),
        "policy": {"dtype": "float32"},
        "data": tiny.write_sequences(tmp_path / "data", sequences),
        "packing": [[[0], [1]], [[2], [3]]],
        "do": [("train", 1), ("score", [1, 2, 3])],
    }
    before = case | {"name": "before", "do": case["do"][1:]}
    found = launcher.run_cases(2, [before, case], tmp_path / "out")
    for before, after in zip(found["before"], found["bad"], strict=True):
        assert after["scores"] == before["scores"], "no weight changed"
        assert after["step"] == 1
        assert after["metrics"][0]["policy/skipped"] == 1


def test_a_weight_that_is_not_finite_on_one_rank_is_published_by_none(models, tmp_path):
    case = {
        "name": "spoilt",
        "model": str(models["dense"]),
        "policy": {"dtype": "float32", "tensor_parallel": 2},
        "do": [("spoil", 1), ("export", "weights")],
    }
    first, second = launcher.run_cases(2, [case], tmp_path / "out")["spoilt"]
    assert "not finite (1 tensors in all); not published" in first["error"]
    assert first["error"] == second["error"]
    assert list((tmp_path / "out/spoilt/weights").iterdir()) == []
