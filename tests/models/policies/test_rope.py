"""Rotary frequencies are bit for bit those of transformers, at the parameters of published models."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
from transformers import LlamaConfig, Qwen2Config  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from hpc_swe.base.errors import ConfigError  # noqa: E402
from hpc_swe.models.engines._vllm.memory import check  # noqa: E402
from hpc_swe.models.policies._megatron.model.frequencies import frequencies  # noqa: E402
from hpc_swe.models.rope import Rope, longest_context  # noqa: E402

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("family", "theta", "scaling", "longest"),
    [
        (LlamaConfig, 500000.0, LLAMA3, 40960),
        (Qwen2Config, 1000000.0, YARN, 40960),
        (Qwen2Config, 1000000.0, YARN | {"attention_factor": 1.5, "beta_fast": 64, "truncate": False}, 40960),
        (Qwen2Config, 10000.0, YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, 40960),
        (Qwen2Config, 10000.0, {"rope_type": "yarn", "factor": 2.0}, 40960),
        (Qwen2Config, 10000.0, YARN | {"factor": 1.125}, 36864),
    ],
)
def test_scaled_positions_are_those_of_transformers(family, theta, scaling, longest):
    known = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 40960}
    known |= {"rope_theta": theta, "rope_scaling": scaling}
    config = family(
        **{name: dict(value) if name == "rope_scaling" else value for name, value in known.items()}
    )
    config.head_dim = 128
    wanted, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    rope = Rope.read(known, "here")
    assert torch.equal(frequencies(rope, 128), wanted)
    assert rope.attention_factor == factor
    assert longest_context(known) == longest
    as_written = Rope.read(
        {"rope_parameters": config.rope_parameters} | {"max_position_embeddings": 40960}, "here"
    )
    assert as_written == rope, "transformers 5 writes the same parameters under another key"


def test_contexts_that_a_vllm_would_refuse_are_refused_at_the_start(tmp_path):
    """YaRN as the cards of models add it, beside a max_position_embeddings of its own."""
    known = {"num_attention_heads": 32, "max_position_embeddings": 40960, "rope_scaling": YARN}
    (tmp_path / "config.json").write_text(json.dumps(known))
    check(tmp_path, 1, 40960)
    with pytest.raises(ConfigError, match=r"the model's min\(max_position_embeddings, .* = 40960; lower it"):
        check(tmp_path, 1, 65536)
    (tmp_path / "config.json").write_text(json.dumps(known | {"max_position_embeddings": 131072}))
    check(tmp_path, 1, 65536)


def test_a_rope_that_is_there_in_both_forms_is_read_if_they_are_equal():
    """A file that transformers 5 has written may keep what an older release wrote."""
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    old = {"rope_theta": 1e4, "max_position_embeddings": 512, "rope_scaling": scaling}
    both = old | {"rope_parameters": scaling | {"rope_theta": 1e4}}
    assert Rope.read(both, "here") == Rope.read(old, "here")
    assert longest_context(both) == longest_context(old)
    for change in ({"factor": 4.0}, {"rope_theta": 1e6}, {"rope_type": "default"}):
        with pytest.raises(ConfigError, match="both rope_parameters and rope_scaling"):
            Rope.read(both | {"rope_parameters": both["rope_parameters"] | change}, "here")
