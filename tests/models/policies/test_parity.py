"""The same numbers as transformers and plain torch, whatever the parallelism and the packing."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.base.records import float_array, id_array  # noqa: E402
from hpc_swe.models.deltas.tensor_delta import Digests, text  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

STEPS = 3
TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(33)]
ONE = [[[0, 1], [2, 3]]]
HALVES = [[[0, 1]], [[2, 3]]]
FP32 = {"dtype": "float32"}
TENSOR = FP32 | {"tensor_parallel": 2}
CONTEXT = FP32 | {"context_parallel": 2}
PIPELINE = FP32 | {"pipeline_parallel": 2}
ROUTED = {"routed": tiny.EXPERTS["num_experts"], "crowded": tiny.EXPERTS["num_experts"] // 2}
"""From how many of the experts the sampler drew; one of two ranks has the "crowded" ones."""
FOUR = [[[0], [1], [2], [3]]]
OPTIMIZER = {"lr": 1e-3, "weight_decay": 1.0, "clip_grad": 0.05}
LOSS = {"kl_coefficient": 0.05}

# name -> (ranks, model, policy, packing, optimizer's differences)
CASES = {
    "tp1": (1, "dense", FP32, ONE, {}),
    "tp1-one-pack": (1, "dense", FP32, [[[3, 0, 2, 1]]], {"clip_grad": 0}),
    "tp1-chunks": (1, "dense", FP32 | {"logprob_chunk": 7}, [[[3], [1], [0, 2], "filler"]], {"clip_grad": 0}),
    "mistral-tp1": (1, "mistral", FP32, ONE, {"clip_grad": 0}),
    "ministral-tp1": (1, "ministral", FP32, ONE, {"clip_grad": 0}),
    "hybrid-tp1": (1, "hybrid", FP32, ONE, {"clip_grad": 0}),
    "hybrid-moe-tp1": (1, "hybrid-moe", FP32 | {"recompute": "elementwise"}, ONE, {"clip_grad": 0}),
    "seed-tp1": (1, "seed", FP32, ONE, {"clip_grad": 0}),
    "granite-tp1": (1, "granite", FP32 | {"recompute": "full"}, [[[0, 1, 3], [2]]], {"clip_grad": 0}),
    "granite4-tp1": (1, "granite4", FP32, ONE, {"clip_grad": 0}),
    "phi-tp1": (1, "phi", FP32, ONE, {"clip_grad": 0}),
    "smollm3-tp1": (1, "smollm3", FP32, ONE, {"clip_grad": 0}),
    "moe-tp1": (1, "moe", FP32, ONE, {}),
    "routed-tp1": (
        1,
        "routed",
        FP32 | {"recompute": "products"},
        [[[2], [0, 1], [3], "filler"]],
        {"clip_grad": 0},
    ),
    "tp2": (2, "dense", TENSOR, ONE, {}),
    "tp2-sequence-full": (2, "dense", TENSOR | {"recompute": "full"}, [[[0, 1, 3], [2]]], {}),
    "tied-tp2": (2, "tied", TENSOR | {"recompute": "products"}, ONE, {"clip_grad": 0}),
    "qwen2-tp2": (2, "qwen2", TENSOR, ONE, {"clip_grad": 0}),
    "llama-tp2": (2, "llama", TENSOR | {"recompute": "elementwise"}, ONE, {"clip_grad": 0}),
    "ministral-tp2": (
        2,
        "ministral",
        TENSOR | {"recompute": "elementwise"},
        [[[0, 1, 3], [2]]],
        {"clip_grad": 0},
    ),
    "hybrid-tp2": (2, "hybrid", TENSOR | {"recompute": "full"}, [[[0, 1, 3], [2]]], {"clip_grad": 0}),
    "hybrid-tp2-sequence": (
        2,
        "tied-hybrid",
        TENSOR | {"recompute": "products"},
        [[[3, 0, 2, 1], "filler"]],
        {"clip_grad": 0},
    ),
    "hybrid-fused-tp2": (
        2,
        "hybrid-fused",
        TENSOR | {"recompute": "products"},
        [[[0, 1, 3], [2]]],
        {"clip_grad": 0},
    ),
    "hybrid-moe-ep2": (2, "hybrid-moe", FP32 | {"expert_parallel": 2}, HALVES, {}),
    "hybrid-fused-ep2": (2, "hybrid-fused", FP32 | {"expert_parallel": 2}, HALVES, {}),
    "seed-tp2": (2, "seed", TENSOR, ONE, {"clip_grad": 0}),
    "granite-tp2": (2, "granite", TENSOR | {"recompute": "products"}, ONE, {"clip_grad": 0}),
    "granite4-tp2": (2, "granite4", TENSOR, ONE, {"clip_grad": 0}),
    "phi-tp2": (2, "phi", TENSOR, [[[0, 1, 3], [2]]], {"clip_grad": 0}),
    "smollm3-tp2": (2, "smollm3", TENSOR | {"recompute": "elementwise"}, ONE, {"clip_grad": 0}),
    "moe-tp2": (2, "moe", TENSOR | {"recompute": "products"}, ONE, {"clip_grad": 0}),
    "routed-tp2-full": (2, "routed", TENSOR | {"recompute": "full"}, [[[0, 1, 3], [2]]], {"clip_grad": 0}),
    "moe-fused-tp2": (2, "moe-fused", TENSOR, [[[0, 1, 3], [2]]], {"clip_grad": 0}),
    "dp2": (2, "dense", FP32, HALVES, {}),
    "dp2-filler": (2, "dense", FP32, [[[0, 1], "filler"], [[2], [3]]], {}),
    "moe-ep2": (2, "moe", FP32 | {"expert_parallel": 2, "recompute": "products"}, HALVES, {}),
    "moe-tp2-ep2": (
        2,
        "moe",
        TENSOR | {"expert_parallel": 2, "recompute": "elementwise"},
        ONE,
        {"clip_grad": 0},
    ),
    "idle-ep2-products": (2, "crowded", FP32 | {"expert_parallel": 2, "recompute": "products"}, HALVES, {}),
    "cp2": (2, "dense", CONTEXT, ONE, {}),
    "ministral-cp2": (2, "ministral", CONTEXT, ONE, {}),
    "moe-cp2-full": (2, "moe", CONTEXT | {"recompute": "full"}, [[[0, 1, 3], "filler", [2]]], {}),
    "tied-pp2": (2, "tied", PIPELINE, FOUR, {"clip_grad": 0}),
    "smollm3-pp2": (2, "smollm3", PIPELINE, FOUR, {"clip_grad": 0}),
    "routed-pp2": (2, "routed", PIPELINE | {"recompute": "full"}, FOUR, {"clip_grad": 0}),
    "tp2-pp2": (4, "tied", TENSOR | {"pipeline_parallel": 2}, FOUR, {"clip_grad": 0}),
    "routed-tp2-cp2-ep4": (  # the tokens of a filler are equal, so experts of two ranks at least get none
        4,
        "routed",
        TENSOR | {"context_parallel": 2, "expert_parallel": 4},
        [["filler", [0, 1], [2, 3]]],
        {},
    ),
    "routed-dp2-ep2-pp2": (  # the first stage has two microbatches in flight when it recomputes experts
        4,
        "routed",
        PIPELINE | {"expert_parallel": 2, "recompute": "full"},
        [[[0], [1]], [[2], [3]]],
        {},
    ),
}


class Runs:
    """All cases of a rank count run in one job, at the first question."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = tiny.make_models(folder / "models")
        self.models["crowded"] = self.models["routed"]
        self._answers: dict[str, list[dict]] = {}
        self._started: set[int] = set()
        self._references: dict[tuple[str, float], tiny.Steps] = {}
        self.sequences = {
            name: tiny.make_sequences(self._model(name), routed=ROUTED.get(name, 0))
            for name in {case[1] for case in CASES.values()}
        }

    def answers(self, name: str) -> list[dict]:
        """Of every rank."""
        size = CASES[name][0]
        if size not in self._started:
            self._started.add(size)
            cases = [self._case(other) for other, case in CASES.items() if case[0] == size]
            self._answers |= launcher.run_cases(size, cases, self.folder)
        return self._answers[name]

    def reference(self, name: str) -> tiny.Steps:
        """The same steps in transformers."""
        model, clip = CASES[name][1], self._clip(name)
        if (model, clip) not in self._references:
            steps = tiny.reference_steps(self.models[model], self.sequences[model], STEPS, clip)
            self._references[model, clip] = steps
        return self._references[model, clip]

    def exported(self, name: str, when: str) -> dict[str, torch.Tensor]:
        """All tensors of an export, by the index."""
        folder = self.folder / name / when
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: load_file(folder / file) for file in sorted(set(index.values()))}
        return {tensor: files[file][tensor] for tensor, file in index.items()}

    def _model(self, name: str):
        return AutoModelForCausalLM.from_pretrained(self.models[name], dtype=torch.float32)

    def _clip(self, name: str) -> float:
        return (OPTIMIZER | CASES[name][4])["clip_grad"]

    def _case(self, name: str) -> dict:
        _, model, policy, packing, optimizer = CASES[name]
        data = self.folder / f"{model}.msgpack"
        return {
            "name": name,
            "model": str(self.models[model]),
            "policy": policy,
            "optimizer": OPTIMIZER | optimizer,
            "loss": LOSS,
            "packing": packing,
            "data": tiny.write_sequences(data, self.sequences[model]),
            "do": [
                ("score", TEXT),
                ("export", "before"),
                ("evaluate", None),
                ("train", 1),
                *([("grads", "grads")] if self._clip(name) == 0 else []),
                ("train", STEPS - 1),
                ("export", "after"),
            ],
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_transformers(runs, name):
    model = AutoModelForCausalLM.from_pretrained(runs.models[CASES[name][1]], dtype=torch.float32)
    with torch.no_grad():
        scores = tiny.score(model, torch.tensor(TEXT))[1:]
    assert (torch.tensor(runs.answers(name)[0]["scores"]) - scores).abs().max() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_a_validation_is_the_loss_of_transformers_and_changes_nothing(runs, name):
    """The steps behind it are compared below, and would notice a gradient or a step of it."""
    model = AutoModelForCausalLM.from_pretrained(runs.models[CASES[name][1]], dtype=torch.float32)
    loss = nll = count = 0.0
    for sequence in runs.sequences[CASES[name][1]]:
        with torch.no_grad():
            tokens = torch.from_numpy(id_array(sequence.token_ids).astype("int64"))
            scores = tiny.score(model, tokens, sequence.routing).numpy()
        mask = sequence.mask_array
        loss, nll = (
            loss - float((float_array(sequence.weights) * scores).sum()),
            nll - float((mask * scores).sum()),
        )
        count += float(mask.sum())
    for answer in runs.answers(name):
        found = answer["validation"]
        assert found["policy/loss"] == pytest.approx(loss, rel=2e-5)
        assert found["policy/nll"] == pytest.approx(nll / count, rel=2e-5)
        assert found["policy/tokens"] == count


@pytest.mark.parametrize("name", ["tp1", "tp1-one-pack", "tp1-chunks", "tp2", "dp2-filler", "cp2"])
def test_a_sequence_has_one_ratio_of_gspo_however_it_is_packed(runs, name):
    model, loss = runs._model("dense"), 0.0
    for sequence in runs.sequences["dense"]:
        tokens, mask = torch.from_numpy(id_array(sequence.token_ids).astype("int64")), sequence.mask_array
        with torch.no_grad():
            gap = (tiny.score(model, tokens).numpy() - float_array(sequence.logprobs))[mask > 0]
        weighted = float_array(sequence.weights) * float_array(sequence.advantages)
        loss -= float(weighted.sum()) * math.exp(gap.mean())
    for answer in runs.answers(name):
        assert answer["gspo"]["policy/loss"] == pytest.approx(loss, rel=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_are_those_of_plain_torch(runs, name):
    expected = runs.reference(name)
    for answer in runs.answers(name):
        # Rounding differs by processor, and Adam divides small gradients by their size: up to 4e-5 was seen.
        losses = [m["policy/loss"] for m in answer["metrics"]]
        assert losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
        assert [m["policy/grad_norm"] for m in answer["metrics"]] == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize(("name", "least", "most"), [("moe-tp1", 1, 1), ("idle-ep2-products", 1.8, 2)])
def test_ranks_report_the_load_of_the_busiest_experts(runs, name, least, most):
    """Only the last token of a sequence has other experts than those that the sampler drew."""
    loads = {found["policy/expert_load"] for answer in runs.answers(name) for found in answer["metrics"]}
    assert least <= min(loads) <= max(loads) <= most
    assert "policy/expert_load" not in runs.answers("tp1")[0]["metrics"][0]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[4].get("clip_grad") == 0])
