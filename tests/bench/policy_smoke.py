"""The Megatron policy on CUDA and NCCL: the numbers of transformers on the same GPU.

    python -m tests.bench.policy_smoke

starts its own ranks, one a GPU, at every tensor-parallel size of `SIZES` that the machine has GPUs
for. Without CUDA the same runs on the CPU over gloo, at sizes that fit there.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.kit.ranks import launcher, tiny

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = [size for size in (1, 2) if size <= torch.cuda.device_count() or not CUDA]
STEPS = 3
TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(33)]
FP32 = {"dtype": "float32"}
BF16 = {"dtype": "bfloat16"}
OPTIMIZER = {"lr": 1e-3, "weight_decay": 1.0, "clip_grad": 0.05}
LOSS = {"kl_coefficient": 0.05}
MID = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
if not CUDA:
    MID |= {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "head_dim": 16}


@dataclass(frozen=True)
class Check:
    """One figure and the largest that passes."""

    what: str
    found: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.found <= self.limit  # nan does not

    def __str__(self) -> str:
        return (
            f"{'ok  ' if self.passed else 'FAIL'} {self.what:58} {self.found:9.2e} (at most {self.limit:.0e})"
        )


def make_models(folder: Path) -> dict[str, Path]:
    """Tiny ones of three kinds, and one of a real one's proportions; each in both precisions."""
    made = tiny.make_models(folder / "tiny")
    save_model(MID, folder / "tiny" / "mid", torch.float32)
    models = {name: made[name] for name in ("dense", "moe")} | {"mid": folder / "tiny" / "mid"}
    for name, path in list(models.items()):
        models[f"{name}-bf16"] = folder / f"{name}-bf16"
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(
            models[f"{name}-bf16"]
        )
    return models


