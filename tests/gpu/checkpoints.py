"""Save and resume learners that keep a share of the optimizer's state in host memory.

    python -m tests.gpu.checkpoints

trains a layer stack of the width of Qwen3-0.6B on one GPU, or a tiny one on the CPU where there is none. A
line for each share has the seconds of a second checkpoint, by how much the process grew meanwhile, and
whether a learner that resumes from the first one ends with the same weights, bit for bit, as the one that
went on. It exits with 1 if weights differ.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.kit.random_model import save_random
from tests.kit.ranks import launcher, tiny

SHARES = (1.0, 0.5, 0.0)
LIMIT_S = float(os.environ.get("LIMIT_S", "300"))
WIDE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
DTYPE, SIZES = ("bfloat16", WIDE) if torch.cuda.is_available() else ("float32", {})


def make_cases(folder: Path) -> list[dict[str, Any]]:
    """Make a model and its data; return two cases for each share, which go on and resume."""
    model = save_random(folder / "model", "Qwen3", tiny.SIZES | SIZES, dtype=DTYPE)
    (model / "tokenizer.json").write_text("{}")
    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = tiny.write_sequences(folder / "data", tiny.make_sequences(scorer))
    shared = {"model": str(model), "data": data, "packing": [[[0, 1], [2, 3]]], "optimizer": {"lr": 1e-3}}
    cases = []
    for share in SHARES:
        policy = {"dtype": DTYPE, "offload_optimizer": share, "deterministic": True}
        saved = str(folder / f"saved-{share}")
        first = [
            ("train", 1),
            ("measure", saved),
            ("train", 1),
            ("measure", f"{saved}-2"),
            ("export", "after"),
        ]
        again = [("load", saved), ("train", 1), ("export", "after")]
        cases += [shared | {"name": f"first-{share}", "policy": policy, "do": first}]
        cases += [shared | {"name": f"again-{share}", "policy": policy, "do": again}]
    return cases


def weights(folder: Path) -> Mapping[str, Tensor]:
    """Return all tensors that a case has exported."""
    files = sorted((folder / "after").glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether there are tensors, of the same names and the same bits."""
    return (
        bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    )


def main() -> int:
    """Run the cases in one process, and print a line for each share."""
    is_well = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = launcher.run_cases(1, make_cases(folder), folder / "cases", timeout_s=LIMIT_S)
        ends = {case: weights(folder / "cases" / case) for case in answers}
        for share in SHARES:
            found = answers[f"first-{share}"][0]
            grown, state = found["saved_bytes"], found["state_bytes"]
            checks = {"resumed": are_equal(ends[f"first-{share}"], ends[f"again-{share}"])}
            if share != SHARES[-1]:
                checks["as without a share"] = are_equal(ends[f"first-{share}"], ends[f"first-{SHARES[-1]}"])
            is_well &= all(checks.values())
            words = ", ".join(
                f"{name}: {'same bits' if same else 'DIFFERS'}" for name, same in checks.items()
            )
            size = f"grew by {grown / 1e6:.0f} of {state / 1e6:.0f} MB"
            print(f"share {share}: saved in {found['saved_s']:.2f} s, {size}; {words}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