def test_gradients_are_those_of_autograd_for_any_packing_and_parallelism(runs, name):
    expected = runs.reference(name).grads
    runs.answers(name)
    found = runs.exported(name, "grads")
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max() for grad in expected.values())
    limit = 1e-5 * largest if "hybrid" in name else 1e-6  # the rule of delta nets amplifies each rounding
    assert max((found[key] - grad).abs().max() for key, grad in expected.items()) < limit


@pytest.mark.parametrize("name", CASES)
def test_three_adam_steps_end_at_the_same_weights(runs, name):
    expected = runs.reference(name).weights
    runs.answers(name)
    found = runs.exported(name, "after")
    assert found.keys() == expected.keys()
    # Adam turns the rounding of a gradient near 0 into a visible part of lr = 1e-3, for a few weights
    errors = torch.cat([(found[key] - weight).abs().flatten() for key, weight in expected.items()])
    assert errors.max() < 1e-3
    assert (errors > 1e-4).sum() <= len(errors) / 10_000


@pytest.mark.parametrize("name", CASES)
def test_an_export_of_what_was_loaded_is_the_same_bits(runs, name):
    runs.answers(name)
    source = load_file(runs.models[CASES[name][1]] / "model.safetensors")
    found = runs.exported(name, "before")
    assert found.keys() == source.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in source.items())