def save_model(config: dict[str, object], folder: Path, dtype: torch.dtype) -> None:
    """Random weights, made on the GPU."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        Qwen3ForCausalLM(Qwen3Config(**config)).to(dtype).save_pretrained(folder)


class Runs:
    """Every case of every tensor-parallel size, run in one job a size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = make_models(folder)
        names = ("dense", "moe", "mid")
        self._sequences = {name: tiny.make_sequences(self._model(name)) for name in names}
        self._references = {
            name: tiny.reference_steps(
                self._models[name], self._sequences[name], STEPS, OPTIMIZER["clip_grad"], DEVICE
            )
            for name in names
        }

    def check(self, size: int) -> Iterator[Check]:
        """All figures of a tensor-parallel size; the checkpoint is that of the largest one."""
        cases = [self._fp32(name, size) for name in ("dense", "moe", "mid")]
        cases += [self._bf16(name, size) for name in ("dense", "moe", "mid")]
        cases += [self._checkpoint("dense", size), self._checkpoint("mid", size)]
        folder = self._folder / f"tp{size}"
        answers = launcher.run_cases(size, cases, folder)
        for case in cases:
            answer = answers[case["name"]][0]
            where = f"TP={size} {case['name']:12}"
            if case["name"].startswith("resumed"):
                yield from self._judge_resume(where, case, answer)
            else:
                yield from self._judge_export(where, Path(case["model"]), folder / case["name"] / "before")
                judge = self._judge_bf16 if case["policy"]["dtype"] == "bfloat16" else self._judge_fp32
                yield from judge(where, case["name"].removesuffix("-bf16"), answer)

    def _model(self, name: str):
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        return AutoModelForCausalLM.from_pretrained(self._models[name], dtype=dtype).to(DEVICE)

    def _case(self, name: str, size: int, policy: dict[str, object]) -> dict:
        parallel = {"tensor_parallel": size, "sequence_parallel": size > 1}
        return {
            "name": name,
            "model": str(self._models[name]),
            "policy": policy | parallel,
            "optimizer": OPTIMIZER,
            "loss": LOSS,
            "packing": [[[0, 1], [2, 3]]],
            "data": tiny.write_sequences(
                self._folder / f"{name}.msgpack", self._sequences[name[:5].split("-")[0]]
            ),
        }

    def _fp32(self, name: str, size: int) -> dict:
        do = [("score", TEXT), ("export", "before"), ("train", STEPS)]
        do += [("save", str(self._folder / f"{name}-of{size}")), ("train", 2)] if name != "moe" else []
        return self._case(name, size, FP32) | {"do": do}

    def _bf16(self, name: str, size: int) -> dict:
        learn = {"optimizer": {"lr": 1e-3}, "loss": {"objective": "sft"}}
        do = [("score", TEXT), ("export", "before"), ("train", 5)]
        return self._case(f"{name}-bf16", size, BF16) | learn | {"do": do}

    def _checkpoint(self, name: str, size: int) -> dict:
        do = [("load", str(self._folder / f"{name}-of{SIZES[-1]}")), ("train", 2)]
        return self._case(name, size, FP32) | {"name": f"resumed-{name}", "do": do}

    def _judge_fp32(self, where: str, name: str, answer: dict) -> Iterator[Check]:
        model, wanted = self._model(name), self._references[name]
        with torch.no_grad():
            logits = model(torch.tensor([TEXT], device=DEVICE)).logits[0].cpu()
            scores = tiny.score(model, torch.tensor(TEXT))[1:].cpu()
        yield Check(f"{where} logits", largest(torch.tensor(answer["logits"]), logits), 2e-5)
        yield Check(f"{where} log-probabilities", largest(torch.tensor(answer["scores"]), scores), 2e-5)
        steps = answer["metrics"][:STEPS]
        losses, norms = ([m[key] for m in steps] for key in ("policy/loss", "policy/grad_norm"))
        yield Check(f"{where} loss of {STEPS} AdamW steps, relative", relative(losses, wanted.losses), 1e-4)
        yield Check(f"{where} gradient norm, relative", relative(norms, wanted.norms), 1e-4)

    def _judge_bf16(self, where: str, name: str, answer: dict) -> Iterator[Check]:
        with torch.no_grad():
            exact = tiny.score(self._model(name), torch.tensor(TEXT))[1:].cpu()
            theirs = tiny.score(self._model(f"{name}-bf16"), torch.tensor(TEXT))[1:].cpu()
        ours, theirs = mean(torch.tensor(answer["scores"]), exact), mean(theirs, exact)
        yield Check(f"{where} error of log-probabilities over transformers'", ours / theirs, 2)
        losses = [m["policy/loss"] for m in answer["metrics"]]
        falls = [after / before for before, after in zip(losses, losses[1:], strict=False)]
        yield Check(f"{where} loss of a step over that of the last", max(falls), 1)

    def _judge_export(self, where: str, model: Path, export: Path) -> Iterator[Check]:
        source, found = read_tensors(model), read_tensors(export)
        differing = source.keys() ^ found.keys() | {
            name for name in source if not torch.equal(source[name], found[name])
        }
        yield Check(f"{where} tensors not exported bit for bit", len(differing), 0)

    def _judge_resume(self, where: str, case: dict, answer: dict) -> Iterator[Check]:
        name = case["name"].removeprefix("resumed-")
        saved = self._folder / f"tp{SIZES[-1]}" / name / "rank0.json"
        wanted = [m["policy/loss"] for m in json.loads(saved.read_text())["metrics"]][-2:]
        found = [m["policy/loss"] for m in answer["metrics"]]
        yield Check(f"{where} loss after a resume from TP={SIZES[-1]}", relative(found, wanted), 1e-4)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {
        name: data for path in sorted(folder.glob("*.safetensors")) for name, data in load_file(path).items()
    }


def largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (found - wanted).abs().max().item()


def mean(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (found - wanted).abs().mean().item()


def relative(found: list[float], wanted: list[float]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-2) for ours, theirs in pairs)


def main() -> int:
    os.environ["TORCHDYNAMO_DISABLE"] = "0" if CUDA else "1"  # the ranks compile what users' do
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "CPU", "sizes", SIZES, flush=True)
    disable_progress_bar()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name))
        for size in reversed(SIZES):
            for check in runs.check(size):
                print(check, flush=True)
                failed += not check.passed
    print(f"{failed} checks failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
