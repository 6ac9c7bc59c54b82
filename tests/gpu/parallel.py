"""Compare each way to divide the learner, and each level of recomputation, with transformers.

    python -m tests.gpu.parallel [dense] [qwen2] [llama] [mistral] [experts] [hybrid]
                                 [bfloat16] [float32]
                                 [1] [2] [4] [LAYOUT]

prints a line for each model, precision and layout of 1, 2 or 4 processes with the differences from
transformers in float32: of log-probabilities (the largest; in bfloat16 the mean, as a multiple of the error
of transformers in bfloat16), and relative ones of losses, gradient norms and, in float32, of what two steps
changed. "again" trains twice with policy.deterministic and counts the tensors and figures that differ in any
bit; "hosted" does so with a share of the optimizer's state in host memory the second time. "lora TP=2"
compares adapters on two tensor-parallel processes with those on one. "resumed" loads a checkpoint of two
tensor-parallel processes into one, and compares the next step with the one that the two take. It exits with 1
if a difference is above its limit. Words choose models, precisions, numbers of processes, and layouts by how
their names begin: again, hosted, EP=2, one. --limit-s ends each job of processes after so many seconds, and
compares what it has done. Without GPUs, models are tiny. With NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.30
and newer know, processes share a GPU.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from hpc_swe.base import cli
from hpc_swe.cluster import gpus
from hpc_swe.models.policies._megatron.kernels.flash_attention import Facts, describe
from tests.kit.random_model import save_random
from tests.kit.ranks import launcher, tiny

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS, CLIP = 2, 0.05
TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(301)]
LENGTHS = (2600, 600, 3100, 900) if CUDA else tiny.LENGTHS  # both sides of packing.SHORT
SIZES = tiny.SIZES | {"tie_word_embeddings": False}
if CUDA:  # of Qwen3-4B and Qwen3-30B-A3B, with fewer layers, experts and words
    SIZES |= {"hidden_size": 2560, "intermediate_size": 3072, "num_attention_heads": 32, "vocab_size": 4096}
    SIZES |= {"num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02}
    SIZES |= {"max_position_embeddings": 4096}
EXPERTS = tiny.EXPERTS | ({"num_experts": 16, "num_experts_per_tok": 4} if CUDA else {})
EXPERTS |= {"hidden_size": 2048, "moe_intermediate_size": 768} if CUDA else {}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
QWEN2 = NO_HEAD_DIM | (
    {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4} if CUDA else {}
)
MISTRAL = SIZES | {"rope_parameters": tiny.YARN, "sliding_window": None}
# YaRN sharpens attention: with weights of 0.02, bfloat16 moves the loss of the second step by up to 20 %.
MISTRAL |= {"initializer_range": 0.014} if CUDA else {}
HYBRID = tiny.HYBRID | (
    {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128} if CUDA else {}
)
FAMILIES = {
    "dense": ("Qwen3", SIZES),
    "qwen2": ("Qwen2", QWEN2),
    "llama": ("Llama", SIZES | {"rope_parameters": tiny.LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", MISTRAL),
    "experts": ("Qwen3Moe", SIZES | EXPERTS),
    "hybrid": ("Qwen3_5", SIZES | HYBRID),
}
ONE, HALVES, FOUR = [[[0, 1], [2, 3]]], [[[0, 1]], [[2, 3]]], [[[0], [1], [2], [3]]]
QUARTERS = [[[0]], [[1]], [[2]], [[3]]]


@dataclass(frozen=True)
class Layout:
    """Say how the learner of a case is divided, and what else its policy's table has."""

    ranks: int
    policy: dict[str, object] = field(default_factory=dict)
    packing: list[list[list[int]]] = field(default_factory=lambda: ONE)


