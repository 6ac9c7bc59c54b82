"""Compare what vLLM samples with the learner and with transformers, before and after swaps of the weights.

    python -m tests.gpu.engines [dense] [qwen2] [llama] [mistral] [ministral] [experts] [lora]
                                [granite] [granite4] [seed] [smollm3] [phi]
                                [delta-net] [delta-moe] [lora-moe]
                                [qwen2-2] [experts-2] [lora-2]

starts one engine for each case; a case that ends in -2 has an engine of two workers. The learner exports, the
engine serves and samples, the learner trains on the samples, and the engine loads the new weights: first as a
delta, then as a full snapshot. In the cases lora the learner trains adapters, and a delta holds these. The
model of llama scales positions as Llama 3.1 does, and those of mistral and ministral by YaRN, the last one
queries, too; all answers lie beyond the context of pretraining that these assume. Each line compares
log-probabilities of sampled tokens: their mean distance from transformers in float32, that of the learner
from both, and what bfloat16 does to transformers itself; then those of the text that was trained, with the
weights after the step and with those before it.
Weights are random. Where the engine returns the experts of each token (on a GPU), a second line has everybody
else use these. It exits with 1 if a distance is above its limit, the old weights explain the new text, or an
engine on a GPU lets vLLM load all weights anew. The log of each engine stays in the folder for temporary
files.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hpc_swe.base import cli
from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import FREE, Batch, MicroBatch, Sampling, WeightVersion, floats, ids
from hpc_swe.models.engines.base import FALLBACK, Weights
from hpc_swe.models.engines.vllm import Vllm
from hpc_swe.models.policies.base import LossConfig, OptimizerConfig
from hpc_swe.models.policies.megatron import Megatron
from hpc_swe.roles.learner.loss import PolicyObjective
from hpc_swe.roles.learner.publish import Publisher, Snapshots
from tests.kit.checkout import ROOT, STAND_INS
from tests.kit.engine_kit import CPU, TOKEN, make_run, serving, verified
from tests.kit.engine_kit import SIZES as TINY
from tests.kit.random_model import save_random, save_wrapped
from tests.kit.ranks import tiny

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if CUDA else ("cpu", "float32")
GPU = Vllm(kv_cache_bytes=1 << 31, gpu_memory_share=0.1, environ={"VLLM_USE_FLASHINFER_SAMPLER": "0"})
ALONE, PAIRS = (
    ("dense", "qwen2", "llama", "mistral", "ministral", "experts", "lora"),
    ("qwen2-2", "experts-2", "lora-2"),
)
ALONE += ("granite", "granite4", "seed", "smollm3", "phi", "delta-net", "delta-moe", "lora-moe")
CASES = dict.fromkeys(ALONE, 1) | dict.fromkeys(PAIRS, 2)
"""Name of a case -> number of its engine's workers."""
SMALL = TINY | {"hidden_size": 128, "tie_word_embeddings": False}
WIDE = {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "initializer_range": 0.04}
WIDE |= {"num_hidden_layers": 4, "mamba_ssm_dtype": "float32"}
FEW = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
HYBRID_MOE = ("Qwen3_5Moe", SMALL | tiny.HYBRID | WIDE | FEW | {"shared_expert_intermediate_size": 64})
LARGE = {"initializer_range": 0.02, "max_position_embeddings": 4096, "tie_word_embeddings": True}
# Qwen3-0.6B, Qwen2.5-0.5B, Llama-3.2-1B, and layers of Mistral-Nemo and of Qwen3-30B-A3B with fewer words and
# experts. Llama and Mistral do not normalize queries and keys: at this width, random weights of 0.02 make
# attention so sharp that bfloat16 alone moves log-probabilities by more than GAP.
QWEN3 = LARGE | {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN2 = LARGE | {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA = LARGE | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "initializer_range": 0.012,
}  # fmt: skip
NEMO = LARGE | {
    "vocab_size": 32768, "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.007,
    "tie_word_embeddings": False,
}  # fmt: skip
MANY = LARGE | {
    "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 32,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
# Qwen3.5-0.8B with fewer words; with weights of 0.02, bfloat16 alone moves log-probabilities by 0.05.
HYBRID = LARGE | tiny.HYBRID | {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6, "mamba_ssm_dtype": "float32", "initializer_range": 0.007,
}  # fmt: skip
# Answers begin after the original 16 tokens. vLLM has YaRN's angles of `factor` times as many positions only.
LLAMA3 = {"rope_parameters": tiny.LLAMA3 | {"original_max_position_embeddings": 16}}
YARN = {"rope_parameters": tiny.YARN | {"factor": 128.0}, "max_position_embeddings": 2048}
SCALED = {
    "rope_parameters": tiny.MINISTRAL["rope_parameters"] | {"factor": 128.0, "apply_yarn_scaling": False}
}
MINISTRAL = (NEMO if CUDA else SMALL | {"head_dim": 64}) | YARN | {"llama_4_scaling": tiny.SCALED} | SCALED
SHAPES = {
    "dense": ("Qwen3", QWEN3 if CUDA else SMALL | {"head_dim": 32}),
    "qwen2": ("Qwen2", QWEN2 if CUDA else SMALL),
    "llama": ("Llama", (LLAMA if CUDA else SMALL) | LLAMA3),
    "mistral": ("Mistral", (NEMO if CUDA else SMALL | {"head_dim": 64}) | YARN | {"sliding_window": None}),
    "ministral": ("Ministral3", MINISTRAL | tiny.NO_TOKENS),
    "granite": ("Granite", SMALL | tiny.MULTIPLIERS),
    "granite4": ("GraniteMoeHybrid", SMALL | tiny.MULTIPLIERS | tiny.GRANITE4 | {"num_hidden_layers": 4}),
    "seed": ("SeedOss", SMALL | tiny.UNDISTURBED | {"head_dim": 32}),
    "smollm3": ("SmolLM3", SMALL | {"num_hidden_layers": 4}),
    "phi": ("Phi3", SMALL | tiny.NO_TOKENS),
    "lora": ("Qwen2", QWEN2 if CUDA else SMALL),
    "delta-net": ("Qwen3_5", HYBRID if CUDA else SMALL | tiny.HYBRID | WIDE),
    "delta-moe": HYBRID_MOE,
    "lora-moe": HYBRID_MOE,
    "experts": ("Qwen3Moe", MANY if CUDA else SMALL | FEW | {"head_dim": 32}),
}
COUNT, PROMPTS, ANSWER = (32, (16, 600), 128) if CUDA else (4, (4, 60), 40)
LR = 3e-5 if CUDA else 1e-3
OF_ADAPTERS = 10.0 if CUDA else 3.0
"""Adapters have a learning rate so many times that of all weights."""
EXACT = 1e-4
"""Largest mean distance in float32."""
ROUNDINGS = 3.0
"""Largest mean distance in bfloat16, in units of what bfloat16 does to transformers."""
GAP = 0.01
"""Largest mean distance between learner and engine, even where bfloat16 does more to transformers.

The loss takes this distance for a change of the policy: it moves ratios by 1 %, and clips them at 20 %.
Where routing is not replayed, rounding sends a few tokens to other experts: there the nearest 95 % count.
"""


@dataclass(frozen=True)
class Completions:
    """Texts of prompt and answer, with the engine's log-probabilities of the answer and its experts."""

    prompts: list[np.ndarray]
    texts: list[np.ndarray]
    logprobs: list[np.ndarray]
    routings: list[bytes]
    """uint8 [tokens, layers * k] of each text, or empty."""

    def of_answers(self, scores: list[np.ndarray]) -> np.ndarray:
        """Return the last of each text's scores, those of sampled tokens."""
        pairs = zip(scores, self.logprobs, strict=True)
        return np.concatenate([each[-len(sampled) :] for each, sampled in pairs])


@dataclass(frozen=True)
class Row:
    """Compare one version of a case's weights."""

    case: str
    weights: str
    kind: str
    found: dict[str, np.ndarray]
    """Differences of log-probabilities of sampled tokens, by what was compared."""

    @property
    def passed(self) -> bool:
        """Return whether all that should be equal is; experts that are not replayed are only shown."""
        mean = {name: float(np.abs(each).mean()) for name, each in self.found.items()}
        limit = ROUNDINGS * mean["bf16"] if "bf16" in mean else EXACT
        counted = 0.95 if self.case.endswith("moe") else 1.0
        gap = np.sort(np.abs(self.found["gap"]))[: round(counted * len(self.found["gap"]))].mean()
        near = all(mean[name] <= limit for name in ("engine", "learner", "gap")) and gap <= GAP
        is_far = any((np.abs(self.found[name]) > 1).any() for name in ("engine", "gap"))
        changed = "before" not in mean or mean["before"] > 2 * mean["after"]
        return changed and (self.kind == "free" or (near and not is_far))  # nan is not near

    def __str__(self) -> str:
        numbers = "  ".join(f"{name} {_figures(each)}" for name, each in self.found.items())
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict} {self.case:9} {self.weights:6} {self.kind:6} {numbers}"


def _figures(differences: np.ndarray) -> str:
    """Mean, 99th percentile, and the share above one nat if there is any."""
    sizes = np.abs(differences)
    far = f" >1: {(sizes > 1).mean():.1e}" if (sizes > 1).any() else ""
    return f"{sizes.mean():.1e} p99 {np.quantile(sizes, 0.99):.1e}{far}"


class Comparison:
    """Hold one case: a run with a learner, and an engine that loads what it publishes."""

    def __init__(self, case: str, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._family = case.removesuffix("-2")
        self._is_hybrid = is_hybrid = SHAPES[self._family][0].startswith("Qwen3_5")
        self._dtype = "bfloat16" if is_hybrid else DTYPE  # of which a CPU has no other
        self._routes = CUDA and self._family == "experts"
        self._engine = msgspec.structs.replace(
            GPU if CUDA else CPU,
            tensor_parallel=CASES[case],
            dtype=self._dtype,
            return_routing=self._routes,
            extra=[] if case == "dense" else ["--enforce-eager"],  # one case has CUDA graphs, as runs have
        )
        if is_hybrid and not find_spec("torchvision"):
            path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(STAND_INS)))}
            self._engine = msgspec.structs.replace(self._engine, environ=self._engine.environ | path)
        self._run = make_run(folder / "run")
        self._rng = np.random.default_rng(0)

    def rows(self) -> Iterator[Row]:
        """Start, then load a delta and a full snapshot; yield the comparisons of each."""
        model = self._make_model()
        policy, lr = Megatron(dtype=self._dtype, device="gpu" if CUDA else "cpu", recompute="none"), LR
        if self._family.startswith("lora"):
            policy, lr = msgspec.structs.replace(policy, lora_rank=8), LR * OF_ADAPTERS
        learner = policy.build(model, OptimizerConfig(lr=lr, warmup_steps=0, weight_decay=0.0), None)
        publisher = Publisher(self._run, learner, 1, "test", Snapshots(every=2))
        publisher.publish_weights()
        weights = verified(self._run, WeightVersion(incarnation=1, step=0))
        opened, log = weights.folder, Path(tempfile.gettempdir()) / f"engine-{self._case}.log"
        with serving(self._engine, weights.folder, log, weights.version) as url:
            done = self._sample(url, self._prompts())
            slow = [line for line in log.read_text().splitlines() if FALLBACK in line]
            if CUDA and slow and not self._is_hybrid:  # of which vLLM has one tensor in float32
                raise EngineError(f"{self._case}: {slow[0]}")
            yield from self._compare("start", learner, done, opened, {})
            for name in ("delta", "full"):
                learner.train(self._batch(learner.step, done), PolicyObjective(LossConfig()))
                publisher.publish_weights()
                version = WeightVersion(incarnation=1, step=learner.step)
                parent = Weights(WeightVersion(), model) if learner.deltas_of_model else weights
                weights = verified(self._run, version, parent if name == "delta" else None)
                assert (weights.manifest.parent is None) == (name == "full")
                self._engine.reload(url, TOKEN, weights)
                before, opened = opened, self._opened(learner, weights)
                swap = self._compare_swap(url, done, before, opened)
                done = self._sample(url, done.prompts)
                yield from self._compare(name, learner, done, opened, swap)
        learner.close()

    def _make_model(self) -> Path:
        family, sizes = SHAPES[self._family]

        def change(name: str, parameter: torch.Tensor) -> None:
            if name.endswith(".bias"):
                parameter.normal_(0, 0.1)
            elif "linear_attn" in name:
                tiny.move(name, parameter)
            elif family == "Qwen3_5Moe" and name.endswith("mlp.gate.weight"):
                parameter.mul_(30)  # or bfloat16 alone sends tokens to other experts
            elif self._family == "experts" and "experts" in name and not CUDA:
                parameter.normal_(0, 0.3)

        folder = self._folder / "model"
        with torch.device(DEVICE):
            if family.startswith("Qwen3_5"):  # vLLM 0.26 knows it as it is published, with a model of images
                return save_wrapped(folder, family, sizes, change, self._dtype)
            return save_random(folder, family, sizes, 0, change, dtype=self._dtype)

    def _prompts(self) -> list[np.ndarray]:
        vocabulary = SHAPES[self._family][1]["vocab_size"]
        lengths = self._rng.integers(*PROMPTS, COUNT)
        return [self._rng.integers(10, vocabulary, length).astype(np.int32) for length in lengths]

    def _sample(self, url: str, prompts: list[np.ndarray]) -> Completions:
        sampling = Sampling(max_tokens=ANSWER)
        with ThreadPoolExecutor(COUNT) as pool:
            found = pool.map(lambda p: self._engine.generate(url, TOKEN, p, sampling, 180.0), prompts)
            pairs = list(zip(prompts, found, strict=True))
        texts = [np.concatenate((p, np.asarray(each.token_ids, np.int32))) for p, each in pairs]
        routings = [
            b"" if each.routing is None
            else each.routing.tobytes() + bytes([FREE]) * each.routing.shape[1]
            for _, each in pairs
        ]  # fmt: skip
        return Completions(prompts, texts, [np.asarray(each.logprobs) for _, each in pairs], routings)

    def _compare(
        self, name: str, learner: object, done: Completions, folder: Path, swap: dict[str, np.ndarray]
    ) -> Iterator[Row]:
        """Compare what was sampled with transformers on the weights of a folder."""
        sampled, bare = np.concatenate(done.logprobs), [b""] * len(done.texts)
        for kind, routings in (("free", bare), ("replay", done.routings))[: 1 + self._routes]:
            right = done.of_answers(_score(_load(folder), done.texts, routings))
            mine = done.of_answers(_learn(learner, done.texts, routings))
            found = {"engine": sampled - right, "learner": mine - right, "gap": mine - sampled}
            if self._dtype == "bfloat16":
                rounded = _score(_load(folder, "bfloat16"), done.texts, routings)
                found["bf16"] = done.of_answers(rounded) - right
            yield Row(self._case, name, kind if self._routes else "", found | swap)
            swap = {}

    def _compare_swap(self, url: str, done: Completions, before: Path, after: Path) -> dict[str, np.ndarray]:
        """Compare the engine's scores of the text that was trained with transformers before and after it."""
        scores = [np.asarray(self._engine.score(url, TOKEN, text.tolist())) for text in done.texts]
        found, bare = done.of_answers(scores), [b""] * len(scores)
        folders = {"after": after, "before": before}
        return {
            name: found - done.of_answers(_score(_load(folder), done.texts, bare))
            for name, folder in folders.items()
        }

    def _batch(self, step: int, done: Completions) -> Batch:
        """Reward the answers at random."""
        lengths = [len(text) for text in done.texts]
        mask = np.concatenate(
            [np.arange(len(t)) >= len(p) for p, t in zip(done.prompts, done.texts, strict=True)]
        )
        known = np.zeros(len(mask), np.float32)
        known[mask] = np.concatenate(done.logprobs)
        gains = np.repeat(self._rng.choice([-1.0, 1.0], COUNT), lengths)
        micro = MicroBatch(
            token_ids=ids(np.concatenate(done.texts)),
            mask=mask.astype(np.uint8).tobytes(),
            logprobs=floats(known),
            advantages=floats((gains * mask).astype(np.float32)),
            weights=floats((mask / mask.sum()).astype(np.float32)),
            sequence_lengths=lengths,
            routing=b"".join(done.routings),
        )
        return Batch(step=step, rank=0, microbatches=[micro], minibatches=[])

    def _opened(self, learner: object, weights: Weights) -> Path:
        """Return a folder that transformers opens; a delta is none, so the learner exports once more."""
        if weights.manifest.parent is None:
            return weights.folder
        (folder := self._folder / "opened").mkdir()
        learner.export(folder)
        return folder


