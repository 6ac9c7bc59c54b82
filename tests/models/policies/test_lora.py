"""Low-rank adapters: the numbers of LoRA written down in plain torch, whatever the parallelism."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.base.records import WeightManifest, WeightVersion  # noqa: E402
from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import folders  # noqa: E402
from hpc_swe.models.engines._vllm.files import Link, Wanted, build, check_chain, shapes  # noqa: E402
from hpc_swe.models.engines._vllm.update import describe  # noqa: E402
from hpc_swe.models.engines.base import Weights  # noqa: E402
from hpc_swe.models.model_shape import ModelShape  # noqa: E402
from hpc_swe.models.policies._megatron.counts import adapter_parameters  # noqa: E402
from hpc_swe.models.policies._megatron.weights.lora import Adapters  # noqa: E402
from hpc_swe.models.policies.megatron import Megatron  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

STEPS, RANK, ALPHA = 3, 4, 6
TEXT = [(7 * i + 3) % tiny.VOCAB for i in range(33)]
ONE = [[[0, 1], [2, 3]]]
HALVES = [[[0, 1]], [[2, 3]]]
LORA = {"dtype": "float32", "lora_rank": RANK, "lora_alpha": ALPHA}
TENSOR = LORA | {"tensor_parallel": 2}
EIGHT = LORA | {"lora_rank": 8, "expert_parallel": 2}
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0}
# name -> (ranks, model, policy, packing)
CASES = {
    "tp1": (1, "dense", LORA | {"recompute": "elementwise"}, ONE),
    "tp1-attention": (1, "qwen2", LORA | {"lora_layers": "attention"}, ONE),
    "hybrid-tp1": (1, "tied-hybrid", LORA, ONE),
    "moe-tp1": (1, "moe", LORA | {"recompute": "full"}, ONE),
    "tp2": (2, "dense", TENSOR | {"recompute": "elementwise"}, ONE),
    "tp2-sequence": (2, "qwen2", TENSOR | {"recompute": "products"}, [[[0, 1, 3], [2]]]),
    "phi-tp2": (2, "phi", TENSOR | {"lora_layers": "attention"}, ONE),
    "hybrid-tp2": (2, "hybrid", TENSOR | {"recompute": "full"}, [[[0, 1, 3], [2]]]),
    "hybrid-moe-tp2": (2, "hybrid-moe", TENSOR | {"recompute": "products"}, [[[0, 1, 3], [2]]]),
    "moe-tp2-ep2": (2, "moe", TENSOR | {"recompute": "elementwise", "expert_parallel": 2}, ONE),
    "hybrid-fused-ep2": (2, "hybrid-fused", LORA | {"expert_parallel": 2, "lora_layers": "mlp"}, HALVES),
    "moe-ep2-mlp": (2, "moe", LORA | {"expert_parallel": 2, "lora_layers": "mlp"}, HALVES),
    "tp2-full": (2, "tied", TENSOR | {"recompute": "full"}, ONE),
    "dp2": (2, "dense", LORA, HALVES),
    "cp2-mlp": (2, "dense", LORA | {"context_parallel": 2, "lora_layers": "mlp"}, ONE),
}


class Runs:
    """Each case, and in the same jobs the model without adapters and other ways on from a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.models = folder, tiny.make_models(folder / "models")
        kinds = {case[1] for case in CASES.values()}
        self.sequences = {kind: tiny.make_sequences(self.model(kind)) for kind in kinds}
        base = self._case("base", "dense", {"dtype": "float32"}, ONE) | {"do": [("logprobs", TEXT)]}
        self.answers = launcher.run_cases(
            1, [self._full(name) for name in CASES if CASES[name][0] == 1] + [base], folder
        )
        self.answers |= launcher.run_cases(
            2,
            [
                *(self._full(name) for name in CASES if CASES[name][0] == 2),
                self._resumed("tp2-of-tp1", "tp1", TENSOR, ONE),
                self._resumed("dp2-of-tp1", "tp1", LORA, HALVES),
                self._resumed("moe-ep2-of-tp1", "moe-tp1", LORA | {"expert_parallel": 2}, HALVES),
                self._resumed("moe-tp2-of-ep2", "moe-tp2-ep2", TENSOR, ONE),
                self._resumed("mlp-tp2-of-ep2", "moe-ep2-mlp", TENSOR | {"lora_layers": "mlp"}, ONE),
                self._resumed("tp2-again", "tp2", CASES["tp2"][2], ONE),
                self._bfloat16("bfloat16", "dense", TENSOR, ONE),
                self._bfloat16("bfloat16-fused", "hybrid-fused", EIGHT, HALVES),
            ],
            folder,
        )

    def model(self, name: str):
        return AutoModelForCausalLM.from_pretrained(self.models[name], dtype=torch.float32)

    def weights(self, name: str, when: str) -> dict[str, torch.Tensor]:
        files = (self.folder / name / when).glob("*.safetensors")
        return {key: tensor for path in files for key, tensor in load_file(path).items()}

    def factors(self, name: str, when: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of each matrix, as PEFT names them."""
        found = load_file(self.folder / name / when / "adapter" / "adapter_model.safetensors")
        stems = sorted({key.rpartition(".lora_")[0] for key in found})
        return {
            stem.removeprefix("base_model.model."): (
                found[f"{stem}.lora_A.weight"],
                found[f"{stem}.lora_B.weight"],
            )
            for stem in stems
        }

    def _case(self, name: str, model: str, policy: dict, packing: list) -> dict:
        return {
            "name": name,
            "model": str(self.models[model]),
            "policy": policy,
            "optimizer": OPTIMIZER,
            "packing": packing,
            "data": tiny.write_sequences(self.folder / f"{model}.msgpack", self.sequences[model]),
        }

    def _full(self, name: str) -> dict:
        _, model, policy, packing = CASES[name]
        steps = [("train", 1), ("grads", "grads"), ("save", str(self.folder / f"{name}.saved"))]
        rest = [("rest", None), ("train", STEPS - 1), ("logprobs", TEXT), ("export", "after")]
        loss = {"loss": {"kl_coefficient": 0.05}}
        first = [("logprobs", TEXT), ("keep", "first"), ("export", "before")]
        return self._case(name, model, policy, packing) | loss | {"do": [*first, *steps, *rest]}

    def _resumed(self, name: str, of: str, policy: dict, packing: list) -> dict:
        do = [("load", str(self.folder / f"{of}.saved")), ("train", STEPS - 1), ("export", "after")]
        loss = {"loss": {"kl_coefficient": 0.05}}
        return self._case(name, CASES[of][1], policy, packing) | loss | {"do": do}

    def _bfloat16(self, name: str, model: str, policy: dict, packing: list) -> dict:
        do = [
            ("train", STEPS),
            ("export", "v1:base"),
            ("export", "before"),
            ("publish", str(self.folder / name / "run")),
            ("export", "after"),
            ("refuse", "full:1"),
            ("refuse", "delta:0"),
        ]
        return self._case(name, model, policy | {"dtype": "bfloat16"}, packing) | {"do": do}


class Adapted(torch.nn.Module):
    """A linear layer with LoRA as the paper has it: the product of the adapters is added to that of W0."""

    def __init__(self, linear: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + ALPHA / RANK * F.linear(F.linear(inputs, self.a), self.b)


class AdaptedExpert(torch.nn.Module):
    """The adapters of one matrix of an expert."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)


class Experts(torch.nn.Module):
    """Adds the products of adapters to a tensor of all experts, which has one or two matrices of each."""

    def __init__(self, experts: list[list[AdaptedExpert]]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.ModuleList(matrices) for matrices in experts])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        added = [torch.cat([each.b @ each.a for each in matrices]) for matrices in self.experts]
        return weight + ALPHA / RANK * torch.stack(added)