@pytest.mark.parametrize("name", ["routed-tp1", "routed-tp2-full"])
def test_tokens_go_to_the_experts_that_the_engine_chose(runs, name):
    """The sampler differs by its experts, drawn at random, and by noise; replay leaves the noise alone."""
    model, noise = runs._model("routed"), []
    for sequence in runs.sequences["routed"]:
        tokens = torch.from_numpy(id_array(sequence.token_ids).astype("int64"))
        with torch.no_grad():
            gap = tiny.score(model, tokens, sequence.routing).numpy() - float_array(sequence.logprobs)
        noise += gap[sequence.mask_array > 0].tolist()
    found = runs.answers(name)[0]
    k3 = sum(math.exp(gap) - 1 - gap for gap in noise) / len(noise)
    print(
        name, "gap/k3 replayed, free, of the noise:", found["replayed"]["gap/k3"], found["free"]["gap/k3"], k3
    )
    assert found["replayed"]["gap/k3"] == pytest.approx(k3, rel=1e-3)
    assert found["replayed"]["gap/max"] == pytest.approx(max(map(abs, noise)), abs=1e-4)
    assert found["free"]["gap/k3"] > 1.3 * k3


def test_every_rank_writes_about_the_same_share_and_tells_its_digests(runs):
    computer = Digests(torch.device("cpu"))
    answers = runs.answers("tp2")
    found = runs.exported("tp2", "after")
    reported = {name: info for answer in answers for name, info in answer["tensors"].items()}
    assert reported.keys() == found.keys()
    for name, tensor in found.items():
        info = reported[name]
        assert info["digest"] == text(int(computer.tensor(tensor)))
        assert (info["shape"], info["dtype"]) == (list(tensor.shape), "float32")
    sizes = [sum(found[name].nbytes for name in answer["tensors"]) for answer in answers]
    assert max(sizes) < 1.5 * min(sizes)


def test_an_export_is_a_folder_that_transformers_opens(runs):
    runs.answers("tp2")
    folder = runs.folder / "tp2" / "after"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, runs.exported("tp2", "after")["lm_head.weight"])
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"):
        assert (folder / name).read_bytes() == (runs.models["dense"] / name).read_bytes()


def test_metrics_are_the_same_on_every_rank(runs):
    for name in ("tp2", "dp2", "dp2-filler"):
        first, second = runs.answers(name)
        assert first["metrics"] == second["metrics"]


def test_the_norm_counts_every_shard_once(runs):
    norms = [
        runs.answers(name)[0]["metrics"][0]["policy/grad_norm"]
        for name in ("tp1", "tp2", "dp2", "tp1-one-pack")
    ]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
