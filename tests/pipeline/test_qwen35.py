"""A run on a tiny Qwen3.5, after a warm start: its engine and its learner are killed once each."""

import itertools
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.store import weights  # noqa: E402
from hpc_swe.demo import model as demo  # noqa: E402
from hpc_swe.launch import existing  # noqa: E402
from hpc_swe.models.model_shape import read_config  # noqa: E402
from hpc_swe.tasks.sets.bugs import Bugs  # noqa: E402
from tests.kit.checkout import ROOT, STAND_INS  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.pipeline.test_killed_run import Killer, curves  # noqa: E402

STEPS, WARM = 3, 220
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 128,  # of which vLLM has kernels on a CPU
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
}


def make_hybrid(folder: Path) -> Path:
    """The tokenizer and the template of the demo's model, with other weights."""
    demo.make(folder, itertools.islice(Bugs().demonstrations(seed=0), demo.CONVERSATIONS), 3)
    made = read_config(folder)
    ids = {key: made[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    return save_random(folder, "Qwen3_5", demo.SIZES | ids | HYBRID, 3)


@pytest.fixture(scope="module")
def killed(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    warm = [f"model={make_hybrid(folder / 'model')}", f"steps={WARM}", f"learner.export_every={WARM}"]
    first = small_run("warm-hybrid", "demo_sft", *warm, f"learner.checkpoint_every={WARM}")
    version = weights.newest(first)
    assert version is not None
    words = [
        f"model={first.weight(version)}",
        f"steps={STEPS}",
        "learner.checkpoint_every=2",
        "learner.optimizer.lr=3e-4",  # a first step of 1e-3 can leave a policy without any signal
        "learner.optimizer.warmup_steps=0",
        "engine.dtype=bfloat16",
        "policy.dtype=bfloat16",
        "policy.tensor_parallel=1",
        "groups.max_staleness=0",  # so that all tokens are of the weights that the learner begins a step with
        "eval.every=0",
    ]
    killer = Killer(folder / "batches", ["engine", "learner"])
    with pytest.MonkeyPatch.context() as patch:
        if not find_spec("torchvision"):
            patch.syspath_prepend(str(STAND_INS))  # of who starts the run; and of its jobs
            patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(STAND_INS))))
        run = small_run("hybrid-model", *words, each=killer)
    killer(run)
    assert killer.killed == ["engine", "learner"]
    return run, killer.books


def test_the_books_of_a_run_on_a_hybrid_model_are_right(killed):
    run, books = killed
    assert books.complaints(existing.load(run)) == []
    newest = weights.newest(run)
    assert newest is not None
    assert newest.incarnation > 1, "the learner was never started again"


def test_an_engine_samples_from_the_learners_newest_weights(killed):
    """Weights that are one step old have a k3 of .0001 to .0004, and bfloat16 alone one of .00001."""
    lines = [line for line in curves(killed[0], "learner") if "gap/k3" in line]
    assert {line["step"] for line in lines} == set(range(STEPS))
    assert max(line["gap/k3"] for line in lines) < 6e-5
    assert all(line["policy/grad_norm"] > 0 for line in lines)