def adapted(model, factors) -> dict[str, Adapted | AdaptedExpert]:
    model.requires_grad_(False)
    found, experts = {}, {name.rpartition(".experts.")[0] for name in factors} - {""}
    for name, (a, b) in factors.items():
        if ".experts." in name:
            found[name] = AdaptedExpert(a.clone(), b.clone())
        else:
            found[name] = Adapted(model.get_submodule(name), a.clone(), b.clone())
            model.set_submodule(name, found[name])
    for name in sorted(experts):
        for whole, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            module, count = model.get_submodule(f"{name}.experts"), tiny.EXPERTS["num_experts"]
            listed = [[found[f"{name}.experts.{n}.{kind}_proj"] for kind in kinds] for n in range(count)]
            parametrize.register_parametrization(module, whole, Experts(listed))
    return found


def reference_steps(runs: Runs, name: str) -> tuple[list[float], list[float], dict, dict]:
    """Losses, norms, gradients of the first step, and factors at the end."""
    kind = CASES[name][1]
    model, frozen = runs.model(kind), runs.model(kind)
    layers = adapted(model, runs.factors(name, "before"))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(sum(tiny._backward(model, frozen, each) for each in runs.sequences[kind]))
        if step == 0:
            grads = {key: (each.a.grad.clone(), each.b.grad.clone()) for key, each in layers.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1e9)))
        optimizer.step()
    return losses, norms, grads, {key: (each.a.data, each.b.data) for key, each in layers.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("lora"))