TP, EP = {"tensor_parallel": 2}, {"expert_parallel": 2}
LORA = {"lora_rank": 8}
LAYOUTS = {
    "one": Layout(1),
    "elementwise": Layout(1, {"recompute": "elementwise"}),
    "products": Layout(1, {"recompute": "products"}),
    "full": Layout(1, {"recompute": "full"}),
    "TP=2": Layout(2, TP),
    "DP=2": Layout(2, {}, HALVES),
    "CP=2": Layout(2, {"context_parallel": 2}),
    "PP=2": Layout(2, {"pipeline_parallel": 2}, FOUR),
    "EP=2 DP=2": Layout(2, EP, HALVES),
    "EP=2 TP=2": Layout(2, EP | TP),
    "EP=2 elementwise": Layout(2, EP | {"recompute": "elementwise"}, HALVES),
    "EP=2 products": Layout(2, EP | {"recompute": "products"}, HALVES),
    "TP=2 DP=2": Layout(4, TP, HALVES),
    "TP=4": Layout(4, TP | {"tensor_parallel": 4}),
    "EP=4 DP=4": Layout(4, {"expert_parallel": 4}, QUARTERS),
    "EP=4 TP=2 DP=2": Layout(4, TP | {"expert_parallel": 4}, HALVES),
}
NOT_DONE = "not done"
WAYS = list(LAYOUTS)
"""What is compared with transformers."""
LAYOUTS |= {f"hosted {share}": Layout(1, {"offload_optimizer": share}) for share in (0.6, 1.0)}
LAYOUTS |= {"lora": Layout(1, LORA), "lora TP=2": Layout(2, TP | LORA)}
MAIN = ["one", "elementwise", "products", "TP=2"]
"""What is compared of the models whose kernels differ from those of the others in the layers alone, and of
those that cannot be divided in all ways."""
LIMITS = {
    "float32": {"logprobs": 5e-5, "loss": 1e-4, "norm": 1e-4, "weights": 2e-2, "bits": 0.0},
    # Rounding sends tokens to other experts, and the loss is a small difference of large terms.
    "bfloat16": {"logprobs": 2.0, "loss": 2e-1, "norm": 2e-1, "bits": 0.0},
}
CASES = [
    (family, dtype, layout)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16")
    for layout in (MAIN if family in ("qwen2", "llama", "mistral", "hybrid") else WAYS)
    if family == "experts" or "EP" not in layout
]
CASES += [(family, "bfloat16", "again one") for family in FAMILIES if family != "hybrid"]
CASES += [("dense", "bfloat16", "again TP=2"), ("experts", "bfloat16", "again EP=2 DP=2")]
CASES += [(family, "bfloat16", f"hosted {share}") for family in ("dense", "experts") for share in (0.6, 1.0)]
CASES += [("dense", "float32", "hosted 1.0"), *(("dense", dtype, "lora TP=2") for dtype in LIMITS)]
CASES += [(family, "float32", "resumed") for family in ("dense", "experts")]


def ranks_of(layout: str) -> int:
    """Return the number of processes that a case needs at a time."""
    return 2 if layout == "resumed" else LAYOUTS[layout.removeprefix("again ")].ranks


def twins(layout: str) -> list[str]:
    """Return the layouts of two trainings that must have the same bits; none for other cases."""
    again = layout.removeprefix("again ")
    return [again, again] if again != layout else ["one", layout] if layout.startswith("hosted") else []


@dataclass(frozen=True)
class Result:
    """Differences of one case from transformers, by name."""

    case: tuple[str, str, str]
    found: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(
            value <= LIMITS[self.case[1]].get(name, 0.0) for name, value in self.found.items()
        )  # nan does not

    def __str__(self) -> str:
        family, dtype, layout = self.case
        numbers = "  ".join(f"{name} {value:.1e}" for name, value in self.found.items())
        verdict = "ok  " if self.passed else "none" if NOT_DONE in self.found else "FAIL"
        return f"{verdict} {family:8} {dtype:9} {layout:16} {numbers}"