def _load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE)


def _score(model: PreTrainedModel, texts: list[np.ndarray], routings: list[bytes]) -> list[np.ndarray]:
    """Return transformers' log-probabilities of all tokens."""
    found = []
    with torch.no_grad():
        for text, routing in zip(texts, routings, strict=True):
            found.append(tiny.score(model, torch.from_numpy(text.astype(np.int64)), routing).cpu().numpy())
    return found


def _learn(learner: object, texts: list[np.ndarray], routings: list[bytes]) -> list[np.ndarray]:
    """Return the learner's log-probabilities of all tokens but the first of each text."""
    found = []
    with torch.no_grad():
        for text, routing in zip(texts, routings, strict=True):
            every = np.arange(1, len(text))
            found.append(learner._scorer.forward(text, [len(text)], every, routing)[0].cpu().numpy())
    return found


def main() -> int:
    what = (
        "Compare what vLLM samples with the learner and with transformers, before and after swaps of weights."
    )
    parser = cli.parser("tests.gpu.engines", what, "", "qwen2-2 experts")
    default = [name for name in CASES if CUDA or name != "dense"]
    parser.add_argument("case", nargs="*", default=default, help=f"some of {', '.join(CASES)} (default: all)")
    names = cli.parse(parser).case
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{unknown[0]!r} is no case{cli.suggestion(unknown[0], CASES)}")
    most = max(CASES[name] for name in names)
    if CUDA and torch.cuda.device_count() < most:
        print(f"{most} GPUs are needed, {torch.cuda.device_count()} found")
        return 2
    disable_progress_bar()
    tiny.use_plain_torch()
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "CPU", flush=True)
    failed = 0
    for name in names:
        try:
            with tempfile.TemporaryDirectory() as folder:
                for row in Comparison(name, Path(folder)).rows():
                    print(row, flush=True)
                    failed += not row.passed
        except Exception as error:  # noqa: BLE001 - the next case has an engine and a folder of its own
            print(f"FAIL {name:9} {error}", flush=True)
            traceback.print_exc()
            failed += 1
    print(f"{failed} comparisons failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