def apart(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    pairs = [(x, y) for key in expected for x, y in zip(found[key], expected[key], strict=True)]
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_lora_in_plain_torch(runs, name):
    """Losses with a KL from the weights below the adapters, norms, gradients, and three AdamW steps."""
    losses, norms, grads, factors = reference_steps(runs, name)
    for answer in runs.answers[name]:
        assert [m["policy/loss"] for m in answer["metrics"]] == pytest.approx(losses, rel=2e-5, abs=1e-6)
        assert [m["policy/grad_norm"] for m in answer["metrics"]] == pytest.approx(norms, rel=1e-4)
    if name not in (
        "dp2",
        "cp2-mlp",
        "hybrid-fused-ep2",
        "moe-ep2-mlp",
    ):  # whose optimizer divides the gradients among the ranks
        largest = max(float(each.abs().max()) for pair in grads.values() for each in pair)
        limit = 1e-5 * largest if "hybrid" in name else 1e-6  # as of all weights in test_parity.py
        assert apart(runs.factors(name, "grads"), grads) < limit
    assert apart(runs.factors(name, "after"), factors) < 2e-4


def test_new_adapters_change_no_bit(runs):
    """Neither of the log-probabilities nor of the weights, and A does not depend on the ranks."""
    assert runs.answers["tp1"][0]["first"] == runs.answers["base"][0]["scores"]
    source = load_file(runs.models["dense"] / "model.safetensors")
    for name in ("tp1", "tp2", "dp2"):
        assert apart(runs.factors(name, "before"), runs.factors("tp1", "before")) == 0
        assert all(torch.equal(runs.weights(name, "before")[key], each) for key, each in source.items())
    a, b = runs.factors("tp1", "before")["model.layers.3.mlp.down_proj"]
    assert not b.any()
    assert 0.9 / 96**0.5 < a.abs().max() <= 1 / 96**0.5


@pytest.mark.parametrize(
    "name", ["tp1", "tp2-sequence", "cp2-mlp", "hybrid-tp2", "phi-tp2", "hybrid-moe-tp2", "bfloat16"]
)
def test_what_is_published_is_the_base_and_the_adapters_rounded_once(runs, name):
    """So whoever has both can make the weights that engines serve, bit for bit, on any device."""
    kind = CASES[name][1] if name in CASES else "dense"
    source = load_file(runs.models[kind] / "model.safetensors")
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    merged = {key: tensor.to(dtype) for key, tensor in source.items()}
    for key, (a, b) in runs.factors(name, "after").items():
        assert a.dtype == dtype
        base = merged[f"{key}.weight"].double()
        merged[f"{key}.weight"] = (base + ALPHA / RANK * (b.double() @ a.double())).to(dtype)
    found = runs.weights(name, "after")
    assert all(torch.equal(tensor, merged[key]) for key, tensor in found.items())
    assert any(not torch.equal(tensor, source[key]) for key, tensor in found.items())


def test_the_learner_computes_with_what_it_publishes(runs):
    for name in ("tp1", "tp2-sequence", "hybrid-tp2", "hybrid-moe-tp2", "hybrid-fused-ep2"):
        model = AutoModelForCausalLM.from_pretrained(runs.folder / name / "after", dtype=torch.float32)
        with torch.no_grad():
            expected = tiny.score(model, torch.tensor(TEXT))[1:]
        assert (torch.tensor(runs.answers[name][0]["scores"]) - expected).abs().max() < 1e-5


def test_a_checkpoint_holds_adapters_alone_and_resumes_at_any_layout(runs):
    def curve(name: str) -> list[float]:
        return [m["policy/loss"] for m in runs.answers[name][0]["metrics"]][-(STEPS - 1) :]

    assert curve("tp2-again") == curve("tp2")
    assert apart(runs.factors("tp2-again", "after"), runs.factors("tp2", "after")) == 0
    others = {"tp2-of-tp1": "tp1", "dp2-of-tp1": "tp1"}
    others |= {"moe-ep2-of-tp1": "moe-tp1", "moe-tp2-of-ep2": "moe-tp2-ep2"}
    others |= {"mlp-tp2-of-ep2": "moe-ep2-mlp"}
    for name, first in others.items():
        assert curve(name) == pytest.approx(curve(first), rel=1e-5)
        assert apart(runs.factors(name, "after"), runs.factors(first, "after")) < 2e-4
    size = sum(path.stat().st_size for path in (runs.folder / "tp1.saved").glob("*.distcp"))
    assert size < sum(tensor.nbytes for tensor in runs.weights("tp1", "after").values())


def update_message(runs: Runs, name: str, step: int) -> tuple[WeightManifest, dict]:
    """What a supervisor tells an engine about a version, after it verified all files."""
    version = WeightVersion(incarnation=1, step=step)
    folder = RunDir(runs.folder / name / "run").weight(version)
    manifest = folders.manifest(folder, WeightManifest)
    files = folders.verify(folder, manifest, lambda: False)
    model = runs.models["dense" if name == "bfloat16" else "hybrid-fused"]
    parent = None if manifest.parent is None else Weights(manifest.parent, model)
    return manifest, describe(Weights(version, folder, manifest, files, parent))


def loaded_tensors(update: dict) -> dict[str, torch.Tensor]:
    """All tensors, checked as an engine checks them."""
    chain = [Link(Path(each["path"]), each["files"]) for each in (*update["parents"], update)]
    for link in chain:
        link.check()
    names = shapes(chain[0].folder, is_tied=False)
    wanted = Wanted(names, is_tied=False, dtypes=update["dtypes"], digests=update["digests"])
    assert wanted.has_digests
    check_chain(chain, wanted)
    return dict(build(chain, wanted))


def test_an_engine_takes_a_full_version_for_its_merged_weights(runs):
    """Its adapters are verified with it, and are no weights that vLLM loads."""
    manifest, update = update_message(runs, "bfloat16", STEPS)
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} < manifest.files.keys()
    found, expected = loaded_tensors(update), runs.weights("bfloat16", "before")
    assert manifest.parent is None
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16-fused"])
def test_a_delta_is_the_adapters_and_an_engine_merges_them_into_the_model(runs, name):
    """The model is stored in float32 here, and the digests are those of what the learner computes with.

    Adapters of single experts belong to rows of a tensor that has all of them.
    """
    manifest, update = update_message(runs, name, STEPS + 1)
    assert manifest.parent == WeightVersion()
    assert manifest.files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    found, expected = loaded_tensors(update), runs.weights(name, "after")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(each, runs.weights(name, "before")[n]) for n, each in found.items())


