"""Where vLLM's loader puts checkpoint tensors, on its own layers and on several ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_swe.processes import free_port
from tests.kit.checkout import environment
from tests.kit.engine_kit import SIZES
from tests.kit.random_model import save_random

pytestmark = pytest.mark.slow


FEW = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [("Qwen2", {}, []), ("Qwen3Moe", FEW, []), ("Qwen3Moe", FEW, ["ep"])],
    ids=["dense", "experts", "experts of their own"],
)
def test_values_are_changed_where_vllms_loader_puts_them(
    tmp_path: Path, family: str, more: dict[str, object], words: list[str]
) -> None:
    """Two ranks, with fused projections, biases, a split vocabulary, replicated heads, stacked experts."""

    def change(name: str, parameter: Any) -> None:
        if name.endswith(".bias"):
            parameter.normal_(0, 0.2)

    def alter(name: str, parameter: Any) -> None:
        change(name, parameter)
        if "down_proj" in name:
            parameter.mul_(2)
        else:
            parameter.view(-1)[::37] += 0.01

    shape = SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": False} | more
    old = save_random(tmp_path / "old", family, shape, 0, change)
    new = save_random(tmp_path / "new", family, shape, 0, alter)
    port = str(free_port("127.0.0.1", 0))
    command = [sys.executable, "-m", "tests.kit.recorded_copies"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", port, str(old), str(new), *words],
            env=environment(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", VLLM_DIST_IDENT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            output = rank.communicate(timeout=600)[0]
            assert rank.returncode == 0, output[-3000:]
            assert "all bits are equal" in output
    finally:
        for rank in ranks:
            rank.kill()


def test_experts_are_written_in_place_where_kernels_take_them_as_loaded(tmp_path: Path) -> None:
    """Otherwise each new version of a model with experts would be loaded anew, which takes minutes."""
    shape = SIZES | FEW | {"tie_word_embeddings": False}
    model = save_random(tmp_path / "model", "Qwen3Moe", shape, 0)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.plain_layers", str(model)],
        env=environment(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("experts") == SIZES["num_hidden_layers"]
    plain = {"TRITON", "BATCHED_TRITON"}
    assert {kernels for kernels, refusal in found.items() if not refusal} == plain
    assert "UnquantizedFusedMoEMethod" in found["FLASHINFER_CUTLASS"]
    assert "UnquantizedFusedMoEMethod" in found["moved"]
