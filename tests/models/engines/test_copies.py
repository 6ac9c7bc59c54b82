"""Where vLLM's loader puts checkpoint tensors, on its own layers and on several ranks."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checkout import ROOT, STAND_INS, started
from tests.kit.engine_kit import SIZES
from tests.kit.random_model import save_random, save_wrapped
from tests.kit.ranks import tiny

pytestmark = pytest.mark.slow


SIMPLE = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
if not find_spec("torchvision"):
    SIMPLE["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(STAND_INS)))
WIDE = {"num_hidden_layers": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
FEW = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}


def test_values_are_changed_where_vllms_loader_puts_them(tmp_path: Path) -> None:
    """Two ranks, with fused projections, biases, a split vocabulary, replicated heads, stacked experts.

    Experts that are one tensor in files are taken from it one by one.
    """

    def change(name: str, parameter: Any) -> None:
        if name.endswith(".bias"):
            parameter.normal_(0, 0.2)

    def alter(name: str, parameter: Any) -> None:
        change(name, parameter)
        if "down_proj" in name:
            parameter.mul_(2)
        else:
            parameter.view(-1)[::37] += 0.01

    shape, cases = (
        SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": False},
        ("dense", "tp", "ep", "fused", "hybrid"),
    )
    for case in cases[:-1]:
        family, more = ("Qwen2", {}) if case == "dense" else ("Qwen3Moe", FEW)
        (tmp_path / case).mkdir()
        save_random(tmp_path / case / "old", family, shape | more, 0, change, fused=case == "fused")
        save_random(tmp_path / case / "new", family, shape | more, 0, alter, fused=case == "fused")
    for name, edit in {"old": tiny.move, "new": lambda *given: (tiny.move(*given), alter(*given))}.items():
        save_wrapped(tmp_path / "hybrid" / name, "Qwen3_5", shape | tiny.HYBRID | WIDE, edit, "bfloat16")
    done = started("tests.kit.recorded_copies", *(tmp_path / case for case in cases), **SIMPLE)
    found = [line for line in done.stdout.splitlines() if line.startswith(cases)]
    assert found == [f"{case} all bits are equal" for case in cases], done.stderr[-5000:]


def test_experts_are_written_in_place_where_kernels_take_them_as_loaded(tmp_path: Path) -> None:
    """Otherwise each new version of a model with experts would be loaded anew, which takes minutes."""
    shape = SIZES | FEW | {"tie_word_embeddings": False}
    model = save_random(tmp_path / "model", "Qwen3Moe", shape, 0)
    done = started("tests.kit.plain_layers", model, **SIMPLE)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("experts") == SIZES["num_hidden_layers"]
    plain = {"TRITON", "BATCHED_TRITON"}
    assert {kernels for kernels, refusal in found.items() if not refusal} == plain
    assert "UnquantizedFusedMoEMethod" in found["FLASHINFER_CUTLASS"]
    assert "UnquantizedFusedMoEMethod" in found["moved"]