class Comparison:
    """Tiny or middle-sized models, what transformers makes of them, and the cases to compare with it."""

    def __init__(self, folder: Path, cases: Sequence[tuple[str, str, str]], limit_s: float = 900.0) -> None:
        self._folder, self._cases, self._limit_s = folder, cases, limit_s
        self._wanted: dict[str, tiny.Steps] = {}
        self._scores: dict[str, torch.Tensor] = {}
        self._rounding: dict[str, float] = {}
        for family in {family for family, _, _ in cases}:
            self._prepare(family)

    def results(self) -> Iterator[Result]:
        """Run all cases, and yield their differences; nan stands for what a job that failed has not done."""
        answers: dict[str, list[dict]] = {}
        for size in (4, 2, 1):
            runs = [run for case in self._cases for run in self._runs(case) if run["ranks"] == size]
            # Cases that a kernel may refuse to repeat come last, so that they spoil no other result.
            runs.sort(key=lambda run: bool(run["policy"].get("deterministic")))
            answers |= self._answers(size, runs) if runs else {}
        for case in self._cases:
            done = all(run["name"] in answers for run in self._runs(case))
            yield Result(case, self._differences(case, answers) if done else {NOT_DONE: math.nan})

    def _answers(self, size: int, runs: list[dict]) -> dict[str, list[dict]]:
        folder = self._folder / "cases"
        try:
            return launcher.run_cases(size, runs, folder, self._limit_s)
        except (AssertionError, subprocess.TimeoutExpired) as error:  # what the processes wrote
            print(error, flush=True)
            return launcher.read_answers(size, runs, folder)

    def _runs(self, case: tuple[str, str, str]) -> list[dict]:
        """Return the runs of a case, each for tests.kit.ranks.worker."""
        family, dtype, layout = case
        if layout == "resumed":
            kept = str(self._folder / f"kept-{family}")
            steps = [("train", 1), ("save", kept), ("train", 1)]
            return [
                self._run((family, dtype, "TP=2"), f"{_name(case)}-2", steps),
                self._run((family, dtype, "one"), f"{_name(case)}-1", [("load", kept), ("train", 1)]),
            ]
        if ways := twins(layout):
            steps = [("train", STEPS), ("export", "after")]
            pair = [
                self._run((family, dtype, way), f"{_name(case)}-{index}", steps)
                for index, way in enumerate(ways, 1)
            ]
            return [run | {"policy": run["policy"] | {"deterministic": True}} for run in pair]
        export = [("export", "after")] if dtype == "float32" else []
        steps = [("logprobs", TEXT), ("train", STEPS), *export]
        runs = [self._run(case, _name(case), steps)]
        if layout == "lora TP=2":
            runs.append(self._run((family, dtype, "lora"), f"{_name(case)}-1", steps))
        return runs

    def _run(self, case: tuple[str, str, str], name: str, steps: list[tuple[str, object]]) -> dict:
        family, dtype, layout = case
        how = LAYOUTS[layout]
        return {
            "ranks": how.ranks,
            "name": name,
            "model": str(self._folder / family),
            "policy": how.policy | {"dtype": dtype},
            "optimizer": {"lr": 1e-3, "weight_decay": 1.0, "clip_grad": CLIP},
            "loss": {"kl_coefficient": 0.05},
            "packing": how.packing,
            "data": str(self._folder / f"{family}.msgpack"),
            "do": steps,
        }

    def _prepare(self, family: str) -> None:
        kind, sizes = FAMILIES[family]
        with torch.device(DEVICE):
            folder = save_random(self._folder / family, kind, sizes)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
        sequences = tiny.make_sequences(model, lengths=LENGTHS)
        tiny.write_sequences(self._folder / f"{family}.msgpack", sequences)
        with torch.no_grad():
            self._scores[family] = tiny.score(model, torch.tensor(TEXT))[1:].cpu()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
        with torch.no_grad():
            rounded = tiny.score(model, torch.tensor(TEXT))[1:].cpu()
        self._rounding[family] = (rounded - self._scores[family]).abs().mean().item()
        del model
        self._wanted[family] = tiny.reference_steps(folder, sequences, STEPS, CLIP, DEVICE)
        if CUDA:
            torch.cuda.empty_cache()  # the processes that are compared share this GPU

    def _differences(self, case: tuple[str, str, str], answers: dict[str, list[dict]]) -> dict[str, float]:
        family, dtype, layout = case
        if layout == "resumed":
            (two,), (one,) = (answers[f"{_name(case)}-{size}"][:1] for size in (2, 1))
            return _compare_metrics(one["metrics"], *_losses_and_norms(two["metrics"][1:]))
        if twins(layout):
            return {"bits": self._differing(*(f"{_name(case)}-{index}" for index in (1, 2)), answers)}
        answer, wanted = answers[_name(case)][0], self._wanted[family]
        if layout == "lora TP=2":
            alone = f"{_name(case)}-1"
            weights = read_tensors(self._folder / "cases" / alone / "after") if dtype == "float32" else {}
            losses, norms = _losses_and_norms(answers[alone][0]["metrics"])
            wanted = replace(wanted, losses=losses, norms=norms, weights=weights)
        gaps = (torch.tensor(answer["scores"]) - self._scores[family]).abs()
        is_exact = dtype == "float32"
        gap = gaps.max().item() if is_exact else gaps.mean().item() / self._rounding[family]
        found = {"logprobs": gap} | _compare_metrics(answer["metrics"], wanted.losses, wanted.norms)
        if is_exact:
            after = read_tensors(self._folder / "cases" / _name(case) / "after")
            found["weights"] = _distance(read_tensors(self._folder / family), after, wanted.weights)
        return found

    def _differing(self, first: str, again: str, answers: dict[str, list[dict]]) -> float:
        """Count the weights and figures of two runs that are not the same to the last bit."""
        one, other = (read_tensors(self._folder / "cases" / name / "after") for name in (first, again))
        assert one.keys() == other.keys()
        differing = sum(not torch.equal(tensor, other[name]) for name, tensor in one.items())
        for metrics in zip(answers[first][0]["metrics"], answers[again][0]["metrics"], strict=True):
            mine, theirs = ({k: v for k, v in each.items() if "seconds" not in k} for each in metrics)
            differing += sum(value != theirs[name] for name, value in mine.items())
        return float(differing)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    files = names or {"model.safetensors"}
    return {name: data for file in sorted(files) for name, data in load_file(folder / file).items()}


