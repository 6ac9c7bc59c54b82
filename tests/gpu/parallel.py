"""Compare each way to divide the learner among two processes with transformers, on two GPUs or on the CPU.

    python -m tests.gpu.parallel [dense] [experts]

prints a line for each model, precision and layout with the differences from transformers in float32: of
log-probabilities (the largest; in bfloat16 the mean, as a multiple of the error of transformers in bfloat16),
and relative ones of losses, gradient norms and, in float32, of what two steps changed. It exits with 1 if one
of them is above its limit.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.kit.random_model import save_random
from tests.kit.ranks import gang, tiny

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS, CLIP = 2, 0.05
TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(301)]
LENGTHS = (1000, 600, 1500, 900) if CUDA else tiny.LENGTHS
SIZES = tiny.SIZES | {"tie_word_embeddings": False}
if CUDA:  # of Qwen3-4B and Qwen3-30B-A3B, with fewer layers, experts and words
    SIZES |= {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "vocab_size": 4096}
    SIZES |= {"num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02}
    SIZES |= {"max_position_embeddings": 4096}
EXPERTS = tiny.EXPERTS | ({"num_experts": 16, "num_experts_per_tok": 4} if CUDA else {})
EXPERTS |= {"hidden_size": 2048, "moe_intermediate_size": 768} if CUDA else {}
FAMILIES = {"dense": ("Qwen3", SIZES), "experts": ("Qwen3Moe", SIZES | EXPERTS)}
ONE, HALVES, FOUR = [[[0, 1], [2, 3]]], [[[0, 1]], [[2, 3]]], [[[0], [1], [2], [3]]]
LAYOUTS = {
    "TP=2": ({"tensor_parallel": 2, "sequence_parallel": True}, ONE),
    "DP=2": ({}, HALVES),
    "CP=2": ({"context_parallel": 2}, ONE),
    "PP=2": ({"pipeline_parallel": 2}, FOUR),
    "EP=2 DP=2": ({"expert_parallel": 2}, HALVES),
    "EP=2 TP=2": ({"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}, ONE),
}
CASES = [
    (family, dtype, layout)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16")
    for layout in LAYOUTS
    if family == "experts" or "EP" not in layout
]
LIMITS = {
    "float32": {"logprobs": 5e-5, "loss": 1e-4, "norm": 1e-4, "weights": 2e-2},
    # Rounding sends tokens to other experts, and the loss is a small difference of large terms.
    "bfloat16": {"logprobs": 2.0, "loss": 2e-1, "norm": 2e-1},
}


@dataclass(frozen=True)
class Result:
    """Differences of one case from transformers, by name."""

    case: tuple[str, str, str]
    found: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(value <= LIMITS[self.case[1]][name] for name, value in self.found.items())  # nan does not

    def __str__(self) -> str:
        family, dtype, layout = self.case
        numbers = "  ".join(f"{name} {value:.1e}" for name, value in self.found.items())
        return f"{'ok  ' if self.passed else 'FAIL'} {family:8} {dtype:9} {layout:10} {numbers}"


class Comparison:
    """Tiny or middle-sized models, what transformers makes of them, and the cases of one job of two ranks."""

    def __init__(self, folder: Path, cases: Sequence[tuple[str, str, str]]) -> None:
        self._folder, self._cases = folder, cases
        self._wanted: dict[str, tiny.Steps] = {}
        self._scores: dict[str, torch.Tensor] = {}
        self._rounding: dict[str, float] = {}
        for family in {family for family, _, _ in cases}:
            self._prepare(family)

    def results(self) -> Iterator[Result]:
        """Run all cases, and yield their differences."""
        answers = gang.run_cases(2, [self._case(*case) for case in self._cases], self._folder / "cases")
        for case in self._cases:
            yield Result(case, self._differences(case, answers["-".join(case)][0]))

    def _prepare(self, family: str) -> None:
        kind, sizes = FAMILIES[family]
        with torch.device(DEVICE):
            folder = save_random(self._folder / family, kind, sizes)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
        sequences = tiny.make_sequences(model, lengths=LENGTHS)
        tiny.write_sequences(self._folder / f"{family}.msgpack", sequences)
        with torch.no_grad():
            self._scores[family] = tiny.score(model, torch.tensor(TEXT))[1:].cpu()
            rounded = tiny.score(model.bfloat16(), torch.tensor(TEXT))[1:].cpu()
        self._rounding[family] = (rounded - self._scores[family]).abs().mean().item()
        del model
        self._wanted[family] = tiny.reference_steps(folder, sequences, STEPS, CLIP, DEVICE)
        if CUDA:
            torch.cuda.empty_cache()

    def _case(self, family: str, dtype: str, layout: str) -> dict:
        policy, packing = LAYOUTS[layout]
        export = [("export", "after")] if dtype == "float32" else []
        return {
            "name": f"{family}-{dtype}-{layout}",
            "model": str(self._folder / family),
            "policy": policy | {"dtype": dtype},
            "optimizer": {"lr": 1e-3, "weight_decay": 1.0, "clip_grad": CLIP},
            "loss": {"kl_coefficient": 0.05},
            "packing": packing,
            "data": str(self._folder / f"{family}.msgpack"),
            "do": [("logprobs", TEXT), ("train", STEPS), *export],
        }

    def _differences(self, case: tuple[str, str, str], answer: dict) -> dict[str, float]:
        wanted = self._wanted[case[0]]
        metrics = {key: [m[f"policy/{key}"] for m in answer["metrics"]] for key in ("loss", "grad_norm")}
        gaps = (torch.tensor(answer["scores"]) - self._scores[case[0]]).abs()
        is_exact = case[1] == "float32"
        gap = gaps.max().item() if is_exact else gaps.mean().item() / self._rounding[case[0]]
        found = {"logprobs": gap, "loss": relative(metrics["loss"], wanted.losses)}
        found["norm"] = relative(metrics["grad_norm"], wanted.norms)
        if is_exact:
            folder = self._folder / "cases" / "-".join(case) / "after"
            found["weights"] = self._distance(case[0], folder)
        return found

    def _distance(self, family: str, folder: Path) -> float:
        """Return the norm of the weights' error over the norm of what two steps changed."""
        start, error, change = read_tensors(self._folder / family), 0.0, 0.0
        found, wanted = read_tensors(folder), self._wanted[family].weights
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            right = wanted[name].to(DEVICE)
            error += (tensor.to(DEVICE) - right).double().square().sum().item()
            change += (start[name].to(DEVICE) - right).double().square().sum().item()
        return (error / change) ** 0.5


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    files = names or {"model.safetensors"}
    return {name: data for file in sorted(files) for name, data in load_file(folder / file).items()}


def relative(found: list[float], wanted: list[float]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-2) for ours, theirs in pairs)


def main() -> int:
    if CUDA and torch.cuda.device_count() < 2:
        print("two GPUs are needed, one was found")
        return 2
    disable_progress_bar()
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "CPU", flush=True)
    failed = 0
    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            for result in Comparison(Path(name), [case for case in CASES if case[0] == family]).results():
                print(result, flush=True)
                failed += not result.passed
    print(f"{failed} cases differ")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