@pytest.mark.parametrize("carrier", ["full", "delta"])
def test_an_export_that_one_rank_cannot_write_is_one_error_on_all(runs, carrier):
    """The other rank neither waits for its adapters nor mistakes its error for their tensors."""
    first, second = (answer[f"refused-{carrier}"] for answer in runs.answers["bfloat16"])
    assert first == second
    assert first.startswith("/sys")


def test_rank_0_raises_what_all_ranks_raise_even_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    rank_0 = SimpleNamespace(_ranks=SimpleNamespace(rank=0), _sources=[], _gathered=list)
    with pytest.raises(FloatingPointError), Adapters.writing(rank_0, tmp_path / "file", tmp_path):
        raise FloatingPointError


def test_a_folder_of_adapters_says_what_peft_must_know(runs):
    config = json.loads((runs.folder / "tp1-attention/after/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(runs.models["qwen2"])


@pytest.mark.parametrize(
    "name", ["tp1", "tp1-attention", "cp2-mlp", "hybrid-tp2", "moe-tp1", "hybrid-moe-tp2"]
)
def test_adapters_are_as_large_as_the_estimate_says(runs, name):
    _, model, policy, _ = CASES[name]
    alone = Megatron(**policy | {"tensor_parallel": 1})
    counted = adapter_parameters(ModelShape.read(runs.models[model]), alone)
    assert counted == sum(each.numel() for pair in runs.factors(name, "before").values() for each in pair)