def _distance(
    start: dict[str, torch.Tensor], found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> float:
    """Return the norm of the weights' error over the norm of what two steps changed."""
    error, change = 0.0, 0.0
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        right = wanted[name].to(DEVICE)
        error += (tensor.to(DEVICE) - right).double().square().sum().item()
        change += (start[name].to(DEVICE) - right).double().square().sum().item()
    return (error / change) ** 0.5


def relative(found: list[float], wanted: list[float]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-2) for ours, theirs in pairs)


def _name(case: tuple[str, str, str]) -> str:
    return "-".join(case)


def _losses_and_norms(metrics: list[dict]) -> tuple[list[float], list[float]]:
    losses, norms = ([each[f"policy/{key}"] for each in metrics] for key in ("loss", "grad_norm"))
    return losses, norms


def _compare_metrics(metrics: list[dict], losses: list[float], norms: list[float]) -> dict[str, float]:
    mine, of_mine = _losses_and_norms(metrics)
    return {"loss": relative(mine, losses), "norm": relative(of_mine, norms)}


def choose(words: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the cases that words name, all of 1 and 2 processes by default; exit for a word of none."""
    families = [word for word in words if word in FAMILIES] or list(FAMILIES)
    dtypes = [word for word in words if word in LIMITS] or list(LIMITS)
    sizes = {int(word) for word in words if word.isdigit()} or {1, 2}
    starts = [word for word in words if not word.isdigit() and word not in {*FAMILIES, *LIMITS}]
    for word in starts:
        if not any(layout.startswith(word) for _, _, layout in CASES):
            raise SystemExit(f"{word!r} is no model, precision, number of processes, or layout")
    return [
        case
        for case in CASES
        if case[0] in families and case[1] in dtypes and ranks_of(case[2]) in sizes
        if not starts or case[2].startswith(tuple(starts))
    ]


def main() -> int:
    what = "Compare each way to divide the learner, and each level of recomputation, with transformers."
    parser = cli.parser("tests.gpu.parallel", what, "", "qwen2 1", "EP=2 again resumed")
    words = "models, precisions, numbers of processes, and beginnings of layouts' names (default: all)"
    parser.add_argument("words", nargs="*", help=words)
    parser.add_argument("--limit-s", type=float, default=900.0, help="end each job after so long")
    arguments = cli.parse(parser)
    cases = choose(arguments.words)
    sizes = {ranks_of(layout) for _, _, layout in cases}
    if CUDA and torch.cuda.device_count() < gpus.needed(max(sizes), os.environ):
        print(f"{max(sizes)} GPUs are needed, or {gpus.SHARED}=1; {torch.cuda.device_count()} found")
        return 2
    disable_progress_bar()
    tiny.use_plain_torch()
    device, facts = torch.cuda.get_device_name() if CUDA else "CPU", Facts.find(torch.bfloat16, 128)
    print(f"torch {torch.__version__}, {device}, attention in bfloat16: {describe(facts)}", flush=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before cases that repeat
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        for result in Comparison(Path(name), cases, arguments.limit_s).results():
            print(result, flush=True)
            failed += not result.passed
    print(f"{failed} of {len(cases)} cases differ")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
