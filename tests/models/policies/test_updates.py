"""Several optimizer steps a batch, with an entropy bonus: the same numbers as plain torch."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.base.records import float_array, id_array  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

STEPS, BONUS = 2, 0.3
PARTS = [[0], [1, 2], [3]]
"""With three, no two of the four passes that follow one another have the same order but the first two."""
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0}
LOSS = {"objective": "decoupled", "entropy_coefficient": BONUS, "ratio_cap": 1.2}
PACKING = [[[0], [1], [2], [3]]]
MEAN_FAR = 1e-6
"""Mean difference of a weight after twelve steps of 1e-3 each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.make_models(tmp_path_factory.mktemp("models"))["dense"]


def loss_of(model, sequence, before) -> torch.Tensor:
    """The decoupled objective, the square and the bonus, written down apart from the product."""
    tokens = torch.from_numpy(id_array(sequence.token_ids).astype(np.int64))
    sampler, advantages, weights = (
        torch.from_numpy(float_array(data).copy())
        for data in (sequence.logprobs, sequence.advantages, sequence.weights)
    )
    now = tiny.score(model, tokens)
    ratio = torch.exp(now - before)
    surrogate = torch.minimum(ratio * advantages, torch.clip(ratio, 0.8, 1.28) * advantages)
    surrogate = torch.where(advantages < 0, torch.maximum(surrogate, 3 * advantages), surrogate)
    correction = torch.clip(torch.exp(before - sampler), max=1.2)
    distribution = torch.distributions.Categorical(logits=model(tokens[None]).logits[0, :-1])
    entropy = torch.cat((torch.zeros(1), distribution.entropy()))
    square = 0.01 * (now - sampler) ** 2
    return (weights * (square - correction * surrogate - BONUS * entropy)).sum()


def expected(
    folder: Path, sequences, epochs: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses, norms = [], []
    for step in range(STEPS):
        with torch.no_grad():
            tokens = [torch.from_numpy(id_array(s.token_ids).astype(np.int64)) for s in sequences]
            before = [tiny.score(model, each) for each in tokens]
        found, sizes = [], []
        for epoch in range(epochs):
            for part in np.random.default_rng((step, epoch)).permutation(len(PARTS)):
                optimizer.zero_grad()
                for index in PARTS[part]:
                    loss = loss_of(model, sequences[index], before[index])
                    loss.backward()
                    found.append(loss.item())
                sizes.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
                optimizer.step()
        losses.append(sum(found) / epochs / len(PARTS))
        norms.append(sum(sizes) / len(sizes))
    return losses, norms, {name: parameter.data for name, parameter in model.named_parameters()}


def test_minibatches_and_epochs_are_those_of_plain_torch(model, tmp_path):
    """One pass of several steps, too: the later ones are clipped around the weights before the batch."""
    sequences = tiny.make_sequences(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    common = {
        "model": str(model),
        "policy": {"dtype": "float32", "tensor_parallel": 2},
        "loss": LOSS,
        "packing": PACKING,
        "minibatches": [len(part) for part in PARTS],
        "data": tiny.write_sequences(tmp_path / "data", sequences),
        "do": [("train", STEPS), ("export", "after")],
    }
    cases = [common | {"name": str(n), "optimizer": OPTIMIZER | {"epochs": n}} for n in (1, 2)]
    answers = launcher.run_cases(2, cases, tmp_path / "out")
    for epochs in (1, 2):
        compare(answers[str(epochs)][0], tmp_path / "out" / str(epochs), expected(model, sequences, epochs))


def compare(answer: dict, folder: Path, wanted: tuple[list[float], list[float], dict[str, torch.Tensor]]):
    losses, norms, weights = wanted
    assert [m["policy/loss"] for m in answer["metrics"]] == pytest.approx(losses, rel=2e-5, abs=1e-6)
    assert [m["policy/grad_norm"] for m in answer["metrics"]] == pytest.approx(norms, rel=1e-4)
    assert {m["policy/skipped"] for m in answer["metrics"]} == {0.0}
    assert answer["step"] == STEPS
    found = {}
    for path in (folder / "after").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == weights.keys()
    # Where a gradient is near 0 Adam's step follows its sign, and so the rounding of this processor.
    far = torch.cat([(found[name] - weight).abs().flatten() for name, weight in weights.items()])
    assert far.mean() < MEAN_FAR
    assert far.max() < OPTIMIZER["lr"]
