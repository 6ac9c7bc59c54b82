"""The command for the learner's benchmark, on the CPU with a tiny shape."""

import pytest

from hpc_swe.base.errors import NodeError
from hpc_swe.view.benchmarks.ranks import run_ranks
from tests.kit.checkout import typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "5B"], "--shape '5B' is none of"),
        (["--lengths", "8k"], "--lengths '8k'"),
        (["policy.recompute=sometimes"], "sometimes"),
        (["learner.loss.clip_low=1"], "keys of [policy] only"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words, message):
    done = typed("hpc_swe.benchmarks.learner", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_failed_rank_says_why(tmp_path):
    with pytest.raises(
        NodeError, match=r"rank 0 of the benchmark: exit code 1; its last lines:(.|\n)*No mod"
    ):
        run_ranks(1, "hpc_swe.no_such_module", (), tmp_path, 60.0, gpu=False)


def test_ranks_that_do_not_end_are_ended(tmp_path):
    with pytest.raises(NodeError, match="not done after 1 s"):
        run_ranks(2, "http.server", ("0",), tmp_path, 1.0, gpu=False)


@pytest.mark.slow
def test_a_shape_with_delta_nets_and_experts_needs_no_files(tmp_path):
    """Though a folder may have tensors beside those of its text model, and experts in two forms."""
    pytest.importorskip("megatron.core")
    from transformers import Qwen3_5MoeTextConfig

    from tests.kit.ranks import tiny

    sizes = tiny.SIZES | tiny.HYBRID | tiny.EXPERTS | {"shared_expert_intermediate_size": 48}
    Qwen3_5MoeTextConfig(**sizes).save_pretrained(tmp_path)
    words = ("--shape", tmp_path, "--warm", "1", "--steps", "1", "policy.dtype=float32")
    done = typed("hpc_swe.benchmarks.learner", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_train_and_the_table_has_all_figures():
    pytest.importorskip("megatron.core")
    words = ("--warm", "1", "--steps", "1", "--mask-share", "0.5", "--ranks", "2", "--profile")
    done = typed("hpc_swe.benchmarks.learner", *words, "policy.dtype=float32", "policy.recompute=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if len(line.split()) > 1)
    assert cells["recompute"] == "none"
    assert float(cells["tokens/s"].replace(",", "")) > 0
    assert float(cells["loss"]) == float(cells["loss"]), "it is a number"
    assert "aten::mm" in done.stdout, "the profile names the products"
