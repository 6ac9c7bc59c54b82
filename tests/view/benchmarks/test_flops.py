"""What a step needs is counted once, and as torch counts what it runs."""

import pytest

from hpc_swe.models import shapes
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.view.benchmarks.flops import step_flops


def shape_of(name: str, folder) -> ModelShape:
    return ModelShape.read(shapes.find_or_write(name, folder / name))


def test_flops_of_a_step_agree_with_a_count_by_hand(tmp_path):
    """Qwen3-4B, sequences of 3 and 1 tokens, 2 of them trained."""
    layer = 2 * 4 * (2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560 + 3 * 2560 * 9728)
    attention = 2 * 32 * 128 * (9 + 1)
    wanted = 3 * (36 * (layer + attention) + 2 * 2 * 2560 * 151936)
    assert step_flops(shape_of("4B", tmp_path), [3, 1], 2) == wanted


@pytest.mark.slow
def test_flops_agree_with_those_that_torch_counts(tmp_path):
    """Plain attention has no causal kernel, so torch counts its products whole: twice what is needed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    folder = shapes.find_or_write("tiny", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(48)[None]).logits.sum().backward()
    shape = ModelShape.read(folder)
    attention = 3 * shape.layers * 2 * shape.heads * shape.head_dim * 48**2
    assert counter.get_total_flops() == step_flops(shape, [48], 48) + attention
