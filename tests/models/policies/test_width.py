"""A layer as wide as those of small published models: the same gradients as transformers, and their norm."""

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

WIDE = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = tiny.LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
FAMILIES = {
    "Llama": WIDE | {"rope_parameters": LLAMA3},
    "Mistral": WIDE | {"rope_parameters": DEFAULT, "sliding_window": None},
}
CLIP = 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_wide_layer_and_their_norm_are_those_of_autograd(tmp_path, family):
    """On a CPU a float32 sum of a million squares is too small, the more so the larger a tensor is."""
    model = save_random(tmp_path / "model", family, FAMILIES[family])
    (model / "tokenizer.json").write_text("{}")
    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences = tiny.make_sequences(scorer, lengths=(40, 600))
    case = {
        "name": "wide",
        "model": str(model),
        "policy": {"dtype": "float32"},
        "optimizer": {"lr": 1e-3, "weight_decay": 1.0, "clip_grad": CLIP},
        "loss": {"kl_coefficient": 0.05},
        "packing": [[[0, 1]]],
        "data": tiny.write_sequences(tmp_path / "data", sequences),
        "do": [("train", 1), ("grads", "grads")],
    }
    (answer,) = launcher.run_cases(1, [case], tmp_path)["wide"]
    wanted = tiny.reference_steps(model, sequences, 1, CLIP)
    assert answer["metrics"][0]["policy/loss"] == pytest.approx(wanted.losses[0], rel=2e-5)
    assert answer["metrics"][0]["policy/grad_norm"] == pytest.approx(wanted.norms[0], rel=2e-6)
    files = (tmp_path / "wide" / "grads").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == wanted.grads.keys()
    assert tiny.norm_of(found.values()) == pytest.approx(CLIP, rel=2e-5)
    for name, grad in wanted.grads.items():
        error = found[name] * (wanted.norms[0] / CLIP) - grad
        assert tiny.norm_of([error]) < 1e-5 * tiny.norm_of([grad]), name
